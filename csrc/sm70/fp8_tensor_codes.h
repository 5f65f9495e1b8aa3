// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// E4M3 codes as the elements of a tensor-core product. They are exact in FP16
// (2^-8 times the code) and in BF16. Decoding leaves the elements 0 2 1 3 of each
// four; x has to be put into the same order, which costs less than sorting them.
#pragma once

#include "device_vec.h"
#include "tensor_gemm.h"

namespace vllm::sm70 {

// Sixteen codes.
struct Fp8Chunk {
  u32 words[4];
};

// What undoes the 2^-8.
template <class Format>
constexpr float kFp8CodeFactor = is_same<Format, Fp16> ? 0x1p8f : 1.0f;

// Codes 0 and 2 to `even`, 1 and 3 to `odd`.
template <class Format>
__device__ __forceinline__ void decode_e4m3x4(u32 word, u32& even, u32& odd) {
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

// Writes the elements, 16-byte aligned, in the order 0 2 1 3 of each four.
template <class Format>
__device__ __forceinline__ void store_fp8_chunk(const Fp8Chunk& chunk,
                                                u16* out) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    u32 pairs[4];
    decode_e4m3x4<Format>(chunk.words[2 * i], pairs[0], pairs[1]);
    decode_e4m3x4<Format>(chunk.words[2 * i + 1], pairs[2], pairs[3]);
    *reinterpret_cast<uint4*>(out + 8 * i) =
        make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  }
}

// Eight elements of x in that order.
__device__ __forceinline__ uint4 permute_like_fp8(uint4 x) {
  return make_uint4(
      __byte_perm(x.x, x.y, 0x5410), __byte_perm(x.x, x.y, 0x7632),
      __byte_perm(x.z, x.w, 0x5410), __byte_perm(x.z, x.w, 0x7632));
}

}  // namespace vllm::sm70
