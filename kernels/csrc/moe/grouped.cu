// Y = X W^T expert by expert, FP8 with block scales, for experts with many rows, as prompts bring them: bound by arithmetic
// where stream.cuh is bound by the weights' bytes.
//
// Rows of X are the M side of wgmma, 256 a tile, and 128 weight rows its N side. A cluster of two CTAs takes two neighbouring
// weight tiles of the same rows: each fetches half of X for both. Two warpgroups multiply two blocks of 64 rows each. The
// tensor core keeps about 14 bits, so each block of 128 channels starts a fresh accumulator, which its warpgroup folds with
// the scales into FP32 registers while the tensor core works for the other warpgroup.
//
// An expert's rows begin at a multiple of 64, so a block of 64 rows is one expert's: rows of its last block that are nobody's
// are computed and never read. Results leave by TMA from a buffer of their own while the next tile is multiplied.
#include "gemm/schedule.cuh"
#include "gemm/tma.cuh"
#include "gemm/wgmma.cuh"

struct GroupedArgs {
  CUtensorMap w;         // [experts, N, K], box 128 channels x 128 rows
  CUtensorMap x;         // [rows, K], box 128 channels x 64 rows
  CUtensorMap x_scale;   // FP32 [k_blocks, rows], box 256 rows x 1 block
  CUtensorMap out;       // BF16 [rows, N], box 64 columns x 64 rows
  const float* w_scale;  // [experts, scale_rows, k_blocks]
  const int* groups;     // [2, experts + 1]: Groups.offsets, Groups.tiles of 256 rows
  int experts, row_pairs, k_blocks, scale_rows;  // row_pairs: pairs of weight tiles
};

constexpr int BLOCK = 64, BLOCKS = 4, TILE_ROWS = BLOCK * BLOCKS, TILE_COLUMNS = 128, STAGES = 3;
constexpr int X_BLOCK_BYTES = BLOCK * 128, X_BYTES = BLOCKS * X_BLOCK_BYTES, W_BYTES = TILE_COLUMNS * 128, SCALE_BYTES = TILE_ROWS * 4;
constexpr int PLANE_BYTES = BLOCK * 128, OUT_BYTES = 2 * PLANE_BYTES;  // of a block's result: two planes of 64 columns
constexpr int STAGE_BYTES = X_BYTES + W_BYTES, OUT_AT = STAGES * STAGE_BYTES, SCALES_AT = OUT_AT + BLOCKS * OUT_BYTES;
constexpr int BARRIERS_AT = SCALES_AT + STAGES * SCALE_BYTES, TABLES_AT = BARRIERS_AT + 16 * STAGES;
constexpr int THREADS = 384, CONSUMER_WARPS = 8;
extern "C" __device__ int grouped_fp8_smem = TABLES_AT + 2 * (MAX_EXPERTS + 1) * 4 + 1024;  // 1024: room to align the ring

// A tile of this CTA. blocks: of 64 rows that the expert has here.
struct Tile {
  int expert, column_tile, row, blocks;
  DEVICE Tile(const Groups& g, int row_pairs, int index) {
    int low = 0, high = g.experts;  // the expert with row_pairs * tiles[low] <= index < row_pairs * tiles[low + 1]
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (row_pairs * g.tiles[middle] <= index) low = middle; else high = middle;
    }
    const int in_expert = index - row_pairs * g.tiles[low], here = g.tiles[low + 1] - g.tiles[low];
    expert = low, column_tile = 2 * (in_expert / here) + cluster_rank();
    row = g.offsets[low] + in_expert % here * TILE_ROWS;
    blocks = min(BLOCKS, (g.offsets[low + 1] - row) / BLOCK);
  }
};

// Where a CTA is in its ring.
struct Place {
  int stage = 0, phase = 0;
  DEVICE void next() {
    if (++stage == STAGES) stage = 0, phase ^= 1;
  }
};

DEVICE void fetch(const GroupedArgs& a, const Tile& t, Place& at, uint32_t base) {
  const int rank = cluster_rank();
  for (int k = 0; k < a.k_blocks; k++, at.next()) {
    const uint32_t full = base + BARRIERS_AT + 16 * at.stage, x = base + at.stage * STAGE_BYTES;
    mbar_wait(full + 8, at.phase ^ 1);
    mbar_expect_tx(full, t.blocks * X_BLOCK_BYTES + W_BYTES + SCALE_BYTES);
    for (int b = rank; b < t.blocks; b += 2)
      tma_plane_multicast(x + b * X_BLOCK_BYTES, &a.x, full, k * 128, t.row + b * BLOCK, 3);
    tma_3d(x + X_BYTES, &a.w, full, k * 128, t.column_tile * TILE_COLUMNS, t.expert);
    tma_plane(base + SCALES_AT + at.stage * SCALE_BYTES, &a.x_scale, full, t.row, k);
  }
}

// This warpgroup's blocks are `group` and `group + 2`.
DEVICE void multiply(const GroupedArgs& a, const Tile& t, Place& at, uint32_t base, float (&sum)[2][64]) {
  const int group = threadIdx.x / 128, lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane / 4;
  // The weight scales of these columns, 32 blocks a warp register, the next 32 asked for early.
  const float* w_scale = a.w_scale + ((int64_t)t.expert * a.scale_rows + min(t.column_tile, a.scale_rows - 1)) * a.k_blocks;
  float scales = 0.f, next_scales = lane < a.k_blocks ? w_scale[lane] : 0.f;
#pragma unroll
  for (int b = 0; b < 2; b++) {
#pragma unroll
    for (int i = 0; i < 64; i++) sum[b][i] = 0.f;
  }
  for (int k = 0; k < a.k_blocks; k++, at.next()) {
    if (k % 32 == 0) {
      scales = next_scales;
      if (k + 32 + lane < a.k_blocks) next_scales = w_scale[k + 32 + lane];
    }
    const float scale = __shfl_sync(~0u, scales, k % 32);
    const uint32_t full = base + BARRIERS_AT + 16 * at.stage, tile = base + at.stage * STAGE_BYTES;
    const uint64_t x = desc_sw128(tile), w = desc_sw128(tile + X_BYTES);
    mbar_wait(full, at.phase);
#pragma unroll
    for (int b = 0; b < 2; b++) {
      const int block = group + 2 * b;
      if (block >= t.blocks) continue;
      const uint64_t xb = x + block * (X_BLOCK_BYTES / 16);  // descriptors count in 16 bytes
      float part[64];
      wgmma_fence();
      Wgmma<128>::fp8_zero(part, xb, w);
#pragma unroll
      for (int i = 2; i < 8; i += 2) Wgmma<128>::fp8(part, xb + i, w + i);
      wgmma_commit();
      const uint32_t x_scale = base + SCALES_AT + at.stage * SCALE_BYTES + (block * BLOCK + row) * 4;
      const float upper = lds_f32(x_scale) * scale, lower = lds_f32(x_scale + 32) * scale;
      wgmma_wait<0>();
      pin(part);
#pragma unroll
      for (int i = 0; i < 64; i += 4) {
        sum[b][i] = fmaf(part[i], upper, sum[b][i]), sum[b][i + 1] = fmaf(part[i + 1], upper, sum[b][i + 1]);
        sum[b][i + 2] = fmaf(part[i + 2], lower, sum[b][i + 2]), sum[b][i + 3] = fmaf(part[i + 3], lower, sum[b][i + 3]);
      }
    }
    __syncwarp();
    if (lane < 2) mbar_arrive_at(full + 8, lane);  // of both CTAs, since both fill both
  }
}

DEVICE void stmatrix_x4(uint32_t addr, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(addr), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
DEVICE void tma_store(const void* map, uint32_t src, int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2,%3}], [%1];" ::"l"(map), "r"(src), "r"(x), "r"(y) : "memory");
}

DEVICE void store(const GroupedArgs& a, const Tile& t, uint32_t base, const float (&sum)[2][64]) {
  const int group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const bool speaks = threadIdx.x % 128 == 0;
  const int row = 16 * warp + lane % 16;  // of this lane's address: matrices 0 and 2 are rows 0 to 7 of the warp
  if (speaks) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");  // the tile before has left the buffer
  named_barrier(1 + group, 128);
#pragma unroll
  for (int b = 0; b < 2; b++) {
    const int block = group + 2 * b;
    if (block >= t.blocks) continue;
    const uint32_t buffer = base + OUT_AT + block * OUT_BYTES + row * 128;
#pragma unroll
    for (int i = 0; i < 64; i += 8) {  // 16 columns at once
      const int columns = i / 4 + lane / 16;  // of eight
      stmatrix_x4(buffer + columns / 8 * PLANE_BYTES + ((columns % 8) ^ (row % 8)) * 16, pack_bf16(sum[b][i], sum[b][i + 1]),
                  pack_bf16(sum[b][i + 2], sum[b][i + 3]), pack_bf16(sum[b][i + 4], sum[b][i + 5]), pack_bf16(sum[b][i + 6], sum[b][i + 7]));
    }
  }
  fence_async_proxy();
  named_barrier(1 + group, 128);
  if (!speaks) return;
  for (int block = group; block < t.blocks; block += 2) {
    for (int plane = 0; plane < 2; plane++)
      tma_store(&a.out, base + OUT_AT + block * OUT_BYTES + plane * PLANE_BYTES, t.column_tile * TILE_COLUMNS + 64 * plane, t.row + block * BLOCK);
  }
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) grouped_fp8(const __grid_constant__ GroupedArgs a) {
  extern __shared__ uint8_t shared[];
  const uint32_t base = (smem_addr(shared) + 1023) & ~1023u;
  int* tables = (int*)(shared + (base - smem_addr(shared)) + TABLES_AT);
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      mbar_init(base + BARRIERS_AT + 16 * i, 1);
      mbar_init(base + BARRIERS_AT + 16 * i + 8, 2 * CONSUMER_WARPS);
    }
    mbar_init_fence();
    prefetch_map(&a.w), prefetch_map(&a.x), prefetch_map(&a.x_scale), prefetch_map(&a.out);
  }
  wait_for_previous_kernel();
  allow_next_kernel();
  const int table = a.experts + 1;
  for (int i = threadIdx.x; i < 2 * table; i += THREADS) tables[i] = __ldcg(a.groups + i);
  __syncthreads();
  cluster_arrive();
  cluster_wait();  // the other CTA's barriers are ready
  const Groups groups{tables, tables + table, a.experts};
  const int tiles = a.row_pairs * groups.tiles[a.experts], step = gridDim.x / 2;
  Place at;
  if (threadIdx.x < 32 * CONSUMER_WARPS) {
    setmaxnreg_inc<232>();
    for (int i = blockIdx.x / 2; i < tiles; i += step) {
      const Tile t(groups, a.row_pairs, i);
      float sum[2][64];
      multiply(a, t, at, base, sum);
      store(a, t, base, sum);
    }
    if (threadIdx.x % 128 == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  } else {
    setmaxnreg_dec<40>();
    if (threadIdx.x == 32 * CONSUMER_WARPS) {
      for (int i = blockIdx.x / 2; i < tiles; i += step) fetch(a, Tile(groups, a.row_pairs, i), at, base);
    }
  }
  cluster_arrive();  // nobody leaves while the other may still write or arrive here
  cluster_wait();
}
