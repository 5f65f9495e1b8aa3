// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// out = x @ W^T + bias for one to four rows of x, W in NVFP4. See gemv.h.
//
// The weight is not rounded to FP16: a block's codes are multiplied with x and
// summed up in FP32, the sum is multiplied with the block's scale, and the
// whole row's sum with the global scale. All factors but the global scale are
// exact.
#pragma once

#include "gemv.h"
#include "kernel_entry.h"
#include "nvfp4_chunk.h"

namespace vllm::sm70 {

// Chunks of kChunkCodes: 16 (any K) or 32 (K a multiple of 32; 16-byte loads).
template <int kChunkCodes>
struct Nvfp4GemvWeight {
  static constexpr int kCodes = kChunkCodes;
  static constexpr int kBlocks = kCodes / 16;

  using Chunk = Nvfp4Chunk<kBlocks>;

  const u8* packed;
  const u8* block_scales;
  i64 chunks;  // of a row
  float global_scale;

  __device__ __forceinline__ Chunk load(int row, int chunk) const {
    return load_nvfp4_chunk<kBlocks>(packed, block_scales,
                                     row * chunks + chunk);
  }

  __device__ __forceinline__ float scale(int, int) const { return 1.0f; }

  template <int kTokens>
  __device__ __forceinline__ void add(const Chunk& chunk, float,
                                      const float (&x)[kTokens][kCodes],
                                      float* sums) const {
    add_block<kTokens, 0>(chunk, x, sums);
    if constexpr (kBlocks == 2) add_block<kTokens, 1>(chunk, x, sums);
  }

  __device__ __forceinline__ float finish(float sum, int) const {
    return sum * 0x1p14f * global_scale;
  }

 private:
  template <int kTokens, int kBlock>
  __device__ __forceinline__ void add_block(const Chunk& chunk,
                                            const float (&x)[kTokens][kCodes],
                                            float* sums) const {
    float products[kTokens] = {};
#pragma unroll
    for (int word = 0; word < 2; ++word) {
      u32 pairs[4];
      half2s_from_e2m1x8(chunk.words[2 * kBlock + word], pairs);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 codes = floats_from_half2(pairs[i]);
        const int k = 16 * kBlock + 8 * word + i;
#pragma unroll
        for (int t = 0; t < kTokens; ++t) {
          products[t] += codes.x * x[t][k];
          products[t] += codes.y * x[t][k + 4];
        }
      }
    }
    const float scale = float_from_e4m3_byte<kBlock>(chunk.scales);
#pragma unroll
    for (int t = 0; t < kTokens; ++t) sums[t] += products[t] * scale;
  }
};

template <class Format>
struct Nvfp4GemvParams {
  GemvParams<Format> gemv;
  const u8* packed;           // 16-byte aligned, or 8 for chunks of 16
  const u8* block_scales;     // 2-byte aligned, or 1
  const float* global_scale;  // one value, on the device
};

// For four tokens x takes 64 registers of a thread, else 32 or fewer.
template <int kTokens>
constexpr int kNvfp4GemvThreads = kTokens == 4 ? 256 : 320;

template <class Format, int kTokens, int kCodes, int kRows>
__global__ void __launch_bounds__(kNvfp4GemvThreads<kTokens>, 2)
    nvfp4_gemv_kernel(Nvfp4GemvParams<Format> p) {
  const Nvfp4GemvWeight<kCodes> weight{p.packed, p.block_scales, p.gemv.chunks,
                                       __ldg(p.global_scale)};
  gemv<Format, Nvfp4GemvWeight<kCodes>, kTokens, kRows,
       kNvfp4GemvThreads<kTokens>>(p.gemv, weight);
}

}  // namespace vllm::sm70

#define SM70_NVFP4_GEMV(Format, tokens, codes, rows)   \
  SM70_ENTRY(                                          \
      vllm::sm70::kNvfp4GemvThreads<tokens>, 0, false, \
      vllm::sm70::nvfp4_gemv_kernel<vllm::sm70::Format, tokens, codes, rows>)
SM70_NVFP4_GEMV(Fp16, 1, 16, 4)
SM70_NVFP4_GEMV(Fp16, 1, 32, 2)
SM70_NVFP4_GEMV(Fp16, 2, 16, 4)
SM70_NVFP4_GEMV(Fp16, 2, 16, 8)
SM70_NVFP4_GEMV(Fp16, 4, 16, 2)
SM70_NVFP4_GEMV(Fp16, 4, 16, 4)
SM70_NVFP4_GEMV(Bf16, 1, 16, 4)
SM70_NVFP4_GEMV(Bf16, 1, 32, 2)
SM70_NVFP4_GEMV(Bf16, 2, 16, 4)
SM70_NVFP4_GEMV(Bf16, 4, 16, 4)
#undef SM70_NVFP4_GEMV
