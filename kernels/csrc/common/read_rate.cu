// The ceiling of every weight- or cache-bound kernel on this device: bulk copies into a ring, nothing else. One warp a CTA.
#include "common/ptx.cuh"

constexpr int CHUNK = 16384, STAGES = 12;

struct ReadArgs {
  const uint8_t* data;  // [chunks, 16384]
  int chunks;
};

extern "C" __device__ int read_rate_smem = STAGES * (CHUNK + 8) + 128;

extern "C" __global__ void __launch_bounds__(32) read_rate(const ReadArgs a) {
  extern __shared__ uint8_t shared[];
  if (threadIdx.x) return;
  const uint32_t ring = (smem_addr(shared) + 127) & ~127u, full = ring + STAGES * CHUNK;
  for (int i = 0; i < STAGES; i++) mbar_init(full + i * 8, 1);
  mbar_init_fence();
  const auto fetch = [&](int chunk, int stage) {
    mbar_expect_tx(full + stage * 8, CHUNK);
    bulk_copy(ring + stage * CHUNK, a.data + (int64_t)chunk * CHUNK, CHUNK, full + stage * 8);
  };
  int next = blockIdx.x, stage = 0, phase = 0, in_flight = 0;
  for (; in_flight < STAGES && next < a.chunks; next += gridDim.x) fetch(next, in_flight++);
  while (in_flight > 0) {
    mbar_wait(full + stage * 8, phase);
    in_flight--;
    if (next < a.chunks) fetch(next, stage), next += gridDim.x, in_flight++;
    if (++stage == STAGES) stage = 0, phase ^= 1;
  }
}
