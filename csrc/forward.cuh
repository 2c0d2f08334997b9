// Forward: y = (x - mean) * rstd * (1 + scale) + shift in one launch, a block for R rows in the order of the launch.
//
// Rows go from memory to registers and back without a stop in shared memory. Many small blocks are resident, so that
// some load while others reduce or store; what they touch at a time lies close together. The modulation is read after
// the statistics: it comes from L1 or L2, and its registers would cost resident blocks.
#pragma once

#include "reduce.cuh"
#include "vector.cuh"

namespace adaln {

// What the host works out for a launch: grid (ceil(N / R), samples). A block is short, so what every thread would
// derive for itself costs.
struct Extent {
  int64_t rows;          // N, rows of a sample
  int64_t first_sample;  // of this launch: a grid holds 65,535
  int vectors;           // D / elements of a vector
};

// Variance in two passes over registers: each warp centres on its own mean (no E[x^2] - mean^2, which loses a spread of
// 1 on a mean of 1e4), then the warps' (mean, sum of squared deviations) are merged (Chan, Golub & LeVeque 1979).
//
// Streaming: x and the branch are loaded and y is stored to be evicted first, which small sizes gain by and large ones
// lose by (NOTES.md).
template <typename X, typename Y, int V, int R, bool Residual, bool PerToken, int Threads, int Blocks, bool Streaming>
__global__ void __launch_bounds__(Threads, Blocks) forward_rows(const Forward a, const Extent extent) {
  constexpr int E = kElements<X, Y>;
  __shared__ float4 partial[Threads / 32][R];  // by warp: mean, sum of squared deviations, elements

  const int64_t sample = extent.first_sample + blockIdx.y, row = static_cast<int64_t>(blockIdx.x) * R;
  const int count = static_cast<int>(min(static_cast<int64_t>(R), extent.rows - row));
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  const int vectors = extent.vectors, dim = vectors * E;
  const auto row_of = [&](const Tensor& t, int r, int element) {
    return static_cast<char*>(t.data) + (sample * t.batch_stride + (row + r) * t.row_stride) * element;
  };

  Pack<X, E> x[R][V];
#pragma unroll
  for (int r = 0; r < R; ++r) {
    const char* const x_row = row_of(a.x, r, sizeof(X));
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const int i = threadIdx.x + v * blockDim.x;
      if (r < count && i < vectors) {
        x[r][v].template load_global<Streaming>(x_row + static_cast<int64_t>(i) * E * sizeof(X));
      } else {
        x[r][v].zero();
      }
    }
  }

  if constexpr (Residual) {
    Pack<Y, E> branch[R][V];
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const char* const branch_row = row_of(a.branch, r, sizeof(Y));
#pragma unroll
      for (int v = 0; v < V; ++v) {
        const int i = threadIdx.x + v * blockDim.x;
        if (r < count && i < vectors) {
          branch[r][v].template load_global<Streaming>(branch_row + static_cast<int64_t>(i) * E * sizeof(Y));
        }
      }
    }
    const bool gated = a.gate.data != nullptr;
    with_type(a.gate.type, [&](auto type) {
#pragma unroll
      for (int v = 0; v < V; ++v) {
        const int i = threadIdx.x + v * blockDim.x;
        if (i >= vectors) continue;
        float gate[E];
#pragma unroll
        for (int r = 0; r < R; ++r) {
          if (r >= count) continue;
          if (PerToken || r == 0) {
            if (gated) {
              load_modulation<decltype(type)>(a.gate, sample, row + r, static_cast<int64_t>(i) * E, gate);
            } else {
#pragma unroll
              for (int e = 0; e < E; ++e) gate[e] = 1.0f;
            }
          }
          float h[E], b[E];
          unpack(x[r][v], h);
          unpack(branch[r][v], b);
#pragma unroll
          for (int e = 0; e < E; ++e) h[e] = fmaf(gate[e], b[e], h[e]);
          pack(h, x[r][v]);  // what follows sees h as it is stored
          x[r][v].store(row_of(a.h, r, sizeof(X)) + static_cast<int64_t>(i) * E * sizeof(X));
        }
      }
    });
  }

  int elements_of_warp = 0;
#pragma unroll
  for (int v = 0; v < V; ++v) {
    elements_of_warp += E * max(0, min(32, vectors - static_cast<int>(warp * 32 + v * blockDim.x)));
  }
  const float elements = static_cast<float>(elements_of_warp), per_warp = 1.0f / elements;
  float origin[R], mean[R], m2[R];
#pragma unroll
  for (int r = 0; r < R; ++r) {
    // A float sum of large values would round the mean itself; sums of differences do not.
    origin[r] = 0.0f;
    if constexpr (sizeof(X) == 4) origin[r] = __shfl_sync(0xffffffffu, __uint_as_float(x[r][0].word[0].x), 0);
    mean[r] = 0.0f;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      if (threadIdx.x + v * blockDim.x < vectors) {
        float f[E];
        unpack(x[r][v], f);
#pragma unroll
        for (int e = 0; e < E; ++e) mean[r] += f[e] - origin[r];
      }
    }
  }
  warp_sum(mean);
#pragma unroll
  for (int r = 0; r < R; ++r) {
    mean[r] = origin[r] + mean[r] * per_warp;
    m2[r] = 0.0f;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      if (threadIdx.x + v * blockDim.x < vectors) {
        float f[E];
        unpack(x[r][v], f);
#pragma unroll
        for (int e = 0; e < E; ++e) m2[r] += (f[e] - mean[r]) * (f[e] - mean[r]);
      }
    }
  }
  warp_sum_scatter(m2);
#pragma unroll
  for (int r = 0; r < R; ++r) {
    if (lane == r * (32 / R)) partial[warp][r] = make_float4(mean[r], m2[0], elements, 0.0f);
  }
  __syncthreads();

  const float per_row = 1.0f / static_cast<float>(dim);
  float rstd[R];
#pragma unroll
  for (int r = 0; r < R; ++r) {
    const float centre = partial[0][r].x;
    float sum = 0.0f, squares = 0.0f, between = 0.0f;
    for (int w = 0; w < warps; ++w) {
      const float4 p = partial[w][r];
      const float d = p.x - centre, weighted = d * p.z;
      sum += weighted;
      between = fmaf(d, weighted, between);
      squares += p.y;
    }
    sum *= per_row;
    // `between` is centred on the first warp's mean; moving it to the row's mean cancels at most a factor `warps`.
    const float variance = (squares + between) * per_row - sum * sum;
    mean[r] = centre + sum;
    rstd[r] = rsqrtf((variance < 0.0f ? 0.0f : variance) + a.eps);  // fmaxf would turn NaN into a number
    if (threadIdx.x == 0 && r < count) {
      const int64_t index = sample * extent.rows + row + r;
      a.mean[index] = mean[r];
      a.rstd[index] = rstd[r];
    }
  }

  with_type(a.scale.type, [&](auto type) {
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const int i = threadIdx.x + v * blockDim.x;
      if (i >= vectors) continue;
      float gain[E], bias[E];
#pragma unroll
      for (int r = 0; r < R; ++r) {
        if (r >= count) continue;
        if (PerToken || r == 0) {
          load_modulation<decltype(type)>(a.scale, sample, row + r, static_cast<int64_t>(i) * E, gain);
          load_modulation<decltype(type)>(a.shift, sample, row + r, static_cast<int64_t>(i) * E, bias);
#pragma unroll
          for (int e = 0; e < E; ++e) gain[e] += 1.0f;
        }
        float f[E];
        unpack(x[r][v], f);
#pragma unroll
        for (int e = 0; e < E; ++e) {
          f[e] = fmaf(normalise<X, Y>(f[e], mean[r], rstd[r], -mean[r] * rstd[r]), gain[e], bias[e]);
        }
        Pack<Y, E> out;
        pack(f, out);
        out.template store_global<Streaming>(row_of(a.y, r, sizeof(Y)) + static_cast<int64_t>(i) * E * sizeof(Y));
      }
    }
  });
}

}  // namespace adaln
