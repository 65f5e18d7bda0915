// Where the lines of decode sequences stand, and which of their tokens count: kernels/reference/lines.py in a launch each.
#include "common/ptx.cuh"

struct LinesArgs {
  const int64_t *starts, *num_drafts, *num_slots;  // [sequences]; num_drafts null: none
  const int* table;                                // [sequences, blocks], row stride below
  int64_t *positions, *slots;                      // [sequences, query_len]
  bool* live;                                      // [sequences, query_len]
  int* seq_lens;                                   // [sequences], as the next two
  int64_t* kept;
  int* num_query;
  int64_t table_stride;
  int sequences, query_len;
};

// A thread a line.
extern "C" __global__ void decode_lines(const LinesArgs a) {
  const int line = blockIdx.x * blockDim.x + threadIdx.x, sequence = line / a.query_len, index = line % a.query_len;
  wait_for_previous_kernel();
  allow_next_kernel();
  if (sequence >= a.sequences) return;
  const int64_t start = a.starts[sequence], last_slot = a.num_slots[sequence] - 1;
  const int64_t end = min(start + (a.num_drafts ? a.num_drafts[sequence] : 0), last_slot), position = max(min(start + index, end), (int64_t)0);
  const bool live = start + index <= end;
  a.positions[line] = position;
  a.live[line] = live;
  a.slots[line] = live ? (int64_t)a.table[sequence * a.table_stride + position / 64] * 64 + position % 64 : -1;
  if (index == 0) {
    const int64_t kept = end - min(start, last_slot);
    a.seq_lens[sequence] = (int)(end + 1);
    a.kept[sequence] = kept;
    a.num_query[sequence] = (int)(kept + 1);
  }
}

struct AcceptArgs {
  const int64_t *tokens, *rows;  // [lines], those of the sequences first
  const int64_t* drafts;         // [sequences, query_len - 1], row stride below
  const int64_t* num_drafts;     // [sequences]
  int64_t* accepted;             // [sequences]
  int* history;                  // [rows, vocab]
  int64_t drafts_stride, vocab;
  int lines, sequences, query_len;
};

// A thread a sequence, then one for each of the other lines.
extern "C" __global__ void accept_tokens(const AcceptArgs a) {
  const int thread = blockIdx.x * blockDim.x + threadIdx.x;
  wait_for_previous_kernel();
  allow_next_kernel();
  const auto count = [&](int line) {
    if (a.tokens[line] >= 0) atomicAdd(&a.history[a.rows[line] * a.vocab + a.tokens[line]], 1);
  };
  if (thread < a.sequences) {
    const int first = thread * a.query_len;
    const int64_t* drafts = a.drafts + thread * a.drafts_stride;
    const int most = (int)a.num_drafts[thread];
    int accepted = 0;
    while (accepted < a.query_len - 1 && accepted < most && a.tokens[first + accepted] == drafts[accepted]) accepted++;
    for (int j = 0; j <= accepted; j++) count(first + j);
    a.accepted[thread] = accepted;
  } else {
    const int line = thread + a.sequences * (a.query_len - 1);
    if (line < a.lines) count(line);
  }
}
