// Merges the partial results of split sequences by their log-sum-exp (natural), in the order of the splits, and writes
// zeros and -inf for rows without keys. A warp merges a row or, the more splits there are, a fourth or a sixteenth of one.
#include "common/ptx.cuh"
#include "mla_decode/work.cuh"

constexpr int WARPS = 16;

struct CombineArgs {
  const int* work;
  WorkLayout layout;
  int group, rows, out_fp32;  // tiles of a group; query rows of a sequence
  const float* partial_out;   // [slots * group][64][512], each divided by its own sum
  const float* partial_lse;   // [slots * group][64]
  void* out;                  // [batch * rows][512]
  float* lse;                 // [batch * rows]
};

// Shares of a row, a warp each. By the splits of the sequence alone; it does not change the order of additions.
DEVICE int parts_of(int splits) { return splits <= 4 ? 1 : splits <= 24 ? 4 : 16; }

DEVICE void store(const CombineArgs& a, size_t at, float4 v) {
  if (a.out_fp32)
    *(float4*)((float*)a.out + at) = v;
  else
    *(uint2*)((bf16*)a.out + at) = make_uint2(pack_bf16(v.x, v.y), pack_bf16(v.z, v.w));
}
DEVICE void store(const CombineArgs& a, size_t at, float v) {
  if (a.out_fp32)
    ((float*)a.out)[at] = v;
  else
    ((bf16*)a.out)[at] = narrow<bf16>(v);
}
DEVICE void add(float4& sum, float w, float4 v) {
  sum.x = fmaf(w, v.x, sum.x), sum.y = fmaf(w, v.y, sum.y), sum.z = fmaf(w, v.z, sum.z), sum.w = fmaf(w, v.w, sum.w);
}
DEVICE void add(float& sum, float w, float v) { sum = fmaf(w, v, sum); }
DEVICE float4 scaled(float4 v, float s) { return make_float4(v.x * s, v.y * s, v.z * s, v.w * s); }
DEVICE float scaled(float v, float s) { return v * s; }

// COUNT vectors of row `row` a lane, 32 vectors apart; FLIGHT splits are read at a time.
template <class V, int COUNT, int FLIGHT> DEVICE void merge(const CombineArgs& a, CombineItem it, int row, int part, int lane) {
  constexpr int WIDTH = sizeof(V) / 4;
  const int dim = (part * COUNT * 32 + lane) * WIDTH;
  const size_t first = ((size_t)it.first_slot * a.group + row / ROWS) * ROWS + row % ROWS, step = (size_t)a.group * ROWS;
  V v[FLIGHT][COUNT], sum[COUNT] = {};
  const V* from = (const V*)(a.partial_out + first * DIM + dim);
  const int apart = (int)step * (DIM / WIDTH);
  auto read = [&](int left) {
#pragma unroll
    for (int j = 0; j < FLIGHT; j++, from += apart)
#pragma unroll
      for (int c = 0; c < COUNT; c++)
        v[j][c] = j < left ? __ldcs(from + c * 32) : V{};
  };
  read(it.splits);
  float top = -INFINITY_F, all = 0.f;
  for (int k = lane; k < it.splits; k += 32) top = fmaxf(top, a.partial_lse[first + k * step]);
#pragma unroll
  for (int d = 16; d; d /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
#pragma unroll 1
  for (int k0 = 0; k0 < it.splits; k0 += FLIGHT) {
    if (k0) read(it.splits - k0);
    const float lse = lane < FLIGHT && k0 + lane < it.splits ? a.partial_lse[first + (k0 + lane) * step] : -INFINITY_F;
    const float mine = lse == -INFINITY_F ? 0.f : ex2_mufu((lse - top) * 1.4426950409f);
#pragma unroll
    for (int j = 0; j < FLIGHT; j++) {
      const float w = __shfl_sync(~0u, mine, j);
      if (w == 0.f) continue;  // no keys: its output may hold anything
      all += w;
#pragma unroll
      for (int c = 0; c < COUNT; c++) add(sum[c], w, v[j][c]);
    }
  }
  const size_t to = (size_t)it.seq * a.rows + it.unit * a.group * ROWS + row;
  const float scale = all > 0.f ? 1.f / all : 0.f;
#pragma unroll
  for (int c = 0; c < COUNT; c++) store(a, to * DIM + dim + c * 32 * WIDTH, scaled(sum[c], scale));
  if (dim == 0) a.lse[to] = all > 0.f ? top + logf(all) : -INFINITY_F;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 1) combine_decode(const CombineArgs a) {
  const int lane = threadIdx.x & 31;
  allow_next_kernel();
  // The work list is older than the decode kernel this one waits for.
  const CombineItem* items = (const CombineItem*)(a.work + a.layout.items());
  const int count = a.work[WorkLayout::items_count()];
  bool waited = false;
  int base = 0, before = 0;  // 32 items are looked at together; tasks of those before them
  for (int task = blockIdx.x * WARPS + (threadIdx.x >> 5);; task += gridDim.x * WARPS) {
    CombineItem it{};
    int from = 0;
    for (;; base += 32) {
      if (base >= count) {
        if (!waited) wait_for_previous_kernel();  // or the next kernel would not wait for it either
        return;
      }
      int tasks = 0;
      if (base + lane < count) {
        it = items[base + lane];
        tasks = max(0, min(a.group * ROWS, a.rows - it.unit * a.group * ROWS)) * parts_of(it.splits);
      }
      int end = tasks;
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        const int left = __shfl_up_sync(~0u, end, d);
        if (lane >= d) end += left;
      }
      const uint32_t beyond = __ballot_sync(~0u, before + end > task);
      if (beyond) {
        const int at = __ffs(beyond) - 1;
        from = before + __shfl_sync(~0u, end - tasks, at);
        it.seq = __shfl_sync(~0u, it.seq, at), it.unit = __shfl_sync(~0u, it.unit, at);
        it.first_slot = __shfl_sync(~0u, it.first_slot, at), it.splits = __shfl_sync(~0u, it.splits, at);
        break;
      }
      before += __shfl_sync(~0u, end, 31);
    }
    if (!waited) wait_for_previous_kernel(), waited = true;
    const int parts = parts_of(it.splits), row = (task - from) / parts, part = (task - from) % parts;
    if (parts == 1)
      merge<float4, 4, 4>(a, it, row, part, lane);
    else if (parts == 4)
      merge<float4, 1, 16>(a, it, row, part, lane);
    else
      merge<float, 1, 32>(a, it, row, part, lane);
  }
}
