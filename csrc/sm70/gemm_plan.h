// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// What cuBLAS is asked about for the product of a tile. Nothing here touches a
// device.
#pragma once

#include <cstdint>

namespace vllm::sm70 {

// The buffers of all tiles in flight: WEIGHT_SCRATCH_BYTES of tiling.py.
inline constexpr int64_t kTileBytes = int64_t{40} << 20;
inline constexpr int64_t kFewestTileColumns = 128;
inline constexpr int64_t kMostTileColumns = 4096;

// The N for which the algorithm of a product of depth K is chosen: the largest
// power of two that the buffers hold of such columns, in FP16. A deep weight's
// tiles are narrow, and at 1,024 tokens the blocks that suit 4096 columns leave
// most of a GPU idle there (down at TP1 on an H200: 0.92 ms, and 0.33 with those
// that suit 1024).
inline int64_t usual_tile_columns(int64_t k) {
  int64_t columns = kMostTileColumns;
  while (columns > kFewestTileColumns && columns * 2 > kTileBytes / k) {
    columns /= 2;
  }
  return columns;
}

}  // namespace vllm::sm70
