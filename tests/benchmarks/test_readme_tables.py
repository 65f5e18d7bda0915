"""Tables of the README and figures of decode steps, from lines made by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import plot_decode, readme_tables, tables
from benchmarks.figure_style import Folders

STATE = {
    "device": "NVIDIA H200",
    "torch": "2.11",
    "date": "2026-11-29T22:00:00Z",
    "git": "abc",
    "method": "by hand",
    "simulated": True,
}


def decode_line(**changes: Any) -> dict[str, Any]:
    part = {"calls": 1, "us": 10e3, "roofline_us": 8e3, "bytes": 1, "flops": 1}
    line = STATE | {
        "figure": "decode", "shape": "deepseek_v3.1", "dp": 8, "tp": 1, "format": "fp8", "context": 32768, "batch": 16, "kind": "given",
        "step_us": 40e3, "busy_us": 39e3, "profiled_us": 40e3, "roofline_us": 30e3, "roofline_share": 0.75, "tokens_per_s_per_gpu": 400.0,
        "host_gap": 0.025, "host_gap_events": 0.01, "operations": [], "parts": {"attention": part, "experts": part | {"us": 22e3}},
        "kernels": [
            ["stream_fp8_16", 20e3, 116, "experts"], ["mla_decode_fp8", 12e3, 61, "attention"],
            ["void at::native::copy<float, Very::Long>(int)", 6.9e3, 300, "other"], ["plan_decode", 100.0, 1, "attention"],
        ],
    }  # fmt: skip
    return line | changes


def ratio_line(context: int) -> dict[str, Any]:
    return STATE | {
        "figure": "decode_ratios", "shape": "deepseek_v3.1", "dp": 8, "tp": 1, "context": context, "equal_batch": 9, "attention_ratio": 1.5, "attention_step_ratio": 1.45,
        "step_ratio": 1.2, "largest_batches": [16, 9], "tokens_ratio": 1.6, "roofline_ratio": 1.7,
    }  # fmt: skip


@pytest.fixture
def results(tmp_path: Path) -> Path:
    lines = [
        decode_line(step_us=99e3),
        decode_line(),
        decode_line(format="bf16", batch=9),
        ratio_line(65536),
        ratio_line(131072),
    ]
    (tmp_path / "decode.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def test_step_table_adds_up_and_names_each_kernel_s_part(results: Path) -> None:
    text = readme_tables.step(results)
    assert text is not None and "one SIMULATED rank" in text[0] and "2.5 % (profiler) and 1.0 % (events)" in text[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text[4:]]
    by_name = {row[0]: row[1:] for row in rows}
    assert list(by_name)[:2] == ["**experts**", "`stream_fp8_16`"]
    assert by_name["**attention**"] == ["62", "12.10", "30 %", "8.00", "66 %"]
    assert "`plan_decode`" not in by_name, "too small for a row"
    assert by_name["`copy`"][1] == "6.90"
    components = sum(float(cells[1]) for name, cells in by_name.items() if name.startswith("**") and name != "**step**")
    assert components + float(by_name["no kernel runs"][1]) == pytest.approx(40.0)


def test_tables_go_between_their_marks(results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pages = [tmp_path / "README.md", tmp_path / "more.md"]
    half = len(readme_tables.TABLES) // 2
    for page, names in zip(pages, (list(readme_tables.TABLES)[:half], list(readme_tables.TABLES)[half:]), strict=True):
        page.write_text("".join(f"<!-- table {name} -->\nold {name}\n<!-- /table -->\nkept\n" for name in names))
    marks = "".join(page.read_text() for page in pages)
    arguments = ["--results", str(results), "--pages", *map(str, pages)]
    assert readme_tables.main([*arguments, "--check"]) == 1 and "".join(page.read_text() for page in pages) == marks
    assert readme_tables.main(arguments) == 0
    text = "".join(page.read_text() for page in pages)
    assert (
        "old step" not in text
        and "old decode" not in text
        and "old prefill" in text
        and text.count("kept") == len(readme_tables.TABLES)
    )
    assert "1.45x (1.50x) at 9 | 16 and 9 | 1.60x | 1.70x | 0.94" in text
    assert "prefill: left as it is" in capsys.readouterr().err
    assert readme_tables.main([*arguments, "--check"]) == 0
    pages[1].write_text("nothing")
    with pytest.raises(ValueError, match="no page has marks of the table"):
        readme_tables.main(arguments)


def test_every_table_has_its_place_on_one_page() -> None:
    text = "".join(page.read_text() for page in readme_tables.PAGES)
    for name in readme_tables.TABLES:
        assert text.count(f"<!-- table {name} -->") == 1, name


def test_tables_of_fidelity_quality_and_ranks(tmp_path: Path) -> None:
    """Of lines made by hand: the intervals are paired, the overheads are spans over rounds, the simulation's error is signed."""
    rows = [("fp32", 0.0, 100), ("bf16", 0.0, 99), ("fp8", 0.1, 98)]
    quality = [
        STATE | {"figure": "perplexity", "on": "cpu", "document": "d", "start": start, "scheme": scheme, "tokens": 100, "nll": 300.0 + more, "agreed": agreed}
        for start in (0, 1) for scheme, more, agreed in rows
    ]  # fmt: skip
    quality += [
        STATE | {"figure": "lm_eval", "on": "cpu", "scheme": scheme, "words": 2, "recalls": 1, "nll": [1.0 + more, 3.0 + more], "best": [1, 0], "recalled": [1.0]}
        for scheme, more, _ in rows
    ]  # fmt: skip
    probe = STATE | {
        "figure": "probe", "model": "demo", "layers": 0, "batch": 4, "ms": {"off": [2.0, 2.2], "writing": [2.0, 2.2], "on": [2.0, 2.3]},
        "steps": 100, "overhead": 0.01, "overhead_turns": [0.0, 0.02], "overhead_writing": 0.0, "overhead_writing_turns": [0.0, 0.0],
    }  # fmt: skip
    pair = STATE | {
        "part": "shapes", "world": 2, "shape": "s", "dp": 2, "tp": 1, "format": "fp8", "context": 16384, "batch": 4, "step_us": 20e3,
        "simulated_step_us": 18e3, "collectives_share": 0.12, "prediction_error": -0.1,
        "experts_us": 9e3, "simulated_experts_us": 8e3,
    }  # fmt: skip
    for name, lines in (("quality", quality), ("kernel_figures", [probe]), ("eight_gpus", [pair])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = "\n".join(tables.quality(tmp_path) or [])
    assert "| **FP8, RoPE in BF16 (SnapMLA)** | 20.106 | +0.100 % (+0.100 to +0.100) | 98.0 % |  |  |" in text
    assert "| **FP8, RoPE in BF16 (SnapMLA)** | 2.1000 | +0.1000 (+0.1000 to +0.1000) | 1, 2 as FP32 | 1 of 1 |" in text
    assert "| demo model, batch 4 | 2.10 ms | +0.00 % (+0.00 to +0.00) | +1.00 % (+0.50 to +1.50) |" in (
        tables.probe(tmp_path) or []
    )
    assert "| s, DP2/TP1 | FP8 | 4 x 16k | 20.0 ms | 12.0 % | 18.0 ms | 9.0 / 8.0 ms | -10 % |" in (
        tables.simulation(tmp_path) or []
    )
    assert tables.kernel(tmp_path) is tables.context(tmp_path) is tables.hopper(tmp_path) is None


def test_figures_are_drawn_or_named(results: Path, tmp_path: Path) -> None:
    folders = Folders(results, tmp_path / "figures")
    for draw, name in ((plot_decode.decode_step, "decode_step"), (plot_decode.decode_ratio, "decode_ratio")):
        assert draw(folders) is None
        assert (tmp_path / "figures" / f"{name}.png").stat().st_size > 5000
        assert "needs a Hopper GPU" in (draw(Folders(tmp_path / "nowhere", tmp_path)) or "")
    spent = plot_decode.in_step(decode_line())
    assert sum(spent.values()) == pytest.approx(40.0) and spent["no kernel runs"] == 1.0
