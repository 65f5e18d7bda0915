"""The synthetic recall task: codes of named things, stated once in running text and asked for again much later.

A *statement* is "The code of the amber falcon is 4821."; asking is the same sentence cut before the digits. Distance is
counted in tokens from the first digit of the statement to the first digit of the answer. Needs only numpy and a function that
encodes text, so benchmarks of the engine use the same prompts as the training does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

# fmt: off
ADJECTIVES = (  # noqa: SIM905
    "amber ancient bitter black blue bold brave bright broken bronze calm clever cold copper crimson cruel dark deep "
    "distant eager early empty faithful fallen fierce gentle golden grand great green grey happy hidden hollow holy "
    "honest humble iron little lonely lost lucky merry mighty narrow noble old pale patient plain proud purple quick "
    "quiet red royal sacred secret sharp silent silver simple sleepy small soft solemn strange strong sweet swift tall "
    "tender tiny upper weary white wicked wild winter wise wooden yellow young"
).split()
NOUNS = (  # noqa: SIM905
    "anchor apple arrow axe barrel basket bear bell boat book bottle bow bread bridge bull camel candle castle cat chain "
    "chair chest cloak cloud coat coin cow cross crown cup deer dog door dove dragon drum duck eagle engine falcon feather "
    "field fish flag flower flute forest fountain fox garden gate ghost giant goat hammer harbor hare harp hat hawk heart "
    "helmet hill horn horse house island jewel key king kite knife ladder lake lamb lamp leaf letter lion lock lute "
    "mantle mask mill mirror moon mountain mouse needle oak ocean owl ox palace pearl pen pillar pipe plough prince "
    "queen rabbit raven ring river road robe rock rope rose sail sheep shield ship shoe snake spear spider star stone "
    "stork sword table tiger torch tower tree trumpet valley vine violin wagon wall well wheel whale window wing wolf"
).split()
# fmt: on
CODE_DIGITS = 4


@dataclass(frozen=True)
class RecallRow:
    """tokens: int64 [length]; answer: bool [length], true at digits of answers; stated: same, at digits of statements.

    `distances` holds (index of an answer's first digit, tokens back to the statement's first digit).
    """

    tokens: np.ndarray
    answer: np.ndarray
    stated: np.ndarray
    distances: list[tuple[int, int]]


class RecallTask:
    """Builds rows and prompts of the task for one tokenizer; all randomness comes from the generator passed in."""

    def __init__(self, encode: Callable[[str], list[int]]) -> None:
        self._prefix = {
            (a, n): encode(f"\n\nThe code of the {adjective} {noun} is")
            for a, adjective in enumerate(ADJECTIVES)
            for n, noun in enumerate(NOUNS)
        }
        digits = [encode(f" {digit}{digit}") for digit in range(10)]
        if any(len(pair) != 2 for pair in digits):
            raise ValueError("the recall task needs a tokenizer that makes one token of each digit")
        self._first = [pair[0] for pair in digits]
        self._next = [pair[1] for pair in digits]
        self._end = encode(".\n\n")

    def _names(self, rng: np.random.Generator, count: int) -> list[tuple[int, int]]:
        """`count` names with distinct nouns as long as there are enough nouns."""
        nouns = rng.permutation(len(NOUNS))
        return [(int(rng.integers(len(ADJECTIVES))), int(nouns[i % len(NOUNS)])) for i in range(count)]

    def _code(self, rng: np.random.Generator) -> list[int]:
        digits = rng.integers(10, size=CODE_DIGITS)
        return [self._first[digits[0]], *(self._next[d] for d in digits[1:])]

    def row(self, rng: np.random.Generator, filler: np.ndarray, length: int, num_facts: int, num_questions: int) -> RecallRow:
        """A training row: statements and questions scattered over `filler` (at least `length` tokens of running text)."""
        names, codes = self._names(rng, num_facts), [self._code(rng) for _ in range(num_facts)]
        made = rng.uniform(0, 0.9, num_facts) * length
        asked = rng.integers(num_facts, size=num_questions)
        events = [(position, fact) for fact, position in enumerate(made)]
        events += [(rng.uniform(made[fact] + 1, length), int(fact)) for fact in asked]
        tokens, answer, stated = [], np.zeros(length, bool), np.zeros(length, bool)
        distances: list[tuple[int, int]] = []
        first_seen: dict[int, int] = {}
        used = 0
        for position, fact in sorted(events):
            take = max(0, int(position) - len(tokens))
            tokens.extend(filler[used : used + take].tolist())
            used += take
            tokens.extend(self._prefix[names[fact]])
            start = len(tokens)
            tokens.extend(codes[fact] + self._end)
            if start + CODE_DIGITS > length:
                break
            if fact in first_seen:
                distances.append((start, start - first_seen[fact]))
                answer[start : start + CODE_DIGITS] = True
            else:
                stated[start : start + CODE_DIGITS] = True
                first_seen[fact] = start
        tokens.extend(filler[used : used + max(0, length - len(tokens))].tolist())
        return RecallRow(np.asarray(tokens[:length], np.int64), answer, stated, distances)

    def prompt(
        self, rng: np.random.Generator, filler: np.ndarray, distance: int, distractors: int = 3, bos: Sequence[int] = (0,)
    ) -> tuple[list[int], list[int]]:
        """(prompt ids, the CODE_DIGITS answer ids) with the asked statement `distance` tokens before its answer.

        `distractors` other statements lie at random places between the two, while they fit. `filler` needs `distance` tokens.
        """
        names = self._names(rng, distractors + 1)
        asked, answer = self._prefix[names[0]], self._code(rng)
        statements = [self._prefix[name] + self._code(rng) + self._end for name in names[1:]]
        gap = distance - CODE_DIGITS - len(self._end) - len(asked)
        while statements and sum(map(len, statements)) > gap:
            statements.pop()
        room = gap - sum(map(len, statements))
        if room < 0:
            raise ValueError(f"a recall distance of {distance} tokens is shorter than the question itself")
        cuts = np.sort(rng.integers(0, room + 1, size=len(statements)))
        between: list[int] = []
        previous = 0
        for cut, statement in zip(cuts, statements, strict=True):
            between += filler[previous:cut].tolist() + statement
            previous = int(cut)
        between += filler[previous:room].tolist()
        return [*bos, *asked, *answer, *self._end, *between, *asked], answer
