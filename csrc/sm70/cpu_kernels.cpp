// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// One table of CPU kernels, for the instruction set that this is compiled for.
// SM70_CPU_TABLE is its name. Everything that it uses must be inlined
// (SM70_INLINE): a function shared with another table would be linked once, and
// might carry instructions that the machine lacks.

#include "cpu_kernels.h"
#include "dequantize_cpu.h"
#include "moe_cpu.h"
#include "silu_and_mul_cpu.h"
#include "small_gemm_cpu.h"

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

void nvfp4_gemm_table(OutputFormat format, const GemmTokens& tokens,
                      const u8* packed, const u8* block_scales,
                      float global_scale, i64 begin, i64 end) {
  for_output_format(format, [&](auto f) {
    nvfp4_gemm<decltype(f)>(tokens, packed, block_scales, global_scale, begin,
                            end);
  });
}

void fp8_gemm_table(OutputFormat format, const GemmTokens& tokens,
                    const Fp8Tile& weight, i64 begin, i64 end) {
  for_output_format(format, [&](auto f) {
    fp8_gemm<decltype(f)>(tokens, weight, begin, end);
  });
}

void widen_table(OutputFormat format, const void* in, float* out, i64 count) {
  for_output_format(format, [&](auto f) {
    using Format = decltype(f);
    widen<Format>(static_cast<const typename Format::Storage*>(in), out, count);
  });
}

void silu_and_mul_table(OutputFormat format, const void* gate_up, void* out,
                        i64 columns, i64 out_stride, i64 begin, i64 end) {
  for_output_format(format, [&](auto f) {
    using Format = decltype(f);
    using Storage = typename Format::Storage;
    silu_and_mul<Format>(static_cast<const Storage*>(gate_up),
                         static_cast<Storage*>(out), columns, out_stride, begin,
                         end);
  });
}

void moe_activate_table(OutputFormat format, MoeActivation activation,
                        const float* gate, const float* up, float factor,
                        void* out, i64 count) {
  for_output_format(format, [&](auto f) {
    using Format = decltype(f);
    moe_activate<Format>(activation, gate, up, factor,
                         static_cast<typename Format::Storage*>(out), count);
  });
}

void moe_weigh_table(OutputFormat format, const float* in, float factor,
                     void* out, i64 count) {
  for_output_format(format, [&](auto f) {
    using Format = decltype(f);
    moe_weigh<Format>(in, factor, static_cast<typename Format::Storage*>(out),
                      count);
  });
}

void moe_sum_table(OutputFormat format, const void* const* rows, i64 row_count,
                   void* out, i64 count) {
  for_output_format(format, [&](auto f) {
    using Format = decltype(f);
    moe_sum<Format>(rows, row_count,
                    static_cast<typename Format::Storage*>(out), count);
  });
}

}  // namespace

extern const Kernels SM70_CPU_TABLE = {
    nvfp4_dequantize_table, fp8_dequantize_table, nvfp4_gemm_table,
    fp8_gemm_table,         widen_table,          silu_and_mul_table,
    moe_activate_table,     moe_weigh_table,      moe_sum_table};

}  // namespace vllm::sm70::cpu
