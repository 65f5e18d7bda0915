"""The sums of Hopper's FP8 tensor cores, emulated: 13 bits below the largest term.

One instruction adds 32 products of E4M3 numbers and the accumulator. Every product and the accumulator are first cut, each on
its own and toward zero, to multiples of 2^-13 of the largest magnitude among them (rounded down to a power of two). Probes of
the instruction on an H200 gave this rule; `benchmarks.kernel_figures` measures the same effect with the chip itself.

Accumulating P.V in place over a whole context ("single-level") therefore loses every contribution that has become small
beside the running sum. Folding each block's sum into FP32 registers ("two-level") does not.
"""

from __future__ import annotations

import torch

from benchmarks.schemes import Keys
from kernels.layout import FP8, FP8_MAX

STEP = 32  # products added by one instruction
FRACTION_BITS = 13


def add_products(acc: torch.Tensor, p: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """acc [M, C] + p [M, 32] @ v [32, C] as one instruction computes it; inputs hold E4M3 values."""
    terms = torch.cat((p.unsqueeze(2) * v.unsqueeze(0), acc.unsqueeze(1)), 1)
    _, exponent = torch.frexp(terms.abs().amax(1, keepdim=True))
    quantum = torch.exp2((exponent - 1 - FRACTION_BITS).float())
    return ((terms / quantum).trunc_() * quantum).sum(1)


def p_times_v(scores: torch.Tensor, keys: Keys, *, p_block: int, two_level: bool) -> torch.Tensor:
    """Algorithm 1's output [M, C] for logits [M, L] with emulated sums; keys hold a scale per token.

    The accumulator is rescaled between blocks in FP32, as the kernel's registers are.
    """
    assert keys.scale is not None
    codes = keys.content / keys.scale.unsqueeze(1)
    y = (scores + keys.scale.log()).double()
    out = torch.zeros(len(scores), codes.shape[1], dtype=torch.float64, device=y.device)
    acc = torch.zeros(len(scores), codes.shape[1], device=y.device)
    total = torch.zeros(len(scores), 1, dtype=torch.float64, device=y.device)
    top = torch.full_like(total, -1e30)  # of the running sums; in place, of the last block
    for start in range(0, y.shape[1], p_block):
        tile = y[:, start : start + p_block]
        block_top = tile.amax(1, keepdim=True)
        p = (tile - block_top).exp()
        sums = (p / keys.scale[start : start + p_block]).sum(1, keepdim=True)
        rounded = (p.float() * FP8_MAX).to(FP8).float()
        if two_level:
            acc = torch.zeros_like(acc)
        else:
            acc = acc * (top - block_top).exp().float()  # into the scale of this block's P (line 9 of Algorithm 1)
        for step in range(0, tile.shape[1], STEP):
            acc = add_products(acc, rounded[:, step : step + STEP], codes[start + step : start + step + STEP])
        if two_level:
            new_top = torch.maximum(top, block_top)
            out = out * (top - new_top).exp() + acc.double() * (block_top - new_top).exp()
            total = total * (top - new_top).exp() + sums * (block_top - new_top).exp()
            top = new_top
        else:
            total = total * (top - block_top).exp() + sums
            top = block_top
    return ((out if two_level else acc.double()) / FP8_MAX / total).float()
