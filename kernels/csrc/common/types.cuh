// Fixed-width types and small value helpers. Header-free: NVRTC compiles these sources without any include path.
#pragma once
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
typedef long long int64_t;
struct alignas(64) CUtensorMap { uint64_t opaque[16]; };
#define DEVICE __device__ __forceinline__

// BF16 as its 16 bits; FP32 as float. load() widens, store() rounds to nearest even.
struct bf16 { uint16_t bits; };
DEVICE float widen(bf16 v) { return __uint_as_float((uint32_t)v.bits << 16); }
DEVICE float widen(float v) { return v; }
DEVICE uint32_t pack_bf16(float lo, float hi) {
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}
template <class T> DEVICE T narrow(float v);
template <> DEVICE bf16 narrow<bf16>(float v) { return bf16{(uint16_t)pack_bf16(v, 0.f)}; }
template <> DEVICE float narrow<float>(float v) { return v; }
#define INFINITY_F __int_as_float(0x7f800000)
constexpr float FP8_MAX = 448.f, AMAX_FLOOR = 1e-4f;  // of E4M3; a maximum below the floor counts as it (kernels/layout.py)
// Hides a value's origin from the compiler, so that what is computed from it is not kept in registers across a loop.
DEVICE void forget(int& v) { asm volatile("" : "+r"(v)); }
