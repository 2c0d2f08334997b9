// Which arguments fit together: the operators' shapes and dtypes.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

namespace adaln {

// x [B, N, D] or [N, D] as the kernels take it: the frames of a sample that have a modulation each are samples.
struct Shape {
  int64_t batch, rows, dim;
  int64_t frames = 1;  // of one sample
  bool per_token = false;
};

// The form, told by shapes: modulation [B, D] or [B, 1, D] per sample, [B, N, D] per token, [B, F, 1, D] with F
// dividing N per frame; without B where x has none. Nothing where it is none of these.
inline std::optional<Shape> shape_of(const at::Tensor& x, const at::Tensor& modulation) {
  const at::IntArrayRef sizes = x.sizes();
  at::IntArrayRef rest = modulation.sizes();
  if (sizes.size() < 2 || sizes.size() > 3) return {};
  const bool batched = sizes.size() == 3;
  Shape shape{batched ? sizes[0] : 1, sizes[sizes.size() - 2], sizes.back()};
  if (batched) {
    if (rest.empty() || rest[0] != shape.batch) return {};
    rest = rest.slice(1);
  }
  if (shape.dim < 1 || rest.empty() || rest.back() != shape.dim) return {};
  if (rest.size() == 1 || (rest.size() == 2 && rest[0] == 1)) return shape;
  if (rest.size() == 2 && rest[0] == shape.rows) {
    shape.per_token = true;
    return shape;
  }
  if (rest.size() == 3 && rest[1] == 1 && rest[0] >= 1 && shape.rows % rest[0] == 0) {
    shape.frames = rest[0];
    shape.batch *= shape.frames;
    shape.rows /= shape.frames;
    return shape;
  }
  return {};
}

// dtypes of the kernels.
inline bool supported(at::ScalarType type) {
  return type == at::ScalarType::Float || type == at::ScalarType::Half || type == at::ScalarType::BFloat16;
}

}  // namespace adaln
