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

bool residual_fits(const Problem& p, const Tensor& x, const Tensor& branch, const Tensor& y) {
  Device device;
  if (current_device(device) != cudaSuccess || branch.type != y.type || !vectorizable(branch, p, 8)) return false;
  bool fits = false;
  with_types(x.type, y.type, [&](auto types) {
    using T = decltype(types);
    using Kernels = RowKernels<typename T::x, typename T::y>;
    Forward forward{};
    forward.x = x, forward.branch = branch, forward.y = y;
    Backward backward{};
    backward.dy = y, backward.x = x, backward.branch = branch;
    fits = size_of(y.type) <= size_of(x.type) && Kernels::forward_fits(p, forward) &&
           Kernels::backward_plan(p, backward, device).fits;
    return cudaSuccess;
  });
  return fits;
}

cudaError_t forward(const Problem& p, const Forward& args) {
  Device device;
  if (cudaError_t e = current_device(device)) return e;
  return with_types(args.x.type, args.y.type, [&](auto types) {
    using T = decltype(types);
    using Kernels = RowKernels<typename T::x, typename T::y>;
    if (Kernels::forward_fits(p, args)) return Kernels::forward(args, p);
    if (args.residual()) return cudaErrorInvalidValue;
    forward_scalar<typename T::x, typename T::y>
        <<<scalar_grid(p, device), kScalarThreads, 0, p.stream>>>(args, p.batch, p.rows, p.dim);
    return cudaGetLastError();
  });
}

cudaError_t backward_workspace(const Problem& p, const Backward& args, size_t* bytes) {
  *bytes = 0;
  if (p.per_token) return cudaSuccess;
  Device device;
  if (cudaError_t e = current_device(device)) return e;
  return with_types(args.x.type, args.dy.type, [&](auto types) {
    using T = decltype(types);
    const Plan plan = RowKernels<typename T::x, typename T::y>::backward_plan(p, args, device);
    const int64_t partials = plan.fits && !args.dtile ? plan.partials() : dtile_grid(p, device).n;
    *bytes = static_cast<size_t>(p.batch * partials * sums_of(args.residual()) * p.dim) * sizeof(float);
    return cudaSuccess;
  });
}

namespace {

// Its blocks may be placed while the kernel that writes the partial sums is still running.
cudaError_t finish(const Problem& p, const Backward& args, int partials, const Device& d) {
  const int sums = sums_of(args.residual()), wanted = args.gate.data != nullptr ? 3 : 2;
  // Small blocks start sooner; many partial sums want more loads in flight.
  const int floats = p.dim % 2 == 0 ? 2 : 1, warps = partials > 160 ? 16 : 8;
  const int tiles = (wanted * p.dim + 32 * floats - 1) / (32 * floats);
  const int64_t grid = p.batch * tiles;
  if (grid > 0x7fffffff) return cudaErrorInvalidValue;
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = static_cast<unsigned>(grid);
  config.blockDim = 32 * warps;
  config.stream = p.stream;
  config.attrs = &overlap;
  config.numAttrs = d.bulk ? 1 : 0;
  const auto kernel = floats == 1  ? warps == 8 ? finish_gradients<1, 8> : finish_gradients<1, 16>
                      : warps == 8 ? finish_gradients<2, 8>
                                   : finish_gradients<2, 16>;
  return cudaLaunchKernelEx(&config, kernel, static_cast<const float*>(args.workspace), partials, sums, wanted, p.dim,
                            tiles, Gradients{{args.dscale, args.dshift, args.dgate}});
}

}  // namespace

cudaError_t backward(const Problem& p, const Backward& args) {
  Device device;
  if (cudaError_t e = current_device(device)) return e;
  return with_types(args.x.type, args.dy.type, [&](auto types) {
    using T = decltype(types);
    using Kernels = RowKernels<typename T::x, typename T::y>;
    const Plan plan = Kernels::backward_plan(p, args, device);
    int partials = plan.partials();
    if (plan.fits) {
      if (cudaError_t e = Kernels::backward(args, p, plan, device)) return e;
    } else {
      if (args.residual()) return cudaErrorInvalidValue;
      backward_scalar<typename T::x, typename T::y>
          <<<scalar_grid(p, device), kScalarThreads, 0, p.stream>>>(args, p.batch, p.rows, p.dim, p.per_token);
      if (cudaError_t e = cudaGetLastError()) return e;
    }
    if (p.per_token) return cudaSuccess;
    if (args.dtile || !plan.fits) {
      const Tiles tiles = dtile_grid(p, device);
      partials = tiles.n;
      const int64_t grid = p.batch * tiles.d * tiles.n;
      if (grid > 0x7fffffff) return cudaErrorInvalidValue;
      backward_dtile<typename T::x, typename T::y><<<static_cast<unsigned>(grid), kScalarThreads, 0, p.stream>>>(
          args, static_cast<float*>(args.workspace), p.rows, p.dim, tiles.d, tiles.n);
      if (cudaError_t e = cudaGetLastError()) return e;
    }
    return finish(p, args, partials, device);
  });
}

}  // namespace adaln
