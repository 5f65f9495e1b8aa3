// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// CUDA implementations of the operators of torch_bindings.cpp: check, choose
// the grid, launch. No kernel is defined here.

#include <cuda_runtime.h>

#include <torch/csrc/stable/library.h>

#include "cuda_launch.h"
#include "dequantize_args.h"
#include "fp8_dequantize.cuh"
#include "linear_args.h"
#include "nvfp4_dequantize.cuh"
#include "silu_and_mul.cuh"

namespace vllm::sm70 {
namespace {

void nvfp4_dequantize(const Tensor& packed, const Tensor& block_scales,
                      const Tensor& global_scale, Tensor& out,
                      int64_t row_begin) {
  constexpr const char* kOp = "nvfp4_dequantize";
  const Nvfp4DequantizeArgs args =
      nvfp4_dequantize_args(packed, block_scales, global_scale, out, row_begin);
  const Nvfp4Weight& weight = args.weight;
  const Tile& tile = args.tile;
  if (tile.rows == 0 || weight.columns == 0) return;
  Argument(kOp, "packed", packed).aligned(8);
  Argument(kOp, "out", out).aligned(16);
  const int64_t row_words = weight.columns / 8;
  const int64_t words = tile.rows * row_words;
  const dim3 grid = checked_grid(
      kOp, ceil_div(words, kNvfp4DequantizeWordsPerBlock), tile.parts);
  const DeviceStream stream(packed);
  for_output_format(tile.out_format, [&](auto format) {
    using Format = decltype(format);
    const Nvfp4DequantizeParams<Format> params{
        reinterpret_cast<const u32*>(weight.packed) +
            tile.row_begin * row_words,
        weight.block_scales + tile.row_begin * row_words / 2,
        weight.global_scale,
        static_cast<typename Format::Storage*>(tile.out),
        words,
        tile.part_rows * row_words};
    check_launch(
        kOp, launch<&nvfp4_dequantize_kernel<Format>>(grid, stream, params));
  });
}

void fp8_dequantize(const Tensor& weight, const Tensor& scales, Tensor& out,
                    int64_t row_begin) {
  constexpr const char* kOp = "fp8_dequantize";
  const Fp8DequantizeArgs args =
      fp8_dequantize_args(weight, scales, out, row_begin);
  const Tile& tile = args.tile;
  const int64_t columns = args.weight.columns;
  if (tile.rows == 0 || columns == 0) return;
  Argument(kOp, "weight", weight).aligned(8);
  Argument(kOp, "out", out).aligned(16);
  const int64_t units = columns / 8;
  const dim3 grid =
      checked_grid(kOp, ceil_div(tile.rows, kFp8DequantizeRows),
                   ceil_div(units, kFp8DequantizeUnits), tile.parts);
  const DeviceStream stream(weight);
  for_output_format(tile.out_format, [&](auto format) {
    using Format = decltype(format);
    const Fp8DequantizeParams<Format> params{
        args.weight.codes,
        args.weight.scales,
        static_cast<typename Format::Storage*>(tile.out),
        tile.row_begin,
        tile.rows,
        tile.part_rows,
        static_cast<int>(units),
        static_cast<int>(args.weight.scale_stride)};
    if (args.weight.block_scales) {
      check_launch(kOp, launch<&fp8_dequantize_kernel<Format, true>>(
                            grid, stream, params));
    } else {
      check_launch(kOp, launch<&fp8_dequantize_kernel<Format, false>>(
                            grid, stream, params));
    }
  });
}

void silu_and_mul(const Tensor& gate_up, Tensor& out) {
  constexpr const char* kOp = "silu_and_mul";
  const SiluAndMulArgs args = silu_and_mul_args(gate_up, out);
  if (args.rows == 0 || args.columns == 0) return;
  const DeviceStream stream(gate_up);
  for_output_format(args.format, [&](auto f) {
    using Format = decltype(f);
    using Storage = typename Format::Storage;
    const auto run = [&]<bool kVector>() {
      const int64_t units = args.columns / (kVector ? 8 : 1);
      const int64_t total = args.rows * units;
      if (total > 0xffffffff) {
        fail_argument(std::string(kOp) + ": out has " +
                      std::to_string(args.rows * args.columns) +
                      " elements, too many for one launch; pass fewer rows");
      }
      const SiluAndMulParams<Format> params{
          static_cast<const Storage*>(args.gate_up),
          static_cast<Storage*>(args.out), args.out_stride,
          static_cast<u32>(units), static_cast<u32>(total)};
      const dim3 grid = checked_grid(kOp, ceil_div(total, kSiluAndMulThreads));
      check_launch(kOp, launch<&silu_and_mul_kernel<Format, kVector>>(
                            grid, stream, params));
    };
    const auto aligned = [](const void* pointer) {
      return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
    };
    // 8 elements are 16 or 32 bytes.
    if (args.columns % 8 == 0 && args.out_stride % 8 == 0 &&
        aligned(args.gate_up) && aligned(args.out)) {
      run.template operator()<true>();
    } else {
      run.template operator()<false>();
    }
  });
}

}  // namespace
}  // namespace vllm::sm70

STABLE_TORCH_LIBRARY_IMPL(_sm70_C, CUDA, m) {
  m.impl("nvfp4_dequantize", TORCH_BOX(&vllm::sm70::nvfp4_dequantize));
  m.impl("fp8_dequantize", TORCH_BOX(&vllm::sm70::fp8_dequantize));
  m.impl("silu_and_mul", TORCH_BOX(&vllm::sm70::silu_and_mul));
}
