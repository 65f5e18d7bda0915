// Streaming product with block-scaled FP8 weights, one kernel a token tile.
#include "gemm/stream.cuh"

STREAM_KERNEL(stream_fp8_8, 8, true)
STREAM_KERNEL(stream_fp8_16, 16, true)
STREAM_KERNEL(stream_fp8_32, 32, true)
STREAM_KERNEL(stream_fp8_64, 64, true)
STREAM_KERNEL(stream_fp8_128, 128, true)
