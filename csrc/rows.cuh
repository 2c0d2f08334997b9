// The row loop that every kernel shares: how rows reach the registers of the threads that own their features.
//
// A block belongs to one sample and takes groups of R rows in an interleaved order (block c takes groups c, c + grid,
// ...), since neighbouring blocks then stream neighbouring memory. Thread t owns the vectors t, t + T, ... (V of them)
// of every row, so what depends on the feature alone (modulation, partial sums) stays in its registers.
//
// sm_90 and newer: whole rows come by bulk copy into a ring of stages in shared memory; a stage is refilled as soon as
// the block's barrier shows that everyone holds its vectors in registers. Older chips: each thread loads its vectors
// itself, the next group once it is done with this one; the other resident blocks hide the wait.
#pragma once

#include "bulk.cuh"
#include "vector.cuh"

namespace adaln {

struct Loop {
  int64_t rows;    // N, rows of a sample
  int64_t groups;  // ceil(N / R)
  int blocks;      // blocks of a sample
  int stages;
  int vectors;  // D / elements of a vector
};

constexpr int kBarrierBytes = 128;  // room for 16 mbarriers ahead of the ring

// Rows of one operand.
struct Operand {
  const char* base;   // first row of this block's sample
  int64_t row_bytes;  // distance between rows
};

__device__ __forceinline__ Operand operand_of(const Tensor& t, int64_t sample, int element) {
  return {static_cast<const char*>(t.data) + sample * t.batch_stride * element, t.row_stride * element};
}

// Brings groups of R rows of one or two operands (A, and B if TwoOperands) to registers.
//
// Keep: phases before and after the block's barrier work on the same registers, and the stage is refilled at once.
// Otherwise the second phase reads shared memory again, which frees registers and costs one stage of look-ahead.
template <typename A, typename B, int E, int V, int R, bool TwoOperands, bool Keep>
class RowReader {
 public:
  __device__ __forceinline__ RowReader(const Loop& loop, Operand a, Operand b, char* shared)
      : loop_(loop), a_(a), b_(b), group_(blockIdx.x % loop.blocks) {
#if ADALN_BULK
    bars_ = reinterpret_cast<uint64_t*>(shared);
    ring_ = shared + kBarrierBytes;
    row_a_ = loop.vectors * E * static_cast<int>(sizeof(A));
    row_b_ = TwoOperands ? loop.vectors * E * static_cast<int>(sizeof(B)) : 0;
    if (threadIdx.x == 0) {
      for (int s = 0; s < loop.stages; ++s) barrier_init(bars_ + s, 1);
      barrier_init_fence();
      for (int s = 0; s < loop.stages - (Keep ? 0 : 1); ++s) issue(s, group_ + static_cast<int64_t>(s) * loop.blocks);
    }
    __syncthreads();
#else
    load(group_);
#endif
  }

  __device__ __forceinline__ bool valid() const { return group_ < loop_.groups; }
  __device__ __forceinline__ int64_t group() const { return group_; }
  __device__ __forceinline__ int64_t first_row() const { return group_ * R; }
  __device__ __forceinline__ int count() const { return count_of(group_); }

  // Waits until the current group has arrived.
  __device__ __forceinline__ void wait() {
#if ADALN_BULK
    barrier_wait(bars_ + stage_, parity_);
#endif
  }

  // Vector v of row r of the current group: zero past the sample's last row and past the row's last vector.
  __device__ __forceinline__ Pack<A, E> a(int r, int v) const {
#if ADALN_BULK
    return from_stage<A>(stage_base(stage_) + r * row_a_, r, v);
#else
    return now_a_[r][v];
#endif
  }
  __device__ __forceinline__ Pack<B, E> b(int r, int v) const {
#if ADALN_BULK
    return from_stage<B>(stage_base(stage_) + R * row_a_ + r * row_b_, r, v);
#else
    return now_b_[r][v];
#endif
  }

  // Call once right after the block's barrier of an iteration: whatever stage everyone has done with is refilled.
  __device__ __forceinline__ void refill() {
#if ADALN_BULK
    if (threadIdx.x == 0) {
      if constexpr (Keep) {
        issue(stage_, group_ + static_cast<int64_t>(loop_.stages) * loop_.blocks);
      } else {
        const int previous = stage_ == 0 ? loop_.stages - 1 : stage_ - 1;
        issue(previous, group_ + static_cast<int64_t>(loop_.stages - 1) * loop_.blocks);
      }
    }
#endif
  }

  // Goes on to the next group.
  __device__ __forceinline__ void advance() {
    group_ += loop_.blocks;
#if ADALN_BULK
    if (++stage_ == loop_.stages) {
      stage_ = 0;
      parity_ ^= 1;
    }
#else
    load(group_);
#endif
  }

 private:
  __device__ __forceinline__ int count_of(int64_t group) const {
    if constexpr (R == 1) return 1;
    const int64_t left = loop_.rows - group * R;
    return left < R ? static_cast<int>(left) : R;
  }

#if ADALN_BULK
  __device__ __forceinline__ char* stage_base(int s) const {
    return ring_ + static_cast<int64_t>(s) * R * (row_a_ + row_b_);
  }

  template <typename T>
  __device__ __forceinline__ Pack<T, E> from_stage(const char* row, int r, int v) const {
    Pack<T, E> out;
    const int i = threadIdx.x + v * blockDim.x;
    if (r < count() && i < loop_.vectors) {
      out.load_shared(row + i * E * static_cast<int>(sizeof(T)));
    } else {
      out.zero();
    }
    return out;
  }

  __device__ __forceinline__ void issue(int s, int64_t group) {
    if (group >= loop_.groups) return;
    const int n = count_of(group);
    char* const stage = stage_base(s);
    barrier_expect(bars_ + s, n * (row_a_ + row_b_));
#pragma unroll
    for (int r = 0; r < R; ++r) {
      if (r >= n) break;
      bulk_copy(stage + r * row_a_, a_.base + (group * R + r) * a_.row_bytes, row_a_, bars_ + s);
      if constexpr (TwoOperands) {
        bulk_copy(stage + R * row_a_ + r * row_b_, b_.base + (group * R + r) * b_.row_bytes, row_b_, bars_ + s);
      }
    }
  }

  uint64_t* bars_;
  char* ring_;
  int row_a_, row_b_;
  int stage_ = 0;
  uint32_t parity_ = 0;
#else
  // The loads of the next group are issued at the end of an iteration and first used at the start of the next.
  __device__ __forceinline__ void load(int64_t group) {
    const int n = group < loop_.groups ? count_of(group) : 0;
#pragma unroll
    for (int r = 0; r < R; ++r) {
#pragma unroll
      for (int v = 0; v < V; ++v) {
        const int i = threadIdx.x + v * blockDim.x;
        if (r < n && i < loop_.vectors) {
          const int64_t row = group * R + r;
          now_a_[r][v].load_global(a_.base + row * a_.row_bytes + static_cast<int64_t>(i) * E * sizeof(A));
          if constexpr (TwoOperands) {
            now_b_[r][v].load_global(b_.base + row * b_.row_bytes + static_cast<int64_t>(i) * E * sizeof(B));
          }
        } else {
          now_a_[r][v].zero();
          if constexpr (TwoOperands) now_b_[r][v].zero();
        }
      }
    }
  }

  Pack<A, E> now_a_[R][V];
  Pack<B, E> now_b_[TwoOperands ? R : 1][TwoOperands ? V : 1];
#endif

  Loop loop_;
  Operand a_, b_;
  int64_t group_;
};

}  // namespace adaln
