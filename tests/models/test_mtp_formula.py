"""The draft heads against their formulas, computed here in FP64 from the checkpoint's tensors by their published names.

    x_i = eh_proj [ norm(embedding(t_{i+1})) ; norm(h_i) ]
    u   = x + attention(norm(x));  u = u + mlp(norm(u));  g = norm(u);  logits of t_{i+2} = head g

Nothing of models/ is used but the model under test. Attention is computed from keys and values of every head, not absorbed.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from models.causal_lm import load_model
from models.config import load_model_config
from models.parallel import ParallelContext
from tests.models.driver import Driver
from tests.reference_checkpoints import reference_checkpoint

TOLERANCE = 2e-6  # of the logits' range; FP32 against FP64
CASES = [
    "deepseek_v3-tiny",
    "longcat_flash-tiny",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("deepseek_v3-real", "longcat_flash-real")),
]


class Checkpoint:
    """config.json, and tensors in FP64 by published name."""

    def __init__(self, folder: Path) -> None:
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self._tensors: dict[str, torch.Tensor] = {}
        for path in folder.glob("model-*.safetensors"):
            self._tensors |= {name: tensor.double() for name, tensor in load_file(path).items()}

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def swiglu(c: Checkpoint, name: str, x: torch.Tensor) -> torch.Tensor:
    gate, up, down = (c[f"{name}.{part}_proj.weight"] for part in ("gate", "up", "down"))
    return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T


def yarn_magnitude(scale: float, factor: float) -> float:
    return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0


def rotate(x: torch.Tensor, config: dict[str, Any]) -> torch.Tensor:
    """Pairs (2i, 2i + 1) of x [T, heads, dim] turned by position * theta_i, row r being position r."""
    count, dim = len(x), x.shape[-1]
    inverse = config["rope_theta"] ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    magnitude = 1.0
    if yarn := config.get("rope_scaling"):

        def turns(rotations: float) -> float:
            original = yarn["original_max_position_embeddings"]
            return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(config["rope_theta"]))

        low, high = max(math.floor(turns(yarn["beta_fast"])), 0), min(math.ceil(turns(yarn["beta_slow"])), dim - 1)
        ramp = ((torch.arange(dim // 2, dtype=torch.float64) - low) / max(high - low, 1e-3)).clamp(0, 1)
        inverse = inverse * (1 - ramp) + inverse / yarn["factor"] * ramp
        magnitude = yarn_magnitude(yarn["mscale"], yarn["factor"]) / yarn_magnitude(yarn["mscale_all_dim"], yarn["factor"])
    angles = torch.arange(count, dtype=torch.float64)[:, None, None] * inverse
    even, odd = x[..., ::2], x[..., 1::2]
    turned = torch.stack((even * angles.cos() - odd * angles.sin(), odd * angles.cos() + even * angles.sin()), dim=-1)
    return turned.flatten(-2) * magnitude


def attention(c: Checkpoint, name: str, x: torch.Tensor, longcat: bool) -> torch.Tensor:
    """Causal MLA over all rows of x [T, D]."""
    k = c.config
    heads, nope, rope, v = (k[n] for n in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    q_factor = math.sqrt(k["hidden_size"] / k["q_lora_rank"]) if longcat else 1.0
    latent_factor = math.sqrt(k["hidden_size"] / k["kv_lora_rank"]) if longcat else 1.0
    q_low = rms(x @ c[f"{name}.q_a_proj.weight"].T, c[f"{name}.q_a_layernorm.weight"], 1e-6)
    q = (q_low @ c[f"{name}.q_b_proj.weight"].T).view(-1, heads, nope + rope) * q_factor
    low, k_rope = (x @ c[f"{name}.kv_a_proj_with_mqa.weight"].T).split((k["kv_lora_rank"], rope), dim=-1)
    latent = rms(low, c[f"{name}.kv_a_layernorm.weight"], 1e-6) * latent_factor
    k_nope, values = (latent @ c[f"{name}.kv_b_proj.weight"].T).view(-1, heads, nope + v).split((nope, v), dim=-1)
    queries = torch.cat((q[..., :nope], rotate(q[..., nope:], k)), dim=-1)
    keys = torch.cat((k_nope, rotate(k_rope[:, None], k).expand(-1, heads, -1)), dim=-1)
    yarn = k.get("rope_scaling")
    scale = (nope + rope) ** -0.5 * (yarn_magnitude(yarn["mscale_all_dim"], yarn["factor"]) ** 2 if yarn else 1.0)
    scores = torch.einsum("qhd,khd->hqk", queries, keys) * scale
    scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -torch.inf)
    mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
    return mixed.flatten(1) @ c[f"{name}.o_proj.weight"].T


def experts(c: Checkpoint, name: str, x: torch.Tensor) -> torch.Tensor:
    """DeepSeek-V3's router, token by token, its experts and the shared one."""
    k = c.config
    scores = (x @ c[f"{name}.gate.weight"].T).sigmoid()
    choice = scores + c[f"{name}.gate.e_score_correction_bias"]
    out = swiglu(c, f"{name}.shared_experts", x)
    for row in range(len(x)):
        groups = choice[row].view(k["n_group"], -1)
        best = groups.topk(2, dim=-1).values.sum(-1)
        ordered = best.sort(descending=True).values
        assert ordered[k["topk_group"] - 1] - ordered[k["topk_group"]] > 1e-5, "a near-tie of groups proves nothing"
        kept = torch.full_like(groups, -torch.inf)
        top_groups = best.topk(k["topk_group"]).indices
        kept[top_groups] = groups[top_groups]
        ordered = kept.flatten().sort(descending=True).values
        assert ordered[k["num_experts_per_tok"] - 1] - ordered[k["num_experts_per_tok"]] > 1e-5, "a near-tie of experts"
        chosen = kept.flatten().topk(k["num_experts_per_tok"]).indices
        weights = scores[row, chosen] / scores[row, chosen].sum() * k["routed_scaling_factor"]
        for weight, expert in zip(weights, chosen.tolist()):
            out[row] += weight * swiglu(c, f"{name}.experts.{expert}", x[row])
    return out


def draft(c: Checkpoint, next_ids: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(g [T, D], logits [T, vocab]) of rows at positions 0 .. T - 1; next_ids int64 [T], hidden FP64 [T, D]."""
    longcat = c.config["model_type"] == "longcat_flash"
    eps = c.config["rms_norm_eps"]
    if longcat:
        layer, embedding, final, head = "model.mtp.layers.0", "model.mtp.embed_tokens", "model.mtp.norm", "lm_head"
        e_norm, h_norm = f"{layer}.enorm.m", f"{layer}.hnorm.m"
    else:
        layer = f"model.layers.{c.config['num_hidden_layers']}"
        embedding, final, head = f"{layer}.embed_tokens", f"{layer}.shared_head.norm", f"{layer}.shared_head.head"
        e_norm, h_norm = f"{layer}.enorm", f"{layer}.hnorm"
    embedded = rms(c[f"{embedding}.weight"][next_ids], c[f"{e_norm}.weight"], eps)
    x = torch.cat((embedded, rms(hidden, c[f"{h_norm}.weight"], eps)), dim=-1) @ c[f"{layer}.eh_proj.weight"].T
    x = x + attention(c, f"{layer}.self_attn", rms(x, c[f"{layer}.input_layernorm.weight"], eps), longcat)
    h = rms(x, c[f"{layer}.post_attention_layernorm.weight"], eps)
    x = x + (swiglu(c, f"{layer}.transformer_layer.mlp", h) if longcat else experts(c, f"{layer}.mlp", h))
    g = rms(x, c[f"{final}.weight"], eps)
    return g, g @ c[f"{head}.weight"].T


@pytest.mark.parametrize("variant", CASES)
def test_two_drafts_follow_the_formulas(variant: str) -> None:
    """A prompt of 100 tokens in one chunk, then a second draft of its last sequence from the first one's g: the draft layer
    reads its own keys of the prompt from the cache. Report M15: one module drafts at every depth."""
    folder = reference_checkpoint(variant)
    c, config = Checkpoint(folder), load_model_config(folder)
    model = load_model(
        folder, config, ParallelContext.single(), device="cpu", dtype=torch.float32, max_model_len=512, with_mtp=True
    )  # fmt: skip
    assert model.mtp is not None
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(2, config.vocab_size, (102,), generator=generator)
    driver = Driver(model, config)
    with torch.inference_mode():
        batch = driver.batch({}, {0: ids[:100].tolist()})
        hidden = model.forward(batch)
        g = model.mtp.forward(ids[1:101], hidden, batch)
        second = model.mtp.forward(ids[101:102], g[-1:], driver.batch({0: [int(ids[100])]}, {}))
        got = model.logits(torch.cat((g, second)))
    want_g, want = draft(c, ids[1:101], hidden.double())
    _, want_second = draft(c, ids[1:102], torch.cat((hidden.double(), want_g[-1:])))
    want = torch.cat((want, want_second[-1:]))
    worst = float((got.double() - want).abs().max() / (want.max() - want.min()))
    assert worst < TOLERANCE, worst


def test_the_formula_test_notices_a_swapped_projection() -> None:
    """Hidden state first, as the paper writes it, is another function of the published weights."""
    c = Checkpoint(reference_checkpoint("deepseek_v3-tiny"))
    generator = torch.Generator().manual_seed(5)
    ids, hidden = (
        torch.randint(2, 384, (20,), generator=generator),
        torch.randn(20, 64, generator=generator, dtype=torch.float64),
    )
    _, want = draft(c, ids, hidden)
    name = f"model.layers.{c.config['num_hidden_layers']}.eh_proj.weight"
    c._tensors[name] = torch.cat((c[name][:, 64:], c[name][:, :64]), dim=1)
    _, swapped = draft(c, ids, hidden)
    assert float((swapped - want).abs().max() / (want.max() - want.min())) > 0.05
