// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// FP8 E4M3 -> FP16, BF16 or FP32, element by element:
//   out = round(code * scale), the product in FP32,
// with one FP32 scale for each block of 128 x 128 elements or for each row.
#pragma once

#include "device_vec.h"
#include "kernel_entry.h"

namespace vllm::sm70 {

template <class Format>
struct Fp8DequantizeParams {
  const u8* weight;               // 8-byte aligned
  const float* scales;            // of the weight
  typename Format::Storage* out;  // 16-byte aligned
  i64 first_row;                  // of each part
  i64 rows;                       // of each part, one after the other in `out`
  i64 part_rows;                  // from one part to the next in the weight
  int units;                      // K / 8
  int scale_stride;               // scales of one row of blocks: ceil(K / 128)
};

constexpr int kFp8DequantizeThreads = 256;
constexpr int kFp8DequantizeUnits = 64;  // units of 8 elements side by side
constexpr int kFp8DequantizeRowsPerThread = 4;
constexpr int kFp8DequantizeRows =
    kFp8DequantizeThreads / kFp8DequantizeUnits * kFp8DequantizeRowsPerThread;

// Grid: x over kFp8DequantizeRows rows of a part, y over kFp8DequantizeUnits
// units, z over parts. Bound by memory like nvfp4_dequantize_kernel, and with
// the same four loads in flight.
template <class Format, bool kBlockScales>
__global__ void __launch_bounds__(kFp8DequantizeThreads)
    fp8_dequantize_kernel(Fp8DequantizeParams<Format> p) {
  constexpr int kRowStep = kFp8DequantizeThreads / kFp8DequantizeUnits;
  const int unit =
      blockIdx.y * kFp8DequantizeUnits + threadIdx.x % kFp8DequantizeUnits;
  if (unit >= p.units) return;
  const i64 first = static_cast<i64>(blockIdx.x) * kFp8DequantizeRows +
                    threadIdx.x / kFp8DequantizeUnits;
  const i64 first_row = p.first_row + blockIdx.z * p.part_rows;
  const i64 out_row = blockIdx.z * p.rows;
  const uint2* weight = reinterpret_cast<const uint2*>(p.weight);
  uint2 codes[kFp8DequantizeRowsPerThread];
  float scales[kFp8DequantizeRowsPerThread];
#pragma unroll
  for (int i = 0; i < kFp8DequantizeRowsPerThread; ++i) {
    const i64 row = first + i * kRowStep;
    if (row < p.rows) {
      const i64 n = first_row + row;
      codes[i] = __ldg(weight + n * p.units + unit);
      scales[i] =
          __ldg(p.scales +
                (kBlockScales ? (n / 128) * p.scale_stride + unit / 16 : n));
    }
  }
#pragma unroll
  for (int i = 0; i < kFp8DequantizeRowsPerThread; ++i) {
    const i64 row = first + i * kRowStep;
    if (row < p.rows) {
      float values[8];
      floats_from_e4m3x4(codes[i].x, values);
      floats_from_e4m3x4(codes[i].y, values + 4);
#pragma unroll
      for (float& value : values) value *= scales[i];
      store_x8<Format>(p.out, (out_row + row) * p.units + unit, values);
    }
  }
}

}  // namespace vllm::sm70

SM70_ENTRY(vllm::sm70::kFp8DequantizeThreads, 0, false,
           vllm::sm70::fp8_dequantize_kernel<vllm::sm70::Fp16, true>)
SM70_ENTRY(vllm::sm70::kFp8DequantizeThreads, 0, false,
           vllm::sm70::fp8_dequantize_kernel<vllm::sm70::Fp16, false>)
SM70_ENTRY(vllm::sm70::kFp8DequantizeThreads, 0, false,
           vllm::sm70::fp8_dequantize_kernel<vllm::sm70::Bf16, true>)
SM70_ENTRY(vllm::sm70::kFp8DequantizeThreads, 0, false,
           vllm::sm70::fp8_dequantize_kernel<vllm::sm70::Bf16, false>)
SM70_ENTRY(vllm::sm70::kFp8DequantizeThreads, 0, false,
           vllm::sm70::fp8_dequantize_kernel<vllm::sm70::Fp32, true>)
SM70_ENTRY(vllm::sm70::kFp8DequantizeThreads, 0, false,
           vllm::sm70::fp8_dequantize_kernel<vllm::sm70::Fp32, false>)
