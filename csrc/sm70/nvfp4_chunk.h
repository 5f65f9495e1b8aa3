// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// A few neighbouring elements of a row of an NVFP4 weight, as they are loaded.
#pragma once

#include "fp_formats.h"

namespace vllm::sm70 {

// kBlocks (1 or 2) blocks of 16 codes, and their E4M3 scales.
template <int kBlocks>
struct Nvfp4Chunk {
  u32 words[2 * kBlocks];  // lowest bits first
  u32 scales;              // byte b: of block b
};

// Chunk `index` of a weight; its arrays are aligned to 8 * kBlocks and kBlocks
// bytes.
template <int kBlocks>
__device__ __forceinline__ Nvfp4Chunk<kBlocks> load_nvfp4_chunk(
    const u8* packed, const u8* block_scales, i64 index) {
  if constexpr (kBlocks == 2) {
    const uint4 words = __ldg(reinterpret_cast<const uint4*>(packed) + index);
    return {{words.x, words.y, words.z, words.w},
            __ldg(reinterpret_cast<const u16*>(block_scales) + index)};
  } else {
    const uint2 words = __ldg(reinterpret_cast<const uint2*>(packed) + index);
    return {{words.x, words.y}, __ldg(block_scales + index)};
  }
}

// Eight elements of x, FP16 or BF16, in the order 0 4 1 5 2 6 3 7, as
// half2s_from_e2m1x8 pairs the codes of a word.
__device__ __forceinline__ uint4 permute_like_nvfp4(uint4 x) {
  return make_uint4(
      __byte_perm(x.x, x.z, 0x5410), __byte_perm(x.x, x.z, 0x7632),
      __byte_perm(x.y, x.w, 0x5410), __byte_perm(x.y, x.w, 0x7632));
}

}  // namespace vllm::sm70
