"""The Dockerfile cannot be built here; this keeps it honest: what it copies and runs exists, and it follows the rules."""

from __future__ import annotations

import ast
import fnmatch
import json
import re
import tomllib
from pathlib import Path

import pytest

from engine.launch import parse

ROOT = Path(__file__).resolve().parent.parent
KNOWN = {
    "FROM", "RUN", "WORKDIR", "COPY", "ENV", "USER", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK", "ENTRYPOINT", "ARG", "LABEL",
}  # fmt: skip


def instructions() -> list[tuple[str, str]]:
    """(instruction, arguments) with continued lines joined."""
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if line.strip() and not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [tuple(line.split(None, 1)) for line in joined.splitlines()]  # type: ignore[misc]


def ignored(name: str) -> bool:
    patterns = (ROOT / ".dockerignore").read_text().split()
    return any(fnmatch.fnmatch(name, pattern) or name.split("/")[0] == pattern for pattern in patterns)


def test_only_known_instructions_and_pinned_bases() -> None:
    assert {name for name, _ in instructions()} <= KNOWN
    bases = [arguments.split()[0] for name, arguments in instructions() if name == "FROM"]
    assert bases and all(re.fullmatch(r"[\w./-]+:\d+\.\d+[\w.-]*", base) for base in bases)


def test_copied_files_exist_and_are_not_ignored() -> None:
    copies = [arguments.split() for name, arguments in instructions() if name == "COPY"]
    sources = [source for words in copies if not words[0].startswith("--from") for source in words[:-1]]
    assert sources
    for source in sources:
        assert (ROOT / source).exists() and not ignored(source), source
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert {package.split(".")[0] for package in packages} <= set(sources)


def test_modules_that_are_run_exist_and_take_their_flags() -> None:
    text = " ".join(arguments for _, arguments in instructions())
    modules = set(re.findall(r"python -m ([\w.]+)", text)) | set(re.findall(r'"python", "-m", "([\w.]+)"', text))
    assert {"engine.launch", "kernels.cuda.build"} <= modules
    for module in modules - {"venv"}:
        path = ROOT / (module.replace(".", "/") + ".py")
        assert path.exists() and "__main__" in path.read_text(), module
    (entrypoint,) = [json.loads(arguments) for name, arguments in instructions() if name == "ENTRYPOINT"]
    _, server = parse(entrypoint[3:], {})
    assert server.host == "0.0.0.0"
    (port,) = [int(arguments) for name, arguments in instructions() if name == "EXPOSE"]
    assert server.port == port


def test_health_check_asks_an_open_route() -> None:
    from server.http import OPEN_PATHS

    (check,) = [arguments for name, arguments in instructions() if name == "HEALTHCHECK"]
    code = json.loads(check.partition("CMD ")[2])[2]
    ast.parse(code)
    assert any(f"{path}'" in code for path in OPEN_PATHS)


def test_runs_as_a_plain_user_from_a_slim_base() -> None:
    """Report O10: no root, no toolchain, no remote shell, no package lists, no secrets."""
    names = [name for name, _ in instructions()]
    last_stage = instructions()[len(names) - 1 - names[::-1].index("FROM") :]
    stage_names = [name for name, _ in last_stage]
    (user,) = [arguments for name, arguments in last_stage if name == "USER"]
    assert user not in ("root", "0") and stage_names.index("USER") < stage_names.index("ENTRYPOINT")
    for name, arguments in instructions():
        if name == "RUN" and "apt-get install" in arguments:
            assert "--no-install-recommends" in arguments and "rm -rf /var/lib/apt/lists/*" in arguments
        assert not re.search(r"\b(openssh|ssh-server|gcc|build-essential|sudo|curl|wget)\b", arguments)
        if name in ("ENV", "ARG"):
            assert not re.search(r"(KEY|TOKEN|SECRET|PASSWORD)\w*=", arguments)


def test_the_lint_can_fail(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = (ROOT / "Dockerfile").read_text().replace("COPY server server", "COPY serverr serverr")
    (tmp_path / "Dockerfile").write_text(broken)
    (tmp_path / ".dockerignore").write_text("")
    monkeypatch.setattr("tests.test_dockerfile.ROOT", tmp_path)
    with pytest.raises(AssertionError):
        test_copied_files_exist_and_are_not_ignored()
