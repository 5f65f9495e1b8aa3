// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Which kernel makes the products of a mixture of experts, and how the second one
// is cut into tiles: numbers in, numbers out. Nothing here touches a device.
#pragma once

#include <algorithm>
#include <cstdint>

#include "small_gemm_plan.h"

namespace vllm::sm70 {

// By the rows of one expert that they make at once (see moe_ops.cu).
constexpr int kMoeKernels[] = {1, 2, 4, 16, 64, 128};
// Up to how many rows of an expert, on average, kernels 1, 2 and 16 are chosen. From
// each kernel's time on an H200 for hidden 2048 and 256 experts top-8, and for hidden
// 2560 and 512 experts top-10: 2 overtakes 1 at about 0.6 rows; 16 overtakes 2
// somewhere above 2, with nothing measured up to 20; 64 overtakes 16 between 20 and
// 32, by the tiles that random routes need at about 29. 4 and 128 were never the
// fastest. Not measured on a V100.
constexpr double kMoeRowsOfKernel1 = 0.5;
constexpr double kMoeRowsOfKernel2 = 2;  // a batch with more is prefill
constexpr double kMoeRowsOfKernel16 = 28;
// The y of a grid.
constexpr int64_t kMoeGemvMaxRows = 65535;

// batch_tokens: tokens of the whole batch; tokens: those of this chunk of it.
//
// The two families, 1 to 4 and 16 to 128, sum up in different orders, so only what
// every chunk of a batch shares may decide between them. Within a family all make
// the same bits.
inline int moe_usual_kernel(int64_t batch_tokens, int64_t tokens, int64_t top_k,
                            int64_t experts) {
  const int64_t batch_rows = batch_tokens * top_k;
  const int64_t rows = tokens * top_k;
  if (batch_rows <= kMoeRowsOfKernel2 * experts &&
      batch_rows <= kMoeGemvMaxRows) {
    return tokens == 1 || rows <= kMoeRowsOfKernel1 * experts ? 1 : 2;
  }
  // The fewer rows an expert has, the more of a large tile stays empty.
  return rows <= kMoeRowsOfKernel16 * experts ? 16 : 64;
}

// Where tile `tile` of the second product begins on CUDA, of ceil(columns / width) of
// at most `width` columns, all of about as many units of 128 (of 16, where `width` is
// no multiple of 128). tile = their number: the end.
inline int64_t moe_tile_begin(int64_t tile, int64_t columns, int64_t width) {
  const int64_t unit = width % 128 == 0 ? 128 : 16;
  const int64_t units = ceil_div(columns, unit);
  return std::min(units * tile / ceil_div(columns, width) * unit, columns);
}

// The grid's x of moe_gemv.cuh. units: of the weight's rows, for each warp of a
// block; rows: of all experts. Where there are warps enough anyway, each goes
// through several units, so that finding the expert costs less.
inline int64_t moe_gemv_shares(int64_t units, int64_t rows, int warps) {
  const int64_t units_each = rows * units >= 16384 ? 4 : 1;
  return ceil_div(units, warps * units_each);
}

}  // namespace vllm::sm70
