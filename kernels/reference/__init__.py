"""Plain torch implementation of every operation, on any device: the CPU backend and the oracle of the CUDA kernels.

Functions take the arguments that `kernels.ops` has checked and documents; contracts are not repeated here.
On a CUDA device some of them read lengths back to the host, so they do not go into a captured graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kernels.reference import attention, elementwise, latent, linear, lines, mla_decode, moe, sampling

OPS: dict[str, Callable[..., Any]] = {
    "quantize_q": latent.quantize_q,
    "absorb_query": latent.absorb_query,
    "project_values": latent.project_values,
    "append_kv": latent.append_kv,
    "fetch_dequant": latent.fetch_dequant,
    "plan_decode": mla_decode.plan_decode,
    "mla_decode": mla_decode.mla_decode,
    "prefill_attention": attention.prefill_attention,
    "merge_attention": attention.merge_attention,
    "rms_norm": elementwise.rms_norm,
    "rms_norm_quantized": linear.rms_norm_quantized,
    "quantize_activation": linear.quantize_activation,
    "rope": elementwise.rope,
    "join_heads": elementwise.join_heads,
    "silu_and_mul": elementwise.silu_and_mul,
    "linear": linear.linear,
    "gated_mlp": linear.gated_mlp,
    "router_logits": linear.router_logits,
    "route": moe.route,
    "choose_experts": moe.choose_experts,
    "grouped_mlp": moe.grouped_mlp,
    "choose_tokens": sampling.choose_tokens,
    "draft_tokens": sampling.draft_tokens,
    "decode_lines": lines.decode_lines,
    "accept_tokens": lines.accept_tokens,
}
