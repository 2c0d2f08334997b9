// The instances of the row kernels, and the tables that pick one. NOTES.md has the sweeps on an H200 behind them.
#pragma once

#include "launch.cuh"

namespace adaln {

// Columns: row_vectors, from, vectors a thread, rows a block, threads, streaming. Wider rows than the last line's take
// the scalar kernels.
constexpr ForwardChoice kForward16[] = {
    {192, 8192, 3, 2, 64, true}, {192, 0, 3, 1, 64, true},   {480, 0, 5, 1, 96, true},  {640, 16384, 5, 1, 128, false},
    {640, 0, 5, 1, 128, true},   {1280, 0, 5, 1, 256, true}, {4096, 0, 8, 1, 512, true}};
constexpr ForwardChoice kForward32[] = {{384, 16384, 3, 1, 128, false}, {384, 0, 3, 1, 128, true},
                                        {768, 8192, 4, 1, 192, false},  {768, 0, 4, 1, 192, true},
                                        {1280, 4096, 4, 1, 320, false}, {1280, 0, 4, 1, 320, true},
                                        {4096, 0, 8, 1, 512, true}};
// With a residual: twice the traffic a row.
constexpr ForwardChoice kForwardResidual16[] = {{192, 0, 2, 1, 96, false},
                                                {384, 0, 3, 1, 128, false},
                                                {672, 0, 3, 1, 224, false},
                                                {1280, 0, 5, 1, 256, true},
                                                {4096, 0, 8, 1, 512, true}};
constexpr ForwardChoice kForwardResidual32[] = {
    {384, 0, 3, 1, 128, false}, {768, 0, 4, 1, 192, false}, {1280, 0, 4, 1, 320, false}, {4096, 0, 8, 1, 512, true}};
// With modulations per token.
constexpr ForwardChoice kForwardPerToken16[] = {{192, 0, 3, 1, 64, false},
                                                {384, 0, 3, 1, 128, false},
                                                {640, 0, 5, 1, 128, false},
                                                {1280, 0, 5, 1, 256, true},
                                                {4096, 0, 8, 1, 512, true}};
constexpr ForwardChoice kForwardPerToken32[] = {
    {384, 0, 3, 1, 128, true}, {768, 0, 4, 1, 192, true}, {1280, 0, 4, 1, 320, true}, {4096, 0, 8, 1, 512, true}};

// Columns: row_vectors, from, vectors, rows, keep, threads, resident, blocks_per_sm, stages, cluster. The first line
// that is wide enough, for so many rows, and whose ring fits the device's shared memory counts. Rows narrower than the
// line's get more blocks, so one layout has a line for each width that wants as many.
constexpr BackwardChoice kBackward16[] = {
    {192, 49152, 2, 1, true, 96, 5, 5, 3, 2},  {192, 8192, 2, 1, true, 96, 5, 5, 2, 2},
    {192, 4096, 2, 1, true, 96, 5, 3, 2, 1},   {192, 0, 2, 1, true, 96, 5, 2, 2, 1},
    {256, 0, 2, 2, true, 128, 4, 4, 2, 2},     {384, 0, 2, 1, true, 256, 2, 2, 2, 2},
    {512, 0, 2, 1, true, 256, 2, 2, 3, 2},     {640, 16384, 2, 2, false, 320, 1, 1, 4, 1},
    {640, 4096, 2, 2, false, 320, 1, 1, 3, 1}, {640, 0, 2, 1, true, 320, 1, 1, 2, 2},
    {768, 0, 3, 2, false, 256, 1, 1, 3, 1},    {1024, 0, 4, 1, false, 256, 1, 1, 2, 1},
    {2048, 0, 8, 1, false, 256, 1, 1, 2, 1}};
constexpr BackwardChoice kBackward32[] = {{384, 4096, 3, 1, true, 128, 3, 3, 3, 2},
                                          {384, 0, 3, 1, true, 128, 3, 3, 2, 1},
                                          {768, 0, 3, 1, false, 256, 2, 2, 4, 1},
                                          {1280, 0, 4, 1, false, 320, 2, 2, 2, 2},
                                          {2048, 0, 8, 1, false, 256, 1, 1, 2, 1}};
// With a residual, whose other operands are read after the barrier.
constexpr BackwardChoice kResidual16[] = {
    {192, 4096, 2, 1, false, 128, 4, 4, 2, 2}, {192, 0, 2, 1, false, 128, 4, 2, 2, 1},
    {256, 0, 2, 1, false, 128, 4, 4, 2, 2},    {384, 0, 2, 1, false, 256, 2, 2, 2, 2},
    {768, 0, 3, 1, false, 256, 1, 1, 3, 1},    {1024, 0, 4, 1, false, 256, 1, 1, 2, 1}};
constexpr BackwardChoice kResidual32[] = {{384, 0, 2, 1, false, 256, 2, 2, 2, 2},
                                          {1024, 0, 4, 1, false, 256, 1, 1, 2, 1},
                                          {1280, 0, 4, 1, false, 320, 1, 1, 2, 1},
                                          {2048, 0, 4, 1, false, 512, 1, 1, 2, 1}};
// With modulations per token: a row of them at a time, and no sums over rows.
constexpr BackwardChoice kPerToken16[] = {{192, 0, 2, 1, false, 128, 4, 3, 3, 1},
                                          {384, 0, 2, 1, false, 256, 2, 2, 3, 1},
                                          {768, 0, 3, 1, false, 256, 2, 1, 3, 1},
                                          {1024, 0, 4, 1, false, 256, 1, 1, 2, 1}};
constexpr BackwardChoice kPerToken32[] = {{384, 0, 3, 1, false, 128, 4, 3, 2, 1},
                                          {1024, 0, 4, 1, false, 256, 1, 1, 2, 1},
                                          {1280, 0, 4, 1, false, 320, 2, 1, 2, 1},
                                          {2048, 0, 4, 1, false, 512, 1, 1, 2, 1}};

// Whether a row keeps every bit of its result, however many rows there are: lines of one width add in the same order,
// which V decides (and with it the block's size), and the last of them takes what is left. And whether every block is
// as small as its instance was compiled for.
template <typename Choice, int N>
constexpr bool sound(const Choice (&table)[N]) {
  for (int i = 0; i < N; ++i) {
    const bool last = i == N - 1 || table[i + 1].row_vectors != table[i].row_vectors;
    if (last != (table[i].from == 0)) return false;
    if (threads_for(table[i].row_vectors, table[i].vectors) > table[i].threads) return false;
    if (i == 0) continue;
    const Choice &line = table[i], &above = table[i - 1];
    if (line.row_vectors < above.row_vectors) return false;
    if (line.row_vectors == above.row_vectors &&
        (line.from >= above.from || line.vectors != above.vectors || line.threads != above.threads)) {
      return false;
    }
  }
  return true;
}
static_assert(sound(kForward16) && sound(kForward32) && sound(kForwardResidual16) && sound(kForwardResidual32) &&
              sound(kForwardPerToken16) && sound(kForwardPerToken32) && sound(kBackward16) && sound(kBackward32) &&
              sound(kResidual16) && sound(kResidual32) && sound(kPerToken16) && sound(kPerToken32));

template <typename Choice>
bool meant_for(const Choice& line, const Problem& p, int row_vectors) {
  return row_vectors <= line.row_vectors && p.batch * p.rows >= line.from;
}

template <int N>
const ForwardChoice* choose(const ForwardChoice (&table)[N], const Problem& p, int row_vectors) {
  for (const ForwardChoice& line : table) {
    if (meant_for(line, p, row_vectors)) return &line;
  }
  return nullptr;
}

template <int N>
Plan choose(const BackwardChoice (&table)[N], const Problem& p, int row_vectors, int row_bytes, const Device& d) {
  for (const BackwardChoice& line : table) {
    if (!meant_for(line, p, row_vectors)) continue;
    const Plan plan = make_plan(p, row_vectors, row_bytes, line, d);
    if (plan.fits) return plan;
  }
  return {};
}

// X: type of x and dx, Y: type of y and dy. Explicitly instantiated in rows_*.cu.
template <typename X, typename Y>
struct RowKernels {
  static constexpr int E = kElements<X, Y>;

  static const ForwardChoice* forward_choice(const Problem& p, const Forward& a) {
    const auto line = [&](const auto& table) { return choose(table, p, p.dim / E); };
    if (a.residual()) return E == 4 ? line(kForwardResidual32) : line(kForwardResidual16);
    if (p.per_token) return E == 4 ? line(kForwardPerToken32) : line(kForwardPerToken16);
    return E == 4 ? line(kForward32) : line(kForward16);
  }
  static bool forward_fits(const Problem& p, const Forward& a) {
    return vectorizable(a.x, p, E) && vectorizable(a.y, p, E) && vectorizable(a.shift) && vectorizable(a.scale) &&
           a.shift.type == a.scale.type && vectorizable(a.gate) && forward_choice(p, a) != nullptr;
  }

  // `fits` is false where the row kernels cannot take the problem.
  static Plan backward_plan(const Problem& p, const Backward& a, const Device& d) {
    if (!vectorizable(a.x, p, E) || !vectorizable(a.dy, p, E) || !vectorizable(a.scale)) return {};
    // Bulk copies bring whole rows of modulations too, in units of 16 bytes.
    if (p.per_token && int64_t{p.dim} * size_of(a.scale.type) % 16 != 0) return {};
    const int row_vectors = p.dim / E;
    int sizes = sizeof(X) + sizeof(Y);
    if (a.residual()) sizes *= 2;
    if (p.per_token) sizes += size_of(a.scale.type) + (a.residual() ? size_of(a.gate.type) : 0);
    const auto plan = [&](const auto& table) { return choose(table, p, row_vectors, p.dim * sizes, d); };
    if (a.residual()) return E == 4 ? plan(kResidual32) : plan(kResidual16);
    if (p.per_token) return E == 4 ? plan(kPerToken32) : plan(kPerToken16);
    return E == 4 ? plan(kBackward32) : plan(kBackward16);
  }

  static cudaError_t forward(const Forward& a, const Problem& p);
  static cudaError_t backward(const Backward& a, const Problem& p, const Plan& plan, const Device& d);
};

}  // namespace adaln
