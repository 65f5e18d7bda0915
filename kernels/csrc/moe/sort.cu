// Token and expert pairs by expert, on the device: counts, offsets, token tiles, and every pair's place. One CTA.
// Ids outside the local experts (remote, zero-computation, padding) get place -1 and cost nothing from here on. Every
// expert begins at a multiple of 4 rows, since TMA takes scales from 16-byte boundaries only; rows between are nobody's.
// The order of pairs inside an expert is whatever the atomics give; no result depends on it.
#include "common/ptx.cuh"
#include "gemm/schedule.cuh"

constexpr int SORT_THREADS = 1024;

struct SortArgs {
  const int* ids;    // [tokens, top_k] global expert ids, row stride below
  int* groups;       // [2, experts + 1] first rows, first token tiles
  int* places;       // [pairs] row of the pair among the sorted ones, or -1
  int* row_experts;  // [sorted rows] local expert of each sorted row, -1 for nobody's
  int pairs, first_expert, experts, token_tile;  // pairs: tokens * top_k
  int top_k, ids_stride;
  int64_t* load;  // [experts] pairs of each expert since start, or null

  DEVICE int id(int pair) const { return ids[(int64_t)(pair / top_k) * ids_stride + pair % top_k]; }
};

extern "C" __global__ void __launch_bounds__(SORT_THREADS) sort_pairs(const SortArgs a) {
  __shared__ int counts[MAX_EXPERTS], warp_rows[MAX_EXPERTS / 32], warp_tiles[MAX_EXPERTS / 32];
  wait_for_previous_kernel();
  allow_next_kernel();
  const int t = threadIdx.x;
  if (t < MAX_EXPERTS) counts[t] = 0;
  __syncthreads();
  for (int i = t; i < a.pairs; i += SORT_THREADS) {
    const uint32_t e = (uint32_t)a.id(i) - (uint32_t)a.first_expert;
    a.places[i] = e < (uint32_t)a.experts ? atomicAdd(&counts[e], 1) : -1;
  }
  __syncthreads();
  if (a.load && t < a.experts) a.load[t] += counts[t];  // this one CTA is the counters' only writer
  // Exclusive prefix sums over the experts, rows and token tiles at once.
  const int lane = t % 32, warp = t / 32;
  int rows = 0, tiles = 0, rows_to = 0, tiles_to = 0;
  if (t < MAX_EXPERTS) {
    const int pairs = t < a.experts ? counts[t] : 0;
    tiles = (pairs + a.token_tile - 1) / a.token_tile, rows = (pairs + 3) / 4 * 4;
    rows_to = rows, tiles_to = tiles;
    for (int d = 1; d < 32; d *= 2) {
      const int r = __shfl_up_sync(~0u, rows_to, d), s = __shfl_up_sync(~0u, tiles_to, d);
      if (lane >= d) rows_to += r, tiles_to += s;
    }
    if (lane == 31) warp_rows[warp] = rows_to, warp_tiles[warp] = tiles_to;
  }
  __syncthreads();
  if (t < MAX_EXPERTS) {
    for (int w = 0; w < warp; w++) rows_to += warp_rows[w], tiles_to += warp_tiles[w];
    for (int gap = counts[t]; t < a.experts && gap < rows; gap++) a.row_experts[rows_to - rows + gap] = -1;
    counts[t] = rows_to - rows;
    if (t < a.experts) {
      a.groups[t + 1] = rows_to;
      a.groups[a.experts + 1 + t + 1] = tiles_to;
    }
    if (t == 0) a.groups[0] = a.groups[a.experts + 1] = 0;
  }
  __syncthreads();
  for (int i = t; i < a.pairs; i += SORT_THREADS) {
    if (a.places[i] < 0) continue;
    const int e = a.id(i) - a.first_expert, place = counts[e] + a.places[i];
    a.places[i] = place, a.row_experts[place] = e;
  }
}
