// Kernels that take any D, any alignment and any row stride, one element at a time; the paper's D-tile reduction; and
// the fixed-order finish of the partial sums.
#pragma once

#include "backward.cuh"
#include "forward.cuh"

namespace adaln {

constexpr int kScalarThreads = 256;

// Sum over the block, in a fixed order; every thread gets it. `shared` holds kScalarThreads / 32 floats.
__device__ __forceinline__ float block_sum(float v, float* shared) {
  float one[1] = {v};
  warp_sum_scatter(one);
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = one[0];
  __syncthreads();
  float total = 0.0f;
#pragma unroll
  for (int w = 0; w < kScalarThreads / 32; ++w) total += shared[w];
  return total;
}

template <typename T>
__device__ __forceinline__ T* row_of(const Tensor& t, int64_t sample, int64_t row) {
  return static_cast<T*>(t.data) + sample * t.batch_stride + row * t.row_stride;
}

__device__ __forceinline__ float modulation_at(const Modulation& m, int64_t sample, int64_t row, int64_t d) {
  return load_element(m.data, m.type, sample * m.batch_stride + row * m.row_stride + d * m.stride);
}

__device__ __forceinline__ void store_element(const Gradient& g, int64_t i, float v) {
  switch (g.type) {
    case DType::f32:
      static_cast<float*>(g.data)[i] = v;
      return;
    case DType::f16:
      static_cast<__half*>(g.data)[i] = from_float<__half>(v);
      return;
    case DType::bf16:
      static_cast<__nv_bfloat16*>(g.data)[i] = from_float<__nv_bfloat16>(v);
      return;
  }
}

template <typename X, typename Y>
__global__ void __launch_bounds__(kScalarThreads)
    forward_scalar(const Forward a, int64_t batch, int64_t rows, int dim) {
  __shared__ float shared[kScalarThreads / 32];
  for (int64_t index = blockIdx.x; index < batch * rows; index += gridDim.x) {
    const int64_t sample = index / rows, row = index % rows;
    const X* const x = row_of<X>(a.x, sample, row);
    Y* const y = row_of<Y>(a.y, sample, row);
    const float origin = to_float(x[0]);
    float sum = 0.0f;
    for (int d = threadIdx.x; d < dim; d += kScalarThreads) sum += to_float(x[d]) - origin;
    const float mean = origin + block_sum(sum, shared) / static_cast<float>(dim);
    float m2 = 0.0f;
    for (int d = threadIdx.x; d < dim; d += kScalarThreads) {
      const float deviation = to_float(x[d]) - mean;
      m2 = fmaf(deviation, deviation, m2);
    }
    const float rstd = rsqrtf(block_sum(m2, shared) / static_cast<float>(dim) + a.eps);
    if (threadIdx.x == 0) a.mean[index] = mean, a.rstd[index] = rstd;
    for (int d = threadIdx.x; d < dim; d += kScalarThreads) {
      const float gain = 1.0f + modulation_at(a.scale, sample, row, d), bias = modulation_at(a.shift, sample, row, d);
      y[d] = from_float<Y>((to_float(x[d]) - mean) * rstd * gain + bias);
    }
  }
}

// dx, and per token dscale.
template <typename X, typename Y>
__global__ void __launch_bounds__(kScalarThreads)
    backward_scalar(const Backward a, int64_t batch, int64_t rows, int dim, bool per_token) {
  __shared__ float shared[kScalarThreads / 32];
  for (int64_t index = blockIdx.x; index < batch * rows; index += gridDim.x) {
    const int64_t sample = index / rows, row = index % rows;
    const X* const x = row_of<X>(a.x, sample, row);
    const Y* const dy = row_of<Y>(a.dy, sample, row);
    X* const dx = row_of<X>(a.dx, sample, row);
    const float mean = a.mean[index], rstd = a.rstd[index];
    // Rounded here, not contracted into what follows: g must be the same number wherever it is used, or in rows of
    // nearly equal features rstd, up to 1 / sqrt(eps), blows the difference up.
    const auto gradient = [&](int d) {
      return __fmul_rn(to_float(dy[d]), 1.0f + modulation_at(a.scale, sample, row, d));
    };
    float g_sum = 0.0f, gx_sum = 0.0f;
    for (int d = threadIdx.x; d < dim; d += kScalarThreads) {
      const float g = gradient(d);
      g_sum += g;
      gx_sum = fmaf(g, (to_float(x[d]) - mean) * rstd, gx_sum);
    }
    const float g_mean = block_sum(g_sum, shared) / static_cast<float>(dim);
    const float gx_mean = block_sum(gx_sum, shared) / static_cast<float>(dim);
    for (int d = threadIdx.x; d < dim; d += kScalarThreads) {
      const float xhat = (to_float(x[d]) - mean) * rstd;
      dx[d] = from_float<X>(rstd * (gradient(d) - g_mean - xhat * gx_mean));
      if (per_token) store_element(a.dscale, index * dim + d, to_float(dy[d]) * xhat);
    }
  }
}

// The paper's D-tile: grid (d_tile, n_tile) for each sample; a thread is pinned to a feature and accumulates down a
// chunk of the rows, so that a warp's loads are coalesced and nothing is exchanged between threads.
template <typename X, typename Y>
__global__ void __launch_bounds__(kScalarThreads)
    backward_dtile(const Backward a, float* partial, int64_t rows, int dim, int d_tiles, int n_tiles) {
  const int d = (blockIdx.x % d_tiles) * kScalarThreads + threadIdx.x;
  const int n_tile = blockIdx.x / d_tiles % n_tiles;
  const int64_t sample = blockIdx.x / d_tiles / n_tiles;
  if (d >= dim) return;
  const int64_t first = rows * n_tile / n_tiles, last = rows * (n_tile + 1) / n_tiles;
  const X* x = row_of<X>(a.x, sample, first) + d;
  const Y* dy = row_of<Y>(a.dy, sample, first) + d;
  const float* const mean = a.mean + sample * rows;
  const float* const rstd = a.rstd + sample * rows;
  float dscale = 0.0f, dshift = 0.0f;
#pragma unroll 8
  for (int64_t row = first; row < last; ++row) {
    const float g = to_float(*dy);
    dshift += g;
    dscale = fmaf(g, (to_float(*x) - __ldg(mean + row)) * __ldg(rstd + row), dscale);
    x += a.x.row_stride;
    dy += a.dy.row_stride;
  }
  float* const out = partial + (sample * n_tiles + n_tile) * 2 * dim;
  out[d] = dscale;
  out[dim + d] = dshift;
}

// Sums partial [B, partials, sums, D] over the partials in a fixed order, into the first `wanted` gradients [B, D].
// A thread owns `Floats` features and every Warps-th partial.
struct Gradients {
  Gradient of[3];  // in the order of `Sum`
};

template <int Floats, int Warps>
__global__ void __launch_bounds__(32 * Warps) finish_gradients(const float* partial, int partials, int sums, int wanted,
                                                               int dim, int tiles, const Gradients gradients) {
  struct alignas(4 * Floats) Part {
    float of[Floats];
  };
  __shared__ Part by_warp[Warps][32];
#if ADALN_BULK
  wait_for_prerequisite();
#endif
  const int64_t sample = blockIdx.x / tiles;
  const int stride = sums * dim, columns = wanted * dim;
  const int column = ((blockIdx.x % tiles) * 32 + threadIdx.x % 32) * Floats;
  const int warp = threadIdx.x / 32;
  Part sum{};
  if (column < columns) {
    const float* const in = partial + sample * partials * stride + column;
#pragma unroll 8
    for (int b = warp; b < partials; b += Warps) {
      const Part part = *reinterpret_cast<const Part*>(in + static_cast<int64_t>(b) * stride);
#pragma unroll
      for (int i = 0; i < Floats; ++i) sum.of[i] += part.of[i];
    }
  }
  by_warp[warp][threadIdx.x % 32] = sum;
  __syncthreads();
  if (warp != 0 || column >= columns) return;
#pragma unroll
  for (int w = 1; w < Warps; ++w) {
    const Part part = by_warp[w][threadIdx.x];
#pragma unroll
    for (int i = 0; i < Floats; ++i) sum.of[i] += part.of[i];
  }
  const Gradient& to = column < dim ? gradients.of[0] : column < 2 * dim ? gradients.of[1] : gradients.of[2];
#pragma unroll
  for (int i = 0; i < Floats; ++i) store_element(to, sample * dim + column % dim + i, sum.of[i]);
}

}  // namespace adaln
