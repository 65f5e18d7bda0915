// The ceiling of every decode kernel bound by the cache: the same page fetches as theirs, nothing else. One warp a CTA.
#include "common/ptx.cuh"
#include "mla_decode/work.cuh"

struct PagedReadArgs {
  CUtensorMap content, rope;  // as of fp8.cu or bf16.cu
  const float* scales;        // [pages][64], or null for a BF16 cache
  int64_t scale_stride;
  const int* pages;  // [count] block ids, read in turn by the CTAs
  int count;
};

constexpr int STAGE_BYTES = 73728, STAGES = 3;  // a BF16 page; an FP8 page is smaller, and two of those saturate HBM
extern "C" __device__ int paged_read_smem = STAGES * STAGE_BYTES + 1024 + 8 * STAGES;

extern "C" __global__ void __launch_bounds__(32) paged_read(const __grid_constant__ PagedReadArgs a) {
  extern __shared__ __align__(1024) uint8_t smem[];
  if (threadIdx.x) return;
  const uint32_t ring = smem_addr(smem), full = ring + STAGES * STAGE_BYTES;
  for (int i = 0; i < STAGES; i++) mbar_init(full + i * 8, 1);
  mbar_init_fence();
  const int chunks = a.scales ? 4 : 8;
  const auto fetch = [&](int i, int stage) {
    const int page = a.pages[i];
    const uint32_t dst = ring + stage * STAGE_BYTES, bar = full + stage * 8;
    mbar_expect_tx(bar, chunks * 8192 + 8192 + (a.scales ? 256 : 0));
    for (int c = 0; c < chunks; c++) tma_4d(dst + c * 8192, &a.content, bar, 0, 0, c, page);
    tma_3d(dst + chunks * 8192, &a.rope, bar, 0, 0, page);
    if (a.scales) bulk_copy(dst + chunks * 8192 + 8192, a.scales + page * a.scale_stride, 256, bar);
  };
  int next = blockIdx.x, stage = 0, phase = 0, in_flight = 0;
  for (; in_flight < STAGES && next < a.count; next += gridDim.x) fetch(next, in_flight++);
  while (in_flight > 0) {
    mbar_wait(full + stage * 8, phase);
    in_flight--;
    if (next < a.count) fetch(next, stage), next += gridDim.x, in_flight++;
    if (++stage == STAGES) stage = 0, phase ^= 1;
  }
}
