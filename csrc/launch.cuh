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
  bool bulk = false;  // compute capability 9.0 and newer: bulk copies, programmatic dependent launch
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

inline bool vectorizable(const Modulation& m) {
  const int64_t size = size_of(m.type);
  return m.stride == 1 && (reinterpret_cast<uintptr_t>(m.data) | static_cast<uintptr_t>(m.batch_stride * size) |
                           static_cast<uintptr_t>(m.row_stride * size)) %
                                  16 ==
                              0;
}

constexpr int threads_for(int row_vectors, int vectors) {
  return ((row_vectors + vectors - 1) / vectors + 31) / 32 * 32;
}

// A line of the forward's tables in rows_kernels.cuh: for `from` rows or more of at most `row_vectors` vectors, this
// instance.
struct ForwardChoice {
  int row_vectors;
  int from;
  int vectors;     // that a thread owns in a row (V)
  int rows;        // of a block (R)
  int threads;     // upper bound of a block's size
  bool streaming;  // rows are loaded and stored to be evicted first
};

// A line of the backward's tables, for as many rows of such widths: how the row loop is laid out.
struct BackwardChoice {
  int row_vectors;
  int from;
  int vectors;  // that a thread owns in a row (V)
  int rows;     // an iteration (R)
  bool keep;
  int threads;        // upper bound of a block's size
  int resident;       // blocks of that size for which registers must suffice on a multiprocessor
  int blocks_per_sm;  // persistent blocks on a multiprocessor
  int stages;         // depth of the ring of rows in shared memory
  int cluster;        // blocks that add up their partial sums before these are written
};

struct Plan {
  bool fits = false;  // the row kernels can take this problem
  const BackwardChoice* choice = nullptr;
  int threads = 0;
  int stages = 0;
  int cluster = 1;
  int blocks = 0;  // of a sample, a multiple of the cluster
  int shared = 0;

  int partials() const { return blocks / cluster; }  // rows of partial sums of a sample
};

// Blocks of a sample, a multiple of `cluster`. One sample fills the device with one wave of persistent blocks; several
// share it, in the fewest blocks a sample whose last wave leaves no more than a tenth of the device idle (or the least
// that any does).
inline int blocks_of_sample(const Problem& p, int rows, int blocks_per_sm, int cluster, const Device& d) {
  const int64_t groups = (p.rows + rows - 1) / rows;
  const int64_t slots = static_cast<int64_t>(d.multiprocessors) * blocks_per_sm;
  const auto whole = [&](int64_t blocks) { return std::max<int64_t>(blocks / cluster, 1) * cluster; };
  if (p.batch == 1) return static_cast<int>(whole(std::min(groups, slots)));
  const auto filled = [&](int64_t blocks) {
    const int64_t waves = (p.batch * blocks + slots - 1) / slots;
    return static_cast<double>(p.batch * blocks) / static_cast<double>(waves * slots);
  };
  const int64_t first = whole(slots / p.batch);
  int64_t best = first;
  for (int64_t blocks = first; blocks <= first + 15 && filled(best) < 0.9; blocks += cluster) {
    if (filled(blocks) > filled(best)) best = blocks;
  }
  return static_cast<int>(whole(std::min(groups, best)));
}

// row_bytes: bytes of a row over the operands that are read.
inline Plan make_plan(const Problem& p, int row_vectors, int row_bytes, const BackwardChoice& c, const Device& d) {
  Plan plan;
  plan.choice = &c;
  plan.threads = threads_for(row_vectors, c.vectors);
  // Narrower rows than the line's make smaller blocks, of which more fit; each needs some rows, since it costs a
  // partial sum. (Short samples get fewer than these where that fills the device better.)
  const int64_t rows_per_sm = (p.batch * p.rows + d.multiprocessors - 1) / d.multiprocessors;
  int64_t per_sm = std::min(16, c.blocks_per_sm * c.row_vectors / row_vectors);
  if (!p.per_token) per_sm = std::min(per_sm, std::max<int64_t>(c.blocks_per_sm, rows_per_sm / 4));
  if (d.bulk) {
    const int own = 2048;  // the kernel's own arrays and what the driver keeps
    const int room = d.shared_per_block - kBarrierBytes - own;
    plan.stages = std::min({c.stages, 16, room / (c.rows * row_bytes)});
    if (plan.stages < 2) return plan;
    plan.shared = kBarrierBytes + plan.stages * c.rows * row_bytes;
    per_sm = std::min<int64_t>(per_sm, d.shared_per_multiprocessor / (plan.shared + own));
    plan.cluster = c.cluster;
  }
  plan.blocks = blocks_of_sample(p, c.rows, static_cast<int>(std::max<int64_t>(per_sm, 1)), plan.cluster, d);
  plan.fits = true;
  return plan;
}

template <int V, int R, bool Residual, bool PerToken, int Threads, int Blocks, bool Streaming, typename X, typename Y>
cudaError_t launch_forward(const Forward& args, const Problem& p) {
  const int vectors = p.dim / kElements<X, Y>;
  const int64_t groups = (p.rows + R - 1) / R;
  const int threads = threads_for(vectors, V);
  if (groups > 0x7fffffff || threads > Threads) return cudaErrorInvalidValue;
  Extent extent{p.rows, 0, vectors};
  constexpr int64_t kSamples = 65535;
  for (; extent.first_sample < p.batch; extent.first_sample += kSamples) {
    const dim3 grid(static_cast<unsigned>(groups),
                    static_cast<unsigned>(std::min(kSamples, p.batch - extent.first_sample)));
    forward_rows<X, Y, V, R, Residual, PerToken, Threads, Blocks, Streaming>
        <<<grid, threads, 0, p.stream>>>(args, extent);
    if (cudaError_t e = cudaGetLastError()) return e;
  }
  return cudaSuccess;
}

// `Kernel` is a template argument, so each instance remembers on which devices its shared-memory limit was raised.
template <auto Kernel>
cudaError_t launch_backward(const Backward& args, const Problem& p, const Plan& plan, int elements, const Device& d) {
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
  const int64_t groups = (p.rows + plan.choice->rows - 1) / plan.choice->rows;
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = plan.cluster, cluster.val.clusterDim.y = 1, cluster.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = static_cast<unsigned>(grid);
  config.blockDim = plan.threads;
  config.dynamicSmemBytes = plan.shared;
  config.stream = p.stream;
  config.attrs = &cluster;
  config.numAttrs = plan.cluster > 1 ? 1 : 0;
  return cudaLaunchKernelEx(&config, Kernel, args, static_cast<float*>(args.workspace),
                            Loop{p.rows, groups, plan.blocks, plan.stages, p.dim / elements});
}

}  // namespace adaln
