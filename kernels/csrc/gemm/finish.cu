// Second half of a dense streaming product: the tiles that several CTAs shared are summed in CTA order and written.
#include "common/ptx.cuh"
#include "gemm/schedule.cuh"

struct FinishArgs {
  Product product;
  int rows;
};

constexpr int FINISH_THREADS = 256, COLUMNS_A_CTA = FINISH_THREADS * 4;

// Grid: rows x groups of 1024 columns; four columns a thread.
template <class T> DEVICE void finish(const FinishArgs& a) {
  wait_for_previous_kernel();
  allow_next_kernel();
  const int chunks = (a.product.n + COLUMNS_A_CTA - 1) / COLUMNS_A_CTA;
  const int row = blockIdx.x / chunks, n = blockIdx.x % chunks * COLUMNS_A_CTA + 4 * threadIdx.x;
  const Product& p = a.product;
  const Schedule& s = p.schedule;
  if (n >= p.n) return;
  const int token_tiles = (a.rows + s.token_tile - 1) / s.token_tile;
  const Runs runs(s.row_tiles * token_tiles * s.k_units, s.ctas);
  const Owners owners(s, runs, n / s.tile_rows * token_tiles + row / s.token_tile);
  if (owners.first == owners.last) return;
  const float4 v = add_partials(p, owners, row % s.token_tile, n);
  T* out = (T*)p.out + (int64_t)row * p.n + n;
  if constexpr (sizeof(T) == 2) {
    *(uint2*)out = pack_bf16x4(v);
  } else {
    *(float4*)out = v;
  }
}

extern "C" __global__ void __launch_bounds__(FINISH_THREADS) finish_bf16(const FinishArgs a) { finish<bf16>(a); }
extern "C" __global__ void __launch_bounds__(FINISH_THREADS) finish_fp32(const FinishArgs a) { finish<float>(a); }
