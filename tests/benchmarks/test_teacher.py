"""Teacher-forced decode through a cache: the model's own logits, and the quality target on a short text."""

from __future__ import annotations

import pytest
import torch

from benchmarks.activations import held_out_ids
from benchmarks.schemes import EXACT, decode_attention, decode_with
from benchmarks.teacher import Teacher, load_demo
from engine.tokenizer import Tokenizer
from kernels.layout import CacheFormat
from tests.models.driver import Driver


@pytest.fixture(scope="module")
def demo(one_thread: None) -> tuple:
    model, config, folder = load_demo("cpu", 512)
    return model, config, held_out_ids(Tokenizer.load(folder).encode)["Persuasion"][:200]


def loss(logits: torch.Tensor, ids: list[int]) -> float:
    return float(torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:])))


def test_logits_are_those_of_one_prefill(demo: tuple) -> None:
    """Decode rows through the cache, after a prefill and without one, in chunks with a rest of three tokens."""
    model, config, ids = demo
    ids = ids[: 64 + 64 + 3]
    expected = model.logits(Driver(model, config).step(prefills={0: ids}))
    teacher = Teacher(model, config, CacheFormat.FP32, 256, "cpu")
    torch.testing.assert_close(teacher.logits(ids), expected, rtol=1e-3, atol=1e-3)
    begun = Teacher(model, config, CacheFormat.FP32, 256, "cpu")
    begun.prefill(ids[:50])
    torch.testing.assert_close(begun.logits(ids[50:]), expected[50:], rtol=1e-3, atol=1e-3)
    begun.length = 50  # set back: what follows is written and read again
    with decode_attention(decode_with(EXACT)):
        torch.testing.assert_close(begun.logits(ids[50:]), expected[50:], rtol=1e-3, atol=1e-3)


def test_fp8_cache_keeps_the_loss_of_held_out_text(demo: tuple) -> None:
    """0.5 % of perplexity is 0.005 nats a token; benchmarks.quality measures it on more text."""
    model, config, ids = demo
    losses = {
        fmt: loss(Teacher(model, config, fmt, 256, "cpu").logits(ids[:-1]), ids) for fmt in (CacheFormat.FP32, CacheFormat.FP8)
    }
    assert losses[CacheFormat.FP8] != losses[CacheFormat.FP32]
    assert abs(losses[CacheFormat.FP8] - losses[CacheFormat.FP32]) < 0.005
