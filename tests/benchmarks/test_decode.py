"""The decode benchmark's code path on a CPU with a tiny model, and its arithmetic."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import decode, step_parts
from benchmarks.records import read
from benchmarks.workloads import SHAPES, tiny_shape

pytestmark = pytest.mark.usefixtures("one_thread")
CACHE_BYTES = 4 << 20


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return tiny_shape(tmp_path)


@pytest.fixture(autouse=True)
def _one_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever edits the tree while the tests run would make two runs' lines differ."""
    monkeypatch.setattr("benchmarks.records.machine_state", lambda device: {"device": device, "git": "here"})


def test_a_case_that_fails_has_a_line_and_stops_no_other(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[int] = []

    def measure(rank: object, cache: object, case: decode.Case, ceilings: object) -> dict[str, object]:
        asked.append(case.context)
        if case.context == 256:
            raise RuntimeError("out of memory")
        return {
            "step_us": 1.0,
            "tokens_per_s_per_gpu": 1.0,
            "roofline_us": 1.0,
            "roofline_share": 1.0,
            "parts": {"attention": {"us": 1.0}},
        }

    monkeypatch.setattr(decode, "measure", measure)
    output = tmp_path / "decode.jsonl"
    arguments = ["--shapes", str(tiny), "--worlds", "dp=2,tp=1", "--contexts", "256", "512", "--batches", "--most", "2"]
    arguments += ["--device", "cpu", "--cache-memory-bytes", str(CACHE_BYTES), "--output", str(output)]
    decode.main(arguments)
    failed = [line for line in read(output) if line["figure"] == "decode_failed"]
    assert [(line["context"], line["error"]) for line in failed] == [(256, "RuntimeError: out of memory")] * 2  # FP8 and BF16
    assert [line["context"] for line in read(output) if line["figure"] == "decode"] == [512, 512]
    assert "FAILED out of memory" in capsys.readouterr().out
    decode.main(arguments)
    assert asked == [256, 512] * 2, "nothing is tried again"


def test_dry_run_writes_every_case_once(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "decode.jsonl"
    arguments = [
        "--shapes",
        str(tiny),
        "--worlds",
        "dp=2,tp=2,ep=4",
        "--contexts",
        "256",
        "512",
        "--batches",
        "2",
        "--most",
        "5",
    ]
    arguments += ["--device", "cpu", "--cache-memory-bytes", str(CACHE_BYTES), "--output", str(output)]
    decode.main(arguments)
    lines = read(output)
    cases, summaries = [line for line in lines if line["figure"] == "decode"], [x for x in lines if x["figure"] != "decode"]
    assert {(line["format"], line["context"], kind) for line in cases for kind in line["kind"].split()} == {
        (fmt, context, kind) for fmt in ("fp8", "bf16") for context in (256, 512) for kind in ("given", "equal", "largest")
    }
    assert [(line["figure"], line["context"]) for line in summaries] == [("decode_ratios", 256), ("decode_ratios", 512)]
    printed = capsys.readouterr()
    assert "SIMULATED rank of tiny" in printed.out and "SIMULATION" in printed.err
    for line in cases:
        assert line["simulated"] is True and (line["dp"], line["tp"]) == (2, 2)
        parts = line["parts"]
        assert set(parts) == {"attention", "linears", "experts", "norms", "collectives", "sampling"}
        for name, part in parts.items():
            assert part["us"] == pytest.approx(sum(one["us"] for one in line["operations"] if one["part"] == name))
        assert line["roofline_us"] == pytest.approx(sum(part["roofline_us"] for part in parts.values()))
        assert line["tokens_per_s_per_gpu"] == pytest.approx(1e6 * line["batch"] / 2 / line["step_us"])
        assert line["step_us"] > 100, "a step of a CPU is more than reading its result"
        # 2 layers; a sequence has grown by the first step and the recorded one
        tokens = line["batch"] * (line["context"] - decode.HEADROOM + 2)
        assert parts["attention"]["flops"] == 2 * 2 * 4 * tokens * (576 + 512)  # layers, multiply and add, local heads
        per_token = 644 if line["format"] == "fp8" else 1152
        assert 2 * tokens * per_token < parts["attention"]["bytes"] < 1.5 * 2 * tokens * per_token
        rows = -(-line["batch"] // 2)  # in the one MoE layer each of the tp ranks routes its share
        assert parts["experts"]["flops"] == 2 * rows * 8 * 3 * 64 * 64 + 2 * rows * 64 * 16
    decode.main(arguments)
    again = read(output)
    assert [line for line in again if line["figure"] == "decode"] == cases, "a second run finds its cases done"


def test_largest_batch_fills_the_cache(tiny: Path) -> None:
    """Equal bytes hold 1152 / 644 times the sequences in FP8."""
    rank = decode.Rank(decode.engine_config(tiny, "dp=2,tp=1", real=False), torch.device("cpu"), CACHE_BYTES)
    cases = {case.fmt.value: {} for case in rank.cases([512], [2], 100)}
    for case in rank.cases([512], [2], 100):
        cases[case.fmt.value][case.kind] = case.batch
    equal, largest = ((CACHE_BYTES // (64 * 2 * size) - 1) // 8 for size in (1152, 644))
    assert cases == {
        "fp8": {"given": 2, "equal": equal, "largest": largest},
        "bf16": {"given": 2, "equal largest": equal},
    }


def test_a_batch_of_several_kinds_is_measured_once(tiny: Path) -> None:
    rank = decode.Rank(decode.engine_config(tiny, "dp=2,tp=1", real=False), torch.device("cpu"), CACHE_BYTES)
    cases = [(case.fmt.value, case.kind, case.batch) for case in rank.cases([512], [2], 2)]
    assert cases == [("fp8", "given equal largest", 2), ("bf16", "given equal largest", 2)]


def test_given_batches_are_measured_at_one_context(tiny: Path) -> None:
    rank = decode.Rank(decode.engine_config(tiny, "dp=2,tp=1", real=False), torch.device("cpu"), 400 * CACHE_BYTES)
    kinds = {(case.context, case.kind) for case in rank.cases([131072, decode.GIVEN_CONTEXT], [2], 3)}
    assert kinds == {(131072, "equal largest"), (decode.GIVEN_CONTEXT, "given"), (decode.GIVEN_CONTEXT, "equal largest")}


def test_ratios_compare_equal_batches_and_equal_memory() -> None:
    def line(fmt: str, kind: str, batch: int, step_us: float, roofline_us: float, attention_us: float) -> dict:
        return {
            "format": fmt, "kind": kind, "batch": batch, "context": 65536, "step_us": step_us, "roofline_us": roofline_us,
            "tokens_per_s_per_gpu": 1e6 * batch / step_us, "parts": {"attention": {"us": attention_us}},
            "kernels": [("mla", 0.8 * attention_us, 61, "attention"), ("stream", 20e3, 116, "experts"), ("plan", 100.0, 1, "attention")],
        }  # fmt: skip

    lines = [
        line("fp8", "equal", 9, 40e3, 30e3, 12e3),
        line("fp8", "given largest", 16, 50e3, 40e3, 20e3),
        line("bf16", "equal largest", 9, 50e3, 36e3, 18e3),
    ]
    (found,) = decode.ratios(lines)
    assert found["attention_ratio"] == pytest.approx(1.5) and found["step_ratio"] == pytest.approx(1.25)
    assert found["tokens_ratio"] == pytest.approx(16 / 9) and found["roofline_ratio"] == pytest.approx(16 / 40 * 36 / 9)
    assert found["attention_step_ratio"] == pytest.approx(14.5 / 9.7)
    assert found["equal_batch"] == 9 and found["largest_batches"] == [16, 9]
    assert not list(decode.ratios(lines[:2])), "without the other format there is nothing to compare"


def test_a_profile_counts_kernels_and_the_time_they_cover() -> None:
    """A kernel that is launched early and waits, as "b" does, counts from the end of what it waits for."""
    cases = (("b", 3, 5), ("a", 0, 4), ("a", 10, 12), ("b", 10, 13), ("c", 10, 11))
    timeline = step_parts.Timeline.of([step_parts.Span(*case) for case in cases], steps=2)
    assert (timeline.us, timeline.busy_us) == (6.5, 4.0)
    assert timeline.kernels == [("a", 2.5, 1.0), ("b", 1.0, 1.0), ("c", 0.5, 0.5)]


def test_a_profiler_that_saw_nothing_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="saw no kernel"):
        step_parts.Timeline.of([], steps=3)


def test_the_profiler_s_events_of_a_device_are_found() -> None:
    """On a CPU the CPU's own events: the enum of devices is a new object at every read."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profiler:
        torch.ones(8, 8) @ torch.ones(8, 8)
    spans = step_parts.spans_on(profiler.events(), torch.autograd.DeviceType.CPU)
    assert "aten::mm" in {span.name for span in spans} and all(span.begin <= span.end for span in spans)
    assert step_parts.spans_on(profiler.events(), torch.autograd.DeviceType.CUDA) == []


@pytest.mark.cuda
def test_kernels_of_a_replayed_graph_are_profiled_one_by_one() -> None:
    x = torch.randn(512, 512, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add(1.0).relu()
    timeline = step_parts.profile(lambda: [graph.replay() for _ in range(3)], steps=3)
    assert sum(launches for _, _, launches in timeline.kernels) == 2 and timeline.busy_us > 0


def test_every_operation_of_a_decode_step_belongs_to_a_part() -> None:
    """A new operation must be named in PARTS, or its time and bytes would be missing from the roofline."""
    from kernels.reference import OPS

    only_prefill = {"prefill_attention", "merge_attention", "fetch_dequant", "rope", "join_heads", "silu_and_mul"}
    assert set(OPS) - only_prefill <= {name for names in step_parts.PARTS.values() for name in names}


@pytest.mark.parametrize(
    ("kernel", "part"),
    [
        ("mla_decode_fp8", "attention"), ("quantize_q_bf16_fp8", "attention"), ("quantize_bf16", "linears"),
        ("stream_fp8_16", "experts"), ("grouped_fp8", "experts"), ("norm_vectors_1_bf16", "norms"), ("absorb_query", "linears"), ("nvjet_sm90_tst_64x8", "linears"),
        ("ncclDevKernel_AllGather_RING_LL", "collectives"), ("void at::native::vectorized_elementwise_kernel<4>", "other"),
    ],
)  # fmt: skip
def test_kernels_belong_to_parts(kernel: str, part: str) -> None:
    assert step_parts.component_of(kernel) == part


def test_every_shape_has_a_deployment() -> None:
    assert set(decode.WORLDS) == {folder.name for folder in SHAPES.iterdir()}
