// Host side of the row kernels: can a problem take them, with what layout, and the launch.
#pragma once

#include <algorithm>
#include <atomic>
#include <mutex>

#include "backward.cuh"
#include "forward.cuh"

namespace adaln {

struct Device {
  int index = 0;
  int multiprocessors = 0;
  int shared_per_block = 0;  // opt-in limit, bytes
  int shared_per_multiprocessor = 0;
  bool bulk = false;  // cp.async.bulk: compute capability 9.0 and newer
};

// Facts of the current device, read once.
inline cudaError_t current_device(Device& out) {
  static std::mutex mutex;
  static Device known[64];
  int index = 0;
  if (cudaError_t e = cudaGetDevice(&index)) return e;
  if (index < 0 || index >= 64) return cudaErrorInvalidDevice;
  std::lock_guard<std::mutex> lock(mutex);
  Device& d = known[index];
  if (d.multiprocessors == 0) {
    int major = 0, sms = 0;
    if (cudaError_t e = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index)) return e;
    if (cudaError_t e = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, index)) return e;
    if (cudaError_t e = cudaDeviceGetAttribute(&d.shared_per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin, index))
      return e;
    if (cudaError_t e =
            cudaDeviceGetAttribute(&d.shared_per_multiprocessor, cudaDevAttrMaxSharedMemoryPerMultiprocessor, index))
      return e;
    d.index = index;
    d.bulk = major >= 9;
    d.multiprocessors = sms;
  }
  out = d;
  return cudaSuccess;
}

// A row that 16-byte accesses can walk.
inline bool vectorizable(const Tensor& t, const Problem& p, int elements) {
  const int64_t size = size_of(t.type);
  return p.dim % elements == 0 && reinterpret_cast<uintptr_t>(t.data) % 16 == 0 &&
         (p.rows == 1 || t.row_stride * size % 16 == 0) && (p.batch == 1 || t.batch_stride * size % 16 == 0);
}

// How the row loop is laid out.
struct Config {
  int vectors;        // vectors that a thread owns in a row (V)
  int rows;           // rows an iteration (R)
  int stages;         // depth of the ring of rows in shared memory
  int blocks_per_sm;  // persistent blocks on a multiprocessor
};

// A line of the tables in rows_kernels.cuh: for rows of at most `row_vectors` vectors, this layout.
struct Choice {
  int row_vectors;
  Config config;
  bool keep;
};

struct Plan {
  bool fits = false;  // the row kernels can take this problem
  Config config{};
  bool keep = false;
  int threads = 0;
  int blocks = 0;  // of a sample
  int shared = 0;
};

inline int threads_for(int row_vectors, int vectors) { return ((row_vectors + vectors - 1) / vectors + 31) / 32 * 32; }

// Blocks of a sample: enough to fill the device with `batch` samples, no more than there are groups of rows.
inline int blocks_of_sample(const Problem& p, const Config& c, const Device& d) {
  const int64_t groups = (p.rows + c.rows - 1) / c.rows;
  const int64_t slots = static_cast<int64_t>(d.multiprocessors) * c.blocks_per_sm;
  return static_cast<int>(std::max<int64_t>(1, std::min(groups, slots / p.batch)));
}

// row_bytes: bytes of a row over the operands that are read.
inline Plan make_plan(const Problem& p, int elements, int row_bytes, const Choice& choice, const Device& d) {
  const Config& c = choice.config;
  Plan plan;
  plan.config = c;
  plan.keep = choice.keep;
  plan.threads = threads_for(p.dim / elements, c.vectors);
  if (plan.threads > max_threads(c.vectors, elements)) return plan;
  if (d.bulk) {
    const int room = d.shared_per_block - kBarrierBytes - 4096;  // the kernels' own arrays
    plan.config.stages = std::min({c.stages, 16, room / (c.rows * row_bytes)});
    if (plan.config.stages < 2) return plan;
    plan.shared = kBarrierBytes + plan.config.stages * c.rows * row_bytes;
  }
  plan.blocks = blocks_of_sample(p, c, d);
  plan.fits = true;
  return plan;
}

inline Loop loop_of(const Problem& p, const Plan& plan, int elements) {
  return {p.rows, (p.rows + plan.config.rows - 1) / plan.config.rows, plan.blocks, plan.config.stages,
          p.dim / elements};
}

// `Kernel` is a template argument, so each instance remembers on which devices its shared-memory limit was raised.
template <auto Kernel, typename Args>
cudaError_t launch_rows(const Args& args, const Problem& p, const Plan& plan, int elements, const Device& d) {
  static std::atomic<uint64_t> raised{0};
  const uint64_t bit = uint64_t{1} << d.index;
  if (plan.shared > 0 && !(raised.load(std::memory_order_acquire) & bit)) {
    cudaFuncAttributes attributes{};
    if (cudaError_t e = cudaFuncGetAttributes(&attributes, Kernel)) return e;
    const int limit = d.shared_per_block - static_cast<int>(attributes.sharedSizeBytes);
    if (cudaError_t e = cudaFuncSetAttribute(Kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, limit)) return e;
    raised.fetch_or(bit, std::memory_order_release);
  }
  const int64_t grid = p.batch * plan.blocks;
  if (grid > 0x7fffffff) return cudaErrorInvalidValue;
  Kernel<<<static_cast<unsigned>(grid), plan.threads, plan.shared, p.stream>>>(args, loop_of(p, plan, elements));
  return cudaGetLastError();
}

}  // namespace adaln
