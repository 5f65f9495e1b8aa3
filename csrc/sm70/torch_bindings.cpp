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
#include <memory>
#include <optional>

#include "cpu_kernels.h"
#include "dequantize_args.h"
#include "linear_args.h"

namespace vllm::sm70 {
namespace {

// Elements that make another thread worth its start.
constexpr int64_t kGrainElements = 32768;

int64_t grain(int64_t elements_per_step) {
  return std::max<int64_t>(1, kGrainElements / elements_per_step);
}

// Where the rows of one part begin in a tile's memory.
void* part_of(const Tile& tile, int64_t part, int64_t columns) {
  return static_cast<char*>(tile.out) +
         part * tile.rows * columns * element_bytes(tile.out_format);
}

void nvfp4_dequantize(const Tensor& packed, const Tensor& block_scales,
                      const Tensor& global_scale, Tensor& out,
                      int64_t row_begin) {
  const Nvfp4DequantizeArgs args =
      nvfp4_dequantize_args(packed, block_scales, global_scale, out, row_begin);
  const Tile& tile = args.tile;
  const int64_t columns = args.weight.columns;
  if (tile.rows == 0 || columns == 0) return;
  const int64_t row_blocks = columns / kNvfp4Block;
  const cpu::Kernels& kernels = cpu::kernels();
  for (int64_t part = 0; part < tile.parts; ++part) {
    const int64_t first = (part * tile.part_rows + tile.row_begin) * row_blocks;
    const u8* part_packed = args.weight.packed + first * (kNvfp4Block / 2);
    const u8* part_scales = args.weight.block_scales + first;
    void* part_out = part_of(tile, part, columns);
    torch::stable::parallel_for(0, tile.rows * row_blocks, grain(kNvfp4Block),
                                [&](int64_t begin, int64_t end) {
                                  kernels.nvfp4_dequantize(
                                      tile.out_format, part_packed, part_scales,
                                      *args.weight.global_scale, part_out,
                                      begin, end);
                                });
  }
}

void fp8_dequantize(const Tensor& weight, const Tensor& scales, Tensor& out,
                    int64_t row_begin) {
  const Fp8DequantizeArgs args =
      fp8_dequantize_args(weight, scales, out, row_begin);
  const Tile& tile = args.tile;
  const int64_t columns = args.weight.columns;
  if (tile.rows == 0 || columns == 0) return;
  const cpu::Kernels& kernels = cpu::kernels();
  for (int64_t part = 0; part < tile.parts; ++part) {
    const int64_t first = part * tile.part_rows + tile.row_begin;
    const cpu::Fp8Tile rows{args.weight.codes + first * columns,
                            args.weight.scales,
                            args.weight.block_scales,
                            args.weight.scale_stride,
                            first,
                            columns};
    void* part_out = part_of(tile, part, columns);
    torch::stable::parallel_for(
        0, tile.rows, grain(columns), [&](int64_t begin, int64_t end) {
          kernels.fp8_dequantize(tile.out_format, rows, part_out, begin, end);
        });
  }
}

// Calls `multiply(tokens, begin, end)` for all columns [begin, end) of the output
// and up to kGemmMaxTokens rows at a time, whose x is widened to FP32 before.
template <class Multiply>
void multiply_in_slabs(const GemmArgs& args, const Multiply& multiply) {
  if (args.m == 0 || args.n == 0) return;
  const cpu::Kernels& kernels = cpu::kernels();
  const int64_t x_stride = (args.k + cpu::kGemmColumnsStep - 1) /
                           cpu::kGemmColumnsStep * cpu::kGemmColumnsStep;
  const int64_t slab = std::min<int64_t>(args.m, cpu::kGemmMaxTokens);
  const int64_t element = element_bytes(args.format);
  const std::unique_ptr<float[]> x(new float[slab * x_stride]());
  for (int64_t first = 0; first < args.m; first += slab) {
    const int64_t count = std::min(slab, args.m - first);
    torch::stable::parallel_for(
        0, count, grain(args.k + 1), [&](int64_t begin, int64_t end) {
          for (int64_t row = begin; row < end; ++row) {
            kernels.widen(args.format,
                          static_cast<const char*>(args.x) +
                              (first + row) * args.x_stride * element,
                          x.get() + row * x_stride, args.k);
          }
        });
    const cpu::GemmTokens tokens{
        x.get(),
        x_stride,
        count,
        args.k,
        args.bias,
        static_cast<char*>(args.out) + first * args.out_stride * element,
        args.out_stride};
    torch::stable::parallel_for(
        0, args.n, grain(args.k + 1),
        [&](int64_t begin, int64_t end) { multiply(tokens, begin, end); });
  }
}

// `config` picks among CUDA kernels only.
void nvfp4_small_gemm(const Tensor& x, const Tensor& packed,
                      const Tensor& block_scales, const Tensor& global_scale,
                      const std::optional<Tensor>& bias, Tensor& out, int64_t) {
  const Nvfp4Gemm args = nvfp4_gemm_args(x, packed, block_scales, global_scale,
                                         bias, out, /*fp32=*/true);
  multiply_in_slabs(args.gemm, [&](const cpu::GemmTokens& tokens, int64_t begin,
                                   int64_t end) {
    cpu::kernels().nvfp4_gemm(args.gemm.format, tokens, args.weight.packed,
                              args.weight.block_scales,
                              *args.weight.global_scale, begin, end);
  });
}

void fp8_small_gemm(const Tensor& x, const Tensor& weight, const Tensor& scales,
                    const std::optional<Tensor>& bias, Tensor& out, int64_t) {
  const Fp8Gemm args =
      fp8_gemm_args(x, weight, scales, bias, out, /*fp32=*/true);
  const cpu::Fp8Tile tile{args.weight.codes,
                          args.weight.scales,
                          args.weight.block_scales,
                          args.weight.scale_stride,
                          0,
                          args.weight.columns};
  multiply_in_slabs(args.gemm, [&](const cpu::GemmTokens& tokens, int64_t begin,
                                   int64_t end) {
    cpu::kernels().fp8_gemm(args.gemm.format, tokens, tile, begin, end);
  });
}

void silu_and_mul(const Tensor& gate_up, Tensor& out) {
  const SiluAndMulArgs args = silu_and_mul_args(gate_up, out);
  if (args.columns == 0) return;
  const cpu::Kernels& kernels = cpu::kernels();
  torch::stable::parallel_for(
      0, args.rows, grain(args.columns), [&](int64_t begin, int64_t end) {
        kernels.silu_and_mul(args.format, args.gate_up, args.out, args.columns,
                             args.out_stride, begin, end);
      });
}

}  // namespace
}  // namespace vllm::sm70

STABLE_TORCH_LIBRARY(_sm70_C, m) {
  // Rows [row_begin, row_begin + rows) of an NVFP4 weight, written over out:
  // float16, bfloat16 or float32 [rows, K], or [parts, rows, K] for those rows
  // of each part of the weight. packed: uint8 [N, K / 2], the element of even
  // index in the low half of a byte; block_scales: E4M3 [N, K / 16];
  // global_scale: float32, one element.
  m.def(
      "nvfp4_dequantize(Tensor packed, Tensor block_scales, "
      "Tensor global_scale, Tensor(a!) out, int row_begin=0) -> ()");
  // The same for an E4M3 weight [N, K] with float32 scales
  // [ceil(N / 128), ceil(K / 128)] or [N, 1].
  m.def(
      "fp8_dequantize(Tensor weight, Tensor scales, Tensor(a!) out, "
      "int row_begin=0) -> ()");
  // out = x @ W^T + bias for few rows of x, W read as it is stored. x [M, K],
  // bias [N] and out [M, N] have one dtype; x and out may be slices of columns.
  // config: -1, or for benchmarks a kernel by its number (see
  // small_gemm_plan.h).
  m.def(
      "nvfp4_small_gemm(Tensor x, Tensor packed, Tensor block_scales, "
      "Tensor global_scale, Tensor? bias, Tensor(a!) out, int config=-1) -> "
      "()");
  m.def(
      "fp8_small_gemm(Tensor x, Tensor weight, Tensor scales, Tensor? bias, "
      "Tensor(a!) out, int config=-1) -> ()");
  // out = x @ w^T + bias through cuBLAS, w [N, K] dense; CUDA only. The bits of
  // a column of out do not depend on N.
  m.def("gemm_nt(Tensor x, Tensor w, Tensor? bias, Tensor(a!) out) -> ()");
  // out [M, t] = silu(gate) * up, of gate_up [M, 2 * t]: gates, then ups.
  m.def("silu_and_mul(Tensor gate_up, Tensor(a!) out) -> ()");
  // A mixture of experts: see moe_args.h for the tensors, and for the CPU
  // implementations moe_ops_cpu.cpp.
  // sorted_rows: the rows t * k + j of each local expert, expert by expert.
  m.def(
      "moe_route(Tensor topk_ids, Tensor? expert_map, Tensor(a!) sorted_rows, "
      "Tensor(b!) expert_offsets) -> ()");
  // out[p] = activation of row sorted_rows[p] / k of x with its expert's w13.
  m.def(
      "fp8_moe_gate_up(Tensor x, Tensor w13, Tensor w13_scale, "
      "Tensor sorted_rows, Tensor expert_offsets, Tensor? topk_weights, "
      "Tensor(a!) out, int activation, int batch_tokens=-1, int config=-1) -> "
      "()");
  // out[t] = the sum over j of topk_weights[t, j] * act[p] @ w2^T, in tiles of as
  // many columns as partial has.
  m.def(
      "fp8_moe_down(Tensor act, Tensor w2, Tensor w2_scale, "
      "Tensor sorted_rows, Tensor expert_offsets, Tensor topk_ids, "
      "Tensor? expert_map, Tensor? topk_weights, Tensor(a!) partial, "
      "Tensor(b!) out, int batch_tokens=-1, int config=-1) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(_sm70_C, CPU, m) {
  m.impl("nvfp4_dequantize", TORCH_BOX(&vllm::sm70::nvfp4_dequantize));
  m.impl("fp8_dequantize", TORCH_BOX(&vllm::sm70::fp8_dequantize));
  m.impl("nvfp4_small_gemm", TORCH_BOX(&vllm::sm70::nvfp4_small_gemm));
  m.impl("fp8_small_gemm", TORCH_BOX(&vllm::sm70::fp8_small_gemm));
  m.impl("silu_and_mul", TORCH_BOX(&vllm::sm70::silu_and_mul));
}

// `import vllm._sm70_C` loads the library; the module itself is empty.
PyMODINIT_FUNC PyInit__sm70_C() {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_sm70_C", nullptr, 0,
                               nullptr};
  return PyModule_Create(&module);
}
