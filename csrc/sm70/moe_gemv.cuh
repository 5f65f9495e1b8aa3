// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// A product over the experts for decode: few rows for each expert, bound by the
// memory that the touched experts' codes are read from.
//
// A warp makes up to kTokens rows of one expert by a unit of kRows rows of its
// weight (half of them gates and half their ups where there is a gate). Its lanes
// stand side by side along K, 16 codes each, with kRows independent loads in
// flight; the sums of the lanes are added up at the end. Products and sums are
// FP32, in an order that depends on K alone.
#pragma once

#include "fp8_gemv_weight.h"
#include "gemv.h"
#include "kernel_entry.h"
#include "moe_device.h"

namespace vllm::sm70 {

// For four tokens x takes 64 registers of a thread, else 32 or fewer.
template <int kTokens>
constexpr int kMoeGemvRows = kTokens == 4 ? 4 : 8;
template <int kTokens>
constexpr int kMoeGemvThreads = kTokens == 4 ? 128 : 256;
template <int kTokens>
constexpr int kMoeGemvBlocks = kTokens == 4 ? 3 : 2;  // of a multiprocessor

// Grid: x over units in steps of the grid's warps, y over positions. The block of
// a position at which no group of kTokens begins has nothing to do.
template <class Format, bool kBlockScales, bool kGated, int kTokens>
__global__ void __launch_bounds__(kMoeGemvThreads<kTokens>,
                                  kMoeGemvBlocks<kTokens>)
    moe_gemv_kernel(MoeGemmParams<Format> p) {
  constexpr int kRows = kMoeGemvRows<kTokens>;
  constexpr int kColumns = kGated ? kRows / 2 : kRows;  // of a unit
  constexpr int kValues = kRows * kTokens;
  constexpr int kLanesEach = 32 / kValues;
  using Weight = Fp8GemvWeight<kBlockScales>;
  const int first = blockIdx.y;
  if (first >= __ldg(p.expert_offsets + p.experts)) return;
  const int expert = find_last(
      p.experts, first, [&](int e) { return __ldg(p.expert_offsets + e); });
  if ((first - __ldg(p.expert_offsets + expert)) % kTokens != 0) return;
  const int count = min(kTokens, __ldg(p.expert_offsets + expert + 1) - first);

  const int lane = threadIdx.x % 32;
  const int warp =
      blockIdx.x * (kMoeGemvThreads<kTokens> / 32) + threadIdx.x / 32;
  const int warps = gridDim.x * (kMoeGemvThreads<kTokens> / 32);
  const int chunks = p.k / 16;
  const typename Format::Storage* x_rows[kTokens];
#pragma unroll
  for (int t = 0; t < kTokens; ++t) {
    // Past the last row: the first again, whose sums are not used.
    const int position = t < count ? first + t : first;
    const int row =
        p.top_k == 0 ? position : __ldg(p.sorted_rows + position) / p.top_k;
    x_rows[t] = p.x + row * p.x_stride;
  }
  constexpr int kHalves = kGated ? 2 : 1;
  Weight weights[kHalves];
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    const i64 at = static_cast<i64>(expert) * kHalves + half;
    weights[half] = {p.codes + at * p.n * p.k,
                     p.scales + at * p.scale_rows * p.scale_stride, chunks,
                     p.scale_stride};
  }

  for (int unit = warp; p.begin_n + unit * kColumns < p.end_n; unit += warps) {
    const int column = p.begin_n + unit * kColumns;
    float sums[kValues] = {};
    for (int chunk = lane; chunk < chunks; chunk += 32) {
      typename Weight::Chunk codes[kRows];
      float scales[kHalves];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        codes[r] = weights[r / kColumns].load(column + r % kColumns, chunk);
      }
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        scales[half] = weights[half].scale(column, chunk);
      }
      float x[kTokens][16];
#pragma unroll
      for (int t = 0; t < kTokens; ++t) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float values[8];
          load_x8<Format>(x_rows[t], 2 * chunk + i, values);
#pragma unroll
          for (int j = 0; j < 8; ++j) x[t][8 * i + j] = values[j];
        }
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        weights[r / kColumns].template add<kTokens>(
            codes[r], scales[r / kColumns], x, sums + r * kTokens);
      }
    }
    float sum = sum_over_lanes<kValues>(sums);
    // Lane l has the sum of row r and token t of the unit.
    const int r = lane / kLanesEach / kTokens;
    const int t = lane / kLanesEach % kTokens;
    const int n = column + r % kColumns;
    const int position = first + (t < count ? t : 0);
    const int row = __ldg(p.sorted_rows + position);
    sum = kGated && r >= kColumns ? weights[kHalves - 1].finish(sum, n)
                                  : weights[0].finish(sum, n);
    if (p.topk_weights != nullptr) sum *= __ldg(p.topk_weights + row);
    // The ups are in the upper lanes.
    float up = 1.0f;
    if constexpr (kGated) up = __shfl_xor_sync(0xffffffffu, sum, 16);
    if (lane % kLanesEach == 0 && r < kColumns && t < count) {
      float result = moe_activate(p.activation, sum);
      if constexpr (kGated) result *= up;
      moe_out_row(p, position, row)[n - p.begin_n] = Format::bits(result);
    }
  }
}

}  // namespace vllm::sm70

#define SM70_MOE_GEMV(Format, block_scales, gated, tokens)                 \
  SM70_ENTRY(vllm::sm70::kMoeGemvThreads<tokens>, 0, false,                \
             vllm::sm70::moe_gemv_kernel<vllm::sm70::Format, block_scales, \
                                         gated, tokens>)
SM70_MOE_GEMV(Fp16, true, true, 1)
SM70_MOE_GEMV(Fp16, true, true, 2)
SM70_MOE_GEMV(Fp16, true, true, 4)
SM70_MOE_GEMV(Fp16, true, false, 1)
SM70_MOE_GEMV(Fp16, true, false, 2)
SM70_MOE_GEMV(Fp16, true, false, 4)
SM70_MOE_GEMV(Fp16, false, true, 1)
SM70_MOE_GEMV(Fp16, false, true, 2)
SM70_MOE_GEMV(Fp16, false, true, 4)
SM70_MOE_GEMV(Fp16, false, false, 1)
SM70_MOE_GEMV(Fp16, false, false, 2)
SM70_MOE_GEMV(Fp16, false, false, 4)
SM70_MOE_GEMV(Bf16, true, true, 1)
SM70_MOE_GEMV(Bf16, true, true, 2)
SM70_MOE_GEMV(Bf16, true, true, 4)
SM70_MOE_GEMV(Bf16, true, false, 1)
SM70_MOE_GEMV(Bf16, true, false, 2)
SM70_MOE_GEMV(Bf16, true, false, 4)
SM70_MOE_GEMV(Bf16, false, true, 1)
SM70_MOE_GEMV(Bf16, false, true, 2)
SM70_MOE_GEMV(Bf16, false, true, 4)
SM70_MOE_GEMV(Bf16, false, false, 1)
SM70_MOE_GEMV(Bf16, false, false, 2)
SM70_MOE_GEMV(Bf16, false, false, 4)
#undef SM70_MOE_GEMV
