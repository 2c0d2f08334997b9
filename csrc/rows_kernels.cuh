// The instances of the row kernels, and the tables that pick one. NOTES.md has the sweeps on an H200 behind them.
#pragma once

#include "launch.cuh"

namespace adaln {

// Columns: row_vectors, vectors a thread, rows a block, threads. Wider rows than the last line's take the scalar
// kernels.
constexpr ForwardChoice kForward16[] = {
    {192, 3, 2, 64}, {480, 5, 1, 96}, {640, 5, 1, 128}, {1280, 5, 1, 256}, {4096, 8, 1, 512}};
constexpr ForwardChoice kForward32[] = {{384, 3, 1, 128}, {768, 4, 1, 192}, {1280, 4, 1, 320}, {4096, 8, 1, 512}};

// Columns: row_vectors, {vectors, rows, keep, stages, blocks_per_sm}.
constexpr BackwardChoice kBackward16[] = {{256, {2, 2, true, 2, 4}},
                                          {512, {2, 1, true, 3, 2}},
                                          {768, {3, 1, true, 2, 2}},
                                          {1024, {4, 1, false, 2, 2}},
                                          {2048, {8, 1, false, 2, 1}}};
constexpr BackwardChoice kBackward32[] = {
    {512, {3, 1, true, 3, 3}}, {768, {3, 1, false, 4, 2}}, {2048, {4, 1, false, 2, 2}}, {2048, {8, 1, false, 2, 1}}};
// A residual or modulations per token: one row an iteration, whose other operands are read after the barrier.
constexpr BackwardChoice kBackwardForms[] = {{768, {3, 1, false, 3, 1}}, {2048, {4, 1, false, 2, 1}}};

template <int N>
const ForwardChoice* choose(const ForwardChoice (&table)[N], int row_vectors) {
  for (const ForwardChoice& line : table) {
    if (row_vectors <= line.row_vectors) return &line;
  }
  return nullptr;
}

template <int N>
const Config& choose(const BackwardChoice (&table)[N], int row_vectors) {
  int line = 0;
  while (line < N - 1 && row_vectors > table[line].row_vectors) ++line;
  return table[line].config;
}

// X: type of x and dx, Y: type of y and dy. Explicitly instantiated in rows_*.cu.
template <typename X, typename Y>
struct RowKernels {
  static constexpr int E = kElements<X, Y>;

  static const ForwardChoice* forward_choice(const Problem& p) {
    return E == 4 ? choose(kForward32, p.dim / E) : choose(kForward16, p.dim / E);
  }
  static bool forward_fits(const Problem& p, const Forward& a) {
    return vectorizable(a.x, p, E) && vectorizable(a.y, p, E) && vectorizable(a.shift) && vectorizable(a.scale) &&
           a.shift.type == a.scale.type && vectorizable(a.gate) && forward_choice(p) != nullptr;
  }

  // `fits` is false where the row kernels cannot take the problem.
  static Plan backward_plan(const Problem& p, const Backward& a, const Device& d) {
    if (!vectorizable(a.x, p, E) || !vectorizable(a.dy, p, E) || !vectorizable(a.scale)) return {};
    const int row_vectors = p.dim / E;
    const bool forms = a.residual() || p.per_token;
    const Config& config = forms    ? choose(kBackwardForms, row_vectors)
                           : E == 4 ? choose(kBackward32, row_vectors)
                                    : choose(kBackward16, row_vectors);
    return make_plan(p, E, p.dim * static_cast<int>(sizeof(X) + sizeof(Y)) * (a.residual() ? 2 : 1), config, d);
  }

  static cudaError_t forward(const Forward& a, const Problem& p);
  static cudaError_t backward(const Backward& a, const Problem& p, const Plan& plan, const Device& d);
};

}  // namespace adaln
