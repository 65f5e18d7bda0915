// The absorbed query in the domain of the cache: q_nope W_UK, RoPE, quantization per token and head (3.1.2, Eq. 6), one
// launch. A CTA holds W_UK of one head, [128][512] BF16, fetched before the kernel that makes q is waited for; each of two
// warpgroups computes every other chunk of 64 latent dims. Products are rounded to BF16 before they are quantized, as where
// the two steps are separate.
#include "absorbed/absorbed.cuh"

#ifndef FP8
#define FP8 1  // 0: for the BF16 cache. Two programs, because NVRTC 13.5 crashes on both in one
#endif

struct QueryArgs {
  CUtensorMap w;  // W_UK {latent, nope, heads}, box 64 x 128 x 1, SWIZZLE_128B
  CUtensorMap q;  // {nope + rope, heads, tokens}, box 64 x 1 x NT, SWIZZLE_128B
  const bf16* rope;  // q's rope part, strides below
  const int64_t* positions;
  const float* cos_sin;  // [positions][64], cosines then sines
  void* content;         // E4M3 or BF16 [tokens][heads][512]
  bf16* rope_out;        // [tokens][heads][64]
  float* scale;          // [tokens][heads], E4M3 only
  int64_t rope_token, rope_head;  // strides in elements
  int tokens, heads, splits, _pad;
};

template <int NT> struct Memory {
  static constexpr int Q_CHUNK = NT * 128, Q_AT = W_BYTES, VALUE_BYTES = FP8 ? 1 : 2;
  static constexpr int PITCH = LATENT * VALUE_BYTES + 16, STAGE_AT = Q_AT + 2 * Q_CHUNK;  // rows on their way out, padded against bank conflicts
  static constexpr int MAXIMA_AT = STAGE_AT + NT * PITCH, BARRIERS_AT = MAXIMA_AT + NT * 4;
  static constexpr int BYTES = BARRIERS_AT + BARRIER_BYTES + 1024;  // 1024: to align
};

// The weight as it lies is MN-major: rows of shared memory are the K index.
DEVICE uint64_t desc_w(uint32_t addr) {
  return (uint64_t)((addr & 0x3FFFF) >> 4) | ((uint64_t)(W_CHUNK >> 4) << 16) | ((uint64_t)(1024 >> 4) << 32) | (1ull << 62);
}

DEVICE void load_pair(float (&x)[8], const float* p) {
  const float4 a = ((const float4*)p)[0], b = ((const float4*)p)[1];
  x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
}

template <int NT> DEVICE void absorb(const QueryArgs& a) {
  using M = Memory<NT>;
  extern __shared__ uint8_t shared[];
  const uint32_t base = (smem_addr(shared) + 1023) & ~1023u, bars = base + M::BARRIERS_AT, q_full = bars + 8 * CHUNKS;
  uint8_t* stage = shared + (base - smem_addr(shared)) + M::STAGE_AT;
  const Tiles tiles(a.splits, NT);
  const Maxima maxima{base + M::MAXIMA_AT};
  maxima.clear(NT);
  hold_weight(a.w, a.q, base, bars, tiles.head);
  const int group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  int phase = 0;
  for (int first = tiles.first; first < a.tokens; first += tiles.step, phase ^= 1) {
    if (threadIdx.x == 0) {
      mbar_expect_tx(q_full, 2 * M::Q_CHUNK);
      for (int c = 0; c < 2; c++) tma_3d(base + M::Q_AT + c * M::Q_CHUNK, &a.q, q_full, 64 * c, tiles.head, first);
    }
    // A quarter of a token's pairs: rotated here, divided by the scale once that is known.
    const int token = first + threadIdx.x / 4, part = threadIdx.x % 4;
    const bool rotates = threadIdx.x / 4 < NT && token < a.tokens;
    float rotated[16];
    if (rotates) {
      const bf16* from = a.rope + token * a.rope_token + tiles.head * a.rope_head + 16 * part;
      const uint4 low = ((const uint4*)from)[0], high = ((const uint4*)from)[1];
      const uint32_t pairs[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
      const float* table = a.cos_sin + a.positions[token] * 64 + 8 * part;
      float cosine[8], sine[8];
      load_pair(cosine, table), load_pair(sine, table + 32);
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const float u = low_half(pairs[i]), v = high_half(pairs[i]);
        rotated[2 * i] = u * cosine[i] - v * sine[i], rotated[2 * i + 1] = u * sine[i] + v * cosine[i];
      }
    }
    mbar_wait(q_full, phase);
    uint32_t pairs[CHUNKS / 2][NT / 4];  // of chunk 2 c + group
    const uint64_t dq = desc_sw128(base + M::Q_AT);
#pragma unroll
    for (int c = 0; c < CHUNKS / 2; c++) {
      const int chunk = 2 * c + group;
      mbar_wait(bars + 8 * chunk, 0);
      float acc[NT / 2];
#pragma unroll
      for (int i = 0; i < NT / 2; i++) acc[i] = 0.f;
      pin(acc);
      const uint64_t dw = desc_w(base + chunk * W_CHUNK);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < HEAD / 16; k++)
        Wgmma<NT>::bf16_ta(acc, dw + k * (16 * 128 >> 4), dq + k / 4 * (M::Q_CHUNK >> 4) + k % 4 * 2);
      wgmma_commit();
      wgmma_wait<0>();
      pin(acc);
      to_token_rows<NT>(acc, pairs[c]);
    }
    if (FP8) {
#pragma unroll
      for (int i = 0; i < NT / 8; i++) {
        float most = 0.f;
#pragma unroll
        for (int c = 0; c < CHUNKS / 2; c++) most = fmaxf(most, largest(pairs[c][2 * i], pairs[c][2 * i + 1]));
        maxima.leave(most, 8 * i + g);
      }
      __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < NT / 8; i++) {
      const float up = FP8 ? 1.f / maxima.scale(8 * i + g) : 1.f;
      uint8_t* row = stage + (8 * i + g) * M::PITCH + (16 * warp + 2 * q) * M::VALUE_BYTES;
#pragma unroll
      for (int c = 0; c < CHUNKS / 2; c++) {
        uint8_t* to = row + 64 * (2 * c + group) * M::VALUE_BYTES;
        const uint32_t x = pairs[c][2 * i], y = pairs[c][2 * i + 1];
        if (FP8) {
          const uint32_t codes = pack_e4m3(low_half(x) * up, high_half(x) * up, low_half(y) * up, high_half(y) * up);
          *(uint16_t*)to = (uint16_t)codes, *(uint16_t*)(to + 8) = (uint16_t)(codes >> 16);
        } else {
          *(uint32_t*)to = x, *(uint32_t*)(to + 16) = y;
        }
      }
    }
    if (rotates) {
      if (FP8) {
        const float mine = maxima.scale(threadIdx.x / 4);
#pragma unroll
        for (int i = 0; i < 16; i++) rotated[i] = rotated[i] / mine;
        if (part == 0) a.scale[(int64_t)token * a.heads + tiles.head] = mine;
      }
      uint4* to = (uint4*)(a.rope_out + ((int64_t)token * a.heads + tiles.head) * 64 + 16 * part);
#pragma unroll
      for (int i = 0; i < 2; i++)
        to[i] = make_uint4(pack_bf16(rotated[8 * i], rotated[8 * i + 1]), pack_bf16(rotated[8 * i + 2], rotated[8 * i + 3]),
                           pack_bf16(rotated[8 * i + 4], rotated[8 * i + 5]), pack_bf16(rotated[8 * i + 6], rotated[8 * i + 7]));
    }
    __syncthreads();
    constexpr int VECTORS = LATENT * M::VALUE_BYTES / 16;  // of a row
    for (int i = threadIdx.x; i < min(NT, a.tokens - first) * VECTORS; i += THREADS) {
      const int r = i / VECTORS, c = i % VECTORS;
      ((uint4*)a.content)[((int64_t)(first + r) * a.heads + tiles.head) * VECTORS + c] = *(const uint4*)(stage + r * M::PITCH + 16 * c);
    }
    maxima.clear(NT);
    __syncthreads();  // the stage is free again
  }
}

#define QUERY_KERNEL(NT)                                                                                             \
  extern "C" __global__ void __launch_bounds__(THREADS, 1) absorb_query_##NT(const __grid_constant__ QueryArgs a) { \
    absorb<NT>(a);                                                                                                  \
  }                                                                                                                 \
  extern "C" __device__ int absorb_query_##NT##_smem = Memory<NT>::BYTES;
QUERY_KERNEL(16)
QUERY_KERNEL(32)
QUERY_KERNEL(64)
