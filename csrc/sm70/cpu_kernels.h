// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The CPU kernels, as a table of functions. cpu_kernels.cpp is compiled once
// for each instruction set and makes one table each time; kernels() picks the
// table for this machine. A build thus runs on any x86-64 and uses its vectors.
// (GCC's target_clones lowers vector types before it clones, so it is no help
// here.)
#pragma once

#include "fp_formats.h"
#include "moe_activation.h"

namespace vllm::sm70::cpu {

// Rows [row_begin, ...) of an E4M3 weight.
struct Fp8Tile {
  const u8* weight;     // at row_begin
  const float* scales;  // of the whole weight
  bool block_scales;  // one for each 128 x 128 elements; else one for each row
  i64 scale_stride;   // block scales in a row of blocks
  i64 row_begin;
  i64 columns;  // K, a multiple of 16
};

// A result has as many partial sums, whatever the instruction set.
constexpr int kGemmColumnsStep = 32;
// So many tokens at most are multiplied with a weight that is decoded once.
constexpr int kGemmMaxTokens = 64;

// The tokens that a weight is multiplied with, and the results.
struct GemmTokens {
  const float* x;    // [count, columns]; each row is padded with zeros to a
                     // multiple of kGemmColumnsStep
  i64 x_stride;      // from one row to the next
  i64 count;         // at most kGemmMaxTokens
  i64 columns;       // K, a multiple of 16
  const void* bias;  // [N], of the format of `out`; or null
  void* out;         // [count, N]
  i64 out_stride;    // from one row to the next
};

struct Kernels {
  // Blocks [begin, end) of 16 NVFP4 elements: 8 bytes of `packed`, one E4M3
  // scale.
  void (*nvfp4_dequantize)(OutputFormat format, const u8* packed,
                           const u8* block_scales, float global_scale,
                           void* out, i64 begin, i64 end);
  // Rows [begin, end) of the tile; `out` holds the tile from its row 0 on.
  void (*fp8_dequantize)(OutputFormat format, const Fp8Tile& tile, void* out,
                         i64 begin, i64 end);
  // Columns [begin, end) of the output, which are rows of the weight.
  void (*nvfp4_gemm)(OutputFormat format, const GemmTokens& tokens,
                     const u8* packed, const u8* block_scales,
                     float global_scale, i64 begin, i64 end);
  void (*fp8_gemm)(OutputFormat format, const GemmTokens& tokens,
                   const Fp8Tile& weight, i64 begin, i64 end);
  // `count` numbers to FP32.
  void (*widen)(OutputFormat format, const void* in, float* out, i64 count);
  // Rows [begin, end); a row of gate_up has `columns` gates, then as many ups.
  void (*silu_and_mul)(OutputFormat format, const void* gate_up, void* out,
                       i64 columns, i64 out_stride, i64 begin, i64 end);
  // out = activation(factor * gate) * (factor * up), `count` numbers; without
  // `up` where the activation has no gate.
  void (*moe_activate)(OutputFormat format, MoeActivation activation,
                       const float* gate, const float* up, float factor,
                       void* out, i64 count);
  // out = factor * in, `count` numbers.
  void (*moe_weigh)(OutputFormat format, const float* in, float factor,
                    void* out, i64 count);
  // out = the sum of `row_count` rows of `count` numbers, in FP32 and in order.
  void (*moe_sum)(OutputFormat format, const void* const* rows, i64 row_count,
                  void* out, i64 count);
};

extern const Kernels kBaseline;
#ifdef __x86_64__
extern const Kernels kAvx2;
extern const Kernels kAvx512;
#endif

// The table to use. The environment variable VLLM_SM70_CPU_ISA, read once, asks
// for another than the best: baseline, avx2 or avx512. For tests. Throws
// std::invalid_argument for anything else, or what the machine does not have.
const Kernels& kernels();

}  // namespace vllm::sm70::cpu
