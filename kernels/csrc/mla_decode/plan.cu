// Split-KV planner: cuts the keys of a batch over the CTA groups, on the device, from lengths that stay there. One warp.
//
// Balanced mode: every piece costs its blocks plus a fixed OVERHEAD; the smallest capacity per group is sought for which
// a greedy walk needs no more groups than there are. 32 candidates are tried at once, one a lane. This gives even halves
// at short lengths and contiguous ranges at long ones.
// Invariant mode: piece boundaries depend on the sequence's own length alone, so neither the order of additions nor the
// combine of a row depends on what else is in the batch.
#include "mla_decode/work.cuh"

#ifndef OVERHEAD
#define OVERHEAD 2  // cost of starting and ending a piece, in blocks of 128 tokens
#endif
constexpr int INVARIANT_BLOCKS = 16, INVARIANT_SPLITS = 8;  // pieces of at least 2048 tokens, at most 8 a sequence

struct PlanArgs {
  const int* seq_lens;  // [batch]
  int* work;            // see WorkLayout
  WorkLayout layout;
  int batch, units;  // units: tile groups per sequence
  int invariant;
};

DEVICE int blocks_of(int len) { return len > 0 ? (len + BLOCK - 1) / BLOCK : 0; }

// Lengths near at hand: the walks below read them one by one.
constexpr int STAGED = 4096;
struct Lengths {
  const int* staged;
  const int* rest;
  DEVICE int operator[](int s) const { return s < STAGED ? staged[s] : rest[s]; }
};

// Groups a greedy walk needs when each holds `capacity`.
DEVICE int groups_needed(const PlanArgs& a, Lengths lens, int capacity) {
  const int room_of_new = capacity - OVERHEAD;
  int used = 0, left = 0;
  for (int s = 0; s < a.batch; s++) {
    const int blocks = blocks_of(lens[s]);
    for (int u = 0; u < a.units; u++) {
      int rest = blocks;
      const int room = left - OVERHEAD;
      if (room > 0 && rest > 0) {
        const int take = min(rest, room);
        rest -= take, left -= take + OVERHEAD;
      }
      if (rest > 0) {
        const int full = rest / room_of_new;
        rest -= full * room_of_new;
        used += full + (rest > 0), left = rest > 0 ? room_of_new - rest : 0;
      }
    }
  }
  return used;
}

extern "C" __global__ void __launch_bounds__(32) plan_decode(const PlanArgs a) {
  __shared__ int staged[STAGED];
  const Lengths lens{staged, a.seq_lens};
  const int lane = threadIdx.x, groups = a.layout.groups;
  int blocks = 0, busy = 0;  // all blocks, sequences with any
  for (int s = lane; s < a.batch; s += 32) {
    const int len = a.seq_lens[s], n = blocks_of(len);
    if (s < STAGED) staged[s] = len;
    blocks += n, busy += n > 0;
  }
  __syncwarp();
  for (int d = 16; d; d /= 2) blocks += __shfl_xor_sync(~0u, blocks, d), busy += __shfl_xor_sync(~0u, busy, d);
  const int64_t cost = (int64_t)a.units * (blocks + OVERHEAD * busy);

  int capacity = 0;
  if (!a.invariant) {
    const int least = max(OVERHEAD + 1, (int)((cost + groups - 1) / groups));
    for (int base = least;; base += 32) {
      const uint32_t fits = __ballot_sync(~0u, groups_needed(a, lens, base + lane) <= groups);
      if (fits) {
        capacity = base + __ffs(fits) - 1;
        break;
      }
    }
  }

  if (lane) return;
  int* starts = a.work + WorkLayout::starts();
  Piece* pieces = (Piece*)(a.work + a.layout.pieces());
  CombineItem* items = (CombineItem*)(a.work + a.layout.items());
  int group = -1, left = 0, piece = 0, slot = 0, item = 0;
  int64_t line = 0;  // invariant mode: cost of all pieces before this one
  for (int s = 0; s < a.batch; s++) {
    const int len = lens[s], n = blocks_of(len);
    for (int u = 0; u < a.units; u++) {
      const int first_slot = slot;
      const int share = a.invariant ? max(INVARIANT_BLOCKS, (n + INVARIANT_SPLITS - 1) / INVARIANT_SPLITS) : 0;
      for (int begin = 0; begin < n;) {
        int take;
        if (a.invariant) {
          take = min(share, n - begin);
          for (const int target = min(groups - 1, (int)(line * groups / cost)); group < target;) starts[++group] = piece;
          line += take + (begin ? 0 : OVERHEAD);
        } else {
          if (left <= OVERHEAD) starts[++group] = piece, left = capacity;
          take = min(n - begin, left - OVERHEAD);
          left -= take + OVERHEAD;
        }
        pieces[piece++] = Piece{s, u, begin, begin + take, take == n ? -1 : slot++, len, 0, 0};
        begin += take;
      }
      if (slot > first_slot || n == 0) items[item++] = CombineItem{s, u, first_slot, slot - first_slot};
    }
  }
  while (group < groups) starts[++group] = piece;
  a.work[WorkLayout::items_count()] = item;
}
