"""The CUDA sources compile without a GPU, without spills in excess and without serialised wgmma. Report K07's kind of
late failure is caught here."""

from __future__ import annotations

import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kernels.cuda import build as compiler
from kernels.errors import KernelError

pytest.importorskip("cuda.bindings.nvrtc")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SNAPMLA_CACHE", str(tmp_path))


@pytest.mark.parametrize("name", list(compiler.MODULES))
def test_module_compiles_clean(name: str) -> None:
    built = compiler.build(name)
    assert built.cubin[:4] == b"\x7fELF"
    assert compiler.problems(name, built) == []


def ptx(name: str) -> str:
    """The module as PTX, in which tensor-core instructions still have their names."""
    from cuda.bindings import nvrtc

    module, headers = compiler.MODULES[name], compiler._headers()
    source = (compiler.SOURCES / module.source).read_text()
    texts, names = ([text.encode() for text in part] for part in (headers.values(), headers))
    _, program = nvrtc.nvrtcCreateProgram(source.encode(), name.encode(), len(headers), texts, names)
    options = ["--gpu-architecture=compute_90a", "--std=c++17", *(f"-D{key}={value}" for key, value in module.defines)]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    assert int(status) == 0
    text = bytearray(nvrtc.nvrtcGetPTXSize(program)[1])
    nvrtc.nvrtcGetPTX(program, text)
    nvrtc.nvrtcDestroyProgram(program)
    return text.decode(errors="replace")


@pytest.mark.parametrize(
    ("name", "rows"), [("decode_fp8", 64), ("decode_fp8_pair", 64), ("decode_fp8_32", 32), ("decode_fp8_16", 16)]
)
def test_values_are_multiplied_in_fp8(name: str, rows: int) -> None:
    """Report N21: V is not K-major in the cache, and still PV runs on FP8 tensor cores, 16 products of 128 tokens by 256 dims
    a warpgroup; V is never widened, and BF16 products are those of the 64 RoPE dims alone. The row sums are four products in
    either of two places; what is widened are two of the three digits of 1 / s, for the rest."""
    code = ptx(name)
    products = Counter(re.findall(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k\d+\.f32\.(\w+)\.\w+", code))
    assert products == {("128", "e4m3"): 16, (str(rows), "e4m3"): 16, ("8", "e4m3"): 2 * 4, ("128", "bf16"): 4}
    assert "mma.sync" not in code and len(re.findall(r"cvt\S*f16x2\.e[45]m", code)) == 2 * 2


def test_cache_is_used_and_repaired(tmp_path: Path) -> None:
    first = compiler.build("decode_plan")
    (cubin,) = tmp_path.glob("decode_plan-*.cubin")
    stamp = cubin.stat().st_mtime_ns
    assert compiler.build("decode_plan") == first and cubin.stat().st_mtime_ns == stamp
    next(tmp_path.glob("decode_plan-*.json")).write_text("{")
    assert compiler.build("decode_plan").cubin == first.cubin


def test_several_builders_at_once() -> None:
    with ThreadPoolExecutor(4) as pool:
        built = list(pool.map(lambda _: compiler.build("decode_combine"), range(4)))
    assert all(b.cubin == built[0].cubin for b in built)


def test_other_options_are_other_entries(tmp_path: Path) -> None:
    compiler.build("decode_plan"), compiler.build("decode_plan", {"OVERHEAD": 3})
    assert len(list(tmp_path.glob("decode_plan-*.cubin"))) == 2


def test_a_broken_source_is_reported_with_its_name() -> None:
    with pytest.raises(KernelError, match=r"decode_plan.*NVRTC refuses"):
        compiler.build("decode_plan", {"BLOCK": 0})  # a macro that breaks a declaration


def test_spills_and_serialisation_are_problems() -> None:
    log = """ptxas info    : Compiling entry function 'f' for 'sm_90a'
ptxas info    : Function properties for f
    512 bytes stack frame, 640 bytes spill stores, 720 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers"""
    report = compiler.parse_report(log)
    assert (report[0].registers, report[0].spill_stores, report[0].stack) == (168, 640, 512)
    found = compiler.problems("decode_fp8", compiler.Build(b"", tuple(report), ("C7515",)))
    assert len(found) == 2 and "640 bytes" in found[1] and "C7515" in found[0]
    assert compiler.problems("decode_fp8", compiler.Build(b"")) == ["decode_fp8: no kernel in the compiler's report"]


def test_a_build_without_a_report_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVRTC reports no registers when it answers from its own cache."""
    real, sources = compiler._compile, []

    def silent_once(name: str, nvrtc, source: str, label: str, options: list[str]) -> compiler.Build:
        sources.append(source)
        built = real(name, nvrtc, source, label, options)
        return compiler.Build(built.cubin) if len(sources) == 1 else built

    monkeypatch.setattr(compiler, "_compile", silent_once)
    built = compiler.build("decode_plan")
    assert [f.name for f in built.functions] == ["plan_decode"] and sources[0] != sources[1]


def test_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import builtins

    real = builtins.__import__

    def refuse(name: str, *args, **kwargs):
        if name == "cuda.bindings":
            raise ImportError("no module")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(KernelError, match="nvidia-cuda-nvrtc"):
        compiler.build("decode_plan")
