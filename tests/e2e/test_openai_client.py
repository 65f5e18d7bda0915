"""The openai package against a server with the bundled model: nothing between them is a stand-in."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.openai_client import openai_python
from tests.distributed.launched import PYTHON, Launched


@pytest.mark.timeout(300)
def test_every_way_of_asking(tmp_path: Path) -> None:
    """Sync, async, streams, tools and structured output; the counts of both sides agree."""
    options = ("--num-cache-blocks", "64", "--max-model-len", "1024", "--cache-format", "fp32")
    with Launched(PYTHON, *options, log=tmp_path / "log") as launched:
        launched.wait_ready()
        found = openai_python(launched.port)
    for what in ("requests", "prompt_tokens", "output_tokens"):
        assert found[what][0] == found[what][1] > 0, found
