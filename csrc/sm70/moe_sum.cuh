// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// out[t] = the sum over the j whose expert is local of row t * k + j, in ascending
// order, in FP32: the end of each tile of a mixture of experts. That of j = 0 is in
// out[t] already, the others are in `partial` [T * (k - 1), width].
#pragma once

#include "kernel_entry.h"
#include "moe_device.h"

namespace vllm::sm70 {

template <class Format, class Id>
struct MoeSumParams {
  MoeChoiceParams<Id> choice;
  const typename Format::Storage* partial;  // 16-byte aligned
  typename Format::Storage* out;            // rows 16-byte aligned
  i64 out_stride;                           // elements
  int width;
  int units;  // of 8 columns, in a row of `out`
  int top_k;
  i64 total;  // tokens * units
};

constexpr int kMoeSumThreads = 256;

// Grid: x over units of 8 columns, row by row.
template <class Format, class Id>
__global__ void __launch_bounds__(kMoeSumThreads)
    moe_sum_kernel(MoeSumParams<Format, Id> p) {
  const i64 index = static_cast<i64>(blockIdx.x) * kMoeSumThreads + threadIdx.x;
  if (index >= p.total) return;
  const int token = static_cast<int>(index / p.units);
  const int unit = static_cast<int>(index % p.units);
  typename Format::Storage* const out = p.out + token * p.out_stride;
  float sums[8] = {};
  const int row = token * p.top_k;
#pragma unroll 4
  for (int j = 0; j < p.top_k; ++j) {
    if (local_expert(p.choice, row + j) < 0) continue;
    const i64 partial_row = moe_partial_row(row + j, token);
    const typename Format::Storage* const from =
        j == 0 ? out : p.partial + partial_row * p.width;
    float values[8];
    // Read once, so it need not push activated rows out of the L2 cache. Not with
    // __ldg: `out` is written below.
    floats_from_x8<Format>(__ldcs(reinterpret_cast<const uint4*>(from) + unit),
                           values);
#pragma unroll
    for (int i = 0; i < 8; ++i) sums[i] += values[i];
  }
  store_x8<Format>(out, unit, sums);
}

}  // namespace vllm::sm70

SM70_ENTRY(vllm::sm70::kMoeSumThreads, 0, false,
           vllm::sm70::moe_sum_kernel<vllm::sm70::Fp16, int>)
SM70_ENTRY(vllm::sm70::kMoeSumThreads, 0, false,
           vllm::sm70::moe_sum_kernel<vllm::sm70::Fp16, vllm::sm70::i64>)
SM70_ENTRY(vllm::sm70::kMoeSumThreads, 0, false,
           vllm::sm70::moe_sum_kernel<vllm::sm70::Bf16, int>)
SM70_ENTRY(vllm::sm70::kMoeSumThreads, 0, false,
           vllm::sm70::moe_sum_kernel<vllm::sm70::Bf16, vllm::sm70::i64>)
