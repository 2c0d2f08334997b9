// What sm_90 and newer have: one-dimensional bulk copies from global to shared memory (cp.async.bulk) that complete on
// an mbarrier, clusters of blocks that read each other's shared memory, and programmatic dependent launch.
#pragma once

#include <cstdint>

namespace adaln {

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define ADALN_BULK 1

__device__ __forceinline__ void barrier_init(uint64_t* bar, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(bar)), "r"(arrivals) : "memory");
}

// Makes the initialised barriers visible to the copy engine.
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_expect(uint64_t* bar, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(bar)), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void barrier_wait(uint64_t* bar, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(shared_address(bar)),
      "r"(parity)
      : "memory");
}

// Source, destination and size must be multiples of 16 bytes.
__device__ __forceinline__ void bulk_copy(void* shared, const void* global, uint32_t bytes, uint64_t* bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(shared)),
               "l"(global), "r"(bytes), "r"(shared_address(bar))
               : "memory");
}

// Orders this thread's reads and writes of shared memory, and what a barrier has ordered before them, before bulk
// copies into it, which another proxy makes.
__device__ __forceinline__ void shared_before_bulk_copies() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Blocks of this block's cluster, and its number among them; launched without clusters a block is one of its own.
__device__ __forceinline__ int cluster_blocks() {
  int n;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(n));
  return n;
}
__device__ __forceinline__ int cluster_rank() {
  int n;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(n));
  return n;
}

// Meets all threads of the cluster; what they wrote to shared memory before is visible to all after.
__device__ __forceinline__ void cluster_meet() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;\n" ::
          : "memory");
}

// What another block of the cluster has at the place of `own` in its shared memory.
__device__ __forceinline__ float4 load_from_block(const float4* own, int rank) {
  uint32_t address;
  float4 v;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(own)), "r"(rank));
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

// Lets a kernel that was launched as this one's dependent start; what it reads of ours it must still wait for.
__device__ __forceinline__ void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;"); }

// Waits until the kernel that this one depends on has finished and its writes are visible.
__device__ __forceinline__ void wait_for_prerequisite() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
#else
#define ADALN_BULK 0
#endif

}  // namespace adaln
