// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// An E4M3 weight as gemv.h and moe_gemv.cuh read it. Codes are multiplied with x
// and summed up in FP32, 16 at a time, and the sums are multiplied with the
// block's scale, or the whole row's sum with the row's: no weight is rounded.
#pragma once

#include "device_vec.h"

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
          products[t] = fmaf(values.x, x[t][k], products[t]);
          products[t] = fmaf(values.y, x[t][k + 2], products[t]);
        }
      }
    }
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      if (nan != 0) products[t] = float_from_bits(0x7fc00000u);
      sums[t] = kBlockScales ? fmaf(products[t], scale, sums[t])
                             : sums[t] + products[t];
    }
  }

  __device__ __forceinline__ float finish(float sum, int row) const {
    const float value = sum * 0x1p8f;  // see half2s_from_e4m3x4
    return kBlockScales ? value : value * __ldg(scales + row);
  }
};

}  // namespace vllm::sm70
