"""Whether drafts pay: measured, per size of batch, while the engine serves.

A step with drafts takes longer than one without and brings more tokens; which is worth more depends on the device, the model,
the text and the number of sequences. So both are timed, for sequences in classes of 1, 2, 3-4, 5-8 and so on: what counts is
tokens of a sequence per second, by the time between results of steps that follow each other without prompts, which holds
the host's part too. The one that lost is tried again now and then, since texts change.

Drafts never change tokens under exact acceptance, so neither does this. No torch.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field
from statistics import median

logger = logging.getLogger(__name__)
_SAMPLES = 16  # step times kept of a class and depth; their median counts
_ENOUGH = 8  # of them make a comparison
_RETRY = 1024  # steps of a class after which what lost is timed again: one step in 128 is spent on that
_MARGIN = 1.03  # a change must win by as much, or noise would toggle the depth
_KEPT = 0.98  # per step, of what is known about tokens per step


@dataclass
class _Timed:
    """Steps of one class of batches, with drafts or without. tokens: of a sequence in a step."""

    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_SAMPLES))
    tokens: float = 1.0

    @property
    def rate(self) -> float:
        """Tokens of a sequence per second."""
        return self.tokens / median(self.seconds)


@dataclass
class _Class:
    """One class of batches. drafting: what it does now; pays: the latest finding, None before the first."""

    drafting: bool = True
    pays: bool | None = None
    steps: int = 0  # since then
    plain: _Timed = field(default_factory=_Timed)
    drafted: _Timed = field(default_factory=_Timed)

    def timed(self, drafting: bool) -> _Timed:
        return self.drafted if drafting else self.plain

    def decide(self) -> bool:
        """Choose what to do next; True when there is a new finding."""
        mine, other = self.timed(self.drafting), self.timed(not self.drafting)
        if len(mine.seconds) < _ENOUGH:
            return False
        if len(other.seconds) < _ENOUGH:
            self.drafting = not self.drafting
            return False
        if self.drafting != self.pays:
            margin = {None: 1.0, True: 1 / _MARGIN, False: _MARGIN}[self.pays]
            before, self.pays = self.pays, self.drafted.rate > margin * self.plain.rate
            self.drafting, self.steps = self.pays, 0
            return self.pays != before
        if self.steps >= _RETRY:
            other.seconds.clear()
            self.drafting = not self.drafting
        return False


class DraftDepth:
    """Chooses how many drafts a replica makes next: `most`, or none.

    adaptive: False leaves it at `most`; max_batch: sequences beyond which nothing is drafted in any case, 0 for no limit
    """

    def __init__(self, most: int, *, adaptive: bool, max_batch: int) -> None:
        self._most, self._adaptive, self._max_batch = most, adaptive, max_batch
        self._classes: dict[int, _Class] = {}
        self._last: tuple[int, bool, float] | None = None  # class, drafts and time of the last result, if the next follows it

    def choose(self, num_sequences: int) -> int:
        """Drafts to make behind a step of so many sequences, for the next one."""
        if self._max_batch and num_sequences > self._max_batch:
            return 0
        if self._adaptive and num_sequences and not self._class(num_sequences).drafting:
            return 0
        return self._most

    def interrupt(self) -> None:
        """The next result does not follow the last one directly, or is no measure of decode steps."""
        self._last = None

    def observe(self, num_sequences: int, drafting: bool, num_tokens: int, now: float) -> None:
        """Take the result of a step that only decoded. num_tokens: of all sequences; now: seconds of a steady clock."""
        if not self._adaptive:
            return
        key, seen = _class_of(num_sequences), self._class(num_sequences)
        timed = seen.timed(drafting)
        if drafting:
            mean = num_tokens / num_sequences
            timed.tokens = _KEPT * timed.tokens + (1 - _KEPT) * mean if timed.seconds else mean
        if self._last is not None and self._last[:2] == (key, drafting):
            timed.seconds.append(now - self._last[2])
        self._last = (key, drafting, now)
        seen.steps += 1
        if seen.decide():
            logger.info(
                "batches of %s sequences: %d drafts %s: %.2f tokens of a sequence in %.2f ms with them, 1 in %.2f ms without",
                f"{(1 << key >> 1) + 1} to {1 << key}" if key > 1 else 1 << key,
                self._most, "pay" if seen.pays else "do not pay", seen.drafted.tokens,
                1e3 * median(seen.drafted.seconds), 1e3 * median(seen.plain.seconds),
            )  # fmt: skip

    def _class(self, num_sequences: int) -> _Class:
        return self._classes.setdefault(_class_of(num_sequences), _Class())


def _class_of(num_sequences: int) -> int:
    """n of the smallest 2**n that holds them: 1, 2, 3-4, 5-8 and so on."""
    return (num_sequences - 1).bit_length()
