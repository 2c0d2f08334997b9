// Reductions across a warp in a fixed order, so that results repeat bit for bit.
#pragma once

namespace adaln {

// Sums each of K values over the warp (K a power of two up to 32), halving the set as it goes: lane l ends with the sum
// of value l / (32 / K) in v[0]. K = 8 takes 9 shuffles where eight butterflies take 40.
template <int K>
__device__ __forceinline__ void warp_sum_scatter(float (&v)[K]) {
  static_assert(K >= 1 && K <= 32 && (K & (K - 1)) == 0, "a power of two");
  const unsigned lane = threadIdx.x % 32;
  int offset = 16;
#pragma unroll
  for (int half = K / 2; half >= 1; half /= 2) {
    const bool upper = lane & offset;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float keep = upper ? v[i + half] : v[i];
      const float send = upper ? v[i] : v[i + half];
      v[i] = keep + __shfl_xor_sync(0xffffffffu, send, offset);
    }
    offset /= 2;
  }
#pragma unroll
  for (; offset >= 1; offset /= 2) v[0] += __shfl_xor_sync(0xffffffffu, v[0], offset);
}

// Sums each of K values over the warp; every lane gets every sum.
template <int K>
__device__ __forceinline__ void warp_sum(float (&v)[K]) {
  warp_sum_scatter(v);
  if constexpr (K > 1) {
    const float mine = v[0];
#pragma unroll
    for (int i = 0; i < K; ++i) v[i] = __shfl_sync(0xffffffffu, mine, i * (32 / K));
  }
}

}  // namespace adaln
