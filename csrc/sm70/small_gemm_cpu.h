// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// out = x @ W^T + bias on the CPU, W decoded 512 elements at a time and never
// stored as a whole.
//
// The decoded weights are FP32, as dequantisation gives them before it rounds.
// Each output is the sum of 32 partial sums (k mod 32) in FP32, added up in one
// fixed order, on every instruction set: the bits depend on neither the number
// of threads nor the machine.
#pragma once

#include "cpu_kernels.h"
#include "dequantize_cpu.h"
#include "lanes_cpu.h"

namespace vllm::sm70::cpu {

constexpr int kGemmChunk = 512;
constexpr int kGemmSums = kGemmColumnsStep;  // of one output
constexpr int kGemmParts = kGemmSums / kLanes;
#if defined(__AVX512BW__)
constexpr int kGemmTokensAtOnce = 4;
#else
constexpr int kGemmTokensAtOnce = 2;  // 16 registers
#endif

// Adds the products of `count` (a multiple of kGemmSums) weights and tokens to
// each of the tokens' sums.
template <int kTokens>
SM70_INLINE void add_products(const float* weights, i64 count, const float* x,
                              i64 x_stride, float (*sums)[kGemmSums]) {
  F32Lanes acc[kTokens][kGemmParts];
  for (int t = 0; t < kTokens; ++t) {
    for (int part = 0; part < kGemmParts; ++part) {
      acc[t][part] = load(sums[t] + part * kLanes);
    }
  }
  for (i64 k = 0; k < count; k += kGemmSums) {
    for (int part = 0; part < kGemmParts; ++part) {
      const F32Lanes w = load(weights + k + part * kLanes);
      for (int t = 0; t < kTokens; ++t) {
        acc[t][part] += w * load(x + t * x_stride + k + part * kLanes);
      }
    }
  }
  for (int t = 0; t < kTokens; ++t) {
    for (int part = 0; part < kGemmParts; ++part) {
      store(acc[t][part], sums[t] + part * kLanes);
    }
  }
}

// `decode(row, k, count, out)` writes elements [k, k + count) of a row of the
// weight, `count` a multiple of 16.
template <class Format, class Decode>
SM70_INLINE void gemm_rows(const GemmTokens& tokens, const Decode& decode,
                           i64 begin, i64 end) {
  using Storage = typename Format::Storage;
  float sums[kGemmMaxTokens][kGemmSums];
  float weights[kGemmChunk];
  const int count_tokens = static_cast<int>(tokens.count);
  for (i64 row = begin; row < end; ++row) {
    __builtin_memset(sums, 0, count_tokens * sizeof(sums[0]));
    for (i64 k = 0; k < tokens.columns; k += kGemmChunk) {
      const i64 left = tokens.columns - k;
      const i64 count = left < kGemmChunk ? left : kGemmChunk;
      const i64 padded = (count + kGemmSums - 1) / kGemmSums * kGemmSums;
      decode(row, k, count, weights);
      for (i64 i = count; i < padded; ++i) weights[i] = 0;
      const float* x = tokens.x + k;
      int t = 0;
      for (; t + kGemmTokensAtOnce <= count_tokens; t += kGemmTokensAtOnce) {
        add_products<kGemmTokensAtOnce>(weights, padded,
                                        x + t * tokens.x_stride,
                                        tokens.x_stride, sums + t);
      }
      for (; t < count_tokens; ++t) {
        add_products<1>(weights, padded, x + t * tokens.x_stride,
                        tokens.x_stride, sums + t);
      }
    }
    for (int t = 0; t < count_tokens; ++t) {
      for (int width = kGemmSums / 2; width > 0; width /= 2) {
        for (int i = 0; i < width; ++i) sums[t][i] += sums[t][i + width];
      }
      float result = sums[t][0];
      if (tokens.bias != nullptr) {
        result +=
            Format::value(u32{static_cast<const Storage*>(tokens.bias)[row]});
      }
      static_cast<Storage*>(tokens.out)[t * tokens.out_stride + row] =
          static_cast<Storage>(Format::bits(result));
    }
  }
}

template <class Format>
SM70_INLINE void nvfp4_gemm(const GemmTokens& tokens, const u8* packed,
                            const u8* block_scales, float global_scale,
                            i64 begin, i64 end) {
  const i64 row_blocks = tokens.columns / 16;
  const auto decode = [&](i64 row, i64 k, i64 count,
                          float* out) __attribute__((always_inline)) {
    const i64 block = row * row_blocks + k / 16;
    nvfp4_dequantize<Fp32>(packed + 8 * block, block_scales + block,
                           global_scale, reinterpret_cast<u32*>(out), 0,
                           count / 16);
  };
  gemm_rows<Format>(tokens, decode, begin, end);
}

template <class Format>
SM70_INLINE void fp8_gemm(const GemmTokens& tokens, const Fp8Tile& weight,
                          i64 begin, i64 end) {
  const auto decode = [&](i64 row, i64 k, i64 count,
                          float* out) __attribute__((always_inline)) {
    const u8* codes = weight.weight + row * weight.columns + k;
    const float* scales = weight.scales + (weight.row_begin + row);
    const i64 run = weight.block_scales ? 128 : count;
    if (weight.block_scales) {
      scales = weight.scales +
               (weight.row_begin + row) / 128 * weight.scale_stride + k / 128;
    }
    for (i64 i = 0; i < count; i += run) {
      fp8_dequantize_run<Fp32>(codes + i, scales[i / run],
                               reinterpret_cast<u32*>(out) + i,
                               count - i < run ? count - i : run);
    }
  };
  gemm_rows<Format>(tokens, decode, begin, end);
}

// Converts `count` numbers to FP32.
template <class Format>
SM70_INLINE void widen(const typename Format::Storage* in, float* out,
                       i64 count) {
  for (i64 i = 0; i < count; i += kLanes) {
    const i64 some = count - i < kLanes ? count - i : kLanes;
    store_some(bits_from_float(Format::value(load_some(in + i, some))),
               reinterpret_cast<u32*>(out) + i, some);
  }
}

}  // namespace vllm::sm70::cpu
