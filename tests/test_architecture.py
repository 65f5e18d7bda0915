"""The direction of imports, and what must load without torch. An import that points the other way fails the build."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("kernels", "models", "engine", "server")
# Files of engine that never import torch. Wire files may be used by the server; host files only by the engine.
WIRE = {
    "errors", "config", "sampling_params", "messages", "transport", "hub", "tokenizer", "output", "chat", "reasoning",
    "tool_calls", "openai_types", "grammar", "tiktoken_model", "template_sandbox", "chat_format", "served_model",
    "openai_responses", "openai_logprobs", "structured_output", "batch_file",
}  # fmt: skip
HOST = {"request", "block_manager", "scheduler", "draft_depth", "plan", "core"}


def imports_of(path: Path) -> set[str]:
    """Absolute names a file imports anywhere, `from a.b import c` giving both a.b and a.b.c."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; name the package"
            found.add(node.module or "")
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def module_of(name: str) -> str:
    return name.split(".")[1] if "." in name else ""


def files_of(package: str) -> list[Path]:
    return sorted(p for p in (ROOT / package).rglob("*.py"))


def forbidden(package: str, stem: str, name: str) -> bool:
    """Whether `package/stem.py` must not import `name`."""
    top = name.split(".")[0]
    if top in ("tests", "benchmarks", "transformers"):
        return True
    if package == "kernels":
        return top in ("models", "engine", "server")
    if package == "models":
        return top in ("engine", "server") or (
            stem in ("deepseek", "longcat") and name.startswith(("models.deepseek", "models.longcat"))
        )
    if package == "engine":
        if top == "server" or name.startswith("engine.launch"):
            return True
        if stem in WIRE:
            return top in ("torch", "kernels", "models") or (top == "engine" and module_of(name) not in WIRE | {""})
        if stem in HOST:
            return top in ("torch", "kernels", "models", "zmq") or (
                top == "engine" and module_of(name) not in (WIRE - {"transport"}) | HOST | {""}
            )
        return False
    return top in ("torch", "kernels", "models") or (top == "engine" and module_of(name) not in WIRE | {""})


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_point_one_way(package: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in files_of(package)
        for name in sorted(imports_of(path))
        if forbidden(package, path.stem, name)
    ]
    assert not wrong, "\n".join(wrong)


def test_the_rule_can_fail() -> None:
    assert forbidden("kernels", "ops", "models.batch")
    assert forbidden("engine", "scheduler", "torch")
    assert forbidden("server", "app", "engine.scheduler")
    assert not forbidden("engine", "model_runner", "torch")


@pytest.mark.parametrize(
    "module", ["server.app", "server.frontend", "engine.scheduler", "engine.core", "engine.output", "engine.chat"]
)
def test_loads_without_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr or f"{module} loads torch"


def test_kernels_package_is_light_and_unversioned() -> None:
    """transformers imports any top-level `kernels` and reads its version; Hugging Face's window is 0.17 to 0.19."""
    import tomllib

    tree = ast.parse((ROOT / "kernels/__init__.py").read_text())
    assert all(isinstance(node, ast.Expr) for node in tree.body), "kernels/__init__.py must hold its docstring only"
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert not (0, 17) <= tuple(int(part) for part in version.split(".")[:2]) <= (0, 19)


def test_nothing_is_unpickled() -> None:
    """Report X06, X09, X10, X16: no pickle, no send_pyobj, no torch.load, no eval on any path we ship."""
    words = (
        "pickle",
        "send_pyobj",
        "recv_pyobj",
        "broadcast_object_list",
        "all_gather_object",
        "torch.load",
        "trust_remote_code",
        "marshal",
    )
    wrong = []
    for package in PACKAGES:
        for path in files_of(package):
            for node in ast.walk(ast.parse(path.read_text())):
                name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else None
                if name in {word.split(".")[-1] for word in words if word != "torch.load"} or (
                    name in ("eval", "exec") and not isinstance(node, ast.Attribute)
                ):
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno} uses {name}")
            if "torch.load(" in path.read_text():
                wrong.append(f"{path.relative_to(ROOT)} uses torch.load")
            if any("pickle" in name for name in imports_of(path)):
                wrong.append(f"{path.relative_to(ROOT)} imports pickle")
    assert not wrong, "\n".join(wrong)
