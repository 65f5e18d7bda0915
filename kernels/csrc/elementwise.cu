// RMSNorm with residual, rotary embedding, SiLU product, merge of two attention results. T is BF16 or FP32; arithmetic is
// FP32 with one rounding at the end.
#include "common/ptx.cuh"

// ---- rms_norm: one CTA a row -----------------------------------------------------------------------
struct RmsNormArgs {
  const void* x;         // T [rows, dim], row stride below
  const void* residual;  // T [rows, dim] dense, or null
  const void* weight;    // [dim], T or fp32
  void* out;             // T [rows, dim]
  void* sum;             // T [rows, dim] x + residual, written only with a residual
  int64_t x_stride;
  int dim, weight_fp32;
  float eps;
};
template <class T> DEVICE void rms_norm(const RmsNormArgs& a) {
  __shared__ float part[8];
  const size_t row = (size_t)blockIdx.x * a.dim;
  const T* x = (const T*)a.x + blockIdx.x * a.x_stride;
  T* sum = (T*)a.sum + row;
  float squares = 0.f;
  for (int i = threadIdx.x; i < a.dim; i += 256) {
    float v = widen(x[i]);
    if (a.residual) {
      const T rounded = narrow<T>(v + widen(((const T*)a.residual)[row + i]));
      sum[i] = rounded, v = widen(rounded);
    }
    squares = fmaf(v, v, squares);
  }
#pragma unroll
  for (int d = 16; d; d /= 2) squares += __shfl_xor_sync(~0u, squares, d);
  if ((threadIdx.x & 31) == 0) part[threadIdx.x >> 5] = squares;
  __syncthreads();
  float total = 0.f;
#pragma unroll
  for (int w = 0; w < 8; w++) total += part[w];
  const float norm = 1.f / sqrtf(total / a.dim + a.eps);
  const T* from = a.residual ? sum : x;  // a thread reads back only what it wrote itself
  for (int i = threadIdx.x; i < a.dim; i += 256) {
    const float w = a.weight_fp32 ? ((const float*)a.weight)[i] : widen(((const bf16*)a.weight)[i]);
    ((T*)a.out)[row + i] = narrow<T>(widen(from[i]) * norm * w);
  }
}

// ---- rope: one thread a pair -------------------------------------------------------------------------
struct RopeArgs {
  const void* x;  // T [tokens, heads, dim], strides below
  const int64_t* positions;
  const float* cos_sin;  // [positions, dim]
  void* out;             // T [tokens, heads, dim] dense
  int64_t token_stride, head_stride;
  int tokens, heads, half, interleaved;  // half: dim / 2
};
template <class T> DEVICE void rope(const RopeArgs& a) {
  const int64_t at = (int64_t)blockIdx.x * 256 + threadIdx.x;
  if (at >= (int64_t)a.tokens * a.heads * a.half) return;
  const int i = (int)(at % a.half), head = (int)(at / a.half % a.heads), token = (int)(at / a.half / a.heads);
  const T* x = (const T*)a.x + token * a.token_stride + head * a.head_stride;
  T* out = (T*)a.out + ((int64_t)token * a.heads + head) * 2 * a.half;
  const float* table = a.cos_sin + a.positions[token] * 2 * a.half;
  const int first = a.interleaved ? 2 * i : i, second = a.interleaved ? 2 * i + 1 : i + a.half;
  const float u = widen(x[first]), v = widen(x[second]), c = table[i], s = table[a.half + i];
  out[first] = narrow<T>(u * c - v * s), out[second] = narrow<T>(u * s + v * c);
}

// ---- silu_and_mul: one thread two columns --------------------------------------------------------------
struct SiluArgs {
  const void* gate_up;  // T [rows, 2 * dim], row stride below
  void* out;            // T [rows, dim]
  int64_t stride, rows;
  int dim;
};
template <class T> DEVICE void silu_and_mul(const SiluArgs& a) {
  const int64_t at = (int64_t)blockIdx.x * 256 + threadIdx.x;
  if (at >= a.rows * a.dim) return;
  const int64_t row = at / a.dim;
  const T* x = (const T*)a.gate_up + row * a.stride + at % a.dim;
  const float gate = widen(x[0]), up = widen(x[a.dim]);
  ((T*)a.out)[at] = narrow<T>(gate / (1.f + __expf(-gate)) * up);
}

// ---- merge_attention: one warp a row ---------------------------------------------------------------------
struct MergeArgs {
  const void *out_a, *out_b;  // T [rows, dim] dense
  const float *lse_a, *lse_b;  // [rows] natural log; an infinity of either sign means no keys
  void* out;
  float* lse;
  int rows, dim;
};
template <class T> DEVICE void merge_attention(const MergeArgs& a) {
  const int row = blockIdx.x * 8 + (threadIdx.x >> 5);
  if (row >= a.rows) return;
  const float la = a.lse_a[row], lb = a.lse_b[row];
  const bool has_a = fabsf(la) != INFINITY_F, has_b = fabsf(lb) != INFINITY_F;
  const float top = fmaxf(has_a ? la : -INFINITY_F, has_b ? lb : -INFINITY_F);
  const float wa = has_a ? __expf(la - top) : 0.f, wb = has_b ? __expf(lb - top) : 0.f, sum = wa + wb;
  const float sa = has_a ? wa / sum : 0.f, sb = has_b ? wb / sum : 0.f;
  const size_t at = (size_t)row * a.dim;
  for (int i = threadIdx.x & 31; i < a.dim; i += 32) {
    float v = 0.f;  // a part without keys may hold anything
    if (has_a) v = sa * widen(((const T*)a.out_a)[at + i]);
    if (has_b) v = fmaf(sb, widen(((const T*)a.out_b)[at + i]), v);
    ((T*)a.out)[at + i] = narrow<T>(v);
  }
  if ((threadIdx.x & 31) == 0) a.lse[row] = has_a || has_b ? top + logf(sum) : -INFINITY_F;
}

#define KERNEL(name, args, body) \
  extern "C" __global__ void __launch_bounds__(256) name(const args a) { body(a); }
KERNEL(rms_norm_bf16, RmsNormArgs, rms_norm<bf16>)
KERNEL(rms_norm_fp32, RmsNormArgs, rms_norm<float>)
KERNEL(rope_bf16, RopeArgs, rope<bf16>)
KERNEL(rope_fp32, RopeArgs, rope<float>)
KERNEL(silu_and_mul_bf16, SiluArgs, silu_and_mul<bf16>)
KERNEL(silu_and_mul_fp32, SiluArgs, silu_and_mul<float>)
KERNEL(merge_attention_bf16, MergeArgs, merge_attention<bf16>)
KERNEL(merge_attention_fp32, MergeArgs, merge_attention<float>)
