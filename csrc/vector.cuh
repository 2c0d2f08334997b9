// 16-byte memory accesses and conversions between storage types and float.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "adaln.h"

namespace adaln {

// Elements of a vector: the narrower of input and output moves 16 bytes at a time.
template <typename X, typename Y>
constexpr int kElements = 16 / static_cast<int>(sizeof(X) < sizeof(Y) ? sizeof(X) : sizeof(Y));

// Upper bound of a block's size, which sets how many registers a thread may have (128, or 255).
constexpr int max_threads(int vectors, int elements) { return vectors * elements <= 16 ? 512 : 256; }

template <typename T>
__device__ __forceinline__ float to_float(T v) {
  return static_cast<float>(v);
}

template <typename T>
__device__ __forceinline__ T from_float(float v);
template <>
__device__ __forceinline__ float from_float<float>(float v) {
  return v;
}
template <>
__device__ __forceinline__ __half from_float<__half>(float v) {
  return __float2half_rn(v);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float v) {
  return __float2bfloat16_rn(v);
}

// N consecutive elements of T, packed as they lie in memory: a whole number of 16-byte words.
template <typename T, int N>
struct alignas(16) Pack {
  static constexpr int kWords = N * static_cast<int>(sizeof(T)) / 16;
  static_assert(kWords >= 1 && N * sizeof(T) % 16 == 0, "a pack is a whole number of 16-byte words");
  uint4 word[kWords];

  __device__ __forceinline__ void zero() {
#pragma unroll
    for (int i = 0; i < kWords; ++i) word[i] = make_uint4(0, 0, 0, 0);
  }
  __device__ __forceinline__ void load_shared(const void* p) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) word[i] = static_cast<const uint4*>(p)[i];
  }
  // Rows are read once: do not let them displace the modulation and the partial sums in L1.
  __device__ __forceinline__ void load_global(const void* p) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) word[i] = __ldcs(static_cast<const uint4*>(p) + i);
  }
  __device__ __forceinline__ void store(void* p) const {
#pragma unroll
    for (int i = 0; i < kWords; ++i) __stcs(static_cast<uint4*>(p) + i, word[i]);
  }
};

template <typename T>
__device__ __forceinline__ float2 unpack2(uint32_t u);
template <>
__device__ __forceinline__ float2 unpack2<__nv_bfloat16>(uint32_t u) {
  return make_float2(__uint_as_float(u << 16), __uint_as_float(u & 0xffff0000u));
}
template <>
__device__ __forceinline__ float2 unpack2<__half>(uint32_t u) {
  return __half22float2(*reinterpret_cast<const __half2*>(&u));
}

template <typename T>
__device__ __forceinline__ uint32_t pack2(float lo, float hi);
template <>
__device__ __forceinline__ uint32_t pack2<__nv_bfloat16>(float lo, float hi) {
  const __nv_bfloat162 v = __floats2bfloat162_rn(lo, hi);
  return *reinterpret_cast<const uint32_t*>(&v);
}
template <>
__device__ __forceinline__ uint32_t pack2<__half>(float lo, float hi) {
  const __half2 v = __floats2half2_rn(lo, hi);
  return *reinterpret_cast<const uint32_t*>(&v);
}

template <typename T, int N>
__device__ __forceinline__ void unpack(const Pack<T, N>& pack, float (&out)[N]) {
  const uint32_t* u = reinterpret_cast<const uint32_t*>(pack.word);
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < N; ++i) out[i] = __uint_as_float(u[i]);
  } else {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      const float2 f = unpack2<T>(u[i]);
      out[2 * i] = f.x;
      out[2 * i + 1] = f.y;
    }
  }
}

template <typename T, int N>
__device__ __forceinline__ void pack(const float (&in)[N], Pack<T, N>& out) {
  uint32_t* u = reinterpret_cast<uint32_t*>(out.word);
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < N; ++i) u[i] = __float_as_uint(in[i]);
  } else {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) u[i] = pack2<T>(in[2 * i], in[2 * i + 1]);
  }
}

// Element `i` of a modulation row; its type is known at run time only, since it is read once per block.
__device__ __forceinline__ float load_element(const void* data, DType type, int64_t i) {
  switch (type) {
    case DType::f32:
      return static_cast<const float*>(data)[i];
    case DType::f16:
      return __half2float(static_cast<const __half*>(data)[i]);
    default:
      return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[i]);
  }
}

// N consecutive elements of sample `b`'s modulation row, starting at feature `d`.
template <int N>
__device__ __forceinline__ void load_modulation(const Modulation& m, int64_t b, int64_t d, float (&out)[N]) {
  const int64_t base = b * m.batch_stride + d * m.stride;
  const char* p = static_cast<const char*>(m.data) + base * (m.type == DType::f32 ? 4 : 2);
  if (m.stride == 1 && reinterpret_cast<uintptr_t>(p) % 16 == 0 && N % 4 == 0) {
    if (m.type == DType::f32) {
#pragma unroll
      for (int i = 0; i < N / 4; ++i) {
        const float4 f = reinterpret_cast<const float4*>(p)[i];
        out[4 * i] = f.x, out[4 * i + 1] = f.y, out[4 * i + 2] = f.z, out[4 * i + 3] = f.w;
      }
      return;
    }
    if constexpr (N % 8 == 0) {
      Pack<__half, N> half_pack;
      half_pack.load_shared(p);  // a plain 16-byte load: these lines are shared by every block
      if (m.type == DType::f16) {
        unpack(half_pack, out);
      } else {
        unpack(reinterpret_cast<const Pack<__nv_bfloat16, N>&>(half_pack), out);
      }
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < N; ++i) out[i] = load_element(m.data, m.type, base + i * m.stride);
}

}  // namespace adaln
