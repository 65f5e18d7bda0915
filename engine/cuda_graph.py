"""CUDA graphs of decode steps: all that a step does on the device, captured per (sequences, lines per sequence).

A step is one call: forward pass, choice of tokens, acceptance, drafts. It learns of its sequences from a small array of
numbers and finds everything else, sampling parameters included, in tables on the device, so that a replay follows whatever
changes. The one rule for when a step replays a graph: no replica has prefill, and a captured size holds the sequences, padded
up to it. Padded sequences have length 0, slot -1 and no experts. All other steps make the same call eagerly. Steps in which
the fidelity probe compares have graphs of their own, of few sizes, since they are rare.

Every rank holds the same graphs at any time. That is more than a matter of speed: a replay exchanges the padded number of
rows with the other ranks, an eager pass the agreed one, so a rank that ran another shape would wait in its collectives for
ever. Whatever changes the set (a capture while serving, memory that ran out) is therefore agreed on first.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from tqdm import tqdm

from engine.fidelity import FidelityProbe
from engine.staging import to_device

_FEW_SIZES = (1, 8, 64)  # and the largest: any batch then pads to at most eight times itself
logger = logging.getLogger(__name__)
T = TypeVar("T")


def capture_sizes(max_num_seqs: int) -> list[int]:
    """Numbers of sequences to capture, ascending: dense where batches are small."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_num_seqs + 1, 32)]
    return sorted({size for size in sizes if size < max_num_seqs} | {max_num_seqs})


class Graph(Protocol):
    """A torch.cuda.CUDAGraph."""

    def replay(self) -> None:
        """Enqueue the captured work once more."""


class GraphPool:
    """Captures calls into graphs that share one memory pool."""

    def __init__(self) -> None:
        self._handle = torch.cuda.graph_pool_handle()

    def record(self, call: Callable[[], T]) -> tuple[Graph, T]:
        """(graph, the call's result, which every replay writes again). The call runs once before it is captured, on a side
        stream, which compiles kernels and fills allocator caches outside the capture."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._handle):
            result = call()
        return graph, result


class Key(NamedTuple):
    """What a graph is captured for. size: sequences; query_len: lines of each; compares: whether the fidelity probe does"""

    size: int
    query_len: int
    compares: bool = False


class GraphRunner(Generic[T]):
    """Captured decode steps of one rank.

    step: what is captured, called with the sequences of a step, int64 [C, size], and the lines of each
    padding: int64 [C] a sequence that pads
    query_lens: lines per sequence to capture, for example (1,) or (1, 3)
    agree: called by all ranks together with whether they could do a thing; tells whether all of them could
    fast_start: `capture` takes few sizes and none that compares, `capture_next` adds one at a time while the engine serves
    probe: what it writes is captured too, and what it compares in graphs of their own
    """

    def __init__(
        self,
        step: Callable[[torch.Tensor, int], T],
        padding: np.ndarray,
        *,
        sizes: list[int],
        query_lens: tuple[int, ...],
        device: torch.device,
        agree: Callable[[bool], bool],
        fast_start: bool = False,
        probe: FidelityProbe | None = None,
    ) -> None:
        self._step, self._padding, self._probe = step, padding[:, None], probe
        self._sizes, self._agree, most = sizes, agree, sizes[-1]
        self._static = torch.zeros(len(padding) * most, dtype=torch.int64, device=device)  # the graphs' only input
        self._graphs: dict[Key, tuple[Graph, T]] = {}
        self._pool = GraphPool()
        # Largest first, since the pool's later graphs fit into memory that earlier ones left.
        few = {*_FEW_SIZES, most}
        self._missing = [Key(size, query_len) for query_len in query_lens for size in reversed(sizes)]
        if probe is not None:
            self._missing += [key._replace(compares=True) for key in self._missing if key.size in few]
        self._at_start = [key for key in self._missing if not fast_start or (key.size in few and not key.compares)]

    @torch.inference_mode()
    def capture(self, show_progress: bool) -> float:
        """Capture the sizes of the start, in one memory pool. Returns the seconds it took."""
        started = time.perf_counter()
        for key in tqdm(self._at_start, "Capturing graphs", disable=not show_progress, file=sys.stderr, leave=False):
            if key in self._missing:
                self._add(key)
        return time.perf_counter() - started

    @property
    def num_captured(self) -> int:
        """Shapes of steps, counting twice those with a graph that compares."""
        return len(self._graphs)

    @property
    def complete(self) -> bool:
        """Whether no further graph will be captured."""
        return not self._missing

    @torch.inference_mode()
    def capture_next(self, num_sequences: int, query_len: int) -> None:
        """Capture one more graph: the one that a step of so many sequences, the most of any replica, would have wanted, else
        the largest. Called by all ranks between the same two steps."""
        wanted = [size for size in self._sizes if size >= num_sequences > 0][:1]
        exact = [key for key in self._missing if key.query_len == query_len and key.size in wanted]
        self._add((exact or self._missing)[0])

    def _add(self, key: Key) -> None:
        """Capture `key` on all ranks, or, where memory ran out on any, give up what is still missing.

        The pass before a capture takes its memory from what the cache's sizing left for the largest step, so it is the
        capture, with its pool of its own, that runs out; nothing executes in it, and no other rank waits for this one.
        """
        captured = None
        try:
            captured = self._capture(key)
        except RuntimeError as error:
            if not _out_of_memory(error):
                raise
        if self._agree(captured is not None) and captured is not None:
            self._graphs[key] = captured
            self._missing.remove(key)
            return
        del captured
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        most = max((found.size for found in self._graphs if found.query_len == key.query_len), default=0)
        logger.warning(
            "capturing the CUDA graph of %d sequences ran out of device memory: %d of %d graphs are used, decode steps of more "
            "than %d sequences run without one. Lower --memory-fraction or --max-num-seqs to leave room, or pass "
            "--no-cuda-graphs",
            key.size, len(self._graphs), len(self._graphs) + len(self._missing), most,
        )  # fmt: skip
        self._missing.clear()

    def _capture(self, key: Key) -> tuple[Graph, T]:
        # The pass before a capture is one of padding alone: it must not write a served sequence's slots.
        static = self._fill(key.size, self._padding[:, :0])
        if self._probe is not None:
            self._probe.forget_step(key.compares)
        return self._pool.record(lambda: self._step(static, key.query_len))

    def _fill(self, size: int, sequences: np.ndarray) -> torch.Tensor:
        """The input of graphs of that size, holding int64 [C, B] sequences and padding behind them."""
        padded = np.repeat(self._padding, size, axis=1)
        padded[:, : sequences.shape[1]] = sequences
        return self._static[: padded.size].view(padded.shape).copy_(to_device([padded], self._static.device)[0])

    def key_of(self, num_sequences: int, query_len: int) -> Key | None:
        """The smallest captured graph that holds the step; None when it runs eagerly."""
        compares = self._probe is not None and self._probe.comparing
        keys = (Key(size, query_len, compares) for size in self._sizes if size >= num_sequences)
        return next((key for key in keys if key in self._graphs), None)

    def replay(self, key: Key, sequences: np.ndarray) -> T:
        """What `step` gives for int64 [C, B] sequences and padding behind them; valid until the next call."""
        self._fill(key.size, sequences)
        graph, result = self._graphs[key]
        graph.replay()
        return result


def _out_of_memory(error: BaseException | None) -> bool:
    """Whether memory ran out: the end of a capture that failed may raise an error of its own over the first one."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        error = error.__cause__ or error.__context__
    return False
