// What the two products with the halves of kv_b share: one head's half of that weight stays in shared memory, tokens pass by
// in tiles of 64. 128 KB a head over as many CTAs as heads: the time of reading them once.
#pragma once
#include "common/ptx.cuh"
#include "gemm/tma.cuh"

constexpr int LATENT = 512, HEAD = 128, TILE = 64;  // latent width, nope or value dims of a head, tokens of a tile
constexpr int THREADS = 256, CHUNKS = LATENT / 64;  // two warpgroups; chunks of 64 latent dims, 128 bytes in BF16
constexpr int W_CHUNK = HEAD * 128, W_BYTES = CHUNKS * W_CHUNK;

// Tiles of a head are dealt to `splits` CTAs.
struct Share {
  int head, first, step;
  DEVICE explicit Share(int splits) { head = blockIdx.x / splits, first = blockIdx.x % splits, step = splits; }
};

// Maxima of the rows of a tile whose columns both warpgroups share: each leaves its own, then both read the larger.
struct RowMaxima {
  uint32_t base;  // two floats a row
  DEVICE void leave(float mine, int row) const {
    mine = fmaxf(mine, __shfl_xor_sync(~0u, mine, 1));
    mine = fmaxf(mine, __shfl_xor_sync(~0u, mine, 2));
    if (threadIdx.x % 4 == 0) sts_f32(base + (threadIdx.x / 128 * TILE + row) * 4, mine);
  }
  DEVICE float scale(int row) const {
    return fmaxf(fmaxf(lds_f32(base + row * 4), lds_f32(base + (TILE + row) * 4)), AMAX_FLOOR) / FP8_MAX;
  }
};
