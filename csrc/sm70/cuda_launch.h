// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// What the CUDA implementations of the operators share: the stream, the grid,
// and errors.
#pragma once

#include <cuda_runtime.h>

#include <torch/csrc/stable/accelerator.h>

#include "small_gemm_plan.h"
#include "tensor_checks.h"

namespace vllm::sm70 {

// Makes a tensor's device current, and gives its current stream.
class DeviceStream {
 public:
  explicit DeviceStream(const Tensor& tensor)
      : guard_(tensor.get_device_index()) {
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(
        aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
    stream_ = static_cast<cudaStream_t>(stream);
  }

  operator cudaStream_t() const { return stream_; }

 private:
  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_;
};

// A grid's x dimension holds 2^31 - 1 blocks, the others 65535.
inline dim3 checked_grid(const char* op, int64_t x, int64_t y = 1,
                         int64_t z = 1) {
  if (x > 0x7fffffff || y > 65535 || z > 65535) {
    fail_argument(std::string(op) +
                  ": out is too large for one launch (a grid of " +
                  std::to_string(x) + " x " + std::to_string(y) + " x " +
                  std::to_string(z) + " blocks); pass less at once");
  }
  return dim3(static_cast<unsigned>(x), static_cast<unsigned>(y),
              static_cast<unsigned>(z));
}

inline void check_launch(const char* op, cudaError_t error) {
  if (error == cudaSuccess) return;
  std::string message =
      std::string(op) +
      ": the kernel could not be launched: " + cudaGetErrorString(error);
  if (error == cudaErrorNoKernelImageForDevice) {
    message +=
        "; vllm._sm70_C was not compiled for this GPU, so rebuild it with the "
        "GPU's compute capability in TORCH_CUDA_ARCH_LIST";
  }
  throw std::runtime_error(message);
}

}  // namespace vllm::sm70
