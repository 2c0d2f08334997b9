// Where the kernels meet PyTorch: CUDA implementations of the operators whose schemas repro/adaln/ops.py defines.
#include <ATen/core/Tensor.h>
#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <initializer_list>
#include <optional>
#include <string_view>
#include <tuple>
#include <utility>

#include "adaln.h"
#include "shape.h"

namespace {

using at::ScalarType;
using at::Tensor;
using Maybe = std::optional<Tensor>;
using adaln::Shape;

adaln::DType dtype_of(ScalarType type) {
  TORCH_CHECK_TYPE(adaln::supported(type), "the kernels take float32, float16 and bfloat16, got ", type);
  return type == ScalarType::Float  ? adaln::DType::f32
         : type == ScalarType::Half ? adaln::DType::f16
                                    : adaln::DType::bf16;
}

// What the kernels would read out of bounds. Arguments from Python were refused before, in more words.
Shape checked_shape(const Tensor& x, const Tensor& scale, std::initializer_list<const Tensor*> like_x,
                    std::initializer_list<const Tensor*> like_scale) {
  const std::optional<Shape> shape = adaln::shape_of(x, scale);
  TORCH_CHECK_VALUE(shape, "modulation ", scale.sizes(), " does not fit x ", x.sizes());
  TORCH_CHECK_VALUE(shape->dim <= (int64_t{1} << 24), "the kernels take up to 2^24 features, got ", shape->dim);
  const auto check = [](const Tensor& tensor, const Tensor& other) {
    TORCH_CHECK_VALUE(tensor.sizes() == other.sizes() && tensor.device() == other.device(), "sizes ", tensor.sizes(),
                      " on ", tensor.device(), " must be ", other.sizes(), " on ", other.device());
  };
  for (const Tensor* tensor : like_x) check(*tensor, x);
  for (const Tensor* tensor : like_scale) check(*tensor, scale);
  TORCH_CHECK_VALUE(scale.device() == x.device(), "modulation must be on ", x.device(), ", got ", scale.device());
  return *shape;
}

adaln::Problem problem_of(const Shape& shape) {
  return {shape.batch, shape.rows, static_cast<int>(shape.dim), shape.per_token, c10::cuda::getCurrentCUDAStream()};
}

// A tensor of x's shape as the kernels need it: features side by side, and frames one stride apart where they are
// samples. Rows and samples may lie anywhere otherwise, so most views need no copy.
Tensor with_dense_rows(const Tensor& t, const Shape& shape) {
  const bool features = t.size(-1) <= 1 || t.stride(-1) == 1;
  const bool frames = shape.frames == 1 || t.dim() == 2 || t.size(0) <= 1 || t.stride(0) == t.size(1) * t.stride(1);
  return features && frames ? t : t.contiguous();
}

// Of what `with_dense_rows` returned.
adaln::Tensor tensor_of(const Tensor& t, const Shape& shape) {
  const int64_t row = t.stride(-2);
  const int64_t batch = shape.frames > 1 ? shape.rows * row : t.dim() == 3 ? t.stride(0) : 0;
  return {t.data_ptr(), dtype_of(t.scalar_type()), batch, row};
}

// shift, scale or gate as the row kernels read it, which is as it comes but for odd views: frames one stride apart,
// features side by side, rows of 16-byte alignment where their length allows it.
Tensor with_dense_features(const Tensor& m, const Shape& shape) {
  const bool even = shape.frames == 1 || m.dim() == 3 || m.size(0) <= 1 || m.stride(0) == m.size(1) * m.stride(1);
  bool aligned = m.size(-1) <= 1 || m.stride(-1) == 1;
  const int64_t size = m.element_size();
  if (shape.dim * size % 16 == 0) {
    aligned = aligned && reinterpret_cast<uintptr_t>(m.data_ptr()) % 16 == 0;
    for (int64_t d = 0; d + 1 < m.dim(); ++d) aligned = aligned && (m.size(d) <= 1 || m.stride(d) * size % 16 == 0);
  }
  return even && aligned ? m : m.clone(at::MemoryFormat::Contiguous);
}

// Of what `with_dense_features` returned, for an x of so many dimensions.
adaln::Modulation modulation_of(const Tensor& m, const Shape& shape, int64_t x_dims) {
  // The stride of a dimension of one may be any number.
  const int64_t batch = shape.frames > 1 ? m.stride(-3) : x_dims == 3 && m.size(0) > 1 ? m.stride(0) : 0;
  return {m.data_ptr(), dtype_of(m.scalar_type()), batch, shape.per_token ? m.stride(-2) : 0, m.stride(-1)};
}

adaln::Gradient gradient_of(const Tensor& t) { return {t.data_ptr(), dtype_of(t.scalar_type())}; }

// float16 in and bfloat16 out, or the reverse, has no kernels of its own: the output side goes through float32.
bool crosses(ScalarType x, ScalarType y) { return x != y && c10::elementSize(x) == 2 && c10::elementSize(y) == 2; }

void check(cudaError_t error) {
  TORCH_CHECK(error == cudaSuccess, "layer_norm_modulate kernel: ", cudaGetErrorString(error));
}

Tensor empty(at::IntArrayRef sizes, const Tensor& like, ScalarType type) {
  return at::empty(sizes, like.options().dtype(type));
}

// For arithmetic that broadcasts modulation over rows, in float32.
Tensor rows_of(const Tensor& t, const Shape& shape) {
  return t.reshape({shape.batch, shape.rows, shape.dim}).to(ScalarType::Float);
}
Tensor modulation_rows_of(const Tensor& m, const Shape& shape) {
  return m.reshape({shape.batch, shape.per_token ? shape.rows : 1, shape.dim}).to(ScalarType::Float);
}

// h = x + gate * branch where the kernels cannot fuse it. Sums of views take these views' order: made contiguous.
Tensor add_residual(const Tensor& x, const Tensor& branch, const Maybe& gate, const Shape& shape) {
  Tensor added = rows_of(branch, shape);
  if (gate) added = at::mul(added, modulation_rows_of(*gate, shape));
  return at::add(rows_of(x, shape), added).to(x.scalar_type()).reshape(x.sizes()).contiguous();
}

struct Outputs {
  Tensor h, y, statistics;  // h: only with a branch
};

Outputs launch_forward(const Shape& shape, const Tensor& x_in, const Maybe& branch_in, const Maybe& gate_in,
                       const Tensor& shift_in, const Tensor& scale_in, double eps, ScalarType type) {
  const adaln::Problem problem = problem_of(shape);
  const int64_t rows = shape.batch * shape.rows;
  const Tensor x = with_dense_rows(x_in, shape);
  Tensor shift = with_dense_features(shift_in, shape), scale = with_dense_features(scale_in, shape);
  if (shift.scalar_type() != scale.scalar_type()) {  // the row kernels read both as one type
    shift = shift.to(ScalarType::Float);
    scale = scale.to(ScalarType::Float);
  }
  const Tensor branch = branch_in ? with_dense_rows(*branch_in, shape) : Tensor();
  const Tensor gate = gate_in ? with_dense_features(*gate_in, shape) : Tensor();
  const bool via_float = crosses(x.scalar_type(), type);
  Outputs out{{}, empty(x.sizes(), x, via_float ? ScalarType::Float : type), empty({2, rows}, x, ScalarType::Float)};
  adaln::Forward args{};
  args.x = tensor_of(x, shape);
  args.y = tensor_of(out.y, shape);
  if (branch.defined()) {
    args.branch = tensor_of(branch, shape);
    if (rows > 0 && !via_float && adaln::residual_fits(problem, args.x, args.branch, args.y)) {
      out.h = empty(x.sizes(), x, x.scalar_type());
      args.h = tensor_of(out.h, shape);
      if (gate.defined()) args.gate = modulation_of(gate, shape, x.dim());
    } else {
      out.h = add_residual(x, branch, gate_in, shape);
      args.x = tensor_of(out.h, shape);
      args.branch = {};
    }
  }
  if (rows > 0) {
    args.shift = modulation_of(shift, shape, x.dim());
    args.scale = modulation_of(scale, shape, x.dim());
    args.eps = static_cast<float>(eps);
    args.mean = out.statistics.data_ptr<float>();
    args.rstd = args.mean + rows;
    check(adaln::forward(problem, args));
  }
  if (via_float) out.y = out.y.to(type);
  return out;
}

// Sizes in place of a gradient that an operator leaves out, because another tensor already holds it.
constexpr int64_t kNone[] = {0};
constexpr at::IntArrayRef kLeftOut(kNone);

struct Gradients {
  Tensor dx, dbranch, dgate, dshift, dscale;
};

Gradients launch_backward(const Shape& shape, const Tensor& dy, const Maybe& dh, const Tensor& x, const Maybe& branch,
                          const Maybe& gate, const Tensor& scale, const Tensor& statistics, ScalarType shift_dtype,
                          bool dtile);

// The gradients of a residual where the kernels cannot fuse it: dx unrounded first, from which the others follow.
Gradients add_residual_gradients(const Shape& shape, const Tensor& dy, const Maybe& dh, const Tensor& x,
                                 const Maybe& branch, const Maybe& gate, const Tensor& scale, const Tensor& statistics,
                                 ScalarType shift_dtype) {
  Gradients out =
      launch_backward(shape, dy, {}, x.to(ScalarType::Float), {}, {}, scale, statistics, shift_dtype, false);
  Tensor total = rows_of(out.dx, shape);
  if (dh) total = at::add(total, rows_of(*dh, shape)).contiguous();
  out.dx = total.to(x.scalar_type()).reshape(x.sizes());
  if (gate) {
    out.dbranch = at::mul(total, modulation_rows_of(*gate, shape)).to(branch->scalar_type()).reshape(x.sizes());
    const Tensor by_row = at::mul(total, rows_of(*branch, shape));
    out.dgate = (shape.per_token ? by_row : by_row.sum(1)).to(gate->scalar_type()).reshape(gate->sizes());
  }
  return out;
}

// x: what was normalised. branch and gate come together: without a gate, dbranch is dx.
Gradients launch_backward(const Shape& shape, const Tensor& dy_in, const Maybe& dh_in, const Tensor& x_in,
                          const Maybe& branch_in, const Maybe& gate_in, const Tensor& scale_in,
                          const Tensor& statistics, ScalarType shift_dtype, bool dtile) {
  const adaln::Problem problem = problem_of(shape);
  const int64_t rows = shape.batch * shape.rows;
  TORCH_CHECK_VALUE(statistics.sizes() == at::IntArrayRef({2, rows}) && statistics.is_contiguous() &&
                        statistics.device() == x_in.device(),
                    "statistics must be those of the forward, [2, ", rows, "] on ", x_in.device(), ", got ",
                    statistics.sizes(), " on ", statistics.device());
  const Tensor x = with_dense_rows(x_in, shape);
  const bool via_float = crosses(x.scalar_type(), dy_in.scalar_type());
  const Tensor dy = with_dense_rows(via_float ? dy_in.to(ScalarType::Float) : dy_in, shape);
  const Tensor dh = dh_in ? with_dense_rows(*dh_in, shape) : Tensor();
  const Tensor branch = branch_in ? with_dense_rows(*branch_in, shape) : Tensor();
  const Tensor scale = with_dense_features(scale_in, shape);
  const Tensor gate = gate_in ? with_dense_features(*gate_in, shape) : Tensor();
  adaln::Backward args{};
  args.dy = tensor_of(dy, shape);
  args.x = tensor_of(x, shape);
  args.dtile = dtile;
  if (rows > 0 && (dh.defined() || gate.defined())) {
    // Without a gate nothing reads the branch: dy stands there to say that there is a residual.
    args.branch = gate.defined() ? tensor_of(branch, shape) : args.dy;
    if (dh.defined()) args.dh = tensor_of(dh, shape);
    if (via_float || !adaln::residual_fits(problem, args.x, args.branch, args.dy) ||
        (dh.defined() && !adaln::residual_fits(problem, args.dh, args.branch, args.dy))) {
      return add_residual_gradients(shape, dy_in, dh_in, x_in, branch_in, gate_in, scale_in, statistics, shift_dtype);
    }
  }
  Gradients out;
  out.dx = empty(x.sizes(), x, x.scalar_type());
  out.dshift = empty(shape.per_token ? kLeftOut : scale.sizes(), scale, shift_dtype);
  out.dscale = empty(scale.sizes(), scale, scale.scalar_type());
  if (gate.defined()) {
    out.dbranch = empty(x.sizes(), x, branch.scalar_type());
    out.dgate = empty(gate.sizes(), gate, gate.scalar_type());
  }
  if (rows == 0) {
    for (Tensor* sum : {&out.dshift, &out.dscale, &out.dgate}) {
      if (sum->defined()) sum->zero_();
    }
    return out;
  }
  args.scale = modulation_of(scale, shape, x.dim());
  args.mean = statistics.data_ptr<float>();
  args.rstd = args.mean + rows;
  args.dx = tensor_of(out.dx, shape);
  if (!shape.per_token) args.dshift = gradient_of(out.dshift);
  args.dscale = gradient_of(out.dscale);
  if (gate.defined()) {
    args.gate = modulation_of(gate, shape, x.dim());
    args.dbranch = tensor_of(out.dbranch, shape);
    args.dgate = gradient_of(out.dgate);
  }
  size_t bytes = 0;
  check(adaln::backward_workspace(problem, args, &bytes));
  const Tensor workspace = empty({static_cast<int64_t>(bytes)}, x, ScalarType::Byte);
  args.workspace = workspace.data_ptr();
  check(adaln::backward(problem, args));
  return out;
}

std::tuple<Tensor, Tensor> forward(const Tensor& x, const Tensor& shift, const Tensor& scale, double eps,
                                   std::optional<ScalarType> out_dtype, std::string_view) {
  const c10::cuda::CUDAGuard guard(x.device());
  const Shape shape = checked_shape(x, scale, {}, {&shift});
  Outputs out = launch_forward(shape, x, {}, {}, shift, scale, eps, out_dtype.value_or(x.scalar_type()));
  return {std::move(out.y), std::move(out.statistics)};
}

std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& dy, const Tensor& x, const Tensor& scale,
                                            const Tensor& statistics, ScalarType shift_dtype, std::string_view impl) {
  const c10::cuda::CUDAGuard guard(x.device());
  const Shape shape = checked_shape(x, scale, {&dy}, {});
  Gradients out = launch_backward(shape, dy, {}, x, {}, {}, scale, statistics, shift_dtype, impl == "dtile");
  return {std::move(out.dx), std::move(out.dshift), std::move(out.dscale)};
}

std::tuple<Tensor, Tensor, Tensor> gated_forward(const Tensor& x, const Tensor& branch, const Maybe& gate,
                                                 const Tensor& shift, const Tensor& scale, double eps,
                                                 std::optional<ScalarType> out_dtype) {
  const c10::cuda::CUDAGuard guard(x.device());
  const Shape shape = checked_shape(x, scale, {&branch}, {&shift, gate ? &*gate : &shift});
  Outputs out = launch_forward(shape, x, branch, gate, shift, scale, eps, out_dtype.value_or(x.scalar_type()));
  return {std::move(out.h), std::move(out.y), std::move(out.statistics)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gated_backward(const Tensor& dy, const Maybe& dh, const Tensor& h,
                                                                  const Maybe& branch, const Maybe& gate,
                                                                  const Tensor& scale, const Tensor& statistics,
                                                                  ScalarType shift_dtype) {
  const c10::cuda::CUDAGuard guard(h.device());
  TORCH_CHECK_VALUE(branch.has_value() == gate.has_value(), "branch and gate must be given together");
  const Shape shape =
      checked_shape(h, scale, {&dy, dh ? &*dh : &dy, branch ? &*branch : &dy}, {gate ? &*gate : &scale});
  Gradients out = launch_backward(shape, dy, dh, h, branch, gate, scale, statistics, shift_dtype, false);
  if (!gate) {
    out.dbranch = empty(kLeftOut, h, h.scalar_type());
    out.dgate = empty(kLeftOut, h, h.scalar_type());
  }
  return {std::move(out.dx), std::move(out.dbranch), std::move(out.dgate), std::move(out.dshift),
          std::move(out.dscale)};
}

}  // namespace

TORCH_LIBRARY_IMPL(repro_adaln, CUDA, m) {
  m.impl("layer_norm_modulate", &forward);
  m.impl("layer_norm_modulate_backward", &backward);
  m.impl("gated_residual_layer_norm_modulate", &gated_forward);
  m.impl("gated_residual_layer_norm_modulate_backward", &gated_backward);
}
