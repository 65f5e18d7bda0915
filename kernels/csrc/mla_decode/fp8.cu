// MLA decode attention on the FP8 latent cache (Algorithm 1, Eq. 12 and 13 of the paper; see kernels/README.md for where
// and why this departs from its Appendix E and 3.3.3). sm_90a, persistent: one CTA an SM walks its pieces of the work list.
//
// Four warpgroups:
//   WG0  warp 0 fetches pages by TMA; warp 1 makes per-token tables and clears the tail of a sequence's last block;
//        warp 2 keeps each row's reference exponent and sum; warp 3 fetches the next tile's query
//   WG1  S = Q K^T for 128 tokens (RoPE last), row maximum, exponentials, P as e4m3 to shared memory
//   WG2, WG3  O^T = V^T P^T, 256 latent dims each. V^T comes from the K tile by ldmatrix.trans and byte splits: no
//        transposed copy exists. Each 64-dim slab accumulates 128 tokens in T, then O += beta * T in FP32 registers,
//        because the FP8 tensor core keeps 13 bits of its accumulator.
#include "mla_decode/decode.cuh"

// ---- knobs ---------------------------------------------------------------------------------------
#ifndef TILE_N
#define TILE_N 64  // rows of a tile that may exist: 16, 32 or 64. QK computes 64, softmax and PV only these
#endif
#ifndef PARTS
#define PARTS (TILE_N == 64 ? 2 : 4)  // of a block, refilled one by one: 2 or 4
#endif
#ifndef QK_REGS
#define QK_REGS 104  // registers of the QK + softmax warpgroup
#endif
#ifndef PV_REGS
#define PV_REGS 192  // registers of each PV warpgroup; 24 + QK_REGS + 2 * PV_REGS must be <= 512
#endif
#ifndef AHEAD
#define AHEAD 4  // table reads issued ahead of their use: 2, 4 or 8
#endif
#ifndef HEADROOM
#define HEADROOM 60  // how far (log2) a block may rise above R before O is rescaled; 0 exercises that path often
#endif
#ifndef PROMOTE_EVERY_BLOCK
#define PROMOTE_EVERY_BLOCK 1  // 0: one FP8 accumulator over the whole context, to show what that loses
#endif
static_assert(24 + QK_REGS + 2 * PV_REGS <= 512, "more registers than the SM has");
static_assert((TILE_N == 16 || TILE_N == 32 || TILE_N == 64) && (PARTS == 2 || PARTS == 4), "unsupported knobs");

// ---- sizes ---------------------------------------------------------------------------------------
constexpr int STAGES = 2;  // blocks in shared memory
// A block arrives and is freed in parts of one or two chunks of 128 dims, so that the next one's first part is on its way
// while PV still reads the others. RoPE and scales are free as soon as QK has read them.
constexpr int PART_CHUNKS = 4 / PARTS;
constexpr int PART_BYTES = PART_CHUNKS * PAGE * 128, ROPE_BYTES = PAGE * 2 * ROPE + PAGE * 4;  // of a page
// PV works in slabs of 64 dims, half a chunk. Warpgroup `half` has its half of chunk s in slab s, or, if two chunks are a
// part, chunks `half` and half + 2.
constexpr bool SHARED_CHUNKS = PART_CHUNKS == 1;
DEVICE constexpr int slab_dim(int s) { return SHARED_CHUNKS ? s * 128 : (s >> 1) * 256 + (s & 1) * 64; }  // past slab 0's
constexpr int SLAB = TILE_N / 2;  // accumulators a thread has of a slab
// Added to every base-2 logit, so that it is positive and the order of its bits its own: half as many instructions find the
// largest. It costs the logit what lies below 2^-15.
constexpr float BIAS = 768.f;
constexpr float LOG2_448 = 8.807354922f;  // 448 is the largest e4m3

// Shared memory, byte offsets. Content of a block: four chunks of 128 dims, each [128 tokens][128 B], SWIZZLE_128B
// (16-byte unit index XOR token & 7). Rope: [128 tokens][128 B], same swizzle. Q alike. P: [64 rows][128 B], same.
constexpr int CHUNK = BLOCK * 128, K_ROPE = 4 * CHUNK, STAGE_BYTES = K_ROPE + CHUNK;
constexpr int O_Q = STAGES * STAGE_BYTES, O_QR = O_Q + ROWS * DIM, O_P = O_QR + ROWS * 128;
constexpr int O_INV = O_P + 2 * ROWS * BLOCK;        // [4][8 rows][128] 1/s of a block: three digits in e4m3, zeros; as P
constexpr int O_SCALE = O_INV + 4 * 8 * BLOCK;       // [page][64] s_k as fetched
constexpr int O_TAB = O_SCALE + STAGES * BLOCK * 4;  // [page][32 token pairs] {s, s', log2 s, log2 s'}
constexpr int O_UNIT = O_TAB + STAGES * BLOCK * 8;   // [4] what 1 of the first digit stands for
constexpr int O_MAX = O_UNIT + 16;                   // [2][64] r: row maximum of the block, log2
constexpr int O_SUM = O_MAX + 2 * ROWS * 4;          // [2][64] row sums of the block, in its unit
constexpr int O_BETA = O_SUM + 2 * ROWS * 4;         // [2][4][8] bf16 pairs: rows 8n+2q, 8n+2q+1 at word 8q+n
constexpr int O_ALPHA = O_BETA + 2 * ROWS * 2;       // [2][64] f32
constexpr int O_FLAG = O_ALPHA + 2 * ROWS * 4;       // [2] does any row of the block change R
constexpr int O_INVL = O_FLAG + 16;                  // [64] 1 / l, 0 for rows without a visible token
constexpr int O_ROW = O_INVL + ROWS * 4;             // [2][64] {q_scale * softmax scale * log2(e), visible tokens}
constexpr int O_TILE = O_ROW + 2 * ROWS * 8;         // [2] {first token, blocks, tokens every live row sees}
constexpr int O_BAR = O_TILE + 2 * 16;
constexpr int SMEM_BYTES = O_BAR + 8 * (STAGES * (2 * PARTS + 7) + 4);
static_assert(SMEM_BYTES <= 232448, "shared memory of a Hopper SM");
extern "C" __device__ int mla_decode_fp8_smem = SMEM_BYTES;  // the launcher reads it

struct Smem {
  uint32_t base;
  DEVICE uint32_t bar(int i) const { return base + O_BAR + 8 * i; }
  DEVICE uint32_t pair(int i, int b) const { return bar(i * STAGES + b); }
  DEVICE uint32_t landed(int b, int part) const { return pair(part, b); }         // part of a block arrived
  DEVICE uint32_t freed(int b, int part) const { return pair(PARTS + part, b); }  // both PV warpgroups hold its V
  DEVICE uint32_t table(int b) const { return pair(2 * PARTS, b); }        // scale tables ready, tail cleared
  DEVICE uint32_t maxima(int b) const { return pair(2 * PARTS + 1, b); }   // row maxima of the block written
  DEVICE uint32_t factors(int b) const { return pair(2 * PARTS + 2, b); }  // alpha and beta of the block written
  DEVICE uint32_t p_full(int b) const { return pair(2 * PARTS + 3, b); }   // P of the block written
  DEVICE uint32_t p_empty(int b) const { return pair(2 * PARTS + 4, b); }  // both PV warpgroups are done with all of these
  DEVICE uint32_t rope_freed(int b) const { return pair(2 * PARTS + 5, b); }  // QK has read RoPE and tables
  DEVICE uint32_t sums(int b) const { return pair(2 * PARTS + 6, b); }     // row sums of the block written
  DEVICE uint32_t q_full() const { return pair(2 * PARTS + 7, 0); }        // query and row constants of a tile are there
  DEVICE uint32_t q_empty() const { return pair(2 * PARTS + 7, 1); }       // QK has read the query for the last time
  DEVICE uint32_t inverse_full() const { return pair(2 * PARTS + 8, 0); }  // 1 / l of the tile written
  DEVICE uint32_t inverse_empty() const { return pair(2 * PARTS + 8, 1); } // both PV warpgroups have read it
};

// ---- pairs ---------------------------------------------------------------------------------------------
// Two tiles of a sequence are a cluster: each of the two CTAs fetches half of every block, into both.
DEVICE void fetch_3d(uint32_t dst, const void* map, uint32_t bar, int x, int y, int z) {
  PAIR ? tma_3d_both(dst, map, bar, x, y, z) : tma_3d(dst, map, bar, x, y, z);
}
DEVICE void fetch_4d(uint32_t dst, const void* map, uint32_t bar, int x, int y, int z, int t) {
  PAIR ? tma_4d_both(dst, map, bar, x, y, z, t) : tma_4d(dst, map, bar, x, y, z, t);
}
DEVICE void fetch_bytes(uint32_t dst, const void* src, int bytes, uint32_t bar) {
  PAIR ? bulk_copy_both(dst, src, bytes, bar) : bulk_copy(dst, src, bytes, bar);
}

// A block's part or RoPE has been read by this warp: its copies may be overwritten. The CTAs of a pair hear it from both.
DEVICE void free_rope(uint32_t bar, int lane) {
  if (PAIR) {
    if (lane < 2) mbar_arrive_at(bar, lane);
  } else if (lane == 0) {
    mbar_arrive(bar);
  }
}
DEVICE void free_part(uint32_t bar, int lane, uint32_t read, uint32_t read_too) {
  if (PAIR)
    mbar_arrive_at_after(lane < 2, bar, lane & 1, read, read_too);
  else
    mbar_arrive_after(lane == 0, bar, read, read_too);
}

// ---- WG0 warp 0: TMA producer ----------------------------------------------------------------------
// content map {128 B, 64 tokens, 4 chunks, pages}, rope map {64 bf16, 64 tokens, pages}.
DEVICE void produce(const DecodeArgs& a, Smem sm, int lane) {
  prefetch_map(&a.content);
  prefetch_map(&a.rope);
  const Range range(a);
  const auto mine = [&](int i) { return !PAIR || i % 2 == range.rank % 2; };
  int n = 0;  // blocks so far
  for (int piece = range.first; piece < range.last; piece++) {
    const Tile t(a, piece, range.rank);
    PageReader reader(a, t, lane);
    for (int j = 0; j < t.blocks; j++, n++) {
      const int b = n & 1, first = reader.get(a, 2 * j, lane), second = reader.get(a, 2 * j + 1, lane);
      const int pages = 2 * j + 1 < reader.pages ? 2 : 1;  // the block's second half may lie past the sequence
      mbar_wait(sm.rope_freed(b), ((n >> 1) & 1) ^ 1);
      if (lane == 0) {
        const uint32_t bar = sm.landed(b, PARTS - 1);
        mbar_expect_tx(bar, pages * ROPE_BYTES);
        for (int half = 0; half < pages; half++) {
          const int page = half ? second : first;
          if (!mine(half)) continue;
          fetch_3d(sm.base + b * STAGE_BYTES + K_ROPE + half * PAGE * 128, &a.rope, bar, 0, 0, page);
          fetch_bytes(sm.base + O_SCALE + (2 * b + half) * PAGE * 4, a.scales + page * a.scale_stride, PAGE * 4, bar);
        }
      }
      __syncwarp();
#pragma unroll
      for (int part = 0; part < PARTS; part++) {
        const uint32_t bar = sm.landed(b, part);
        mbar_wait(sm.freed(b, part), ((n >> 1) & 1) ^ 1);
        if (lane == 0) {
          mbar_expect_tx(bar, pages * PART_BYTES);
          for (int half = 0; half < pages; half++) {
            const uint32_t dst = sm.base + b * STAGE_BYTES + half * PAGE * 128;
#pragma unroll
            for (int c = PART_CHUNKS * part; c < PART_CHUNKS * (part + 1); c++)
              if (mine(c)) fetch_4d(dst + c * CHUNK, &a.content, bar, 0, 0, c, half ? second : first);
          }
        }
        __syncwarp();
      }
    }
  }
}

// ---- WG0 warp 1: per-token tables, off the softmax chain ---------------------------------------------
// Tokens past the length may hold anything, NaN codes and NaN scales included: their scale becomes 1 and their content 0,
// so that P = 0 times V stays 0. (QK may read them before that; their columns of S are replaced before use.)
DEVICE void make_tables(const DecodeArgs& a, Smem sm, int lane) {
  const Range range(a);
  for (int i = 0; i < 4 * 8 * BLOCK; i += 512) sts_u32x4(sm.base + O_INV + i + lane * 16, make_uint4(0, 0, 0, 0));
  int n = 0;
  for (int piece = range.first; piece < range.last; piece++) {
    const Tile t(a, piece, range.rank);
    for (int j = 0; j < t.blocks; j++, n++) {
      const int b = n & 1, valid = t.len - (t.begin + j) * BLOCK;
#pragma unroll
      for (int part = 0; part < PARTS; part++) mbar_wait(sm.landed(b, part), (n >> 1) & 1);
      float x[4];  // 1 / s of the lane's tokens: a pair of either page
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int slot = 2 * b + half, token = half * PAGE + 2 * lane;
        float2 s = lds_f32x2(sm.base + O_SCALE + slot * PAGE * 4 + lane * 8);
        if (token >= valid) s.x = 1.f;
        if (token + 1 >= valid) s.y = 1.f;
        sts_f32x4(sm.base + O_TAB + slot * PAGE * 8 + lane * 16, make_float4(s.x, s.y, lg2(s.x) + BIAS, lg2(s.y) + BIAS));
        x[2 * half] = rcp(s.x), x[2 * half + 1] = rcp(s.y);
      }
      // Digits of 1 / s to the base of 16, in e4m3, for the row sums: the largest of the block is 128 to 256.
      const uint32_t top = __reduce_max_sync(~0u, __float_as_uint(fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3])))) >> 23;
      float up = __uint_as_float((261 - top) << 23);
      if (lane == 0) sts32(sm.base + O_UNIT + (n & 3) * 4, (top - 7) << 23);
      // pair = 8 * unit + 4 * upper + q of a page  ->  half word `upper` of word q of the row's 16-byte unit
      const uint32_t to = sm.base + O_INV + (n & 3) * 8 * BLOCK + (lane & 3) * 4 + ((lane >> 2) & 1) * 2;
#pragma unroll
      for (int digit = 0; digit < 3; digit++, up = 16.f) {
#pragma unroll
        for (int i = 0; i < 4; i++) x[i] *= up;
        const uint32_t codes = pack_e4m3(x[0], x[1], x[2], x[3]), at = to + digit * BLOCK + (((lane >> 3) ^ digit) << 4);
        sts16(at, codes & 0xffff), sts16(at ^ 64, codes >> 16);
        const float4 rounded = unpack_e4m3(codes);
        x[0] -= rounded.x, x[1] -= rounded.y, x[2] -= rounded.z, x[3] -= rounded.w;
      }
      if (valid < BLOCK) {
        for (int row = valid + (lane >> 3); row < BLOCK; row += 4)
#pragma unroll
          for (int c = 0; c < 4; c++)
            sts_u32x4(sm.base + b * STAGE_BYTES + c * CHUNK + row * 128 + (lane & 7) * 16, make_uint4(0, 0, 0, 0));
      }
      fence_async_proxy();  // wgmma reads the digits; TMA writes over the tail next
      __syncwarp();
      if (lane == 0) mbar_arrive(sm.table(b));
    }
  }
}

// ---- WG0 warp 2: reference exponents and sums of the 64 rows, two a lane --------------------------------
// R is only the reference of the FP32 accumulators O and l, so it may lag behind the running maximum: it moves on the
// first block and on rises of more than 2^HEADROOM. beta = 2^(r - R) puts a block into O's units. It is rounded to bf16 so
// that PV can hold all its betas in 8 registers; l uses the same value, so a block's weight is off by at most 2^-9 against
// the others, far below the 2^-4 of e4m3. x is l with exact betas, for the LSE.
DEVICE void track_rows(const DecodeArgs& a, Smem sm, int lane) {
  constexpr int EACH = TILE_N > 32 ? 2 : 1;  // rows a lane
  const Range range(a);
  int n = 0, tiles = 0;
  for (int piece = range.first; piece < range.last; piece++) {
    const Tile t(a, piece, range.rank);
    float R[EACH], l[EACH], x[EACH], beta[EACH];
#pragma unroll
    for (int h = 0; h < EACH; h++) R[h] = NEG, l[h] = 0.f, x[h] = 0.f;
    // Adds block m, whose sums come with PV's last products: after the next block's factors, so that PV need not wait.
    auto add_sums = [&](int m) {
      const int b = m & 1;
      mbar_wait(sm.sums(b), (m >> 1) & 1);
      const float unit = lds_f32(sm.base + O_UNIT + (m & 3) * 4);
#pragma unroll
      for (int h = 0; h < EACH; h++) {
        const float sum = lds_f32(sm.base + O_SUM + b * ROWS * 4 + (lane + 32 * h) * 4) * unit;
        l[h] = fmaf(sum, __uint_as_float((__float_as_uint(beta[h]) + 0x8000u) & 0xffff0000u), l[h]), x[h] = fmaf(sum, beta[h], x[h]);
      }
    };
    for (int j = 0; j < t.blocks; j++, n++) {
      const int b = n & 1;
      mbar_wait(sm.maxima(b), (n >> 1) & 1);
      bool moved = false;
      float alpha[EACH], next[EACH];
#pragma unroll
      for (int h = 0; h < EACH; h++) {
        const int row = lane + 32 * h;
        const float r = lds_f32(sm.base + O_MAX + b * ROWS * 4 + row * 4);
        const bool up = r - R[h] > float(HEADROOM);
        const float now = up ? r : R[h];
        moved |= up && row < TILE_N;
        alpha[h] = ex2_mufu(R[h] - now), next[h] = ex2_mufu(r - now), R[h] = now;
        const uint32_t bits = __float_as_uint(next[h]) + 0x8000u;
        sts16(sm.base + O_BETA + b * ROWS * 2 + ((row & 7) >> 1) * 32 + (row >> 3) * 4 + (row & 1) * 2, bits >> 16);
        sts_f32(sm.base + O_ALPHA + b * ROWS * 4 + row * 4, alpha[h]);
      }
      const bool any = __any_sync(~0u, moved);
      if (lane == 0) sts32(sm.base + O_FLAG + b * 4, any);
      __syncwarp();
      if (lane == 0) mbar_arrive(sm.factors(b));
      if (j) add_sums(n - 1);
#pragma unroll
      for (int h = 0; h < EACH; h++) l[h] *= alpha[h], x[h] *= alpha[h], beta[h] = next[h];
    }
    if (t.blocks) add_sums(n - 1);
    mbar_wait(sm.inverse_empty(), (tiles++ & 1) ^ 1);
#pragma unroll
    for (int h = 0; h < EACH; h++) {
      const int row = lane + 32 * h;
      if (row >= TILE_N || !t.row_counts(a, row)) l[h] = 0.f;
      sts_f32(sm.base + O_INVL + row * 4, l[h] > 0.f ? 1.f / l[h] : 0.f);
    }
    __syncwarp();
    if (lane == 0) mbar_arrive(sm.inverse_full());
#pragma unroll
    for (int h = 0; h < EACH; h++)
      t.store_lse(a, lane + 32 * h, range.rank, l[h] > 0.f ? LN2 * (R[h] - BIAS - LOG2_448 + log2f(x[h])) : -INFINITY_F);
  }
}

// ---- WG0 warp 3: the query of each tile, as soon as QK has read the last one's for the last time -----------
// content map {128 B, rows of a sequence, 4 chunks, sequences}, rope map {64 bf16, rows, sequences}: rows past the
// sequence arrive as zeros.
DEVICE void fetch_query(const DecodeArgs& a, Smem sm, int lane) {
  prefetch_map(&a.q_content);
  prefetch_map(&a.q_rope);
  const Range range(a);
  int tiles = 0;
  auto hand_over = [&](int first_token, int blocks, int common) {
    if (lane == 0) sts_u32x4(sm.base + O_TILE + (tiles & 1) * 16, make_uint4(first_token, blocks, common, 0));
    __syncwarp();
  };
  for (int piece = range.first; piece < range.last; piece++) {
    const Tile t(a, piece, range.rank);
    if (t.blocks == 0) continue;
    const int first = (int)t.global_row(a, 0);
    mbar_wait(sm.q_empty(), (tiles & 1) ^ 1);
    if (lane == 0) {
      mbar_expect_tx(sm.q_full(), ROWS * (DIM + 2 * ROPE));
#pragma unroll
      for (int c = 0; c < 4; c++) tma_4d(sm.base + O_Q + c * ROWS * 128, &a.q_content, sm.q_full(), 0, t.first_row, c, t.seq);
      tma_3d(sm.base + O_QR, &a.q_rope, sm.q_full(), 0, t.first_row, t.seq);
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int r = lane + 32 * h;
      // q is 0 in rows that do not exist; their factor is not, or a masked -inf would become NaN.
      const float c = r < t.rows ? a.q_scale[first + r] * a.softmax_scale_log2 : 1e-30f;
      sts_f32x2(sm.base + O_ROW + (tiles & 1) * ROWS * 8 + r * 8, make_float2(c, __int_as_float(t.limit(a, r))));
    }
    hand_over(t.begin * BLOCK, t.blocks, t.common_limit(a));
    if (lane == 0) mbar_arrive(sm.q_full());
    tiles++;
  }
  mbar_wait(sm.q_empty(), (tiles & 1) ^ 1);
  hand_over(0, 0, 0);  // no more tiles
  if (lane < 2) mbar_arrive(sm.q_full());
}

// ---- WG1: S = Q K^T, softmax, P -> shared memory --------------------------------------------------------
// Thread (w, g, q) = (warp, lane / 4, lane % 4) owns rows r0 = 16w + g and r0 + 8; in 8-token group i its
// accumulators are S[4i+0..1] = row r0, tokens 8i+2q, 8i+2q+1 and S[4i+2..3] = the same tokens of row r0 + 8.
// Of values that are not negative, whose order is that of their bits: one instruction for three.
DEVICE int max3(int m, float a, float b) { return max(max(m, __float_as_int(a)), __float_as_int(b)); }

DEVICE void qk_softmax(const DecodeArgs& a, Smem sm, int w, int lane) {
  const int g = lane >> 2, q = lane & 3, r0 = 16 * w + g;
  const bool live = TILE_N == ROWS || 16 * w < TILE_N;
  const uint64_t dq = desc_sw128(sm.base + O_Q), dqr = desc_sw128(sm.base + O_QR);
  int n = 0;
#pragma unroll 1
  for (int tiles = 0;; tiles++) {
    mbar_wait(sm.q_full(), tiles & 1);
    const uint32_t rows = sm.base + O_ROW + (tiles & 1) * ROWS * 8 + r0 * 8;
    const int4 tile = lds_s32x4(sm.base + O_TILE + (tiles & 1) * 16);
    if (tile.y == 0) break;
    const float c0 = lds_f32(rows), c1 = lds_f32(rows + 8 * 8);
    const int last = tile.x + tile.y * BLOCK;
    float fixed0 = 0.f, fixed1 = 0.f;
#pragma unroll 1
    for (int base = tile.x; base < last; base += BLOCK, n++) {
      const int b = n & 1, parity = (n >> 1) & 1;
      float S[64];
      {
        const uint64_t dk = desc_sw128(sm.base + b * STAGE_BYTES);
        mbar_wait(sm.landed(b, 0), parity);
        wgmma_fence();
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
          if (part) mbar_wait(sm.landed(b, part), parity), wgmma_fence();
#pragma unroll
          for (int k = 0; k < 4 * PART_CHUNKS; k++) {
            const int chunk = PART_CHUNKS * part + (k >> 2);
            const uint64_t da = dq + chunk * (ROWS * 128 >> 4) + (k & 3) * 2, db = dk + chunk * (CHUNK >> 4) + (k & 3) * 2;
            if (part == 0 && k == 0)
              wgmma_fp8_ss_n128_zero(S, da, db);
            else
              wgmma_fp8_ss_n128(S, da, db);
          }
        }
        // Rope last, always: the FP8 tensor core keeps 13 bits below the largest term, accumulator included.
#pragma unroll
        for (int k = 0; k < 4; k++) wgmma_bf16_ss_n128(S, dqr + k * 2, dk + (K_ROPE >> 4) + k * 2);
        wgmma_commit();
      }
      // Both waits pass in the shadow of the last wgmmas.
      mbar_wait(sm.table(b), parity);
      mbar_wait(sm.p_empty(b), parity ^ 1);
      // Table reads run AHEAD rows in front of their use: under load a shared-memory read takes 100 to 150 clocks, and left
      // to itself the compiler keeps only two in flight.
      const uint32_t tab = sm.base + O_TAB + b * 2 * PAGE * 8 + q * 16;
      float4 k[AHEAD];
#pragma unroll
      for (int i = 0; i < AHEAD; i++) k[i] = lds_f32x4(tab + i * 64);
      wgmma_wait<0>();
      pin(S);
      free_rope(sm.rope_freed(b), lane);
      if (lane == 0 && base + BLOCK == last) mbar_arrive(sm.q_empty());
      if (!live) {  // a warp without rows speaks all the same: whoever waits for P knows that all four have read the block
        if (lane == 0) mbar_arrive(sm.maxima(b)), mbar_arrive(sm.p_full(b));
        continue;
      }
      if (base + BLOCK > tile.z) {
        const int limit0 = lds_u32(rows + 4) - base - 2 * q, limit1 = lds_u32(rows + 8 * 8 + 4) - base - 2 * q;
#pragma unroll
        for (int i = 0; i < 16; i++) {
          if (8 * i >= limit0) S[4 * i] = -INFINITY_F;
          if (8 * i + 1 >= limit0) S[4 * i + 1] = -INFINITY_F;
          if (8 * i >= limit1) S[4 * i + 2] = -INFINITY_F;
          if (8 * i + 1 >= limit1) S[4 * i + 3] = -INFINITY_F;
        }
      }

      // y = x + log2 s_k (base-2 logit plus V's scale), and its row maximum r.
      int m0[2] = {}, m1[2] = {};
#pragma unroll
      for (int i = 0; i < 16; i++) {
        const float4 s = k[i % AHEAD];
        if (i + AHEAD < 16) k[i % AHEAD] = lds_f32x4(tab + (i + AHEAD) * 64);
        S[4 * i] = fmaf(S[4 * i], s.x * c0, s.z);
        S[4 * i + 1] = fmaf(S[4 * i + 1], s.y * c0, s.w);
        S[4 * i + 2] = fmaf(S[4 * i + 2], s.x * c1, s.z);
        S[4 * i + 3] = fmaf(S[4 * i + 3], s.y * c1, s.w);
        m0[i & 1] = max3(m0[i & 1], S[4 * i], S[4 * i + 1]), m1[i & 1] = max3(m1[i & 1], S[4 * i + 2], S[4 * i + 3]);
      }
      float r0m = quad_max(__int_as_float(max(m0[0], m0[1]))), r1m = quad_max(__int_as_float(max(m1[0], m1[1])));
      if (__any_sync(~0u, !(r0m > 0.f && r1m > 0.f))) {  // nothing visible, or logits beyond the bias
        float a0 = NEG, a1 = NEG;
#pragma unroll
        for (int i = 0; i < 16; i++)
          a0 = fmaxf(a0, fmaxf(S[4 * i], S[4 * i + 1])), a1 = fmaxf(a1, fmaxf(S[4 * i + 2], S[4 * i + 3]));
        r0m = quad_max(a0), r1m = quad_max(a1);
      }

      if (!PROMOTE_EVERY_BLOCK) {  // one scale of P for all blocks, two bits above the first one's maximum
        if (base == tile.x) fixed0 = r0m + 2.f, fixed1 = r1m + 2.f;
        r0m = fixed0, r1m = fixed1;
      }
      // The maxima go out ahead of P: warp 2 of WG0 turns them into factors meanwhile.
      if (q == 0) {
        const uint32_t top = sm.base + O_MAX + b * ROWS * 4 + r0 * 4;
        sts_f32(top, r0m), sts_f32(top + 8 * 4, r1m);
      }
      __syncwarp();
      if (lane == 0) mbar_arrive(sm.maxima(b));
      const float z0 = LOG2_448 - r0m, z1 = LOG2_448 - r1m;  // sigma_P, exact, sits in the exponent

      // P = 2^(y - r) * 448 to e4m3. Of every 16 tokens a thread owns 2q, 2q+1, 8+2q, 9+2q: they become bytes 4q..4q+3
      // of the row's 16-byte unit, one 32-bit store, no shuffle. V^T's fragments use the same token order.
      const uint32_t p = sm.base + O_P + b * ROWS * BLOCK + r0 * 128 + 4 * q;
#pragma unroll
      for (int u = 0; u < 8; u++) {
        const float* s = S + 8 * u;
        const float e0 = ex2_mufu(s[0] + z0), e1 = ex2_mufu(s[1] + z0), e2 = ex2_mufu(s[2] + z1), e3 = ex2_mufu(s[3] + z1);
        const float e4 = ex2_mufu(s[4] + z0), e5 = ex2_mufu(s[5] + z0), e6 = ex2_mufu(s[6] + z1), e7 = ex2_mufu(s[7] + z1);
        const uint32_t unit = (u ^ g) << 4;
        sts32(p + unit, pack_e4m3(e0, e1, e4, e5));
        sts32(p + 8 * 128 + unit, pack_e4m3(e2, e3, e6, e7));
      }
      fence_async_proxy();
      __syncwarp();
      if (lane == 0) mbar_arrive(sm.p_full(b));
    }
  }
}

// ---- WG2, WG3: O^T = V^T P^T, 256 dims each ---------------------------------------------------------------
// V^T fragment of 64 dims x 32 tokens: lane l of ldmatrix.x4.trans addresses token l, the warp its 16 dims; two PRMTs
// per pair of matrices split even and odd dims. Accumulator rows g, g+8 of warp w are dims 16w+2g, 16w+2g+1.
// Loads and splits are apart so that the loads can be issued before the promotion and split after it.
// after: 0, from a result that must come before the split.
DEVICE void split_vt(uint32_t (&A)[4], uint32_t after = 0) {
  const uint32_t x0 = A[0], x1 = A[1], x2 = A[2], x3 = A[3], even = after | 0x6420, odd = after | 0x7531;
  A[0] = prmt(x0, x1, even), A[1] = prmt(x0, x1, odd);
  A[2] = prmt(x2, x3, even), A[3] = prmt(x2, x3, odd);
}
// O += beta * T. Column pair n of the accumulator is rows 8n+2q, 8n+2q+1; w[n] holds their betas as bf16.
DEVICE void promote(float (&O)[SLAB], const float (&T)[SLAB], uint32_t (&w)[SLAB / 4]) {
#pragma unroll
  for (int n = 0; n < SLAB / 4; n++) {
    asm volatile("" : "+r"(w[n]));  // or the compiler would keep 16 unpacked values in registers
    const float lo = __uint_as_float(w[n] << 16), hi = __uint_as_float(w[n] & 0xffff0000u);
    O[4 * n] = fmaf(T[4 * n], lo, O[4 * n]), O[4 * n + 1] = fmaf(T[4 * n + 1], hi, O[4 * n + 1]);
    O[4 * n + 2] = fmaf(T[4 * n + 2], lo, O[4 * n + 2]), O[4 * n + 3] = fmaf(T[4 * n + 3], hi, O[4 * n + 3]);
  }
}

// Writes a tile's result, a warp 16 dims of all rows. out: where row 0 of this thread's first dim goes.
template <class T> DEVICE void write_rows(const float (&O)[4][SLAB], T* out, uint32_t inverse, int q, int rows) {
  out += 2 * q * DIM;
#pragma unroll
  for (int i = 0; i < SLAB / 4; i++) {
    const float2 inv = lds_f32x2(inverse + (8 * i + 2 * q) * 4);
#pragma unroll
    for (int s = 0; s < 4; s++) {
      // Selects, not products: a row that does not count may hold NaN.
      const float x = inv.x > 0.f ? O[s][4 * i] * inv.x : 0.f, x1 = inv.x > 0.f ? O[s][4 * i + 2] * inv.x : 0.f;
      const float y = inv.y > 0.f ? O[s][4 * i + 1] * inv.y : 0.f, y1 = inv.y > 0.f ? O[s][4 * i + 3] * inv.y : 0.f;
      if (8 * i + 2 * q < rows) store_pair(out + 8 * i * DIM + slab_dim(s), x, x1);
      if (8 * i + 2 * q + 1 < rows) store_pair(out + (8 * i + 1) * DIM + slab_dim(s), y, y1);
    }
  }
}
// Everything but O is derived anew, so that nothing else lives through the main loop.
DEVICE void write_result(const DecodeArgs& a, Smem sm, const float (&O)[4][SLAB], int piece, int wg_thread, int half) {
  forget(wg_thread), forget(piece);
  const int q = wg_thread & 3, rank = blockIdx.x % a.group;
  const int dim = half * (SHARED_CHUNKS ? 64 : 128) + 16 * (wg_thread >> 5) + 2 * ((wg_thread & 31) >> 2);
  const Tile t(a, piece, rank);
  const uint32_t inverse = sm.base + O_INVL;
  if (t.partial())
    write_rows(O, a.partial_out + t.partial_row(a, 0, rank) * DIM + dim, inverse, q, TILE_N);
  else if (a.out_fp32)
    write_rows(O, (float*)a.out + t.global_row(a, 0) * DIM + dim, inverse, q, t.rows);
  else
    write_rows(O, (bf16*)a.out + t.global_row(a, 0) * DIM + dim, inverse, q, t.rows);
}

// Row sums of a block: P times the digits of 1 / s. They are sums of what PV adds up, in the same precision, so that a value
// which all tokens share comes out as it went in. Columns are digits: a thread has two of rows g and g + 8 of its warp.
DEVICE void sum_rows(Smem sm, uint32_t n, int w) {
  const int b = n & 1, lane = threadIdx.x & 31, q = lane & 3;
  const uint64_t p = desc_sw128(sm.base + O_P + b * ROWS * BLOCK), digits = desc_sw128(sm.base + O_INV + (n & 3) * 8 * BLOCK);
  float sums[4];
  wgmma_fence();
  wgmma_fp8_ss_n8_zero(sums, p, digits);
#pragma unroll
  for (int t = 1; t < 4; t++) wgmma_fp8_ss_n8(sums, p + 2 * t, digits + 2 * t);
  wgmma_commit();
  wgmma_wait<0>();
  pin(sums);
  float x = q ? sums[0] * (1.f / 256.f) : fmaf(sums[1], 1.f / 16.f, sums[0]);
  float y = q ? sums[2] * (1.f / 256.f) : fmaf(sums[3], 1.f / 16.f, sums[2]);
  x += __shfl_xor_sync(~0u, x, 1), y += __shfl_xor_sync(~0u, y, 1);
  const uint32_t to = sm.base + O_SUM + b * ROWS * 4 + (16 * w + (lane >> 2)) * 4;
  if (q == 0) sts_f32(to, x), sts_f32(to + 32, y);
  __syncwarp();
  if (lane == 0) mbar_arrive(sm.sums(b));
}

DEVICE void pv(const DecodeArgs& a, Smem sm, int half, int w, int lane) {
  const uint32_t lane_base = sm.base + lane * 128 + ((w ^ (lane & 7)) << 4) + (SHARED_CHUNKS ? 0 : half * CHUNK);
  const uint32_t side = SHARED_CHUNKS ? half * 64 : 0;  // of slab 0, XORed into the address
  uint32_t n = 0, tiles = 0;
#pragma unroll 1
  for (int piece = Range(a).first; piece < Range(a).last; piece++) {
    int left = Tile(a, piece, blockIdx.x % a.group).blocks;
    float O[4][SLAB];
#pragma unroll
    for (int s = 0; s < 4; s++)
#pragma unroll
      for (int i = 0; i < SLAB; i++) O[s][i] = 0.f;
#pragma unroll 1
    for (; left > 0; left--, n++) {
      const uint32_t b = n & 1, parity = (n >> 1) & 1;
      const uint32_t vt_base = (lane_base ^ side) + b * STAGE_BYTES;
      auto vt = [&](int s, int t) {  // slab s, k-step t (32 tokens)
        return (SHARED_CHUNKS ? vt_base + s * CHUNK : (vt_base ^ ((s & 1) * 64)) + (s >> 1) * 2 * CHUNK) + t * 4096;
      };
      const uint64_t dp = desc_sw128(sm.base + O_P + b * ROWS * BLOCK);
      uint32_t A[4][4];                // one slab's fragments, 32 tokens each
      mbar_wait(sm.table(b), parity);  // not full: the tail must be cleared
#pragma unroll
      for (int t = 0; t < 4; t++) ldmatrix_x4_trans(A[t], vt(0, t));
#pragma unroll
      for (int t = 0; t < 4; t++) split_vt(A[t]);
      // Frees a part of the block: its last fragments sit in registers. A warp reads as one, so one lane speaks for it.
      auto release = [&](int part) {
        __syncwarp();
        free_part(sm.freed(b, part), threadIdx.x & 31, A[2][3], A[3][3]);
      };
      mbar_wait(sm.factors(b), parity);
      uint32_t be[SLAB / 4];  // read once per block: with LDS in the slab loop PV is 10 to 20 % slower
      {
        const uint32_t beta = sm.base + O_BETA + b * ROWS * 2 + (threadIdx.x & 3) * 32;
#pragma unroll
        for (int i = 0; i < SLAB / 4; i += 4) {
          const uint4 v = lds_u32x4(beta + 4 * i);
          be[i] = v.x, be[i + 1] = v.y;
          if (SLAB > 8) be[i + 2] = v.z, be[i + 3] = v.w;
        }
      }
      if (lds_u32(sm.base + O_FLAG + b * 4)) {
#pragma unroll
        for (int i = 0; i < SLAB / 4; i++) {
          const float2 al = lds_f32x2(sm.base + O_ALPHA + b * ROWS * 4 + i * 32 + (threadIdx.x & 3) * 8);
#pragma unroll
          for (int s = 0; s < 4; s++) O[s][4 * i] *= al.x, O[s][4 * i + 1] *= al.y, O[s][4 * i + 2] *= al.x, O[s][4 * i + 3] *= al.y;
        }
      }
      mbar_wait(sm.p_full(b), parity);
      // The warpgroups take turns. Sums come when the block's parts are free; the last block's at once, since 1 / l needs them.
      if (b == half && left == 1) sum_rows(sm, n, w);
#pragma unroll
      for (int s = 0; s < 4; s++) {
        float fresh[SLAB];
        float(&T)[SLAB] = PROMOTE_EVERY_BLOCK ? fresh : O[s];
        wgmma_fence();
        if (PROMOTE_EVERY_BLOCK)
          wgmma_fp8_rs_zero(T, A[0], dp);
        else
          wgmma_fp8_rs(T, A[0], dp);
        wgmma_fp8_rs(T, A[1], dp + 2);
        wgmma_commit();
        wgmma_fp8_rs(T, A[2], dp + 4);
        wgmma_fp8_rs(T, A[3], dp + 6);
        wgmma_commit();
        if ((s + 1) % PART_CHUNKS == 0) release(s / PART_CHUNKS);
        if (s < 3) {
          wgmma_wait<1>();  // A[0], A[1] are free
          ldmatrix_x4_trans(A[0], vt(s + 1, 0)), ldmatrix_x4_trans(A[1], vt(s + 1, 1));
          split_vt(A[0]), split_vt(A[1]);
        }
        wgmma_wait<0>();
        pin(T);
        if (s < 3) ldmatrix_x4_trans(A[2], vt(s + 1, 2)), ldmatrix_x4_trans(A[3], vt(s + 1, 3));
        if (PROMOTE_EVERY_BLOCK) promote(O[s], T, be);
        pin(O[s]);
        // ptxas would put these splits first and wait for their loads with the promotion undone: hence the dependence.
        const uint32_t after = __float_as_uint(O[s][SLAB - 1]) & a.zero;
        if (s < 3) split_vt(A[2], after), split_vt(A[3], after);
      }
      if (b == half && left > 1) sum_rows(sm, n, w);
      __syncwarp();
      if ((threadIdx.x & 31) == 0) mbar_arrive(sm.p_empty(b));
    }
    mbar_wait(sm.inverse_full(), tiles++ & 1);
    write_result(a, sm, O, piece, w * 32 + lane, half);
    __syncwarp();
    if ((threadIdx.x & 31) == 0) mbar_arrive(sm.inverse_empty());
  }
}

extern "C" __global__ void __launch_bounds__(512, 1) mla_decode_fp8(const __grid_constant__ DecodeArgs a) {
  extern __shared__ __align__(1024) uint8_t smem[];
  const Smem sm{smem_addr(smem)};
  const int wg = __shfl_sync(~0u, threadIdx.x >> 7, 0), w = __shfl_sync(~0u, (threadIdx.x >> 5) & 3, 0), lane = threadIdx.x & 31;
  if (threadIdx.x == 0) {
    for (int b = 0; b < STAGES; b++) {
      for (int part = 0; part < PARTS; part++) mbar_init(sm.landed(b, part), part < PARTS - 1 ? 1 : 2), mbar_init(sm.freed(b, part), PAIR ? 16 : 8);
      mbar_init(sm.rope_freed(b), PAIR ? 8 : 4), mbar_init(sm.table(b), 1), mbar_init(sm.maxima(b), 4);
      mbar_init(sm.factors(b), 1), mbar_init(sm.p_full(b), 4), mbar_init(sm.p_empty(b), 8), mbar_init(sm.sums(b), 4);
    }
    mbar_init(sm.q_full(), 2), mbar_init(sm.q_empty(), 4), mbar_init(sm.inverse_full(), 1), mbar_init(sm.inverse_empty(), 8);
    mbar_init_fence();
  }
  if (PAIR)
    cluster_sync();
  else
    __syncthreads();
  allow_next_kernel();
  wait_for_previous_kernel();
  if (wg == 0) {
    setmaxnreg_dec<24>();
    if (w == 0) produce(a, sm, lane);
    if (w == 1) make_tables(a, sm, lane);
    if (w == 2) track_rows(a, sm, lane);
    if (w == 3) fetch_query(a, sm, lane);
  } else if (wg == 1) {
    setmaxnreg_dec<QK_REGS>();
    qk_softmax(a, sm, w, lane);
  } else {
    setmaxnreg_inc<PV_REGS>();
    pv(a, sm, wg - 2, w, lane);
  }
  if (PAIR) cluster_sync();  // the other one may still write here
}
