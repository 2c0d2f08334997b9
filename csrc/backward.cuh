// Backward in one pass over x and dy: dx, and per-block fp32 partial sums of dscale and dshift.
#pragma once

#include "reduce.cuh"
#include "rows.cuh"

namespace adaln {

struct BackwardArgs {
  Tensor dy, x, dx;
  Modulation scale;
  const float* mean;
  const float* rstd;
  float* partial;  // [B, blocks, 2, D]: dscale, then dshift
  int dim;
};

// Accumulate = false leaves the sums to a separate reduction (the paper's D-tile).
template <typename X, typename Y, int V, int R, bool Accumulate, bool Keep>
__global__ void __launch_bounds__(max_threads(V, kElements<X, Y>))
    backward_rows(const BackwardArgs a, const Loop loop) {
  constexpr int E = kElements<X, Y>;
  extern __shared__ __align__(128) char shared[];
  __shared__ __align__(16) float sums[2][16][2 * R];  // of g, and of g * xhat, by warp

  const int64_t sample = blockIdx.x / loop.blocks;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  RowReader<X, Y, E, V, R, true, Keep> reader(loop, operand_of(a.x, sample, sizeof(X)),
                                              operand_of(a.dy, sample, sizeof(Y)), shared);

  float gain[V][E], dscale[V][E], dshift[V][E];
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const int i = threadIdx.x + v * blockDim.x;
    if (i < loop.vectors) load_modulation(a.scale, sample, static_cast<int64_t>(i) * E, gain[v]);
#pragma unroll
    for (int e = 0; e < E; ++e) {
      gain[v][e] = i < loop.vectors ? gain[v][e] + 1.0f : 0.0f;
      dscale[v][e] = dshift[v][e] = 0.0f;
    }
  }
  const float per_row = 1.0f / static_cast<float>(a.dim);
  const float* const mean_of = a.mean + sample * loop.rows;
  const float* const rstd_of = a.rstd + sample * loop.rows;
  char* const dx_base = static_cast<char*>(a.dx.data) + sample * a.dx.batch_stride * static_cast<int64_t>(sizeof(X));

  // The statistics of the next group are fetched one iteration ahead; rows past the end count as zeros.
  float next_mean[R], next_rstd[R];
  const auto fetch = [&](int64_t group) {
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const int64_t row = group * R + r;
      next_mean[r] = row < loop.rows ? __ldg(mean_of + row) : 0.0f;
      next_rstd[r] = row < loop.rows ? __ldg(rstd_of + row) : 0.0f;
    }
  };
  // (x - mean) * rstd: the fused form x * rstd - mean * rstd would round away a spread of 1 on a mean of 1e4 in float.
  const auto normalise = [](float x, float mean, float rstd, float offset) {
    if constexpr (sizeof(X) == 4) return (x - mean) * rstd;
    return fmaf(x, rstd, offset);
  };
  fetch(reader.group());

  for (int buffer = 0; reader.valid(); buffer ^= 1) {
    float mean[R], rstd[R];
#pragma unroll
    for (int r = 0; r < R; ++r) mean[r] = next_mean[r], rstd[r] = next_rstd[r];
    fetch(reader.group() + loop.blocks);
    reader.wait();

    Pack<X, E> x[R][V];
    Pack<Y, E> dy[R][V];
    float sum[2 * R];
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const float offset = -mean[r] * rstd[r];
      float g_sum = 0.0f, gx_sum = 0.0f;
#pragma unroll
      for (int v = 0; v < V; ++v) {
        x[r][v] = reader.a(r, v);
        dy[r][v] = reader.b(r, v);
        float xf[E], yf[E];
        unpack(x[r][v], xf);
        unpack(dy[r][v], yf);
#pragma unroll
        for (int e = 0; e < E; ++e) {
          const float xhat = normalise(xf[e], mean[r], rstd[r], offset);
          const float g = yf[e] * gain[v][e];
          g_sum += g;
          gx_sum = fmaf(g, xhat, gx_sum);
          if constexpr (Accumulate) {
            dshift[v][e] += yf[e];
            dscale[v][e] = fmaf(yf[e], xhat, dscale[v][e]);
          }
        }
      }
      sum[2 * r] = g_sum, sum[2 * r + 1] = gx_sum;
    }
    warp_sum_scatter(sum);
    if (lane % (16 / R) == 0) sums[buffer][warp][lane / (16 / R)] = sum[0];
    const int64_t row = reader.first_row();
    const int count = reader.count();
    __syncthreads();
    reader.refill();

    float total[2 * R];
#pragma unroll
    for (int i = 0; i < 2 * R; ++i) total[i] = 0.0f;
    for (int w = 0; w < warps; ++w) {
#pragma unroll
      for (int i = 0; i < 2 * R; ++i) total[i] += sums[buffer][w][i];
    }
#pragma unroll
    for (int r = 0; r < R; ++r) {
      if (r >= count) break;
      const float offset = -mean[r] * rstd[r];
      const float g_mean = total[2 * r] * per_row * rstd[r], gx_mean = total[2 * r + 1] * per_row * rstd[r];
      char* const dx_row = dx_base + (row + r) * a.dx.row_stride * static_cast<int64_t>(sizeof(X));
#pragma unroll
      for (int v = 0; v < V; ++v) {
        const int i = threadIdx.x + v * blockDim.x;
        float xf[E], yf[E];
        unpack(Keep ? x[r][v] : reader.a(r, v), xf);
        unpack(Keep ? dy[r][v] : reader.b(r, v), yf);
#pragma unroll
        for (int e = 0; e < E; ++e) {
          const float xhat = normalise(xf[e], mean[r], rstd[r], offset);
          const float g = yf[e] * gain[v][e];
          xf[e] = fmaf(g, rstd[r], -g_mean) - xhat * gx_mean;
        }
        if (i < loop.vectors) {
          Pack<X, E> out;
          pack(xf, out);
          out.store(dx_row + static_cast<int64_t>(i) * E * sizeof(X));
        }
      }
    }
    reader.advance();
  }

  if constexpr (Accumulate) {
    float* const out = a.partial + static_cast<int64_t>(blockIdx.x) * 2 * a.dim;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const int i = threadIdx.x + v * blockDim.x;
      if (i < loop.vectors) {
#pragma unroll
        for (int e = 0; e < E; e += 4) {
          const int64_t d = static_cast<int64_t>(i) * E + e;
          *reinterpret_cast<float4*>(out + d) =
              make_float4(dscale[v][e], dscale[v][e + 1], dscale[v][e + 2], dscale[v][e + 3]);
          *reinterpret_cast<float4*>(out + a.dim + d) =
              make_float4(dshift[v][e], dshift[v][e + 1], dshift[v][e + 2], dshift[v][e + 3]);
        }
      }
    }
  }
}

}  // namespace adaln
