"""The table of user reports is current."""

from __future__ import annotations

from tests.reports import HERE, covered, table


def test_table_is_current() -> None:
    assert (HERE / "REPORTS.md").read_text() == table(), "run python -m tests.reports"


def test_ids_are_found_in_docstrings() -> None:
    assert "X06" in covered()
