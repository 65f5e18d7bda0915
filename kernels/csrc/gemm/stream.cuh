// Y = X W^T for few tokens: a kernel that streams weights. Dense and grouped (experts), FP8 128 x 128 blocks and BF16.
//
// Operands are swapped: 128 weight rows are the M side of wgmma (64 a warpgroup) and NT = 8 .. 128 tokens its N side, so a
// single token does not waste the tensor core and the weights arrive once, by TMA, into a ring of stages. A stage is two
// blocks of 128 bytes of these rows, side by side in memory: read together they come 3 to 6 % faster than one block of twice
// the rows.
// One warp fetches, two warpgroups multiply. FP8: the tensor core keeps about 14 bits, so each block of 128 channels
// starts a fresh accumulator, which is then multiplied by its two scales and folded into FP32 registers.
//
// Weights never change, so a product fetches its first stages before it waits for the kernel that makes X (programmatic
// dependent launch); the activation's quantization hides behind them. The tables of a grouped product are older still: the
// kernel before lets this one start only once it has itself waited for whatever came before it, the sort included.
#include "gemm/schedule.cuh"
#include "gemm/tma.cuh"
#include "gemm/wgmma.cuh"

struct StreamArgs {
  CUtensorMap w;         // [experts, N, K], box 128 bytes x TILE_ROWS, SWIZZLE_128B
  CUtensorMap x;         // [rows, K], box 128 bytes x NT rows, SWIZZLE_128B
  CUtensorMap x_scale;   // FP8: FP32 [k_blocks, rows], box NT x UNIT
  const float* w_scale;  // FP8: [experts, scale_rows, k_blocks]
  void* out;             // BF16 (or FP32) [rows, N]
  float* partial;        // [ctas, 2, NT, TILE_ROWS]
  const int* groups;     // [2, experts + 1]: Groups.offsets, Groups.tiles; null for a dense product
  int experts, rows, n, row_tiles, k_blocks, scale_rows;
  int out_fp32;
};

constexpr int CONSUMER_WARPS = 8, THREADS = 32 * (CONSUMER_WARPS + 1);
constexpr int TILE_ROWS = 128, UNIT = 2;  // weight rows of a tile, blocks of K of a unit

// Shared memory: the ring, then the x scales of the ring, then barriers and the group tables.
template <int NT, bool FP8> struct Ring {
  static constexpr int W_BLOCK = TILE_ROWS * 128, X_BLOCK = NT * 128, SCALE_BYTES = FP8 ? UNIT * NT * 4 : 0;
  static constexpr int W_BYTES = UNIT * W_BLOCK, X_BYTES = UNIT * X_BLOCK;
  static constexpr int STAGE_BYTES = W_BYTES + X_BYTES, FETCH_BYTES = STAGE_BYTES + SCALE_BYTES;
  static constexpr int TABLE_BYTES = 2 * (MAX_EXPERTS + 1) * 4, BUDGET = 232448 - 1024 - TABLE_BYTES - 512;
  static constexpr int STAGES = BUDGET / (STAGE_BYTES + 128 * ((SCALE_BYTES + 127) / 128));
  static constexpr int SCALES_AT = STAGES * STAGE_BYTES, SCALE_STRIDE = 128 * ((SCALE_BYTES + 127) / 128);
  static constexpr int BARRIERS_AT = SCALES_AT + STAGES * SCALE_STRIDE, TABLES_AT = BARRIERS_AT + STAGES * 16;
  static constexpr int BYTES = TABLES_AT + TABLE_BYTES + 1024;  // 1024: room to align the ring
};

// Walks the units of a CTA in order.
struct Cursor {
  Groups g;
  int row_tiles, k_units;
  int expert, row_tile, token_tile, k;

  DEVICE int tiles_here() const { return g.tiles[expert + 1] - g.tiles[expert]; }
  DEVICE void seek(int unit) {
    const int tile = unit / k_units;
    k = unit - tile * k_units;
    int low = 0, high = g.experts;  // the expert with row_tiles * tiles[low] <= tile < row_tiles * tiles[low + 1]
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (row_tiles * g.tiles[middle] <= tile) low = middle; else high = middle;
    }
    expert = low;
    const int in_expert = tile - row_tiles * g.tiles[low], here = max(1, tiles_here());
    row_tile = in_expert / here, token_tile = in_expert - row_tile * here;
  }
  DEVICE void next_tile() {
    k = 0;
    if (++token_tile < tiles_here()) return;
    token_tile = 0;
    if (++row_tile < row_tiles) return;
    row_tile = 0;
    do expert++;
    while (expert < g.experts && tiles_here() == 0);
  }
  DEVICE void next() {
    if (++k == k_units) next_tile();
  }
};

template <int NT, bool FP8> DEVICE void fetch(const StreamArgs& a, Cursor cursor, int units, const int* offsets, uint32_t base) {
  using R = Ring<NT, FP8>;
  constexpr int K_STEP = FP8 ? 128 : 64;
  const uint32_t full = base + R::BARRIERS_AT, empty = full + R::STAGES * 8;
  const auto fetch_w = [&](const Cursor& c, int stage) {
    mbar_expect_tx(full + stage * 8, R::FETCH_BYTES);
    for (int b = 0; b < UNIT; b++)
      tma_weights<(NT < 128)>(base + stage * R::STAGE_BYTES + b * R::W_BLOCK, &a.w, full + stage * 8, (UNIT * c.k + b) * K_STEP,
                              c.row_tile * TILE_ROWS, c.expert);
  };
  const auto fetch_x = [&](const Cursor& c, int stage) {
    const int row = offsets[c.expert] + c.token_tile * NT;
    for (int b = 0; b < UNIT; b++)
      tma_plane(base + stage * R::STAGE_BYTES + R::W_BYTES + b * R::X_BLOCK, &a.x, full + stage * 8, (UNIT * c.k + b) * K_STEP, row);
    if (FP8) tma_plane(base + R::SCALES_AT + stage * R::SCALE_STRIDE, &a.x_scale, full + stage * 8, row, UNIT * c.k);
  };
  const int early = min(units, R::STAGES);
  Cursor behind = cursor;
  for (int i = 0; i < early; i++, cursor.next()) fetch_w(cursor, i);
  wait_for_previous_kernel();
  for (int i = 0; i < early; i++, behind.next()) fetch_x(behind, i);
  for (int i = early, stage = 0, phase = 0; i < units; i++, cursor.next()) {
    mbar_wait(empty + stage * 8, phase);
    fetch_w(cursor, stage);
    fetch_x(cursor, stage);
    if (++stage == R::STAGES) stage = 0, phase ^= 1;
  }
}

// Of a whole tile: the 16 rows of this warp by `valid` tokens, to out[first + token][row].
template <int NT> DEVICE void store_tile(const StreamArgs& a, const float (&sum)[NT / 2], int row, int first, int valid) {
  const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
#pragma unroll
  for (int i = 0; i < NT / 8; i++) {
    if (a.out_fp32) {
      float* out = (float*)a.out;
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const int token = 8 * i + 2 * q + j % 2, n = row + g + 8 * (j / 2);
        if (token < valid && n < a.n) out[(int64_t)(first + token) * a.n + n] = sum[4 * i + j];
      }
    } else {
      const uint32_t upper = transpose_8x8(pack_bf16(sum[4 * i], sum[4 * i + 1]));
      const uint32_t lower = transpose_8x8(pack_bf16(sum[4 * i + 2], sum[4 * i + 3]));
      const int token = 8 * i + g, n = row + 2 * q;
      if (token < valid) {
        bf16* out = (bf16*)a.out + (int64_t)(first + token) * a.n;
        if (n < a.n) *(uint32_t*)(out + n) = upper;
        if (n + 8 < a.n) *(uint32_t*)(out + n + 8) = lower;
      }
    }
  }
}

// Of a part of a tile: FP32 sums to the slot, [token][row of the tile].
template <int NT>
DEVICE void store_partial(float* slot, const float (&sum)[NT / 2], int row_in_tile, int valid) {
  const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
#pragma unroll
  for (int i = 0; i < NT / 8; i++) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int token = 8 * i + 2 * q + j % 2;
      if (token < valid) slot[token * TILE_ROWS + row_in_tile + g + 8 * (j / 2)] = sum[4 * i + j];
    }
  }
}

template <int NT, bool FP8> DEVICE void multiply(const StreamArgs& a, Cursor cursor, int units, const int* offsets, uint32_t base) {
  using R = Ring<NT, FP8>;
  constexpr int BATCH = NT < 128 ? UNIT : 1;  // blocks multiplied at once, as registers allow
  constexpr int W_NEXT = R::W_BLOCK / 16, X_NEXT = R::X_BLOCK / 16;  // descriptors count in 16 bytes
  const uint32_t full = base + R::BARRIERS_AT, empty = full + R::STAGES * 8;
  const int group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, q = lane % 4;
  int stage = 0, phase = 0;
  for (int done = 0; done < units;) {
    const int k_begin = cursor.k, steps = min(cursor.k_units - k_begin, units - done);
    // The weight scales of this tile, which is one of the scales' blocks of rows: 32 a warp register, the next 32 asked for early.
    const int left = a.k_blocks - UNIT * k_begin;
    const float* w_scale = FP8 ? a.w_scale + ((int64_t)cursor.expert * a.scale_rows + cursor.row_tile) * a.k_blocks + UNIT * k_begin : nullptr;
    float scales = 0.f, next_scales = 0.f;
    if (FP8 && lane < left) next_scales = w_scale[lane];
    float sum[NT / 2];
#pragma unroll
    for (int i = 0; i < NT / 2; i++) sum[i] = 0.f;
    for (int step = 0; step < steps; step++) {
      if (FP8 && UNIT * step % 32 == 0) {
        scales = next_scales;
        if (UNIT * step + 32 + lane < left) next_scales = w_scale[UNIT * step + 32 + lane];
      }
      mbar_wait(full + stage * 8, phase);
      const uint32_t tile = base + stage * R::STAGE_BYTES;
      const uint64_t w = desc_sw128(tile + group * 64 * 128), x = desc_sw128(tile + R::W_BYTES);
      if (FP8) {
#pragma unroll BATCH
        for (int from = 0; from < UNIT; from += BATCH) {
          float block[BATCH][NT / 2];
          wgmma_fence();
#pragma unroll
          for (int b = 0; b < BATCH; b++) {
            const uint64_t wb = w + (from + b) * W_NEXT, xb = x + (from + b) * X_NEXT;
            Wgmma<NT>::fp8_zero(block[b], wb, xb);
#pragma unroll
            for (int k = 2; k < 8; k += 2) Wgmma<NT>::fp8(block[b], wb + k, xb + k);
          }
          wgmma_commit();
          wgmma_wait<0>();
#pragma unroll
          for (int b = 0; b < BATCH; b++) pin(block[b]);
#pragma unroll
          for (int b = 0; b < BATCH; b++) {
            const float scale = __shfl_sync(~0u, scales, (UNIT * step + from + b) % 32);
            const uint32_t x_scales = base + R::SCALES_AT + stage * R::SCALE_STRIDE + (from + b) * NT * 4 + 8 * q;
#pragma unroll
            for (int i = 0; i < NT / 8; i++) {
              const float2 s = lds_f32x2(x_scales + 32 * i);
              const float even = s.x * scale, odd = s.y * scale;
              sum[4 * i] = fmaf(block[b][4 * i], even, sum[4 * i]);
              sum[4 * i + 1] = fmaf(block[b][4 * i + 1], odd, sum[4 * i + 1]);
              sum[4 * i + 2] = fmaf(block[b][4 * i + 2], even, sum[4 * i + 2]);
              sum[4 * i + 3] = fmaf(block[b][4 * i + 3], odd, sum[4 * i + 3]);
            }
          }
        }
      } else {
        pin(sum);
        wgmma_fence();
#pragma unroll
        for (int b = 0; b < UNIT; b++) {
#pragma unroll
          for (int k = 0; k < 8; k += 2) Wgmma<NT>::bf16(sum, w + b * W_NEXT + k, x + b * X_NEXT + k);
        }
        wgmma_commit();
        wgmma_wait<0>();
        pin(sum);
      }
      __syncwarp();
      if (lane == 0) mbar_arrive(empty + stage * 8);
      if (++stage == R::STAGES) stage = 0, phase ^= 1;
    }
    const int first = offsets[cursor.expert] + cursor.token_tile * NT;
    const int valid = min(NT, offsets[cursor.expert + 1] - first), row = 64 * group + 16 * warp;
    if (steps == cursor.k_units) {
      store_tile<NT>(a, sum, cursor.row_tile * TILE_ROWS + row, first, valid);
    } else {
      store_partial<NT>(a.partial + (int64_t)(2 * blockIdx.x + (k_begin == 0)) * NT * TILE_ROWS, sum, row, valid);
    }
    done += steps;
    cursor.k += steps - 1;
    cursor.next();
  }
}

template <int NT, bool FP8> DEVICE void stream(const StreamArgs& a) {
  using R = Ring<NT, FP8>;
  extern __shared__ uint8_t shared[];
  const uint32_t aligned = (smem_addr(shared) + 1023) & ~1023u;
  uint8_t* ring = shared + (aligned - smem_addr(shared));
  int* tables = (int*)(ring + R::TABLES_AT);
  allow_next_kernel();
  if (threadIdx.x == 0) {
    const uint32_t full = aligned + R::BARRIERS_AT, empty = full + R::STAGES * 8;
    for (int i = 0; i < R::STAGES; i++) mbar_init(full + i * 8, 1), mbar_init(empty + i * 8, CONSUMER_WARPS);
    mbar_init_fence();
    prefetch_map(&a.w), prefetch_map(&a.x);
    if (FP8) prefetch_map(&a.x_scale);
  }
  const int table = a.experts + 1;
  if (a.groups) {
    for (int i = threadIdx.x; i < 2 * table; i += THREADS) tables[i] = __ldcg(a.groups + i);  // never from a stale L1
  } else if (threadIdx.x == 0) {
    tables[0] = tables[2] = 0, tables[1] = a.rows, tables[3] = (a.rows + NT - 1) / NT;
  }
  __syncthreads();
  const Groups groups{tables, tables + table, a.experts};
  const int k_units = (a.k_blocks + UNIT - 1) / UNIT;
  const Runs runs(a.row_tiles * groups.tiles[a.experts] * k_units, gridDim.x);
  const int begin = runs.begin(blockIdx.x), units = runs.begin(blockIdx.x + 1) - begin;
  Cursor cursor{groups, a.row_tiles, k_units};
  if (threadIdx.x < 32 * CONSUMER_WARPS) {
    if (units == 0) return;
    cursor.seek(begin);
    multiply<NT, FP8>(a, cursor, units, tables, aligned);
  } else if (threadIdx.x == 32 * CONSUMER_WARPS) {
    if (units == 0) return wait_for_previous_kernel();
    cursor.seek(begin);
    fetch<NT, FP8>(a, cursor, units, tables, aligned);
  }
}

// The launcher reads NAME_smem.
#define STREAM_KERNEL(NAME, NT, FP8)                                                                    \
  extern "C" __global__ void __launch_bounds__(THREADS, 1) NAME(const __grid_constant__ StreamArgs a) { \
    stream<NT, FP8>(a);                                                                                 \
  }                                                                                                     \
  extern "C" __device__ int NAME##_smem = Ring<NT, FP8>::BYTES;
