"""Tiny checkpoints in published layout with logits by transformers, made once and kept under .cache/reference.

The generator runs in its own process outside the repository: transformers imports any top-level package named
`kernels`, and no test process needs transformers. The cache is keyed by the generator's text and arguments, so a change
of either makes new files; a file lock lets several test runs share it.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parent.parent
GENERATOR = ROOT / "tests" / "tools" / "make_reference.py"
CACHE = ROOT / ".cache" / "reference"

_LONG = "--lengths 4 37 130 300 --steps 64 --tries 30"
_SHORT = "--lengths 33 100 --steps 16 --tries 30"
_REAL = "--lengths 60 --steps 32 --tries 30"
_VARIANTS = {
    "deepseek_v3-tiny": f"--arch deepseek_v3 --size tiny --mtp {_LONG}",
    "deepseek_v3-slim": "--arch deepseek_v3 --size slim --mtp --lengths 20 300 --steps 64 --tries 30",
    "deepseek_v3-real": f"--arch deepseek_v3 --size real --mtp {_LONG}",
    "deepseek_v2-tiny": f"--arch deepseek_v2 --size tiny {_LONG}",
    "deepseek_v2-real": f"--arch deepseek_v2 --size real {_REAL}",
    "longcat_flash-tiny": "--arch longcat_flash --size tiny --mtp --lengths 37 300 --steps 64 --tries 30",
    "longcat_flash-slim": "--arch longcat_flash --size slim --mtp --lengths 20 100 --steps 32 --tries 30",
    "longcat_flash-real": f"--arch longcat_flash --size real --mtp {_REAL}",
    "deepseek_v3-tiny-fp8": f"--arch deepseek_v3 --size tiny --mtp --fp8 float {_SHORT}",
    "deepseek_v3-tiny-ue8m0": f"--arch deepseek_v3 --size tiny --mtp --fp8 ue8m0 {_SHORT}",
    "deepseek_v3-slim-fp8": f"--arch deepseek_v3 --size slim --mtp --fp8 float {_SHORT}",
    "deepseek_v3-slim-ue8m0": f"--arch deepseek_v3 --size slim --mtp --fp8 ue8m0 {_SHORT}",
    "longcat_flash-tiny-fp8": f"--arch longcat_flash --size tiny --mtp --fp8 float {_SHORT}",
}


@dataclass(frozen=True)
class Reference:
    """One prompt with its greedy continuation.

    ids: prompt and generated tokens; logits: FP32 [T, V] of every token; mtp_logits: [T - 1, V], row r drafts token r + 2
    """

    ids: list[int]
    num_generated: int
    logits: torch.Tensor
    mtp_logits: torch.Tensor | None

    @property
    def prompt(self) -> list[int]:
        return self.ids[: -self.num_generated]

    @property
    def generated(self) -> list[int]:
        return self.ids[-self.num_generated :]

    @property
    def logit_range(self) -> float:
        return float(self.logits.max() - self.logits.min())


def reference_checkpoint(variant: str) -> Path:
    """Folder of a variant's checkpoint, made on first use (seconds for tiny, about a minute for real)."""
    arguments = _VARIANTS[variant].split()
    key = hashlib.sha256(GENERATOR.read_bytes() + repr(arguments).encode()).hexdigest()[:8]
    folder = CACHE / f"{variant}-{key}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{variant}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            _generate(arguments, folder)
    return folder


def _generate(arguments: list[str], folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
        out = Path(scratch) / "checkpoint"
        command = [sys.executable, "-P", str(GENERATOR), *arguments, "--out", str(out)]
        # One thread: the models are so small that several threads mostly wait for each other on a busy machine.
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        result = subprocess.run(command, cwd=scratch, env=environment, capture_output=True, text=True, check=False)
        if result.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{result.stdout}\n{result.stderr}")
        gaps = [p["min_top1_gap"] for p in json.loads((out / "prompts.json").read_text())["prompts"]]
        if min(gaps) < 0:
            raise RuntimeError(f"{folder.name}: a prompt has a router near-tie (gaps {gaps}); raise --tries or change --seed")
        shutil.move(out, folder)


@functools.cache
def references(variant: str) -> list[Reference]:
    """All prompts of a variant, shortest first."""
    folder = reference_checkpoint(variant)
    tensors = load_file(folder / "reference.safetensors")
    prompts = json.loads((folder / "prompts.json").read_text())["prompts"]
    return [
        Reference(p["ids"], p["generated"], tensors[f"{i}.logits"], tensors.get(f"{i}.mtp_logits"))
        for i, p in enumerate(prompts)
    ]
