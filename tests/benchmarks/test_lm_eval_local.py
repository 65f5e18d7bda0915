"""Local tasks for lm_eval, with a stand-in for its command that keeps to its options and its files."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from benchmarks.lm_eval_local import evaluate, write_task
from benchmarks.quality import CONTEXT_WORDS, _next_word

COMMAND = """#!{python}
import json, os, pathlib, sys
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
assert os.environ["HF_HUB_OFFLINE"] == "1" and "base_url=http://127.0.0.1:81/v1/completions" in options["--model_args"]
folder = pathlib.Path(options["--output_path"]) / "demo"
folder.mkdir(parents=True)
report = {{}}
for name in options["--tasks"].split(","):
    task = json.loads((pathlib.Path(options["--include_path"]) / f"{{name}}.yaml").read_text())
    rows = [json.loads(row) for row in pathlib.Path(task["dataset_kwargs"]["data_files"]["test"]).read_text().splitlines()]
    report[name] = len(rows)
    samples = [json.dumps({{"doc_id": i, "doc": row}}) for i, row in enumerate(rows)]
    (folder / f"samples_{{name}}_2026.jsonl").write_text("\\n".join(reversed(samples)))
(folder / "results_2026.json").write_text(json.dumps({{"results": report}}))
"""


def test_rows_come_back_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = tmp_path / "lm_eval"
    command.write_text(COMMAND.format(python=sys.executable))
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    rows = [("one", " a"), ("two", " b"), ("three", " c")]
    write_task(tmp_path, "words", "score", rows)
    write_task(tmp_path, "texts", "text", rows[:1], filter_list=[])
    assert json.loads((tmp_path / "texts.yaml").read_text())["filter_list"] == []
    found = evaluate(81, tmp_path, ["words", "texts"])
    assert found["results"] == {"words": 3, "texts": 1}
    assert [line["doc"]["question"] for line in found["samples"]["words"]] == ["one", "two", "three"]


def test_a_client_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = tmp_path / "lm_eval"
    command.write_text("#!/bin/sh\necho no such task; exit 3\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(RuntimeError, match="ended with 3:\nno such task"):
        evaluate(81, tmp_path, [])


def test_scored_words_lie_all_over_a_document() -> None:
    text = [str(i) for i in range(500)]
    found = [_next_word(text, index, 40) for index in range(40)]
    assert all(question.split(" ")[-1] == str(int(answer) - 1) and answer[0] == " " for question, answer in found)
    assert {len(question.split(" ")) for question, _ in found} == {CONTEXT_WORDS}
    places = [int(answer) for _, answer in found]
    assert places[0] == CONTEXT_WORDS and places[-1] > 480 and len(set(places)) == 40
