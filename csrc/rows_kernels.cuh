// The instances of the row kernels, and the table that picks one.
#pragma once

#include "launch.cuh"

namespace adaln {

// Measured on an H200 (NOTES.md has the sweep). Wider rows than the last line's take the scalar kernels.
// Columns: row_vectors, {vectors, rows, stages, blocks_per_sm}, keep.
constexpr Choice kForward16[] = {{256, {2, 2, 2, 4}, true},
                                 {512, {3, 1, 3, 3}, true},
                                 {768, {3, 1, 4, 2}, true},
                                 {1024, {4, 1, 3, 2}, false},
                                 {2048, {8, 1, 3, 2}, false}};
constexpr Choice kForward32[] = {
    {384, {3, 1, 4, 2}, true}, {768, {3, 1, 4, 1}, true}, {2048, {4, 1, 2, 2}, false}, {2048, {8, 1, 2, 1}, false}};
constexpr Choice kBackward16[] = {{256, {1, 2, 2, 2}, true},
                                  {512, {3, 1, 2, 2}, true},
                                  {768, {3, 2, 3, 1}, false},
                                  {1024, {4, 1, 2, 2}, false},
                                  {2048, {8, 1, 2, 1}, false}};
constexpr Choice kBackward32[] = {
    {512, {2, 1, 2, 3}, true}, {1024, {4, 1, 2, 3}, false}, {2048, {4, 1, 2, 2}, false}, {2048, {8, 1, 2, 1}, false}};

template <int N>
Choice choose(const Choice (&table)[N], int row_vectors) {
  int line = 0;
  while (line < N - 1 && row_vectors > table[line].row_vectors) ++line;
  Choice c = table[line];
  // Narrow rows make small blocks: keep about as many threads on a multiprocessor as the table's own rows do.
  const int threads = threads_for(row_vectors, c.config.vectors);
  c.config.blocks_per_sm = std::max(c.config.blocks_per_sm, std::min(16, 384 / threads));
  return c;
}

// X: type of x and dx, Y: type of y and dy. Explicitly instantiated in rows_*.cu.
template <typename X, typename Y>
struct RowKernels {
  static constexpr int E = kElements<X, Y>;

  static Choice forward_choice(const Problem& p) {
    return E == 4 ? choose(kForward32, p.dim / E) : choose(kForward16, p.dim / E);
  }
  static Choice backward_choice(const Problem& p) {
    return E == 4 ? choose(kBackward32, p.dim / E) : choose(kBackward16, p.dim / E);
  }

  // `fits` is false where the row kernels cannot take the problem.
  static Plan forward_plan(const Problem& p, const Tensor& x, const Tensor& y, const Device& d) {
    if (!vectorizable(x, p, E) || !vectorizable(y, p, E)) return {};
    return make_plan(p, E, p.dim * static_cast<int>(sizeof(X)), forward_choice(p), d);
  }
  static Plan backward_plan(const Problem& p, const Tensor& x, const Tensor& dy, const Device& d) {
    if (!vectorizable(x, p, E) || !vectorizable(dy, p, E)) return {};
    return make_plan(p, E, p.dim * static_cast<int>(sizeof(X) + sizeof(Y)), backward_choice(p), d);
  }

  static cudaError_t forward(const ForwardArgs& a, const Problem& p, const Plan& plan, const Device& d);
  static cudaError_t backward(const BackwardArgs& a, const Problem& p, const Plan& plan, bool accumulate,
                              const Device& d);
};

}  // namespace adaln
