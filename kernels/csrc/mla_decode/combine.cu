// Merges the partial results of split sequences by their log-sum-exp (natural), in the order of the splits, and writes
// zeros and -inf for rows without keys. `warps_per_row` warps share a row: warp j adds splits j, j + warps_per_row, ...
#include "common/ptx.cuh"
#include "mla_decode/work.cuh"

constexpr int WARPS = 16, IN_FLIGHT = 4;

struct CombineArgs {
  const int* work;
  WorkLayout layout;
  int group, rows, out_fp32;  // tiles of a group; query rows of a sequence
  int warps_per_row;          // 1, 4 or 16
  const float* partial_out;   // [slots * group][64][512], each divided by its own sum
  const float* partial_lse;   // [slots * group][64]
  void* out;                  // [batch * rows][512]
  float* lse;                 // [batch * rows]
};

extern "C" __global__ void __launch_bounds__(32 * WARPS, 1) combine_decode(const CombineArgs a) {
  __shared__ float4 part[WARPS][DIM / 4];
  __shared__ float sums[WARPS];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, share = a.warps_per_row, mine = warp % share;
  allow_next_kernel();
  // The work list is older than the decode kernel this one waits for.
  const CombineItem* items = (const CombineItem*)(a.work + a.layout.items());
  const int total = a.work[WorkLayout::items_count()] * a.group * ROWS, stride = gridDim.x * (WARPS / share);
  int i = blockIdx.x * (WARPS / share) + warp / share;
  wait_for_previous_kernel();
  for (; i < total; i += stride) {
    const CombineItem it = items[i / (a.group * ROWS)];
    const int rank = i / ROWS % a.group, r = i % ROWS, in_seq = (it.unit * a.group + rank) * ROWS + r;
    if (in_seq >= a.rows) continue;  // the same for all warps of a row
    const size_t first = ((size_t)it.first_slot * a.group + rank) * ROWS + r, step = (size_t)a.group * ROWS;
    float top = -INFINITY_F;
    for (int k = lane; k < it.splits; k += 32) top = fmaxf(top, a.partial_lse[first + k * step]);
#pragma unroll
    for (int d = 16; d; d /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
    float sum = 0.f;
    float4 acc[4] = {};
    for (int k0 = mine; k0 < it.splits; k0 += share * IN_FLIGHT) {
      float lse[IN_FLIGHT];
      float4 v[IN_FLIGHT][4];
#pragma unroll
      for (int j = 0; j < IN_FLIGHT; j++) {
        const int k = k0 + j * share;
        lse[j] = k < it.splits ? a.partial_lse[first + k * step] : -INFINITY_F;
        const float4* o = (const float4*)(a.partial_out + (first + (k < it.splits ? k : k0) * step) * DIM);
#pragma unroll
        for (int c = 0; c < 4; c++) v[j][c] = __ldcs(o + c * 32 + lane);
      }
#pragma unroll
      for (int j = 0; j < IN_FLIGHT; j++) {
        if (lse[j] == -INFINITY_F) continue;  // no keys: its output may hold anything
        const float w = ex2_mufu((lse[j] - top) * 1.4426950409f);
        sum += w;
#pragma unroll
        for (int c = 0; c < 4; c++) {
          acc[c].x = fmaf(w, v[j][c].x, acc[c].x), acc[c].y = fmaf(w, v[j][c].y, acc[c].y);
          acc[c].z = fmaf(w, v[j][c].z, acc[c].z), acc[c].w = fmaf(w, v[j][c].w, acc[c].w);
        }
      }
    }
    const size_t row = (size_t)it.seq * a.rows + in_seq;
    auto store = [&](int column, float4 v, float all) {
      const float scale = all > 0.f ? 1.f / all : 0.f;
      v.x *= scale, v.y *= scale, v.z *= scale, v.w *= scale;
      if (a.out_fp32)
        ((float4*)a.out)[row * (DIM / 4) + column] = v;
      else
        ((uint2*)a.out)[row * (DIM / 4) + column] = make_uint2(pack_bf16(v.x, v.y), pack_bf16(v.z, v.w));
      if (column == 0) a.lse[row] = all > 0.f ? top + logf(all) : -INFINITY_F;
    };
    if (share == 1) {
#pragma unroll
      for (int c = 0; c < 4; c++) store(c * 32 + lane, acc[c], sum);
      continue;
    }
    // Warps of a row meet at a barrier of their own; ids 1 to 4.
    const int base = warp / share * share, threads = 32 * share, barrier = 1 + warp / share;
    named_barrier(barrier, threads);  // the previous row's reads are done
#pragma unroll
    for (int c = 0; c < 4; c++) part[warp][c * 32 + lane] = acc[c];
    if (lane == 0) sums[warp] = sum;
    named_barrier(barrier, threads);
    for (int column = mine * 32 + lane; column < DIM / 4; column += threads) {
      float4 v = part[base][column];
      float all = sums[base];
      for (int w = base + 1; w < base + share; w++) {
        const float4 x = part[w][column];
        all += sums[w], v.x += x.x, v.y += x.y, v.z += x.z, v.w += x.w;
      }
      store(column, v, all);
    }
  }
}
