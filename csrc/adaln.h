// Host interface of the fused LayerNorm-modulate kernels. Plain CUDA: nothing here knows of PyTorch.
//
//   forward    y = (x - mean) * rstd * (1 + scale) + shift          statistics over the D features of a row
//   backward   g = dy * (1 + scale),  xhat = (x - mean) * rstd
//              dx = rstd * (g - mean_D(g) - xhat * mean_D(g * xhat))
//              dshift = sum_N dy,  dscale = sum_N dy * xhat          (per token: without the sum)
//
// With a gated residual ahead of it: h = x + gate * branch takes the place of x in the above and is returned too. Its
// gradient is dh = dh_in + (dx of the above); dx = dh, dbranch = gate * dh, dgate = sum_N dh * branch. A residual may
// come without a gate: h = x + branch, and dbranch is dx.
//
// Shapes: B samples of N rows of D features; shift, scale and gate one row of D per sample, or one per token. Frames of
// a sample with a modulation each are samples here. Strides count elements.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace adaln {

enum class DType : int { f32 = 0, f16 = 1, bf16 = 2 };

inline int size_of(DType type) { return type == DType::f32 ? 4 : 2; }

// A [B, N, D] tensor whose last dimension is contiguous. No data: absent.
struct Tensor {
  void* data = nullptr;
  DType type = DType::f32;
  int64_t batch_stride = 0;
  int64_t row_stride = 0;
};

// A [B, D] tensor (row_stride 0) or a [B, N, D] tensor of any strides: often a view of a chunk of a [B, 6, D] table.
struct Modulation {
  const void* data = nullptr;
  DType type = DType::f32;
  int64_t batch_stride = 0;
  int64_t row_stride = 0;
  int64_t stride = 1;
};

// A contiguous gradient of shift, scale or gate: [B, D], or [B, N, D] per token.
struct Gradient {
  void* data = nullptr;
  DType type = DType::f32;
};

struct Problem {
  int64_t batch;
  int64_t rows;  // N, rows of one sample
  int dim;
  bool per_token;  // shift, scale and gate have a row for each token
  cudaStream_t stream;
};

// mean, rstd: float [B * N]. With a residual, branch and h are there, of y's and of x's type; gate may be.
struct Forward {
  Tensor x;
  Modulation shift, scale;
  float eps;
  Tensor y;
  float* mean;
  float* rstd;
  Tensor branch;
  Modulation gate;
  Tensor h;

  bool residual() const { return branch.data != nullptr; }
};

// x: what was normalised (h where the residual is gated). dshift is not written per token: it is dy.
// With a residual, branch is there, and dh where h has a gradient of its own; with a gate, gate, dbranch and dgate too.
struct Backward {
  Tensor dy, x;
  Modulation scale;
  const float* mean;
  const float* rstd;
  Tensor dx;
  Gradient dshift, dscale;
  Tensor dh, branch;
  Modulation gate;
  Tensor dbranch;
  Gradient dgate;
  void* workspace;
  bool dtile;  // the paper's way: dx first, then a separate reduction that reads x and dy again

  bool residual() const { return branch.data != nullptr; }
};

// Whether a residual can be fused for these tensors (dy stands for y, h for x); where not, the caller adds and
// normalises one by one. Needed: D a multiple of 8, 16-byte aligned rows, branch of y's type, which is no wider than
// x's. shift, scale and gate, which are small, must then have their features side by side, 16-byte aligned rows, and
// shift and scale one type. (Without a residual they may be anything, but slow kernels take what is not like this.)
bool residual_fits(const Problem& p, const Tensor& x, const Tensor& branch, const Tensor& y);

cudaError_t forward(const Problem& p, const Forward& args);

// Bytes of workspace (16-byte aligned) that `backward` needs for the same arguments: fp32 partial sums of the gradients
// of the modulation. `args.workspace` is not read.
cudaError_t backward_workspace(const Problem& p, const Backward& args, size_t* bytes);

// Gradients are bitwise repeatable, and those of a sample do not depend on what is in the other samples.
cudaError_t backward(const Problem& p, const Backward& args);

}  // namespace adaln
