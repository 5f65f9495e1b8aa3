// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Which kernel makes the products of a mixture of experts: numbers in, numbers
// out. Nothing here touches a device.
#pragma once

#include <algorithm>
#include <cstdint>

#include "small_gemm_plan.h"

namespace vllm::sm70 {

// By the rows of one expert that they make at once (see moe_ops.cu).
constexpr int kMoeKernels[] = {1, 2, 4, 16, 64, 128};
// A batch of more tokens, or more rows for each expert, is prefill.
constexpr int64_t kMoeDecodeTokens = 64;
constexpr int64_t kMoeDecodeRowsPerExpert = 2;
// The y of a grid.
constexpr int64_t kMoeGemvMaxRows = 65535;

// batch_tokens: tokens of the whole batch; tokens: those of this chunk of it.
//
// The two families, 1 to 4 and 16 to 128, sum up in different orders, so only what
// every chunk of a batch shares may decide between them. Within a family all make
// the same bits. Not measured on a V100.
inline int moe_usual_kernel(int64_t batch_tokens, int64_t tokens, int64_t top_k,
                            int64_t experts) {
  const int64_t rows = tokens * top_k;
  if (batch_tokens <= kMoeDecodeTokens &&
      batch_tokens * top_k <= kMoeDecodeRowsPerExpert * experts) {
    // An expert rarely has many more rows than the average.
    if (tokens == 1) return 1;
    return 2 * rows <= experts ? 2 : 4;
  }
  // The fewer rows an expert has, the more of a large tile stays empty.
  return rows <= 24 * experts ? 16 : 64;
}

// The grid's x of moe_gemv.cuh. units: of the weight's rows, for each warp of a
// block; rows: of all experts. Where there are warps enough anyway, each goes
// through several units, so that finding the expert costs less.
inline int64_t moe_gemv_shares(int64_t units, int64_t rows, int warps) {
  const int64_t units_each = rows * units >= 16384 ? 4 : 1;
  return ceil_div(units, warps * units_each);
}

}  // namespace vllm::sm70
