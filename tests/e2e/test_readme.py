"""The serving examples of the README, executed as they stand against a launched server."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from engine.launch import parse
from tests.distributed.launched import PYTHON, SMALL, Launched

README = Path(__file__).resolve().parents[2] / "README.md"


def section() -> str:
    """The text of `## Serve`."""
    found = re.search(r"^## Serve\n(.*?)(?=^## |\Z)", README.read_text(), re.DOTALL | re.MULTILINE)
    if found is None:
        pytest.skip("the README has no section on serving")
    return found[1]


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", section(), re.DOTALL | re.MULTILINE)


@pytest.mark.timeout(400)
def test_examples_run(tmp_path: Path) -> None:
    shell, python = blocks("bash"), blocks("python")
    assert shell and python
    with Launched(PYTHON, *SMALL, log=tmp_path / "log") as launched:
        launched.wait_ready()
        outputs = []
        for language, source in [("bash", text) for text in shell] + [("python", text) for text in python]:
            source = source.replace("127.0.0.1:8000", f"127.0.0.1:{launched.port}")
            command = ["bash", "-euo", "pipefail", "-c", source] if language == "bash" else [sys.executable, "-c", source]
            done = subprocess.run(command, capture_output=True, text=True, timeout=200)
            assert done.returncode == 0 and '"error"' not in done.stdout, (source, done.stdout, done.stderr)
            outputs.append(done.stdout)
        assert "chat.completion.chunk" in outputs[0] and "snapmla:generation_tokens_total{" in outputs[0]


def test_commands_parse() -> None:
    """Every launch the section shows has flags that exist and a layout that fits its processes."""
    lines = "\n".join(blocks("")).replace("\\\n", " ").splitlines()
    launches = [line.partition("#")[0].split("-m engine.launch")[1].split() for line in lines if "-m engine.launch" in line]
    assert len(launches) >= 4
    for flags in launches:
        config, _ = parse(flags, {})
        assert config.parallel.world_size in (1, 8, 16)
