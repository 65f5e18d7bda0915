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
TEXT = README.read_text()


def blocks(language: str) -> list[str]:
    """Fenced blocks of `## Serve`."""
    found = re.search(r"^## Serve\n(.*?)(?=^## |\Z)", TEXT, re.DOTALL | re.MULTILINE)
    assert found is not None, "the README has no section on serving"
    return re.findall(rf"^```{language}\n(.*?)^```", found[1], re.DOTALL | re.MULTILINE)


@pytest.mark.timeout(400)
def test_examples_run(tmp_path: Path) -> None:
    shell = [block for block in blocks("") if block.startswith("curl")]
    python = blocks("python")
    assert shell and python
    with Launched(PYTHON, *SMALL, log=tmp_path / "log") as launched:
        launched.wait_ready()
        outputs = []
        for command in [["bash", "-euc", text] for text in shell] + [[sys.executable, "-c", text] for text in python]:
            command[2] = command[2].replace("127.0.0.1:8000", f"127.0.0.1:{launched.port}")
            done = subprocess.run(command, capture_output=True, text=True, timeout=200)
            assert done.returncode == 0 and '"error"' not in done.stdout, (command, done.stdout, done.stderr)
            outputs.append(done.stdout)
        assert '"text_completion"' in outputs[0] and "snapmla:generation_tokens_total{" in outputs[0]
        assert outputs[-1].strip()


def test_commands_parse() -> None:
    """Every launch the section shows has flags that exist and a layout that fits its processes."""
    lines = "\n".join(blocks("")).replace("\\\n", " ").splitlines()
    launches = [line.partition("#")[0].split("-m engine.launch")[1].split() for line in lines if "-m engine.launch" in line]
    assert len(launches) >= 4
    for flags in launches:
        config, _ = parse(flags, {})
        assert config.parallel.world_size in (1, 8, 16)


def test_files_it_names_exist() -> None:
    pages = TEXT + (README.parent / "benchmarks" / "README.md").read_text()
    named = set(re.findall(r"`((?:server|benchmarks|engine|models|kernels|tests)/[\w./-]+\.\w+)`", pages))
    assert "server/grafana.json" in named
    missing = [name for name in named if not (README.parent / name).exists()]
    assert not missing, missing
