// Host interface of the fused LayerNorm-modulate kernels. Plain CUDA: nothing here knows of PyTorch.
//
//   forward    y = (x - mean) * rstd * (1 + scale) + shift          statistics over the D features of a row
//   backward   g = dy * (1 + scale),  xhat = (x - mean) * rstd
//              dx = rstd * (g - mean_D(g) - xhat * mean_D(g * xhat))
//              dshift = sum_N dy,  dscale = sum_N dy * xhat
//
// Shapes: B samples of N rows of D features; shift and scale one row of D per sample. Strides count elements.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace adaln {

enum class DType : int { f32 = 0, f16 = 1, bf16 = 2 };

inline int size_of(DType type) { return type == DType::f32 ? 4 : 2; }

// A [B, N, D] tensor whose last dimension is contiguous.
struct Tensor {
  void* data;
  DType type;
  int64_t batch_stride;
  int64_t row_stride;
};

// A [B, D] tensor of any strides: often a view of a chunk of a [B, 6, D] table.
struct Modulation {
  const void* data;
  DType type;
  int64_t batch_stride;
  int64_t stride;
};

// A contiguous [B, D] gradient of shift or scale.
struct Gradient {
  void* data;
  DType type;
};

struct Problem {
  int64_t batch;
  int64_t rows;  // N, rows of one sample
  int dim;
  cudaStream_t stream;
};

// mean, rstd: float [B * N].
cudaError_t forward(const Problem& p, const Tensor& x, const Modulation& shift, const Modulation& scale, float eps,
                    const Tensor& y, float* mean, float* rstd);

// Bytes of workspace that `backward` needs for the same arguments: fp32 partial sums of dscale and dshift.
cudaError_t backward_workspace(const Problem& p, const Tensor& dy, const Tensor& x, bool dtile, size_t* bytes);

// One pass over x and dy (dtile = false), or the paper's way: dx first, then a separate coalesced reduction over a
// (d_tile, n_tile) grid that reads x and dy again (dtile = true). Gradients are bitwise repeatable in both.
cudaError_t backward(const Problem& p, const Tensor& dy, const Tensor& x, const Modulation& scale, const float* mean,
                     const float* rstd, const Tensor& dx, const Gradient& dshift, const Gradient& dscale,
                     void* workspace, bool dtile);

}  // namespace adaln
