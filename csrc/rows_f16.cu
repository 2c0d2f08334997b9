#include "rows_instances.cuh"

namespace adaln {
template struct RowKernels<__half, __half>;
}  // namespace adaln
