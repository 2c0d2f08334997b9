// Definitions of RowKernels' launches; included by the files that instantiate them, one type pair or two each, so that
// they compile side by side.
#pragma once

#include "rows_kernels.cuh"

namespace adaln {

template <typename X, typename Y>
cudaError_t RowKernels<X, Y>::forward(const ForwardArgs& a, const Problem& p, const Plan& plan, const Device& d) {
  const Config& c = plan.config;
#define ADALN_TRY(V, R, K)                                              \
  if (c.vectors == V && c.rows == R && plan.keep == K) {                \
    return launch_rows<&forward_rows<X, Y, V, R, K>>(a, p, plan, E, d); \
  }
  ADALN_TRY(2, 2, true)
  ADALN_TRY(3, 1, true)
  ADALN_TRY(4, 1, false)
  ADALN_TRY(8, 1, false)
#undef ADALN_TRY
  return cudaErrorInvalidConfiguration;
}

template <typename X, typename Y>
cudaError_t RowKernels<X, Y>::backward(const BackwardArgs& a, const Problem& p, const Plan& plan, bool accumulate,
                                       const Device& d) {
  const Config& c = plan.config;
#define ADALN_TRY(V, R, K)                                                                   \
  if (c.vectors == V && c.rows == R && plan.keep == K) {                                     \
    return accumulate ? launch_rows<&backward_rows<X, Y, V, R, true, K>>(a, p, plan, E, d)   \
                      : launch_rows<&backward_rows<X, Y, V, R, false, K>>(a, p, plan, E, d); \
  }
  ADALN_TRY(1, 2, true)
  ADALN_TRY(2, 1, true)
  ADALN_TRY(3, 1, true)
  ADALN_TRY(3, 2, false)
  ADALN_TRY(4, 1, false)
  ADALN_TRY(8, 1, false)
#undef ADALN_TRY
  return cudaErrorInvalidConfiguration;
}

}  // namespace adaln
