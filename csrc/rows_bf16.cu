#include "rows_instances.cuh"

namespace adaln {
template struct RowKernels<__nv_bfloat16, __nv_bfloat16>;
}  // namespace adaln
