// Merges the partial results of split sequences by their log-sum-exp (natural), in the order of the splits, and writes
// zeros and -inf for rows without keys. A CTA takes one row at a time; 128 threads cover its 512 dims, and each further
// group of 128 threads takes its share of the splits.
#include "common/ptx.cuh"
#include "mla_decode/work.cuh"

constexpr int MAX_GROUPS = 4, IN_FLIGHT = 8;

struct CombineArgs {
  const int* work;
  WorkLayout layout;
  int group, rows, out_fp32;  // tiles of a group; query rows of a sequence
  const float* partial_out;   // [slots * group][64][512], each divided by its own sum
  const float* partial_lse;   // [slots * group][64]
  void* out;                  // [batch * rows][512]
  float* lse;                 // [batch * rows]
};

extern "C" __global__ void __launch_bounds__(128 * MAX_GROUPS, 1) combine_decode(const CombineArgs a) {
  __shared__ float4 part[MAX_GROUPS][DIM / 4];
  __shared__ float sums[MAX_GROUPS];
  const int lane = threadIdx.x & 31, column = threadIdx.x & 127, mine = threadIdx.x >> 7, groups = blockDim.x >> 7;
  allow_next_kernel();
  // The work list is older than the decode kernel this one waits for.
  const CombineItem* items = (const CombineItem*)(a.work + a.layout.items());
  const int total = a.work[WorkLayout::items_count()] * a.group * ROWS;
  CombineItem it = items[blockIdx.x < total ? blockIdx.x / (a.group * ROWS) : 0];
  wait_for_previous_kernel();
  for (int i = blockIdx.x; i < total; i += gridDim.x) {
    if (i != blockIdx.x) it = items[i / (a.group * ROWS)];
    const int rank = i / ROWS % a.group, r = i % ROWS, in_seq = (it.unit * a.group + rank) * ROWS + r;
    if (in_seq >= a.rows) continue;
    const size_t first = ((size_t)it.first_slot * a.group + rank) * ROWS + r, step = (size_t)a.group * ROWS;
    float top = -INFINITY_F;
    for (int k = lane; k < it.splits; k += 32) top = fmaxf(top, a.partial_lse[first + k * step]);
#pragma unroll
    for (int d = 16; d; d /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
    float sum = 0.f;
    float4 acc = make_float4(0.f, 0.f, 0.f, 0.f);
    for (int k0 = mine; k0 < it.splits; k0 += groups * IN_FLIGHT) {
      float weight[IN_FLIGHT];
      float4 v[IN_FLIGHT];
#pragma unroll
      for (int j = 0; j < IN_FLIGHT; j++) {
        const int k = k0 + j * groups;
        weight[j] = k < it.splits ? a.partial_lse[first + k * step] : -INFINITY_F;
        if (k < it.splits) v[j] = __ldcs((const float4*)(a.partial_out + (first + k * step) * DIM) + column);
      }
#pragma unroll
      for (int j = 0; j < IN_FLIGHT; j++) {
        if (weight[j] == -INFINITY_F) continue;  // no keys: its output may hold anything
        const float w = ex2_mufu((weight[j] - top) * 1.4426950409f);
        sum += w;
        acc.x = fmaf(w, v[j].x, acc.x), acc.y = fmaf(w, v[j].y, acc.y), acc.z = fmaf(w, v[j].z, acc.z), acc.w = fmaf(w, v[j].w, acc.w);
      }
    }
    if (groups > 1) {
      __syncthreads();  // the previous row's reads are done
      part[mine][column] = acc;
      if (column == 0) sums[mine] = sum;
      __syncthreads();
      if (mine) continue;
      for (int g = 1; g < groups; g++) {
        const float4 x = part[g][column];
        sum += sums[g], acc.x += x.x, acc.y += x.y, acc.z += x.z, acc.w += x.w;
      }
    }
    const float scale = sum > 0.f ? 1.f / sum : 0.f;
    acc.x *= scale, acc.y *= scale, acc.z *= scale, acc.w *= scale;
    const size_t row = (size_t)it.seq * a.rows + in_seq;
    if (a.out_fp32)
      ((float4*)a.out)[row * (DIM / 4) + column] = acc;
    else
      ((uint2*)a.out)[row * (DIM / 4) + column] = make_uint2(pack_bf16(acc.x, acc.y), pack_bf16(acc.z, acc.w));
    if (column == 0) a.lse[row] = sum > 0.f ? top + logf(sum) : -INFINITY_F;
  }
}
