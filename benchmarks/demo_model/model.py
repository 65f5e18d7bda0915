"""The demo model as it is trained: DeepSeek-V3 in plain torch, one forward pass over packed rows, no cache.

Formulas are DeepSeek-V3's (MLA in its expanded form, sigmoid routing with a selection bias, one MTP module). Module names
follow the published tensor names, except that the routed experts of a layer are stacked into one tensor. Every linear
weight that is published as FP8 is rounded to its 128x128-block FP8 value in the forward pass with a straight-through
gradient, so the stored checkpoint computes what was trained.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

MAX_POSITIONS = 32768
WEIGHT_BLOCK = 128
FP8_MAX = 448.0


@dataclass(frozen=True)
class Shape:
    """Sizes of the model; the attention dimensions are the published ones."""

    vocab: int = 2048
    hidden: int = 256
    layers: int = 4
    heads: int = 8
    q_lora: int = 128
    kv_lora: int = 512
    nope: int = 128
    rope: int = 64
    value: int = 128
    dense_inter: int = 512
    expert_inter: int = 128
    experts: int = 8
    top_k: int = 2
    groups: int = 4
    top_groups: int = 2
    routed_scale: float = 1.5
    rope_theta: float = 100_000.0
    eps: float = 1e-6

    def config(self) -> dict[str, Any]:
        """The published config.json, with the keys and spellings of DeepSeek-V3."""
        return {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.dense_inter,
            "moe_intermediate_size": self.expert_inter,
            "num_hidden_layers": self.layers,
            "num_nextn_predict_layers": 1,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "n_shared_experts": 1,
            "n_routed_experts": self.experts,
            "ep_size": 1,
            "routed_scaling_factor": self.routed_scale,
            "kv_lora_rank": self.kv_lora,
            "q_lora_rank": self.q_lora,
            "qk_rope_head_dim": self.rope,
            "v_head_dim": self.value,
            "qk_nope_head_dim": self.nope,
            "topk_method": "noaux_tc",
            "n_group": self.groups,
            "topk_group": self.top_groups,
            "num_experts_per_tok": self.top_k,
            "moe_layer_freq": 1,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "scoring_func": "sigmoid",
            "hidden_act": "silu",
            "max_position_embeddings": MAX_POSITIONS,
            "initializer_range": 0.02,
            "rms_norm_eps": self.eps,
            "use_cache": True,
            "rope_theta": self.rope_theta,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": False,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": 2,
            "torch_dtype": "bfloat16",
            "quantization_config": {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "weight_block_size": [WEIGHT_BLOCK, WEIGHT_BLOCK],
            },
        }


def block_scales(weight: torch.Tensor) -> torch.Tensor:
    """FP32 [..., ceil(N / 128), ceil(K / 128)] of a weight [..., N, K]: the largest magnitude of each block over 448."""
    rows, cols = weight.shape[-2:]
    padded = F.pad(weight, (0, -cols % WEIGHT_BLOCK, 0, -rows % WEIGHT_BLOCK))
    blocks = padded.unflatten(-1, (-1, WEIGHT_BLOCK)).unflatten(-3, (-1, WEIGHT_BLOCK))
    return blocks.abs().amax((-3, -1)).float().clamp_min(1e-12) / FP8_MAX


def spread_scales(scales: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """Each block's scale at each of its elements, [..., rows, cols]."""
    return scales.repeat_interleave(WEIGHT_BLOCK, -2)[..., :rows, :].repeat_interleave(WEIGHT_BLOCK, -1)[..., :cols]


def fake_quantize(weight: torch.Tensor) -> torch.Tensor:
    """The FP32 value that the stored FP8 weight stands for, with the gradient of the identity."""
    with torch.no_grad():
        spread = spread_scales(block_scales(weight), *weight.shape[-2:])
        rounded = (weight / spread).to(torch.float8_e4m3fn).float() * spread
    return weight + (rounded - weight).detach()


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm in FP32, returned in the dtype of `x`."""
    return F.rms_norm(x.float(), (x.shape[-1],), weight, eps).to(x.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Interleaved RoPE: x [..., R] in pairs (2i, 2i + 1), cos and sin [..., R / 2]."""
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2).to(x.dtype)


def causal_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, backend: SDPBackend | None = None
) -> torch.Tensor:
    """Causal softmax attention, [B, H, L, *]. Only cuDNN takes values narrower than keys; elsewhere they are padded."""
    if backend is SDPBackend.CUDNN_ATTENTION:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(query, key, value, is_causal=True)
    padded = F.pad(value, (0, key.shape[-1] - value.shape[-1]))
    return F.scaled_dot_product_attention(query, key, padded, is_causal=True)[..., : value.shape[-1]]


class Linear(nn.Module):
    """A bias-free linear whose published form is FP8 (`quantized`) or BF16; computes in the dtype of its input."""

    def __init__(self, inputs: int, outputs: int, gain: float = 1.0, quantized: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) * gain / inputs**0.5)
        self.quantized = quantized

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, (fake_quantize(self.weight) if self.quantized else self.weight.bfloat16()).to(x.dtype))


class Norm(nn.Module):
    """RMSNorm with a learned gain."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    """MLA, expanded: projections here, the softmax in `Layer.forward` so that compiled parts never see a row length."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.q_a_proj = Linear(shape.hidden, shape.q_lora)
        self.q_a_layernorm = Norm(shape.q_lora, 1e-6)
        self.q_b_proj = Linear(shape.q_lora, shape.heads * (shape.nope + shape.rope))
        self.kv_a_proj_with_mqa = Linear(shape.hidden, shape.kv_lora + shape.rope)
        self.kv_a_layernorm = Norm(shape.kv_lora, 1e-6)
        self.kv_b_proj = Linear(shape.kv_lora, shape.heads * (shape.nope + shape.value))
        self.o_proj = Linear(shape.heads * shape.value, shape.hidden, gain=0.5)

    def project(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query and key [T, H, 192] and value [T, H, 128] of x [T, D]."""
        s = self.shape
        query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).unflatten(-1, (s.heads, -1))
        latent, rope_key = self.kv_a_proj_with_mqa(x).split((s.kv_lora, s.rope), -1)
        expanded = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (s.heads, -1))
        key_nope, value = expanded.split((s.nope, s.value), -1)
        query_nope, query_rope = query.split((s.nope, s.rope), -1)
        cos, sin = cos[:, None], sin[:, None]
        rope_key = rotate(rope_key[:, None], cos, sin).expand(-1, s.heads, -1)
        query = torch.cat((query_nope, rotate(query_rope, cos, sin)), -1)
        return query, torch.cat((key_nope, rope_key), -1), value


class Dense(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden: int, inter: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = Linear(hidden, inter), Linear(hidden, inter)
        self.down_proj = Linear(inter, hidden, gain=0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Moe(nn.Module):
    """Routed experts plus a shared one. All experts are computed as one wide SwiGLU and unselected ones weighted by zero.

    gate_proj, up_proj [E, I, D] and down_proj [E, D, I] hold the routed experts.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        experts, inter, hidden = shape.experts, shape.expert_inter, shape.hidden
        self.gate = nn.Parameter(torch.randn(experts, hidden) / hidden**0.5)
        self.register_buffer("e_score_correction_bias", torch.zeros(experts))
        self.gate_proj = nn.Parameter(torch.randn(experts, inter, hidden) / hidden**0.5)
        self.up_proj = nn.Parameter(torch.randn(experts, inter, hidden) / hidden**0.5)
        self.down_proj = nn.Parameter(torch.randn(experts, hidden, inter) * 0.5 / inter**0.5)
        self.shared_experts = Dense(hidden, inter)

    def route(self, x: torch.Tensor) -> torch.Tensor:
        """Weight of every expert for x [T, D], FP32 [T, E]; zero where not selected."""
        s = self.shape
        scores = (x.float() @ self.gate.bfloat16().float().T).sigmoid()
        with torch.no_grad():
            choice = scores + self.e_score_correction_bias
            group_scores = choice.unflatten(-1, (s.groups, -1)).topk(2, -1).values.sum(-1)
            kept = torch.zeros_like(group_scores).scatter(-1, group_scores.topk(s.top_groups, -1).indices, 1.0)
            choice = choice.masked_fill(kept.repeat_interleave(s.experts // s.groups, -1) == 0, float("-inf"))
            selected = torch.zeros_like(scores).scatter(-1, choice.topk(s.top_k, -1).indices, 1.0)
        weights = scores * selected
        return weights / (weights.sum(-1, keepdim=True) + 1e-20) * s.routed_scale

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(output [T, D], tokens of each expert [E])."""
        weights = self.route(x)
        gate, up, down = (fake_quantize(w).to(x.dtype) for w in (self.gate_proj, self.up_proj, self.down_proj))
        gate, up, down = gate.flatten(0, 1), up.flatten(0, 1), down.transpose(0, 1).flatten(1)
        inner = (F.silu(F.linear(x, gate)) * F.linear(x, up)).unflatten(-1, (self.shape.experts, -1))
        routed = F.linear((inner * weights[..., None].to(inner.dtype)).flatten(-2), down)
        return routed + self.shared_experts(x), (weights > 0).sum(0)


class Layer(nn.Module):
    """One decoder layer over packed rows: x [T, D] holds T / L rows of L tokens each."""

    def __init__(self, shape: Shape, dense: bool, dropout: float) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden, shape.eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = Norm(shape.hidden, shape.eps)
        self.mlp = Dense(shape.hidden, shape.dense_inter) if dense else Moe(shape)
        self.dropout = dropout
        self.backend: SDPBackend | None = None  # PyTorch's own choice

    def before(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.self_attn.project(self.input_layernorm(x), cos, sin)

    def after(self, x: torch.Tensor, attended: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        out = self.self_attn.o_proj(attended.flatten(-2))
        x = x + F.dropout(out, self.dropout, self.training)
        out, load = self.mlp(self.post_attention_layernorm(x)), None
        if isinstance(self.mlp, Moe):
            out, load = out
        return x + F.dropout(out, self.dropout, self.training), load

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, length: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        query, key, value = (t.unflatten(0, (-1, length)).transpose(1, 2) for t in self.before(x, cos, sin))
        attended = causal_attention(query, key, value, self.backend)
        return self.after(x, attended.transpose(1, 2).flatten(0, 1))


class Mtp(nn.Module):
    """DeepSeek's multi-token-prediction module; embedding and head are the main model's."""

    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.enorm, self.hnorm = Norm(shape.hidden, shape.eps), Norm(shape.hidden, shape.eps)
        self.eh_proj = Linear(2 * shape.hidden, shape.hidden, quantized=False)
        self.layer = Layer(shape, dense=False, dropout=dropout)
        self.norm = Norm(shape.hidden, shape.eps)  # published as shared_head.norm

    def join(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), -1))


class DemoModel(nn.Module):
    """Main model and MTP module; parameters are FP32, activations of `dtype`. Stored dtypes are rounded to in every pass."""

    def __init__(self, shape: Shape, dropout: float = 0.0, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.shape, self.dtype = shape, dtype
        self.embed_tokens = nn.Parameter(torch.randn(shape.vocab, shape.hidden))
        self.layers = nn.ModuleList(Layer(shape, dense=i == 0, dropout=dropout) for i in range(shape.layers))
        self.norm = Norm(shape.hidden, shape.eps)
        self.lm_head = nn.Parameter(torch.randn(shape.vocab, shape.hidden) / shape.hidden**0.5)
        self.mtp = Mtp(shape, dropout)

    def angles(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, FP32 [L, R / 2]."""
        device = self.embed_tokens.device
        inverse = self.shape.rope_theta ** -(torch.arange(0, self.shape.rope, 2, device=device).float() / self.shape.rope)
        angle = torch.arange(length, device=device).float()[:, None] * inverse
        return angle.cos(), angle.sin()

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.embedding(tokens, self.embed_tokens.bfloat16().to(self.dtype))

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, self.lm_head.bfloat16().to(hidden.dtype))

    def hidden_states(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """tokens int64 [B, L + 1] -> (main hidden after model.norm [B * L, D], MTP hidden after its norm, expert loads).

        Row r of the main hidden state predicts token r + 1, the same row of the MTP's predicts token r + 2. The MTP sees
        token r + 1 as well, hence L + 1 tokens.
        """
        rows, length = tokens.shape[0], tokens.shape[1] - 1
        cos, sin = (t.repeat(rows, 1) for t in self.angles(length))
        x, loads = self.embed(tokens[:, :-1]).flatten(0, 1), []
        for layer in self.layers:
            x, load = layer(x, cos, sin, length)
            if load is not None:
                loads.append(load)
        hidden = self.norm(x)
        drafted = self.mtp.join(self.embed(tokens[:, 1:]).flatten(0, 1), hidden)
        drafted, load = self.mtp.layer(drafted, cos, sin, length)
        return hidden, self.mtp.norm(drafted), [*loads, load]

    def moes(self) -> list[Moe]:
        """Modules in the order of the loads that `hidden_states` returns."""
        return [m for m in self.modules() if isinstance(m, Moe)]
