#include "rows_instances.cuh"

namespace adaln {
template struct RowKernels<__half, float>;
template struct RowKernels<__nv_bfloat16, float>;
}  // namespace adaln
