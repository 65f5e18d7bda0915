// Attention's output out of latent space: out W_UV of every head, and its quantization for a block-scaled o_proj, one launch.
// A CTA holds W_UV of one head, [128 value dims][512] BF16, fetched before attention is waited for; each of two warpgroups
// computes 64 value dims. A head's 128 values are one block of the 1x128 quantization, so the scale of a token and head is
// known where the values are.
#include "absorbed/absorbed.cuh"
#include "gemm/quantize.cuh"

struct ValuesArgs {
  CUtensorMap w;  // W_UV {latent, value dims, heads}, box 64 x 128 x 1, SWIZZLE_128B
  CUtensorMap x;  // {latent, heads, tokens}, box 64 x 1 x NT, SWIZZLE_128B
  Quantized to;   // codes null: plain
  bf16* out;      // [tokens][heads * 128]
  int tokens, heads, splits, _pad;
};

template <int NT> struct Memory {
  static constexpr int X_CHUNK = NT * 128, X_AT = W_BYTES, STAGE_AT = X_AT + CHUNKS * X_CHUNK, PITCH = 2 * HEAD + 16;
  static constexpr int MAXIMA_AT = STAGE_AT + NT * PITCH, BARRIERS_AT = MAXIMA_AT + NT * 4;
  static constexpr int BYTES = BARRIERS_AT + BARRIER_BYTES + 1024;
  static_assert(BYTES <= 232448, "shared memory of a Hopper SM");
};

template <int NT> DEVICE void project(const ValuesArgs& a) {
  using M = Memory<NT>;
  extern __shared__ uint8_t shared[];
  const uint32_t base = (smem_addr(shared) + 1023) & ~1023u, bars = base + M::BARRIERS_AT, x_full = bars + 8 * CHUNKS;
  uint8_t* stage = shared + (base - smem_addr(shared)) + M::STAGE_AT;
  const Tiles tiles(a.splits, NT);
  const Maxima maxima{base + M::MAXIMA_AT};
  maxima.clear(NT);
  hold_weight(a.w, a.x, base, bars, tiles.head);
  const int group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const bool fp8 = a.to.codes != nullptr;
  int phase = 0;
  for (int first = tiles.first; first < a.tokens; first += tiles.step, phase ^= 1) {
    if (threadIdx.x == 0) {
      mbar_expect_tx(x_full, CHUNKS * M::X_CHUNK);
      for (int c = 0; c < CHUNKS; c++) tma_3d(base + M::X_AT + c * M::X_CHUNK, &a.x, x_full, 64 * c, tiles.head, first);
    }
    mbar_wait(x_full, phase);
    float acc[NT / 2];
#pragma unroll
    for (int i = 0; i < NT / 2; i++) acc[i] = 0.f;
    pin(acc);
    const uint64_t dx = desc_sw128(base + M::X_AT), dw = desc_sw128(base + group * 64 * 128);
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
      mbar_wait(bars + 8 * c, 0);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; k++) Wgmma<NT>::bf16(acc, dw + c * (W_CHUNK >> 4) + 2 * k, dx + c * (M::X_CHUNK >> 4) + 2 * k);
      wgmma_commit();
    }
    wgmma_wait<0>();
    pin(acc);
    uint32_t pairs[NT / 4];  // values 64 group + 16 warp + 2 q, + 1, and 8 further
    to_token_rows<NT>(acc, pairs);
    const int live = min(NT, a.tokens - first), column = 64 * group + 16 * warp + 2 * q;
    if (fp8) {
#pragma unroll
      for (int i = 0; i < NT / 8; i++) maxima.leave(largest(pairs[2 * i], pairs[2 * i + 1]), 8 * i + g);
      __syncthreads();
      if (threadIdx.x < live)
        a.to.scales[(int64_t)tiles.head * a.to.scale_stride + first + threadIdx.x] = maxima.scale(threadIdx.x);
    }
#pragma unroll
    for (int i = 0; i < NT / 8; i++) {
      uint8_t* row = stage + (8 * i + g) * M::PITCH;
      const uint32_t x = pairs[2 * i], y = pairs[2 * i + 1];
      if (fp8) {
        const float scale = maxima.scale(8 * i + g);
        const uint32_t codes = pack_e4m3(low_half(x) / scale, high_half(x) / scale, low_half(y) / scale, high_half(y) / scale);
        *(uint16_t*)(row + column) = (uint16_t)codes, *(uint16_t*)(row + column + 8) = (uint16_t)(codes >> 16);
      } else {
        *(uint32_t*)(row + 2 * column) = x, *(uint32_t*)(row + 2 * column + 16) = y;
      }
    }
    __syncthreads();
    const int vectors = fp8 ? HEAD / 16 : 2 * HEAD / 16;  // of a row
    uint4* to = fp8 ? (uint4*)a.to.codes : (uint4*)a.out;
    for (int i = threadIdx.x; i < live * vectors; i += THREADS) {
      const int r = i / vectors, c = i % vectors;
      to[((int64_t)(first + r) * a.heads + tiles.head) * vectors + c] = *(const uint4*)(stage + r * M::PITCH + 16 * c);
    }
    maxima.clear(NT);
    __syncthreads();  // the stage is free again
  }
}

#define VALUES_KERNEL(NT)                                                                                               \
  extern "C" __global__ void __launch_bounds__(THREADS, 1) project_values_##NT(const __grid_constant__ ValuesArgs a) { \
    project<NT>(a);                                                                                                    \
  }                                                                                                                    \
  extern "C" __device__ int project_values_##NT##_smem = Memory<NT>::BYTES;
VALUES_KERNEL(16)
VALUES_KERNEL(32)
VALUES_KERNEL(64)
