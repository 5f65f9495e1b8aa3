// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// What cuBLAS is asked about for the product of a tile. Nothing here touches a
// device.
#pragma once

#include <cstdint>

namespace vllm::sm70 {

// WEIGHT_SCRATCH_BYTES and MIN_WIDTH of tiling.py.
inline constexpr int64_t kScratchBytes = int64_t{40} << 20;
inline constexpr int64_t kFewestColumns = 128;
inline constexpr int64_t kMostColumns = 4096;

// The N for which the algorithm of a product of depth k > 0 is chosen: the largest
// power of two whose columns, in 16 bits, the scratch of all tiles in flight holds,
// but at most kMostColumns. So many are in flight, by default, of a weight of k above
// 2560 that has power-of-two tiles, unless many tokens narrow a gated layer's. A deep
// weight's tiles are narrow, and at 1,024 tokens the blocks that suit 4096 columns
// leave most of a GPU idle there: down at TP1 on an H200 took 0.92 ms, with those that
// suit 1024 columns 0.33.
inline int64_t scratch_columns(int64_t k) {
  int64_t columns = kMostColumns;
  while (columns > kFewestColumns && columns * 2 > kScratchBytes / k) {
    columns /= 2;
  }
  return columns;
}

}  // namespace vllm::sm70
