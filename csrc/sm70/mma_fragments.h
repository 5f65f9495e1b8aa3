// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Two tensor-core instructions with the places of their elements, which the PTX
// ISA documents (wmma's are opaque): a warp can decode weights straight into the
// registers that it multiplies from.
//
// Both serve 32 rows of a weight ("A") and 8 tokens ("B") at a time, and take 4
// chunks of each lane in a step: 4 chunks of K for each of the 32 rows. A
// product's K may be permuted as long as A and B agree. So a lane's chunk, a run
// of K in memory, fills the places that the lane has in one instruction after
// the other.
#pragma once

#include "fp_formats.h"

namespace vllm::sm70 {

constexpr int kMmaRows = 32;
constexpr int kMmaTokens = 8;
constexpr int kMmaChunks = 4;

// mma.m8n8k4, the instruction of sm_70. The lanes form four groups of eight;
// each multiplies 8 rows with the 8 tokens. A lane holds one row, and one token.
// Later GPUs have no such hardware: right results, slowly.
struct Mma884 {
  static constexpr int kSums = 8;         // of a lane, for 8 tokens
  static constexpr int kRowsOfLane = 1;   // whose chunks it loads
  static constexpr int kTokenChunks = 4;  // of x, that it needs in a step

  __device__ static int lane_in_group() {
    return (threadIdx.x & 3) + ((threadIdx.x & 16) >> 2);
  }
  // Of chunk i of this lane.
  __device__ static int row(int) {
    return ((threadIdx.x >> 2) & 3) * 8 + lane_in_group();
  }
  __device__ static int chunk(int i) { return i; }
  __device__ static int token() { return lane_in_group(); }
  // Of sum i of this lane.
  __device__ static int sum_row(int i) {
    return ((threadIdx.x >> 2) & 3) * 8 + (threadIdx.x & 1) + (i & 2) +
           ((threadIdx.x & 16) >> 2);
  }
  __device__ static int sum_token(int i) {
    return (i & 4) + (threadIdx.x & 2) + (i & 1);
  }

  __device__ static void multiply(float (&sums)[kSums], u32 a0, u32 a1, u32 b0,
                                  u32 b1) {
    asm volatile(
        "mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9}, {%10, %11}, "
        "{%0, %1, %2, %3, %4, %5, %6, %7};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]),
          "+f"(sums[4]), "+f"(sums[5]), "+f"(sums[6]), "+f"(sums[7])
        : "r"(a0), "r"(a1), "r"(b0), "r"(b1));
  }
};

// mma.m16n8k16, the instruction of sm_80 and later. A lane holds two rows of 16
// (so four of 32), and one token, and a quarter of K of each.
struct Mma16816 {
  static constexpr int kSums = 8;  // of a lane: four for each 16 rows
  static constexpr int kRowsOfLane = 4;
  static constexpr int kTokenChunks = 1;

  __device__ static int row(int i) { return (threadIdx.x & 31) / 4 + 8 * i; }
  __device__ static int chunk(int) { return threadIdx.x & 3; }
  __device__ static int token() { return (threadIdx.x & 31) / 4; }
  __device__ static int sum_row(int i) {
    return (i & 4) * 4 + (i & 2) * 4 + (threadIdx.x & 31) / 4;
  }
  __device__ static int sum_token(int i) {
    return (threadIdx.x & 3) * 2 + (i & 1);
  }

  // Rows 16 * kHalf and up. a0 and a2 belong to the lane's first row of these, a1
  // and a3 to its second; b0 goes with a0 and a1.
  template <int kHalf = 0, int kSize>
  __device__ static void multiply(float (&sums)[kSize], u32 a0, u32 a1, u32 a2,
                                  u32 a3, u32 b0, u32 b1) {
    static_assert(kSize >= 4 * kHalf + 4);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    float* const c = sums + 4 * kHalf;
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#endif
  }
};

template <class Mma>
constexpr bool kHasMma = true;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
template <>
constexpr bool kHasMma<Mma16816> = false;
#endif

}  // namespace vllm::sm70
