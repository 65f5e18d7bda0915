// MLA decode attention on the BF16 latent cache: the same contract, work list and combine as fp8.cu. sm_90a, persistent.
//
// Four warpgroups:
//   WG0  warp 0 fetches pages by TMA; warp 1 clears the tail of a sequence's last page; warp 2 fetches the next query
//   WG1  S = Q K^T for one page of 64 tokens, row maximum, exponentials, P as bf16 to shared memory
//   WG2, WG3  O = P V, 256 latent dims each, accumulated in place: the BF16 tensor core accumulates in FP32. V is the K
//        tile read with the other major order, so no copy exists.
// The reference exponent R of O and of the row sums lags behind the running maximum (it moves on rises of more than
// 2^HEADROOM): P is bf16 and its exponent range holds 2^HEADROOM with ease, so O is practically never rescaled.
#include "mla_decode/decode.cuh"

#ifndef QK_REGS
#define QK_REGS 152
#endif
#ifndef PV_REGS
#define PV_REGS 168
#endif
#ifndef HEADROOM
#define HEADROOM 60
#endif
static_assert(24 + QK_REGS + 2 * PV_REGS <= 512, "more registers than the SM has");

// Shared memory, byte offsets. A page: nine chunks of 64 dims (eight of content, one of rope), each [64 tokens][128 B],
// SWIZZLE_128B. Q: the same nine chunks with 64 rows. P: [64 rows][64 tokens], one chunk.
constexpr int STAGES = 2, CHUNK = PAGE * 128, CHUNKS = DIM / 64, STAGE_BYTES = (CHUNKS + 1) * CHUNK;
constexpr int O_Q = STAGES * STAGE_BYTES, O_P = O_Q + STAGE_BYTES, O_ALPHA = O_P + CHUNK;
constexpr int O_FLAG = O_ALPHA + ROWS * 4;  // [4] does any row of this warp change R
constexpr int O_INVL = O_FLAG + 16;         // [64] 1 / l, 0 for rows without a visible token
constexpr int O_BAR = O_INVL + ROWS * 4;
constexpr int SMEM_BYTES = O_BAR + 8 * (5 * STAGES + 6);
extern "C" __device__ int mla_decode_bf16_smem = SMEM_BYTES;
static_assert(SMEM_BYTES <= 232448, "shared memory of a Hopper SM");

struct Smem {
  uint32_t base;
  DEVICE uint32_t bar(int i) const { return base + O_BAR + 8 * i; }
  DEVICE uint32_t full(int b) const { return bar(b); }                  // page landed
  DEVICE uint32_t clean(int b) const { return bar(STAGES + b); }        // its tail cleared
  DEVICE uint32_t rope_empty(int b) const { return bar(2 * STAGES + b); }  // QK has read the page
  DEVICE uint32_t empty(int b, int half) const { return bar((3 + half) * STAGES + b); }  // PV has read 256 of its dims
  DEVICE uint32_t p_full() const { return bar(5 * STAGES); }       // P and alpha of the page written
  DEVICE uint32_t p_empty() const { return bar(5 * STAGES + 1); }  // both PV warpgroups are done with them
  DEVICE uint32_t sums_full() const { return bar(5 * STAGES + 2); }   // 1 / l of the tile written
  DEVICE uint32_t sums_empty() const { return bar(5 * STAGES + 3); }  // both PV warpgroups have read it
  DEVICE uint32_t q_full() const { return bar(5 * STAGES + 4); }      // query of a tile landed
  DEVICE uint32_t q_empty() const { return bar(5 * STAGES + 5); }     // QK has read it for the last time
};

// content map {64 bf16, 64 tokens, 8 chunks, pages}, rope map {64 bf16, 64 tokens, pages}.
DEVICE void produce(const DecodeArgs& a, Smem sm, int lane) {
  prefetch_map(&a.content);
  prefetch_map(&a.rope);
  const Range range(a);
  int n = 0;
  for (int piece = range.first; piece < range.last; piece++) {
    const Tile t(a, piece, range.rank);
    PageReader reader(a, t, lane);
    for (int i = 0; i < reader.pages; i++, n++) {
      const int b = n % STAGES, parity = ((n / STAGES) & 1) ^ 1, page = reader.get(a, i, lane);
      const uint32_t dst = sm.base + b * STAGE_BYTES, bar = sm.full(b);
      // Each part of a stage is refilled as soon as its last reader is done.
      mbar_wait(sm.rope_empty(b), parity);
      if (lane == 0) {
        mbar_expect_tx(bar, STAGE_BYTES);
        tma_3d(dst + CHUNKS * CHUNK, &a.rope, bar, 0, 0, page);
      }
#pragma unroll
      for (int half = 0; half < 2; half++) {
        mbar_wait(sm.empty(b, half), parity);
        if (lane == 0)
#pragma unroll
          for (int c = 0; c < CHUNKS / 2; c++)
            tma_4d(dst + (half * CHUNKS / 2 + c) * CHUNK, &a.content, bar, 0, 0, half * CHUNKS / 2 + c, page);
      }
      __syncwarp();
    }
  }
}

// Tokens past the length may hold NaN; as V they must be 0, since 0 * NaN would be NaN.
DEVICE void clear_tails(const DecodeArgs& a, Smem sm, int lane) {
  const Range range(a);
  int n = 0;
  for (int piece = range.first; piece < range.last; piece++) {
    const Tile t(a, piece, range.rank);
    const int pages = t.pages();
    for (int i = 0; i < pages; i++, n++) {
      const int b = n % STAGES, valid = t.len - (2 * t.begin + i) * PAGE;
      mbar_wait(sm.full(b), (n / STAGES) & 1);
      if (valid < PAGE) {
        for (int row = valid + (lane >> 3); row < PAGE; row += 4)
#pragma unroll
          for (int c = 0; c < CHUNKS; c++)
            sts_u32x4(sm.base + b * STAGE_BYTES + c * CHUNK + row * 128 + (lane & 7) * 16, make_uint4(0, 0, 0, 0));
        fence_async_proxy();  // wgmma reads it, TMA writes there next
      }
      __syncwarp();
      if (lane == 0) mbar_arrive(sm.clean(b));
    }
  }
}

// The query of each tile, as soon as QK has read the last one's for the last time. content map {64 bf16,
// rows of a sequence, 8 chunks, sequences}, rope map {64 bf16, rows, sequences}: rows past the sequence arrive as zeros.
DEVICE void fetch_query(const DecodeArgs& a, Smem sm, int lane) {
  prefetch_map(&a.q_content);
  prefetch_map(&a.q_rope);
  const Range range(a);
  int tiles = 0;
  for (int piece = range.first; piece < range.last; piece++) {
    const Tile t(a, piece, range.rank);
    if (t.blocks == 0) continue;
    mbar_wait(sm.q_empty(), (tiles++ & 1) ^ 1);
    if (lane == 0) {
      mbar_expect_tx(sm.q_full(), STAGE_BYTES);
#pragma unroll
      for (int c = 0; c < CHUNKS; c++) tma_4d(sm.base + O_Q + c * CHUNK, &a.q_content, sm.q_full(), 0, t.first_row, c, t.seq);
      tma_3d(sm.base + O_Q + CHUNKS * CHUNK, &a.q_rope, sm.q_full(), 0, t.first_row, t.seq);
    }
    __syncwarp();
  }
}

// Thread (w, g, q) owns rows r0 = 16w + g and r0 + 8; S[4i..4i+3] = tokens 8i+2q, 8i+2q+1 of row r0, then of row r0 + 8.
DEVICE void qk_softmax(const DecodeArgs& a, Smem sm, int w, int lane) {
  const int g = lane >> 2, q = lane & 3, r0 = 16 * w + g;
  const uint64_t dq = desc_sw128(sm.base + O_Q);
  const float c = a.softmax_scale_log2;
  const Range range(a);
  int n = 0, tiles = 0, queries = 0;
#pragma unroll 1
  for (int piece = range.first; piece < range.last; piece++) {
    const Tile t(a, piece, range.rank);
    const int pages = t.pages(), common = t.common_limit(a);
    float R0 = NEG, R1 = NEG, l0 = 0.f, l1 = 0.f;
    if (pages > 0) mbar_wait(sm.q_full(), queries++ & 1);
#pragma unroll 1
    for (int i = 0; i < pages; i++, n++) {
      const int b = n & 1;
      float S[32];
      mbar_wait(sm.full(b), (n >> 1) & 1);
      {
        const uint64_t dk = desc_sw128(sm.base + b * STAGE_BYTES);
        wgmma_fence();
        wgmma_bf16_ss_n64_zero(S, dq, dk);
#pragma unroll
        for (int k = 1; k < 4 * (CHUNKS + 1); k++)
          wgmma_bf16_ss_n64(S, dq + (k >> 2) * (CHUNK >> 4) + (k & 3) * 2, dk + (k >> 2) * (CHUNK >> 4) + (k & 3) * 2);
        wgmma_commit();
      }
      mbar_wait(sm.p_empty(), (n & 1) ^ 1);
      wgmma_wait<0>();
      pin(S);
      if (lane == 0) mbar_arrive(sm.rope_empty(b));
      if (lane == 0 && i + 1 == pages) mbar_arrive(sm.q_empty());
      const int base = (2 * t.begin + i) * PAGE;
      if (base + PAGE > common) {
        const int limit0 = t.limit(a, r0) - base - 2 * q, limit1 = t.limit(a, r0 + 8) - base - 2 * q;
#pragma unroll
        for (int k = 0; k < 8; k++) {
          if (8 * k >= limit0) S[4 * k] = -INFINITY_F;
          if (8 * k + 1 >= limit0) S[4 * k + 1] = -INFINITY_F;
          if (8 * k >= limit1) S[4 * k + 2] = -INFINITY_F;
          if (8 * k + 1 >= limit1) S[4 * k + 3] = -INFINITY_F;
        }
      }
      float m0a = NEG, m0b = NEG, m1a = NEG, m1b = NEG;
#pragma unroll
      for (int k = 0; k < 8; k++) {
        m0a = fmaxf(m0a, S[4 * k]), m0b = fmaxf(m0b, S[4 * k + 1]);
        m1a = fmaxf(m1a, S[4 * k + 2]), m1b = fmaxf(m1b, S[4 * k + 3]);
      }
      const float m0 = fmaxf(quad_max(fmaxf(m0a, m0b)) * c, NEG), m1 = fmaxf(quad_max(fmaxf(m1a, m1b)) * c, NEG);
      const bool up0 = m0 - R0 > float(HEADROOM), up1 = m1 - R1 > float(HEADROOM);
      const float now0 = up0 ? m0 : R0, now1 = up1 ? m1 : R1;
      const bool any_up = __any_sync(~0u, up0 || up1);
      if (any_up) {
        const float alpha0 = ex2_mufu(R0 - now0), alpha1 = ex2_mufu(R1 - now1);
        l0 *= alpha0, l1 *= alpha1;
        if (q == 0) sts_f32(sm.base + O_ALPHA + r0 * 4, alpha0), sts_f32(sm.base + O_ALPHA + r0 * 4 + 32, alpha1);
      }
      R0 = now0, R1 = now1;
      if (lane == 0) sts32(sm.base + O_FLAG + w * 4, any_up);

      // P row-major with SWIZZLE_128B: a pair of tokens is one 32-bit store.
      const uint32_t p = sm.base + O_P + r0 * 128 + 4 * q;
      float t0a = 0.f, t0b = 0.f, t1a = 0.f, t1b = 0.f;
#pragma unroll
      for (int k = 0; k < 8; k++) {
        const float e0 = ex2_mufu(fmaf(S[4 * k], c, -R0)), e1 = ex2_mufu(fmaf(S[4 * k + 1], c, -R0));
        const float e2 = ex2_mufu(fmaf(S[4 * k + 2], c, -R1)), e3 = ex2_mufu(fmaf(S[4 * k + 3], c, -R1));
        const uint32_t unit = (k ^ g) << 4;
        sts32(p + unit, pack_bf16(e0, e1));
        sts32(p + 8 * 128 + unit, pack_bf16(e2, e3));
        t0a += e0, t0b += e1, t1a += e2, t1b += e3;
      }
      fence_async_proxy();
      __syncwarp();
      if (lane == 0) mbar_arrive(sm.p_full());
      l0 += t0a + t0b, l1 += t1a + t1b;
    }
#pragma unroll
    for (int d = 1; d <= 2; d *= 2) l0 += __shfl_xor_sync(~0u, l0, d), l1 += __shfl_xor_sync(~0u, l1, d);
    mbar_wait(sm.sums_empty(), (tiles++ & 1) ^ 1);
    if (q == 0) {
      const bool any0 = t.row_counts(a, r0) && l0 > 0.f, any1 = t.row_counts(a, r0 + 8) && l1 > 0.f;
      sts_f32(sm.base + O_INVL + r0 * 4, any0 ? 1.f / l0 : 0.f), sts_f32(sm.base + O_INVL + r0 * 4 + 32, any1 ? 1.f / l1 : 0.f);
      t.store_lse(a, r0, range.rank, any0 ? LN2 * (R0 + log2f(l0)) : -INFINITY_F);
      t.store_lse(a, r0 + 8, range.rank, any1 ? LN2 * (R1 + log2f(l1)) : -INFINITY_F);
    }
    __syncwarp();
    if (lane == 0) mbar_arrive(sm.sums_full());
  }
}

// V as MN-major operand B, [64 tokens][256 dims]: chunks of 64 dims are CHUNK apart, groups of 8 tokens 1024 B.
DEVICE uint64_t desc_v(uint32_t addr) {
  return (uint64_t)((addr & 0x3FFFF) >> 4) | ((uint64_t)(CHUNK >> 4) << 16) | ((uint64_t)(1024 >> 4) << 32) | (1ull << 62);
}

// Writes rows r0 and r0 + 8 of this thread. Selects, not products: a row that does not count may hold NaN.
template <class T> DEVICE void write_rows(const float (&O)[2][64], T* out, float inv0, float inv1, int r0, int rows) {
#pragma unroll
  for (int h = 0; h < 2; h++)
#pragma unroll
    for (int i = 0; i < 16; i++) {
      const float* o = O[h] + 4 * i;
      T* at = out + h * 128 + 8 * i;
      if (r0 < rows) store_pair(at, inv0 > 0.f ? o[0] * inv0 : 0.f, inv0 > 0.f ? o[1] * inv0 : 0.f);
      if (r0 + 8 < rows) store_pair(at + 8 * DIM, inv1 > 0.f ? o[2] * inv1 : 0.f, inv1 > 0.f ? o[3] * inv1 : 0.f);
    }
}

// Thread (w, g, q) owns rows r0 = 16w + g and r0 + 8; O[h][4i..4i+3] = dims 128h + 8i+2q, 8i+2q+1 of row r0, then of
// row r0 + 8.
DEVICE void pv(const DecodeArgs& a, Smem sm, int half, int w, int lane) {
  const int r0 = 16 * w + (lane >> 2), q = lane & 3;
  const Range range(a);
  const uint64_t dp = desc_sw128(sm.base + O_P);
  int n = 0, tiles = 0;
#pragma unroll 1
  for (int piece = range.first; piece < range.last; piece++) {
    float O[2][64];
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
      for (int i = 0; i < 64; i++) O[h][i] = 0.f;
    int left = Tile(a, piece, range.rank).pages();
#pragma unroll 1
    for (; left > 0; left--, n++) {
      const int b = n & 1;
      mbar_wait(sm.clean(b), (n >> 1) & 1);
      mbar_wait(sm.p_full(), n & 1);
      if (lds_u32(sm.base + O_FLAG + w * 4)) {
        const float alpha0 = lds_f32(sm.base + O_ALPHA + r0 * 4), alpha1 = lds_f32(sm.base + O_ALPHA + r0 * 4 + 32);
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
          for (int i = 0; i < 16; i++)
            O[h][4 * i] *= alpha0, O[h][4 * i + 1] *= alpha0, O[h][4 * i + 2] *= alpha1, O[h][4 * i + 3] *= alpha1;
      }
      const uint64_t dv = desc_v(sm.base + b * STAGE_BYTES + half * (CHUNKS / 2) * CHUNK);
      pin(O[0]), pin(O[1]);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; k++)
#pragma unroll
        for (int h = 0; h < 2; h++) wgmma_bf16_ss_n128_tb(O[h], dp + k * 2, dv + k * (16 * 128 >> 4) + h * (2 * CHUNK >> 4));
      wgmma_commit();
      wgmma_wait<0>();
      pin(O[0]), pin(O[1]);
      __syncwarp();
      if (lane == 0) mbar_arrive(sm.empty(b, half)), mbar_arrive(sm.p_empty());
    }
    mbar_wait(sm.sums_full(), tiles++ & 1);
    const float inv0 = lds_f32(sm.base + O_INVL + r0 * 4), inv1 = lds_f32(sm.base + O_INVL + r0 * 4 + 32);
    __syncwarp();
    if (lane == 0) mbar_arrive(sm.sums_empty());
    const Tile t(a, piece, range.rank);
    const int dim = half * 256 + 2 * q, rows = t.rows_written();
    if (t.partial())
      write_rows(O, a.partial_out + t.partial_row(a, r0, range.rank) * DIM + dim, inv0, inv1, r0, rows);
    else if (a.out_fp32)
      write_rows(O, (float*)a.out + t.global_row(a, r0) * DIM + dim, inv0, inv1, r0, rows);
    else
      write_rows(O, (bf16*)a.out + t.global_row(a, r0) * DIM + dim, inv0, inv1, r0, rows);
  }
}

extern "C" __global__ void __launch_bounds__(512, 1) mla_decode_bf16(const __grid_constant__ DecodeArgs a) {
  extern __shared__ __align__(1024) uint8_t smem[];
  const Smem sm{smem_addr(smem)};
  const int wg = __shfl_sync(~0u, threadIdx.x >> 7, 0), w = __shfl_sync(~0u, (threadIdx.x >> 5) & 3, 0), lane = threadIdx.x & 31;
  if (threadIdx.x == 0) {
    for (int b = 0; b < STAGES; b++) {
      mbar_init(sm.full(b), 1), mbar_init(sm.clean(b), 1), mbar_init(sm.rope_empty(b), 4);
      mbar_init(sm.empty(b, 0), 4), mbar_init(sm.empty(b, 1), 4);
    }
    mbar_init(sm.p_full(), 4), mbar_init(sm.p_empty(), 8), mbar_init(sm.sums_full(), 4), mbar_init(sm.sums_empty(), 8);
    mbar_init(sm.q_full(), 1), mbar_init(sm.q_empty(), 4);
    mbar_init_fence();
  }
  __syncthreads();
  allow_next_kernel();
  wait_for_previous_kernel();
  if (wg == 0) {
    setmaxnreg_dec<24>();
    if (w == 0) produce(a, sm, lane);
    if (w == 1) clear_tails(a, sm, lane);
    if (w == 2) fetch_query(a, sm, lane);
  } else if (wg == 1) {
    setmaxnreg_inc<QK_REGS>();
    qk_softmax(a, sm, w, lane);
  } else {
    setmaxnreg_inc<PV_REGS>();
    pv(a, sm, wg - 2, w, lane);
  }
}
