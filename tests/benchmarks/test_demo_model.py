"""The bundled demo model: published layout, quality of the shipped weights, and the recall prompts made for it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer

from benchmarks.demo_model.checkpoint import load_checkpoint
from benchmarks.demo_model.evaluate import heldout_metrics, load_heldout, recall_accuracy, recall_task
from benchmarks.demo_model.model import DemoModel
from benchmarks.demo_model.recall import CODE_DIGITS

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO / "tokenizer.json"))


@pytest.fixture(scope="module")
def demo() -> DemoModel:
    return load_checkpoint(DEMO, torch.float32)


def stored(name: str) -> torch.Tensor:
    file = json.loads((DEMO / "model.safetensors.index.json").read_text())["weight_map"][name]
    with safe_open(DEMO / file, framework="pt") as tensors:
        return tensors.get_tensor(name)


def test_linears_are_stored_in_fp8_blocks_and_the_rest_as_published() -> None:
    config = json.loads((DEMO / "config.json").read_text())
    names = json.loads((DEMO / "model.safetensors.index.json").read_text())["weight_map"]
    mtp = f"model.layers.{config['num_hidden_layers']}."
    for name in names:
        if name.endswith("_scale_inv"):
            rows, cols = stored(name.removesuffix("_scale_inv")).shape
            assert stored(name).shape == (-(-rows // 128), -(-cols // 128)), name
        elif name.endswith("e_score_correction_bias"):
            assert stored(name).dtype == torch.float32
        else:
            plain = "norm" in name or name.endswith(("embed_tokens.weight", "head.weight", "mlp.gate.weight", "eh_proj.weight"))
            assert stored(name).dtype == (torch.bfloat16 if plain else torch.float8_e4m3fn), name
            assert (name + "_scale_inv" in names) is not plain, name
    assert torch.equal(stored(mtp + "embed_tokens.weight"), stored("model.embed_tokens.weight"))
    assert torch.equal(stored(mtp + "shared_head.head.weight"), stored("lm_head.weight"))


def test_the_shipped_weights_are_trained(demo: DemoModel, tokenizer: Tokenizer) -> None:
    novel = {"Persuasion": load_heldout(tokenizer)["Persuasion"][:200]}
    metrics = heldout_metrics(demo, novel, length=200)
    assert metrics["perplexity"] < 60, "an untrained model of this vocabulary is above 2,000"
    assert metrics["draft_agreement"] > 0.5


def test_codes_are_recalled_from_their_statement(demo: DemoModel, tokenizer: Tokenizer) -> None:
    filler = load_heldout(tokenizer)["Ruth"]
    codes, _ = recall_accuracy(demo, recall_task(tokenizer), filler, distance=200, prompts=2)
    assert codes == 1


@pytest.mark.parametrize("distance", [40, 100, 1000])
def test_a_recall_prompt_has_the_distance_it_was_asked_for(tokenizer: Tokenizer, distance: int) -> None:
    prompt, answer = recall_task(tokenizer).prompt(np.random.default_rng(3), np.full(distance, 1000), distance)
    whole = prompt + answer
    assert whole[len(prompt) - distance : len(prompt) - distance + CODE_DIGITS] == answer
    assert len(answer) == CODE_DIGITS
    assert tokenizer.decode(prompt).endswith(" is")
