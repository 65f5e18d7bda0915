"""Compile the CUDA sources at run time: NVRTC to a cubin for sm_90a, cached on disk by content.

Needs no GPU, no nvcc and no header files; NVRTC is a pip wheel. The cache key covers every source file, the options
and the NVRTC version, and files appear by rename, so any number of processes may build at once.

    python -m kernels.cuda.build        compile everything, print registers and spills, fail on a regression
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from types import ModuleType

from kernels.errors import KernelError

SOURCES = Path(__file__).resolve().parent.parent / "csrc"
OPTIONS = ("--gpu-architecture=sm_90a", "--std=c++17", "--ptxas-options=-v")


@dataclass(frozen=True)
class Module:
    """One translation unit. spill_allowance: bytes of spill stores a kernel of it may have, measured and accepted."""

    source: str
    spill_allowance: int = 0
    defines: tuple[tuple[str, int], ...] = ()


MODULES = {
    "latent": Module("latent.cu"),
    "elementwise": Module("elementwise.cu"),
    "norm": Module("norm.cu"),
    "decode_plan": Module("mla_decode/plan.cu"),
    "decode_combine": Module("mla_decode/combine.cu"),
    "decode_fp8": Module("mla_decode/fp8.cu", spill_allowance=128),
    "decode_fp8_pair": Module("mla_decode/fp8.cu", spill_allowance=128, defines=(("PAIR", 1),)),
    "decode_fp8_32": Module("mla_decode/fp8.cu", defines=(("TILE_N", 32),)),
    "decode_fp8_16": Module("mla_decode/fp8.cu", defines=(("TILE_N", 16),)),
    "decode_bf16": Module("mla_decode/bf16.cu"),
    "paged_read": Module("mla_decode/paged_read.cu"),
    "absorb_query_fp8": Module("absorbed/query.cu", defines=(("FP8", 1),)),
    "absorb_query_bf16": Module("absorbed/query.cu", defines=(("FP8", 0),)),
    "project_values": Module("absorbed/values.cu"),
    "quantize": Module("gemm/quantize.cu"),
    "gemm_fp8": Module("gemm/stream_fp8.cu"),
    "gemm_bf16": Module("gemm/stream_bf16.cu"),
    "gemm_rows": Module("gemm/rows.cu", spill_allowance=24),  # a few registers at 144 rows, outside the loop over K
    "gemm_finish": Module("gemm/finish.cu"),
    "router": Module("moe/router.cu"),
    "route": Module("moe/route.cu"),
    "moe_sort": Module("moe/sort.cu"),
    "moe": Module("moe/experts.cu"),
    "moe_grouped": Module("moe/grouped.cu"),
    "choose": Module("sampling/choose.cu"),
    "lines": Module("sampling/lines.cu"),
    "read_rate": Module("common/read_rate.cu"),
}


@dataclass(frozen=True)
class FunctionReport:
    """What ptxas says of one kernel: registers a thread at launch, bytes of spill stores and loads, stack frame."""

    name: str
    registers: int
    spill_stores: int
    spill_loads: int
    stack: int


@dataclass(frozen=True)
class Build:
    """A compiled module: its cubin and the compiler's report."""

    cubin: bytes
    functions: tuple[FunctionReport, ...] = ()
    warnings: tuple[str, ...] = field(default=())


def cache_folder() -> Path:
    """SNAPMLA_CACHE, else the user's cache folder."""
    chosen = os.environ.get("SNAPMLA_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "snapmla" / "cubin"


@lru_cache(maxsize=1)
def _headers() -> dict[str, str]:
    return {str(p.relative_to(SOURCES)): p.read_text() for p in sorted(SOURCES.rglob("*.cuh"))}


def build(name: str, extra_defines: dict[str, int] | None = None) -> Build:
    """The compiled module `name`, from the cache when its content is known.

    extra_defines: knobs of an experiment, as -D options. Raises KernelError when NVRTC is missing or refuses the source.
    """
    module = MODULES[name]
    defines = dict(module.defines) | (extra_defines or {})
    options = [*OPTIONS, *(f"-D{key}={value}" for key, value in sorted(defines.items()))]
    nvrtc = _nvrtc(name)
    source = (SOURCES / module.source).read_text()
    version = _ok(name, nvrtc.nvrtcVersion())
    parts = [source, *(f"{k}\0{v}" for k, v in _headers().items()), *options, repr(version)]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
    folder = cache_folder()
    cubin_path, report_path = folder / f"{name}-{key}.cubin", folder / f"{name}-{key}.json"
    try:
        report = json.loads(report_path.read_text())
        functions = tuple(FunctionReport(**f) for f in report["functions"])
        return Build(cubin_path.read_bytes(), functions, tuple(report["warnings"]))
    except (OSError, ValueError, KeyError, TypeError):
        pass  # absent, or damaged by hand: build it again
    built = _compile(name, nvrtc, source, module.source, options)
    if not built.functions:
        # NVRTC answered from its own cache, as after the same source was built elsewhere on this machine, and then reports
        # nothing. An unused variable of a new name makes the program another one.
        fresh = f'{source}\nextern "C" __device__ int build_{time.time_ns()};\n'
        built = _compile(name, nvrtc, fresh, module.source, options)
    _write(cubin_path, built.cubin)
    report = {"functions": [asdict(f) for f in built.functions], "warnings": built.warnings}
    _write(report_path, json.dumps(report).encode())  # last: it vouches for the cubin
    return built


def _nvrtc(name: str) -> ModuleType:
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        raise KernelError(
            name, f"the run-time compiler NVRTC is not available ({error}); install cuda-bindings and nvidia-cuda-nvrtc 13"
        ) from error
    return nvrtc


def _ok(name: str, result: tuple) -> tuple:
    if int(result[0]) != 0:
        raise KernelError(name, f"NVRTC failed: {result[0]}")
    return result[1:]


def _compile(name: str, nvrtc: ModuleType, source: str, label: str, options: list[str]) -> Build:
    headers = _headers()
    program = _ok(
        name,
        nvrtc.nvrtcCreateProgram(
            source.encode(), label.encode(), len(headers), [t.encode() for t in headers.values()], [n.encode() for n in headers]
        ),
    )[0]
    status = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])[0]
    # A bytearray of its own: the call writes into the object it is given, and small bytes objects are shared.
    log_bytes = bytearray(max(64, _ok(name, nvrtc.nvrtcGetProgramLogSize(program))[0]))
    nvrtc.nvrtcGetProgramLog(program, log_bytes)
    log = log_bytes.decode(errors="replace").strip("\0 \n")
    if int(status) != 0:
        raise KernelError(name, f"NVRTC refuses {label}:\n{log}")
    cubin = bytearray(_ok(name, nvrtc.nvrtcGetCUBINSize(program))[0])
    _ok(name, nvrtc.nvrtcGetCUBIN(program, cubin))
    nvrtc.nvrtcDestroyProgram(program)
    return Build(bytes(cubin), tuple(parse_report(log)), tuple(sorted(set(re.findall(r"C75\d\d", log)))))


def parse_report(log: str) -> list[FunctionReport]:
    """Registers and spills of every kernel in a `ptxas -v` log; device functions that were not inlined are skipped."""
    reports = []
    for block in re.split(r"Compiling entry function '", log)[1:]:
        frame = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", block)
        used = re.search(r"Used (\d+) registers", block)
        if frame and used:
            stack, stores, loads = map(int, frame.groups())
            reports.append(FunctionReport(block.split("'")[0], int(used[1]), stores, loads, stack))
    return reports


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(data)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def problems(name: str, built: Build) -> list[str]:
    """Why a build must not ship: spills above the module's allowance, serialised wgmma, no kernel at all."""
    allowance = MODULES[name].spill_allowance
    found = [f"{name}: warning {w} (ptxas serialised wgmma or ignored setmaxnreg)" for w in built.warnings]
    found += [
        f"{name}.{f.name}: {f.spill_stores} bytes of spills, {allowance} allowed"
        for f in built.functions
        if f.spill_stores > allowance
    ]
    return found if built.functions else [*found, f"{name}: no kernel in the compiler's report"]


def main() -> int:
    """Compile every module, print a table, return 1 on a problem."""
    argparse.ArgumentParser(description=main.__doc__).parse_args()
    found = []
    print(f"{'kernel':<44} registers  spill stores/loads  stack")
    for name in MODULES:
        built = build(name)
        found += problems(name, built)
        for f in built.functions:
            print(f"{name + '.' + f.name:<44} {f.registers:>9}  {f.spill_stores:>8} / {f.spill_loads:<7} {f.stack:>6}")
    for problem in found:
        print("PROBLEM", problem)
    print(f"cache: {cache_folder()}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
