"""The Hopper backend: operation name -> function, with the signatures of kernels/ops.py.

The table is made when ops.py first asks for it, so that `python -m kernels.cuda.build` compiles without loading the operations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def _operations() -> dict[str, Callable[..., Any]]:
    from kernels.cuda.absorbed import absorb_query, project_values
    from kernels.cuda.attention import prefill_attention
    from kernels.cuda.elementwise import join_heads, merge_attention, rms_norm, rms_norm_quantized, rope, silu_and_mul
    from kernels.cuda.gemm import linear, quantize_1x128, router_logits
    from kernels.cuda.latent import append_kv, fetch_dequant, quantize_q
    from kernels.cuda.lines import accept_tokens, decode_lines
    from kernels.cuda.mla_decode import mla_decode, plan_decode
    from kernels.cuda.moe import choose_experts, gated_mlp, grouped_mlp, route
    from kernels.cuda.sampling import choose_tokens, draft_tokens

    functions = (
        quantize_q, absorb_query, project_values, append_kv, fetch_dequant, plan_decode, mla_decode, prefill_attention, merge_attention,
        rms_norm, rms_norm_quantized, rope, join_heads, silu_and_mul, linear, gated_mlp, router_logits, route, choose_experts, grouped_mlp, choose_tokens,
        draft_tokens, decode_lines, accept_tokens,
    )  # fmt: skip
    return {function.__name__: function for function in functions} | {"quantize_activation": quantize_1x128}


def __getattr__(name: str) -> Any:
    if name == "OPS":
        return _operations()
    raise AttributeError(name)
