// wgmma with both operands in shared memory, 64 weight rows by NT tokens, for every token tile of the streaming product.
// fp8: k-steps of 32 values, bf16: of 16; both are 32 bytes of a row. fp8_zero starts a fresh accumulator.
#pragma once
#include "common/ptx.cuh"

#define ACC4_NAMES "%0, %1, %2, %3"
#define ACC4(c, d) c(d[0]), c(d[1]), c(d[2]), c(d[3])
#define ACC8_NAMES "%0, %1, %2, %3, %4, %5, %6, %7"
#define ACC8(c, d) c(d[0]), c(d[1]), c(d[2]), c(d[3]), c(d[4]), c(d[5]), c(d[6]), c(d[7])
#define ACC16_NAMES "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define ACC16(c, d) \
  c(d[0]), c(d[1]), c(d[2]), c(d[3]), c(d[4]), c(d[5]), c(d[6]), c(d[7]), \
  c(d[8]), c(d[9]), c(d[10]), c(d[11]), c(d[12]), c(d[13]), c(d[14]), c(d[15])

template <int NT> struct Wgmma;

// A and B: operand numbers of the two descriptors, behind REGS accumulators.
#define DEFINE_WGMMA(NT, REGS, A, B)                                                                                    \
  template <> struct Wgmma<NT> {                                                                                        \
    static DEVICE void fp8_zero(float (&d)[REGS], uint64_t a, uint64_t b) {                                             \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, 0, 0;\nwgmma.mma_async.sync.aligned.m64n" #NT                      \
                   "k32.f32.e4m3.e4m3 {" ACC##REGS##_NAMES "}, %" #A ", %" #B ", p, 1, 1;\n}\n"                         \
                   : ACC##REGS("=f", d) : "l"(a), "l"(b));                                                              \
    }                                                                                                                   \
    static DEVICE void fp8(float (&d)[REGS], uint64_t a, uint64_t b) {                                                  \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\nwgmma.mma_async.sync.aligned.m64n" #NT                      \
                   "k32.f32.e4m3.e4m3 {" ACC##REGS##_NAMES "}, %" #A ", %" #B ", p, 1, 1;\n}\n"                         \
                   : ACC##REGS("+f", d) : "l"(a), "l"(b));                                                              \
    }                                                                                                                   \
    static DEVICE void bf16(float (&d)[REGS], uint64_t a, uint64_t b) {                                                 \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\nwgmma.mma_async.sync.aligned.m64n" #NT                      \
                   "k16.f32.bf16.bf16 {" ACC##REGS##_NAMES "}, %" #A ", %" #B ", p, 1, 1, 0, 0;\n}\n"                   \
                   : ACC##REGS("+f", d) : "l"(a), "l"(b));                                                              \
    }                                                                                                                   \
  };

DEFINE_WGMMA(8, 4, 4, 5)
DEFINE_WGMMA(16, 8, 8, 9)
DEFINE_WGMMA(32, 16, 16, 17)
DEFINE_WGMMA(64, 32, 32, 33)
DEFINE_WGMMA(128, 64, 64, 65)
