"""Logits and greedy tokens against transformers, FP32 with the exact cache, at every position of prefill and decode."""

from __future__ import annotations

import pytest
import torch

from kernels.layout import CacheFormat
from models.causal_lm import CausalLM, load_model
from models.config import ModelConfig, load_model_config
from models.parallel import ParallelContext
from tests.comparator import assert_logits_within, assert_same_tokens
from tests.models.driver import Driver
from tests.reference_checkpoints import reference_checkpoint, references

DEFAULT = [
    "deepseek_v3-tiny",
    "deepseek_v2-tiny",
    "longcat_flash-tiny",
    "deepseek_v3-slim",
    "longcat_flash-slim",
    "deepseek_v3-tiny-fp8",
    "deepseek_v3-tiny-ue8m0",
    "longcat_flash-tiny-fp8",
]
SLOW = ["deepseek_v3-real", "deepseek_v2-real", "longcat_flash-real", "deepseek_v3-slim-fp8", "deepseek_v3-slim-ue8m0"]
ALL = [*DEFAULT, *(pytest.param(v, marks=pytest.mark.slow) for v in SLOW)]
WITH_MTP = [v for v in ALL if "v2" not in str(v)]
TOLERANCE = 1e-4  # of the logits' range


pytestmark = pytest.mark.usefixtures("one_thread")


def load(variant: str, *, with_mtp: bool = False) -> tuple[CausalLM, ModelConfig]:
    folder = reference_checkpoint(variant)
    config = load_model_config(folder)
    model = load_model(
        folder, config, ParallelContext.single(), device="cpu", dtype=torch.float32, max_model_len=512, with_mtp=with_mtp
    )  # fmt: skip
    return model, config


@pytest.mark.parametrize("variant", ALL)
def test_prefill_and_decode_equal_transformers(variant) -> None:
    """Reports N17, N18: parity at every position, with YaRN's softmax factor and angle factor. Reports L08, L09: FP8
    blocks that are partial, with float and power-of-two scales, against their dequantized values. Report C08."""
    model, config = load(variant)
    for ref in references(variant):
        tokens, logits = Driver(model, config).greedy(ref.prompt, ref.num_generated)
        assert_same_tokens(tokens, ref.generated, label=f"{variant}, prompt of {len(ref.prompt)}: ")
        want = ref.logits[: len(logits)]
        assert_logits_within(logits, want, TOLERANCE * ref.logit_range, label=f"{variant}, prompt of {len(ref.prompt)}: ")


@pytest.mark.parametrize("variant", WITH_MTP)
def test_draft_logits_equal_transformers(variant) -> None:
    """Report L05: the draft layer loads by the same names. Report C10: LongCat's head is dense, DeepSeek's has experts."""
    model, config = load(variant, with_mtp=True)
    for ref in references(variant):
        driver = Driver(model, config)
        with torch.inference_mode():
            batch = driver.batch({}, {0: ref.ids[:-1]})
            drafts = model.mtp.forward(torch.tensor(ref.ids[1:]), model.forward(batch), batch)
            logits = model.logits(drafts)
        assert_logits_within(logits, ref.mtp_logits, TOLERANCE * ref.logit_range, label=variant)


@pytest.mark.parametrize("variant", ["deepseek_v3-tiny", "deepseek_v2-tiny", "longcat_flash-tiny"])
@pytest.mark.parametrize("chunks", [[64, 64, 64, 200], [1, 2, 100, 37, 190]])
def test_chunks_and_context_pieces_equal_transformers(variant, chunks) -> None:
    """A prompt in chunks, its cached context fetched in pieces that end inside a block. Report N10: contexts just below and
    above the expansion workspace."""
    model, config = load(variant)
    ref = references(variant)[-1]
    for piece in (48, 1 << 20):
        driver = Driver(model, config, context_piece=piece)
        logits, start = [], 0
        for size in chunks:
            part = ref.ids[start : start + size]
            start += size
            if part:
                logits.append(model.logits(driver.step(prefills={0: part})))
        got = torch.cat(logits)
        assert_logits_within(got, ref.logits[: len(got)], TOLERANCE * ref.logit_range, label=f"piece {piece}: ")


@pytest.mark.parametrize("variant", ["deepseek_v3-tiny", "longcat_flash-tiny"])
def test_one_step_mixes_decode_rows_and_prefill_chunks(variant) -> None:
    """Fresh and resumed prefills, and two decode sequences with three query rows each, in one forward."""
    model, config = load(variant)
    refs = references(variant)
    driver = Driver(model, config)
    long, middle = refs[-1].ids, refs[-2].ids
    driver.step(prefills={0: long[:200], 1: middle[:90], 2: long[:70]})
    hidden = driver.step(decodes={0: long[200:203], 1: middle[90:93]}, prefills={2: long[70:110], 3: middle[:65]})
    got = model.logits(hidden)
    want = torch.cat(
        (refs[-1].logits[200:203], refs[-2].logits[90:93], refs[-1].logits[70:110], refs[-2].logits[:65])
    )  # fmt: skip
    assert_logits_within(got, want, TOLERANCE * refs[-1].logit_range)


@pytest.mark.parametrize("variant", ["deepseek_v3-slim", "longcat_flash-slim"])
def test_fp8_cache_under_teacher_forcing(variant) -> None:
    """The FP8 cache moves logits by less than a few percent of their range, and not at all positions in one direction.
    Report K02: first tokens agree with the exact cache's on a fixed prompt set."""
    model, config = load(variant)
    for ref in references(variant):
        driver = Driver(model, config, fmt=CacheFormat.FP8)
        prompt = len(ref.prompt)
        logits = [model.logits(driver.step(prefills={0: ref.prompt}))]
        for token in ref.generated[:-1]:
            logits.append(model.logits(driver.step(decodes={0: [token]})))
        got = torch.cat(logits)
        # A prompt in one chunk attends to its own unquantized keys.
        assert_logits_within(got[:prompt], ref.logits[:prompt], TOLERANCE * ref.logit_range)
        difference = (got[prompt:] - ref.logits[prompt:-1]) / ref.logit_range
        assert 0.0 < float(difference.abs().mean()) < 0.02
        assert abs(float(difference.mean())) < 0.01
        assert int(got[prompt - 1].argmax()) == ref.generated[0]


def test_bf16_stays_close_to_fp32() -> None:
    folder = reference_checkpoint("deepseek_v3-slim")
    config = load_model_config(folder)
    model = load_model(folder, config, ParallelContext.single(), device="cpu", dtype=torch.bfloat16, max_model_len=512)
    ref = references("deepseek_v3-slim")[0]
    got = model.logits(Driver(model, config, fmt=CacheFormat.BF16).step(prefills={0: ref.ids}))
    assert got.dtype is torch.float32
    difference = (got - ref.logits).abs() / ref.logit_range
    assert float(difference.median()) < 0.02
