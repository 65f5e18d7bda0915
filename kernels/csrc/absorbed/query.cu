// The absorbed query in the domain of the cache: q_nope W_UK, RoPE, quantization per token and head (3.1.2, Eq. 6), one
// launch. A CTA holds W_UK of one head, [128][512] BF16, fetched before the kernel that makes q is waited for; per tile of 64
// tokens two warpgroups compute 256 latent dims each, so a row's maximum is two numbers in shared memory. Products are
// rounded to BF16 before they are quantized, as where the two steps are separate.
#include "absorbed/absorbed.cuh"

#ifndef FP8
#define FP8 1  // 0: for the BF16 cache. Two programs, because NVRTC 13.5 crashes on both in one
#endif

struct QueryArgs {
  CUtensorMap w;  // W_UK {latent, nope, heads}, box 64 x 128 x 1, SWIZZLE_128B
  CUtensorMap q;  // {nope + rope, heads, tokens}, box 64 x 1 x 64, SWIZZLE_128B
  const bf16* rope;  // q's rope part, strides below
  const int64_t* positions;
  const float* cos_sin;  // [positions][64], cosines then sines
  void* content;         // E4M3 or BF16 [tokens][heads][512]
  bf16* rope_out;        // [tokens][heads][64]
  float* scale;          // [tokens][heads], E4M3 only
  int64_t rope_token, rope_head;  // strides in elements
  int tokens, heads, splits, _pad;
};

constexpr int Q_CHUNK = TILE * 128, Q_BYTES = 2 * Q_CHUNK, O_Q = W_BYTES;
constexpr int PITCH = 2 * LATENT + 16, O_STAGE = O_Q + Q_BYTES;  // rows on their way out, padded against bank conflicts
constexpr int O_MAX = O_STAGE + TILE * PITCH, O_BAR = O_MAX + 2 * TILE * 4, SMEM = O_BAR + 16 + 1024;  // 1024: to align
extern "C" __device__ int absorb_query_smem = SMEM;

// B of the product is MN-major: rows of shared memory are the K index. Chunks of 64 columns are W_CHUNK apart.
DEVICE uint64_t desc_w(uint32_t addr) {
  return (uint64_t)((addr & 0x3FFFF) >> 4) | ((uint64_t)(W_CHUNK >> 4) << 16) | ((uint64_t)(1024 >> 4) << 32) | (1ull << 62);
}

DEVICE void load_pair(float (&x)[8], const float* p) {
  const float4 a = ((const float4*)p)[0], b = ((const float4*)p)[1];
  x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) absorb_query(const __grid_constant__ QueryArgs a) {
  extern __shared__ uint8_t shared[];
  const uint32_t base = (smem_addr(shared) + 1023) & ~1023u, w_full = base + O_BAR, q_full = w_full + 8;
  uint8_t* stage = shared + (base - smem_addr(shared)) + O_STAGE;
  const Share share(a.splits);
  allow_next_kernel();
  if (threadIdx.x == 0) {
    mbar_init(w_full, 1), mbar_init(q_full, 1);
    mbar_init_fence();
    mbar_expect_tx(w_full, W_BYTES);
    for (int c = 0; c < CHUNKS; c++) tma_3d(base + c * W_CHUNK, &a.w, w_full, 64 * c, 0, share.head);
    prefetch_map(&a.q);
  }
  __syncthreads();
  wait_for_previous_kernel();
  const int group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const int row = 16 * warp + g;  // and row + 8
  const RowMaxima maxima{base + O_MAX};
  int phase = 0;
  for (int first = share.first * TILE; first < a.tokens; first += share.step * TILE, phase ^= 1) {
    if (threadIdx.x == 0) {
      mbar_expect_tx(q_full, Q_BYTES);
      for (int c = 0; c < 2; c++) tma_3d(base + O_Q + c * Q_CHUNK, &a.q, q_full, 64 * c, share.head, first);
    }
    // A quarter of a token's pairs: rotated here, divided by the scale once that is known.
    const int token = first + threadIdx.x / 4, part = threadIdx.x % 4;
    float rotated[16];
    if (token < a.tokens) {
      const bf16* from = a.rope + token * a.rope_token + share.head * a.rope_head + 16 * part;
      const uint4 low = ((const uint4*)from)[0], high = ((const uint4*)from)[1];
      const uint32_t pairs[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
      const float* table = a.cos_sin + a.positions[token] * 64 + 8 * part;
      float cosine[8], sine[8];
      load_pair(cosine, table), load_pair(sine, table + 32);
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const float u = __uint_as_float(pairs[i] << 16), v = __uint_as_float(pairs[i] & 0xFFFF0000u);
        rotated[2 * i] = u * cosine[i] - v * sine[i], rotated[2 * i + 1] = u * sine[i] + v * cosine[i];
      }
    }
    if (phase == 0 && first == share.first * TILE) mbar_wait(w_full, 0);
    mbar_wait(q_full, phase);
    float acc[2][64];
    const uint64_t dq = desc_sw128(base + O_Q), dw = desc_w(base + group * 4 * W_CHUNK);
#pragma unroll
    for (int h = 0; h < 2; h++) {
#pragma unroll
      for (int i = 0; i < 64; i++) acc[h][i] = 0.f;
      pin(acc[h]);
    }
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < HEAD / 16; k++) {
#pragma unroll
      for (int h = 0; h < 2; h++)
        wgmma_bf16_ss_n128_tb(acc[h], dq + (k / 4) * (Q_CHUNK >> 4) + k % 4 * 2, dw + k * (16 * 128 >> 4) + h * (2 * W_CHUNK >> 4));
    }
    wgmma_commit();
    wgmma_wait<0>();
    pin(acc[0]), pin(acc[1]);

    // Columns 256 group + 128 h + 8 i + 2 q, + 1 of rows `row` and `row + 8`.
    float upper = 0.f, lower = 0.f;
    if (FP8) {
#pragma unroll
      for (int h = 0; h < 2; h++) {
#pragma unroll
        for (int i = 0; i < 32; i++) {
          const uint32_t bits = pack_bf16(acc[h][2 * i], acc[h][2 * i + 1]);
          acc[h][2 * i] = __uint_as_float(bits << 16), acc[h][2 * i + 1] = __uint_as_float(bits & 0xFFFF0000u);
          const float m = fmaxf(fabsf(acc[h][2 * i]), fabsf(acc[h][2 * i + 1]));
          if (i % 2) lower = fmaxf(lower, m);
          else upper = fmaxf(upper, m);
        }
      }
      maxima.leave(upper, row), maxima.leave(lower, row + 8);
      __syncthreads();
      const float up = 1.f / maxima.scale(row), low = 1.f / maxima.scale(row + 8), mine = maxima.scale(threadIdx.x / 4);
#pragma unroll
      for (int h = 0; h < 2; h++) {
#pragma unroll
        for (int i = 0; i < 16; i++) {
          const int column = 256 * group + 128 * h + 8 * i + 2 * q;
          const uint32_t codes = pack_e4m3(acc[h][4 * i] * up, acc[h][4 * i + 1] * up, acc[h][4 * i + 2] * low, acc[h][4 * i + 3] * low);
          *(uint16_t*)(stage + row * PITCH + column) = (uint16_t)codes;
          *(uint16_t*)(stage + (row + 8) * PITCH + column) = (uint16_t)(codes >> 16);
        }
      }
#pragma unroll
      for (int i = 0; i < 16; i++) rotated[i] = rotated[i] / mine;
      if (token < a.tokens && part == 0) a.scale[(int64_t)token * a.heads + share.head] = mine;
    } else {
#pragma unroll
      for (int h = 0; h < 2; h++) {
#pragma unroll
        for (int i = 0; i < 16; i++) {
          const int column = 256 * group + 128 * h + 8 * i + 2 * q;
          *(uint32_t*)(stage + row * PITCH + 2 * column) = pack_bf16(acc[h][4 * i], acc[h][4 * i + 1]);
          *(uint32_t*)(stage + (row + 8) * PITCH + 2 * column) = pack_bf16(acc[h][4 * i + 2], acc[h][4 * i + 3]);
        }
      }
    }
    if (token < a.tokens) {
      uint4* to = (uint4*)(a.rope_out + ((int64_t)token * a.heads + share.head) * 64 + 16 * part);
#pragma unroll
      for (int i = 0; i < 2; i++)
        to[i] = make_uint4(pack_bf16(rotated[8 * i], rotated[8 * i + 1]), pack_bf16(rotated[8 * i + 2], rotated[8 * i + 3]),
                           pack_bf16(rotated[8 * i + 4], rotated[8 * i + 5]), pack_bf16(rotated[8 * i + 6], rotated[8 * i + 7]));
    }
    __syncthreads();
    constexpr int VECTORS = LATENT * (FP8 ? 1 : 2) / 16;  // of a row
    for (int i = threadIdx.x; i < min(TILE, a.tokens - first) * VECTORS; i += THREADS) {
      const int r = i / VECTORS, c = i % VECTORS;
      ((uint4*)a.content)[((int64_t)(first + r) * a.heads + share.head) * VECTORS + c] = *(const uint4*)(stage + r * PITCH + 16 * c);
    }
    __syncthreads();  // the stage and the maxima are free again
  }
}
