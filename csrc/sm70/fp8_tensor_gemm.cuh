// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// out = x @ W^T + bias on tensor cores, W in FP8 E4M3 with one FP32 scale for
// each block of 128 x 128 elements or for each row. See tensor_gemm.h.
//
// What is multiplied are the codes, which are exact in FP16 and in BF16; the
// scales multiply FP32 sums: a block's at the end of each stage (no stage
// crosses a block), a row's at the end. So the weight is not rounded at all,
// where dequantisation rounds it to FP16.
#pragma once

#include "fp8_tensor_codes.h"
#include "kernel_entry.h"
#include "tensor_gemm.h"

namespace vllm::sm70 {

template <class Format, class Tile, bool kBlockScales>
struct Fp8TensorWeight {
  static_assert(Tile::kCodes == 16);
  static_assert(128 % Tile::kStageK == 0 && 128 % Tile::kN == 0);
  static constexpr bool kStageScales = kBlockScales;

  using Chunk = Fp8Chunk;

  const u8* codes;
  const float* scales;
  i64 chunks;  // of a row
  int scale_stride;

  __device__ __forceinline__ Chunk load(int row, int chunk) const {
    const uint4 words =
        __ldg(reinterpret_cast<const uint4*>(codes) + (row * chunks + chunk));
    return {{words.x, words.y, words.z, words.w}};
  }

  __device__ __forceinline__ void store(const Chunk& chunk, u16* out) const {
    store_fp8_chunk<Format>(chunk, out);
  }

  __device__ __forceinline__ uint4 permute(uint4 x) const {
    return permute_like_fp8(x);
  }

  __device__ __forceinline__ float stage_scale(int row, int k) const {
    const i64 block_row = row / 128;
    return __ldg(scales + block_row * scale_stride + k / 128);
  }

  __device__ __forceinline__ float finish(float sum, int row) const {
    const float value = sum * kFp8CodeFactor<Format>;
    return kBlockScales ? value : value * __ldg(scales + row);
  }
};

template <class Format>
struct Fp8TensorGemmParams {
  TensorGemmParams<Format> gemm;
  const u8* codes;  // 16-byte aligned
  const float* scales;
  int scale_stride;  // block scales in a row of blocks
};

// Blocks on a multiprocessor, at least. Two sets of 64 x 64 sums (of a stage, and
// of all) do not fit a second block's registers.
template <bool kBlockScales, int kM>
constexpr int kFp8TensorGemmBlocks = kBlockScales && kM == 64 ? 1 : 2;

// Grid: x over tiles of M (fastest) and N, y over parts of K.
template <class Format, bool kBlockScales, int kM, int kN, int kDepth>
__global__ void __launch_bounds__(kTensorGemmThreads,
                                  kFp8TensorGemmBlocks<kBlockScales, kM>)
    fp8_tensor_gemm_kernel(Fp8TensorGemmParams<Format> p) {
  using Tile = TensorTile<kM, kN, 16>;
  if constexpr (kHasWmma<Format>) {
    const Fp8TensorWeight<Format, Tile, kBlockScales> weight{
        p.codes, p.scales, p.gemm.k / 16, p.scale_stride};
    tensor_gemm<Format, Tile, Fp8TensorWeight<Format, Tile, kBlockScales>,
                kDepth>(p.gemm, weight);
  }
}

}  // namespace vllm::sm70

// BF16 has no code for sm_70 and sm_75, which have no BF16 tensor cores.
#define SM70_FP8_TENSOR_GEMM(Format, block_scales, m, n, depth)     \
  SM70_ENTRY(vllm::sm70::kTensorGemmThreads,                        \
             (vllm::sm70::TensorTile<m, n, 16>::kSharedBytes),      \
             (vllm::sm70::kHasWmma<vllm::sm70::Format>),            \
             vllm::sm70::fp8_tensor_gemm_kernel<vllm::sm70::Format, \
                                                block_scales, m, n, depth>)
SM70_FP8_TENSOR_GEMM(Fp16, true, 16, 32, 4)
SM70_FP8_TENSOR_GEMM(Fp16, true, 16, 64, 4)
SM70_FP8_TENSOR_GEMM(Fp16, true, 32, 64, 4)
SM70_FP8_TENSOR_GEMM(Fp16, true, 64, 64, 2)
SM70_FP8_TENSOR_GEMM(Fp16, false, 16, 32, 4)
SM70_FP8_TENSOR_GEMM(Fp16, false, 16, 64, 4)
SM70_FP8_TENSOR_GEMM(Fp16, false, 32, 64, 4)
SM70_FP8_TENSOR_GEMM(Fp16, false, 64, 64, 2)
SM70_FP8_TENSOR_GEMM(Bf16, true, 16, 64, 4)
SM70_FP8_TENSOR_GEMM(Bf16, true, 32, 64, 4)
SM70_FP8_TENSOR_GEMM(Bf16, true, 64, 64, 2)
SM70_FP8_TENSOR_GEMM(Bf16, false, 16, 64, 4)
SM70_FP8_TENSOR_GEMM(Bf16, false, 32, 64, 4)
SM70_FP8_TENSOR_GEMM(Bf16, false, 64, 64, 2)
#undef SM70_FP8_TENSOR_GEMM
