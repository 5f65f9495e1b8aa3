// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The list of kernels that a kernel header (*.cuh) offers. Each header ends in
// one line for each instantiation that may ever be launched, and includes no
// other kernel header:
//
//   SM70_ENTRY(threads, dynamic_shared_bytes, tensor_cores, kernel)
//     threads               threads of a block; a launch may ask for fewer
//     dynamic_shared_bytes  dynamic shared memory of a block, bytes
//     tensor_cores          whether the kernel is meant to run on tensor cores
//     kernel                its qualified name: vllm::sm70::name<args>
//
// Two compilers read the line:
// - nvcc makes it the kernel's launch configuration. `launch<&kernel>` takes
//   the block size and the shared memory from there, and does not compile for
//   a kernel that is not listed.
// - NVRTC turns it into data that tools/sm70_compile.py reads. That tool
//   compiles every entry for sm_70 and checks spills, shared memory and tensor
//   cores. So what is launched is what was checked.
#pragma once

#ifdef __CUDACC_RTC__

namespace vllm::sm70 {

// tools/sm70_compile.py reads it byte for byte.
template <int kLength>
struct EntryData {
  int threads;
  int dynamic_shared_bytes;
  int tensor_cores;
  char kernel[kLength];
};

}  // namespace vllm::sm70

  #define SM70_ENTRY_JOIN_(a, b) a##b
  #define SM70_ENTRY_NAME_(id) SM70_ENTRY_JOIN_(sm70_entry_, id)
  #define SM70_ENTRY(threads, dynamic_shared_bytes, tensor_cores, ...)      \
    extern "C" __device__ const vllm::sm70::EntryData<sizeof(#__VA_ARGS__)> \
        SM70_ENTRY_NAME_(__LINE__) = {(threads), (dynamic_shared_bytes),    \
                                      (tensor_cores), #__VA_ARGS__};

#else

namespace vllm::sm70 {

template <auto* kKernel>
struct Entry;  // defined by SM70_ENTRY alone

// Launches a listed kernel, whose parameter is one struct, with blocks of
// `threads`, at most those of the list. Returns the error of the launch itself;
// errors of the run are asynchronous, as always.
template <auto* kKernel, class Params>
cudaError_t launch(dim3 grid, cudaStream_t stream, const Params& params,
                   int threads = Entry<kKernel>::kThreads) {
  using Launch = Entry<kKernel>;
  if (threads < 1 || threads > Launch::kThreads) {
    return cudaErrorInvalidConfiguration;
  }
  if constexpr (Launch::kDynamicSharedBytes > 48 * 1024) {
    // More than 48 KiB has to be asked for, kernel by kernel.
    const cudaError_t error = cudaFuncSetAttribute(
        kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
        Launch::kDynamicSharedBytes);
    if (error != cudaSuccess) return error;
  }
  kKernel<<<grid, threads, Launch::kDynamicSharedBytes, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace vllm::sm70

  #define SM70_ENTRY(threads, dynamic_shared_bytes, tensor_cores, ...)   \
    template <>                                                          \
    struct vllm::sm70::Entry<&__VA_ARGS__> {                             \
      static constexpr int kThreads = (threads);                         \
      static constexpr int kDynamicSharedBytes = (dynamic_shared_bytes); \
      static constexpr bool kTensorCores = (tensor_cores);               \
    };

#endif
