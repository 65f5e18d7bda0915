"""The bundled model on a CUDA device against the CPU: the same forward through other kernels and FP8 products."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import models
from kernels import ops
from kernels.layout import CacheFormat
from models.causal_lm import load_model
from models.config import load_model_config
from models.layers.embedding import Head
from models.parallel import ParallelContext
from tests.models.driver import Driver

DEMO = Path(models.__file__).parent / "demo"
PROMPT, STEPS = 90, 40


def logits_and_drafts(device: str, dtype: torch.dtype, fmt: CacheFormat, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a chunked prompt, a decode step of one row each, and a step of four rows, then the same of the draft head."""
    config = load_model_config(DEMO)
    model = load_model(
        DEMO, config, ParallelContext.single(), device=device, dtype=dtype, max_model_len=512, with_mtp=True
    )  # fmt: skip
    driver = Driver(model, config, fmt=fmt, device=device)
    logits, drafts = [], []
    with torch.inference_mode():
        plans = [({}, {0: ids[:70]}), ({}, {0: ids[70:PROMPT]})]
        plans += [({0: ids[i : i + 1]}, {}) for i in range(PROMPT, PROMPT + STEPS - 4)]
        plans += [({0: ids[PROMPT + STEPS - 4 : PROMPT + STEPS]}, {})]
        for decodes, prefills in plans:
            batch = driver.batch(decodes, prefills)
            hidden = model.forward(batch)
            logits.append(model.logits(hidden).cpu())
            drafts.append(model.logits(model.mtp.forward(batch.input_ids, hidden, batch)).cpu())
    return torch.cat(logits), torch.cat(drafts)


@pytest.fixture(scope="module")
def ids() -> list[int]:
    return torch.randint(3, 2000, (PROMPT + STEPS,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.mark.cuda
def test_reference_operations_on_cuda_equal_the_cpu(ids) -> None:
    """Plain torch in FP32 on both devices; FP8 weights quantize activations on CUDA, so logits agree to their noise only."""
    want, want_drafts = logits_and_drafts("cpu", torch.float32, CacheFormat.FP32, ids)
    with ops.backend("reference"):
        got, drafts = logits_and_drafts("cuda", torch.float32, CacheFormat.FP32, ids)
    for a, b in ((got, want), (drafts, want_drafts)):
        difference = (a - b).abs() / (b.max() - b.min())
        assert float(difference.median()) < 0.01


@pytest.mark.hopper
@pytest.mark.parametrize("fmt", [CacheFormat.BF16, CacheFormat.FP8])
def test_hopper_kernels_follow_the_reference_operations(fmt, ids) -> None:
    """Report K03: one cache format, one meaning, whichever kernels run; BF16 activations and FP8 weights on both sides."""
    got, drafts = logits_and_drafts("cuda", torch.bfloat16, fmt, ids)
    with ops.backend("reference"):
        want, want_drafts = logits_and_drafts("cuda", torch.bfloat16, fmt, ids)
    for a, b in ((got, want), (drafts, want_drafts)):
        assert torch.isfinite(a).all()
        difference = (a - b).abs() / (b.max() - b.min())
        assert float(difference.median()) < 0.01
        assert float((a.argmax(-1) == b.argmax(-1)).float().mean()) > 0.85


@pytest.mark.cuda
def test_logits_are_not_rounded_to_bf16() -> None:
    """The head's FP32 logits of BF16 hidden states and weights, within FP32 summation error of float64."""
    weight = torch.randn(1000, 512, device="cuda").bfloat16()
    hidden = torch.randn(5, 512, device="cuda").bfloat16()
    logits = Head(weight, 999, ParallelContext.single())(hidden)
    want = hidden.double() @ weight.double().t()
    assert logits.dtype is torch.float32 and logits.shape == (5, 999)
    assert float((logits - want[:, :999]).abs().max()) < 1e-3
    assert float((logits.bfloat16().double() - want[:, :999]).abs().max()) > 1e-2  # which is what BF16 would have cost
