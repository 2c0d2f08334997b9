// Definitions of RowKernels' launches; included by the files that instantiate them, one type pair or two each, so that
// they compile side by side.
#pragma once

#include "rows_kernels.cuh"

namespace adaln {

template <typename X, typename Y, bool Residual, bool PerToken>
cudaError_t forward_form(const Forward& a, const Problem& p, const ForwardChoice& c) {
  constexpr int E = kElements<X, Y>;
  constexpr bool kPlain = !Residual && !PerToken;
  // RESIDENT: blocks for which registers must suffice on a multiprocessor. Two widths of types need about twice the
  // registers, which leaves room for half the blocks.
#define ADALN_TRY(V, R, THREADS, RESIDENT, STREAMING)                                               \
  if (c.vectors == V && c.rows == R && c.threads == THREADS && c.streaming == STREAMING) {          \
    constexpr int kResident = kPlain && sizeof(X) != sizeof(Y) ? ((RESIDENT) + 1) / 2 : (RESIDENT); \
    return launch_forward<V, R, Residual, PerToken, THREADS, kResident, STREAMING, X, Y>(a, p);     \
  }
  if constexpr (Residual && E == 8) {
    ADALN_TRY(2, 1, 96, 7, false)
    ADALN_TRY(3, 1, 128, 6, false)
    ADALN_TRY(3, 1, 224, 3, false)
    ADALN_TRY(5, 1, 256, 2, true)
  } else if constexpr (Residual) {
    ADALN_TRY(3, 1, 128, 5, false)
    ADALN_TRY(4, 1, 192, 4, false)
    ADALN_TRY(4, 1, 320, 3, false)
  } else if constexpr (PerToken && E == 8) {
    ADALN_TRY(3, 1, 64, 10, false)
    ADALN_TRY(3, 1, 128, 6, false)
    ADALN_TRY(5, 1, 128, 4, false)
    ADALN_TRY(5, 1, 256, 2, true)
  } else if constexpr (PerToken) {
    ADALN_TRY(3, 1, 128, 5, true)
    ADALN_TRY(4, 1, 192, 4, true)
    ADALN_TRY(4, 1, 320, 3, true)
  } else if constexpr (E == 8) {
    ADALN_TRY(3, 2, 64, 12, true)
    ADALN_TRY(3, 1, 64, 16, true)
    ADALN_TRY(5, 1, 96, 13, true)
    ADALN_TRY(5, 1, 128, 8, true)
    ADALN_TRY(5, 1, 128, 8, false)
    ADALN_TRY(5, 1, 256, 4, true)
  } else {
    ADALN_TRY(3, 1, 128, 9, true)
    ADALN_TRY(3, 1, 128, 9, false)
    ADALN_TRY(4, 1, 192, 7, true)
    ADALN_TRY(4, 1, 192, 7, false)
    ADALN_TRY(4, 1, 320, 4, true)
    ADALN_TRY(4, 1, 320, 4, false)
  }
  ADALN_TRY(8, 1, 512, kPlain ? 2 : 1, true)
#undef ADALN_TRY
  return cudaErrorInvalidConfiguration;
}

// The forms beyond the plain one are there where y is no wider than x: a residual stream is never narrower than what
// is computed from it.
template <typename X, typename Y>
cudaError_t RowKernels<X, Y>::forward(const Forward& a, const Problem& p) {
  const ForwardChoice& c = *forward_choice(p, a);
  if (!a.residual()) {
    return p.per_token ? forward_form<X, Y, false, true>(a, p, c) : forward_form<X, Y, false, false>(a, p, c);
  }
  if constexpr (sizeof(Y) <= sizeof(X)) {
    return p.per_token ? forward_form<X, Y, true, true>(a, p, c) : forward_form<X, Y, true, false>(a, p, c);
  }
  return cudaErrorInvalidConfiguration;
}

template <typename X, typename Y>
cudaError_t RowKernels<X, Y>::backward(const Backward& a, const Problem& p, const Plan& plan, const Device& d) {
  const BackwardChoice& c = *plan.choice;
#define ADALN_TRY(V, R, KEEP, THREADS, RESIDENT, RESIDUAL, TOKEN, SUMS)                                               \
  if (c.vectors == V && c.rows == R && c.keep == KEEP && c.threads == THREADS && c.resident == RESIDENT &&            \
      a.residual() == RESIDUAL && p.per_token == TOKEN && (TOKEN || a.dtile != SUMS)) {                               \
    return launch_backward<&backward_rows<X, Y, V, R, KEEP, RESIDUAL, TOKEN, SUMS, THREADS, RESIDENT>>(a, p, plan, E, \
                                                                                                       d);            \
  }
#define ADALN_PLAIN(V, R, KEEP, THREADS, RESIDENT)             \
  ADALN_TRY(V, R, KEEP, THREADS, RESIDENT, false, false, true) \
  ADALN_TRY(V, R, KEEP, THREADS, RESIDENT, false, false, false)
#define ADALN_RESIDUAL(V, THREADS, RESIDENT)                   \
  ADALN_TRY(V, 1, false, THREADS, RESIDENT, true, false, true) \
  ADALN_TRY(V, 1, false, THREADS, RESIDENT, true, true, false)
#define ADALN_TOKEN(V, THREADS, RESIDENT) ADALN_TRY(V, 1, false, THREADS, RESIDENT, false, true, false)
  ADALN_PLAIN(8, 1, false, 256, 1)
  ADALN_TOKEN(4, 256, 1)
  if constexpr (E == 8) {
    ADALN_PLAIN(2, 1, true, 96, 5)
    ADALN_PLAIN(2, 2, true, 128, 4)
    ADALN_PLAIN(2, 1, true, 256, 2)
    ADALN_PLAIN(2, 1, true, 320, 1)
    ADALN_PLAIN(2, 2, false, 320, 1)
    ADALN_PLAIN(3, 2, false, 256, 1)
    ADALN_PLAIN(4, 1, false, 256, 1)
    ADALN_TOKEN(2, 128, 4)
    ADALN_TOKEN(2, 256, 2)
    ADALN_TOKEN(3, 256, 2)
  } else {
    ADALN_PLAIN(3, 1, true, 128, 3)
    ADALN_PLAIN(3, 1, false, 256, 2)
    ADALN_PLAIN(4, 1, false, 320, 2)
    ADALN_TOKEN(3, 128, 4)
    ADALN_TOKEN(4, 320, 2)
    ADALN_TOKEN(4, 512, 1)
  }
  if constexpr (sizeof(Y) <= sizeof(X)) {
    ADALN_RESIDUAL(2, 256, 2)
    ADALN_RESIDUAL(4, 256, 1)
    if constexpr (E == 8) {
      ADALN_RESIDUAL(2, 128, 4)
      ADALN_RESIDUAL(3, 256, 1)
    } else {
      ADALN_RESIDUAL(4, 320, 1)
      ADALN_RESIDUAL(4, 512, 1)
    }
  }
#undef ADALN_TOKEN
#undef ADALN_RESIDUAL
#undef ADALN_PLAIN
#undef ADALN_TRY
  return cudaErrorInvalidConfiguration;
}

}  // namespace adaln
