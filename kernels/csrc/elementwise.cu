// Rotary embedding, keys of all heads, SiLU product, merge of two attention results. T is BF16 or FP32; arithmetic is FP32 with one rounding at
// the end.
#include "common/ptx.cuh"

// ---- rope: one thread a pair -------------------------------------------------------------------------
struct RopeArgs {
  const void* x;  // T [tokens, heads, dim], strides below
  const int64_t* positions;
  const float* cos_sin;  // [positions, dim]
  void* out;             // T [tokens, heads, dim]; x itself where it is rotated in place
  int64_t token_stride, head_stride, out_token_stride, out_head_stride;
  int tokens, heads, half, interleaved;  // half: dim / 2
};
template <class T> DEVICE void rope(const RopeArgs& a) {
  const int64_t at = (int64_t)blockIdx.x * 256 + threadIdx.x;
  if (at >= (int64_t)a.tokens * a.heads * a.half) return;
  const int i = (int)(at % a.half), head = (int)(at / a.half % a.heads), token = (int)(at / a.half / a.heads);
  const T* x = (const T*)a.x + token * a.token_stride + head * a.head_stride;
  T* out = (T*)a.out + token * a.out_token_stride + head * a.out_head_stride;
  const float* table = a.cos_sin + a.positions[token] * 2 * a.half;
  const int first = a.interleaved ? 2 * i : i, second = a.interleaved ? 2 * i + 1 : i + a.half;
  const float u = widen(x[first]), v = widen(x[second]), c = table[i], s = table[a.half + i];
  out[first] = narrow<T>(u * c - v * s), out[second] = narrow<T>(u * s + v * c);
}

// The same for interleaved BF16 rows whose heads begin at 16-byte boundaries, one thread four pairs.
DEVICE void rope_vectors(const RopeArgs& a) {
  const int64_t at = (int64_t)blockIdx.x * 256 + threadIdx.x;
  const int vectors = a.half / 4;
  if (at >= (int64_t)a.tokens * a.heads * vectors) return;
  const int i = (int)(at % vectors), head = (int)(at / vectors % a.heads), token = (int)(at / vectors / a.heads);
  const uint4 x = ((const uint4*)((const bf16*)a.x + token * a.token_stride + head * a.head_stride))[i];
  const float* table = a.cos_sin + a.positions[token] * 2 * a.half + 4 * i;
  const float4 c = *(const float4*)table, s = *(const float4*)(table + a.half);
  const auto turn = [](uint32_t pair, float c, float s) {
    const float u = __uint_as_float(pair << 16), v = __uint_as_float(pair & 0xffff0000u);
    return pack_bf16(u * c - v * s, u * s + v * c);
  };
  ((uint4*)((bf16*)a.out + token * a.out_token_stride + head * a.out_head_stride))[i] =
      make_uint4(turn(x.x, c.x, s.x), turn(x.y, c.y, s.y), turn(x.z, c.z, s.z), turn(x.w, c.w, s.w));
}

// ---- join_heads: one thread 16 bytes ------------------------------------------------------------------
struct JoinArgs {
  const uint4* own;     // [tokens, heads, own_size], strides below; sizes and strides count in 16 bytes
  const uint4* shared;  // [tokens, shared_size]
  uint4* out;           // [tokens, heads, own_size + shared_size]
  int64_t token_stride, head_stride, shared_stride, count;  // count: of `out`
  int heads, own_size, size, _pad;                          // size: of both
};
DEVICE void join(const JoinArgs& a) {
  const int64_t at = (int64_t)blockIdx.x * 256 + threadIdx.x;
  if (at >= a.count) return;
  const int i = (int)(at % a.size), head = (int)(at / a.size % a.heads);
  const int64_t token = at / a.size / a.heads;
  a.out[at] = i < a.own_size ? a.own[token * a.token_stride + head * a.head_stride + i] : a.shared[token * a.shared_stride + i - a.own_size];
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
DEVICE void load_vector(float (&v)[1], const bf16* from) { v[0] = widen(*from); }
DEVICE void load_vector(float (&v)[1], const float* from) { v[0] = *from; }
DEVICE void load_vector(float (&v)[4], const bf16* from) {
  const uint2 w = *(const uint2*)from;
  v[0] = __uint_as_float(w.x << 16), v[1] = __uint_as_float(w.x & 0xffff0000u);
  v[2] = __uint_as_float(w.y << 16), v[3] = __uint_as_float(w.y & 0xffff0000u);
}
DEVICE void load_vector(float (&v)[4], const float* from) {
  const float4 w = *(const float4*)from;
  v[0] = w.x, v[1] = w.y, v[2] = w.z, v[3] = w.w;
}
template <class T> DEVICE void store_vector(T* to, const float (&v)[1]) { *to = narrow<T>(v[0]); }
DEVICE void store_vector(bf16* to, const float (&v)[4]) { *(uint2*)to = make_uint2(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3])); }
DEVICE void store_vector(float* to, const float (&v)[4]) { *(float4*)to = make_float4(v[0], v[1], v[2], v[3]); }
// VECTOR: consecutive values of a lane; rows begin at multiples of as many.
template <class T, int VECTOR> DEVICE void merge_attention(const MergeArgs& a) {
  const int row = blockIdx.x * 8 + (threadIdx.x >> 5);
  if (row >= a.rows) return;
  const float la = a.lse_a[row], lb = a.lse_b[row];
  const bool has_a = fabsf(la) != INFINITY_F, has_b = fabsf(lb) != INFINITY_F;
  const float top = fmaxf(has_a ? la : -INFINITY_F, has_b ? lb : -INFINITY_F);
  const float wa = has_a ? __expf(la - top) : 0.f, wb = has_b ? __expf(lb - top) : 0.f, sum = wa + wb;
  const float sa = has_a ? wa / sum : 0.f, sb = has_b ? wb / sum : 0.f;
  const size_t at = (size_t)row * a.dim;
  for (int i = VECTOR * (threadIdx.x & 31); i < a.dim; i += VECTOR * 32) {
    float x[VECTOR], y[VECTOR];
    load_vector(x, (const T*)a.out_a + at + i), load_vector(y, (const T*)a.out_b + at + i);
#pragma unroll
    for (int j = 0; j < VECTOR; j++) x[j] = fmaf(sb, has_b ? y[j] : 0.f, has_a ? sa * x[j] : 0.f);  // a part without keys may hold anything
    store_vector((T*)a.out + at + i, x);
  }
  if ((threadIdx.x & 31) == 0) a.lse[row] = has_a || has_b ? top + logf(sum) : -INFINITY_F;
}

#define KERNEL(name, args, body) \
  extern "C" __global__ void __launch_bounds__(256) name(const args a) { wait_for_previous_kernel(), allow_next_kernel(), body(a); }
KERNEL(rope_bf16, RopeArgs, rope<bf16>)
KERNEL(rope_fp32, RopeArgs, rope<float>)
KERNEL(rope_vectors_bf16, RopeArgs, rope_vectors)
KERNEL(join_heads_any, JoinArgs, join)
KERNEL(silu_and_mul_bf16, SiluArgs, silu_and_mul<bf16>)
KERNEL(silu_and_mul_fp32, SiluArgs, silu_and_mul<float>)
KERNEL(merge_attention_bf16, MergeArgs, (merge_attention<bf16, 1>))
KERNEL(merge_attention_fp32, MergeArgs, (merge_attention<float, 1>))
KERNEL(merge_attention_vectors_bf16, MergeArgs, (merge_attention<bf16, 4>))
KERNEL(merge_attention_vectors_fp32, MergeArgs, (merge_attention<float, 4>))
