// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// CUDA implementations of the operators of torch_bindings.cpp: check, choose
// the grid, launch. No kernel is defined here.

#include <cuda_runtime.h>

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#include "dequantize_args.h"
#include "fp8_dequantize.cuh"
#include "nvfp4_dequantize.cuh"

namespace vllm::sm70 {
namespace {

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

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A grid's x dimension holds 2^31 - 1 blocks, the others 65535.
dim3 checked_grid(const char* op, int64_t x, int64_t y = 1) {
  if (x > 0x7fffffff || y > 65535) {
    fail_argument(std::string(op) +
                  ": out is too large for one launch (a grid of " +
                  std::to_string(x) + " x " + std::to_string(y) +
                  " blocks); pass fewer rows at once");
  }
  return dim3(static_cast<unsigned>(x), static_cast<unsigned>(y));
}

void check_launch(const char* op, cudaError_t error) {
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

void nvfp4_dequantize(const Tensor& packed, const Tensor& block_scales,
                      const Tensor& global_scale, Tensor& out,
                      int64_t row_begin) {
  constexpr const char* kOp = "nvfp4_dequantize";
  const Nvfp4DequantizeArgs args =
      nvfp4_dequantize_args(packed, block_scales, global_scale, out, row_begin);
  if (args.blocks == 0) return;
  Argument(kOp, "packed", packed).aligned(8);
  Argument(kOp, "out", out).aligned(16);
  const int64_t words = args.blocks * (kNvfp4Block / 8);
  const dim3 grid =
      checked_grid(kOp, ceil_div(words, kNvfp4DequantizeWordsPerBlock));
  const DeviceStream stream(packed);
  for_output_format(args.out_format, [&](auto format) {
    using Format = decltype(format);
    const Nvfp4DequantizeParams<Format> params{
        reinterpret_cast<const u32*>(args.packed), args.block_scales,
        args.global_scale, static_cast<typename Format::Storage*>(args.out),
        words};
    check_launch(
        kOp, launch<&nvfp4_dequantize_kernel<Format>>(grid, stream, params));
  });
}

void fp8_dequantize(const Tensor& weight, const Tensor& scales, Tensor& out,
                    int64_t row_begin) {
  constexpr const char* kOp = "fp8_dequantize";
  const Fp8DequantizeArgs args =
      fp8_dequantize_args(weight, scales, out, row_begin);
  if (args.rows == 0 || args.columns == 0) return;
  Argument(kOp, "weight", weight).aligned(8);
  Argument(kOp, "out", out).aligned(16);
  const int64_t units = args.columns / 8;
  const dim3 grid = checked_grid(kOp, ceil_div(args.rows, kFp8DequantizeRows),
                                 ceil_div(units, kFp8DequantizeUnits));
  const DeviceStream stream(weight);
  for_output_format(args.out_format, [&](auto format) {
    using Format = decltype(format);
    const Fp8DequantizeParams<Format> params{
        args.weight,
        args.scales,
        static_cast<typename Format::Storage*>(args.out),
        args.row_begin,
        args.rows,
        static_cast<int>(units),
        static_cast<int>(args.scale_stride)};
    if (args.block_scales) {
      check_launch(kOp, launch<&fp8_dequantize_kernel<Format, true>>(
                            grid, stream, params));
    } else {
      check_launch(kOp, launch<&fp8_dequantize_kernel<Format, false>>(
                            grid, stream, params));
    }
  });
}

}  // namespace
}  // namespace vllm::sm70

STABLE_TORCH_LIBRARY_IMPL(_sm70_C, CUDA, m) {
  m.impl("nvfp4_dequantize", TORCH_BOX(&vllm::sm70::nvfp4_dequantize));
  m.impl("fp8_dequantize", TORCH_BOX(&vllm::sm70::fp8_dequantize));
}
