// Expert choice of DeepSeek-V2, DeepSeek-V3 and LongCat-Flash: scores, groups, top-k and weights in one launch.
// One warp a token; the router's arithmetic is FP32. Equal scores go to the lower id. A NaN logit is chosen last, and a
// row is never affected by another, so padding may hold anything; rows that are not live get id -1 and weight 0.
#include "common/ptx.cuh"

constexpr int ROUTE_WARPS = 4, MOST_PARTS = 4;

struct RouteArgs {
  const float* logits;   // [parts, tokens, experts]; their sum over the parts counts
  const float* bias;     // [experts] or null; selects, never weighs
  const uint8_t* live;   // [tokens] or null: rows that are real
  float* weights;        // [tokens, top_k], row stride below
  int* ids;              // [tokens, top_k], likewise
  int tokens, experts, top_k, groups, top_groups;
  int sigmoid, normalize;
  float scaling_factor;
  int parts, row_stride;
};

// Unsigned order of floats; NaN is 1, below -inf. 0 is free for "taken".
DEVICE uint32_t order(float f) {
  const uint32_t u = __float_as_uint(f);
  if (f != f) return 1;
  return u ^ (u >> 31 ? 0xFFFFFFFFu : 0x80000000u);
}
constexpr uint32_t ORDER_OF_MINUS_INF = 0x007FFFFFu;

// Lanes whose first lane of a group is set: the groups to keep. `lanes` lanes share a group.
DEVICE uint32_t best_groups(const RouteArgs& a, const float* choices, int lanes) {
  const int lane = threadIdx.x % 32, group = lane / lanes, size = a.experts / a.groups;
  float best = -INFINITY_F, second = -INFINITY_F;
  if (group < a.groups) {
    for (int i = lane % lanes; i < size; i += lanes) {
      const float c = choices[group * size + i];
      if (c > best) second = best, best = c;
      else if (c > second) second = c;
    }
  }
  for (int d = 1; d < lanes; d *= 2) {
    const float b = __shfl_xor_sync(~0u, best, d), s = __shfl_xor_sync(~0u, second, d);
    second = fmaxf(fminf(best, b), fmaxf(second, s)), best = fmaxf(best, b);
  }
  const uint32_t mine = order(a.bias && size > 1 ? best + second : best);
  int rank = 0;
  for (int g = 0; g < a.groups; g++) {
    const uint32_t other = __shfl_sync(~0u, mine, g * lanes);
    rank += other > mine || (other == mine && g < group);
  }
  return __ballot_sync(~0u, group < a.groups && rank < a.top_groups);
}

template <int PER_LANE> DEVICE void route(const RouteArgs& a) {
  __shared__ float all_scores[ROUTE_WARPS][32 * PER_LANE], all_choices[ROUTE_WARPS][32 * PER_LANE];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, token = blockIdx.x * ROUTE_WARPS + warp;
  wait_for_previous_kernel();
  allow_next_kernel();
  if (token >= a.tokens) return;
  const int64_t out = (int64_t)token * a.row_stride;
  if (a.live && !a.live[token]) {
    if (lane < a.top_k) a.ids[out + lane] = -1, a.weights[out + lane] = 0.f;
    return;
  }
  float *scores = all_scores[warp], *choices = all_choices[warp];
  float v[PER_LANE], bias[PER_LANE], largest = -INFINITY_F, total = 0.f;
#pragma unroll
  for (int j = 0; j < PER_LANE; j++) {
    const int e = 32 * j + lane;
    bias[j] = a.bias && e < a.experts ? a.bias[e] : 0.f;
    v[j] = e < a.experts ? a.logits[(int64_t)token * a.experts + e] : -INFINITY_F;
  }
  if (a.parts > 1) {  // all asked for before the first is added
    float more[MOST_PARTS - 1][PER_LANE];
#pragma unroll
    for (int p = 1; p < MOST_PARTS; p++) {
#pragma unroll
      for (int j = 0; j < PER_LANE; j++) {
        const int e = 32 * j + lane;
        more[p - 1][j] = p < a.parts && e < a.experts ? a.logits[((int64_t)p * a.tokens + token) * a.experts + e] : 0.f;
      }
    }
#pragma unroll
    for (int p = 1; p < MOST_PARTS; p++) {
#pragma unroll
      for (int j = 0; j < PER_LANE; j++) v[j] += more[p - 1][j];
    }
  }
#pragma unroll
  for (int j = 0; j < PER_LANE; j++) largest = fmaxf(largest, v[j]);
  if (a.sigmoid) {
#pragma unroll
    for (int j = 0; j < PER_LANE; j++) v[j] = 1.f / (1.f + expf(-v[j]));
  } else {
    for (int d = 16; d; d /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, d));
#pragma unroll
    for (int j = 0; j < PER_LANE; j++) v[j] = expf(v[j] - largest), total += v[j];
    for (int d = 16; d; d /= 2) total += __shfl_xor_sync(~0u, total, d);
#pragma unroll
    for (int j = 0; j < PER_LANE; j++) v[j] /= total;
  }
#pragma unroll
  for (int j = 0; j < PER_LANE; j++) scores[32 * j + lane] = v[j], choices[32 * j + lane] = v[j] += bias[j];
  __syncwarp();

  int lanes = 1;
  while (2 * lanes * a.groups <= 32) lanes *= 2;
  const uint32_t kept = a.groups > 1 ? best_groups(a, choices, lanes) : ~0u;
  uint32_t keys[PER_LANE];
#pragma unroll
  for (int j = 0; j < PER_LANE; j++) {
    const int e = 32 * j + lane;
    keys[j] = 0;
    if (e >= a.experts) continue;
    keys[j] = order(v[j]);
    if (a.groups > 1 && !(kept >> (e / (a.experts / a.groups) * lanes) & 1)) keys[j] = ORDER_OF_MINUS_INF;
  }
  int id = 0;  // lane k's choice
  for (int k = 0; k < a.top_k; k++) {
    uint32_t best = 0;
    int at = 0;
#pragma unroll
    for (int j = 0; j < PER_LANE; j++) {
      if (keys[j] > best) best = keys[j], at = j;
    }
    const uint32_t winner = __reduce_max_sync(~0u, best);
    const uint32_t e = __reduce_min_sync(~0u, best == winner ? 32u * at + lane : ~0u);
#pragma unroll
    for (int j = 0; j < PER_LANE; j++) {
      if (32u * j + lane == e) keys[j] = 0;
    }
    if (lane == k) id = (int)e;
  }
  const float score = lane < a.top_k ? scores[id] : 0.f;
  float sum = score;
  for (int d = 16; d; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
  if (lane < a.top_k) {
    a.ids[out + lane] = id;
    a.weights[out + lane] = (a.normalize ? score / (sum + 1e-20f) : score) * a.scaling_factor;
  }
}

extern "C" __global__ void __launch_bounds__(32 * ROUTE_WARPS) route_256(const RouteArgs a) { route<8>(a); }
extern "C" __global__ void __launch_bounds__(32 * ROUTE_WARPS) route_512(const RouteArgs a) { route<16>(a); }
extern "C" __global__ void __launch_bounds__(32 * ROUTE_WARPS) route_1024(const RouteArgs a) { route<32>(a); }
