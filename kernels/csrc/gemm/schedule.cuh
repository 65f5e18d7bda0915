// Who computes what in a streaming product, as arithmetic that the product and the kernels after it share.
//
// A product is a list of tiles, 128 or 256 weight rows by NT tokens: expert by expert, row tile by row tile, token tiles
// innermost so that neighbours read the same weights. A tile is k_blocks units; a unit is one 128-byte-wide block of its
// weight rows. Every CTA takes an equal run of units, so all stream the same number of bytes, whatever the shape. A
// tile whose units lie in one CTA is written at once. Any other tile is written as FP32 partial sums, and the next kernel
// adds them in CTA order, so results never depend on timing.
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
  int tile_rows, row_tiles, k_blocks, ctas, token_tile;  // token_tile: NT
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

DEVICE float4 unpack_bf16x4(uint2 v) {
  return make_float4(__uint_as_float(v.x << 16), __uint_as_float(v.x & 0xFFFF0000u), __uint_as_float(v.y << 16),
                     __uint_as_float(v.y & 0xFFFF0000u));
}
DEVICE uint2 pack_bf16x4(float4 v) { return make_uint2(pack_bf16(v.x, v.y), pack_bf16(v.z, v.w)); }

// A product as the kernel after it reads it.
struct Product {
  Schedule schedule;
  int n;
  const float* partial;  // [ctas, 2, NT, tile_rows]
  void* out;             // [rows, n]; tiles that one CTA computed are already in place
};

// Columns col .. col + 3 (col a multiple of 4) of the token at place `column` of tile `tile`, summed over the CTAs that
// share the tile in their order. False: one CTA computed the tile, so the values are in `out`.
DEVICE bool add_partials(const Product& p, const Runs& runs, int tile, int column, int col, float4& sum) {
  const Schedule& s = p.schedule;
  const int unit = tile * s.k_blocks, first = runs.owner(unit), last = runs.owner(unit + s.k_blocks - 1);
  if (first == last) return false;
  const float* at = p.partial + (int64_t)column * s.tile_rows + col % s.tile_rows;
  const int64_t slot = s.token_tile * s.tile_rows;
  sum = *(const float4*)(at + (2 * first + 1) * slot);
#pragma unroll 4
  for (int cta = first + 1; cta <= last; cta++) {
    const float4 v = *(const float4*)(at + 2 * cta * slot);
    sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
  }
  return true;
}
