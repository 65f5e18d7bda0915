// Y = X W^T for up to 64 tokens in one launch, whatever N and K: every SM reads an equal share of the weight.
//
// Tokens are the M side of wgmma and weight rows its N side. A cluster of SPLIT CTAs owns ROWS weight rows, each CTA a share
// of K: it reads that share of X and W once, and at the end adds up a part of the rows over the cluster through distributed
// shared memory, in a fixed order. FP8 as in stream.cuh: a fresh accumulator per 128 channels, folded into FP32 registers with
// its scales.
//
// Two CTAs fit on an SM: the next kernel's are there while this one's work, and have fetched their first weights (which never
// change) before they wait for the kernel that makes X, so that in a chain of products the memory hardly rests. X comes from
// the L2 cache, so its ring is shallower than that of the weights; each ring has a warp that fills it, because a TMA
// instruction takes its thread some 140 clocks.
#include "gemm/tma.cuh"
#include "gemm/wgmma.cuh"

#ifndef ROWS
#define ROWS 64  // of a cluster: a multiple of 8 up to 64, or of 16 up to 144
#endif
#ifndef SPLIT
#define SPLIT 1  // CTAs that share K
#endif
#ifndef RESIDENT
#define RESIDENT 2  // CTAs of an SM
#endif
#ifndef BLOCKS
#define BLOCKS 2  // of K, in a stage, 1 or 2. Two side by side in memory come faster; of one, more tokens fit into their ring
#endif

struct RowsArgs {
  CUtensorMap w;         // [k_blocks, N, 128], box 128 channels x ROWS x BLOCKS
  CUtensorMap x;         // [k_blocks, rows, 128], box 128 channels x tokens x BLOCKS
  CUtensorMap x_scale;   // FP32 [k_blocks, rows], box tokens x scale_blocks
  const float* w_scale;  // [scale_rows, k_blocks]
  void* out;             // BF16 (or FP32) [rows, N]
  int rows, n, k_blocks, scale_rows;
  int tokens;        // of a tile: rows rounded up to 16, 32 or 64
  int scale_blocks;  // the most blocks of K that a CTA has
  int out_fp32;
};

constexpr bool BY_PAIRS = ROWS <= 64;  // two warpgroups take turns at a low slice's pairs of blocks; those of a high one share its rows
constexpr int GROUP_ROWS = BY_PAIRS ? ROWS : ROWS / 2, REGS = GROUP_ROWS / 2, TURN = BY_PAIRS ? 2 : 1;
constexpr int PAIR = 2 / BLOCKS;  // stages of a pair of blocks: who adds up what, and in what order, does not depend on BLOCKS
constexpr int BATCH = REGS > (RESIDENT == 1 ? 28 : 16) ? 1 : BLOCKS;  // blocks multiplied at once, as registers allow
constexpr int CONSUMER_WARPS = 8, CONSUMERS = 32 * CONSUMER_WARPS, THREADS = CONSUMERS + 64;
constexpr int X_RING = RESIDENT == 1 ? 98304 : BLOCKS == 1 && ROWS <= 96 ? 49152 : 32768;  // bytes at most
static_assert(X_RING >= TURN * 2 * 64 * 128, "a pair for each warpgroup");
constexpr int MAX_STAGES = 32, MAX_X_STAGES = 8, W_BYTES = BLOCKS * ROWS * 128;
constexpr int SMEM = RESIDENT == 1 ? 232448 : 115712, BARRIERS_AT = SMEM - 1024 - (MAX_STAGES + 1) * 16;  // 1024: to align
constexpr int PART = ROWS / SPLIT, PITCH = ROWS + 8 + ROWS % 16;  // rows that a CTA adds up; of partial sums, so that banks do not clash
constexpr int ADDENDS = SPLIT * TURN;  // partial sums of a value
static_assert(GROUP_ROWS % 8 == 0 && ROWS % SPLIT == 0 && PART % 4 == 0, "rows of a slice");

extern "C" __device__ int product_rows_smem = SMEM;  // the launcher reads it

// Shared memory of a CTA: ring of x stages, ring of w stages, x scales of all its blocks, barriers.
struct Layout {
  uint32_t base, x_bytes, scales;
  int x_stages, w_stages;
  DEVICE Layout(const RowsArgs& a, uint32_t aligned) {
    base = aligned, x_bytes = BLOCKS * a.tokens * 128;
    const int ring = (BARRIERS_AT - scale_bytes(a)) / 128 * 128;
    x_stages = min(MAX_X_STAGES, (int)(X_RING / x_bytes));
    w_stages = min(MAX_STAGES, (int)((ring - x_stages * x_bytes) / W_BYTES));
    x_stages = min(x_stages, w_stages), scales = base + ring;
  }
  static DEVICE int scale_bytes(const RowsArgs& a) { return a.scale_blocks * a.tokens * 4; }
  DEVICE uint32_t x(int stage) const { return base + stage * x_bytes; }
  DEVICE uint32_t w(int stage) const { return base + x_stages * x_bytes + stage * W_BYTES; }
  DEVICE uint32_t full(int stage) const { return base + BARRIERS_AT + stage * 16; }
  DEVICE uint32_t empty(int stage) const { return full(stage) + 8; }
  DEVICE uint32_t scales_full() const { return full(MAX_STAGES); }
};

struct Place {  // in a ring
  int stage, phase = 0;
  DEVICE explicit Place(int first = 0) : stage(first) {}
  DEVICE void next(int stages, int steps = 1) {
    stage += steps;
    if (stage >= stages) stage -= stages, phase ^= 1;
  }
};

// This CTA's blocks of K: whole pairs, and their stages. A block past the end comes as zeros.
struct Share {
  int first, steps;
  DEVICE Share(int k_blocks, int rank) {
    const int pairs = (k_blocks + 1) / 2, begin = rank * pairs / SPLIT;
    first = 2 * begin, steps = ((rank + 1) * pairs / SPLIT - begin) * PAIR;
  }
  DEVICE int block(int step) const { return first + step * BLOCKS; }
};

DEVICE void fetch_w(const RowsArgs& a, const Layout& l, const Share& share, int first_row) {
  Place at, freed;
  for (int i = 0; i < share.steps; i++, at.next(l.w_stages)) {
    if (i >= l.w_stages) mbar_wait(l.empty(freed.stage), freed.phase), freed.next(l.w_stages);
    mbar_expect_tx(l.full(at.stage), W_BYTES);
    tma_weights<true>(l.w(at.stage), &a.w, l.full(at.stage), 0, first_row, share.block(i));
  }
}

DEVICE void fetch_x(const RowsArgs& a, const Layout& l, const Share& share) {
  wait_for_previous_kernel();
  mbar_expect_tx(l.scales_full(), Layout::scale_bytes(a));
  tma_plane(l.scales, &a.x_scale, l.scales_full(), 0, share.first);
  Place at, bar, freed;  // barriers are those of the weights' stages
  for (int i = 0; i < share.steps; i++, at.next(l.x_stages), bar.next(l.w_stages)) {
    if (i >= l.x_stages) mbar_wait(l.empty(freed.stage), freed.phase), freed.next(l.w_stages);
    mbar_expect_tx(l.full(bar.stage), l.x_bytes);
    tma_3d(l.x(at.stage), &a.x, l.full(bar.stage), 0, 0, share.block(i));
  }
}

// The weight scales of this warpgroup's rows, which lie in at most two 128-row blocks: 32 k-blocks a warp register, the
// next 32 asked for early. Windows are visited in order.
struct WeightScales {
  const float *upper, *lower;
  int k_blocks, window;
  float u, l, next_u, next_l;
  DEVICE WeightScales(const RowsArgs& a, int first_row, int first_block) {
    const int block = first_row / 128, last = a.scale_rows - 1;
    upper = a.w_scale + (int64_t)min(block, last) * a.k_blocks, lower = a.w_scale + (int64_t)min(block + 1, last) * a.k_blocks;
    k_blocks = a.k_blocks, window = first_block / 32 - 1;
    ask(window + 1);
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

DEVICE void multiply(const RowsArgs& a, const Layout& l, const Share& share, int first_row, float (&sum)[REGS]) {
  const int group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, g = lane / 4;
  const int edge = 128 - first_row % 128;  // columns from here on have the lower scale
  const bool busy = 16 * warp < a.rows;    // a token in these rows
  const int begin = BY_PAIRS ? group * PAIR : 0;
  WeightScales scales(a, first_row, share.block(begin));
#pragma unroll
  for (int i = 0; i < REGS; i++) sum[i] = 0.f;
  Place w(begin), x(begin);
  mbar_wait(l.scales_full(), 0);
  for (int step = begin; step < share.steps;) {
    scales.seek(share.block(step));
    mbar_wait(l.full(w.stage), w.phase);
    const uint64_t x_desc = desc_sw128(l.x(x.stage)), w_desc = desc_sw128(l.w(w.stage) + (BY_PAIRS ? 0 : group * GROUP_ROWS * 128));
#pragma unroll
    for (int from = 0; from < BLOCKS; from += BATCH) {
      float block[BATCH][REGS];
      wgmma_fence();
#pragma unroll
      for (int j = 0; j < BATCH; j++) {
        const uint64_t xj = x_desc + (from + j) * a.tokens * 8, wj = w_desc + (from + j) * ROWS * 8;  // in 16 bytes
        Wgmma<GROUP_ROWS>::fp8_zero(block[j], xj, wj);
#pragma unroll
        for (int k = 2; k < 8; k += 2) Wgmma<GROUP_ROWS>::fp8(block[j], xj + k, wj + k);
      }
      wgmma_commit();
      wgmma_wait<0>();
#pragma unroll
      for (int j = 0; j < BATCH; j++) pin(block[j]);
#pragma unroll
      for (int j = 0; j < BATCH; j++) {
        const int k = (share.block(step) + from + j) % 32;
        const float upper = __shfl_sync(~0u, scales.u, k), lower = __shfl_sync(~0u, scales.l, k);
        if (!busy) continue;
        const uint32_t at = l.scales + ((step * BLOCKS + from + j) * a.tokens + 16 * warp + g) * 4;
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
    }
    __syncwarp();
    if (lane == 0) mbar_arrive(l.empty(w.stage));
    const int next = BY_PAIRS && (step + 1) % PAIR == 0 ? PAIR + 1 : 1;  // over the other warpgroup's pair
    step += next, w.next(l.w_stages, next), x.next(l.x_stages, next);
  }
}

// Calls visit(token, column, two sums) for this thread's sums of live tokens; column: of the warpgroup's rows.
template <class Visit> DEVICE void each_pair(const RowsArgs& a, const float (&sum)[REGS], Visit visit) {
  const int lane = threadIdx.x % 32, q = lane % 4, token = threadIdx.x / 32 % 4 * 16 + lane / 4;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    if (token + 8 * half >= a.rows) continue;
#pragma unroll
    for (int i = 0; i < REGS / 4; i++) visit(token + 8 * half, 8 * i + 2 * q, make_float2(sum[4 * i + 2 * half], sum[4 * i + 2 * half + 1]));
  }
}

DEVICE void store(const RowsArgs& a, const float (&sum)[REGS], int first_row) {
  each_pair(a, sum, [&](int token, int column, float2 v) {
    const int64_t n = first_row + column, at = token * (int64_t)a.n + n;
    if (n >= a.n) return;
    if (a.out_fp32) *(float2*)((float*)a.out + at) = v;
    else *(uint32_t*)((bf16*)a.out + at) = pack_bf16(v.x, v.y);
  });
}

// Partial sums of the cluster's warpgroups lie in its shared memory, [token][PITCH]; this CTA adds up its part of the rows,
// four at a time.
DEVICE void reduce(const RowsArgs& a, const Layout& l, const float (&sum)[REGS], int slice, int rank) {
  constexpr int FOURS = PART / 4, ITEMS = (64 * FOURS + CONSUMERS - 1) / CONSUMERS;  // of a token; of a thread
  const int group = threadIdx.x / 128;
  named_barrier(1, CONSUMERS);  // the rings are at rest
  const uint32_t second = a.tokens * PITCH * 4;  // the second warpgroup's, where each has all rows
  const uint32_t mine = l.base + (BY_PAIRS ? group * second : group * GROUP_ROWS * 4);
  each_pair(a, sum, [&](int token, int column, float2 v) { sts_f32x2(mine + (token * PITCH + column) * 4, v); });
  if (SPLIT > 1) cluster_arrive(), cluster_wait();
  else named_barrier(1, CONSUMERS);
  float4 total[ITEMS];
#pragma unroll
  for (int item = 0; item < ITEMS; item++) {
    const int i = threadIdx.x + item * CONSUMERS, token = i / FOURS, column = rank * PART + i % FOURS * 4;
    if (token >= a.rows || slice * ROWS + column >= a.n) continue;
    const uint32_t at = l.base + (token * PITCH + column) * 4;
    float4 parts[ADDENDS];
#pragma unroll
    for (int r = 0; r < ADDENDS; r++) {
      const uint32_t part = at + r % TURN * second;
      parts[r] = SPLIT > 1 ? lds_cluster_f32x4(part, r / TURN) : lds_f32x4(part);
    }
    float4 v = parts[0];
#pragma unroll
    for (int r = 1; r < ADDENDS; r++) v.x += parts[r].x, v.y += parts[r].y, v.z += parts[r].z, v.w += parts[r].w;
    total[item] = v;
  }
#pragma unroll
  for (int item = 0; item < ITEMS; item++) {
    const int i = threadIdx.x + item * CONSUMERS, token = i / FOURS, n = slice * ROWS + rank * PART + i % FOURS * 4;
    if (token >= a.rows || n >= a.n) continue;
    const float4 v = total[item];
    const int64_t at = token * (int64_t)a.n + n;
    if (a.out_fp32) *(float4*)((float*)a.out + at) = v;
    else *(uint2*)((bf16*)a.out + at) = make_uint2(pack_bf16(v.x, v.y), pack_bf16(v.z, v.w));
  }
  // Nobody leaves while another reads here. The stores have waited for what was read; none waits for them.
  if (SPLIT > 1) cluster_arrive_relaxed(), cluster_wait();
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) product_rows(const __grid_constant__ RowsArgs a) {
  extern __shared__ uint8_t shared[];
  const Layout l(a, (smem_addr(shared) + 1023) & ~1023u);
  const int slice = blockIdx.x / SPLIT, rank = blockIdx.x % SPLIT;
  const Share share(a.k_blocks, rank);
  allow_next_kernel();
  if (threadIdx.x == 0) {
    // A stage is there when its weights and its tokens are.
    for (int i = 0; i < l.w_stages; i++) mbar_init(l.full(i), 2), mbar_init(l.empty(i), CONSUMER_WARPS / TURN);
    mbar_init(l.scales_full(), 1);
    mbar_init_fence();
    prefetch_map(&a.w), prefetch_map(&a.x), prefetch_map(&a.x_scale);
  }
  __syncthreads();
  if (threadIdx.x >= CONSUMERS) {
    if (threadIdx.x == CONSUMERS) fetch_w(a, l, share, slice * ROWS);
    if (threadIdx.x == CONSUMERS + 32) fetch_x(a, l, share);
    return;
  }
  const int first_row = slice * ROWS + (BY_PAIRS ? 0 : threadIdx.x / 128 * GROUP_ROWS);
  float sum[REGS];
  multiply(a, l, share, first_row, sum);
  if (ADDENDS == 1) store(a, sum, first_row);
  else reduce(a, l, sum, slice, rank);
}
