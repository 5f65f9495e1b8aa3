// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The library `vllm._sm70_C`: operator schemas and CPU implementations. On
// torch's stable ABI, so one build serves torch 2.11 and later. No schema has a
// string argument: torch 2.13's headers leak those (pytorch #190493).

#include <Python.h>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "cpu_kernels.h"
#include "dequantize_args.h"

namespace vllm::sm70 {
namespace {

// Elements that make another thread worth its start.
constexpr int64_t kGrainElements = 32768;

int64_t grain(int64_t elements_per_step) {
  return std::max<int64_t>(1, kGrainElements / elements_per_step);
}

void nvfp4_dequantize(const Tensor& packed, const Tensor& block_scales,
                      const Tensor& global_scale, Tensor& out,
                      int64_t row_begin) {
  const Nvfp4DequantizeArgs args =
      nvfp4_dequantize_args(packed, block_scales, global_scale, out, row_begin);
  const cpu::Kernels& kernels = cpu::kernels();
  torch::stable::parallel_for(
      0, args.blocks, grain(kNvfp4Block), [&](int64_t begin, int64_t end) {
        kernels.nvfp4_dequantize(args.out_format, args.packed,
                                 args.block_scales, *args.global_scale,
                                 args.out, begin, end);
      });
}

void fp8_dequantize(const Tensor& weight, const Tensor& scales, Tensor& out,
                    int64_t row_begin) {
  const Fp8DequantizeArgs args =
      fp8_dequantize_args(weight, scales, out, row_begin);
  if (args.columns == 0) return;
  const cpu::Kernels& kernels = cpu::kernels();
  const cpu::Fp8Tile tile{args.weight,       args.scales,    args.block_scales,
                          args.scale_stride, args.row_begin, args.columns};
  torch::stable::parallel_for(
      0, args.rows, grain(args.columns), [&](int64_t begin, int64_t end) {
        kernels.fp8_dequantize(args.out_format, tile, args.out, begin, end);
      });
}

}  // namespace
}  // namespace vllm::sm70

STABLE_TORCH_LIBRARY(_sm70_C, m) {
  // Rows [row_begin, row_begin + rows of out) of an NVFP4 weight, written over
  // out. packed: uint8 [N, K / 2], the element of even index in the low half of
  // a byte; block_scales: E4M3 [N, K / 16]; global_scale: float32, one element;
  // out: float16, bfloat16 or float32 [rows, K].
  m.def(
      "nvfp4_dequantize(Tensor packed, Tensor block_scales, "
      "Tensor global_scale, Tensor(a!) out, int row_begin=0) -> ()");
  // The same for an E4M3 weight [N, K] with float32 scales
  // [ceil(N / 128), ceil(K / 128)] or [N, 1].
  m.def(
      "fp8_dequantize(Tensor weight, Tensor scales, Tensor(a!) out, "
      "int row_begin=0) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(_sm70_C, CPU, m) {
  m.impl("nvfp4_dequantize", TORCH_BOX(&vllm::sm70::nvfp4_dequantize));
  m.impl("fp8_dequantize", TORCH_BOX(&vllm::sm70::fp8_dequantize));
}

// `import vllm._sm70_C` loads the library; the module itself is empty.
PyMODINIT_FUNC PyInit__sm70_C() {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_sm70_C", nullptr, 0,
                               nullptr};
  return PyModule_Create(&module);
}
