// Forward: y = (x - mean) * rstd * (1 + scale) + shift in one launch.
#pragma once

#include "reduce.cuh"
#include "rows.cuh"

namespace adaln {

struct ForwardArgs {
  Tensor x, y;
  Modulation shift, scale;
  float* mean;
  float* rstd;
  float eps;
  int dim;
};

// Variance in two passes over registers: each warp centres on its own mean (no E[x^2] - mean^2, which loses a spread of
// 1 on a mean of 1e4), then the warps' (mean, sum of squared deviations) are merged (Chan, Golub & LeVeque 1979).
template <typename X, typename Y, int V, int R, bool Keep>
__global__ void __launch_bounds__(max_threads(V, kElements<X, Y>)) forward_rows(const ForwardArgs a, const Loop loop) {
  constexpr int E = kElements<X, Y>;
  extern __shared__ __align__(128) char shared[];
  __shared__ float4 partial[2][16][R];  // by warp: mean, sum of squared deviations, elements

  const int64_t sample = blockIdx.x / loop.blocks;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  RowReader<X, X, E, V, R, false, Keep> reader(loop, operand_of(a.x, sample, sizeof(X)), {}, shared);

  float gain[V][E], bias[V][E];
  int elements_of_warp = 0;
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const int i = threadIdx.x + v * blockDim.x;
    elements_of_warp += E * max(0, min(32, loop.vectors - static_cast<int>(warp * 32 + v * blockDim.x)));
    if (i < loop.vectors) {
      load_modulation(a.scale, sample, static_cast<int64_t>(i) * E, gain[v]);
      load_modulation(a.shift, sample, static_cast<int64_t>(i) * E, bias[v]);
    }
#pragma unroll
    for (int e = 0; e < E; ++e) gain[v][e] += 1.0f;
  }
  const float elements = static_cast<float>(elements_of_warp), per_warp = 1.0f / elements;
  const float per_row = 1.0f / static_cast<float>(a.dim);
  char* const y_base = static_cast<char*>(a.y.data) + sample * a.y.batch_stride * static_cast<int64_t>(sizeof(Y));

  for (int buffer = 0; reader.valid(); buffer ^= 1) {
    reader.wait();
    Pack<X, E> x[R][V];
#pragma unroll
    for (int r = 0; r < R; ++r) {
#pragma unroll
      for (int v = 0; v < V; ++v) x[r][v] = reader.a(r, v);
    }

    float origin[R], mean_w[R], m2_w[R];
#pragma unroll
    for (int r = 0; r < R; ++r) {
      // A float sum of large values would round the mean itself; sums of differences do not.
      origin[r] = 0.0f;
      if constexpr (sizeof(X) == 4) origin[r] = __shfl_sync(0xffffffffu, __uint_as_float(x[r][0].word[0].x), 0);
      mean_w[r] = 0.0f;
#pragma unroll
      for (int v = 0; v < V; ++v) {
        if (threadIdx.x + v * blockDim.x < loop.vectors) {
          float f[E];
          unpack(x[r][v], f);
#pragma unroll
          for (int e = 0; e < E; ++e) mean_w[r] += f[e] - origin[r];
        }
      }
    }
    warp_sum(mean_w);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      mean_w[r] = origin[r] + mean_w[r] * per_warp;
      m2_w[r] = 0.0f;
#pragma unroll
      for (int v = 0; v < V; ++v) {
        if (threadIdx.x + v * blockDim.x < loop.vectors) {
          float f[E];
          unpack(x[r][v], f);
#pragma unroll
          for (int e = 0; e < E; ++e) m2_w[r] += (f[e] - mean_w[r]) * (f[e] - mean_w[r]);
        }
      }
    }
    warp_sum_scatter(m2_w);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      if (lane == r * (32 / R)) partial[buffer][warp][r] = make_float4(mean_w[r], m2_w[0], elements, 0.0f);
    }
    const int64_t row = reader.first_row();
    const int count = reader.count();
    __syncthreads();
    reader.refill();

#pragma unroll
    for (int r = 0; r < R; ++r) {
      if (r >= count) break;
      const float centre = partial[buffer][0][r].x;
      float mean = 0.0f, m2 = 0.0f, between = 0.0f;
      for (int w = 0; w < warps; ++w) {
        const float4 p = partial[buffer][w][r];
        const float d = p.x - centre, weighted = d * p.z;
        mean += weighted;
        between = fmaf(d, weighted, between);
        m2 += p.y;
      }
      mean *= per_row;
      // `between` is centred on the first warp's mean; moving it to the row's mean cancels at most a factor `warps`.
      const float variance = fmaxf((m2 + between) * per_row - mean * mean, 0.0f);
      mean += centre;
      const float rstd = rsqrtf(variance + a.eps);
      if (threadIdx.x == 0) {
        const int64_t index = sample * loop.rows + row + r;
        a.mean[index] = mean;
        a.rstd[index] = rstd;
      }
      char* const y_row = y_base + (row + r) * a.y.row_stride * static_cast<int64_t>(sizeof(Y));
#pragma unroll
      for (int v = 0; v < V; ++v) {
        const int i = threadIdx.x + v * blockDim.x;
        if (i < loop.vectors) {
          float f[E];
          unpack(Keep ? x[r][v] : reader.a(r, v), f);
#pragma unroll
          for (int e = 0; e < E; ++e) f[e] = (f[e] - mean) * rstd * gain[v][e] + bias[v][e];
          Pack<Y, E> out;
          pack(f, out);
          out.store(y_row + static_cast<int64_t>(i) * E * sizeof(Y));
        }
      }
    }
    reader.advance();
  }
}

}  // namespace adaln
