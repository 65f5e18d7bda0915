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
