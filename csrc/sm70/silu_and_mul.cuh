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
#include "half2_ops.h"
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
// At least on a multiprocessor: 2,048 threads of 32 registers. FP32 needs more.
template <class Format>
constexpr int kSiluAndMulBlocks = sizeof(typename Format::Storage) == 2 ? 8 : 1;

template <class Format>
__device__ __forceinline__ float silu_times(float gate, float up) {
  const float silu = gate / (1.0f + expf(-gate));
  return Format::value(u32{Format::bits(silu)}) * (up + 0.0f);
}

// Eight products, from and to memory that is 16-byte aligned.
template <class Format>
__device__ __forceinline__ void silu_times_x8_in_fp32(
    const typename Format::Storage* gates, const typename Format::Storage* ups,
    typename Format::Storage* out) {
  float gate[8], up[8];
  load_x8<Format>(gates, 0, gate);
  load_x8<Format>(ups, 0, up);
#pragma unroll
  for (int i = 0; i < 8; ++i) gate[i] = silu_times<Format>(gate[i], up[i]);
  store_x8<Format>(out, 0, gate);
}

template <class Format>
__device__ __forceinline__ void silu_times_x8(
    const typename Format::Storage* gates, const typename Format::Storage* ups,
    typename Format::Storage* out) {
  silu_times_x8_in_fp32<Format>(gates, ups, out);
}

// silu, not rounded, of an FP16 gate that is finite and at least -80: the steps
// of IEEE's division without its checks, since nothing overflows there and no
// remainder is lost. It makes +0 of -0.
__device__ __forceinline__ float silu_of_moderate(float gate) {
  const float divisor = 1.0f + expf(-gate);
  float reciprocal;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(divisor));
  reciprocal = fmaf(fmaf(-divisor, reciprocal, 1.0f), reciprocal, reciprocal);
  const float quotient = gate * reciprocal;
  return fmaf(fmaf(-divisor, quotient, gate), reciprocal, quotient);
}

__device__ __forceinline__ u32 silu_times_x2(u32 gates, u32 ups) {
  const float2 values = floats_from_half2(gates);
  const u32 silu = Fp16::bits(silu_of_moderate(values.x)) |
                   (Fp16::bits(silu_of_moderate(values.y)) << 16);
  const u32 signed_silu = (silu & 0x7fff7fffu) | (gates & 0x80008000u);
  return multiply_half2(signed_silu, add_half2(ups, 0));
}

// The same bits in four fifths of the instructions. A product of two FP16
// numbers is exact in FP32, so FP16's own product rounds it as that does.
template <>
__device__ __forceinline__ void silu_times_x8<Fp16>(const u16* gates,
                                                    const u16* ups, u16* out) {
  const uint4 gate = __ldg(reinterpret_cast<const uint4*>(gates));
  const uint4 up = __ldg(reinterpret_cast<const uint4*>(ups));
  constexpr u32 kLow = 0xd500d500u;       // -80, twice
  constexpr u32 kInfinity = 0x7c007c00u;  // twice
  if (!(half2_within(gate.x, kLow, kInfinity) &
        half2_within(gate.y, kLow, kInfinity) &
        half2_within(gate.z, kLow, kInfinity) &
        half2_within(gate.w, kLow, kInfinity))) {
    return silu_times_x8_in_fp32<Fp16>(gates, ups, out);
  }
  *reinterpret_cast<uint4*>(out) =
      make_uint4(silu_times_x2(gate.x, up.x), silu_times_x2(gate.y, up.y),
                 silu_times_x2(gate.z, up.z), silu_times_x2(gate.w, up.w));
}

// Grid: x over all units. kVector: a unit is 8 elements, and every row of
// `gate_up` and `out` starts at a multiple of 16 bytes; else it is one element.
template <class Format, bool kVector>
__global__ void __launch_bounds__(kSiluAndMulThreads, kSiluAndMulBlocks<Format>)
    silu_and_mul_kernel(SiluAndMulParams<Format> p) {
  const u64 index =
      static_cast<u64>(blockIdx.x) * kSiluAndMulThreads + threadIdx.x;
  if (index >= p.total_units) return;
  const u32 row = static_cast<u32>(index) / p.units;
  const u32 unit = static_cast<u32>(index) - row * p.units;
  const i64 gate_unit = static_cast<i64>(row) * 2 * p.units + unit;
  typename Format::Storage* out = p.out + row * p.out_stride;
  if constexpr (kVector) {
    const auto* gates = p.gate_up + gate_unit * 8;
    const auto* ups = p.gate_up + (gate_unit + p.units) * 8;
    silu_times_x8<Format>(gates, ups, out + i64{unit} * 8);
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
