"""The Hopper backend: operation name -> function, with the signatures of kernels/ops.py."""

from kernels.cuda.attention import prefill_attention
from kernels.cuda.elementwise import merge_attention, rms_norm, rope, silu_and_mul
from kernels.cuda.gemm import linear
from kernels.cuda.latent import append_kv, fetch_dequant, quantize_q
from kernels.cuda.mla_decode import mla_decode, plan_decode
from kernels.cuda.moe import grouped_mlp, route

OPS = {
    function.__name__: function
    for function in (
        quantize_q, append_kv, fetch_dequant, plan_decode, mla_decode, prefill_attention, merge_attention,
        rms_norm, rope, silu_and_mul, linear, route, grouped_mlp,
    )
}  # fmt: skip
