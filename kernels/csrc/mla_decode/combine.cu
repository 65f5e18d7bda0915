// Merges the partial results of split sequences by their log-sum-exp (natural), in the order of the splits, and writes
// zeros and -inf for rows without keys. One CTA of four warps a row; warp w adds splits w, w + 4, ...
#include "common/ptx.cuh"
#include "mla_decode/work.cuh"

struct CombineArgs {
  const int* work;
  WorkLayout layout;
  int group, rows, out_fp32;  // tiles of a group; query rows of a sequence
  const float* partial_out;   // [slots * group][64][512], each divided by its own sum
  const float* partial_lse;   // [slots * group][64]
  void* out;                  // [batch * rows][512]
  float* lse;                 // [batch * rows]
};

extern "C" __global__ void __launch_bounds__(128) combine_decode(const CombineArgs a) {
  __shared__ float part[4][DIM];
  __shared__ float weight_sum[4];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  wait_for_previous_kernel();
  const CombineItem* items = (const CombineItem*)(a.work + a.layout.items());
  const int total = a.work[WorkLayout::items_count()] * a.group * ROWS;
  for (int i = blockIdx.x; i < total; i += gridDim.x) {
    const CombineItem it = items[i / (a.group * ROWS)];
    const int rank = i / ROWS % a.group, r = i % ROWS, in_seq = (it.unit * a.group + rank) * ROWS + r;
    if (in_seq >= a.rows) continue;
    auto lse_of = [&](int k) { return a.partial_lse[(size_t)((it.first_slot + k) * a.group + rank) * ROWS + r]; };
    float top = -INFINITY_F;
    for (int k = lane; k < it.splits; k += 32) top = fmaxf(top, lse_of(k));
#pragma unroll
    for (int d = 16; d; d /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
    float sum = 0.f;
    float4 acc[4] = {};
    for (int k = warp; k < it.splits; k += 4) {
      const float lse = lse_of(k);
      if (lse == -INFINITY_F) continue;  // its output was never written
      const float weight = ex2_mufu((lse - top) * 1.4426950409f);
      const float4* o = (const float4*)(a.partial_out + ((size_t)((it.first_slot + k) * a.group + rank) * ROWS + r) * DIM);
      sum += weight;
#pragma unroll
      for (int c = 0; c < 4; c++) {
        const float4 v = __ldcs(o + c * 32 + lane);
        acc[c].x = fmaf(weight, v.x, acc[c].x), acc[c].y = fmaf(weight, v.y, acc[c].y);
        acc[c].z = fmaf(weight, v.z, acc[c].z), acc[c].w = fmaf(weight, v.w, acc[c].w);
      }
    }
    __syncthreads();  // the previous row's reads are done
#pragma unroll
    for (int c = 0; c < 4; c++) ((float4*)part[warp])[c * 32 + lane] = acc[c];
    if (lane == 0) weight_sum[warp] = sum;
    __syncthreads();
    const float all = (weight_sum[0] + weight_sum[1]) + (weight_sum[2] + weight_sum[3]);
    const float scale = all > 0.f ? 1.f / all : 0.f;
    float4 v = ((float4*)part[0])[threadIdx.x];
#pragma unroll
    for (int w = 1; w < 4; w++) {
      const float4 x = ((float4*)part[w])[threadIdx.x];
      v.x += x.x, v.y += x.y, v.z += x.z, v.w += x.w;
    }
    v.x *= scale, v.y *= scale, v.z *= scale, v.w *= scale;
    const size_t row = (size_t)it.seq * a.rows + in_seq;
    if (a.out_fp32)
      ((float4*)a.out)[row * (DIM / 4) + threadIdx.x] = v;
    else
      ((uint2*)a.out)[row * (DIM / 4) + threadIdx.x] = make_uint2(pack_bf16(v.x, v.y), pack_bf16(v.z, v.w));
    if (threadIdx.x == 0) a.lse[row] = all > 0.f ? top + logf(all) : -INFINITY_F;
  }
}
