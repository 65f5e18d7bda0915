// wgmma with both operands in shared memory, m64, for every token or row tile the products use.
// fp8: k-steps of 32 values, bf16: of 16; both are 32 bytes of a row. fp8_zero starts a fresh accumulator; in bf16_ta, A is
// MN-major: rows of shared memory are its K index.
#pragma once
#include "common/ptx.cuh"

// Accumulator lists of 4 r registers: operand names and constraints, built four at a time.
#define OPERANDS4(c, d, i) c(d[i]), c(d[i + 1]), c(d[i + 2]), c(d[i + 3])
#define NAMES_1 "%0, %1, %2, %3"
#define OPERANDS_1(c, d) OPERANDS4(c, d, 0)
#define NAMES_2 NAMES_1 ", %4, %5, %6, %7"
#define OPERANDS_2(c, d) OPERANDS_1(c, d), OPERANDS4(c, d, 4)
#define NAMES_3 NAMES_2 ", %8, %9, %10, %11"
#define OPERANDS_3(c, d) OPERANDS_2(c, d), OPERANDS4(c, d, 8)
#define NAMES_4 NAMES_3 ", %12, %13, %14, %15"
#define OPERANDS_4(c, d) OPERANDS_3(c, d), OPERANDS4(c, d, 12)
#define NAMES_5 NAMES_4 ", %16, %17, %18, %19"
#define OPERANDS_5(c, d) OPERANDS_4(c, d), OPERANDS4(c, d, 16)
#define NAMES_6 NAMES_5 ", %20, %21, %22, %23"
#define OPERANDS_6(c, d) OPERANDS_5(c, d), OPERANDS4(c, d, 20)
#define NAMES_7 NAMES_6 ", %24, %25, %26, %27"
#define OPERANDS_7(c, d) OPERANDS_6(c, d), OPERANDS4(c, d, 24)
#define NAMES_8 NAMES_7 ", %28, %29, %30, %31"
#define OPERANDS_8(c, d) OPERANDS_7(c, d), OPERANDS4(c, d, 28)
#define NAMES_9 NAMES_8 ", %32, %33, %34, %35"
#define OPERANDS_9(c, d) OPERANDS_8(c, d), OPERANDS4(c, d, 32)
#define NAMES_10 NAMES_9 ", %36, %37, %38, %39"
#define OPERANDS_10(c, d) OPERANDS_9(c, d), OPERANDS4(c, d, 36)
#define NAMES_11 NAMES_10 ", %40, %41, %42, %43"
#define OPERANDS_11(c, d) OPERANDS_10(c, d), OPERANDS4(c, d, 40)
#define NAMES_12 NAMES_11 ", %44, %45, %46, %47"
#define OPERANDS_12(c, d) OPERANDS_11(c, d), OPERANDS4(c, d, 44)
#define NAMES_13 NAMES_12 ", %48, %49, %50, %51"
#define OPERANDS_13(c, d) OPERANDS_12(c, d), OPERANDS4(c, d, 48)
#define NAMES_14 NAMES_13 ", %52, %53, %54, %55"
#define OPERANDS_14(c, d) OPERANDS_13(c, d), OPERANDS4(c, d, 52)
#define NAMES_15 NAMES_14 ", %56, %57, %58, %59"
#define OPERANDS_15(c, d) OPERANDS_14(c, d), OPERANDS4(c, d, 56)
#define NAMES_16 NAMES_15 ", %60, %61, %62, %63"
#define OPERANDS_16(c, d) OPERANDS_15(c, d), OPERANDS4(c, d, 60)
#define NAMES_17 NAMES_16 ", %64, %65, %66, %67"
#define OPERANDS_17(c, d) OPERANDS_16(c, d), OPERANDS4(c, d, 64)
#define NAMES_18 NAMES_17 ", %68, %69, %70, %71"
#define OPERANDS_18(c, d) OPERANDS_17(c, d), OPERANDS4(c, d, 68)

template <int N> struct Wgmma;

// N columns: 4 R accumulator registers a thread. A and B: operand numbers of the two descriptors, 4 R and 4 R + 1.
#define DEFINE_WGMMA(N, R, A, B)                                                                                     \
  template <> struct Wgmma<N> {                                                                                      \
    static DEVICE void fp8_zero(float (&d)[4 * R], uint64_t a, uint64_t b) {                                         \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, 0, 0;\nwgmma.mma_async.sync.aligned.m64n" #N                    \
                   "k32.f32.e4m3.e4m3 {" NAMES_##R "}, %" #A ", %" #B ", p, 1, 1;\n}\n"                              \
                   : OPERANDS_##R("=f", d) : "l"(a), "l"(b));                                                        \
    }                                                                                                                \
    static DEVICE void fp8(float (&d)[4 * R], uint64_t a, uint64_t b) {                                              \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\nwgmma.mma_async.sync.aligned.m64n" #N                    \
                   "k32.f32.e4m3.e4m3 {" NAMES_##R "}, %" #A ", %" #B ", p, 1, 1;\n}\n"                              \
                   : OPERANDS_##R("+f", d) : "l"(a), "l"(b));                                                        \
    }                                                                                                                \
    static DEVICE void bf16(float (&d)[4 * R], uint64_t a, uint64_t b) {                                             \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\nwgmma.mma_async.sync.aligned.m64n" #N                    \
                   "k16.f32.bf16.bf16 {" NAMES_##R "}, %" #A ", %" #B ", p, 1, 1, 0, 0;\n}\n"                        \
                   : OPERANDS_##R("+f", d) : "l"(a), "l"(b));                                                        \
    }                                                                                                                \
    static DEVICE void bf16_ta(float (&d)[4 * R], uint64_t a, uint64_t b) {                                             \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\nwgmma.mma_async.sync.aligned.m64n" #N                    \
                   "k16.f32.bf16.bf16 {" NAMES_##R "}, %" #A ", %" #B ", p, 1, 1, 1, 0;\n}\n"                        \
                   : OPERANDS_##R("+f", d) : "l"(a), "l"(b));                                                        \
    }                                                                                                                \
  };

DEFINE_WGMMA(8, 1, 4, 5)
DEFINE_WGMMA(16, 2, 8, 9)
DEFINE_WGMMA(24, 3, 12, 13)
DEFINE_WGMMA(32, 4, 16, 17)
DEFINE_WGMMA(40, 5, 20, 21)
DEFINE_WGMMA(48, 6, 24, 25)
DEFINE_WGMMA(56, 7, 28, 29)
DEFINE_WGMMA(64, 8, 32, 33)
DEFINE_WGMMA(72, 9, 36, 37)
DEFINE_WGMMA(80, 10, 40, 41)
DEFINE_WGMMA(88, 11, 44, 45)
DEFINE_WGMMA(96, 12, 48, 49)
DEFINE_WGMMA(104, 13, 52, 53)
DEFINE_WGMMA(112, 14, 56, 57)
DEFINE_WGMMA(120, 15, 60, 61)
DEFINE_WGMMA(128, 16, 64, 65)
DEFINE_WGMMA(136, 17, 68, 69)
DEFINE_WGMMA(144, 18, 72, 73)

// The transpose of an 8 x 8 tile of 16-bit values held two a lane.
DEVICE uint32_t transpose_8x8(uint32_t v) {
  uint32_t r;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(v));
  return r;
}
