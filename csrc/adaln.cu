// The host entry points: pick types, layout and kernels.
#include "adaln.h"
#include "rows_kernels.cuh"
#include "scalar.cuh"

namespace adaln {

extern template struct RowKernels<float, float>;
extern template struct RowKernels<__half, __half>;
extern template struct RowKernels<__nv_bfloat16, __nv_bfloat16>;
extern template struct RowKernels<float, __half>;
extern template struct RowKernels<float, __nv_bfloat16>;
extern template struct RowKernels<__half, float>;
extern template struct RowKernels<__nv_bfloat16, float>;

namespace {

template <typename X, typename Y>
struct Types {
  using x = X;
  using y = Y;
};

// Calls f(Types<X, Y>{}) for x's type and y's.
template <typename F>
cudaError_t with_types(DType x, DType y, const F& f) {
  if (x == DType::f32 && y == DType::f32) return f(Types<float, float>{});
  if (x == DType::f32 && y == DType::f16) return f(Types<float, __half>{});
  if (x == DType::f32 && y == DType::bf16) return f(Types<float, __nv_bfloat16>{});
  if (x == DType::f16 && y == DType::f16) return f(Types<__half, __half>{});
  if (x == DType::f16 && y == DType::f32) return f(Types<__half, float>{});
  if (x == DType::bf16 && y == DType::bf16) return f(Types<__nv_bfloat16, __nv_bfloat16>{});
  if (x == DType::bf16 && y == DType::f32) return f(Types<__nv_bfloat16, float>{});
  return cudaErrorInvalidValue;
}

unsigned scalar_grid(const Problem& p, const Device& d) {
  return static_cast<unsigned>(std::min<int64_t>(p.batch * p.rows, int64_t{8} * d.multiprocessors));
}

struct Tiles {
  int d, n;
};

// Enough (d_tile, n_tile) blocks of one sample to fill the device eight times over with all samples.
Tiles dtile_grid(const Problem& p, const Device& d) {
  const int d_tiles = (p.dim + kScalarThreads - 1) / kScalarThreads;
  const int64_t wanted = int64_t{8} * d.multiprocessors / (p.batch * d_tiles);
  return {d_tiles, static_cast<int>(std::max<int64_t>(1, std::min(p.rows, wanted)))};
}

}  // namespace

cudaError_t forward(const Problem& p, const Tensor& x, const Modulation& shift, const Modulation& scale, float eps,
                    const Tensor& y, float* mean, float* rstd) {
  Device device;
  if (cudaError_t e = current_device(device)) return e;
  const ForwardArgs args{x, y, shift, scale, mean, rstd, eps, p.dim};
  return with_types(x.type, y.type, [&](auto types) {
    using T = decltype(types);
    using Kernels = RowKernels<typename T::x, typename T::y>;
    const Plan plan = Kernels::forward_plan(p, x, y, device);
    if (plan.fits) return Kernels::forward(args, p, plan, device);
    forward_scalar<typename T::x, typename T::y>
        <<<scalar_grid(p, device), kScalarThreads, 0, p.stream>>>(args, p.batch, p.rows);
    return cudaGetLastError();
  });
}

cudaError_t backward_workspace(const Problem& p, const Tensor& dy, const Tensor& x, bool dtile, size_t* bytes) {
  Device device;
  if (cudaError_t e = current_device(device)) return e;
  return with_types(x.type, dy.type, [&](auto types) {
    using T = decltype(types);
    const Plan plan = RowKernels<typename T::x, typename T::y>::backward_plan(p, x, dy, device);
    const int64_t blocks = plan.fits && !dtile ? plan.blocks : dtile_grid(p, device).n;
    *bytes = static_cast<size_t>(p.batch * blocks * 2 * p.dim) * sizeof(float);
    return cudaSuccess;
  });
}

cudaError_t backward(const Problem& p, const Tensor& dy, const Tensor& x, const Modulation& scale, const float* mean,
                     const float* rstd, const Tensor& dx, const Gradient& dshift, const Gradient& dscale,
                     void* workspace, bool dtile) {
  Device device;
  if (cudaError_t e = current_device(device)) return e;
  float* const partial = static_cast<float*>(workspace);
  const BackwardArgs args{dy, x, dx, scale, mean, rstd, partial, p.dim};
  return with_types(x.type, dy.type, [&](auto types) {
    using T = decltype(types);
    using Kernels = RowKernels<typename T::x, typename T::y>;
    const Plan plan = Kernels::backward_plan(p, x, dy, device);
    int blocks = plan.blocks;
    if (plan.fits) {
      if (cudaError_t e = Kernels::backward(args, p, plan, !dtile, device)) return e;
    } else {
      backward_scalar<typename T::x, typename T::y>
          <<<scalar_grid(p, device), kScalarThreads, 0, p.stream>>>(args, p.batch, p.rows);
      if (cudaError_t e = cudaGetLastError()) return e;
    }
    if (dtile || !plan.fits) {
      const Tiles tiles = dtile_grid(p, device);
      blocks = tiles.n;
      const int64_t grid = p.batch * tiles.d * tiles.n;
      if (grid > 0x7fffffff) return cudaErrorInvalidValue;
      backward_dtile<typename T::x, typename T::y>
          <<<static_cast<unsigned>(grid), kScalarThreads, 0, p.stream>>>(args, p.rows, tiles.d, tiles.n);
      if (cudaError_t e = cudaGetLastError()) return e;
    }
    const int column_tiles = (2 * p.dim + 31) / 32;
    const int64_t grid = p.batch * column_tiles;
    if (grid > 0x7fffffff) return cudaErrorInvalidValue;
    finish_gradients<<<static_cast<unsigned>(grid), 32 * kFinishWarps, 0, p.stream>>>(partial, blocks, p.dim,
                                                                                      column_tiles, dscale, dshift);
    return cudaGetLastError();
  });
}

}  // namespace adaln
