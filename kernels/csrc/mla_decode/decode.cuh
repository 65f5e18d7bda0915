// What the FP8 and the BF16 decode kernel share: their argument struct and one piece of work as a CTA sees it.
#pragma once
#ifndef PAIR
#define PAIR 0  // 1: launched as clusters of two CTAs that share their keys
#endif
#include "common/ptx.cuh"
#include "mla_decode/work.cuh"

struct DecodeArgs {
  CUtensorMap content, rope;      // paged cache, see each kernel's producer
  CUtensorMap q_content, q_rope;  // the query's rows, see fetch_query
  const float* scales;        // [pages][64], FP8 only
  int64_t scale_stride;       // floats between pages
  const int* block_table;     // [batch][table_width]
  int64_t table_stride;       // ints between rows
  const int* num_query;       // [batch] live query rows, or null: all
  const int* work;
  const float* q_scale;       // [batch * query_len * heads], FP8 only
  void* out;                  // [batch * query_len * heads][512], bf16 or fp32
  float* lse;                 // [batch * query_len * heads], natural log
  float* partial_out;         // [slots * group][64][512]
  float* partial_lse;         // [slots * group][64]
  WorkLayout layout;
  int table_width, num_pages, query_len, heads, group;
  int out_fp32, causal;
  float softmax_scale_log2;  // softmax scale * log2(e)
  uint32_t zero;             // 0, which the compiler cannot know
};

constexpr float NEG = -1e30f;  // finite stand-in for -inf: differences of two of them are no NaN
constexpr float LN2 = 0.6931471806f;

// The pieces of this CTA's group, and its tile within a group.
struct Range {
  int first, last, rank;
  DEVICE Range(const DecodeArgs& a) {
    const int* starts = a.work + WorkLayout::starts() + blockIdx.x / a.group;
    first = starts[0], last = starts[1], rank = blockIdx.x % a.group;
  }
};

// One piece: a tile of 64 query rows against blocks [begin, begin + blocks) of its sequence. Every role of the CTA derives
// the same values from the work list.
struct Tile {
  int seq, slot, begin, blocks, len;
  int first_row, rows;  // first row of the tile in its sequence, rows that exist
  int live;             // query rows of the sequence that count
  DEVICE Tile(const DecodeArgs& a, int piece, int rank) {
    const Piece p = ((const Piece*)(a.work + a.layout.pieces()))[piece];
    seq = p.seq, slot = p.slot, begin = p.begin;
    // A length beyond the block table is the caller's mistake; it must not become an illegal read.
    len = min(p.len, a.table_width * PAGE);
    live = a.num_query ? min(max(a.num_query[seq], 0), a.query_len) : a.query_len;
    first_row = (p.unit * a.group + rank) * ROWS;
    rows = min(a.query_len * a.heads - first_row, ROWS);
    const int lead = first_row - (PAIR ? rank % 2 * ROWS : 0);  // CTAs of a pair walk the same blocks
    const bool dead = rows <= 0 || lead >= live * a.heads;
    blocks = dead ? 0 : max(0, min(p.end, (len + BLOCK - 1) / BLOCK) - begin);
  }
  // Tokens that row r of the tile sees.
  DEVICE int limit(const DecodeArgs& a, int r) const {
    const int query = (first_row + r) / a.heads;
    return a.causal ? len - (live - 1 - query) : len;
  }
  // Tokens that every live row sees.
  DEVICE int common_limit(const DecodeArgs& a) const { return a.causal ? len - (live - 1) : len; }
  DEVICE bool row_counts(const DecodeArgs& a, int r) const { return r < rows && first_row + r < live * a.heads; }
  DEVICE size_t global_row(const DecodeArgs& a, int r) const { return (size_t)seq * a.query_len * a.heads + first_row + r; }
  DEVICE size_t partial_row(const DecodeArgs& a, int r, int rank) const { return ((size_t)slot * a.group + rank) * ROWS + r; }
  // Cache blocks this piece reads; table entries beyond them are not looked at.
  DEVICE int pages() const { return min(2 * blocks, (len + PAGE - 1) / PAGE - 2 * begin); }
  DEVICE void store_lse(const DecodeArgs& a, int r, int rank, float value) const {
    if (r >= rows) return;
    if (slot < 0)
      a.lse[global_row(a, r)] = value;
    else
      a.partial_lse[partial_row(a, r, rank)] = value;
  }
  // Where row 0 of the tile goes: a partial result (all 64 rows are written), or the final one (rows that exist).
  DEVICE bool partial() const { return slot >= 0; }
  DEVICE int rows_written() const { return partial() ? ROWS : rows; }
};

// Two neighbouring dims of a row.
DEVICE void store_pair(float* out, float x, float y) { *(float2*)out = make_float2(x, y); }
DEVICE void store_pair(bf16* out, float x, float y) { *(uint32_t*)out = pack_bf16(x, y); }

// Page numbers of a piece, read 32 at a time by one warp, one batch ahead of their use.
struct PageReader {
  const int* table;
  int pages, current, next;
  DEVICE PageReader(const DecodeArgs& a, const Tile& t, int lane) {
    table = a.block_table + t.seq * a.table_stride + 2 * t.begin;
    pages = t.pages();
    current = 0, next = lane < pages ? table[lane] : 0;
  }
  // Page i, asked for in turn.
  DEVICE int get(const DecodeArgs& a, int i, int lane) {
    if ((i & 31) == 0) {
      current = next;
      next = i + 32 + lane < pages ? table[i + 32 + lane] : 0;
    }
    // An id outside the pool must not become an illegal read.
    return min((uint32_t)__shfl_sync(~0u, current, i & 31), (uint32_t)(a.num_pages - 1));
  }
};

// Largest of the four lanes that share a row of an accumulator.
DEVICE float quad_max(float v) {
  v = fmaxf(v, __shfl_xor_sync(~0u, v, 1));
  return fmaxf(v, __shfl_xor_sync(~0u, v, 2));
}
