"""The batch runner: every line exactly once, whatever happened before; bad lines named; same bodies as the server's."""

from __future__ import annotations

import codecs
import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from engine.batch_file import InputLine, OutputFile, read_defaults, read_lines
from engine.errors import ConfigError
from engine.hub import resolve_model
from engine.messages import AddRequest, RequestFailed, TokenOutput
from engine.offline import BatchRunner, main
from engine.served_model import ServedModel
from tests.engine.fake_engine import FakeEngine

ROOT = Path(__file__).resolve().parents[2]
MODEL = ServedModel.load(resolve_model("demo"), name="demo", max_model_len=256)
CHAT = {
    "custom_id": "c",
    "method": "POST",
    "url": "/v1/chat/completions",
    "body": {"messages": [{"role": "user", "content": "Hi"}]},
}
COMPLETION = {"custom_id": "p", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Hello", "model": "demo"}}


def run(tmp_path: Path, lines: list[bytes], engine: FakeEngine | None = None, **options: Any) -> list[dict[str, Any]]:
    """Records by line number."""
    (tmp_path / "in.jsonl").write_bytes(b"\n".join(lines))
    output = OutputFile(tmp_path / "out.jsonl")
    engine = engine or FakeEngine(MODEL.tokenizer, lambda _: "an answer")
    runner = BatchRunner(
        engine, MODEL, output, defaults=options.pop("defaults", {}), max_in_flight=options.pop("max_in_flight", 4)
    )
    runner.run(line for line in read_lines(tmp_path / "in.jsonl") if not output.has(line))
    output.close()
    records = [json.loads(line) for line in (tmp_path / "out.jsonl").read_bytes().splitlines()]
    return sorted(records, key=lambda record: int(record["id"].split("-")[0]))


def encoded(*values: Any) -> list[bytes]:
    return [json.dumps(value).encode() for value in values]


def test_all_forms_of_lines(tmp_path: Path) -> None:
    lines = encoded(
        "Hello",
        {"prompt": "Hello", "max_tokens": 2},
        {"messages": CHAT["body"]["messages"]},
        CHAT,
        COMPLETION,
        {"prompt": "a", "n": 3},
    )
    records = run(tmp_path, [*lines[:2], b"", b"  ", *lines[2:]])
    assert [record["error"] for record in records] == [None] * 6
    bodies = [record["response"]["body"] for record in records]
    assert [body["object"] for body in bodies] == ["text_completion"] * 2 + ["chat.completion"] * 2 + ["text_completion"] * 2
    assert bodies[0]["choices"][0]["text"] == bodies[2]["choices"][0]["message"]["content"] == "an answer"
    assert bodies[1]["choices"][0]["finish_reason"] == "length" and bodies[1]["usage"]["completion_tokens"] == 2
    assert [record["custom_id"] for record in records] == [None, None, None, "c", "p", None]
    assert [choice["index"] for choice in bodies[5]["choices"]] == [0, 1, 2]
    assert all(record["response"]["status_code"] == 200 for record in records)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"not json", "not JSON"),
        (b'{"prompt": "a"', "not JSON"),
        (b'{"prompt": "\xff"}', "not UTF-8"),
        (b"\x00\x01", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[1, 2]", "JSON object or a text"),
        (b"{}", "either prompt or messages"),
        (b'{"prompt": "a", "messages": []}', "either prompt or messages"),
        (b'{"prompt": "a", "foo": 1}', "foo: this field is not supported"),
        (b'{"prompt": "a", "stream": true}', "stream: a batch has no streams"),
        (b'{"prompt": "a", "data_parallel_rank": 1}', "data_parallel_rank"),
        (b'{"prompt": "a", "model": "gpt"}', "'gpt' is not served here"),
        (b'{"prompt": "a", "custom_id": 5}', "custom_id: must be a text"),
        (b'{"prompt": [999999999]}', "out of range"),
        (b'{"prompt": "a", "max_tokens": 100000}', "context of 256"),
        (b'{"custom_id": "x", "url": "/v1/embeddings", "body": {}}', "url: must be one of"),
        (b'{"custom_id": "x", "url": "/v1/completions", "body": 5}', "body: must be"),
        (b'{"custom_id": "x", "method": "GET", "url": "/v1/completions", "body": {}}', "method"),
        (b'{"url": "/v1/completions", "body": {}}', "custom_id: is required"),
        (b'{"custom_id": "x", "url": ["/v1/completions"], "body": {}}', "url: must be one of"),
        (b'{"custom_id": "x", "url": "/v1/completions", "body": {"prompt": "a"}, "extra": 1}', "extra"),
    ],
)
def test_bad_lines_become_error_records(tmp_path: Path, line: bytes, message: str) -> None:
    records = run(tmp_path, [*encoded("before"), line, *encoded("after")])
    assert [record["error"] is None for record in records] == [True, False, True]
    error = records[1]["error"]
    assert error["message"].startswith("line 2: ") and message in error["message"] and records[1]["response"] is None


def test_custom_ids_are_unique(tmp_path: Path) -> None:
    records = run(tmp_path, encoded(CHAT, COMPLETION, CHAT))
    assert records[2]["error"]["param"] == "custom_id" and "line 1" in records[2]["error"]["message"]


def test_defaults_fill_what_lines_leave_out(tmp_path: Path) -> None:
    records = run(tmp_path, encoded("a", {"prompt": "a", "max_tokens": 1}), defaults={"max_tokens": 2})
    assert [record["response"]["body"]["usage"]["completion_tokens"] for record in records] == [2, 1]


def test_defaults_of_either_kind_of_line_are_taken() -> None:
    read_defaults(json.dumps({"max_tokens": 3, "echo": True}))
    read_defaults(json.dumps({"chat_template_kwargs": {"thinking": True}}))


@pytest.mark.parametrize(
    ("defaults", "words"),
    [
        ({"stream": True}, "stream: a batch has no streams"),
        ({"data_parallel_rank": 1}, "data_parallel_rank: a batch runs on one replica"),
        ({"messages": []}, "messages: is what each line of the input brings"),
        ({"prompt": "x"}, "prompt: is what each line of the input brings"),
    ],
)
def test_defaults_that_no_line_could_use_are_refused_once(defaults: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=f"--defaults: {words}"):
        read_defaults(json.dumps(defaults))


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path: Path) -> None:
    records = run(tmp_path, [codecs.BOM_UTF8 + encoded("a")[0], *encoded("b")])
    assert [record["error"] for record in records] == [None, None]


def test_failures_of_the_engine_stay_in_their_line(tmp_path: Path) -> None:
    """Report T13: a failed request and an id outside the vocabulary; all other lines are answered."""

    class Failing(FakeEngine):
        def step(self) -> list[TokenOutput | RequestFailed]:
            outputs: list[TokenOutput | RequestFailed] = []
            for output in super().step():
                number = output.request_id.split("-")[0]
                if number == "2":
                    self.abort(output.request_id)
                    outputs.append(RequestFailed(output.request_id, "NaN in the logits", code="internal"))
                elif number == "3":
                    outputs.append(TokenOutput(output.request_id, [10**9]))
                else:
                    outputs.append(output)
            return outputs

    records = run(
        tmp_path, encoded("a", {"prompt": "b", "n": 3}, {"prompt": "c", "n": 2}, "d"), Failing(MODEL.tokenizer, lambda _: "ok")
    )
    assert [record["error"] is None for record in records] == [True, False, False, True]
    assert "NaN" in records[1]["error"]["message"] and "out of range" in records[2]["error"]["message"]


def test_stop_strings_end_the_request_in_the_engine(tmp_path: Path) -> None:
    engine = FakeEngine(MODEL.tokenizer, lambda _: "one two three")
    records = run(tmp_path, encoded({"prompt": "a", "stop": " two", "max_tokens": 100}), engine)
    assert records[0]["response"]["body"]["choices"][0]["text"] == "one" and engine.aborted == [("1-0", "stop")]


def test_no_more_than_max_in_flight(tmp_path: Path) -> None:
    class Counting(FakeEngine):
        most = 0

        def add(self, request: AddRequest) -> None:
            super().add(request)
            self.most = max(self.most, len(self._live))

    engine = Counting(MODEL.tokenizer, lambda _: "x")
    assert len(run(tmp_path, encoded(*["a"] * 50), engine, max_in_flight=3)) == 50
    assert engine.most == 3


def test_resume_repairs_a_torn_line_and_redoes_nothing(tmp_path: Path) -> None:
    lines = encoded(*[f"prompt {i}" for i in range(30)])
    run(tmp_path, lines[:20])
    path = tmp_path / "out.jsonl"
    whole = path.read_bytes()
    kept = b"".join(whole.splitlines(keepends=True)[:10])
    for torn in (b"", whole[len(kept) : len(kept) + 40], b'{"id":"3-'):
        path.write_bytes(kept + torn)
        records = run(tmp_path, lines)
        assert [int(record["id"].split("-")[0]) for record in records] == list(range(1, 31))
        assert path.read_bytes().startswith(kept)


def test_an_output_of_another_input_is_refused(tmp_path: Path) -> None:
    run(tmp_path, encoded("a", "b"))
    output = OutputFile(tmp_path / "out.jsonl")
    with pytest.raises(ConfigError, match="another input"):
        output.has(InputLine(2, b'"changed"'))
    with pytest.raises(ConfigError, match="another run"):
        OutputFile(tmp_path / "out.jsonl")
    output.close()


@pytest.mark.parametrize("text", [b'{"something": "else"}\n', b"notes", b'{"something": "else"}', b'{"id":"1-a"}\nnotes'])
def test_a_file_of_another_kind_is_refused_and_kept(tmp_path: Path, text: bytes) -> None:
    """A text without a line break at its end is no torn record."""
    path = tmp_path / "out.jsonl"
    path.write_bytes(text)
    with pytest.raises(ConfigError, match="not written by this command"):
        OutputFile(path)
    assert path.read_bytes() == text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--input", "absent.jsonl"], "no such file"),
        (["--defaults", "{"], "--defaults"),
        (["--defaults", "[]"], "--defaults"),
        (["--defaults", '{"max_tokns": 3}'], "--defaults: max_tokns"),
        (["--defaults", '{"temperature": "hot"}'], "--defaults: temperature"),
        (["--dp", "2"], "one process"),
        (["--max-in-flight", "-1"], "--max-in-flight"),
        (["--output", "in.jsonl"], "is the input"),
        (["--output", "no/such/folder.jsonl"], "cannot be written"),
        (["--output", "/dev/full"], "must be a regular file"),
        (["--output", "pipe"], "must be a regular file"),
        (["--input", "pipe"], "no regular one"),
        (["--chat-template", "absent.jinja"], "absent.jinja"),
        (["--model", "/no/such/model"], "no such folder"),
    ],
)
def test_wrong_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("engine.llm.build_core", lambda *_: pytest.fail("weights were read"))
    Path("in.jsonl").write_text('"a"\n')
    os.mkfifo("pipe")
    assert main(["--input", "in.jsonl", "--output", "out.jsonl", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_full_disk_is_named_and_resumed_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write

    def half(file: int, data: bytes) -> int:
        if tmp_path.joinpath("out.jsonl").stat().st_size:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data[: len(data) // 2])

    monkeypatch.setattr(os, "write", half)
    with pytest.raises(ConfigError, match=r"out\.jsonl: cannot be written: No space left"):
        run(tmp_path, encoded("a"))
    monkeypatch.undo()
    (tmp_path / "again").mkdir()
    (tmp_path / "again" / "out.jsonl").write_bytes((tmp_path / "out.jsonl").read_bytes())
    assert len(run(tmp_path / "again", encoded("a"))) == 1


def test_an_input_that_lost_lines_is_refused(tmp_path: Path) -> None:
    run(tmp_path, encoded("a", "b"))
    (tmp_path / "short.jsonl").write_bytes(encoded("a")[0] + b"\n")
    command = [sys.executable, "-m", "engine.offline", "--input", str(tmp_path / "short.jsonl")]
    done = subprocess.run([*command, "--output", str(tmp_path / "out.jsonl")], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "lines that the input lacks" in done.stderr


def test_killed_at_half_and_started_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The real command on the demo model, killed with SIGKILL at half of 200 lines: every line exactly once."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    bodies = [{"prompt": f"Verse {i}", "max_tokens": 2 + i % 3, "seed": i} for i in range(199)]
    source.write_bytes(b"\n".join([*encoded(*bodies), b"{broken"]) + b"\n")
    command = [sys.executable, "-m", "engine.offline", "--input", str(source), "--output", str(target), "--quiet"]
    command += ["--model", "demo", "--device", "cpu", "--max-num-seqs", "16", "--cache-memory-bytes", str(64 << 20)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
    while process.poll() is None and (not target.exists() or target.read_bytes().count(b"\n") < 100):
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = target.read_bytes()
    complete = before[: before.rindex(b"\n") + 1]
    assert 100 <= complete.count(b"\n") < 200
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in target.read_bytes().splitlines()]
    assert sorted(int(record["id"].split("-")[0]) for record in records) == list(range(1, 201))
    assert target.read_bytes().startswith(complete)
    assert [record["id"].split("-")[0] for record in records if record["error"]] == ["200"]
    for record in records:
        if record["response"]:
            index = int(record["id"].split("-")[0]) - 1
            assert 1 <= record["response"]["body"]["usage"]["completion_tokens"] <= bodies[index]["max_tokens"]
    assert main(command[3:]) == 0
    assert "all 200 lines are done" in capsys.readouterr().out and len(target.read_bytes().splitlines()) == 200
