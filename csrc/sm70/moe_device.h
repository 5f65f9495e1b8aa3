// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// What the kernels of a mixture of experts share on the device: which expert a
// row goes to, which expert a position or a tile belongs to, the activations, and
// the parameters of a product over the experts. moe_args.h has the names.
#pragma once

#include "device_vec.h"
#include "moe_activation.h"

namespace vllm::sm70 {

// Which expert each row goes to.
template <class Id>  // int or i64
struct MoeChoiceParams {
  const Id* topk_ids;     // [rows]
  const int* expert_map;  // [global_experts], or null
  int global_experts;
  int local_experts;
  int rows;  // T * top_k
};

// A row's local expert, or -1.
template <class Id>
__device__ __forceinline__ int local_expert(const MoeChoiceParams<Id>& p,
                                            int row) {
  const Id id = __ldg(p.topk_ids + row);
  if (id < 0 || id >= p.global_experts) return -1;
  const int expert =
      p.expert_map == nullptr ? static_cast<int>(id) : __ldg(p.expert_map + id);
  return expert >= 0 && expert < p.local_experts ? expert : -1;
}

// The first of the tiles of `rows` positions that are set aside for an expert
// which begins at position `offset`. Every expert gets as many as it needs: one
// of n positions gets at least floor(n / rows) + 1. So a tile's expert is found
// without a sum over the experts; some tiles stay empty. All lie below
// start(E, expert_offsets[E]).
__device__ __forceinline__ int moe_tile_start(int expert, int offset,
                                              int rows) {
  return offset / rows + expert;
}

// The largest e < count with key(e) <= wanted, for keys that do not fall and
// key(0) <= wanted. By a whole warp, with two loads a lane for up to 1,024.
template <class Key>
__device__ __forceinline__ int find_last(int count, int wanted,
                                         const Key& key) {
  const int lane = threadIdx.x % 32;
  int begin = 0;
  for (int length = count; length > 1;) {
    const int step = (length + 31) / 32;
    const int candidate = begin + lane * step;
    const bool fits =
        lane * step < length && candidate < count && key(candidate) <= wanted;
    const u32 mask = __ballot_sync(0xffffffffu, fits);
    begin += (31 - __clz(mask)) * step;
    length = step;
  }
  return begin;
}

// Without `up`. Formulas as on the CPU (moe_cpu.h).
__device__ __forceinline__ float moe_activate(MoeActivation activation,
                                              float x) {
  switch (activation) {
    case MoeActivation::kSilu:
    case MoeActivation::kSiluNoMul:
      return x / (1.0f + expf(-x));
    case MoeActivation::kGeluTanh:
    case MoeActivation::kGeluTanhNoMul:
      return x / (1.0f + expf(x * (x * x * 0.044715f + 1.0f) * -1.595769122f));
    case MoeActivation::kGelu:
    case MoeActivation::kGeluNoMul:
      return 0.5f * x * erfcf(x * -0.707106781f);
    case MoeActivation::kRelu2NoMul: {
      const float positive = x < 0.0f ? 0.0f : x;
      return positive * positive;
    }
    case MoeActivation::kNone:
      break;
  }
  return x;
}

// One product over the experts, either of the two. An expert has one or two
// (gate, up) halves [n, k]; columns [begin_n, end_n) of the product are made.
//
// The first has top_k: x is read at row sorted_rows[p] / top_k, and out is written
// at p. The second has sum_k: x is read at p, and the result goes where the sum
// over the top-k looks for it (moe_out_row).
template <class Format>
struct MoeGemmParams {
  const typename Format::Storage* x;  // rows 16-byte aligned
  typename Format::Storage* out;      // rows 16-byte aligned, begin_n first
  typename Format::Storage* sum;      // likewise: the rows of the sum
  const u8* codes;                    // 16-byte aligned
  const float* scales;
  const int* sorted_rows;
  const int* expert_offsets;
  const float* topk_weights;  // [rows], or null
  i64 x_stride;               // elements from one row to the next
  i64 out_stride;
  i64 sum_stride;
  int scale_stride;  // scales in a row of blocks; 1 for scales of rows
  int scale_rows;    // rows of blocks, or of scales, in a half
  int experts;
  int n;
  int k;
  int begin_n;
  int end_n;
  int top_k;     // of the first product; 0: this is the second
  int sum_k;     // of the second product; 0: this is the first
  bool reverse;  // tensor cores only: the grid's blocks in descending order
  MoeActivation activation;
};

// Row t * k + j of token t, j >= 1, as it is counted where j = 0 is left out: token
// t has k - 1 rows there, from t * (k - 1) on.
__device__ __forceinline__ int moe_partial_row(int row, int token) {
  return row - token - 1;
}

// Where the product of a position and its row is written: that of a token's first
// expert in the place of the sum itself, which reads it there, and those of the
// others one after another in `out`.
template <class Format>
__device__ __forceinline__ typename Format::Storage* moe_out_row(
    const MoeGemmParams<Format>& p, int position, int row) {
  if (p.sum_k == 0) return p.out + position * p.out_stride;
  const int token = row / p.sum_k;
  return row == token * p.sum_k
             ? p.sum + token * p.sum_stride
             : p.out + moe_partial_row(row, token) * p.out_stride;
}

}  // namespace vllm::sm70
