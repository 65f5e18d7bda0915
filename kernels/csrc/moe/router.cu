// Router scores of few tokens, in parts: logits = sum over parts of X W^T, both BF16, products and sums FP32. route.cu adds
// the parts. A CTA takes 8 experts, 16 tokens and a quarter of the channels, so that the 4 MB of a router are on every SM
// at once; its warps share the channels. Fragments come straight from device memory: the order of channels inside a product
// is free, so a lane's 16 bytes are the four registers of two k-steps.
#include "common/ptx.cuh"

struct RouterArgs {
  const bf16* x;  // [tokens, width]
  const bf16* w;  // [experts, width]
  float* parts;   // [PARTS, tokens, experts]
  int tokens, experts, width;
};

constexpr int PARTS = 4, WARPS = 8, EXPERTS = 8, TOKENS = 16, CHUNK = 32, BATCH = 8;  // CHUNK: channels of two k-steps

DEVICE void mma(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Grid: expert groups x PARTS x token tiles, expert groups innermost.
extern "C" __global__ void __launch_bounds__(32 * WARPS) router_parts(const RouterArgs a) {
  __shared__ float sums[WARPS][TOKENS * EXPERTS];
  const int groups = a.experts / EXPERTS, group = blockIdx.x % groups, part = blockIdx.x / groups % PARTS;
  const int first = blockIdx.x / groups / PARTS * TOKENS;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const int chunks = a.width / CHUNK, share = part * WARPS + warp;
  const int begin = chunks * share / (PARTS * WARPS), end = chunks * (share + 1) / (PARTS * WARPS);
  const uint4 none = make_uint4(0, 0, 0, 0);
  const uint4* w = (const uint4*)(a.w + (int64_t)(group * EXPERTS + g) * a.width + 8 * q);
  const bool upper_lives = first + g < a.tokens, lower_lives = first + g + 8 < a.tokens;
  const uint4* upper = (const uint4*)(a.x + (int64_t)(first + g) * a.width + 8 * q);
  const uint4* lower = upper + (int64_t)a.width;  // 8 rows on, in units of 8 values
  float sum[4] = {0.f, 0.f, 0.f, 0.f};
  for (int from = begin; from < end || from == begin; from += BATCH) {
    uint4 b[BATCH], u[BATCH], l[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; i++) b[i] = from + i < end ? w[(from + i) * (CHUNK / 8)] : none;
    if (from == begin) wait_for_previous_kernel(), allow_next_kernel();  // the weights need not wait
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
      u[i] = upper_lives && from + i < end ? upper[(from + i) * (CHUNK / 8)] : none;
      l[i] = lower_lives && from + i < end ? lower[(from + i) * (CHUNK / 8)] : none;
    }
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
      mma(sum, u[i].x, l[i].x, u[i].y, l[i].y, b[i].x, b[i].y);
      mma(sum, u[i].z, l[i].z, u[i].w, l[i].w, b[i].z, b[i].w);
    }
  }
  float* mine = sums[warp];
  mine[g * EXPERTS + 2 * q] = sum[0], mine[g * EXPERTS + 2 * q + 1] = sum[1];
  mine[(g + 8) * EXPERTS + 2 * q] = sum[2], mine[(g + 8) * EXPERTS + 2 * q + 1] = sum[3];
  __syncthreads();
  const int token = first + threadIdx.x / EXPERTS;
  if (threadIdx.x >= TOKENS * EXPERTS || token >= a.tokens) return;
  float total = 0.f;
#pragma unroll
  for (int i = 0; i < WARPS; i++) total += sums[i][threadIdx.x];
  a.parts[((int64_t)part * a.tokens + token) * a.experts + group * EXPERTS + threadIdx.x % EXPERTS] = total;
}
