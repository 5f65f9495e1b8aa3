// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// out = silu(gate) * up, with silu(g) = g / (1 + exp(-g)), element by element.
//
// The numbers are those of vLLM's own SiluAndMul kernel: silu in FP32, rounded
// to the format; then the product with `up` in FP32, rounded again. That kernel
// adds its `beta`, 0, to `up` first, which turns -0 into +0; so does this one.
#pragma once

#include "device_vec.h"
#include "kernel_entry.h"

namespace vllm::sm70 {

template <class Format>
struct SiluAndMulParams {
  // [rows, 2 * units * kWidth]: the gates of a row, then its ups.
  const typename Format::Storage* gate_up;
  typename Format::Storage* out;  // [rows, units * kWidth]
  i64 out_stride;                 // elements from one row of `out` to the next
  u32 units;                      // of kWidth elements, in a row of `out`
  u32 total_units;                // rows * units
};

constexpr int kSiluAndMulThreads = 256;

template <class Format>
__device__ __forceinline__ float silu_times(float gate, float up) {
  const float silu = gate / (1.0f + expf(-gate));
  return Format::value(u32{Format::bits(silu)}) * (up + 0.0f);
}

// Grid: x over all units. kVector: a unit is 8 elements, and every row of
// `gate_up` and `out` starts at a multiple of 16 bytes; else it is one element.
template <class Format, bool kVector>
__global__ void __launch_bounds__(kSiluAndMulThreads)
    silu_and_mul_kernel(SiluAndMulParams<Format> p) {
  const u64 index =
      static_cast<u64>(blockIdx.x) * kSiluAndMulThreads + threadIdx.x;
  if (index >= p.total_units) return;
  const u32 row = static_cast<u32>(index) / p.units;
  const u32 unit = static_cast<u32>(index) - row * p.units;
  const i64 gate_unit = static_cast<i64>(row) * 2 * p.units + unit;
  typename Format::Storage* out = p.out + row * p.out_stride;
  if constexpr (kVector) {
    float gate[8], up[8];
    load_x8<Format>(p.gate_up, gate_unit, gate);
    load_x8<Format>(p.gate_up, gate_unit + p.units, up);
#pragma unroll
    for (int i = 0; i < 8; ++i) gate[i] = silu_times<Format>(gate[i], up[i]);
    store_x8<Format>(out, unit, gate);
  } else {
    const float gate = Format::value(u32{p.gate_up[gate_unit]});
    const float up = Format::value(u32{p.gate_up[gate_unit + p.units]});
    out[unit] = Format::bits(silu_times<Format>(gate, up));
  }
}

}  // namespace vllm::sm70

SM70_ENTRY(vllm::sm70::kSiluAndMulThreads, 0, false,
           vllm::sm70::silu_and_mul_kernel<vllm::sm70::Fp16, true>)
SM70_ENTRY(vllm::sm70::kSiluAndMulThreads, 0, false,
           vllm::sm70::silu_and_mul_kernel<vllm::sm70::Fp16, false>)
SM70_ENTRY(vllm::sm70::kSiluAndMulThreads, 0, false,
           vllm::sm70::silu_and_mul_kernel<vllm::sm70::Bf16, true>)
SM70_ENTRY(vllm::sm70::kSiluAndMulThreads, 0, false,
           vllm::sm70::silu_and_mul_kernel<vllm::sm70::Bf16, false>)
SM70_ENTRY(vllm::sm70::kSiluAndMulThreads, 0, false,
           vllm::sm70::silu_and_mul_kernel<vllm::sm70::Fp32, true>)
SM70_ENTRY(vllm::sm70::kSiluAndMulThreads, 0, false,
           vllm::sm70::silu_and_mul_kernel<vllm::sm70::Fp32, false>)
