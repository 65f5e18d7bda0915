// Activation quantization, alone and fused into what comes before it.
#include "gemm/quantize.cuh"

struct QuantizeArgs {
  const void* x;  // [rows, width], or [rows, 2 width] gate and up halves; row stride in elements
  Quantized to;
  int64_t x_stride;
  const int* live;  // how many rows there are where the host knows only their limit, or null
  int rows, _pad;
};

// EACH: groups of 16 blocks of a CTA. Few rows are spread over all SMs; of many, a thread has several loads on their way.
template <class T, bool SILU, int EACH> DEVICE void quantize(const QuantizeArgs& a) {
  wait_for_previous_kernel();
  allow_next_kernel();
  const int width = a.to.width, rows = a.live ? min(a.rows, *a.live) : a.rows;
  if (RowBlock(width, EACH * blockIdx.x, 1).row >= rows) return;
  float v[EACH][8], up[EACH][8];
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const RowBlock at(width, EACH * blockIdx.x + i, 1);
    const T* x = (const T*)a.x + at.row * a.x_stride + at.column();
    zero8(v[i]), zero8(up[i]);
    if (at.row >= rows || at.column() >= width) continue;
    load8(v[i], x);
    if (SILU) load8(up[i], x + width);
  }
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const RowBlock at(width, EACH * blockIdx.x + i, 1);
    if (SILU) {
#pragma unroll
      for (int j = 0; j < 8; j++) v[i][j] = silu_mul(v[i][j], up[i][j]);
      if (sizeof(T) == 2) round8(v[i]);
    }
    float scale;
    const uint2 code = quantize8(v[i], scale);
    if (at.row < rows && at.block * 128 < width) a.to.store(at.row, at.block, at.lane, code, scale);
  }
}

#define KERNEL(NAME, T, SILU, EACH) \
  extern "C" __global__ void __launch_bounds__(QUANTIZE_THREADS) NAME(const QuantizeArgs a) { quantize<T, SILU, EACH>(a); }
KERNEL(quantize_bf16, bf16, false, 1)
KERNEL(quantize_fp32, float, false, 1)
KERNEL(silu_mul_quantize_bf16, bf16, true, 1)
KERNEL(quantize_many_bf16, bf16, false, 4)
KERNEL(silu_mul_quantize_many_bf16, bf16, true, 2)
