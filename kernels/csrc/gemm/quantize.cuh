// The published checkpoints' dynamic activation scheme: E4M3 codes with one FP32 scale per token and 128 channels.
// Sixteen neighbouring lanes hold the 128 channels of a block, eight each.
#pragma once
#include "common/ptx.cuh"

constexpr int BLOCK_LANES = 16, LANE_VALUES = 8;
constexpr int QUANTIZE_THREADS = 256, BLOCKS_A_CTA = QUANTIZE_THREADS / BLOCK_LANES;

// Grids of rows x groups of 16 blocks: the row and the block of this thread's sixteen lanes.
struct RowBlock {
  int row, block, lane;
  DEVICE explicit RowBlock(int width) : RowBlock(width, blockIdx.x, 1) {}
  // The first of `each` groups, BLOCKS_A_CTA blocks apart, that follow `index` times as many.
  DEVICE RowBlock(int width, int index, int each) {
    const int chunk = 128 * BLOCKS_A_CTA * each, chunks = (width + chunk - 1) / chunk;
    row = index / chunks, block = index % chunks * each * BLOCKS_A_CTA + threadIdx.x / BLOCK_LANES;
    lane = threadIdx.x % BLOCK_LANES;
  }
  DEVICE int column() const { return block * 128 + lane * LANE_VALUES; }
};

template <class T> DEVICE void load8(float (&v)[8], const T* from) {
  if constexpr (sizeof(T) == 2) {
    const uint4 raw = *(const uint4*)from;
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; i++) v[2 * i] = __uint_as_float(words[i] << 16), v[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000u);
  } else {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float4 raw = ((const float4*)from)[i];
      v[4 * i] = raw.x, v[4 * i + 1] = raw.y, v[4 * i + 2] = raw.z, v[4 * i + 3] = raw.w;
    }
  }
}

DEVICE void zero8(float (&v)[8]) {
#pragma unroll
  for (int i = 0; i < 8; i++) v[i] = 0.f;
}

// The same values after a round trip through BF16, and that trip's bits.
DEVICE uint4 round8(float (&v)[8]) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    words[i] = pack_bf16(v[2 * i], v[2 * i + 1]);
    v[2 * i] = __uint_as_float(words[i] << 16), v[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000u);
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// v / by in its correct rounding, given 1 / by in its: a quotient, corrected once by its remainder. For finite values whose
// quotients do not overflow; a division that is ready for the others costs three times the instructions.
DEVICE float divide(float v, float by, float inverse) {
  const float q = v * inverse;
  return fmaf(fmaf(-q, by, v), inverse, q);
}
DEVICE float silu_mul(float gate, float up) {
  const float by = 1.f + expf(-gate), inverse = __frcp_rn(by);
  return (fmaxf(by, gate) < 1e37f ? divide(gate, by, inverse) : gate * inverse) * up;
}

// All 32 lanes call it. Codes of the lane's eight values; the block's scale is the same in its sixteen lanes.
DEVICE uint2 quantize8(const float (&v)[8], float& scale) {
  float amax = AMAX_FLOOR;
#pragma unroll
  for (int i = 0; i < 8; i++) amax = fmaxf(amax, fabsf(v[i]));
#pragma unroll
  for (int d = BLOCK_LANES / 2; d; d /= 2) amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, d));
  scale = amax / FP8_MAX;
  const float inverse = __frcp_rn(scale);
  float q[8];
#pragma unroll
  for (int i = 0; i < 8; i++) q[i] = divide(v[i], scale, inverse);
  return make_uint2(pack_e4m3(q[0], q[1], q[2], q[3]), pack_e4m3(q[4], q[5], q[6], q[7]));
}

// Activation in this scheme: codes [rows, width], scales [ceil(width / 128), scale_stride].
struct Quantized {
  uint8_t* codes;
  float* scales;
  int width, scale_stride;

  DEVICE void store(int row, int block, int lane, uint2 code, float scale) const {
    const int column = block * 128 + lane * LANE_VALUES;
    if (column < width) *(uint2*)(codes + (int64_t)row * width + column) = code;
    if (lane == 0) scales[(int64_t)block * scale_stride + row] = scale;
  }
};
