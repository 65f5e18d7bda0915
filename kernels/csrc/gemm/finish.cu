// Second half of a dense streaming product: the tiles that several CTAs shared are summed in CTA order and written.
#include "common/ptx.cuh"
#include "gemm/schedule.cuh"

struct FinishArgs {
  Product product;
  int rows;
};

constexpr int FINISH_THREADS = 256, TILES_A_CTA = FINISH_THREADS / 32;

// Grid: rows x groups of 8 row tiles; one warp a row and row tile.
template <class T> DEVICE void finish(const FinishArgs& a) {
  allow_next_kernel();
  wait_for_previous_kernel();
  const int chunks = (a.product.schedule.row_tiles + TILES_A_CTA - 1) / TILES_A_CTA;
  const int row = blockIdx.x / chunks, row_tile = blockIdx.x % chunks * TILES_A_CTA + threadIdx.x / 32;
  const Product& p = a.product;
  const Schedule& s = p.schedule;
  const int n = row_tile * TILE_ROWS + 4 * (threadIdx.x % 32);
  if (row_tile >= s.row_tiles || n >= p.n) return;
  const int token_tiles = (a.rows + s.token_tile - 1) / s.token_tile;
  float4 v;
  const Runs runs(s.row_tiles * token_tiles * s.k_blocks, s.ctas);
  if (!add_partials(p, runs, row_tile * token_tiles + row / s.token_tile, row % s.token_tile, n, v)) return;
  T* out = (T*)p.out + (int64_t)row * p.n + n;
  if constexpr (sizeof(T) == 2) {
    *(uint2*)out = pack_bf16x4(v);
  } else {
    *(float4*)out = v;
  }
}

extern "C" __global__ void __launch_bounds__(FINISH_THREADS) finish_bf16(const FinishArgs a) { finish<bf16>(a); }
extern "C" __global__ void __launch_bounds__(FINISH_THREADS) finish_fp32(const FinishArgs a) { finish<float>(a); }
