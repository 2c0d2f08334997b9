// Prints the launch that csrc/ chooses for a problem on a chip, from that chip's limits alone: no GPU is asked.
// Standard input, a problem a line: types form residual batch rows dim sms shared_per_block shared_per_multiprocessor
// bulk. Standard output, as many lines: forward fits threads stages cluster blocks partials shared rows keep.
#include <cstdio>
#include <cstring>

#include "rows_kernels.cuh"

using namespace adaln;

template <typename X, typename Y>
void print(DType x_type, DType y_type, const Problem& p, bool residual, const Device& d) {
  static char memory[16];
  void* const data = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(memory) + 15) / 16 * 16);
  const auto rows = [&](DType type) { return Tensor{data, type, p.rows * p.dim, p.dim}; };
  const Modulation modulation{data, DType::f32, p.per_token ? p.rows * p.dim : p.dim, p.per_token ? p.dim : 0, 1};
  Forward forward{};
  forward.x = rows(x_type), forward.y = rows(y_type), forward.shift = forward.scale = modulation;
  Backward backward{};
  backward.x = rows(x_type), backward.dy = rows(y_type), backward.scale = modulation;
  if (residual) {
    forward.branch = backward.branch = rows(y_type);
    forward.gate = backward.gate = modulation;
    forward.h = rows(x_type);
  }
  const Plan plan = RowKernels<X, Y>::backward_plan(p, backward, d);
  std::printf("%d %d %d %d %d %d %d %d %d %d\n", RowKernels<X, Y>::forward_fits(p, forward), plan.fits, plan.threads,
              plan.stages, plan.cluster, plan.blocks, plan.fits ? plan.partials() : 0, plan.shared,
              plan.fits ? plan.choice->rows : 0, plan.fits ? plan.choice->keep : 0);
}

int main() {
  char types[16], form[16];
  int residual, bulk;
  Problem p{};
  Device d{};
  while (std::scanf("%15s %15s %d %ld %ld %d %d %d %d %d", types, form, &residual, &p.batch, &p.rows, &p.dim,
                    &d.multiprocessors, &d.shared_per_block, &d.shared_per_multiprocessor, &bulk) == 10) {
    p.per_token = std::strcmp(form, "per_token") == 0;
    d.bulk = bulk != 0;
    if (std::strcmp(types, "bf16") == 0) {
      print<__nv_bfloat16, __nv_bfloat16>(DType::bf16, DType::bf16, p, residual, d);
    } else if (std::strcmp(types, "fp32") == 0) {
      print<float, float>(DType::f32, DType::f32, p, residual, d);
    } else if (std::strcmp(types, "fp32-bf16") == 0) {
      print<float, __nv_bfloat16>(DType::f32, DType::bf16, p, residual, d);
    } else {
      return 1;
    }
  }
}
