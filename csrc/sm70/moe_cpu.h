// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The CPU kernels of a mixture of experts other than its multiplications, which
// are those of small_gemm_cpu.h: the activation between the two products, and
// the sum over a token's experts. FP32 in between, one rounding at the end.
#pragma once

#include "cpu_kernels.h"
#include "lanes_cpu.h"
#include "silu_and_mul_cpu.h"

namespace vllm::sm70::cpu {

// The activation alone, without `up`.
SM70_INLINE F32Lanes activate(MoeActivation activation, F32Lanes x) {
  switch (activation) {
    case MoeActivation::kSilu:
    case MoeActivation::kSiluNoMul:
      return x / (1.0f + exp(-x));
    case MoeActivation::kGeluTanh:
    case MoeActivation::kGeluTanhNoMul:
      // (1 + tanh(u)) / 2 = 1 / (1 + e^-2u), u = sqrt(2 / pi) (x + c x^3).
      return x / (1.0f + exp(x * (x * x * 0.044715f + 1.0f) * -1.595769122f));
    case MoeActivation::kRelu2NoMul: {
      const F32Lanes positive = x < 0.0f ? F32Lanes{} : x;
      return positive * positive;
    }
    case MoeActivation::kNone:
      return x;
    case MoeActivation::kGelu:
    case MoeActivation::kGeluNoMul:
      break;
  }
  F32Lanes result;
  for (int i = 0; i < kLanes; ++i) {
    result[i] = 0.5f * x[i] * __builtin_erfcf(x[i] * -0.707106781f);
  }
  return result;
}

SM70_INLINE F32Lanes load_some_floats(const float* in, i64 count) {
  return float_from_bits(load_some(reinterpret_cast<const u32*>(in), count));
}

template <class Format>
SM70_INLINE void moe_activate(MoeActivation activation, const float* gate,
                              const float* up, float factor,
                              typename Format::Storage* out, i64 count) {
  for (i64 i = 0; i < count; i += kLanes) {
    const i64 some = count - i < kLanes ? count - i : kLanes;
    F32Lanes result =
        activate(activation, load_some_floats(gate + i, some) * factor);
    if (is_gated(activation)) {
      result *= load_some_floats(up + i, some) * factor;
    }
    store_some(Format::bits(result), out + i, some);
  }
}

template <class Format>
SM70_INLINE void moe_weigh(const float* in, float factor,
                           typename Format::Storage* out, i64 count) {
  for (i64 i = 0; i < count; i += kLanes) {
    const i64 some = count - i < kLanes ? count - i : kLanes;
    store_some(Format::bits(F32Lanes(load_some_floats(in + i, some) * factor)),
               out + i, some);
  }
}

// `out` may be one of the rows.
template <class Format>
SM70_INLINE void moe_sum(const void* const* rows, i64 row_count,
                         typename Format::Storage* out, i64 count) {
  using Storage = typename Format::Storage;
  for (i64 i = 0; i < count; i += kLanes) {
    const i64 some = count - i < kLanes ? count - i : kLanes;
    F32Lanes sum = {};
    for (i64 row = 0; row < row_count; ++row) {
      sum += Format::value(
          load_some(static_cast<const Storage*>(rows[row]) + i, some));
    }
    store_some(Format::bits(sum), out + i, some);
  }
}

}  // namespace vllm::sm70::cpu
