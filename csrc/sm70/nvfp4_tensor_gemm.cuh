// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// out = x @ W^T + bias on tensor cores, W in NVFP4. See tensor_gemm.h.
//
// What is multiplied is code * block scale, which is exact in FP16 and in BF16
// (2 and 4 significant bits); the global scale multiplies the FP32 sum. So the
// weight is not rounded at all, where dequantisation rounds it to FP16.
#pragma once

#include "half2_ops.h"
#include "kernel_entry.h"
#include "nvfp4_chunk.h"
#include "tensor_gemm.h"

namespace vllm::sm70 {

template <class Format, class Tile>
struct Nvfp4TensorWeight {
  static constexpr int kBlocks = Tile::kCodes / 16;
  static constexpr bool kStageScales = false;

  using Chunk = Nvfp4Chunk<kBlocks>;

  const u8* packed;
  const u8* block_scales;
  i64 chunks;  // of a row
  float global_scale;

  __device__ __forceinline__ Chunk load(int row, int chunk) const {
    return load_nvfp4_chunk<kBlocks>(packed, block_scales,
                                     row * chunks + chunk);
  }

  // Elements 0 4 1 5 2 6 3 7 of each eight.
  __device__ __forceinline__ void store(const Chunk& chunk, u16* out) const {
    store_block<0>(chunk, out);
    if constexpr (kBlocks == 2) store_block<1>(chunk, out + 16);
  }

  __device__ __forceinline__ uint4 permute(uint4 x) const {
    return permute_like_nvfp4(x);
  }

  __device__ __forceinline__ float finish(float sum, int) const {
    return (kIsHalf ? sum * 0x1p7f : sum) * global_scale;
  }

 private:
  static constexpr bool kIsHalf = is_same<Format, Fp16>;

  template <int kBlock>
  __device__ __forceinline__ void store_block(const Chunk& chunk,
                                              u16* out) const {
#pragma unroll
    for (int word = 0; word < 2; ++word) {
      u32 pairs[4];
      if constexpr (kIsHalf) {
        // 2^-14 codes times 2^7 scales: at most 2^-7 * 6 * 448 = 21, at least
        // 2^-7 * 0.5 * 2^-9 = 2^-17, and multiples of that.
        half2s_from_e2m1x8(chunk.words[2 * kBlock + word], pairs);
        const u32 factor = __byte_perm(half2_from_e4m3x2(chunk.scales), 0,
                                       kBlock == 0 ? 0x1010 : 0x3232);
#pragma unroll
        for (u32& pair : pairs) pair = multiply_half2(pair, factor);
      } else {
        const float scale = float_from_e4m3_byte<kBlock>(chunk.scales);
        float values[8];
        floats_from_e2m1x8(chunk.words[2 * kBlock + word], values);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          // The upper halves of FP32 numbers that are BF16 numbers.
          pairs[i] =
              __byte_perm(bits_from_float(values[i] * scale),
                          bits_from_float(values[i + 4] * scale), 0x7632);
        }
      }
      *reinterpret_cast<uint4*>(out + 8 * word) =
          make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    }
  }
};

template <class Format>
struct Nvfp4TensorGemmParams {
  TensorGemmParams<Format> gemm;
  const u8* packed;           // 16-byte aligned, or 8 for chunks of 16
  const u8* block_scales;     // 2-byte aligned, or 1
  const float* global_scale;  // one value, on the device
};

// Grid: x over tiles of M (fastest) and N, y over parts of K.
template <class Format, int kM, int kN, int kCodes, int kDepth>
__global__ void __launch_bounds__(kTensorGemmThreads, 2)
    nvfp4_tensor_gemm_kernel(Nvfp4TensorGemmParams<Format> p) {
  using Tile = TensorTile<kM, kN, kCodes>;
  if constexpr (kHasWmma<Format>) {
    const Nvfp4TensorWeight<Format, Tile> weight{
        p.packed, p.block_scales, p.gemm.k / kCodes, __ldg(p.global_scale)};
    tensor_gemm<Format, Tile, Nvfp4TensorWeight<Format, Tile>, kDepth>(p.gemm,
                                                                       weight);
  }
}

}  // namespace vllm::sm70

// BF16 has no code for sm_70 and sm_75, which have no BF16 tensor cores.
#define SM70_NVFP4_TENSOR_GEMM(Format, m, n, codes, depth)                  \
  SM70_ENTRY(vllm::sm70::kTensorGemmThreads,                                \
             (vllm::sm70::TensorTile<m, n, codes>::kSharedBytes),           \
             (vllm::sm70::kHasWmma<vllm::sm70::Format>),                    \
             vllm::sm70::nvfp4_tensor_gemm_kernel<vllm::sm70::Format, m, n, \
                                                  codes, depth>)
SM70_NVFP4_TENSOR_GEMM(Fp16, 16, 32, 16, 4)
SM70_NVFP4_TENSOR_GEMM(Fp16, 16, 32, 32, 4)
SM70_NVFP4_TENSOR_GEMM(Fp16, 16, 64, 16, 4)
SM70_NVFP4_TENSOR_GEMM(Fp16, 16, 64, 32, 4)
SM70_NVFP4_TENSOR_GEMM(Fp16, 32, 64, 16, 4)
SM70_NVFP4_TENSOR_GEMM(Fp16, 32, 64, 32, 2)
SM70_NVFP4_TENSOR_GEMM(Fp16, 64, 64, 16, 4)
SM70_NVFP4_TENSOR_GEMM(Fp16, 64, 128, 32, 2)
SM70_NVFP4_TENSOR_GEMM(Bf16, 16, 64, 16, 4)
SM70_NVFP4_TENSOR_GEMM(Bf16, 32, 64, 16, 4)
SM70_NVFP4_TENSOR_GEMM(Bf16, 64, 64, 16, 4)
#undef SM70_NVFP4_TENSOR_GEMM
