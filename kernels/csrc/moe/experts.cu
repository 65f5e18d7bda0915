// The steps of the grouped expert MLP around its two streaming products.
#include "gemm/quantize.cuh"
#include "gemm/schedule.cuh"

struct ScatterArgs {
  const bf16* x;      // [tokens, width]
  const int* places;  // [tokens, top_k]
  Quantized to;       // FP8: codes and scales of the sorted rows
  bf16* copy;         // BF16: [sorted rows, width]
  int top_k;
};

// Each token's row to the places of its local pairs, quantized once. Grid: tokens x groups of 16 * EACH blocks. Few rows are
// spread over all SMs; of many, a thread has several loads on their way.
template <bool FP8, int EACH> DEVICE void scatter(const ScatterArgs& a) {
  wait_for_previous_kernel();
  allow_next_kernel();
  const int width = a.to.width;
  const RowBlock first(width, blockIdx.x, EACH);
  const int* places = a.places + (int64_t)first.row * a.top_k;
  int local = 0;
  for (int k = 0; k < a.top_k; k++) local |= places[k] >= 0;
  if (!local) return;
  float v[EACH][8];
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int column = first.column() + i * 128 * BLOCKS_A_CTA;
    zero8(v[i]);
    if (column < width) load8(v[i], a.x + (int64_t)first.row * width + column);
  }
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int block = first.block + i * BLOCKS_A_CTA, column = first.column() + i * 128 * BLOCKS_A_CTA;
    float scale;
    const uint2 code = FP8 ? quantize8(v[i], scale) : make_uint2(0, 0);
    for (int k = 0; k < a.top_k; k++) {
      const int row = places[k];
      if (row < 0 || block * 128 >= width) continue;
      if (FP8) {
        a.to.store(row, block, first.lane, code, scale);
      } else if (column < width) {
        *(uint4*)(a.copy + (int64_t)row * width + column) = round8(v[i]);
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(QUANTIZE_THREADS) scatter_fp8(const ScatterArgs a) { scatter<true, 1>(a); }
extern "C" __global__ void __launch_bounds__(QUANTIZE_THREADS) scatter_many_fp8(const ScatterArgs a) { scatter<true, 4>(a); }
extern "C" __global__ void __launch_bounds__(QUANTIZE_THREADS) scatter_bf16(const ScatterArgs a) { scatter<false, 1>(a); }

struct ScatterCodesArgs {
  const uint8_t* codes;  // [tokens, width], rows codes_stride bytes apart
  const float* scales;   // [tokens, ceil(width / 128)], strides in floats
  const int* places;     // [tokens, top_k]
  Quantized to;
  int64_t codes_stride, scale_row_stride, scale_block_stride;
  int top_k;
};

// The same for rows that come quantized, as they travel between ranks.
extern "C" __global__ void __launch_bounds__(QUANTIZE_THREADS) scatter_codes(const ScatterCodesArgs a) {
  wait_for_previous_kernel();
  allow_next_kernel();
  const int width = a.to.width;
  const RowBlock at(width);
  const int token = at.row, block = at.block, column = at.column();
  if (block * 128 >= width) return;
  const int* places = a.places + (int64_t)token * a.top_k;
  int local = 0;
  for (int k = 0; k < a.top_k; k++) local |= places[k] >= 0;
  if (!local) return;
  uint2 code = make_uint2(0, 0);
  if (column < width) code = *(const uint2*)(a.codes + token * a.codes_stride + column);
  const float scale = a.scales[token * a.scale_row_stride + block * a.scale_block_stride];
  for (int k = 0; k < a.top_k; k++)
    if (places[k] >= 0) a.to.store(places[k], block, at.lane, code, scale);
}

// Where a sorted row lies in the tiles of both products.
struct Place {
  int tile_base, tiles_here, token_tile, column;
  Place() = default;
  DEVICE Place(const int* groups, int experts, int expert, int row, int tokens) {
    const int* tiles = groups + experts + 1;
    const int in_expert = row - groups[expert];
    tile_base = tiles[expert], tiles_here = tiles[expert + 1] - tile_base;
    token_tile = in_expert / tokens, column = in_expert % tokens;
  }
  DEVICE int tile(int row_tiles, int row_tile) const { return row_tiles * tile_base + row_tile * tiles_here + token_tile; }
};

// Columns n .. n + 7 (n a multiple of 8) of a sorted row, rounded to BF16 whichever way they come.
DEVICE void read8(float (&v)[8], const Product& p, const Runs& runs, const Place& place, int row, int n) {
  const Schedule& s = p.schedule;
  const Owners owners(s, runs, place.tile(s.row_tiles, n / s.tile_rows));
  if (owners.first == owners.last) return load8(v, (const bf16*)p.out + (int64_t)row * p.n + n);
  const float4 low = add_partials(p, owners, place.column, n), high = add_partials(p, owners, place.column, n + 4);
  v[0] = low.x, v[1] = low.y, v[2] = low.z, v[3] = low.w, v[4] = high.x, v[5] = high.y, v[6] = high.z, v[7] = high.w;
  round8(v);
}

struct GateArgs {
  Product product;         // gate_up: [sorted rows, 2 width]
  const int* groups;       // [2, experts + 1]
  const int* row_experts;  // [sorted rows]
  Quantized to;            // FP8: input of the down product
  bf16* copy;              // BF16: the same, [sorted rows, width]
  int experts;
};

// silu(gate) * up of every sorted row, quantized for the down product. Grid: some rows, which each CTA takes in turn (how
// many there are is not known before), x groups of 16 blocks.
template <bool FP8> DEVICE void gate(const GateArgs& a) {
  wait_for_previous_kernel();
  allow_next_kernel();
  const int width = a.to.width;
  const RowBlock at(width, blockIdx.x, 1);
  const int block = at.block, column = at.column(), chunks = (width + 128 * BLOCKS_A_CTA - 1) / (128 * BLOCKS_A_CTA);
  const Schedule& s = a.product.schedule;
  int expert = a.row_experts[at.row];  // asked for with the count, though perhaps past it
  const int rows = a.groups[a.experts];
  const Runs runs(s.row_tiles * a.groups[2 * a.experts + 1] * s.k_units, s.ctas);
  for (int row = at.row; row < rows; row += gridDim.x / chunks, expert = row < rows ? a.row_experts[row] : -1) {
    if (expert < 0) continue;
    const Place place(a.groups, a.experts, expert, row, s.token_tile);
    float v[8], up[8];
    zero8(v), zero8(up);
    if (column < width) {
      read8(v, a.product, runs, place, row, column);
      read8(up, a.product, runs, place, row, width + column);
    }
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = silu_mul(v[i], up[i]);
    const uint4 rounded = round8(v);
    float scale;
    const uint2 code = FP8 ? quantize8(v, scale) : make_uint2(0, 0);
    if (block * 128 >= width) continue;
    if (FP8) {
      a.to.store(row, block, at.lane, code, scale);
    } else if (column < width) {
      *(uint4*)(a.copy + (int64_t)row * width + column) = rounded;
    }
  }
}

extern "C" __global__ void __launch_bounds__(QUANTIZE_THREADS) gate_fp8(const GateArgs a) { gate<true>(a); }
extern "C" __global__ void __launch_bounds__(QUANTIZE_THREADS) gate_bf16(const GateArgs a) { gate<false>(a); }

struct CombineArgs {
  Product product;       // down: [sorted rows, width]
  const int* groups;     // [2, experts + 1]
  const int* ids;        // [tokens, top_k] global expert ids, row stride below
  const int* places;     // [tokens, top_k]
  const float* weights;  // [tokens, top_k], row stride below
  bf16* out;             // [tokens, width]
  int first_expert, experts, top_k, ids_stride, weights_stride, _pad;
};

constexpr int COMBINE_THREADS = 128, COLUMNS_A_CTA = COMBINE_THREADS * 8;

// Weighted sum over a token's local pairs, in the order of its choices. A lane looks up one choice. Grid: tokens x groups of
// 1024 columns.
extern "C" __global__ void __launch_bounds__(COMBINE_THREADS) combine_experts(const CombineArgs a) {
  wait_for_previous_kernel();
  allow_next_kernel();
  const Schedule& s = a.product.schedule;
  const int chunks = (a.product.n + COLUMNS_A_CTA - 1) / COLUMNS_A_CTA, lane = threadIdx.x % 32;
  const int64_t token = blockIdx.x / chunks;
  const int n = blockIdx.x % chunks * COLUMNS_A_CTA + 8 * threadIdx.x;
  int row = -1, expert = 0;
  float weight = 0.f;
  if (lane < a.top_k) {
    row = a.places[token * a.top_k + lane], expert = a.ids[token * a.ids_stride + lane] - a.first_expert;
    weight = a.weights[token * a.weights_stride + lane];
  }
  const Runs runs(s.row_tiles * a.groups[2 * a.experts + 1] * s.k_units, s.ctas);
  Place mine;
  if (row >= 0) mine = Place(a.groups, a.experts, expert, row, s.token_tile);
  float sum[8];
  zero8(sum);
  for (uint32_t left = __ballot_sync(~0u, row >= 0); left; left &= left - 1) {
    const int k = __ffs(left) - 1, from = __shfl_sync(~0u, row, k);
    const float w = __shfl_sync(~0u, weight, k);
    Place place;
    place.tile_base = __shfl_sync(~0u, mine.tile_base, k), place.tiles_here = __shfl_sync(~0u, mine.tiles_here, k);
    place.token_tile = __shfl_sync(~0u, mine.token_tile, k), place.column = __shfl_sync(~0u, mine.column, k);
    if (n >= a.product.n) continue;
    float v[8];
    read8(v, a.product, runs, place, from, n);
#pragma unroll
    for (int i = 0; i < 8; i++) sum[i] = fmaf(w, v[i], sum[i]);
  }
  if (n < a.product.n) *(uint4*)(a.out + token * a.product.n + n) = round8(sum);
}

// ---- many rows an expert: products are whole in memory ------------------------------------------------------------------
struct SumArgs {
  const bf16* each;      // [sorted rows, width]
  const int* places;     // [tokens, top_k]
  const float* weights;  // [tokens, top_k], row stride below
  bf16* out;             // [tokens, width]
  int width, top_k, weights_stride, _pad;
};
constexpr int SUM_THREADS = 256, MOST_CHOICES = 32;

// Weighted sum over a token's local pairs, in the order of its choices. Grid: tokens.
extern "C" __global__ void __launch_bounds__(SUM_THREADS) sum_experts(const SumArgs a) {
  __shared__ const uint4* rows[MOST_CHOICES];
  __shared__ float weights[MOST_CHOICES];
  __shared__ int count;
  wait_for_previous_kernel();
  allow_next_kernel();
  const int t = threadIdx.x;
  const int place = t < a.top_k ? a.places[(int64_t)blockIdx.x * a.top_k + t] : -1;
  const uint32_t local = __ballot_sync(~0u, place >= 0);  // of the first warp
  if (place >= 0) {
    const int at = __popc(local & ((1u << t) - 1));
    rows[at] = (const uint4*)(a.each + (int64_t)place * a.width), weights[at] = a.weights[(int64_t)blockIdx.x * a.weights_stride + t];
  }
  if (t == 0) count = __popc(local);
  __syncthreads();
  uint4* out = (uint4*)(a.out + (int64_t)blockIdx.x * a.width);
  constexpr int EACH = 4;  // vectors of a thread, so that their loads are on their way together
  const int vectors = a.width / 8;
  for (int first = t; first < vectors; first += EACH * SUM_THREADS) {
    float sum[EACH][8];
#pragma unroll
    for (int j = 0; j < EACH; j++) zero8(sum[j]);
    for (int i = 0; i < count; i++) {
      const uint4* row = rows[i];
      const float weight = weights[i];
      uint4 raw[EACH];
#pragma unroll
      for (int j = 0; j < EACH; j++) raw[j] = row[min(first + j * SUM_THREADS, vectors - 1)];
#pragma unroll
      for (int j = 0; j < EACH; j++) {
        float v[8];
        load8(v, (const bf16*)&raw[j]);
#pragma unroll
        for (int e = 0; e < 8; e++) sum[j][e] = fmaf(weight, v[e], sum[j][e]);
      }
    }
#pragma unroll
    for (int j = 0; j < EACH; j++) {
      if (first + j * SUM_THREADS < vectors) out[first + j * SUM_THREADS] = round8(sum[j]);
    }
  }
}
