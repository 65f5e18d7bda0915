// Token and expert pairs by expert, on the device: counts, offsets, token tiles, and every pair's place.
// Ids outside the local experts (remote, zero-computation, padding) get place -1 and cost nothing from here on. Every
// expert begins at a multiple of `alignment` rows: 4 at least, since TMA takes scales from 16-byte boundaries only; rows
// between are nobody's. The order of pairs inside an expert is whatever the atomics give; no result depends on it.
#include "common/ptx.cuh"
#include "gemm/schedule.cuh"

constexpr int SORT_THREADS = 1024;

// The pairs of one launch, and where its results go.
struct Pairs {
  const int* ids;    // [tokens, top_k] global expert ids, row stride below
  int* groups;       // [2, experts + 1] first rows, first token tiles
  int* places;       // [pairs] row of the pair among the sorted ones, or -1
  int* row_experts;  // [sorted rows] local expert of each sorted row, -1 for nobody's
  int pairs, first_expert, experts, token_tile;  // pairs: tokens * top_k
  int top_k, ids_stride;
  int64_t* load;  // [experts] pairs of each expert since start, or null
  int alignment, _pad;

  DEVICE int id(int pair) const { return ids[(int64_t)(pair / top_k) * ids_stride + pair % top_k]; }
  // Its local expert, or something beyond the last.
  DEVICE uint32_t expert(int pair) const { return (uint32_t)id(pair) - (uint32_t)first_expert; }
};

// All threads of a CTA call it; thread t < experts with the pairs of expert t. Its first row; `writes`: the CTA that
// publishes rows and token tiles. Two barriers.
DEVICE int first_row(const Pairs& a, int pairs, bool writes) {
  __shared__ int warp_rows[MAX_EXPERTS / 32], warp_tiles[MAX_EXPERTS / 32];
  const int t = threadIdx.x, lane = t % 32, warp = t / 32;
  int rows = 0, rows_to = 0, tiles_to = 0;
  if (t < MAX_EXPERTS) {
    rows = (pairs + a.alignment - 1) / a.alignment * a.alignment;
    rows_to = rows, tiles_to = (pairs + a.token_tile - 1) / a.token_tile;
    for (int d = 1; d < 32; d *= 2) {
      const int r = __shfl_up_sync(~0u, rows_to, d), s = __shfl_up_sync(~0u, tiles_to, d);
      if (lane >= d) rows_to += r, tiles_to += s;
    }
    if (lane == 31) warp_rows[warp] = rows_to, warp_tiles[warp] = tiles_to;
  }
  __syncthreads();
  if (t < MAX_EXPERTS) {
    for (int w = 0; w < warp; w++) rows_to += warp_rows[w], tiles_to += warp_tiles[w];
    if (writes && t < a.experts) {
      a.groups[t + 1] = rows_to;
      a.groups[a.experts + 1 + t + 1] = tiles_to;
      if (a.load) a.load[t] += pairs;  // one CTA is the counters' only writer
    }
    if (writes && t == 0) a.groups[0] = a.groups[a.experts + 1] = 0;
  }
  return rows_to - rows;
}

// Few pairs: one CTA does it all.
extern "C" __global__ void __launch_bounds__(SORT_THREADS) sort_pairs(const Pairs a) {
  __shared__ int counts[MAX_EXPERTS];
  wait_for_previous_kernel();
  allow_next_kernel();
  const int t = threadIdx.x;
  if (t < MAX_EXPERTS) counts[t] = 0;
  __syncthreads();
  for (int i = t; i < a.pairs; i += SORT_THREADS) {
    const uint32_t e = a.expert(i);
    a.places[i] = e < (uint32_t)a.experts ? atomicAdd(&counts[e], 1) : -1;
  }
  __syncthreads();
  const int pairs = t < a.experts ? counts[t] : 0, row = first_row(a, pairs, true);
  if (t < MAX_EXPERTS) {
    const int end = (pairs + a.alignment - 1) / a.alignment * a.alignment;
    for (int gap = pairs; gap < end; gap++) a.row_experts[row + gap] = -1;
    counts[t] = row;
  }
  __syncthreads();
  for (int i = t; i < a.pairs; i += SORT_THREADS) {
    if (a.places[i] < 0) continue;
    const int e = a.id(i) - a.first_expert, place = counts[e] + a.places[i];
    a.places[i] = place, a.row_experts[place] = e;
  }
}

// Many pairs, in parts of equally many, a CTA each: first every part's counts by expert, then the places.
struct PartsArgs {
  Pairs all;
  int* counts;  // [parts, experts]
  int* totals;  // [parts] local pairs
  int part, _pad;  // pairs of a part
};

extern "C" __global__ void __launch_bounds__(SORT_THREADS) count_parts(const PartsArgs p) {
  __shared__ int counts[MAX_EXPERTS], total;
  wait_for_previous_kernel();
  allow_next_kernel();
  const Pairs& a = p.all;
  const int t = threadIdx.x, begin = blockIdx.x * p.part, end = min(begin + p.part, a.pairs);
  if (t < MAX_EXPERTS) counts[t] = 0;
  if (t == 0) total = 0;
  __syncthreads();
  for (int i = begin + t; i < end; i += SORT_THREADS) {
    const uint32_t e = a.expert(i);
    a.places[i] = e < (uint32_t)a.experts ? atomicAdd(&counts[e], 1) : -1;
  }
  __syncthreads();
  if (t < a.experts) {
    p.counts[blockIdx.x * a.experts + t] = counts[t];
    atomicAdd(&total, counts[t]);
  }
  __syncthreads();
  if (t == 0) p.totals[blockIdx.x] = total;
}

// Grid: the parts of one pass; all of `p` is of that pass.
extern "C" __global__ void __launch_bounds__(SORT_THREADS) place_parts(const PartsArgs p) {
  __shared__ int rows[MAX_EXPERTS];
  wait_for_previous_kernel();
  allow_next_kernel();
  const Pairs& a = p.all;
  const int t = threadIdx.x, part = blockIdx.x, begin = part * p.part, end = min(begin + p.part, a.pairs);
  int before = 0, pairs = 0;
  if (t < a.experts) {
#pragma unroll 8
    for (int i = 0; i < gridDim.x; i++) {
      const int n = p.counts[i * a.experts + t];
      pairs += n;
      if (i < part) before += n;
    }
  }
  const int row = first_row(a, pairs, part == 0);
  if (t < MAX_EXPERTS) rows[t] = row + before;
  __syncthreads();
  for (int i = begin + t; i < end; i += SORT_THREADS) {
    if (a.places[i] >= 0) a.places[i] += rows[a.expert(i)];
  }
}
