// The three fused preparation kernels around the latent cache (3.3.1): quantize the query, append to the cache, fetch from
// it. One warp a row. Each has a form for the FP8 format (512 + 64 dims, vector accesses) and one for the exact formats
// (any width). T is the type of the model's activations, S the type stored in an exact cache.
#include "common/ptx.cuh"

constexpr int DIM = 512, ROPE = 64, PAGE = 64, WARPS = 4;

DEVICE float warp_max(float v) {
#pragma unroll
  for (int d = 16; d; d /= 2) v = fmaxf(v, __shfl_xor_sync(~0u, v, d));
  return v;
}
DEVICE float warp_sum(float v) {
#pragma unroll
  for (int d = 16; d; d /= 2) v += __shfl_xor_sync(~0u, v, d);
  return v;
}
// A lane's 16 values of a row of 512: eight from its halves each, x[8 h + j] = row[256 h + 8 lane + j], so that a warp's loads
// and stores are whole runs of memory. Rows are aligned to 16 bytes.
DEVICE void widen8(float* x, uint4 v) {
  const uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; i++) x[2 * i] = __uint_as_float(w[i] << 16), x[2 * i + 1] = __uint_as_float(w[i] & 0xffff0000u);
}
DEVICE void load_row(float (&x)[16], const bf16* row, int lane) {
#pragma unroll
  for (int h = 0; h < 2; h++) widen8(x + 8 * h, ((const uint4*)row)[32 * h + lane]);
}
DEVICE void load_row(float (&x)[16], const float* row, int lane) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float4 v = ((const float4*)row)[64 * (i / 2) + 2 * lane + i % 2];
    x[4 * i] = v.x, x[4 * i + 1] = v.y, x[4 * i + 2] = v.z, x[4 * i + 3] = v.w;
  }
}
DEVICE void store_row(bf16* row, const float (&x)[16], int lane) {
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const float* v = x + 8 * h;
    ((uint4*)row)[32 * h + lane] = make_uint4(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7]));
  }
}
DEVICE void store_row(float* row, const float (&x)[16], int lane) {
#pragma unroll
  for (int i = 0; i < 4; i++)
    ((float4*)row)[64 * (i / 2) + 2 * lane + i % 2] = make_float4(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);
}
// A lane's pair of a row.
DEVICE void store_pair(bf16* row, float a, float b, int lane) { ((uint32_t*)row)[lane] = pack_bf16(a, b); }
DEVICE void store_pair(float* row, float a, float b, int lane) { ((float2*)row)[lane] = make_float2(a, b); }
// Quantizes the row a warp holds to 512 bytes; returns its scale.
DEVICE float quantize_row(uint8_t* row, const float (&x)[16], int lane) {
  float amax = 0.f;
#pragma unroll
  for (int i = 0; i < 16; i++) amax = fmaxf(amax, fabsf(x[i]));
  const float scale = fmaxf(warp_max(amax), AMAX_FLOOR) / FP8_MAX, inverse = 1.f / scale;
  uint32_t w[4];
#pragma unroll
  for (int i = 0; i < 4; i++)
    w[i] = pack_e4m3(x[4 * i] * inverse, x[4 * i + 1] * inverse, x[4 * i + 2] * inverse, x[4 * i + 3] * inverse);
#pragma unroll
  for (int h = 0; h < 2; h++) ((uint2*)row)[32 * h + lane] = make_uint2(w[2 * h], w[2 * h + 1]);
  return scale;
}
// Pair i of an interleaved rotary embedding; table: cosines of a position, then its sines.
template <class T> DEVICE float2 rotate(const T* x, const float* table, int half, int i) {
  const float a = widen(x[2 * i]), b = widen(x[2 * i + 1]), c = table[i], s = table[half + i];
  return make_float2(a * c - b * s, a * s + b * c);
}

// ---- quantize_q ----------------------------------------------------------------------------------
struct QuantizeQArgs {
  const void* content;  // T [tokens, heads, dim], row strides below, last dimension dense
  const void* rope;     // T [tokens, heads, rope_dim] before rotation, interleaved pairs
  const int64_t* positions;
  const float* cos_sin;  // [positions, rope_dim]
  void* q;               // e4m3 or S [tokens * heads][dim]
  void* q_rope;          // bf16 or S [tokens * heads][rope_dim]
  float* q_scale;        // [tokens * heads]
  int64_t content_token, content_head, rope_token, rope_head;  // strides in elements
  int rows, heads, dim, rope_dim;
};
template <class T> DEVICE void quantize_q_fp8(const QuantizeQArgs& a) {
  const int row = blockIdx.x * WARPS + (threadIdx.x >> 5), lane = threadIdx.x & 31;
  if (row >= a.rows) return;
  const int token = row / a.heads, head = row % a.heads;
  float x[16];
  load_row(x, (const T*)a.content + token * a.content_token + head * a.content_head, lane);
  const float2 r = rotate((const T*)a.rope + token * a.rope_token + head * a.rope_head, a.cos_sin + a.positions[token] * ROPE, ROPE / 2, lane);
  const float scale = quantize_row((uint8_t*)a.q + (size_t)row * DIM, x, lane);
  ((uint32_t*)a.q_rope)[(size_t)row * 32 + lane] = pack_bf16(r.x / scale, r.y / scale);
  if (lane == 0) a.q_scale[row] = scale;
}
template <class T, class S> DEVICE void rotate_q(const QuantizeQArgs& a) {
  const int row = blockIdx.x * WARPS + (threadIdx.x >> 5), lane = threadIdx.x & 31;
  if (row >= a.rows) return;
  const int token = row / a.heads, head = row % a.heads;
  const T* x = (const T*)a.content + token * a.content_token + head * a.content_head;
  for (int i = lane; i < a.dim; i += 32) ((S*)a.q)[(size_t)row * a.dim + i] = narrow<S>(widen(x[i]));
  const T* r = (const T*)a.rope + token * a.rope_token + head * a.rope_head;
  for (int i = lane; i < a.rope_dim / 2; i += 32) {
    const float2 v = rotate(r, a.cos_sin + a.positions[token] * a.rope_dim, a.rope_dim / 2, i);
    S* out = (S*)a.q_rope + (size_t)row * a.rope_dim + 2 * i;
    out[0] = narrow<S>(v.x), out[1] = narrow<S>(v.y);
  }
}

// ---- append_kv -----------------------------------------------------------------------------------
struct AppendArgs {
  const void* latent;   // T [tokens, dim] before its norm
  const void* k_rope;   // T [tokens, rope_dim] before rotation
  const void* weight;   // W [dim]
  const int64_t* positions;
  const float* cos_sin;
  const int64_t* slots;  // block * 64 + offset, -1: not stored
  void* content;         // cache, block strides below
  void* rope;
  float* scale;
  void* keep_latent;  // T [keep, dim], the last rows unquantized
  void* keep_rope;    // T [keep, rope_dim]
  int64_t latent_stride, rope_stride;                       // elements between tokens
  int64_t content_block, rope_block, scale_block;           // elements between blocks
  int tokens, keep, dim, rope_dim, weight_fp32, num_blocks;
  float eps;
  // The forms with a copy: position p of a token's sequence is also written, unquantized, at row start + p.
  const int64_t* copy_starts;  // [tokens], -1: no copy
  bf16* copy_content;          // [copy_slots][dim]
  bf16* copy_rope;             // [copy_slots][rope_dim]
  int64_t copy_slots;
};
// Row of a token in the exact copy whose sequence starts at `start`, -1 without one.
DEVICE int64_t copy_row(const AppendArgs& a, int64_t start, int64_t position) {
  const int64_t row = start + position;
  return start >= 0 && row < a.copy_slots ? row : -1;
}
DEVICE float weight_at(const AppendArgs& a, int i) { return a.weight_fp32 ? ((const float*)a.weight)[i] : widen(((const bf16*)a.weight)[i]); }
// Block and offset of a token's slot; false when it is not stored. A slot outside the pool is the caller's mistake and must
// not become an illegal write.
DEVICE bool find_slot(const AppendArgs& a, int token, int64_t& block, int& offset) {
  const int64_t slot = a.slots[token];
  block = slot / PAGE, offset = (int)(slot % PAGE);
  return slot >= 0 && block < a.num_blocks;
}
// A token as it comes from memory; the next one is on its way while a warp works on this one.
template <class T> struct Incoming;
template <> struct Incoming<bf16> {
  uint4 latent[2];
  uint32_t pair;  // this lane's of the key
  int64_t position, slot;
  DEVICE void fetch(const AppendArgs& a, int token, int lane) {
    const uint4* from = (const uint4*)((const bf16*)a.latent + token * a.latent_stride);
#pragma unroll
    for (int h = 0; h < 2; h++) latent[h] = from[32 * h + lane];
    const bf16* key = (const bf16*)a.k_rope + token * a.rope_stride + 2 * lane;
    pair = key[0].bits | (uint32_t)key[1].bits << 16;
    position = a.positions[token], slot = a.slots[token];
  }
  DEVICE void row(float (&x)[16]) const { widen8(x, latent[0]), widen8(x + 8, latent[1]); }
  DEVICE float2 key() const { return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)); }
};
template <> struct Incoming<float> {
  float latent[16], first, second;
  int64_t position, slot;
  DEVICE void fetch(const AppendArgs& a, int token, int lane) {
    load_row(latent, (const float*)a.latent + token * a.latent_stride, lane);
    const float* key = (const float*)a.k_rope + token * a.rope_stride + 2 * lane;
    first = key[0], second = key[1];
    position = a.positions[token], slot = a.slots[token];
  }
  DEVICE void row(float (&x)[16]) const {
#pragma unroll
    for (int i = 0; i < 16; i++) x[i] = latent[i];
  }
  DEVICE float2 key() const { return make_float2(first, second); }
};
// Warps walk over the tokens, a grid apart, with the norm's weight in registers.
template <class T, bool COPY = false> DEVICE void append_fp8(const AppendArgs& a) {
  const int lane = threadIdx.x & 31, step = gridDim.x * WARPS;
  int token = blockIdx.x * WARPS + (threadIdx.x >> 5);
  if (token >= a.tokens) return;
  Incoming<T> now, next;
  now.fetch(a, token, lane);
  float w[16];
  if (a.weight_fp32)
    load_row(w, (const float*)a.weight, lane);
  else
    load_row(w, (const bf16*)a.weight, lane);
  for (; token < a.tokens; token += step, now = next) {
    if (token + step < a.tokens) next.fetch(a, token + step, lane);
    [[maybe_unused]] const int64_t start = COPY ? a.copy_starts[token] : -1;  // early: a load takes longer than all that follows
    const float* table = a.cos_sin + now.position * ROPE + lane;
    const float c = table[0], s = table[ROPE / 2];
    const float2 k = now.key(), r = make_float2(k.x * c - k.y * s, k.x * s + k.y * c);
    float x[16], squares = 0.f;
    now.row(x);
#pragma unroll
    for (int i = 0; i < 16; i++) squares = fmaf(x[i], x[i], squares);
    const float norm = 1.f / sqrtf(warp_sum(squares) / DIM + a.eps);
#pragma unroll
    for (int i = 0; i < 16; i++) x[i] = x[i] * norm * w[i];
    const int kept = token - (a.tokens - a.keep);
    if (kept >= 0) {
      store_row((T*)a.keep_latent + (size_t)kept * DIM, x, lane);
      store_pair((T*)a.keep_rope + (size_t)kept * ROPE, r.x, r.y, lane);
    }
    const int64_t block = now.slot / PAGE;
    if (now.slot < 0 || block >= a.num_blocks) continue;
    const int offset = (int)(now.slot % PAGE);
    const float scale = quantize_row((uint8_t*)a.content + block * a.content_block + offset * DIM, x, lane);
    ((uint32_t*)((bf16*)a.rope + block * a.rope_block + offset * ROPE))[lane] = pack_bf16(r.x / scale, r.y / scale);
    if (lane == 0) a.scale[block * a.scale_block + offset] = scale;
    if constexpr (COPY) {
      const int64_t row = copy_row(a, start, now.position);
      if (row >= 0) {
        store_row(a.copy_content + row * DIM, x, lane);
        ((uint32_t*)a.copy_rope)[row * (ROPE / 2) + lane] = pack_bf16(r.x, r.y);
      }
    }
  }
}
template <class T, class S, bool COPY = false> DEVICE void append_exact(const AppendArgs& a) {
  const int token = blockIdx.x * WARPS + (threadIdx.x >> 5), lane = threadIdx.x & 31;
  if (token >= a.tokens) return;
  const T* latent = (const T*)a.latent + token * a.latent_stride;
  float squares = 0.f;
  for (int i = lane; i < a.dim; i += 32) squares = fmaf(widen(latent[i]), widen(latent[i]), squares);
  const float norm = 1.f / sqrtf(warp_sum(squares) / a.dim + a.eps);
  int64_t block;
  int offset;
  const bool stored = find_slot(a, token, block, offset);
  const int kept = token - (a.tokens - a.keep);
  int64_t row = -1;
  if constexpr (COPY) row = stored ? copy_row(a, a.copy_starts[token], a.positions[token]) : -1;
  S* content = (S*)a.content + block * a.content_block + (int64_t)offset * a.dim;
  S* rope = (S*)a.rope + block * a.rope_block + (int64_t)offset * a.rope_dim;
  for (int i = lane; i < a.dim; i += 32) {
    const float v = widen(latent[i]) * norm * weight_at(a, i);
    if (stored) content[i] = narrow<S>(v);
    if (COPY && row >= 0) a.copy_content[row * a.dim + i] = narrow<bf16>(v);
    if (kept >= 0) ((T*)a.keep_latent)[(size_t)kept * a.dim + i] = narrow<T>(v);
  }
  for (int i = lane; i < a.rope_dim / 2; i += 32) {
    const float2 v = rotate((const T*)a.k_rope + token * a.rope_stride, a.cos_sin + a.positions[token] * a.rope_dim, a.rope_dim / 2, i);
    if (stored) rope[2 * i] = narrow<S>(v.x), rope[2 * i + 1] = narrow<S>(v.y);
    if (COPY && row >= 0) ((uint32_t*)a.copy_rope)[(row * a.rope_dim) / 2 + i] = pack_bf16(v.x, v.y);
    if (kept >= 0) {
      T* out = (T*)a.keep_rope + (size_t)kept * a.rope_dim + 2 * i;
      out[0] = narrow<T>(v.x), out[1] = narrow<T>(v.y);
    }
  }
}

// ---- fetch_dequant -------------------------------------------------------------------------------
struct FetchArgs {
  const void* content;
  const void* rope;
  const float* scale;
  const int* block_table;  // [sequences][table_width]
  const int* starts;       // [sequences]
  const int* cu_lens;      // [sequences + 1]
  void* latent;            // T [total, dim]
  void* key;               // T [total, rope_dim]
  int64_t content_block, rope_block, scale_block, table_stride;
  int total, sequences, dim, rope_dim, table_width, num_blocks;
};
// Block and offset of packed token i: binary search in the cumulative lengths, then the block table.
DEVICE void locate(const FetchArgs& a, int i, int64_t& block, int& offset) {
  int low = 0, high = a.sequences - 1;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (i < a.cu_lens[middle + 1]) high = middle;
    else low = middle + 1;
  }
  const int position = a.starts[low] + i - a.cu_lens[low];
  offset = position % PAGE;
  block = min((uint32_t)a.block_table[low * a.table_stride + min(position / PAGE, a.table_width - 1)], (uint32_t)(a.num_blocks - 1));
}
// A warp takes FETCH_ROWS tokens at once: their lookups and their loads are in flight together.
constexpr int FETCH_ROWS = 4;
template <class T> DEVICE void fetch_fp8(const FetchArgs& a) {
  const int first = (blockIdx.x * WARPS + (threadIdx.x >> 5)) * FETCH_ROWS, lane = threadIdx.x & 31;
  if (first >= a.total) return;
  int64_t block;
  int offset;
  locate(a, min(first + lane % FETCH_ROWS, a.total - 1), block, offset);
  const float scale = a.scale[block * a.scale_block + offset];
  const int64_t content = block * a.content_block + offset * DIM, rope = block * a.rope_block + offset * ROPE;
  uint2 codes[FETCH_ROWS][2];
  uint32_t pairs[FETCH_ROWS];
#pragma unroll
  for (int i = 0; i < FETCH_ROWS; i++) {
    const uint2* from = (const uint2*)((const uint8_t*)a.content + __shfl_sync(~0u, content, i));
    codes[i][0] = from[lane], codes[i][1] = from[32 + lane];
    pairs[i] = ((const uint32_t*)((const bf16*)a.rope + __shfl_sync(~0u, rope, i)))[lane];
  }
#pragma unroll
  for (int i = 0; i < FETCH_ROWS; i++) {
    const float s = __shfl_sync(~0u, scale, i);
    if (first + i >= a.total) return;
    float x[16];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const float4 v = unpack_e4m3(j % 2 ? codes[i][j / 2].y : codes[i][j / 2].x);
      x[4 * j] = v.x * s, x[4 * j + 1] = v.y * s, x[4 * j + 2] = v.z * s, x[4 * j + 3] = v.w * s;
    }
    store_row((T*)a.latent + (size_t)(first + i) * DIM, x, lane);
    store_pair((T*)a.key + (size_t)(first + i) * ROPE, __uint_as_float(pairs[i] << 16) * s, __uint_as_float(pairs[i] & 0xffff0000u) * s, lane);
  }
}
template <class T, class S> DEVICE void fetch_exact(const FetchArgs& a) {
  const int i = blockIdx.x * WARPS + (threadIdx.x >> 5), lane = threadIdx.x & 31;
  if (i >= a.total) return;
  int64_t block;
  int offset;
  locate(a, i, block, offset);
  const S* content = (const S*)a.content + block * a.content_block + (int64_t)offset * a.dim;
  const S* rope = (const S*)a.rope + block * a.rope_block + (int64_t)offset * a.rope_dim;
  for (int d = lane; d < a.dim; d += 32) ((T*)a.latent)[(size_t)i * a.dim + d] = narrow<T>(widen(content[d]));
  for (int d = lane; d < a.rope_dim; d += 32) ((T*)a.key)[(size_t)i * a.rope_dim + d] = narrow<T>(widen(rope[d]));
}

#define KERNEL(name, args, body) \
  extern "C" __global__ void __launch_bounds__(32 * WARPS) name(const args a) { wait_for_previous_kernel(), allow_next_kernel(), body(a); }
KERNEL(quantize_q_bf16_fp8, QuantizeQArgs, quantize_q_fp8<bf16>)
KERNEL(quantize_q_fp32_fp8, QuantizeQArgs, quantize_q_fp8<float>)
KERNEL(quantize_q_bf16_bf16, QuantizeQArgs, (rotate_q<bf16, bf16>))
KERNEL(quantize_q_fp32_bf16, QuantizeQArgs, (rotate_q<float, bf16>))
KERNEL(quantize_q_bf16_fp32, QuantizeQArgs, (rotate_q<bf16, float>))
KERNEL(quantize_q_fp32_fp32, QuantizeQArgs, (rotate_q<float, float>))
KERNEL(append_kv_bf16_fp8, AppendArgs, append_fp8<bf16>)
KERNEL(append_kv_fp32_fp8, AppendArgs, append_fp8<float>)
KERNEL(append_kv_bf16_bf16, AppendArgs, (append_exact<bf16, bf16>))
KERNEL(append_kv_fp32_bf16, AppendArgs, (append_exact<float, bf16>))
KERNEL(append_kv_bf16_fp32, AppendArgs, (append_exact<bf16, float>))
KERNEL(append_kv_fp32_fp32, AppendArgs, (append_exact<float, float>))
KERNEL(append_kv_bf16_fp8_copy, AppendArgs, (append_fp8<bf16, true>))
KERNEL(append_kv_fp32_fp8_copy, AppendArgs, (append_fp8<float, true>))
KERNEL(append_kv_bf16_bf16_copy, AppendArgs, (append_exact<bf16, bf16, true>))
KERNEL(append_kv_fp32_bf16_copy, AppendArgs, (append_exact<float, bf16, true>))
KERNEL(append_kv_bf16_fp32_copy, AppendArgs, (append_exact<bf16, float, true>))
KERNEL(append_kv_fp32_fp32_copy, AppendArgs, (append_exact<float, float, true>))
KERNEL(fetch_dequant_bf16_fp8, FetchArgs, fetch_fp8<bf16>)
KERNEL(fetch_dequant_fp32_fp8, FetchArgs, fetch_fp8<float>)
KERNEL(fetch_dequant_bf16_bf16, FetchArgs, (fetch_exact<bf16, bf16>))
KERNEL(fetch_dequant_fp32_bf16, FetchArgs, (fetch_exact<float, bf16>))
KERNEL(fetch_dequant_bf16_fp32, FetchArgs, (fetch_exact<bf16, float>))
KERNEL(fetch_dequant_fp32_fp32, FetchArgs, (fetch_exact<float, float>))
