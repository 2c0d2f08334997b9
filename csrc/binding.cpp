// The one file that knows PyTorch: registers the CUDA kernels for the operators whose schema repro/adaln/ops.py
// defines. Arguments were checked there; here only what the kernels themselves cannot take is refused.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <optional>
#include <string_view>
#include <tuple>

#include "adaln.h"

namespace {

using at::ScalarType;
using Outputs = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

adaln::DType dtype_of(ScalarType type) {
  switch (type) {
    case ScalarType::Float:
      return adaln::DType::f32;
    case ScalarType::Half:
      return adaln::DType::f16;
    case ScalarType::BFloat16:
      return adaln::DType::bf16;
    default:
      TORCH_CHECK_TYPE(false, "layer_norm_modulate on CUDA takes float32, float16 and bfloat16, got ", type);
  }
}

// x as the kernels need it: features side by side. Rows and samples may lie anywhere, so most views need no copy.
at::Tensor with_dense_rows(const at::Tensor& x) { return x.size(-1) <= 1 || x.stride(-1) == 1 ? x : x.contiguous(); }

adaln::Problem problem_of(const at::Tensor& x) {
  const int64_t dim = x.size(-1);
  TORCH_CHECK_VALUE(dim <= (int64_t{1} << 24), "layer_norm_modulate on CUDA takes up to 2^24 features, got ", dim);
  return {x.dim() == 3 ? x.size(0) : 1, x.size(-2), static_cast<int>(dim), c10::cuda::getCurrentCUDAStream()};
}

adaln::Tensor tensor_of(const at::Tensor& t) {
  return {t.data_ptr(), dtype_of(t.scalar_type()), t.dim() == 3 ? t.stride(0) : 0, t.stride(-2)};
}

// shift or scale: [B, D] or [B, 1, D] of a batch, [D] or [1, D] of one sample.
adaln::Modulation modulation_of(const at::Tensor& m, const at::Tensor& x) {
  return {m.data_ptr(), dtype_of(m.scalar_type()), x.dim() == 3 ? m.stride(0) : 0, m.stride(-1)};
}

// float16 in and bfloat16 out, or the reverse, has no kernels of its own: the output side goes through float32.
bool crosses(ScalarType x, ScalarType y) { return x != y && c10::elementSize(x) == 2 && c10::elementSize(y) == 2; }

void check(cudaError_t error) {
  TORCH_CHECK(error == cudaSuccess, "layer_norm_modulate kernel: ", cudaGetErrorString(error));
}

Outputs forward(const at::Tensor& x_in, const at::Tensor& shift, const at::Tensor& scale, double eps,
                std::optional<ScalarType> out_dtype, std::string_view) {
  const c10::cuda::CUDAGuard guard(x_in.device());
  const at::Tensor x = with_dense_rows(x_in);
  const adaln::Problem problem = problem_of(x);
  const ScalarType type = out_dtype.value_or(x.scalar_type());
  const bool via_float = crosses(x.scalar_type(), type);
  at::Tensor y = at::empty(x.sizes(), x.options().dtype(via_float ? ScalarType::Float : type));
  at::Tensor mean = at::empty({problem.batch * problem.rows}, x.options().dtype(ScalarType::Float));
  at::Tensor rstd = at::empty_like(mean);
  if (x.numel() > 0) {
    check(adaln::forward(problem, tensor_of(x), modulation_of(shift, x), modulation_of(scale, x),
                         static_cast<float>(eps), tensor_of(y), mean.data_ptr<float>(), rstd.data_ptr<float>()));
  }
  return {via_float ? y.to(type) : std::move(y), std::move(mean), std::move(rstd)};
}

Outputs backward(const at::Tensor& dy_in, const at::Tensor& x_in, const at::Tensor& scale, const at::Tensor& mean,
                 const at::Tensor& rstd, ScalarType shift_dtype, std::string_view impl) {
  const c10::cuda::CUDAGuard guard(x_in.device());
  const at::Tensor x = with_dense_rows(x_in);
  const at::Tensor dy =
      with_dense_rows(crosses(x.scalar_type(), dy_in.scalar_type()) ? dy_in.to(ScalarType::Float) : dy_in);
  const adaln::Problem problem = problem_of(x);
  at::Tensor dx = at::empty(x.sizes(), x.options());
  at::Tensor dshift = at::empty(scale.sizes(), scale.options().dtype(shift_dtype));
  at::Tensor dscale = at::empty(scale.sizes(), scale.options());
  if (x.numel() == 0) {
    dshift.zero_();
    dscale.zero_();
    return {std::move(dx), std::move(dshift), std::move(dscale)};
  }
  const bool dtile = impl == "dtile";
  const adaln::Tensor x_rows = tensor_of(x), dy_rows = tensor_of(dy);
  size_t bytes = 0;
  check(adaln::backward_workspace(problem, dy_rows, x_rows, dtile, &bytes));
  const at::Tensor workspace = at::empty({static_cast<int64_t>(bytes)}, x.options().dtype(ScalarType::Byte));
  check(adaln::backward(problem, dy_rows, x_rows, modulation_of(scale, x), mean.data_ptr<float>(),
                        rstd.data_ptr<float>(), tensor_of(dx), {dshift.data_ptr(), dtype_of(shift_dtype)},
                        {dscale.data_ptr(), dtype_of(scale.scalar_type())}, workspace.data_ptr(), dtile));
  return {std::move(dx), std::move(dshift), std::move(dscale)};
}

}  // namespace

TORCH_LIBRARY_IMPL(repro_adaln, CUDA, m) {
  m.impl("layer_norm_modulate", &forward);
  m.impl("layer_norm_modulate_backward", &backward);
}
