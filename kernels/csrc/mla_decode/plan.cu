// Split-KV planner: cuts the keys of a batch over the CTA groups, on the device, from lengths that stay there. One CTA.
//
// Balanced mode: every piece costs its blocks plus a fixed OVERHEAD; the smallest capacity per group is sought for which
// a greedy walk needs no more groups than there are. 32 candidates are tried at once, one a lane. This gives even halves
// at short lengths and contiguous ranges at long ones.
// Invariant mode: piece boundaries depend on the sequence's own length alone, so neither the order of additions nor the
// combine of a row depends on what else is in the batch.
//
// A walk passes a sequence in one step, however many pieces it gives. The last walk leaves its state before every sequence,
// and all threads write the pieces from there.
#include "mla_decode/work.cuh"

#ifndef OVERHEAD
#define OVERHEAD 2  // cost of starting and ending a piece, in blocks of 128 tokens
#endif
constexpr int INVARIANT_BLOCKS = 16, INVARIANT_SPLITS = 8;  // pieces of at least 2048 tokens, at most 8 a sequence
constexpr int THREADS = 256, STAGED = 4096, STATES = 256;   // lengths near at hand; sequences a round

struct PlanArgs {
  const int* seq_lens;  // [batch]
  int* work;            // see WorkLayout
  WorkLayout layout;
  int batch, units;  // units: tile groups per sequence
  int invariant;
};

DEVICE int blocks_of(int len) { return len > 0 ? (len + BLOCK - 1) / BLOCK : 0; }

// Where a walk stands: the group it fills, what that still holds, and how much it has given out.
struct Walk {
  int group = -1, left = 0, piece = 0, slot = 0, item = 0;
  int64_t line = 0;  // invariant mode: cost of all pieces so far

  DEVICE void count(int pieces) {
    piece += pieces;
    if (pieces != 1) slot += pieces, item++;  // one piece writes the result itself; none leaves zeros to the combine
  }
  // room: capacity of a group less OVERHEAD; inverse: 1 / room.
  DEVICE void balanced(int blocks, int room, float inverse) {
    int rest = blocks, pieces = 0;
    if (left > OVERHEAD && rest > 0) {
      const int take = min(rest, left - OVERHEAD);
      rest -= take, left -= take + OVERHEAD, pieces = 1;
    }
    if (rest > 0) {
      int full = (int)(rest * inverse);
      full += rest >= (full + 1) * room;
      full -= rest < full * room;
      const int last = rest - full * room, groups = full + (last > 0);
      group += groups, pieces += groups, left = last > 0 ? room - last : 0;
    }
    count(pieces);
  }
};

// Invariant mode: blocks of a piece, and the group whose share of all work `line` lies in.
DEVICE int share_of(int blocks) { return max(INVARIANT_BLOCKS, (blocks + INVARIANT_SPLITS - 1) / INVARIANT_SPLITS); }
DEVICE int group_at(int64_t line, int groups, int64_t cost) { return min(groups - 1, (int)(line * groups / cost)); }

extern "C" __global__ void __launch_bounds__(THREADS) plan_decode(const PlanArgs a) {
  __shared__ int staged[STAGED];
  __shared__ Walk states[STATES];
  __shared__ int totals[2], chosen_room;
  const int thread = threadIdx.x, lane = thread & 31, groups = a.layout.groups, sequences = a.batch * a.units;
  if (thread < 2) totals[thread] = 0;
  __syncthreads();
  int blocks = 0, busy = 0;  // all blocks, sequences with any
  for (int s = thread; s < a.batch; s += THREADS) {
    const int n = blocks_of(a.seq_lens[s]);
    if (s < STAGED) staged[s] = n;
    blocks += n, busy += n > 0;
  }
  atomicAdd(&totals[0], blocks), atomicAdd(&totals[1], busy);
  __syncthreads();
  const auto blocks_at = [&](int s) { return s < STAGED ? staged[s] : blocks_of(a.seq_lens[s]); };
  const int64_t cost = (int64_t)a.units * (totals[0] + OVERHEAD * totals[1]);

  int room = 1;
  if (!a.invariant && thread < 32) {
    const int least = max(1, (int)((cost + groups - 1) / groups) - OVERHEAD);
    for (int base = least;; base += 32) {
      Walk w;
      const int mine = base + lane;
      const float inverse = 1.f / mine;
      for (int s = 0; s < a.batch; s++) {
        const int n = blocks_at(s);
        for (int u = 0; u < a.units; u++) w.balanced(n, mine, inverse);
      }
      const uint32_t fits = __ballot_sync(~0u, w.group < groups);
      if (fits) {
        room = base + __ffs(fits) - 1;
        break;
      }
    }
  }

  int* starts = a.work + WorkLayout::starts();
  Piece* pieces = (Piece*)(a.work + a.layout.pieces());
  CombineItem* items = (CombineItem*)(a.work + a.layout.items());
  Walk all;  // thread 0's
  for (int first = 0; first < sequences; first += STATES) {
    const int count = min(STATES, sequences - first);
    if (thread == 0) {
      chosen_room = room;
      const float inverse = 1.f / room;
      for (int i = 0; i < count; i++) {
        states[i] = all;
        const int n = blocks_at((first + i) / a.units);
        if (!a.invariant) {
          all.balanced(n, room, inverse);
        } else if (n == 0) {
          all.count(0);
        } else {
          const int share = share_of(n), cuts = (n + share - 1) / share;
          all.group = group_at(all.line + OVERHEAD * (cuts > 1) + (cuts - 1) * share, groups, cost);
          all.line += n + OVERHEAD, all.count(cuts);
        }
      }
    }
    __syncthreads();
    if (thread < count) {
      Walk w = states[thread];
      const int s = (first + thread) / a.units, u = (first + thread) % a.units, n = blocks_at(s), first_slot = w.slot;
      const int capacity = chosen_room + OVERHEAD, share = share_of(n);
      for (int begin = 0; begin < n;) {
        int take;
        if (a.invariant) {
          take = min(share, n - begin);
          for (const int target = group_at(w.line, groups, cost); w.group < target;) starts[++w.group] = w.piece;
          w.line += take + (begin ? 0 : OVERHEAD);
        } else {
          if (w.left <= OVERHEAD) starts[++w.group] = w.piece, w.left = capacity;
          take = min(n - begin, w.left - OVERHEAD);
          w.left -= take + OVERHEAD;
        }
        pieces[w.piece++] = Piece{s, u, begin, begin + take, take == n ? -1 : w.slot++, a.seq_lens[s], 0, 0};
        begin += take;
      }
      if (w.slot > first_slot || n == 0) items[w.item] = CombineItem{s, u, first_slot, w.slot - first_slot};
    }
    __syncthreads();
  }
  if (thread == 0) {
    while (all.group < groups) starts[++all.group] = all.piece;
    a.work[WorkLayout::items_count()] = all.item;
  }
}
