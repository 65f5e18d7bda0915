"""Shared fixtures: device markers, one seed per test, and threads that suit a small machine."""

from __future__ import annotations

import os
from collections.abc import Iterator

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

from kernels import ops


def _device_markers() -> dict[str, bool]:
    available = torch.cuda.is_available()
    return {
        "cuda": available,
        "hopper": available and torch.cuda.get_device_capability() == (9, 0),
        "multigpu": available and torch.cuda.device_count() >= 2,
    }


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run tests marked slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    present = _device_markers()
    for item in items:
        for marker, here in present.items():
            if item.get_closest_marker(marker) and not here:
                item.add_marker(pytest.mark.skip(reason=f"no {marker} device here"))
        if item.get_closest_marker("slow") and not config.getoption("--slow"):
            item.add_marker(pytest.mark.skip(reason="slow; run with --slow"))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    """A test marked for a device that is present must not skip itself: a silent skip would hide a broken kernel."""
    outcome = yield
    report = outcome.get_result()
    if report.when == "call" and report.skipped and not hasattr(report, "wasxfail"):
        present = _device_markers()
        if any(item.get_closest_marker(marker) and here for marker, here in present.items()):
            report.outcome = "failed"
            report.longrepr = f"{item.nodeid} skipped itself although its device is present"


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For products so small that a second thread is only waited for."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def reference_operations() -> Iterator[None]:
    """On CUDA too: no kernel plans for an exact cache."""
    with ops.backend("reference"):
        yield
