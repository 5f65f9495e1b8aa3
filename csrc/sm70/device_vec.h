// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Eight values at a time on the device: decoding from a register, storing with
// 128-bit instructions.
#pragma once

#include "fp_formats.h"

namespace vllm::sm70 {

// Decodes the eight E2M1 codes of `word`, the one in the lowest bits first,
// which is the order of the checkpoints (element 2j in the low half of byte j).
//
// The code's magnitude bits are moved to the top of the FP32 mantissa and the
// bottom of its exponent, which makes a number 2^126 times too small (code 0.5
// becomes an FP32 subnormal); the multiplication by 2^126 is exact. It must not
// be compiled with flush-to-zero.
__device__ __forceinline__ void floats_from_e2m1x8(u32 word, float (&out)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const u32 magnitude = i < 6 ? word << (22 - 4 * i) : word >> (4 * i - 22);
    const u32 bits =
        (magnitude & 0x01c00000u) | ((word << (28 - 4 * i)) & 0x80000000u);
    out[i] = float_from_bits(bits) * 0x1p126f;
  }
}

// Decodes the four E4M3 codes of `word`, the one in the lowest bits first.
__device__ __forceinline__ void floats_from_e4m3x4(u32 word, float* out) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    // The arithmetic shift leaves the sign in the top bit and the magnitude at
    // the top of the mantissa; 2^120 makes up for the biases' difference.
    const u32 bits =
        static_cast<u32>(static_cast<int>(word << (24 - 8 * i)) >> 4) &
        0x87f00000u;
    const float value = float_from_bits(bits) * 0x1p120f;
    const bool nan = (bits & 0x07f00000u) == 0x07f00000u;
    out[i] = nan ? float_from_bits(0x7fc00000u) : value;
  }
}

// Rounds eight values and stores them at elements [8 * index, 8 * index + 8) of
// `out`, which is 16-byte aligned.
template <class Format>
__device__ __forceinline__ void store_x8(typename Format::Storage* out,
                                         i64 index, const float (&values)[8]) {
  if constexpr (sizeof(typename Format::Storage) == 2) {
    uint4 packed;
    u32* words = &packed.x;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      words[i] =
          Format::bits(values[2 * i]) | (Format::bits(values[2 * i + 1]) << 16);
    }
    reinterpret_cast<uint4*>(out)[index] = packed;
  } else {
    uint4* target = reinterpret_cast<uint4*>(out) + 2 * index;
    target[0] = make_uint4(Format::bits(values[0]), Format::bits(values[1]),
                           Format::bits(values[2]), Format::bits(values[3]));
    target[1] = make_uint4(Format::bits(values[4]), Format::bits(values[5]),
                           Format::bits(values[6]), Format::bits(values[7]));
  }
}

}  // namespace vllm::sm70
