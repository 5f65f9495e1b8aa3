// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// How the work of a small multiplication is shared out: numbers in, grids out.
// Nothing here touches a device.
#pragma once

#include <algorithm>
#include <cstdint>

namespace vllm::sm70 {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A launch of gemv.h.
struct GemvPlan {
  int threads;     // of a block
  int64_t shares;  // of the rows of W: the grid's x
  int64_t groups;  // of the rows of x: the grid's y
};

// m, n, chunks:  rows of x, rows of W, chunks of K
// tokens, rows:  rows of x and of W that a block works on at once
// max_threads:   of a block; registers allow two such blocks a multiprocessor
// max_totals:    sums that a block can keep between tiles of K
inline GemvPlan plan_gemv(int64_t m, int64_t n, int64_t chunks, int tokens,
                          int rows, int max_threads, int64_t max_totals,
                          int multiprocessors) {
  // As few tiles of K as there must be, all about as long.
  const int64_t tiles = std::max<int64_t>(1, ceil_div(chunks, max_threads));
  const int threads = static_cast<int>(
      std::max<int64_t>(32, ceil_div(ceil_div(chunks, tiles), 32) * 32));
  const int64_t units = ceil_div(n, rows);
  const int blocks_each = std::min(2 * max_threads / threads, 16);
  // All blocks are resident at once and have the same number of units, give or
  // take one.
  int64_t units_each = ceil_div(
      units, static_cast<int64_t>(multiprocessors) * std::max(blocks_each, 1));
  if (tiles > 1)
    units_each = std::min(units_each, max_totals / (rows * tokens));
  return {threads, ceil_div(units, std::max<int64_t>(1, units_each)),
          ceil_div(m, tokens)};
}

// What nvfp4_mma_gemv.cuh takes: one row of x, of at most `max_k` elements, which
// it keeps in shared memory, and chunks of 32 codes that 32 bits can count.
inline bool takes_mma_gemv(int64_t m, int64_t n, int64_t k, int64_t max_k) {
  return m == 1 && k > 0 && k % 32 == 0 && k <= max_k &&
         n * (k / 32) <= 0xffffffff;
}

// Its blocks, which stay and take turns on the groups of rows.
// blocks:        of a multiprocessor, as registers allow
// block_bytes:   of shared memory, of a block; shared_bytes: of a multiprocessor
inline int64_t plan_mma_gemv(int64_t groups, int64_t blocks,
                             int64_t block_bytes, int64_t shared_bytes,
                             int64_t multiprocessors) {
  // A launch reserves a KiB for itself.
  const int64_t fit = shared_bytes / (block_bytes + 1024);
  const int64_t resident = std::max<int64_t>(1, std::min(blocks, fit));
  return std::min(groups, resident * multiprocessors);
}

// A launch of tensor_gemm.h.
struct TensorPlan {
  int64_t tiles;   // of the output: the grid's x
  int64_t splits;  // parts of K: the grid's y
};

// A split reads less of x for each block and keeps more memory requests in
// flight, but costs a second kernel: K is split only where the tiles alone leave
// multiprocessors without two blocks each, and into parts of eight stages at
// least. asked: a number of splits, or 0.
inline TensorPlan plan_tensor(int64_t m, int64_t n, int64_t k, int tile_m,
                              int tile_n, int stage_k, int multiprocessors,
                              int64_t asked) {
  const int64_t tiles = ceil_div(m, tile_m) * ceil_div(n, tile_n);
  const int64_t stages = ceil_div(k, stage_k);
  const int64_t wanted =
      asked != 0 ? asked : (2 * multiprocessors + tiles / 2) / tiles;
  const int64_t most = asked != 0 ? stages : std::min<int64_t>(8, stages / 8);
  return {tiles, std::max<int64_t>(1, std::min(wanted, most))};
}

}  // namespace vllm::sm70
