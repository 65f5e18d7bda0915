// RMSNorm over rows, after adding a residual if there is one; the result plain, quantized for a block-scaled product, or both.
// One CTA a row, which stays in registers: 8 values a thread and pass. The sum is rounded to T before it is normalized, and
// the normalized row before it is quantized, so that the fused forms give the bits of the separate ones.
#include "gemm/quantize.cuh"

struct NormArgs {
  const void* x;         // T [rows, width], row stride below
  const void* residual;  // T [rows, width] dense, or null
  const void* weight;    // [width], BF16 or FP32
  void* sum;             // T [rows, width] x + residual; not written without a residual
  void* out;             // T [rows, width] or null
  Quantized to;          // codes null: not quantized
  int64_t x_stride;
  int weight_fp32;
  float eps;
};

DEVICE float row_sum(float v, float* warp_sums) {
#pragma unroll
  for (int d = 16; d; d /= 2) v += __shfl_xor_sync(~0u, v, d);
  if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = v;
  __syncthreads();
  v = 0.f;
  for (int w = 0; w < blockDim.x / 32; w++) v += warp_sums[w];
  return v;
}

// The values rounded to T, and stored if there is a place.
template <class T> DEVICE void round_and_store8(float (&v)[8], T* to) {
  if constexpr (sizeof(T) == 2) {
    const uint4 bits = round8(v);
    if (to) *(uint4*)to = bits;
  } else if (to) {
    ((float4*)to)[0] = make_float4(v[0], v[1], v[2], v[3]);
    ((float4*)to)[1] = make_float4(v[4], v[5], v[6], v[7]);
  }
}

// Rows and width in vectors of 8. The block has at least width / 8 / PASSES threads, whole warps.
template <class T, int PASSES> DEVICE void norm_vectors(const NormArgs& a) {
  __shared__ float warp_sums[32];
  const int width = a.to.width, lane = threadIdx.x % BLOCK_LANES;
  const int64_t row = blockIdx.x, start = row * width;
  float v[PASSES][8], w[PASSES][8], squares = 0.f;
#pragma unroll
  for (int p = 0; p < PASSES; p++) {  // weights never change, so they need not wait
    const int column = (threadIdx.x + p * blockDim.x) * LANE_VALUES;
    zero8(w[p]);
    if (column >= width) continue;
    if (a.weight_fp32) load8(w[p], (const float*)a.weight + column);
    else load8(w[p], (const bf16*)a.weight + column);
  }
  wait_for_previous_kernel();
  allow_next_kernel();
#pragma unroll
  for (int p = 0; p < PASSES; p++) {
    const int column = (threadIdx.x + p * blockDim.x) * LANE_VALUES;
    zero8(v[p]);
    if (column >= width) continue;
    load8(v[p], (const T*)a.x + row * a.x_stride + column);
    if (a.residual) {
      float r[8];
      load8(r, (const T*)a.residual + start + column);
#pragma unroll
      for (int i = 0; i < 8; i++) v[p][i] += r[i];
      round_and_store8(v[p], (T*)a.sum + start + column);
    }
#pragma unroll
    for (int i = 0; i < 8; i++) squares = fmaf(v[p][i], v[p][i], squares);
  }
  const float factor = rsqrtf(row_sum(squares, warp_sums) / width + a.eps);
#pragma unroll
  for (int p = 0; p < PASSES; p++) {
    const int column = (threadIdx.x + p * blockDim.x) * LANE_VALUES;
#pragma unroll
    for (int i = 0; i < 8; i++) v[p][i] = v[p][i] * factor * w[p][i];
    round_and_store8(v[p], a.out && column < width ? (T*)a.out + start + column : nullptr);
    if (!a.to.codes) continue;
    float scale;
    const uint2 code = quantize8(v[p], scale);
    if (column / 128 * 128 < width) a.to.store((int)row, column / 128, lane, code, scale);
  }
}

// Any width and stride.
template <class T> DEVICE void norm_any(const NormArgs& a) {
  __shared__ float warp_sums[32];
  wait_for_previous_kernel();
  allow_next_kernel();
  const int width = a.to.width;
  const int64_t row = blockIdx.x, start = row * width;
  const T* x = (const T*)a.x + row * a.x_stride;
  T* sum = (T*)a.sum + start;
  float squares = 0.f;
  for (int i = threadIdx.x; i < width; i += blockDim.x) {
    float v = widen(x[i]);
    if (a.residual) {
      const T rounded = narrow<T>(v + widen(((const T*)a.residual)[start + i]));
      sum[i] = rounded, v = widen(rounded);
    }
    squares = fmaf(v, v, squares);
  }
  const float factor = rsqrtf(row_sum(squares, warp_sums) / width + a.eps);
  const T* from = a.residual ? sum : x;  // a thread reads back only what it wrote itself
  for (int i = threadIdx.x; i < width; i += blockDim.x) {
    const float w = a.weight_fp32 ? ((const float*)a.weight)[i] : widen(((const bf16*)a.weight)[i]);
    ((T*)a.out)[start + i] = narrow<T>(widen(from[i]) * factor * w);
  }
}

#define KERNEL(name, body) \
  extern "C" __global__ void __launch_bounds__(1024) name(const NormArgs a) { body(a); }
KERNEL(norm_vectors_1_bf16, (norm_vectors<bf16, 1>))
KERNEL(norm_vectors_2_bf16, (norm_vectors<bf16, 2>))
KERNEL(norm_vectors_1_fp32, (norm_vectors<float, 1>))
KERNEL(norm_vectors_2_fp32, (norm_vectors<float, 2>))
KERNEL(norm_any_bf16, norm_any<bf16>)
KERNEL(norm_any_fp32, norm_any<float>)
