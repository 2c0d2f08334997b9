// Backward in one pass over its inputs: dx (and dbranch), and fp32 partial sums of the modulation's gradients, one row
// of them for each block or cluster of blocks.
#pragma once

#include "reduce.cuh"
#include "rows.cuh"

namespace adaln {

// Sums over rows that a block keeps and writes to partial [B, blocks / cluster, kSums, D], in this order.
enum Sum { kDscale = 0, kDshift = 1, kDgate = 2 };
__host__ __device__ constexpr int sums_of(bool residual) { return residual ? 3 : 2; }

// Sums = false leaves dscale and dshift to a separate reduction (the paper's D-tile).
template <typename X, typename Y, int V, int R, bool Keep, bool Residual, bool PerToken, bool Sums, int Threads,
          int Resident>
__global__ void __launch_bounds__(Threads, Resident)
    backward_rows(const Backward a, float* const partial, const Loop loop) {
  constexpr int E = kElements<X, Y>;
  constexpr int kSums = sums_of(Residual);
  constexpr bool kFuse = sizeof(X) == 2 && sizeof(Y) == 2;
  static_assert(!PerToken || !Sums, "per token there is nothing to sum");
  static_assert(!PerToken || R == 1, "a row of modulations at a time");
  static_assert(!Residual || !Keep, "dh and branch are read after the barrier");
  extern __shared__ __align__(128) char shared[];
  __shared__ __align__(16) float sums[2][Threads / 32][2 * R];  // of g, and of g * xhat, by warp

  const int64_t sample = blockIdx.x / loop.blocks;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32, dim = loop.vectors * E;
  // Without a gate nothing depends on the branch. Modulations are operands where each row has its own.
  constexpr int kX = 0, kDy = 1, kDh = 2, kBranch = 3, kScale = Residual ? 4 : 2, kGate = 5;
  auto reader = [&] {
    const auto of = [&](const auto& t, int element) { return operand_of(t, sample, element); };
    const auto size = [](DType type) { return type == DType::f32 ? 4 : 2; };
    constexpr int kXBytes = sizeof(X), kYBytes = sizeof(Y);
    const Operand x = of(a.x, kXBytes), dy = of(a.dy, kYBytes);
    if constexpr (Residual) {
      const Operand dh = of(a.dh, kXBytes), branch = a.gate.data != nullptr ? of(a.branch, kYBytes) : Operand{};
      if constexpr (PerToken) {
        const Operand scale = of(a.scale, size(a.scale.type)), gate = of(a.gate, size(a.gate.type));
        return RowReader<E, V, R, Keep, kXBytes, kYBytes, kXBytes, kYBytes, 0, 0>(
            loop, {x, dy, dh, branch, scale, gate}, shared);
      } else {
        return RowReader<E, V, R, Keep, kXBytes, kYBytes, kXBytes, kYBytes>(loop, {x, dy, dh, branch}, shared);
      }
    } else if constexpr (PerToken) {
      return RowReader<E, V, R, Keep, kXBytes, kYBytes, 0>(loop, {x, dy, of(a.scale, size(a.scale.type))}, shared);
    } else {
      return RowReader<E, V, R, Keep, kXBytes, kYBytes>(loop, {x, dy}, shared);
    }
  }();
  const bool gated = Residual && a.gate.data != nullptr;

  // Of the features that this thread owns; per token they change with the row.
  float gain[V][E], gate[Residual ? V : 1][E];
  const auto load_modulations = [&] {
    with_type(a.scale.type, [&](auto type) {
      using T = decltype(type);
#pragma unroll
      for (int v = 0; v < V; ++v) {
        const int i = threadIdx.x + v * blockDim.x;
        if (i < loop.vectors) {
          if constexpr (PerToken) {
            load_features(reader.template place<kScale, T>(0, i), gain[v]);
          } else {
            load_modulation<T>(a.scale, sample, 0, static_cast<int64_t>(i) * E, gain[v]);
          }
        }
#pragma unroll
        for (int e = 0; e < E; ++e) gain[v][e] = i < loop.vectors ? gain[v][e] + 1.0f : 0.0f;
      }
    });
  };
  const auto load_gates = [&] {
    if (!gated) return;
    with_type(a.gate.type, [&](auto type) {
      using T = decltype(type);
#pragma unroll
      for (int v = 0; v < V; ++v) {
        const int i = threadIdx.x + v * blockDim.x;
        if (i >= loop.vectors) continue;
        if constexpr (PerToken) {
          load_features(reader.template place<kGate, T>(0, i), gate[v]);
        } else {
          load_modulation<T>(a.gate, sample, 0, static_cast<int64_t>(i) * E, gate[v]);
        }
      }
    });
  };
  if constexpr (!PerToken) {
    load_modulations();
    if constexpr (Residual) load_gates();
  }

  float sum_of[Sums ? kSums : 1][V][E];
#pragma unroll
  for (int k = 0; k < (Sums ? kSums : 1); ++k) {
#pragma unroll
    for (int v = 0; v < V; ++v) {
#pragma unroll
      for (int e = 0; e < E; ++e) sum_of[k][v][e] = 0.0f;
    }
  }

  const float per_row = 1.0f / static_cast<float>(dim);
  const float* const mean_of = a.mean + sample * loop.rows;
  const float* const rstd_of = a.rstd + sample * loop.rows;
  const auto row_of = [&](const Tensor& t, int64_t row, int element) {
    return static_cast<char*>(t.data) + (sample * t.batch_stride + row * t.row_stride) * element;
  };
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
  fetch(reader.group());

  for (int buffer = 0; reader.valid(); buffer ^= 1) {
    const int64_t row = reader.first_row();
    const int count = reader.count();
    float mean[R], rstd[R];
#pragma unroll
    for (int r = 0; r < R; ++r) mean[r] = next_mean[r], rstd[r] = next_rstd[r];
    fetch(reader.group() + loop.blocks);
    reader.wait();
    if constexpr (PerToken) load_modulations();

    Pack<X, E> x[R][V];
    Pack<Y, E> dy[R][V];
    float sum[2 * R];
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const float offset = -mean[r] * rstd[r];
      float g_sum = 0.0f, gx_sum = 0.0f;
#pragma unroll
      for (int v = 0; v < V; ++v) {
        x[r][v] = reader.template get<kX, X>(r, v);
        dy[r][v] = reader.template get<kDy, Y>(r, v);
        float xf[E], yf[E];
        unpack(x[r][v], xf);
        unpack(dy[r][v], yf);
#pragma unroll
        for (int e = 0; e < E; ++e) {
          const float xhat = normalise<X, Y>(xf[e], mean[r], rstd[r], offset);
          const float g = yf[e] * gain[v][e];
          g_sum += g;
          gx_sum = fmaf(g, xhat, gx_sum);
          if constexpr (Sums) {
            sum_of[kDshift][v][e] += yf[e];
            sum_of[kDscale][v][e] = fmaf(yf[e], xhat, sum_of[kDscale][v][e]);
          }
        }
      }
      sum[2 * r] = g_sum, sum[2 * r + 1] = gx_sum;
    }
    warp_sum_scatter(sum);
    if (lane % (16 / R) == 0) sums[buffer][warp][lane / (16 / R)] = sum[0];
#if ADALN_BULK
    shared_before_bulk_copies();
#endif
    __syncthreads();
    reader.refill();
    if constexpr (Residual && PerToken) load_gates();

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
      const float slope = -rstd[r] * gx_mean, constant = -g_mean - offset * gx_mean;
#pragma unroll
      for (int v = 0; v < V; ++v) {
        const int i = threadIdx.x + v * blockDim.x;
        const int64_t at = static_cast<int64_t>(i) * E;
        float xf[E], yf[E], dx[E];
        unpack(Keep ? x[r][v] : reader.template get<kX, X>(r, v), xf);
        unpack(Keep ? dy[r][v] : reader.template get<kDy, Y>(r, v), yf);
#pragma unroll
        for (int e = 0; e < E; ++e) {
          const float g = yf[e] * gain[v][e];
          // rstd * (g - mean(g) - xhat * mean(g * xhat)), with xhat opened where it is fused anyway.
          if constexpr (kFuse) {
            dx[e] = fmaf(g, rstd[r], fmaf(xf[e], slope, constant));
          } else {
            const float xhat = (xf[e] - mean[r]) * rstd[r];
            dx[e] = fmaf(g, rstd[r], -g_mean) - xhat * gx_mean;
          }
          if constexpr (PerToken) yf[e] *= normalise<X, Y>(xf[e], mean[r], rstd[r], offset);
        }
        if constexpr (Residual) {
          float dh[E];
          unpack(reader.template get<kDh, X>(r, v), dh);
#pragma unroll
          for (int e = 0; e < E; ++e) dx[e] += dh[e];
        }
        if (i >= loop.vectors) continue;
        Pack<X, E> out;
        pack(dx, out);
        out.store(row_of(a.dx, row + r, sizeof(X)) + at * sizeof(X));
        if constexpr (PerToken) store_gradient(a.dscale, (sample * loop.rows + row + r) * dim + at, yf);
        if constexpr (Residual) {
          if (!gated) continue;
          float b[E];
          unpack(reader.template get<kBranch, Y>(r, v), b);
          Pack<Y, E> dbranch;
#pragma unroll
          for (int e = 0; e < E; ++e) {
            b[e] *= dx[e];
            if constexpr (Sums) sum_of[kSums - 1][v][e] += b[e];
            dx[e] *= gate[v][e];
          }
          pack(dx, dbranch);
          dbranch.store(row_of(a.dbranch, row + r, sizeof(Y)) + at * sizeof(Y));
          if constexpr (PerToken) store_gradient(a.dgate, (sample * loop.rows + row + r) * dim + at, b);
        }
      }
    }
    reader.advance();
  }

#if ADALN_BULK
  launch_dependents();
#endif
  if constexpr (Sums) {
    const auto store_sums = [&](float* out) {
#pragma unroll
      for (int k = 0; k < kSums; ++k) {
#pragma unroll
        for (int v = 0; v < V; ++v) {
          const int i = threadIdx.x + v * blockDim.x;
          if (i >= loop.vectors) continue;
#pragma unroll
          for (int e = 0; e < E; e += 4) {
            const float* const s = &sum_of[k][v][e];
            *reinterpret_cast<float4*>(out + k * dim + i * E + e) = make_float4(s[0], s[1], s[2], s[3]);
          }
        }
      }
    };
    int cluster = 1;
#if ADALN_BULK
    cluster = cluster_blocks();
#endif
    float* const out = partial + static_cast<int64_t>(blockIdx.x / cluster) * kSums * dim;
    if (cluster == 1) {
      store_sums(out);
      return;
    }
#if ADALN_BULK
    // Added up through shared memory, in the order of the blocks; each of them writes its part of the row.
    const float4* const own = reinterpret_cast<const float4*>(reader.scratch());
    __syncthreads();
    store_sums(reader.scratch());
    cluster_meet();
    for (int i = cluster_rank() * blockDim.x + threadIdx.x; i < kSums * dim / 4; i += cluster * blockDim.x) {
      float4 sum = load_from_block(own + i, 0);
      for (int rank = 1; rank < cluster; ++rank) {
        const float4 s = load_from_block(own + i, rank);
        sum.x += s.x, sum.y += s.y, sum.z += s.z, sum.w += s.w;
      }
      reinterpret_cast<float4*>(out)[i] = sum;
    }
    cluster_meet();  // nobody's memory goes while others read it
#endif
  }
}

}  // namespace adaln
