// The row loop of the backward: how rows reach the registers of the threads that own their features.
//
// A block belongs to one sample and takes groups of R rows in an interleaved order (block c takes groups c, c + grid,
// ...), since neighbouring blocks then stream neighbouring memory. Thread t owns the vectors t, t + T, ... (V of them)
// of every row, so what depends on the feature alone (modulation, partial sums) stays in its registers.
//
// sm_90 and newer: whole rows come by bulk copy into a ring of stages in shared memory; a stage is refilled as soon as
// the block's barrier shows that everyone has done with it. Older chips: each thread loads its vectors when it needs
// them, and the other resident blocks hide the wait.
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

// Rows of one tensor, from a sample's first on; no base where the tensor is absent, whose rows read as zeros.
struct Operand {
  const char* base = nullptr;
  int64_t distance = 0;  // from row to row, bytes
  int element = 0;       // bytes
};

// The rows of a sample of a tensor or of a modulation per token.
template <typename T>
__device__ __forceinline__ Operand operand_of(const T& t, int64_t sample, int element) {
  if (t.data == nullptr) return {};
  return {static_cast<const char*>(t.data) + sample * t.batch_stride * element, t.row_stride * element, element};
}

// Brings groups of R rows of the operands to registers. `Sizes` are the bytes of their elements, 0 where these are
// known at run time only; knowing them saves a tenth of the registers.
//
// Keep: phases before and after the block's barrier work on the same registers, and the stage is refilled at once.
// Otherwise the second phase reads shared memory again, which frees registers and costs one stage of look-ahead.
template <int E, int V, int R, bool Keep, int... Sizes>
class RowReader {
  static constexpr int kOperands = sizeof...(Sizes);

 public:
  __device__ __forceinline__ RowReader(const Loop& loop, const Operand (&operands)[kOperands], char* shared)
      : loop_(loop), group_(blockIdx.x % loop.blocks) {
#pragma unroll
    for (int k = 0; k < kOperands; ++k) operands_[k] = operands[k];
#if ADALN_BULK
    bars_ = reinterpret_cast<uint64_t*>(shared);
    ring_ = shared + kBarrierBytes;
    if (threadIdx.x == 0) {
      for (int s = 0; s < loop.stages; ++s) barrier_init(bars_ + s, 1);
      barrier_init_fence();
      for (int s = 0; s < loop.stages - (Keep ? 0 : 1); ++s) issue(s, group_ + static_cast<int64_t>(s) * loop.blocks);
    }
    __syncthreads();
#endif
  }

  __device__ __forceinline__ bool valid() const { return group_ < loop_.groups; }
  __device__ __forceinline__ int64_t group() const { return group_; }
  __device__ __forceinline__ int64_t first_row() const { return group_ * R; }
  __device__ __forceinline__ int count() const { return count_of(group_); }
#if ADALN_BULK
  // The ring's memory, free once every group has been read and the block has met.
  __device__ __forceinline__ float* scratch() const { return reinterpret_cast<float*>(ring_); }
#endif

  // Waits until the current group has arrived.
  __device__ __forceinline__ void wait() {
#if ADALN_BULK
    barrier_wait(bars_ + stage_, parity_);
#endif
  }

  // Vector v of row r of operand K in the current group: zero past the sample's last row and the row's last vector.
  template <int K, typename T>
  __device__ __forceinline__ Pack<T, E> get(int r, int v) const {
    Pack<T, E> out;
    const int i = threadIdx.x + v * blockDim.x;
    if (operands_[K].base != nullptr && r < count() && i < loop_.vectors) {
      out.load_shared(place<K, T>(r, i));
    } else {
      out.zero();
    }
    return out;
  }

  // Where vector i of row r of operand K lies.
  template <int K, typename T>
  __device__ __forceinline__ const T* place(int r, int i) const {
    const int offset = i * E * static_cast<int>(sizeof(T));
#if ADALN_BULK
    return reinterpret_cast<const T*>(ring_ + stage_ * stage_bytes() + R * bytes_ahead(K) + r * row_bytes(K) + offset);
#else
    return reinterpret_cast<const T*>(operands_[K].base + (first_row() + r) * operands_[K].distance + offset);
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
#endif
  }

 private:
  __device__ __forceinline__ int count_of(int64_t group) const {
    if constexpr (R == 1) return 1;
    const int64_t left = loop_.rows - group * R;
    return left < R ? static_cast<int>(left) : R;
  }

#if ADALN_BULK
  __device__ __forceinline__ int element(int k) const {
    constexpr int sizes[] = {Sizes...};
    return sizes[k] != 0 ? sizes[k] : operands_[k].element;
  }
  // Bytes of a row of operand k, and of a row of all operands ahead of it, in shared memory.
  __device__ __forceinline__ int row_bytes(int k) const { return loop_.vectors * E * element(k); }
  __device__ __forceinline__ int bytes_ahead(int k) const {
    int size = 0;
#pragma unroll
    for (int j = 0; j < kOperands; ++j) size += j < k ? element(j) : 0;
    return loop_.vectors * E * size;
  }
  __device__ __forceinline__ int stage_bytes() const { return R * bytes_ahead(kOperands); }

  __device__ __forceinline__ void issue(int s, int64_t group) {
    if (group >= loop_.groups) return;
    const int n = count_of(group);
    int bytes = 0;
#pragma unroll
    for (int k = 0; k < kOperands; ++k) bytes += operands_[k].base != nullptr ? n * row_bytes(k) : 0;
    barrier_expect(bars_ + s, bytes);
#pragma unroll
    for (int k = 0; k < kOperands; ++k) {
      const Operand& o = operands_[k];
      if (o.base == nullptr) continue;
      char* const to = ring_ + s * stage_bytes() + R * bytes_ahead(k);
      const char* const from = o.base + group * R * o.distance;
      if (R > 1 && o.distance == row_bytes(k)) {
        bulk_copy(to, from, n * row_bytes(k), bars_ + s);
        continue;
      }
#pragma unroll
      for (int r = 0; r < R; ++r) {
        if (r < n) bulk_copy(to + r * row_bytes(k), from + r * o.distance, row_bytes(k), bars_ + s);
      }
    }
  }

  uint64_t* bars_;
  char* ring_;
  int stage_ = 0;
  uint32_t parity_ = 0;
#endif

  Loop loop_;
  Operand operands_[kOperands];
  int64_t group_;
};

}  // namespace adaln
