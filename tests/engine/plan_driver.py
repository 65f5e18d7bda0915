"""Hand-made step plans for a few sequences, without a scheduler."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.model_runner import ModelRunner, PendingStep
from engine.plan import NewSequence, SequenceStep, StepPlan
from engine.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


class Driver:
    """Makes plans for a few sequences as a scheduler would, with odd block ids."""

    def __init__(self, runner: ModelRunner, seed: int = 0) -> None:
        self.runner = runner
        self.free_blocks = torch.randperm(runner.cache.num_blocks, generator=torch.Generator().manual_seed(seed)).tolist()
        self.blocks: dict[int, int] = {}
        self.computed: dict[int, int] = {}
        self.new: list[NewSequence] = []
        self.freed: list[int] = []
        self.steps = 0

    def start(self, row: int, num_prompt: int, params: SamplingParams = GREEDY, known: Sequence[int] = ()) -> None:
        self.blocks[row] = self.computed[row] = 0
        self.new.append(NewSequence(row, f"r{row}", params, num_prompt, max(0, len(known) - num_prompt), list(known), [1]))

    def free(self, row: int) -> None:
        self.freed.append(row)

    def step_of(self, row: int, tokens: Sequence[int] = (), **kw) -> SequenceStep:
        start = self.computed[row]
        end = start + (len(tokens) or 1)
        fresh = []
        while self.blocks[row] * 64 < end:
            fresh.append(self.free_blocks.pop())
            self.blocks[row] += 1
        self.computed[row] = end
        return SequenceStep(row, start, list(tokens), fresh, **kw)

    def run(self, decodes: Sequence[SequenceStep] = (), prefills: Sequence[SequenceStep] = ()) -> PendingStep:
        plan = StepPlan(self.steps, list(decodes), list(prefills), self.new, self.freed)
        self.new, self.freed = [], []
        self.steps += 1
        return self.runner.run(plan)
