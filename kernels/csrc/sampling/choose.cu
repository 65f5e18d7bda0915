// One token a line of logits, as kernels/reference/sampling.py defines it, in one launch: the best, or a draw from
// softmax(logits / temperature) restricted by min_p, top_k and top_p; or a draft. Parameters come from tables that the line's
// row indexes. A cluster of 8 CTAs shares a line and keeps it in shared memory.
//
//   edit        penalties, single logits, masks, of the rows that have them
//   best        maximum of the line; greedy rows end here
//   restrict    smallest value that top_k and top_p keep: a radix select over the ordered bits of the scaled values,
//               11 + 11 + 10 bits, by counts for top_k and by integer masses for top_p, so that sums have no order
//   ratio       a drawn draft leaves its distribution q; one under verification is accepted with probability min(1, p / q),
//               else what follows draws from max(0, p - q)
//   draw        Gumbel-max with the reference's counter-based noise. Its two FP64 logarithms are only taken where a fast
//               estimate, good to 1e-4, comes within MARGIN of the best so far: a few times a thread
#include "common/ptx.cuh"

#ifndef SLICE
#define SLICE 16384  // values of a CTA; the vocabulary has at most CLUSTER times as many
#endif

struct ChooseArgs {
  const float* logits;       // [lines, vocab], row stride below
  const int64_t* positions;  // [lines]
  const int64_t* rows;       // [lines] where the tables below have the line's parameters
  const float* temperature;  // 0: greedy
  const int64_t* seeds;
  const float* min_p;
  const int* top_k;     // vocab: none
  const double* top_p;  // inf: none
  const float *repetition, *presence, *frequency;
  const int* history;  // [rows, vocab]: times a token was generated, the sign bit set where the prompt has it
  const uint8_t* masked;
  const uint32_t* masks;  // [rows, words]
  const int* num_edits;
  const int* edit_tokens;  // [rows, max_edits], as the next two
  const float* edit_values;
  const int64_t* edit_until;
  const int64_t* drafts;      // [verified / query_len, query_len - 1], row stride below
  const int64_t* num_drafts;  // [verified / query_len]
  float* probs;               // q of [row, index], strides below; null under exact acceptance
  int64_t* tokens;            // [lines], -1 without a finite best; 0 there for drafts
  int64_t stride, drafts_stride, probs_row_stride, probs_stride;
  int vocab, slice, words, max_edits;  // slice: ceil(vocab / CLUSTER)
  int verified, query_len;             // lines that verify drafts come first, query_len a sequence
  int drafting;                        // lines choose drafts: without edits and filters
};

constexpr int CLUSTER = 8, THREADS = 512, WARPS = THREADS / 32, BINS = 2048, SEGMENT = BINS / CLUSTER;
static_assert(THREADS >= SEGMENT, "a thread adds up one bin");
constexpr float MARGIN = 1e-3f, MASS_ONE = 4294967296.f;
constexpr float WEIGHT_ONE = 256.f * MASS_ONE;  // of the sums that normalize: what 2**18 tokens lose is below 1e-7 of them
constexpr uint64_t DRAFT = 1, ACCEPT = 2, RESIDUAL = 3;  // streams of noise beside that of plain draws
constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15ull, MIX_A = 0xBF58476D1CE4E5B9ull, MIX_B = 0x94D049BB133111EBull;
extern "C" __device__ int choose_tokens_smem = SLICE * 4;

// ---- the cluster ---------------------------------------------------------------------------------------
DEVICE int cluster_rank() {
  int r;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}
DEVICE uint64_t peer_u64(const uint64_t* mine, int rank) {
  uint64_t v;
  asm volatile("{\n.reg .b32 a;\nmapa.shared::cluster.u32 a, %1, %2;\nld.shared::cluster.b64 %0, [a];\n}" : "=l"(v) : "r"(smem_addr(mine)), "r"(rank) : "memory");
  return v;
}
DEVICE uint32_t peer_u32(const uint32_t* mine, int rank) {
  uint32_t v;
  asm volatile("{\n.reg .b32 a;\nmapa.shared::cluster.u32 a, %1, %2;\nld.shared::cluster.b32 %0, [a];\n}" : "=r"(v) : "r"(smem_addr(mine)), "r"(rank) : "memory");
  return v;
}

struct Shared {
  uint32_t low[BINS], high[BINS];  // weights of this CTA's values: bits 0 .. 15, and the bits above
  uint64_t totals[SEGMENT];        // of the cluster, of this CTA's bins
  uint64_t warp_parts[WARPS];
  uint64_t posted[6];  // by use: best, mass, segment, drawn, weight, draft's probability
  uint64_t answer;
  uint64_t found_above;
  uint32_t found_digit;
  int best_drawn;  // ordered bits of the best score so far
};

template <bool SUM> DEVICE uint64_t join(uint64_t a, uint64_t b) { return SUM ? a + b : a > b ? a : b; }

// Sum or maximum over the CTA, for thread 0 only.
template <bool SUM> DEVICE uint64_t over_block(Shared& s, uint64_t v) {
#pragma unroll
  for (int d = 16; d; d /= 2) v = join<SUM>(v, __shfl_xor_sync(~0u, v, d));
  if (threadIdx.x % 32 == 0) s.warp_parts[threadIdx.x / 32] = v;
  __syncthreads();
  v = threadIdx.x < WARPS ? s.warp_parts[threadIdx.x] : 0;
  if (threadIdx.x < 32) {
#pragma unroll
    for (int d = WARPS / 2; d; d /= 2) v = join<SUM>(v, __shfl_xor_sync(~0u, v, d));
  }
  return v;
}
// Over the cluster, for everyone. `use`: a place of `posted` of its own.
template <bool SUM> DEVICE uint64_t over_cluster(Shared& s, uint64_t v, int use) {
  v = over_block<SUM>(s, v);
  if (threadIdx.x == 0) s.posted[use] = v;
  cluster_sync();
  if (threadIdx.x < 32) {
    v = threadIdx.x < CLUSTER ? peer_u64(&s.posted[use], threadIdx.x) : 0;
#pragma unroll
    for (int d = CLUSTER / 2; d; d /= 2) v = join<SUM>(v, __shfl_xor_sync(~0u, v, d));
    if (threadIdx.x == 0) s.answer = v;
  }
  __syncthreads();
  return s.answer;
}

// ---- values ----------------------------------------------------------------------------------------------
// Unsigned order of floats; a NaN of either sign is above everything.
DEVICE uint32_t order(float f) {
  const uint32_t u = __float_as_uint(f);
  return f != f ? ~0u : u ^ (u >> 31 ? ~0u : 0x80000000u);
}
DEVICE float disorder(uint32_t u) { return __uint_as_float(u ^ (u >> 31 ? 0x80000000u : ~0u)); }
DEVICE uint64_t mass(float scaled) { return (uint64_t)(expf(scaled) * MASS_ONE); }

DEVICE uint64_t mix(uint64_t z) {
  z = (z ^ z >> 30) * MIX_A;
  z = (z ^ z >> 27) * MIX_B;
  return z ^ z >> 31;
}
DEVICE uint64_t other_seed(uint64_t seed, uint64_t stream) { return mix(mix(seed) + stream); }
// The stream of (seed, position), and its bits for a token.
DEVICE uint64_t noise_key(uint64_t seed, int64_t position) { return mix(mix(seed + GOLDEN) + (uint64_t)position * MIX_A); }
DEVICE uint64_t noise_bits(uint64_t key, int token) { return mix(key + (uint64_t)(token + 1) * GOLDEN); }
DEVICE double uniform(uint64_t bits) { return ((double)(bits >> 12) + 0.5) * 0x1p-52; }
DEVICE float exact_noise(uint64_t bits) { return (float)-log(-log(uniform(bits))); }
// Within 1e-4 of exact_noise; +inf where the 32 bits it looks at do not tell that much, at 4 tokens in a million.
DEVICE float fast_noise(uint64_t bits) {
  const uint32_t h = (uint32_t)(bits >> 32), rest = ~h;
  if (rest < 1u << 14 || h < 256) return INFINITY_F;
  const float w = rest * 0x1p-32f, u = h * 0x1p-32f;  // u + w = 1
  const float series = w * (1.f + w * (0.5f + w * (1.f / 3 + w * 0.25f)));
  return -__logf(w < 0.0625f ? series : -__logf(u));
}

// The smallest value present whose heavier values weigh less than `target` in all, as ordered bits; the best one if none.
template <bool MASS> DEVICE uint32_t select(Shared& s, const float* values, int count, double target) {
  if (!(target > 0.)) return order(0.f);  // the best value is 0
  uint32_t prefix = 0;
  uint64_t above = 0;
  for (int pass = 0; pass < 3; pass++) {
    const int bits = pass < 2 ? 11 : 10, shift = pass == 0 ? 21 : pass == 1 ? 10 : 0;
    for (int i = threadIdx.x; i < BINS; i += THREADS) s.low[i] = s.high[i] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += THREADS) {
      const uint32_t key = order(values[i]);
      if (pass > 0 && key >> (shift + bits) != prefix) continue;
      const uint32_t bin = key >> shift & ((1u << bits) - 1);
      if (MASS) {
        const uint64_t m = mass(values[i]);
        if (m & 0xFFFF) atomicAdd(&s.low[bin], (uint32_t)m & 0xFFFF);
        if (m >> 16) atomicAdd(&s.high[bin], (uint32_t)(m >> 16));
      } else {
        atomicAdd(&s.low[bin], 1u);
      }
    }
    cluster_sync();
    uint64_t total = 0;
    if (threadIdx.x < SEGMENT) {
      const int bin = cluster_rank() * SEGMENT + threadIdx.x;
      for (int p = 0; p < CLUSTER; p++) total += peer_u32(&s.low[bin], p) + ((uint64_t)peer_u32(&s.high[bin], p) << 16);
      s.totals[threadIdx.x] = total;
    }
    total = over_block<true>(s, total);
    if (threadIdx.x == 0) s.posted[2] = total;
    cluster_sync();
    if (threadIdx.x < 32) {
      // The lowest segment, then the lowest of its bins, that holds something and has less than `target` above it. Lane 0
      // has the highest.
      const int lane = threadIdx.x;
      uint64_t weight = lane < CLUSTER ? peer_u64(&s.posted[2], CLUSTER - 1 - lane) : 0, before = weight;
      for (int d = 1; d < 32; d *= 2) {
        const uint64_t v = __shfl_up_sync(~0u, before, d);
        if (lane >= d) before += v;
      }
      before += above - weight;
      const uint32_t fitting = __ballot_sync(~0u, weight > 0 && (double)before < target);
      const int last = 31 - __clz(fitting), segment = CLUSTER - 1 - last;
      const uint64_t start = __shfl_sync(~0u, before, last);
      constexpr int PER_LANE = SEGMENT / 32;
      uint64_t bins[PER_LANE];
      weight = 0;
#pragma unroll
      for (int j = 0; j < PER_LANE; j++) bins[j] = peer_u64(&s.totals[SEGMENT - 1 - PER_LANE * lane - j], segment), weight += bins[j];
      before = weight;
      for (int d = 1; d < 32; d *= 2) {
        const uint64_t v = __shfl_up_sync(~0u, before, d);
        if (lane >= d) before += v;
      }
      before += start - weight;
      int found = -1;
      uint64_t found_above = 0;
#pragma unroll
      for (int j = 0; j < PER_LANE; j++) {
        if (bins[j] > 0 && (double)before < target) found = SEGMENT - 1 - PER_LANE * lane - j, found_above = before;
        before += bins[j];
      }
      const int holder = 31 - __clz(__ballot_sync(~0u, found >= 0));
      if (lane == holder) s.found_digit = segment * SEGMENT + found, s.found_above = found_above;
    }
    __syncthreads();
    prefix = prefix << bits | s.found_digit, above = s.found_above;
  }
  return prefix;
}

DEVICE uint64_t keyed(float value, int token) { return (uint64_t)order(value) << 32 | ~(uint32_t)token; }  // of equal values the first

DEVICE float penalized(float v, uint32_t history, float repetition, float presence, float frequency) {
  const int count = history & 0x7FFFFFFF;
  if (history) v = v > 0.f ? __fdiv_rn(v, repetition) : __fmul_rn(v, repetition);
  v = __fsub_rn(v, __fmul_rn(frequency, (float)count));
  return __fsub_rn(v, __fmul_rn(presence, count > 0 ? 1.f : 0.f));
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) choose_tokens(const ChooseArgs a) {
  extern __shared__ float values[];
  __shared__ Shared s;
  const int line = blockIdx.x / CLUSTER, first = cluster_rank() * a.slice, count = max(0, min(a.slice, a.vocab - first));
  const bool speaks = threadIdx.x == 0 && cluster_rank() == 0;
  if (threadIdx.x == 0) s.best_drawn = 0x80000000;
  wait_for_previous_kernel();
  allow_next_kernel();
  uint64_t best = 0;
  const float* logits = a.logits + line * a.stride + first;
#pragma unroll 8
  for (int i = threadIdx.x; i < count; i += THREADS) {
    const float v = logits[i];
    values[i] = v;
    const uint64_t key = keyed(v, first + i);
    best = key > best ? key : best;
  }
  const int64_t row = a.rows[line], position = a.positions[line];
  const bool verifies = line < a.verified;
  const int sequence = line / a.query_len, index = verifies ? line % a.query_len : 0;
  const int64_t* drafts = a.drafts + sequence * a.drafts_stride;
  if (!a.drafting) {
    const float repetition = a.repetition[row], presence = a.presence[row], frequency = a.frequency[row];
    const bool penalizes = repetition != 1.f || presence != 0.f || frequency != 0.f, masked = a.masked[row];
    const int num_edits = a.num_edits[row];
    if (penalizes || masked || num_edits) {
      for (int i = threadIdx.x; i < count; i += THREADS) {
        const int token = first + i;
        float v = values[i];
        if (penalizes) {
          uint32_t history = a.history[row * a.vocab + token];
          for (int j = 0; j < index; j++) history += drafts[j] == token;
          v = penalized(v, history, repetition, presence, frequency);
        }
        if (masked && !(a.masks[row * a.words + token / 32] >> token % 32 & 1)) v = -INFINITY_F;
        values[i] = v;
      }
      __syncthreads();
      for (int e = threadIdx.x; e < num_edits; e += THREADS) {
        const int64_t at = row * a.max_edits + e;
        const int i = a.edit_tokens[at] - first;
        if (i >= 0 && i < count && position < a.edit_until[at]) atomicAdd(&values[i], a.edit_values[at]);
      }
      __syncthreads();
      best = 0;
      for (int i = threadIdx.x; i < count; i += THREADS) best = join<false>(best, keyed(values[i], first + i));
    }
  }
  best = over_cluster<false>(s, best, 0);
  const float largest = (uint32_t)(best >> 32) == ~0u ? INFINITY_F : disorder((uint32_t)(best >> 32));
  const bool finite = fabsf(largest) < INFINITY_F;
  const float temperature = a.temperature[row];
  if (temperature == 0.f || !finite) {
    if (speaks) a.tokens[line] = finite ? (int64_t)~(uint32_t)best : a.drafting ? 0 : -1;
    return cluster_sync();  // nobody leaves while another reads here
  }

  const float least = a.drafting ? -INFINITY_F : logf(a.min_p[row]);
  for (int i = threadIdx.x; i < count; i += THREADS) {
    const float scaled = __fdiv_rn(values[i] - largest, temperature);
    values[i] = scaled < least ? -INFINITY_F : scaled;
  }
  float threshold = -INFINITY_F;
  if (!a.drafting) {
    const int k = a.top_k[row];
    const double p = a.top_p[row];
    const bool by_count = k < a.vocab, by_mass = p < 1e300;
    uint32_t border = 0;
    if (by_count) border = select<false>(s, values, count, (double)k);
    if (by_mass) {
      uint64_t kept = 0;
      for (int i = threadIdx.x; i < count; i += THREADS) {
        if (order(values[i]) >= border) kept += mass(values[i]);
      }
      kept = over_cluster<true>(s, kept, 1);
      border = max(border, select<true>(s, values, count, p * (double)kept));
    }
    if (by_count || by_mass) threshold = disorder(border);
  }

  uint64_t seed = (uint64_t)a.seeds[row];
  int64_t draft = -1;
  if (a.probs && (a.drafting || (verifies && index < a.num_drafts[sequence]))) {
    float* q = a.probs + row * a.probs_row_stride + index * a.probs_stride;
    uint64_t weight = 0;
    for (int i = threadIdx.x; i < count; i += THREADS) {
      if (values[i] >= threshold) weight += (uint64_t)(expf(values[i]) * WEIGHT_ONE);
    }
    const float total = (float)over_cluster<true>(s, weight, 4) / WEIGHT_ONE;
    const auto probability = [&](int i) { return values[i] >= threshold ? __fdiv_rn(expf(values[i]), total) : 0.f; };
    if (a.drafting) {
      for (int i = threadIdx.x; i < count; i += THREADS) q[first + i] = probability(i);
      seed = other_seed(seed, DRAFT);
    } else {
      draft = drafts[index];
      const int at = (int)draft - first;
      const uint64_t mine = at >= 0 && at < count ? __float_as_uint(probability(at)) : 0;
      const float p_draft = __uint_as_float((uint32_t)over_cluster<false>(s, mine, 5));
      const double drawn = uniform(noise_bits(noise_key(other_seed(seed, ACCEPT), position), 0));
      if (drawn * (double)q[draft] < (double)p_draft) {
        if (speaks) a.tokens[line] = draft;
        return cluster_sync();
      }
      for (int i = threadIdx.x; i < count; i += THREADS) {
        const float rest = probability(i) - q[first + i];
        values[i] = rest > 0.f ? logf(rest) : -INFINITY_F;
      }
      threshold = -INFINITY_F;
      seed = other_seed(seed, RESIDUAL);
    }
  }

  const uint64_t key = noise_key(seed, position);
  uint64_t drawn = 0;
  float own = -INFINITY_F;
  for (int i = threadIdx.x; i < count; i += THREADS) {
    const float scaled = values[i];
    if (scaled < threshold || scaled == -INFINITY_F) continue;
    const uint64_t bits = noise_bits(key, first + i);
    const float known = fmaxf(own, disorder((uint32_t)*(volatile int*)&s.best_drawn ^ 0x80000000u));
    if (scaled + fast_noise(bits) < known - MARGIN) continue;
    const float score = scaled + exact_noise(bits);
    drawn = join<false>(drawn, keyed(score, first + i));
    if (score > own) own = score, atomicMax(&s.best_drawn, (int)(order(score) ^ 0x80000000u));
  }
  drawn = over_cluster<false>(s, drawn, 3);
  if (speaks) a.tokens[line] = drawn ? (int64_t)~(uint32_t)drawn : draft;  // no residual: p is q but for rounding
  cluster_sync();
}
