// What the two products with the halves of kv_b share: one head's half of that weight stays in shared memory, 128 KB over as
// many CTAs as heads: the time of reading them once. Tokens pass by in tiles of NT: 16, 32 or 64.
//
// The weight is the M side of wgmma and tokens its N side, so few tokens are little work. Accumulators are then transposed in
// pairs: a thread holds two neighbouring values of a token, as they are stored.
#pragma once
#include "common/ptx.cuh"
#include "gemm/tma.cuh"
#include "gemm/wgmma.cuh"

constexpr int LATENT = 512, HEAD = 128;  // latent width, nope or value dims of a head
constexpr int THREADS = 256, CHUNKS = LATENT / 64;  // two warpgroups; chunks of 64 latent dims, 128 bytes in BF16
constexpr int W_CHUNK = HEAD * 128, W_BYTES = CHUNKS * W_CHUNK, BARRIER_BYTES = (CHUNKS + 1) * 8;

// Tiles of a head are dealt to `splits` CTAs.
struct Tiles {
  int head, first, step;
  DEVICE Tiles(int splits, int nt) { head = blockIdx.x / splits, first = blockIdx.x % splits * nt, step = splits * nt; }
};

// Largest magnitudes of a tile's tokens, as bits, which compare like the numbers.
struct Maxima {
  uint32_t base;
  DEVICE void clear(int nt) const {
    if (threadIdx.x < nt) sts_f32(base + threadIdx.x * 4, AMAX_FLOOR);
  }
  DEVICE void leave(float mine, int token) const {  // four neighbouring lanes have the same token
    mine = fmaxf(mine, __shfl_xor_sync(~0u, mine, 1));
    mine = fmaxf(mine, __shfl_xor_sync(~0u, mine, 2));
    if (threadIdx.x % 4 == 0)
      asm volatile("red.shared.max.u32 [%0], %1;" ::"r"(base + token * 4), "r"(__float_as_uint(mine)) : "memory");
  }
  DEVICE float scale(int token) const { return lds_f32(base + token * 4) / FP8_MAX; }
};

// The weight's way into shared memory begins, a barrier a chunk; the one after them is for tokens. The kernel before this one
// has ended when it returns.
DEVICE void hold_weight(const CUtensorMap& w, const CUtensorMap& tokens, uint32_t base, uint32_t bars, int head) {
  allow_next_kernel();
  if (threadIdx.x == 0) {
    for (int i = 0; i <= CHUNKS; i++) mbar_init(bars + 8 * i, 1);
    mbar_init_fence();
    for (int c = 0; c < CHUNKS; c++) {
      mbar_expect_tx(bars + 8 * c, W_CHUNK);
      tma_3d(base + c * W_CHUNK, &w, bars + 8 * c, 64 * c, 0, head);
    }
    prefetch_map(&tokens);
  }
  __syncthreads();
  wait_for_previous_kernel();
}

DEVICE float low_half(uint32_t pair) { return __uint_as_float(pair << 16); }
DEVICE float high_half(uint32_t pair) { return __uint_as_float(pair & 0xFFFF0000u); }

// Rounded to BF16, two neighbouring values of token 8 i + lane / 4: values 2 (lane % 4) of the warp's 16, and 8 more.
template <int NT> DEVICE void to_token_rows(const float (&acc)[NT / 2], uint32_t (&pairs)[NT / 4]) {
#pragma unroll
  for (int i = 0; i < NT / 8; i++) {
    pairs[2 * i] = transpose_8x8(pack_bf16(acc[4 * i], acc[4 * i + 1]));
    pairs[2 * i + 1] = transpose_8x8(pack_bf16(acc[4 * i + 2], acc[4 * i + 3]));
  }
}
DEVICE float largest(uint32_t a, uint32_t b) {
  return fmaxf(fmaxf(fabsf(low_half(a)), fabsf(high_half(a))), fmaxf(fabsf(low_half(b)), fabsf(high_half(b))));
}
