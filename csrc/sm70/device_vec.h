// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Eight values at a time on the device: decoding from a register, loading and
// storing with 128-bit instructions.
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

// Decodes byte kByte of `word`, an E4M3 code.
template <int kByte>
__device__ __forceinline__ float float_from_e4m3_byte(u32 word) {
  // The arithmetic shift leaves the sign in the top bit and the magnitude at
  // the top of the mantissa; 2^120 makes up for the biases' difference.
  const u32 bits =
      static_cast<u32>(static_cast<int>(word << (24 - 8 * kByte)) >> 4) &
      0x87f00000u;
  const float value = float_from_bits(bits) * 0x1p120f;
  const bool nan = (bits & 0x07f00000u) == 0x07f00000u;
  return nan ? float_from_bits(0x7fc00000u) : value;
}

// Decodes the four E4M3 codes of `word`, the one in the lowest bits first.
__device__ __forceinline__ void floats_from_e4m3x4(u32 word, float* out) {
  out[0] = float_from_e4m3_byte<0>(word);
  out[1] = float_from_e4m3_byte<1>(word);
  out[2] = float_from_e4m3_byte<2>(word);
  out[3] = float_from_e4m3_byte<3>(word);
}

// Codes as pairs of FP16 numbers with the codes' sign and magnitude bits moved
// to where FP16 has them, which costs two instructions a pair. The biases'
// difference makes the numbers smaller by a power of two; the smallest are FP16
// subnormals, and all are exact.

// Pair i: 2^-14 times the E2M1 codes i (low half) and i + 4 of the eight.
__device__ __forceinline__ void half2s_from_e2m1x8(u32 word, u32 (&out)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const u32 magnitude = i < 3 ? word << (9 - 4 * i) : word >> (4 * i - 9);
    out[i] = (magnitude & 0x0e000e00u) | ((word << (12 - 4 * i)) & 0x80008000u);
  }
}

// Pair i: 2^-8 times the E4M3 codes i (low half) and i + 2 of the four. NaN
// codes become 480: see has_e4m3_nan.
__device__ __forceinline__ void half2s_from_e4m3x4(u32 word, u32 (&out)[2]) {
  out[0] = ((word << 7) & 0x3f803f80u) | ((word << 8) & 0x80008000u);
  out[1] = ((word >> 1) & 0x3f803f80u) | (word & 0x80008000u);
}

// Nonzero if one of the four E4M3 codes is a NaN.
__device__ __forceinline__ u32 has_e4m3_nan(u32 word) {
  return ((word & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u;
}

__device__ __forceinline__ float2 floats_from_half2(u32 pair) {
  return make_float2(__half2float(__ushort_as_half(pair & 0xffff)),
                     __half2float(__ushort_as_half(pair >> 16)));
}

// Decodes eight values of 16 bits, the ones in the lowest bits first.
template <class Format>
__device__ __forceinline__ void floats_from_x8(const uint4& packed,
                                               float (&values)[8]) {
  const u32 words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    values[2 * i] = Format::value(words[i] & 0xffff);
    values[2 * i + 1] = Format::value(words[i] >> 16);
  }
}

// Loads elements [8 * index, 8 * index + 8) of `in`, which is 16-byte aligned.
template <class Format>
__device__ __forceinline__ void load_x8(const typename Format::Storage* in,
                                        i64 index, float (&values)[8]) {
  if constexpr (sizeof(typename Format::Storage) == 2) {
    floats_from_x8<Format>(__ldg(reinterpret_cast<const uint4*>(in) + index),
                           values);
  } else {
    const uint4* source = reinterpret_cast<const uint4*>(in) + 2 * index;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint4 packed = __ldg(source + i);
      values[4 * i] = Format::value(packed.x);
      values[4 * i + 1] = Format::value(packed.y);
      values[4 * i + 2] = Format::value(packed.z);
      values[4 * i + 3] = Format::value(packed.w);
    }
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
