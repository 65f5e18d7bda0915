"""Clients that leave, against the whole engine: the blocks of their sequences are free again within a second."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest

from benchmarks.serving import scrape
from tests.distributed.launched import PYTHON, Launched, posted


def blocks_in_use(port: int) -> float:
    figures = scrape(port)
    return figures["cache_blocks"] - figures["cache_blocks_free"] - figures["cache_blocks_reusable"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_blocks_free_after_a_disconnect(tmp_path: Path) -> None:
    """Report S13: mid-prefill and mid-stream, streaming or not."""
    options = ("--num-cache-blocks", "64", "--max-model-len", "2048", "--max-num-batched-tokens", "32")
    with Launched(PYTHON, *options, log=tmp_path / "log") as launched:
        launched.wait_ready()
        for prompt_tokens, streaming in ((1900, False), (1900, True), (4, False), (4, True)):
            body = {"prompt": [100 + i % 1000 for i in range(prompt_tokens)], "max_tokens": 100, "ignore_eos": True}
            with socket.create_connection(("127.0.0.1", launched.port)) as client:
                client.sendall(posted(body | {"stream": streaming}))
                limit = time.monotonic() + 60
                while launched.get("/load")["num_running"] == 0 and blocks_in_use(launched.port) == 0:
                    assert time.monotonic() < limit
                    time.sleep(0.02)
                time.sleep(0.3)
                assert launched.get("/load")["num_open"] == 1
            left = time.monotonic()
            while launched.get("/load")["num_open"] or blocks_in_use(launched.port):
                assert time.monotonic() < left + 30
                time.sleep(0.02)
            freed = time.monotonic() - left
            print(f"{prompt_tokens} prompt tokens, streaming {streaming}: free after {freed:.2f} s")
            figures = scrape(launched.port)
            step = figures["engine_step_seconds_total"] / figures["engine_steps_total"]
            assert freed < 1.0 + 2 * step  # the step in flight ends first
        assert "cache leak" not in launched.text()
