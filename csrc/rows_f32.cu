#include "rows_instances.cuh"

namespace adaln {
template struct RowKernels<float, float>;
}  // namespace adaln
