// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The CPU side of silu_and_mul.cuh, with the roundings of vLLM's
// SiluAndMul.forward_native (which is what runs on a CPU): silu in FP32, rounded
// to the format; then the product in FP32, rounded again. An element's bits
// depend on its inputs alone, not on its place in a row or a tile.
#pragma once

#include "cpu_kernels.h"
#include "lanes_cpu.h"

namespace vllm::sm70::cpu {

// e^x to 2 units in the last place. Results below 2^-126 become zero; infinity
// and NaN are as they should be.
SM70_INLINE F32Lanes exp(F32Lanes x) {
  x = x < -87.0f ? F32Lanes{} - 87.0f : x;
  x = x > 89.0f ? F32Lanes{} + 89.0f : x;
  // x = n * log(2) + r with an integer n: adding 1.5 * 2^23 leaves it in the low
  // bits of the sum. log(2) is subtracted in two parts, the first of which has
  // so few bits that n * part is exact.
  const F32Lanes shifted = x * 1.44269504f + 12582912.0f;
  const F32Lanes n = shifted - 12582912.0f;
  const F32Lanes r = x - n * 0.693359375f - n * -2.12194440e-4f;
  // Taylor's series of e^r to r^7, |r| <= log(2) / 2: the rest is below 2^-27.
  F32Lanes sum = F32Lanes{} + 1.0f / 5040;
  sum = sum * r + 1.0f / 720;
  sum = sum * r + 1.0f / 120;
  sum = sum * r + 1.0f / 24;
  sum = sum * r + 1.0f / 6;
  sum = sum * r + 0.5f;
  sum = sum * r * r + r + 1.0f;
  // 2^n = 2^(n - 1) * 2, since n reaches 128.
  const U32Lanes exponent = bits_from_float(shifted) - 0x4b400000u + 126u;
  return sum * float_from_bits(U32Lanes(exponent << 23)) * 2.0f;
}

// Rows [begin, end). A row of `gate_up` is `columns` gates and as many ups.
template <class Format>
SM70_INLINE void silu_and_mul(const typename Format::Storage* gate_up,
                              typename Format::Storage* out, i64 columns,
                              i64 out_stride, i64 begin, i64 end) {
  for (i64 row = begin; row < end; ++row) {
    const typename Format::Storage* gates = gate_up + row * 2 * columns;
    const typename Format::Storage* ups = gates + columns;
    typename Format::Storage* out_row = out + row * out_stride;
    for (i64 i = 0; i < columns; i += kLanes) {
      const i64 count = columns - i < kLanes ? columns - i : kLanes;
      const F32Lanes gate = Format::value(load_some(gates + i, count));
      const F32Lanes up = Format::value(load_some(ups + i, count));
      const F32Lanes silu =
          Format::value(Format::bits(F32Lanes(gate / (1.0f + exp(-gate)))));
      store_some(Format::bits(F32Lanes(silu * up)), out_row + i, count);
    }
  }
}

}  // namespace vllm::sm70::cpu
