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

__device__ __forceinline__ u32 add_half2(u32 a, u32 b) {
  u32 sum;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(sum) : "r"(a), "r"(b));
  return sum;
}

// Whether low <= value < high for both halves; no NaN is.
__device__ __forceinline__ bool half2_within(u32 value, u32 low, u32 high) {
  u32 within;
  asm("{\n"
      ".reg .pred p, q;\n"
      "setp.ge.f16x2 p|q, %1, %2;\n"
      "and.pred p, p, q;\n"
      "setp.lt.and.f16x2 p|q, %1, %3, p;\n"
      "and.pred p, p, q;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}"
      : "=r"(within)
      : "r"(value), "r"(low), "r"(high));
  return within != 0;
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
