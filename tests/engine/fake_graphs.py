"""CUDA graphs for a CPU: a "replay" makes the recorded call again and writes its result where the first one lies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import pytest
import torch

T = TypeVar("T")


@dataclass
class FakeGraph:
    """Of a call that gives a tuple of tensors, None among them."""

    call: Callable[[], tuple]
    result: tuple
    replays: int = 0

    def replay(self) -> None:
        self.replays += 1
        for static, found in zip(self.result, self.call()):
            if static is not None:
                static.copy_(found)


@dataclass
class FakePool:
    """Stands in for engine.cuda_graph.GraphPool. room: captures before memory runs out; graphs: those taken"""

    room: int = 1000
    graphs: list[FakeGraph] = field(default_factory=list)

    def record(self, call: Callable[[], T]) -> tuple[FakeGraph, T]:
        call()
        if len(self.graphs) >= self.room:
            raise RuntimeError("the capture has ended") from torch.OutOfMemoryError("CUDA out of memory")
        graph = FakeGraph(call, result := call())
        self.graphs.append(graph)
        return graph, result


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> FakePool:
    """The pool of the runners that a test builds."""
    found = FakePool()
    monkeypatch.setattr("engine.cuda_graph.GraphPool", lambda: found)
    return found
