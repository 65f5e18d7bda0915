// Activation quantization, alone and fused into what comes before it.
#include "gemm/quantize.cuh"

struct QuantizeArgs {
  const void* x;  // [rows, width], or [rows, 2 width] gate and up halves; row stride in elements
  Quantized to;
  int64_t x_stride;
};

template <class T, bool SILU> DEVICE void quantize(const QuantizeArgs& a) {
  wait_for_previous_kernel();
  allow_next_kernel();
  const int width = a.to.width;
  const RowBlock at(width);
  const int column = at.column();
  const T* x = (const T*)a.x + (int64_t)at.row * a.x_stride;
  float v[8];
  zero8(v);
  if (column < width) load8(v, x + column);
  if (SILU) {
    float up[8];
    zero8(up);
    if (column < width) load8(up, x + width + column);
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = silu_mul(v[i], up[i]);
    if (sizeof(T) == 2) round8(v);
  }
  float scale;
  const uint2 code = quantize8(v, scale);
  if (at.block * 128 < width) a.to.store(at.row, at.block, at.lane, code, scale);
}

extern "C" __global__ void __launch_bounds__(QUANTIZE_THREADS) quantize_bf16(const QuantizeArgs a) { quantize<bf16, false>(a); }
extern "C" __global__ void __launch_bounds__(QUANTIZE_THREADS) quantize_fp32(const QuantizeArgs a) { quantize<float, false>(a); }
extern "C" __global__ void __launch_bounds__(QUANTIZE_THREADS) silu_mul_quantize_bf16(const QuantizeArgs a) { quantize<bf16, true>(a); }

struct NormArgs {
  const bf16* x;         // [rows, width]
  const bf16* residual;  // [rows, width] or null
  const bf16* weight;    // [width]
  bf16* sum;             // [rows, width] x + residual; null without a residual
  bf16* normalized;      // [rows, width] or null: the unquantized result, for a router
  Quantized to;
  float eps;
};

constexpr int NORM_THREADS = 512, NORM_BLOCKS = NORM_THREADS / BLOCK_LANES, NORM_PASSES = 4;  // widths up to 16384

// One CTA a row, the row in registers.
extern "C" __global__ void __launch_bounds__(NORM_THREADS) rms_norm_quantize(const NormArgs a) {
  __shared__ float warp_sums[NORM_THREADS / 32];
  wait_for_previous_kernel();
  allow_next_kernel();
  const int row = blockIdx.x, lane = threadIdx.x % BLOCK_LANES, first = threadIdx.x / BLOCK_LANES, width = a.to.width;
  const int64_t start = (int64_t)row * width;
  float v[NORM_PASSES][8], squares = 0.f;
#pragma unroll
  for (int p = 0; p < NORM_PASSES; p++) {
    const int column = (first + p * NORM_BLOCKS) * 128 + lane * LANE_VALUES;
    zero8(v[p]);
    if (column >= width) continue;
    load8(v[p], a.x + start + column);
    if (a.residual) {
      float r[8];
      load8(r, a.residual + start + column);
#pragma unroll
      for (int i = 0; i < 8; i++) v[p][i] += r[i];
      *(uint4*)(a.sum + start + column) = round8(v[p]);
    }
#pragma unroll
    for (int i = 0; i < 8; i++) squares = fmaf(v[p][i], v[p][i], squares);
  }
#pragma unroll
  for (int d = 16; d; d /= 2) squares += __shfl_xor_sync(~0u, squares, d);
  if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = squares;
  __syncthreads();
  squares = 0.f;
#pragma unroll
  for (int i = 0; i < NORM_THREADS / 32; i++) squares += warp_sums[i];
  const float factor = rsqrtf(squares / width + a.eps);
#pragma unroll
  for (int p = 0; p < NORM_PASSES; p++) {
    const int block = first + p * NORM_BLOCKS, column = block * 128 + lane * LANE_VALUES;
    if (p * NORM_BLOCKS * 128 >= width) break;  // the whole CTA: every lane takes part in quantize8
    float w[8];
    zero8(w);
    if (column < width) load8(w, a.weight + column);
#pragma unroll
    for (int i = 0; i < 8; i++) v[p][i] *= factor * w[i];
    const uint4 rounded = round8(v[p]);
    if (a.normalized && column < width) *(uint4*)(a.normalized + start + column) = rounded;
    float scale;
    const uint2 code = quantize8(v[p], scale);
    if (block * 128 < width) a.to.store(row, block, lane, code, scale);
  }
}
