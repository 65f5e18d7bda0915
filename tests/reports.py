"""Table of user reports of peer engines -> tests that try them here: `python -m tests.reports` writes tests/REPORTS.md.

A test names the reports it covers in its docstring as "Report K09" or "Report X06, X09". The ids are those of our
collection of public reports; the table keeps the ids, the tests keep the behaviour.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

HERE = Path(__file__).resolve().parent
SECTIONS = {
    "K": "FP8 latent cache",
    "N": "kernel and model correctness",
    "M": "speculative decoding",
    "D": "parallel launch",
    "S": "scheduler and block manager",
    "L": "weight loading",
    "T": "tokenizer, detokenizer, templates",
    "A": "OpenAI API",
    "X": "security",
    "O": "operations",
    "P": "sampling",
    "C": "LongCat-Flash",
    "B": "benchmarks",
}
_MENTION = re.compile(r"Reports?:?\s+((?:[A-Z]\d\d(?:\s*(?:,|and|to)\s*)?)+)")


def covered() -> dict[str, list[str]]:
    """Report id -> tests (file::function) whose docstrings name it."""
    found: dict[str, list[str]] = {}
    for path in sorted(HERE.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and node.name.lower().startswith("test"):
                for mention in _MENTION.findall(ast.get_docstring(node) or ""):
                    for report in re.findall(r"[A-Z]\d\d", mention):
                        found.setdefault(report, []).append(f"{path.relative_to(HERE)}::{node.name}")
    return found


def table() -> str:
    lines = [
        "# User reports of peer engines, and the tests that try them here",
        "",
        "Written by `python -m tests.reports`.",
        "",
    ]
    found = covered()
    for letter, title in SECTIONS.items():
        ids = sorted(report for report in found if report[0] == letter)
        if ids:
            lines += [f"## {title}", "", "| report | test |", "|---|---|"]
            lines += [f"| {report} | {'<br>'.join(sorted(set(found[report])))} |" for report in ids]
            lines.append("")
    return "\n".join(lines)


def main() -> None:
    (HERE / "REPORTS.md").write_text(table())
    print(f"{len(covered())} reports in tests/REPORTS.md")


if __name__ == "__main__":
    main()
