#include "rows_instances.cuh"

namespace adaln {
template struct RowKernels<float, __half>;
template struct RowKernels<float, __nv_bfloat16>;
}  // namespace adaln
