// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// out = x @ W^T + bias for one to four rows of x, W in FP8 E4M3 with one FP32
// scale for each block of 128 x 128 elements or for each row. See gemv.h and
// fp8_gemv_weight.h.
#pragma once

#include "fp8_gemv_weight.h"
#include "gemv.h"
#include "kernel_entry.h"

namespace vllm::sm70 {

template <class Format>
struct Fp8GemvParams {
  GemvParams<Format> gemv;
  const u8* codes;  // 16-byte aligned
  const float* scales;
  int scale_stride;  // block scales in a row of blocks
};

// For four tokens x takes 64 registers of a thread, else 32 or fewer.
template <int kTokens>
constexpr int kFp8GemvThreads = kTokens == 4 ? 256 : 320;

template <class Format, bool kBlockScales, int kTokens, int kRows>
__global__ void __launch_bounds__(kFp8GemvThreads<kTokens>, 2)
    fp8_gemv_kernel(Fp8GemvParams<Format> p) {
  const Fp8GemvWeight<kBlockScales> weight{p.codes, p.scales, p.gemv.chunks,
                                           p.scale_stride};
  gemv<Format, Fp8GemvWeight<kBlockScales>, kTokens, kRows,
       kFp8GemvThreads<kTokens>>(p.gemv, weight);
}

}  // namespace vllm::sm70

#define SM70_FP8_GEMV(Format, block_scales, tokens, rows)                  \
  SM70_ENTRY(vllm::sm70::kFp8GemvThreads<tokens>, 0, false,                \
             vllm::sm70::fp8_gemv_kernel<vllm::sm70::Format, block_scales, \
                                         tokens, rows>)
SM70_FP8_GEMV(Fp16, true, 1, 4)
SM70_FP8_GEMV(Fp16, true, 2, 4)
SM70_FP8_GEMV(Fp16, true, 4, 2)
SM70_FP8_GEMV(Fp16, true, 4, 4)
SM70_FP8_GEMV(Fp16, false, 1, 4)
SM70_FP8_GEMV(Fp16, false, 2, 4)
SM70_FP8_GEMV(Fp16, false, 4, 2)
SM70_FP8_GEMV(Fp16, false, 4, 4)
SM70_FP8_GEMV(Bf16, true, 1, 4)
SM70_FP8_GEMV(Bf16, true, 2, 4)
SM70_FP8_GEMV(Bf16, true, 4, 4)
SM70_FP8_GEMV(Bf16, false, 1, 4)
SM70_FP8_GEMV(Bf16, false, 2, 4)
SM70_FP8_GEMV(Bf16, false, 4, 4)
#undef SM70_FP8_GEMV
