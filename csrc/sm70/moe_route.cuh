// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The rows t * k + j grouped by local expert, in a stable order.
//
// A block serves two experts and reads all ids, twice: first it counts the rows of
// lower experts, which is where its own begin, and each warp's share of its own;
// then the warps write theirs. No block waits for another, and there is nothing to
// clear before: one launch, no atomics, the same order each time. For 65,536 rows
// and 256 experts that is 64 MiB of reads from the L2 cache.
#pragma once

#include "kernel_entry.h"
#include "moe_device.h"

namespace vllm::sm70 {

template <class Id>
struct MoeRouteParams {
  MoeChoiceParams<Id> choice;
  int* sorted_rows;
  int* expert_offsets;
};

constexpr int kMoeRouteThreads = 1024;
constexpr int kMoeRouteExperts = 2;  // of a block
constexpr int kMoeRouteUnroll = 8;   // loads in flight

// Grid: x over pairs of experts. Block: whole warps.
template <class Id>
__global__ void __launch_bounds__(kMoeRouteThreads)
    moe_route_kernel(MoeRouteParams<Id> p) {
  constexpr int kStep = 32 * kMoeRouteUnroll;
  constexpr int kCounts = kMoeRouteExperts + 1;  // lower ones, then each
  __shared__ int counts[kMoeRouteThreads / 32][kCounts];
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int warps = blockDim.x / 32;
  const int first = blockIdx.x * kMoeRouteExperts;
  const int rows = p.choice.rows;
  // Whole steps, so that only the last warp's rows end early.
  const int share = ((rows + warps - 1) / warps + kStep - 1) / kStep * kStep;
  const int begin = min(rows, warp * share);
  const int end = min(rows, begin + share);

  const auto load = [&](int at, int (&experts)[kMoeRouteUnroll]) {
#pragma unroll
    for (int i = 0; i < kMoeRouteUnroll; ++i) {
      const int row = at + 32 * i + lane;
      experts[i] = row < end ? local_expert(p.choice, row) : -1;
    }
  };

  int count[kCounts] = {};
  for (int at = begin; at < end; at += kStep) {
    int experts[kMoeRouteUnroll];
    load(at, experts);
#pragma unroll
    for (int i = 0; i < kMoeRouteUnroll; ++i) {
      count[0] += __popc(
          __ballot_sync(0xffffffffu, experts[i] >= 0 && experts[i] < first));
#pragma unroll
      for (int j = 0; j < kMoeRouteExperts; ++j) {
        count[1 + j] +=
            __popc(__ballot_sync(0xffffffffu, experts[i] == first + j));
      }
    }
  }
  if (lane == 0) {
#pragma unroll
    for (int j = 0; j < kCounts; ++j) counts[warp][j] = count[j];
  }
  __syncthreads();

  // Where each expert begins, and where this warp's rows of it do.
  int start[kMoeRouteExperts];
  int next = 0;
  for (int w = 0; w < warps; ++w) next += counts[w][0];
#pragma unroll
  for (int j = 0; j < kMoeRouteExperts; ++j) {
    if (threadIdx.x == 0 && first + j <= p.choice.local_experts) {
      p.expert_offsets[first + j] = next;
    }
    start[j] = next;
    for (int w = 0; w < warps; ++w) {
      if (w < warp) start[j] += counts[w][1 + j];
      next += counts[w][1 + j];
    }
  }
  if (threadIdx.x == 0 && first + kMoeRouteExperts == p.choice.local_experts) {
    p.expert_offsets[p.choice.local_experts] = next;
  }

  const u32 lower_lanes = (1u << lane) - 1;
  for (int at = begin; at < end; at += kStep) {
    int experts[kMoeRouteUnroll];
    load(at, experts);
#pragma unroll
    for (int i = 0; i < kMoeRouteUnroll; ++i) {
#pragma unroll
      for (int j = 0; j < kMoeRouteExperts; ++j) {
        const bool mine = experts[i] == first + j;
        const u32 mask = __ballot_sync(0xffffffffu, mine);
        if (mine) {
          p.sorted_rows[start[j] + __popc(mask & lower_lanes)] =
              at + 32 * i + lane;
        }
        start[j] += __popc(mask);
      }
    }
  }
}

}  // namespace vllm::sm70

SM70_ENTRY(vllm::sm70::kMoeRouteThreads, 0, false,
           vllm::sm70::moe_route_kernel<int>)
SM70_ENTRY(vllm::sm70::kMoeRouteThreads, 0, false,
           vllm::sm70::moe_route_kernel<vllm::sm70::i64>)
