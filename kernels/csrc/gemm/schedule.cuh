// Who computes what in a streaming product, as arithmetic that the product and the kernels after it share.
//
// A product is a list of tiles, 128 weight rows by NT tokens: expert by expert, row tile by row tile, token tiles innermost so
// that neighbours read the same weights. A tile is k_units units; a unit is two blocks of its weight rows, 128 bytes wide each.
// Every CTA takes an equal run of units, so all stream the same number of bytes, whatever the shape. A tile whose units lie in
// one CTA is written at once. Any other tile is written as FP32 partial sums, and the next kernel adds them in CTA order, so
// results never depend on timing.
//
// A CTA has at most two partial tiles: slot 0 is one it did not begin, slot 1 one it began and did not end.
#pragma once
#include "common/types.cuh"

constexpr int MAX_EXPERTS = 512;

// Rows of a product by expert, as the sort leaves them in device memory; a dense product has one expert.
struct Groups {
  const int* offsets;  // [experts + 1] first token row of each expert
  const int* tiles;    // [experts + 1] first token tile of each expert
  int experts;
};

struct Schedule {
  int tile_rows, row_tiles, k_units, ctas, token_tile;  // token_tile: NT
};

// Equal runs: the first `extra` CTAs take each + 1 units, the others `each`.
struct Runs {
  int each, extra;
  DEVICE Runs(int units, int ctas) : each(units / ctas), extra(units % ctas) {}
  DEVICE int begin(int cta) const { return cta * each + min(cta, extra); }
  DEVICE int owner(int unit) const {
    const int longer = extra * (each + 1);
    return unit < longer ? unit / (each + 1) : extra + (unit - longer) / each;
  }
};

DEVICE uint2 pack_bf16x4(float4 v) { return make_uint2(pack_bf16(v.x, v.y), pack_bf16(v.z, v.w)); }

// A product as the kernel after it reads it.
struct Product {
  Schedule schedule;
  int n;
  const float* partial;  // [ctas, 2, NT, tile_rows]
  void* out;             // [rows, n]; tiles that one CTA computed are already in place
};

// The CTAs that share a tile: it is in `out` where there is one, else in their partial sums.
struct Owners {
  int first, last;
  DEVICE Owners(const Schedule& s, const Runs& runs, int tile) {
    first = runs.owner(tile * s.k_units), last = runs.owner(tile * s.k_units + s.k_units - 1);
  }
};

// Columns col .. col + 3 (col a multiple of 4) of the token at place `column` of a tile, summed over its CTAs in their order.
DEVICE float4 add_partials(const Product& p, const Owners& owners, int column, int col) {
  const Schedule& s = p.schedule;
  const float* at = p.partial + (int64_t)column * s.tile_rows + col % s.tile_rows;
  const int64_t slot = s.token_tile * s.tile_rows;
  float4 sum = *(const float4*)(at + (2 * owners.first + 1) * slot);
#pragma unroll 4
  for (int cta = owners.first + 1; cta <= owners.last; cta++) {
    const float4 v = *(const float4*)(at + 2 * cta * slot);
    sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
  }
  return sum;
}
