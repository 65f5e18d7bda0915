// Streaming product with BF16 weights (experts), one kernel a token tile.
#include "gemm/stream.cuh"

STREAM_KERNEL(stream_bf16_8, 8, false)
STREAM_KERNEL(stream_bf16_16, 16, false)
STREAM_KERNEL(stream_bf16_32, 32, false)
STREAM_KERNEL(stream_bf16_64, 64, false)
STREAM_KERNEL(stream_bf16_128, 128, false)
