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

#include "kernel_entry.h"
#include "tensor_gemm.h"

namespace vllm::sm70 {

template <class Format, class Tile, bool kBlockScales>
struct Fp8TensorWeight {
  static_assert(Tile::kCodes == 16);
  static_assert(128 % Tile::kStageK == 0 && 128 % Tile::kN == 0);
  static constexpr bool kStageScales = kBlockScales;

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

  // Elements 0 2 1 3 of each four.
  __device__ __forceinline__ void store(const Chunk& chunk, u16* out) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      u32 pairs[4];
      decode(chunk.words[2 * i], pairs[0], pairs[1]);
      decode(chunk.words[2 * i + 1], pairs[2], pairs[3]);
      *reinterpret_cast<uint4*>(out + 8 * i) =
          make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    }
  }

  __device__ __forceinline__ uint4 permute(uint4 x) const {
    return make_uint4(
        __byte_perm(x.x, x.y, 0x5410), __byte_perm(x.x, x.y, 0x7632),
        __byte_perm(x.z, x.w, 0x5410), __byte_perm(x.z, x.w, 0x7632));
  }

  __device__ __forceinline__ float stage_scale(int row, int k) const {
    const i64 block_row = row / 128;
    return __ldg(scales + block_row * scale_stride + k / 128);
  }

  __device__ __forceinline__ float finish(float sum, int row) const {
    const float value = is_same<Format, Fp16> ? sum * 0x1p8f : sum;
    return kBlockScales ? value : value * __ldg(scales + row);
  }

 private:
  // Codes 0 and 2 to `even`, 1 and 3 to `odd`; for FP16 times 2^-8.
  __device__ __forceinline__ void decode(u32 word, u32& even, u32& odd) const {
    if constexpr (is_same<Format, Fp16>) {
      u32 pairs[2];
      half2s_from_e4m3x4(word, pairs);
      const u32 nan = has_e4m3_nan(word) >> 7;  // ones in NaN bytes
      if (nan != 0) {
        pairs[0] |= (nan & 0x00010001u) * 0x7e00u;
        pairs[1] |= ((nan >> 8) & 0x00010001u) * 0x7e00u;
      }
      even = pairs[0];
      odd = pairs[1];
    } else {
      float values[4];
      floats_from_e4m3x4(word, values);
      // The upper halves of FP32 numbers that are BF16 numbers.
      even = __byte_perm(bits_from_float(values[0]), bits_from_float(values[2]),
                         0x7632);
      odd = __byte_perm(bits_from_float(values[1]), bits_from_float(values[3]),
                        0x7632);
    }
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
