"""CUDA graphs of decode steps: the model's forward captured per (sequences, lines per sequence), replayed on static inputs.

Models do not know about graphs: the same `forward` is captured. The split plan is made inside the graph from lengths on
the device, so a replay follows them. A step runs padded up to the next captured size; padded sequences have length 0, slot
-1 and no experts. Steps with prefill, or with more sequences than were captured, run eagerly. Steps in which the fidelity probe
compares have graphs of their own, of few sizes, since they are rare.

Every rank holds the same graphs at any time. That is more than a matter of speed: a replay exchanges the padded number of
rows with the other ranks, an eager pass the agreed one, so a rank that ran another shape would wait in its collectives for
ever. Whatever changes the set (a capture while serving, memory that ran out) is therefore agreed on first.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

import torch
from tqdm import tqdm

from engine.fidelity import FidelityProbe
from engine.speculative import Drafter, DraftRows
from kernels import ops
from kernels.layout import CacheFormat, LatentCache
from models.batch import AttentionMetadata, ForwardBatch

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


@dataclass(frozen=True)
class _Captured:
    graph: Graph
    hidden: torch.Tensor
    draft: Graph | None


class GraphRunner:
    """Captured forwards of one rank. `forward` has the model's signature and falls back to it for what was not captured.

    query_lens: lines per sequence to capture, for example (1,) or (1, 3)
    agree: called by all ranks together with whether they could do a thing; tells whether all of them could
    fast_start: `capture` takes few sizes and none that compares, `capture_next` adds one at a time while the engine serves
    drafter: its passes after a step are captured as a second graph, since sampling lies between the two
    probe: what it writes is captured too, and what it compares in graphs of their own
    """

    def __init__(
        self,
        forward: Callable[[ForwardBatch], torch.Tensor],
        caches: list[LatentCache],
        *,
        sizes: list[int],
        query_lens: tuple[int, ...],
        max_blocks: int,
        null_block: int,
        num_heads: int,
        fmt: CacheFormat,
        device: torch.device,
        agree: Callable[[bool], bool],
        fast_start: bool = False,
        drafter: Drafter | None = None,
        probe: FidelityProbe | None = None,
    ) -> None:
        self._eager, self._caches, self._drafter, self._probe = forward, caches, drafter, probe
        self._sizes, self._agree = sizes, agree
        self._num_heads, self._format = num_heads, fmt
        most, lines = sizes[-1], sizes[-1] * max(query_lens)
        self._ids = torch.zeros(lines, dtype=torch.int64, device=device)
        self._positions = torch.zeros(lines, dtype=torch.int64, device=device)
        self._slots = torch.full((lines,), -1, dtype=torch.int64, device=device)
        self._live = torch.zeros(lines, dtype=torch.bool, device=device)
        self._seq_lens = torch.zeros(most, dtype=torch.int32, device=device)
        self._num_query = torch.zeros(most, dtype=torch.int32, device=device)
        self._block_table = torch.full((most, max_blocks), null_block, dtype=torch.int32, device=device)
        self._next_ids = torch.zeros(lines, dtype=torch.int64, device=device)
        self._accepted = torch.zeros(most, dtype=torch.int64, device=device)
        self._rows = torch.zeros(most, dtype=torch.int64, device=device)
        self._num_slots = torch.zeros(most, dtype=torch.int64, device=device)
        self._graphs: dict[Key, _Captured] = {}
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

    def _capture(self, key: Key) -> _Captured:
        size, query_len, compares = key
        self._forget_step(compares)
        graph, hidden = self._pool.record(lambda: self._eager(self._static_batch(size, query_len)))
        draft = self._pool.record(lambda: self._draft_static(size, query_len, hidden))[0] if self._drafter is not None else None
        return _Captured(graph, hidden, draft)

    def _forget_step(self, compares: bool) -> None:
        """Make the static inputs those of padding alone: the pass before a capture must not write a served sequence's slots."""
        self._ids.zero_()
        self._positions.zero_()
        self._slots.fill_(-1)
        self._live.fill_(False)
        self._seq_lens.zero_()
        self._num_query.zero_()
        self._next_ids.zero_()
        self._accepted.zero_()
        self._num_slots.zero_()
        if self._drafter is not None:
            self._rows.fill_(self._drafter.padded_row)
        if self._probe is not None:
            self._probe.forget_step(compares)

    def _draft_static(self, size: int, query_len: int, hidden: torch.Tensor) -> None:
        assert self._drafter is not None
        lines = torch.arange(0, size * query_len, query_len, device=self._rows.device)
        positions, accepted = self._positions[: size * query_len : query_len], None
        if query_len > 1:
            accepted = self._accepted[:size]
            lines, positions = lines + accepted, positions + accepted
        rows = DraftRows(lines, self._rows[:size], positions, self._num_slots[:size], self._block_table[:size])
        next_ids = self._next_ids[: size * query_len]
        depth = self.draft_depth(query_len)
        self._drafter.draft(self._static_batch(size, query_len), hidden, next_ids, accepted, rows, depth=depth)

    def draft_depth(self, query_len: int) -> int:
        """Drafts that the graph behind a step of so many lines makes: none where nothing was drafted before, so that a batch
        for which speculation is off only keeps the draft layer up to date."""
        assert self._drafter is not None
        return self._drafter.depth if query_len > 1 else 0

    def _static_batch(self, size: int, query_len: int) -> ForwardBatch:
        lines = size * query_len
        seq_lens = self._seq_lens[:size]
        attention = AttentionMetadata(
            num_decode_seqs=size,
            query_len=query_len,
            slots=self._slots[:lines],
            block_table=self._block_table[:size],
            seq_lens=seq_lens,
            num_query=self._num_query[:size] if query_len > 1 else None,
            decode_plan=ops.plan_decode(seq_lens, query_len=query_len, num_heads=self._num_heads, fmt=self._format),
            prefill=None,
        )
        return ForwardBatch(
            self._ids[:lines],
            self._positions[:lines],
            attention,
            self._caches,
            row_mask=self._live[:lines],
            ep_rows=lines,
            probe=self._probe,
        )

    def key_of(self, num_sequences: int, query_len: int) -> Key | None:
        """The smallest captured graph that holds the step; None when it runs eagerly."""
        compares = self._probe is not None and self._probe.comparing
        keys = (Key(size, query_len, compares) for size in self._sizes if size >= num_sequences)
        return next((key for key in keys if key in self._graphs), None)

    def forward(self, batch: ForwardBatch, num_sequences: int | None) -> torch.Tensor:
        """Hidden states [T, D], computed by the graph of at least `num_sequences` sequences if there is one.

        num_sequences: the most of any replica, so that all replay the same shape; None when any replica has prefill.
        The result is valid until the next call.
        """
        meta = batch.attention
        key = self.key_of(num_sequences, meta.query_len) if num_sequences is not None else None
        if key is None:
            return self._eager(batch)
        captured, size = self._graphs[key], key.size
        count, lines, all_lines = meta.num_decode_seqs, batch.num_tokens, size * meta.query_len
        if lines:
            into = [self._ids[:lines], self._positions[:lines], self._slots[:lines]]
            torch._foreach_copy_(into, [batch.input_ids, batch.positions, meta.slots])
        self._seq_lens[:count].copy_(meta.seq_lens)
        self._block_table[:count, : meta.block_table.shape[1]].copy_(meta.block_table)
        if batch.row_mask is None:
            self._live[:lines].fill_(True)
        else:
            self._live[:lines].copy_(batch.row_mask)
        if meta.num_query is not None:
            self._num_query[:count].copy_(meta.num_query)
        if lines < all_lines:
            self._slots[lines:all_lines].fill_(-1)
            self._live[lines:all_lines].fill_(False)
            self._seq_lens[count:size].zero_()
        captured.graph.replay()
        return captured.hidden[:lines]

    def draft(
        self, num_sequences: int, query_len: int, next_ids: torch.Tensor, accepted: torch.Tensor | None, rows: DraftRows
    ) -> bool:
        """Replay the draft passes behind the step that `forward` just replayed. False when that step ran eagerly."""
        key = self.key_of(num_sequences, query_len)
        captured = self._graphs[key] if key is not None else None
        if key is None or captured is None or captured.draft is None or self._drafter is None:
            return False
        size, count = key.size, len(rows.rows)
        self._next_ids[: len(next_ids)].copy_(next_ids)
        self._rows[:count].copy_(rows.rows)
        self._rows[count:size].fill_(self._drafter.padded_row)
        self._num_slots[:count].copy_(rows.num_slots)
        self._num_slots[count:size].zero_()
        if accepted is not None:
            self._accepted[:count].copy_(accepted)
            self._accepted[count:size].zero_()
        captured.draft.replay()
        return True


def _out_of_memory(error: BaseException | None) -> bool:
    """Whether memory ran out: the end of a capture that failed may raise an error of its own over the first one."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        error = error.__cause__ or error.__context__
    return False
