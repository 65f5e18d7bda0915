"""Results files: one JSON line a measurement, each with everything a reader needs to judge it.

A line holds `figure` (which figure it belongs to), the measurement's own keys and values, and the state it was taken in:
device, clocks where the driver tells them, versions, git revision, seed, method, date. Appending is the only operation, so a
run that was stopped goes on where it ended; the newest line of a key counts.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).parent / "results"
ROOT = Path(__file__).resolve().parent.parent
_CLOCKS, _LIMITS = "clocks.sm,clocks.mem,power.draw", "driver_version,power.limit,clocks.max.sm"


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=10).stdout.strip()
    except OSError:
        return ""


def machine_state(device: str) -> dict[str, Any]:
    """Device, how busy it is, versions, git revision and date. device: "cpu" or "cuda".

    On CUDA: clocks and power draw of the moment, the driver and the power limit. On a CPU: cores and load average.
    """
    state: dict[str, Any] = {"device": _cpu_name(), "clocks": None, "cuda": None}
    if device == "cuda":
        import torch

        told = {
            name: _output("nvidia-smi", f"--query-gpu={name}", "--format=csv,noheader") or None for name in (_CLOCKS, _LIMITS)
        }
        state |= {
            "device": torch.cuda.get_device_name(),
            "clocks": told[_CLOCKS],
            "driver": told[_LIMITS],
            "cuda": torch.version.cuda,
        }
    else:
        state |= {"cpus": os.cpu_count(), "load_average": [round(load, 2) for load in os.getloadavg()]}
    changed = _output(
        "git", "status", "--porcelain", "--untracked-files=no", "--", "kernels", "models", "engine", "benchmarks/*.py"
    )
    return state | {
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "git": _output("git", "rev-parse", "--short", "HEAD") + ("+" if changed else ""),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


class Records:
    """One results file. method: a sentence on how its numbers come about; seed: of everything random in it; state: of every line."""

    def __init__(self, path: Path, *, device: str, method: str, seed: int) -> None:
        self.path = path
        self.state = {"seed": seed, "method": method} | machine_state(device)
        self._known = read(path)

    def write(self, **fields: Any) -> None:
        line = fields | self.state
        append(self.path, line)
        self._known.append(line)

    def has(self, **key: Any) -> bool:
        """Whether a line with these fields exists: a run resumes by skipping what it finds."""
        return bool(self.find(**key))

    def find(self, **key: Any) -> list[dict[str, Any]]:
        """The lines with these fields, oldest first."""
        return [line for line in self._known if all(line.get(name) == value for name, value in key.items())]


def append(path: Path, line: dict[str, Any]) -> None:
    """One line, in one write: lines of processes that share a file do not mix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab", buffering=0) as out:
        out.write(json.dumps(line).encode() + b"\n")


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a results file, oldest first; a last line cut short by a kill is left out."""
    if not path.exists():
        return []
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return lines


def newest(lines: Iterable[dict[str, Any]], *keys: str) -> list[dict[str, Any]]:
    """The last line of each combination of `keys`, in order of first appearance."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for line in lines:
        found[tuple(str(line.get(key)) for key in keys)] = line
    return list(found.values())


def revisions(lines: Iterable[dict[str, Any]]) -> str:
    """The git revisions of lines, in order of first appearance, as a caption says them."""
    found = list(dict.fromkeys(line.get("git") or "unknown" for line in lines))
    return f"revision{'s' * (len(found) > 1)} {', '.join(found)}"


def bootstrap(values: np.ndarray, *, statistic=np.mean, draws: int = 2000, seed: int = 0) -> tuple[float, float]:
    """95 % interval of a statistic of independent samples [n, ...], resampled along the first dimension."""
    rng = np.random.default_rng(seed)
    picks = rng.integers(len(values), size=(draws, len(values)))
    found = np.array([statistic(values[pick]) for pick in picks])
    return float(np.quantile(found, 0.025)), float(np.quantile(found, 0.975))


def wilson(right: int, total: int) -> tuple[float, float]:
    """95 % interval of a proportion; sensible at 0 and 1 too."""
    z, p = 1.959964, right / total
    middle = (p + z * z / (2 * total)) / (1 + z * z / total)
    half = z * ((p * (1 - p) + z * z / (4 * total)) / total) ** 0.5 / (1 + z * z / total)
    return max(0.0, middle - half), min(1.0, middle + half)
