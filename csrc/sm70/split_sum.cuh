// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// out = sum of the splits + bias: the end of a multiplication whose K was
// shared out (see tensor_gemm.h). In the order of the splits, in FP32.
#pragma once

#include "fp_formats.h"
#include "kernel_entry.h"

namespace vllm::sm70 {

template <class Format>
struct SplitSumParams {
  const float* sums;                     // [splits, m, n]
  const typename Format::Storage* bias;  // [n], or null
  typename Format::Storage* out;         // [m, n]
  i64 out_stride;                        // elements from one row to the next
  int splits;
  int m;
  int n;
};

constexpr int kSplitSumThreads = 256;

// Grid: x over columns, y over rows of `out` (in steps of gridDim.y).
template <class Format>
__global__ void __launch_bounds__(kSplitSumThreads)
    split_sum_kernel(SplitSumParams<Format> p) {
  const int n = blockIdx.x * kSplitSumThreads + threadIdx.x;
  if (n >= p.n) return;
  const float bias = p.bias == nullptr ? 0.0f : Format::value(u32{p.bias[n]});
  for (int m = blockIdx.y; m < p.m; m += gridDim.y) {
    float sum = 0.0f;
    for (int split = 0; split < p.splits; ++split) {
      sum += p.sums[(static_cast<i64>(split) * p.m + m) * p.n + n];
    }
    if (p.bias != nullptr) sum += bias;
    p.out[m * p.out_stride + n] = Format::bits(sum);
  }
}

}  // namespace vllm::sm70

SM70_ENTRY(vllm::sm70::kSplitSumThreads, 0, false,
           vllm::sm70::split_sum_kernel<vllm::sm70::Fp16>)
SM70_ENTRY(vllm::sm70::kSplitSumThreads, 0, false,
           vllm::sm70::split_sum_kernel<vllm::sm70::Bf16>)
