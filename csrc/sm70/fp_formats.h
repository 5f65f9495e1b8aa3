// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Scalar conversions between the small floating-point formats, for host and
// device, exact in every bit.
//
//   E2M1 (NVFP4 codes):  4 bits, sign exponent(2, bias 1) mantissa(1); no
//                        infinity and no NaN: 0 0.5 1 1.5 2 3 4 6 and
//                        negatives.
//   E4M3 (FP8, "fn"):    8 bits, sign exponent(4, bias 7) mantissa(3); no
//                        infinity; 0x7f and 0xff are NaN; the largest is 448.
//
// Neither format has an instruction on sm_70, so they are decoded by moving
// bits. No step makes an FP32 subnormal of a code, so flush-to-zero changes
// nothing. A C++17 compiler, nvcc and NVRTC (which has no <cstdint>) all take
// this header.
#pragma once

#ifdef __CUDACC__
  #include <cuda_bf16.h>
  #include <cuda_fp16.h>
  #define SM70_INLINE __host__ __device__ __forceinline__
#else
  #define SM70_INLINE inline __attribute__((always_inline))
#endif

namespace vllm::sm70 {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

// The formulas below are templates over the lanes that they work on: one
// number, or (on a CPU) a vector of them. `Bits` is u32 or a vector of u32.
template <class Bits>
struct FloatOf;
template <>
struct FloatOf<u32> {
  using Type = float;
};
template <class Float>
struct BitsOf;
template <>
struct BitsOf<float> {
  using Type = u32;
};

template <class Bits>
SM70_INLINE typename FloatOf<Bits>::Type float_from_bits(Bits bits) {
  return __builtin_bit_cast(typename FloatOf<Bits>::Type, bits);
}

template <class Float>
SM70_INLINE typename BitsOf<Float>::Type bits_from_float(Float value) {
  return __builtin_bit_cast(typename BitsOf<Float>::Type, value);
}

// E2M1 -> FP32. Only the four low bits of `code` count.
template <class Bits>
SM70_INLINE typename FloatOf<Bits>::Type float_from_e2m1(Bits code) {
  const Bits magnitude = (code & 7) << 22;
  // The exponent fields differ by the biases' difference, 127 - 1 = 126. Codes
  // 0 and 1 have no implicit leading one: give them one, and take it off again.
  const Bits normal = magnitude + (126u << 23);
  const Bits tiny =
      bits_from_float(float_from_bits(magnitude + (127u << 23)) - 1.0f);
  return float_from_bits((magnitude < (2u << 22) ? tiny : normal) |
                         ((code & 8) << 28));
}

// E4M3 -> FP32. Only the eight low bits of `code` count. NaN for 0x7f and 0xff.
template <class Bits>
SM70_INLINE typename FloatOf<Bits>::Type float_from_e4m3(Bits code) {
  const Bits magnitude = (code & 0x7f) << 20;
  // As above: 127 - 7 = 120, and the smallest normal number is 2^-6.
  const Bits normal = magnitude + (120u << 23);
  const Bits tiny =
      bits_from_float(float_from_bits(magnitude + (121u << 23)) - 0x1p-6f);
  const Bits finite = magnitude < (8u << 20) ? tiny : normal;
  const Bits quiet_nan = finite | 0x7fc00000u;
  return float_from_bits((magnitude == (0x7fu << 20) ? quiet_nan : finite) |
                         ((code & 0x80) << 24));
}

// FP32 -> FP16 bits, to nearest even: gradual underflow, overflow to infinity,
// any NaN to a quiet NaN.
template <class Float>
SM70_INLINE typename BitsOf<Float>::Type fp16_from_float(Float value) {
#ifdef __CUDA_ARCH__
  return __half_as_ushort(__float2half_rn(value));
#else
  using Bits = typename BitsOf<Float>::Type;
  const Bits bits = bits_from_float(value);
  const Bits magnitude = bits & 0x7fffffffu;
  // Normal results: rebias (127 - 15 = 112) and round away the 13 low bits of
  // the mantissa; a carry out of the mantissa rightly raises the exponent.
  const Bits normal =
      (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1)) >> 13;
  // Subnormal results are multiples of 2^-24, the spacing of FP32 in [0.5, 1):
  // the addition does the rounding.
  const Bits subnormal =
      bits_from_float(float_from_bits(magnitude) + 0.5f) - (126u << 23);
  const Bits finite = magnitude < (113u << 23) ? subnormal : normal;
  const Bits infinity = (bits & 0) | 0x7c00u;
  const Bits quiet_nan = (bits & 0) | 0x7e00u;
  const Bits large = magnitude > 0x7f800000u ? quiet_nan : infinity;
  return (magnitude >= (143u << 23) ? large : finite) |  // 2^16 and above
         ((bits >> 16) & 0x8000u);
#endif
}

// FP32 -> BF16 bits, to nearest even; any NaN to a quiet NaN.
template <class Float>
SM70_INLINE typename BitsOf<Float>::Type bf16_from_float(Float value) {
#ifdef __CUDA_ARCH__
  return __bfloat16_as_ushort(__float2bfloat16_rn(value));
#else
  using Bits = typename BitsOf<Float>::Type;
  const Bits bits = bits_from_float(value);
  const Bits rounded = (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16;
  const Bits quiet_nan = (bits >> 16) | 0x7fc0u;
  return (bits & 0x7fffffffu) > 0x7f800000u ? quiet_nan : rounded;
#endif
}

// FP16 -> FP32. The sixteen high bits of `half` must be zero.
template <class Bits>
SM70_INLINE typename FloatOf<Bits>::Type float_from_fp16(Bits half) {
#ifdef __CUDA_ARCH__
  return __half2float(__ushort_as_half(static_cast<u16>(half)));
#else
  // As above: 127 - 15 = 112, the smallest normal number is 2^-14, and the
  // largest exponent is that of infinity and NaN.
  const Bits magnitude = (half & 0x7fffu) << 13;
  const Bits normal = magnitude + (112u << 23);
  const Bits tiny =
      bits_from_float(float_from_bits(magnitude + (113u << 23)) - 0x1p-14f);
  const Bits special = magnitude + (224u << 23);
  const Bits finite = magnitude < (1u << 23) ? tiny : normal;
  return float_from_bits((magnitude >= (31u << 23) ? special : finite) |
                         ((half & 0x8000u) << 16));
#endif
}

// A format of inputs and outputs: the storage type, the rounding to its bits,
// and the value of its bits (which is exact).
struct Fp16 {
  using Storage = u16;
  template <class Float>
  static SM70_INLINE typename BitsOf<Float>::Type bits(Float value) {
    return fp16_from_float(value);
  }
  template <class Bits>
  static SM70_INLINE typename FloatOf<Bits>::Type value(Bits bits) {
    return float_from_fp16(bits);
  }
};

struct Bf16 {
  using Storage = u16;
  template <class Float>
  static SM70_INLINE typename BitsOf<Float>::Type bits(Float value) {
    return bf16_from_float(value);
  }
  template <class Bits>
  static SM70_INLINE typename FloatOf<Bits>::Type value(Bits bits) {
    return float_from_bits(bits << 16);
  }
};

struct Fp32 {
  using Storage = u32;
  template <class Float>
  static SM70_INLINE typename BitsOf<Float>::Type bits(Float value) {
    return bits_from_float(value);
  }
  template <class Bits>
  static SM70_INLINE typename FloatOf<Bits>::Type value(Bits bits) {
    return float_from_bits(bits);
  }
};

enum class OutputFormat { kFp16, kBf16, kFp32 };

#ifndef __CUDACC_RTC__  // which takes device code only
inline i64 element_bytes(OutputFormat format) {
  return format == OutputFormat::kFp32 ? 4 : 2;
}

// Calls `body` with the struct that goes with `format`.
template <class Body>
inline void for_output_format(OutputFormat format, const Body& body) {
  switch (format) {
    case OutputFormat::kFp16:
      return body(Fp16{});
    case OutputFormat::kBf16:
      return body(Bf16{});
    case OutputFormat::kFp32:
      return body(Fp32{});
  }
}
#endif

}  // namespace vllm::sm70
