// The work list of one decode step: written by plan.cu, read by the decode kernels and by combine.cu.
//
// Query rows of a sequence are flattened (row = query index * heads + head) and cut into tiles of 64. `group` CTAs walk
// the same keys at the same time, one tile each, so that a block is fetched from HBM once; `unit` numbers the groups of
// tiles of one sequence. Keys are cut into blocks of 128 tokens.
#pragma once
#include "common/types.cuh"

constexpr int ROWS = 64;    // query rows of a tile
constexpr int BLOCK = 128;  // key tokens of a block of work
constexpr int PAGE = 64;    // tokens of a cache block
constexpr int DIM = 512, ROPE = 64;

struct Piece {
  int seq, unit;
  int begin, end;  // blocks of 128 tokens
  int slot;        // index of its partial result, or -1: it covers all keys and writes the final result
  int len;         // sequence length the plan saw
  int pad0, pad1;
};

struct CombineItem {
  int seq, unit, first_slot, splits;  // splits 0: no keys at all, the rows get zeros and -inf
};

// Int offsets into the work tensor. groups: CTA groups of the grid; units: sequences x units per sequence.
struct WorkLayout {
  int groups, max_pieces, max_items;
  DEVICE static int items_count() { return 0; }
  DEVICE static int starts() { return 8; }  // [groups + 1] first piece of each CTA group
  DEVICE int pieces() const { return (starts() + groups + 1 + 7) / 8 * 8; }
  DEVICE int items() const { return pieces() + 8 * max_pieces; }
};
