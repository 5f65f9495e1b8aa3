// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// out = x @ W^T + bias for one to four rows of x, W in FP8 E4M3 with one FP32
// scale for each block of 128 x 128 elements or for each row. See gemv.h.
//
// The weight is not rounded to FP16: codes are multiplied with x and summed up
// in FP32, 16 at a time, and the sums are multiplied with the block's scale, or
// the whole row's sum with the row's.
#pragma once

#include "gemv.h"
#include "kernel_entry.h"

namespace vllm::sm70 {

template <bool kBlockScales>
struct Fp8GemvWeight {
  static constexpr int kCodes = 16;

  struct Chunk {
    u32 words[4];
  };

  const u8* codes;
  const float* scales;
  i64 chunks;  // of a row
  int scale_stride;

  __device__ __forceinline__ Chunk load(int row, int chunk) const {
    const uint4 words =
        __ldg(reinterpret_cast<const uint4*>(codes) + (row * chunks + chunk));
    return {{words.x, words.y, words.z, words.w}};
  }

  // Rows that are multiplied together share a row of blocks: their number
  // divides 128.
  __device__ __forceinline__ float scale(int row, int chunk) const {
    if constexpr (!kBlockScales) return 1.0f;
    const i64 block_row = row / 128;
    return __ldg(scales + block_row * scale_stride + chunk / (128 / kCodes));
  }

  template <int kTokens>
  __device__ __forceinline__ void add(const Chunk& chunk, float scale,
                                      const float (&x)[kTokens][kCodes],
                                      float* sums) const {
    float products[kTokens] = {};
    u32 nan = 0;
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      u32 pairs[2];
      half2s_from_e4m3x4(chunk.words[word], pairs);
      nan |= has_e4m3_nan(chunk.words[word]);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float2 values = floats_from_half2(pairs[i]);
        const int k = 4 * word + i;
#pragma unroll
        for (int t = 0; t < kTokens; ++t) {
          products[t] += values.x * x[t][k];
          products[t] += values.y * x[t][k + 2];
        }
      }
    }
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      if (nan != 0) products[t] = float_from_bits(0x7fc00000u);
      sums[t] += kBlockScales ? products[t] * scale : products[t];
    }
  }

  __device__ __forceinline__ float finish(float sum, int row) const {
    const float value = sum * 0x1p8f;  // see half2s_from_e4m3x4
    return kBlockScales ? value : value * __ldg(scales + row);
  }
};

template <class Format>
struct Fp8GemvParams {
  GemvParams<Format> gemv;
  const u8* codes;  // 16-byte aligned
  const float* scales;
  int scale_stride;  // block scales in a row of blocks
};

// For four tokens x takes 64 registers of a thread, else 32 or fewer.
template <int kTokens>
constexpr int kFp8GemvThreads = kTokens == 4 ? 256 : 320;

template <class Format, bool kBlockScales, int kTokens, int kRows>
__global__ void __launch_bounds__(kFp8GemvThreads<kTokens>, 2)
    fp8_gemv_kernel(Fp8GemvParams<Format> p) {
  const Fp8GemvWeight<kBlockScales> weight{p.codes, p.scales, p.gemv.chunks,
                                           p.scale_stride};
  gemv<Format, Fp8GemvWeight<kBlockScales>, kTokens, kRows,
       kFp8GemvThreads<kTokens>>(p.gemv, weight);
}

}  // namespace vllm::sm70

#define SM70_FP8_GEMV(Format, block_scales, tokens, rows)                  \
  SM70_ENTRY(vllm::sm70::kFp8GemvThreads<tokens>, 0, false,                \
             vllm::sm70::fp8_gemv_kernel<vllm::sm70::Format, block_scales, \
                                         tokens, rows>)
SM70_FP8_GEMV(Fp16, true, 1, 4)
SM70_FP8_GEMV(Fp16, true, 1, 8)
SM70_FP8_GEMV(Fp16, true, 2, 4)
SM70_FP8_GEMV(Fp16, true, 2, 8)
SM70_FP8_GEMV(Fp16, true, 4, 2)
SM70_FP8_GEMV(Fp16, true, 4, 4)
SM70_FP8_GEMV(Fp16, false, 1, 4)
SM70_FP8_GEMV(Fp16, false, 1, 8)
SM70_FP8_GEMV(Fp16, false, 2, 4)
SM70_FP8_GEMV(Fp16, false, 2, 8)
SM70_FP8_GEMV(Fp16, false, 4, 2)
SM70_FP8_GEMV(Fp16, false, 4, 4)
SM70_FP8_GEMV(Bf16, true, 1, 4)
SM70_FP8_GEMV(Bf16, true, 2, 4)
SM70_FP8_GEMV(Bf16, true, 4, 4)
SM70_FP8_GEMV(Bf16, false, 1, 4)
SM70_FP8_GEMV(Bf16, false, 2, 4)
SM70_FP8_GEMV(Bf16, false, 4, 4)
#undef SM70_FP8_GEMV
