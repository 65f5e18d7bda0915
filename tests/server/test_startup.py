"""The start-up table."""

from __future__ import annotations

import asyncio

import pytest

from engine.messages import Phase
from server import startup
from server.startup import StartupTable


def test_a_phase_is_shown_when_its_slowest_rank_is_through(capsys: pytest.CaptureFixture[str]) -> None:
    table = StartupTable(3, dict)
    for rank, seconds in ((0, 1.0), (2, 4.0)):
        table.add(Phase(rank, "model"))
        table.add(Phase(rank, "model", seconds))
    assert capsys.readouterr().err == ""
    table.add(Phase(1, "model", 2.0))
    lines = capsys.readouterr().err.splitlines()
    assert "slowest of 3" in lines[0] and lines[1].split()[:2] == ["model", "4.00"] and lines[1].endswith("rank 2")
    assert table.seconds == {"model": 4.0}
    assert lines[1].split()[2] == "4.0s", "no phase is longer than the start-up so far, of which the table saw only the end"


def test_waiting_ranks_are_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Report D19: the phase and the ranks that start-up waits for are on the screen."""
    monkeypatch.setattr(startup, "REMIND_AFTER_S", 0.01)
    table = StartupTable(9, lambda: {"model": [0, 1, 2, 5], "connecting": [7]})

    async def a_moment() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(table.remind(), 0.1)

    asyncio.run(a_moment())
    shown = capsys.readouterr().err
    assert "model" in shown and "ranks 0-2, 5" in shown and "rank 7" in shown
