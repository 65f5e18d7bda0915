"""lm_eval through the server, on tasks written here: nothing is fetched. Needs the command `lm_eval` on the PATH.

A task is rows of (question, answer). "score" tasks take log probabilities of the answers, "text" tasks generate them.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from engine.hub import resolve_model

KINDS: dict[str, dict[str, Any]] = {
    "score": {"output_type": "loglikelihood", "metric_list": [{"metric": "acc"}, {"metric": "perplexity"}]},
    "text": {
        "output_type": "generate_until",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 16, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}


def write_task(folder: Path, name: str, kind: str, rows: Iterable[tuple[str, str]], **more: Any) -> None:
    """A task's data and description. more: fields of the description beside its kind's."""
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps({"question": question, "answer": answer}) + "\n" for question, answer in rows))
    task = {
        "task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test",
        "doc_to_text": "{{question}}", "doc_to_target": "{{answer}}",
    }  # fmt: skip
    (folder / f"{name}.yaml").write_text(json.dumps(task | KINDS[kind] | more))  # JSON is YAML


def evaluate(
    port: int, folder: Path, tasks: Sequence[str], *, chat: bool = False, concurrency: int = 4, max_length: int = 2048
) -> dict[str, Any]:
    """lm_eval's report on tasks of `folder`, with one entry a row and task under "samples"."""
    kind, path, more, flags = (
        "local-completions",
        "/v1/completions",
        f",tokenizer_backend=huggingface,tokenizer={resolve_model('demo')}",
        [],
    )
    if chat:
        kind, path, more, flags = "local-chat-completions", "/v1/chat/completions", "", ["--apply_chat_template"]
    arguments = f"model=demo,base_url=http://127.0.0.1:{port}{path},num_concurrent={concurrency},max_length={max_length}{more}"
    output = folder / kind
    run(
        ["lm_eval", "--model", kind, "--model_args", arguments, "--tasks", ",".join(tasks), "--include_path", str(folder),
         "--output_path", str(output), "--log_samples", *flags],
        folder,
    )  # fmt: skip
    (report,) = output.rglob("results_*.json")
    found = json.loads(report.read_text())
    found["samples"] = {}
    for name in tasks:
        (lines,) = output.rglob(f"samples_{name}_*.jsonl")
        found["samples"][name] = sorted(map(json.loads, lines.read_text().splitlines()), key=lambda line: line["doc_id"])
    return found


def run(command: list[str], folder: Path) -> str:
    """Output of a client; offline, so that it can only use what is here. Raises RuntimeError with its end when it fails."""
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OPENAI_API_KEY": "none"}
    done = subprocess.run(command, env=os.environ | offline, cwd=folder, capture_output=True, text=True, timeout=900)
    if done.returncode:
        raise RuntimeError(f"{command} ended with {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return done.stdout + done.stderr
