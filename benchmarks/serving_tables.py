"""Tables on serving, from results of serving.jsonl, clients.jsonl and soak.jsonl.

serving   processor time per token, the way of a token to its socket, and the server's figures beside the client's
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.records import newest, read
from benchmarks.tables import markdown

LATENCIES = {
    "ttft": "TTFT",
    "itl": "ITL",
    "time_to_first_token_seconds": "TTFT",
    "inter_token_latency_seconds": "ITL",
    "e2e_request_latency_seconds": "e2e",
}


def _percents(differences: dict[str, float]) -> str:
    return ", ".join(f"{LATENCIES.get(name, name)} {value:+.1f} %" for name, value in sorted(differences.items()))


def serving(results: Path) -> list[str] | None:
    """One row a machine and number of streams, of the newest lines; clients and soak below."""
    lines = [line | {"device": line["machine"]["device"]} for line in read(results / "serving.jsonl") if "cores" in line]
    rows: list[Sequence[object]] = []
    for line in newest(lines, "device", "cores", "concurrency"):
        delivery = line["delivery_ms"]
        rows.append(
            (f"{line['device']}, {line['cores']} cores, {line['machine']['date'][:10]}", line["concurrency"], f"{line['output_tokens_per_s']:,.0f}",
             f"{line['front_end_and_transport_cpu_us_per_token']:.0f} us", f"{delivery['p50']:g} / {delivery['p99']:g} ms",
             f"{100 * line['step_share_outside_model']:.1f} %", _percents(line["client_and_server"]["mean_difference_percent"]))
        )  # fmt: skip
    if not rows:
        return None
    head = ["machine", "streams", "tokens/s", "front end and transport, per token", "arrival to socket, p50 / p99 at most",
            "step outside the model", "server's means against the client's"]  # fmt: skip
    return [*markdown(head, rows), *_clients(results), *_soak(results)]


def _clients(results: Path) -> list[str]:
    lines = read(results / "clients.jsonl")
    if not lines:
        return []
    found = lines[-1]["guidellm"]
    counts = all(client == server for client, server in (found[key] for key in ("requests", "prompt_tokens", "output_tokens")))
    equal = "equal" if counts else "DIFFERENT"
    return [
        "",
        f"guidellm against `/metrics`: counts {equal}, the server's means {_percents(found['mean_difference_percent'])}.",
    ]


def _soak(results: Path) -> list[str]:
    lines = read(results / "soak.jsonl")
    if not lines:
        return []
    line = lines[-1]
    return [
        f"Soak, {line['minutes']:g} minutes of mixed traffic on two CPU replicas: {sum(line['seen'].values()):,} requests, "
        f"{line['preemptions']:.0f} preemptions, {line['wrong']} wrong answers, {line['blocks_left']:.0f} blocks and "
        f"{max(0, *line['descriptors_grown'].values())} descriptors lost."
    ]


TABLES: dict[str, Callable[[Path], list[str] | None]] = {"serving": serving}
