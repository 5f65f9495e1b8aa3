// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// out = x @ W^T + bias for one to four rows of x ("tokens"): the part that does
// not depend on the weight's format.
//
// Bound by the memory that the packed weight is read from. A thread owns one
// chunk of K, and keeps its part of x in registers as FP32; the block goes
// through the rows of W that it owns, kRows at a time, so a warp reads 512 (or
// 256) bytes of each row without a gap and each thread has kRows independent
// loads in flight. Where K has more chunks than the block has threads, the block
// goes through its rows once for each tile of K, and keeps the sums of the tiles
// before in shared memory.
//
// Every sum is made in an order that depends on K and the block size alone: no
// atomics, and two runs give the same bits. Products and sums are FP32.
#pragma once

#include "device_vec.h"

namespace vllm::sm70 {

template <class Format>
struct GemvParams {
  const typename Format::Storage* x;     // [m, K]; rows 16-byte aligned
  const typename Format::Storage* bias;  // [n], or null
  typename Format::Storage* out;         // [m, n]
  i64 x_stride;                          // elements from one row to the next
  i64 out_stride;
  int m;
  int n;
  int chunks;  // K / Weight::kCodes
};

// Sums that a block keeps between tiles of K, at most. The launch sees to it.
constexpr int kGemvMaxTotals = 1024;

// Adds `values` over the 32 lanes of a warp, kCount (a power of two up to 32)
// sums at once: each exchange with the lane at kOffset leaves half as many. Lane
// l returns the sum with index l / (32 / kCount).
template <int kCount, int kOffset = 16, int kSize>
__device__ __forceinline__ float sum_over_lanes(float (&values)[kSize]) {
  if constexpr (kCount > 1) {
    const bool upper = (threadIdx.x & kOffset) != 0;
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      const float sent = upper ? values[i] : values[i + kCount / 2];
      const float kept = upper ? values[i + kCount / 2] : values[i];
      values[i] = kept + __shfl_xor_sync(0xffffffffu, sent, kOffset);
    }
    return sum_over_lanes<kCount / 2, kOffset / 2>(values);
  } else if constexpr (kOffset > 0) {
    values[0] += __shfl_xor_sync(0xffffffffu, values[0], kOffset);
    return sum_over_lanes<1, kOffset / 2>(values);
  } else {
    return values[0];
  }
}

// Weight is a view of the weight that a kernel makes of its parameters:
//   kCodes                            elements of a chunk: 16 or 32
//   Chunk                             a chunk as it is loaded
//   Chunk load(row, chunk)
//   float scale(row, chunk)           one factor for kRows rows from `row` on
//   add(chunk, scale, x, sums)        sums[t] += chunk . x[t], times `scale`
//   float finish(sum, row)            the last factor
//
// Grid: x over shares of the rows of W, y over groups of kTokens rows of x.
// Block: whole warps, at most kMaxThreads.
template <class Format, class Weight, int kTokens, int kRows, int kMaxThreads>
__device__ __forceinline__ void gemv(const GemvParams<Format>& p,
                                     const Weight& weight) {
  constexpr int kCodes = Weight::kCodes;
  constexpr int kValues = kRows * kTokens;
  constexpr bool kAhead = kTokens == 1;
  struct Unit {
    typename Weight::Chunk chunks[kRows];
  };
  static_assert(kValues <= 32 && (kValues & (kValues - 1)) == 0);
  __shared__ float partials[2][kMaxThreads / 32][kValues];
  __shared__ float totals[kGemvMaxTotals];

  const int thread = threadIdx.x;
  const int warps = blockDim.x / 32;
  const int first_token = blockIdx.y * kTokens;
  // Units of kRows rows, shared out evenly.
  const i64 units = (p.n + kRows - 1) / kRows;
  const int unit_begin = static_cast<int>(units * blockIdx.x / gridDim.x);
  const int unit_end = static_cast<int>(units * (blockIdx.x + 1) / gridDim.x);

  int buffer = 0;
  for (int tile = 0; tile == 0 || tile < p.chunks; tile += blockDim.x) {
    const int chunk = tile + thread;
    const bool has_chunk = chunk < p.chunks;
    float x[kTokens][kCodes];
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      const bool has_token = has_chunk && first_token + t < p.m;
#pragma unroll
      for (int i = 0; i < kCodes; i += 8) {
        float values[8] = {};
        if (has_token) {
          load_x8<Format>(p.x + (first_token + t) * p.x_stride,
                          static_cast<i64>(chunk) * (kCodes / 8) + i / 8,
                          values);
        }
#pragma unroll
        for (int j = 0; j < 8; ++j) x[t][i + j] = values[j];
      }
    }

    const auto load = [&](int unit) {
      Unit result{};
      if (has_chunk && unit < unit_end) {
        const int row = unit * kRows;
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          // Past the last row: that row again, whose sums are not used.
          result.chunks[r] = weight.load(min(row + r, p.n - 1), chunk);
        }
      }
      return result;
    };
    Unit next{};
    if constexpr (kAhead) next = load(unit_begin);
    for (int unit = unit_begin; unit < unit_end; ++unit) {
      const int row = unit * kRows;
      const Unit present = kAhead ? next : load(unit);
      if constexpr (kAhead) next = load(unit + 1);
      float sums[kValues] = {};
      if (has_chunk) {
        const float scale = weight.scale(row, chunk);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          weight.template add<kTokens>(present.chunks[r], scale, x,
                                       sums + r * kTokens);
        }
      }
      const float sum = sum_over_lanes<kValues>(sums);
      constexpr int kLanesEach = 32 / kValues;
      if (thread % kLanesEach == 0) {
        partials[buffer][thread / 32][thread % 32 / kLanesEach] = sum;
      }
      // One barrier for each unit is enough: whoever writes this buffer again
      // has passed the next unit's barrier, and so have its readers.
      __syncthreads();
      if (thread < kValues) {
        float& kept = totals[(unit - unit_begin) * kValues + thread];
        const bool is_last_tile = tile + blockDim.x >= p.chunks;
        float total = tile == 0 ? 0.0f : kept;
        for (int w = 0; w < warps; ++w) total += partials[buffer][w][thread];
        const int n = row + thread / kTokens;
        const int token = first_token + thread % kTokens;
        if (!is_last_tile) {
          kept = total;
        } else if (n < p.n && token < p.m) {
          float result = weight.finish(total, n);
          if (p.bias != nullptr) result += Format::value(u32{p.bias[n]});
          p.out[token * p.out_stride + n] = Format::bits(result);
        }
      }
      buffer ^= 1;
    }
  }
}

}  // namespace vllm::sm70
