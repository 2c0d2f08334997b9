// 16-byte memory accesses and conversions between storage types and float.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "adaln.h"

namespace adaln {

// Elements of a vector: the narrower of input and output moves 16 bytes at a time.
template <typename X, typename Y>
constexpr int kElements = 16 / static_cast<int>(sizeof(X) < sizeof(Y) ? sizeof(X) : sizeof(Y));

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
  // Streaming: evicted first, as rows are read and written once.
  template <bool Streaming>
  __device__ __forceinline__ void load_global(const void* p) {
    const uint4* const words = static_cast<const uint4*>(p);
#pragma unroll
    for (int i = 0; i < kWords; ++i) word[i] = Streaming ? __ldcs(words + i) : words[i];
  }
  __device__ __forceinline__ void store(void* p) const {
#pragma unroll
    for (int i = 0; i < kWords; ++i) static_cast<uint4*>(p)[i] = word[i];
  }
  template <bool Streaming>
  __device__ __forceinline__ void store_global(void* p) const {
    uint4* const words = static_cast<uint4*>(p);
#pragma unroll
    for (int i = 0; i < kWords; ++i) Streaming ? __stcs(words + i, word[i]) : void(words[i] = word[i]);
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

// (x - mean) * rstd, where offset = -mean * rstd. In float the fused form would round away a spread of 1 on a mean of
// 1e4; half types do not hold such a row.
template <typename X, typename Y>
__device__ __forceinline__ float normalise(float x, float mean, float rstd, float offset) {
  if constexpr (sizeof(X) == 2 && sizeof(Y) == 2) return fmaf(x, rstd, offset);
  return (x - mean) * rstd;
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

// Stores N consecutive elements of a gradient whose type is known at run time only, from element `i` on.
template <int N>
__device__ __forceinline__ void store_gradient(const Gradient& g, int64_t i, const float (&in)[N]) {
  if (g.type == DType::f32) {
    Pack<float, N> out;
    pack(in, out);
    out.store(static_cast<float*>(g.data) + i);
    return;
  }
  uint32_t* const p = static_cast<uint32_t*>(g.data) + i / 2;
#pragma unroll
  for (int e = 0; e < N; e += 4) {
    const bool half = g.type == DType::f16;
    const uint32_t lo = half ? pack2<__half>(in[e], in[e + 1]) : pack2<__nv_bfloat16>(in[e], in[e + 1]);
    const uint32_t hi = half ? pack2<__half>(in[e + 2], in[e + 3]) : pack2<__nv_bfloat16>(in[e + 2], in[e + 3]);
    *reinterpret_cast<uint2*>(p + e / 2) = make_uint2(lo, hi);
  }
}

// N consecutive features of a modulation; p is aligned to 16 bytes, or to N * sizeof(T) where that is less.
template <typename T, int N>
__device__ __forceinline__ void load_features(const T* p, float (&out)[N]) {
  if constexpr (N * sizeof(T) % 16 == 0) {
    Pack<T, N> pack;
    pack.load_shared(p);  // plain loads: these lines are shared by every block
    unpack(pack, out);
  } else {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      const float2 f = unpack2<T>(reinterpret_cast<const uint32_t*>(p)[i]);
      out[2 * i] = f.x, out[2 * i + 1] = f.y;
    }
  }
}

// The same from feature `d` on of a token's modulation.
template <typename T, int N>
__device__ __forceinline__ void load_modulation(const Modulation& m, int64_t sample, int64_t row, int64_t d,
                                                float (&out)[N]) {
  load_features(static_cast<const T*>(m.data) + sample * m.batch_stride + row * m.row_stride + d, out);
}

// Calls f with a value of the type, so that loads inside stand in straight code and overlap.
template <typename F>
__device__ __forceinline__ void with_type(DType type, const F& f) {
  switch (type) {
    case DType::f32:
      return f(float{});
    case DType::f16:
      return f(__half{});
    case DType::bf16:
      return f(__nv_bfloat16{});
  }
}

}  // namespace adaln
