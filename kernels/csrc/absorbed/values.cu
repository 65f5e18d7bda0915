// Attention's output out of latent space: out W_UV of every head, and its quantization for a block-scaled o_proj, one launch.
// A CTA holds W_UV of one head, [128 value dims][512] BF16, fetched before attention is waited for. A head's 128 values are
// one block of the 1x128 quantization, so the scale of a token and head is known where the values are.
#include "absorbed/absorbed.cuh"
#include "gemm/quantize.cuh"
#include "gemm/wgmma.cuh"

struct ValuesArgs {
  CUtensorMap w;  // W_UV {latent, value dims, heads}, box 64 x 128 x 1, SWIZZLE_128B
  CUtensorMap x;  // {latent, heads, tokens}, box 64 x 1 x `rows`, SWIZZLE_128B
  Quantized to;   // codes null: plain
  bf16* out;      // [tokens][heads * 128]
  int tokens, heads, splits, rows;  // rows: of a fetched tile, at most 64
};

constexpr int X_CHUNK = TILE * 128, O_X = W_BYTES, O_STAGE = O_X + CHUNKS * X_CHUNK, PITCH = 2 * HEAD + 16;
constexpr int O_MAX = O_STAGE + TILE * PITCH, O_BAR = O_MAX + 2 * TILE * 4, SMEM = O_BAR + 16 + 1024;
static_assert(SMEM <= 232448, "shared memory of a Hopper SM");
extern "C" __device__ int project_values_smem = SMEM;

extern "C" __global__ void __launch_bounds__(THREADS, 1) project_values(const __grid_constant__ ValuesArgs a) {
  extern __shared__ uint8_t shared[];
  const uint32_t base = (smem_addr(shared) + 1023) & ~1023u, w_full = base + O_BAR, x_full = w_full + 8;
  uint8_t* stage = shared + (base - smem_addr(shared)) + O_STAGE;
  const Share share(a.splits);
  allow_next_kernel();
  if (threadIdx.x == 0) {
    mbar_init(w_full, 1), mbar_init(x_full, 1);
    mbar_init_fence();
    mbar_expect_tx(w_full, W_BYTES);
    for (int c = 0; c < CHUNKS; c++) tma_3d(base + c * W_CHUNK, &a.w, w_full, 64 * c, 0, share.head);
    prefetch_map(&a.x);
  }
  __syncthreads();
  wait_for_previous_kernel();
  const int group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const int row = 16 * warp + g;  // and row + 8
  const RowMaxima maxima{base + O_MAX};
  const bool fp8 = a.to.codes != nullptr;
  int phase = 0;
  for (int first = share.first * TILE; first < a.tokens; first += share.step * TILE, phase ^= 1) {
    if (threadIdx.x == 0) {
      mbar_expect_tx(x_full, CHUNKS * a.rows * 128);
      for (int c = 0; c < CHUNKS; c++) tma_3d(base + O_X + c * X_CHUNK, &a.x, x_full, 64 * c, share.head, first);
    }
    if (phase == 0 && first == share.first * TILE) mbar_wait(w_full, 0);
    mbar_wait(x_full, phase);
    float acc[32];
#pragma unroll
    for (int i = 0; i < 32; i++) acc[i] = 0.f;
    pin(acc);
    const uint64_t dx = desc_sw128(base + O_X), dw = desc_sw128(base + group * 64 * 128);
    wgmma_fence();
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
#pragma unroll
      for (int k = 0; k < 4; k++) Wgmma<64>::bf16(acc, dx + c * (X_CHUNK >> 4) + 2 * k, dw + c * (W_CHUNK >> 4) + 2 * k);
    }
    wgmma_commit();
    wgmma_wait<0>();
    pin(acc);

    // Columns 64 group + 8 i + 2 q, + 1 of rows `row` and `row + 8`, rounded to BF16. Rows that were not fetched hold anything,
    // NaN too, whose division is slow: warps without a token stay out.
    const int live = min(TILE, a.tokens - first);
    const bool busy = 16 * warp < live;
    float upper = 0.f, lower = 0.f;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      if (!busy) break;
      const int column = 64 * group + 8 * i + 2 * q;
      const uint32_t first_row = pack_bf16(acc[4 * i], acc[4 * i + 1]), second_row = pack_bf16(acc[4 * i + 2], acc[4 * i + 3]);
      acc[4 * i] = __uint_as_float(first_row << 16), acc[4 * i + 1] = __uint_as_float(first_row & 0xFFFF0000u);
      acc[4 * i + 2] = __uint_as_float(second_row << 16), acc[4 * i + 3] = __uint_as_float(second_row & 0xFFFF0000u);
      upper = fmaxf(upper, fmaxf(fabsf(acc[4 * i]), fabsf(acc[4 * i + 1])));
      lower = fmaxf(lower, fmaxf(fabsf(acc[4 * i + 2]), fabsf(acc[4 * i + 3])));
      if (fp8) continue;
      *(uint32_t*)(stage + row * PITCH + 2 * column) = first_row;
      *(uint32_t*)(stage + (row + 8) * PITCH + 2 * column) = second_row;
    }
    if (fp8) {
      if (busy) maxima.leave(upper, row), maxima.leave(lower, row + 8);
      __syncthreads();
      const float up = maxima.scale(row), low = maxima.scale(row + 8);
#pragma unroll
      for (int i = 0; i < 8; i++) {
        if (!busy) break;
        const int column = 64 * group + 8 * i + 2 * q;
        const uint32_t codes = pack_e4m3(acc[4 * i] / up, acc[4 * i + 1] / up, acc[4 * i + 2] / low, acc[4 * i + 3] / low);
        *(uint16_t*)(stage + row * PITCH + column) = (uint16_t)codes;
        *(uint16_t*)(stage + (row + 8) * PITCH + column) = (uint16_t)(codes >> 16);
      }
      if (threadIdx.x < live)
        a.to.scales[(int64_t)share.head * a.to.scale_stride + first + threadIdx.x] = maxima.scale(threadIdx.x);
    }
    __syncthreads();
    const int vectors = fp8 ? HEAD / 16 : 2 * HEAD / 16;  // of a row
    uint4* to = fp8 ? (uint4*)a.to.codes : (uint4*)a.out;
    for (int i = threadIdx.x; i < live * vectors; i += THREADS) {
      const int r = i / vectors, c = i % vectors;
      to[((int64_t)(first + r) * a.heads + share.head) * vectors + c] = *(const uint4*)(stage + r * PITCH + 16 * c);
    }
    __syncthreads();  // the stage and the maxima are free again
  }
}
