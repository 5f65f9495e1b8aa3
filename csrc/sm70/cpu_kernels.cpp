// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// One table of CPU kernels, for the instruction set that this is compiled for.
// SM70_CPU_TABLE is its name. Everything that it uses must be inlined
// (SM70_INLINE): a function shared with another table would be linked once, and
// might carry instructions that the machine lacks.

#include "cpu_kernels.h"
#include "dequantize_cpu.h"

namespace vllm::sm70::cpu {
namespace {

void nvfp4_dequantize_table(OutputFormat format, const u8* packed,
                            const u8* block_scales, float global_scale,
                            void* out, i64 begin, i64 end) {
  for_output_format(format, [&](auto f) {
    using Format = decltype(f);
    nvfp4_dequantize<Format>(packed, block_scales, global_scale,
                             static_cast<typename Format::Storage*>(out), begin,
                             end);
  });
}

void fp8_dequantize_table(OutputFormat format, const Fp8Tile& tile, void* out,
                          i64 begin, i64 end) {
  for_output_format(format, [&](auto f) {
    using Format = decltype(f);
    fp8_dequantize<Format>(tile, static_cast<typename Format::Storage*>(out),
                           begin, end);
  });
}

}  // namespace

extern const Kernels SM70_CPU_TABLE = {nvfp4_dequantize_table,
                                       fp8_dequantize_table};

}  // namespace vllm::sm70::cpu
