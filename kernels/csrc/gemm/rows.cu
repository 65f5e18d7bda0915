// Y = X W^T for up to 64 tokens without splitting K: every CTA computes ROWS weight rows, all of K, and writes them at once.
//
// Tokens are the M side of wgmma and the ROWS weight rows its N side, so a slice can be as narrow as 8 rows and every SM has
// one, whatever N is: no partial sums, no second kernel. The price is that every CTA reads all of X; a cluster of two halves
// it, each CTA fetching half of the tokens for both. FP8 as in stream.cuh: a fresh accumulator per 128 channels, folded into
// FP32 registers with its scales. Weights are fetched before the kernel that makes X is waited for.
#include "gemm/tma.cuh"
#include "gemm/wgmma.cuh"

#ifndef ROWS
#define ROWS 56  // of a CTA: a multiple of 8 up to 64, or of 16 up to 288
#endif

struct RowsArgs {
  CUtensorMap w;         // [k_blocks, N, 128], box 128 channels x GROUP_ROWS rows x K_STEPS blocks
  CUtensorMap x;         // [rows, K], box 128 channels x tokens / 2
  CUtensorMap x_scale;   // FP32 [k_blocks, rows], box tokens x K_STEPS blocks
  const float* w_scale;  // [scale_rows, k_blocks]
  void* out;             // BF16 (or FP32) [rows, N]
  int rows, n, k_blocks, scale_rows;
  int tokens;  // of a tile: rows rounded up to 16, 32 or 64
  int out_fp32;
};

constexpr bool BY_COLUMNS = ROWS > 64;  // two warpgroups share a slice's rows; a narrow slice's stages instead
constexpr int GROUP_ROWS = BY_COLUMNS ? ROWS / 2 : ROWS, REGS = GROUP_ROWS / 2;
constexpr int K_STEPS = GROUP_ROWS > 64 ? 1 : GROUP_ROWS > 32 ? 2 : 4;  // blocks of a stage
constexpr int CONSUMER_WARPS = 8, THREADS = 32 * (CONSUMER_WARPS + 1), MAX_STAGES = 24;
constexpr int W_BYTES = K_STEPS * ROWS * 128, SCALE_BYTES = K_STEPS * 64 * 4, RING_BYTES = 232448 - 1024 - MAX_STAGES * (SCALE_BYTES + 16);
constexpr int ARRIVALS = 2 * (BY_COLUMNS ? CONSUMER_WARPS : CONSUMER_WARPS / 2);  // of both CTAs, when a stage is free again
static_assert(ROWS % (BY_COLUMNS ? 16 : 8) == 0 && ROWS <= 288, "rows of a slice");

extern "C" __device__ int product_rows_smem = 232448;  // the launcher reads it

// Shared memory of a CTA: ring of stages (x blocks, then w blocks), x scales of the stages, barriers.
struct Layout {
  uint32_t base, x_bytes, stage_bytes;
  int stages, steps;
  DEVICE Layout(const RowsArgs& a, uint32_t aligned) {
    base = aligned, x_bytes = K_STEPS * a.tokens * 128, stage_bytes = x_bytes + W_BYTES;
    steps = (a.k_blocks + K_STEPS - 1) / K_STEPS;
    stages = min(MAX_STAGES, (int)(RING_BYTES / stage_bytes)) / 2 * 2;  // even: each warpgroup has its own stages
  }
  DEVICE uint32_t x(int stage) const { return base + stage * stage_bytes; }
  DEVICE uint32_t w(int stage) const { return x(stage) + x_bytes; }
  DEVICE uint32_t scales(int stage) const { return base + RING_BYTES + stage * SCALE_BYTES; }
  DEVICE uint32_t full(int stage) const { return base + RING_BYTES + MAX_STAGES * SCALE_BYTES + stage * 16; }
  DEVICE uint32_t empty(int stage) const { return full(stage) + 8; }
};

DEVICE void fetch(const RowsArgs& a, const Layout& l, int first_row, int rank) {
  const auto fetch_w = [&](int step, int stage) {
    mbar_expect_tx(l.full(stage), l.stage_bytes + K_STEPS * a.tokens * 4);
    for (int g = 0; g < ROWS / GROUP_ROWS; g++)
      tma_weights<true>(l.w(stage) + g * K_STEPS * GROUP_ROWS * 128, &a.w, l.full(stage), 0, first_row + g * GROUP_ROWS, step * K_STEPS);
  };
  const auto fetch_x = [&](int step, int stage) {
    const int half = a.tokens / 2;
    for (int j = 0; j < K_STEPS; j++)
      tma_plane_multicast(l.x(stage) + (j * a.tokens + rank * half) * 128, &a.x, l.full(stage), (step * K_STEPS + j) * 128, rank * half, 3);
    tma_plane(l.scales(stage), &a.x_scale, l.full(stage), 0, step * K_STEPS);
  };
  const int early = min(l.steps, l.stages);
  for (int i = 0; i < early; i++) fetch_w(i, i);
  cluster_wait();  // the other CTA's barriers are ready
  wait_for_previous_kernel();
  for (int i = 0; i < early; i++) fetch_x(i, i);
  for (int i = early, stage = 0, phase = 0; i < l.steps; i++) {
    mbar_wait(l.empty(stage), phase);
    fetch_w(i, stage);
    fetch_x(i, stage);
    if (++stage == l.stages) stage = 0, phase ^= 1;
  }
}

// The weight scales of this warpgroup's rows, which lie in at most two 128-row blocks: 32 k-blocks a warp register, the
// next 32 asked for early. Windows are visited in order.
struct WeightScales {
  const float *upper, *lower;
  int k_blocks, window;
  float u, l, next_u, next_l;
  DEVICE WeightScales(const RowsArgs& a, int first_row) {
    const int block = first_row / 128, last = a.scale_rows - 1;
    upper = a.w_scale + (int64_t)min(block, last) * a.k_blocks, lower = a.w_scale + (int64_t)min(block + 1, last) * a.k_blocks;
    k_blocks = a.k_blocks, window = -1;
    ask(0);
  }
  DEVICE void ask(int which) {
    const int at = which * 32 + threadIdx.x % 32;
    next_u = at < k_blocks ? upper[at] : 0.f, next_l = at < k_blocks ? lower[at] : 0.f;
  }
  DEVICE void seek(int k) {
    if (k / 32 == window) return;
    window = k / 32;
    u = next_u, l = next_l;
    ask(window + 1);
  }
};

DEVICE void store(const RowsArgs& a, const float (&sum)[REGS], int first_row) {
  const int lane = threadIdx.x % 32, q = lane % 4, token = threadIdx.x / 32 % 4 * 16 + lane / 4;
#pragma unroll
  for (int i = 0; i < REGS / 4; i++) {
    const int n = first_row + 8 * i + 2 * q;
    if (n >= a.n) continue;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      if (token + 8 * half >= a.rows) continue;
      const int64_t at = (int64_t)(token + 8 * half) * a.n + n;
      const float even = sum[4 * i + 2 * half], odd = sum[4 * i + 2 * half + 1];
      if (a.out_fp32) {
        *(float2*)((float*)a.out + at) = make_float2(even, odd);
      } else {
        *(uint32_t*)((bf16*)a.out + at) = pack_bf16(even, odd);
      }
    }
  }
}

DEVICE void multiply(const RowsArgs& a, const Layout& l, int slice) {
  const int group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, g = lane / 4;
  const int first_row = slice + (BY_COLUMNS ? group * GROUP_ROWS : 0);
  const int edge = 128 - first_row % 128;  // columns from here on have the lower scale
  constexpr int STRIDE = BY_COLUMNS ? 1 : 2;
  WeightScales scales(a, first_row);
  float sum[REGS];
#pragma unroll
  for (int i = 0; i < REGS; i++) sum[i] = 0.f;
  int stage = BY_COLUMNS ? 0 : group, phase = 0;
  for (int step = stage; step < l.steps; step += STRIDE) {
    scales.seek(step * K_STEPS);
    mbar_wait(l.full(stage), phase);
    const uint64_t x = desc_sw128(l.x(stage)), w = desc_sw128(l.w(stage) + (BY_COLUMNS ? group * K_STEPS * GROUP_ROWS * 128 : 0));
    float block[K_STEPS][REGS];
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < K_STEPS; j++) {
      const uint64_t xj = x + j * a.tokens * 8, wj = w + j * GROUP_ROWS * 8;  // descriptors count in 16 bytes
      Wgmma<GROUP_ROWS>::fp8_zero(block[j], xj, wj);
#pragma unroll
      for (int k = 2; k < 8; k += 2) Wgmma<GROUP_ROWS>::fp8(block[j], xj + k, wj + k);
    }
    wgmma_commit();
    wgmma_wait<0>();
#pragma unroll
    for (int j = 0; j < K_STEPS; j++) pin(block[j]);
    const bool busy = 16 * warp < a.rows;
#pragma unroll
    for (int j = 0; j < K_STEPS; j++) {
      const int k = (step * K_STEPS + j) % 32;
      const float upper = __shfl_sync(~0u, scales.u, k), lower = __shfl_sync(~0u, scales.l, k);
      if (!busy) continue;  // no token in these rows
      const uint32_t at = l.scales(stage) + (j * a.tokens + 16 * warp + g) * 4;
      const float s0 = lds_f32(at), s1 = lds_f32(at + 32);
      const float upper0 = upper * s0, upper1 = upper * s1, lower0 = lower * s0, lower1 = lower * s1;
#pragma unroll
      for (int i = 0; i < REGS / 4; i++) {
        const float f0 = 8 * i < edge ? upper0 : lower0, f1 = 8 * i < edge ? upper1 : lower1;
        sum[4 * i] = fmaf(block[j][4 * i], f0, sum[4 * i]);
        sum[4 * i + 1] = fmaf(block[j][4 * i + 1], f0, sum[4 * i + 1]);
        sum[4 * i + 2] = fmaf(block[j][4 * i + 2], f1, sum[4 * i + 2]);
        sum[4 * i + 3] = fmaf(block[j][4 * i + 3], f1, sum[4 * i + 3]);
      }
    }
    __syncwarp();
    if (lane < 2) mbar_arrive_at(l.empty(stage), lane);
    stage += STRIDE;
    if (stage >= l.stages) stage -= l.stages, phase ^= 1;
  }
  if (!BY_COLUMNS) {  // the second warpgroup's half of K joins the first's, through the ring, which is at rest by now
    named_barrier(1, 32 * CONSUMER_WARPS);
    const uint32_t at = l.base + threadIdx.x % 128 * (REGS + 1) * 4;  // odd stride: no bank conflicts
    if (group == 1) {
#pragma unroll
      for (int i = 0; i < REGS; i++) sts_f32(at + 4 * i, sum[i]);
    }
    named_barrier(1, 32 * CONSUMER_WARPS);
    if (group == 1) return;
#pragma unroll
    for (int i = 0; i < REGS; i++) sum[i] += lds_f32(at + 4 * i);
  }
  store(a, sum, first_row);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) product_rows(const __grid_constant__ RowsArgs a) {
  extern __shared__ uint8_t shared[];
  const Layout l(a, (smem_addr(shared) + 1023) & ~1023u);
  allow_next_kernel();
  if (threadIdx.x == 0) {
    for (int i = 0; i < l.stages; i++) mbar_init(l.full(i), 1), mbar_init(l.empty(i), ARRIVALS);
    mbar_init_fence();
    prefetch_map(&a.w), prefetch_map(&a.x), prefetch_map(&a.x_scale);
  }
  __syncthreads();
  cluster_arrive();
  if (threadIdx.x == 32 * CONSUMER_WARPS) {
    fetch(a, l, blockIdx.x * ROWS, cluster_rank());
  } else {
    cluster_wait();
    if (threadIdx.x < 32 * CONSUMER_WARPS) multiply(a, l, blockIdx.x * ROWS);
  }
  cluster_arrive();  // nobody leaves while the other may still write or arrive here
  cluster_wait();
}
