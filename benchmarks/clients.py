"""Clients that people have, unmodified, beside the server's own figures: `python -m benchmarks.clients`.

Needs the commands `guidellm` and `lm_eval` on the PATH (neither is a dependency of ours). guidellm's token and request
counts must equal `/metrics`, its mean latencies are compared with them; lm_eval runs a scoring and a generating task on data
written here, through the completions and the chat route; the openai package asks in every way it has. All of it is answered
by the bundled model. Appends one JSON line to results/clients.jsonl.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.lm_eval_local import evaluate, run, write_task
from benchmarks.openai_client import openai_python
from benchmarks.records import RESULTS, append, machine_state
from benchmarks.serving import scrape
from engine.hub import resolve_model
from tests.distributed.launched import PYTHON, Launched

STREAMS, REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 4, 32, 512, 32
QUESTIONS = {
    "In the beginning God created the heaven and the": " earth",
    "The king said unto his": " servants",
    "And it came to pass in those": " days",
    "She walked down to the sea and": " saw",
    "Blessed are they that": " mourn",
    "He was the son of": " David",
}


def guidellm(port: int, folder: Path) -> dict[str, Any]:
    """A load run; [client, server] of every count, and by how many percent the server's means differ."""
    report = folder / "guidellm.json"
    before = scrape(port)
    run(
        ["guidellm", "run", "--backend", f"kind=openai_http,target=http://127.0.0.1:{port},model=demo",
         "--profile", f"kind=concurrent,streams={STREAMS}", "--constraint", f"kind=max_requests,count={REQUESTS}",
         "--tokenizer", f"kind=hf_auto,model={resolve_model('demo')}",
         "--data", f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}",
         "--output", f"kind=json,path={report}", "--disable-progress"],
        folder,
    )  # fmt: skip
    after = scrape(port)
    delta = {name: after[name] - before.get(name, 0.0) for name in after}
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    figures = {name: entry["successful"] for name, entry in benchmark["metrics"].items() if "successful" in (entry or {})}

    def difference(server: str, client: str, scale: float) -> float:
        return 100 * (delta[f"{server}_sum"] / delta[f"{server}_count"] / (figures[client]["mean"] * scale) - 1)

    return {
        "requests": [figures["request_latency"]["count"], delta["request_success_total"]],
        "prompt_tokens": [figures["prompt_token_count"]["total_sum"], delta["prompt_tokens_total"]],
        "output_tokens": [figures["output_token_count"]["total_sum"], delta["generation_tokens_total"]],
        "mean_difference_percent": {
            "e2e": difference("e2e_request_latency_seconds", "request_latency", 1.0),
            "ttft": difference("time_to_first_token_seconds", "time_to_first_token_ms", 1e-3),
            "itl": difference("inter_token_latency_seconds", "inter_token_latency_ms", 1e-3),
        },
    }


def lm_eval(port: int, folder: Path) -> dict[str, Any]:
    """Results of a scoring and a generating task on the completions route, of the latter on the chat route."""
    write_task(folder, "local_score", "score", QUESTIONS.items())
    write_task(folder, "local_text", "text", QUESTIONS.items())
    return {
        "local-completions": evaluate(port, folder, ["local_score", "local_text"])["results"],
        "local-chat-completions": evaluate(port, folder, ["local_text"], chat=True)["results"],
    }


def main() -> None:
    for name in ("guidellm", "lm_eval"):
        if shutil.which(name) is None:
            raise SystemExit(f"{name} is not on the PATH; install it in an environment of its own")
    folder = Path(tempfile.mkdtemp())
    options = ("--num-cache-blocks", "512", "--max-model-len", "2048", "--cache-format", "fp32")  # equal at any batch size
    with Launched(PYTHON, *options, log=folder / "log") as launched:
        launched.wait_ready()
        for _ in range(3):
            launched.post("/v1/completions", prompt="warm", max_tokens=8)
        result = {
            "guidellm": guidellm(launched.port, folder),
            "lm_eval": lm_eval(launched.port, folder),
            "openai": openai_python(launched.port),
        }
        log = launched.log.read_text()
    result |= {"server_errors": log.count('"status":5'), "machine": machine_state("cpu")}
    print(json.dumps(result, indent=1))
    append(RESULTS / "clients.jsonl", result)


if __name__ == "__main__":
    main()
