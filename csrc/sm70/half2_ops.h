// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// FP16 pairs in a word, as codes are decoded into them.
#pragma once

#include "fp_formats.h"

namespace vllm::sm70 {

__device__ __forceinline__ u32 multiply_half2(u32 a, u32 b) {
  u32 product;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

// 2^7 times the two E4M3 numbers in the sixteen low bits of `codes` (the rest
// must be zero), which is exact: the smallest is 2^-2, the largest 57344.
__device__ __forceinline__ u32 half2_from_e4m3x2(u32 codes) {
  const u32 spread = __byte_perm(codes, 0, 0x4140);  // one to each half
  const u32 magnitude = spread & 0x007f007fu;
  // The bits where FP16 has them: 2^-8 times the number (15 - 7 = 8).
  const u32 small = (magnitude << 7) | ((spread & 0x00800080u) << 8);
  const u32 result = multiply_half2(small, 0x78007800u);  // 2^15
  const u32 nan = (magnitude + 0x00010001u) & 0x00800080u;
  return nan == 0 ? result : result | ((nan >> 7) * 0x7e00u);
}

}  // namespace vllm::sm70
