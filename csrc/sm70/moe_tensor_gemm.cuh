// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// A product over the experts on tensor cores, for prefill: a block makes kM rows
// of one expert by 128 rows of its weight (64 gates and their 64 ups, or 128).
// wmma 16 x 16 x 16 with FP32 accumulation, which every GPU from sm_70 on has.
//
// Rows of x are read where they are, through the routes; no permuted copy exists.
// Each thread holds its part of the next stage's rows and codes in registers
// (sm_70 has no asynchronous copy) and decodes the codes into shared memory, which
// is double-buffered: one barrier a stage.
//
// A warp owns 32 x 32 outputs (16 x 32 for kM = 16) and goes through all of K, in
// steps of 16 and in ascending order; with block scales the sum of each 128 of K
// is multiplied with the scale, in FP32, and added to the total. So every kM makes
// the same bits, and they depend on neither the other rows nor the columns that a
// launch makes. What is multiplied are the codes, which are exact: no weight is
// rounded.
#pragma once

#include "fp8_tensor_codes.h"
#include "kernel_entry.h"
#include "moe_device.h"

namespace vllm::sm70 {

template <int kTileM>
struct MoeTile {
  static constexpr int kM = kTileM;
  static constexpr int kN = 128;  // rows of the weight
  static constexpr int kWarpsN = 4;
  static constexpr int kWarpsM = kM == 16 ? 1 : 2;
  static constexpr int kFragmentsM = kM / 16 / kWarpsM;
  static constexpr int kThreads = 32 * kWarpsN * kWarpsM;
  // A chunk of codes for each of 256 threads, four for each of 128.
  static constexpr int kStageK = kM == 16 ? 64 : 32;
  // 16 bytes more than a row's elements: neighbouring rows lie in other banks.
  static constexpr int kStride = kStageK + 8;
  static constexpr int kStageElements = (kM + kN) * kStride;
  static constexpr int kSumStride = kN + 4;
  static constexpr int kStageBytes = 2 * 2 * kStageElements;
  static constexpr int kSumBytes = 4 * kM * kSumStride;
  static constexpr int kSharedBytes =
      kStageBytes > kSumBytes ? kStageBytes : kSumBytes;
  static constexpr int kChunksPerRow = kStageK / 16;
  static constexpr int kLoadsW = kN * kChunksPerRow / kThreads;
  static constexpr int kUnitsPerRow = kStageK / 8;
  static constexpr int kLoadsX = kM * kUnitsPerRow / kThreads;
  // Of a multiprocessor. The sums of kM = 128 fill one.
  static constexpr int kBlocks = kM == 128 ? 1 : 2;
  static_assert(kLoadsW * kThreads == kN * kChunksPerRow);
  static_assert(kLoadsX * kThreads == kM * kUnitsPerRow);
};

// Grid: x over tiles, those of the columns fastest. There are
// ceil((end_n - begin_n) / columns of a tile) of them for each of
// moe_tile_start(E, rows, kM) tiles of rows.
template <class Format, bool kBlockScales, bool kGated, int kM>
__global__ void __launch_bounds__(MoeTile<kM>::kThreads, MoeTile<kM>::kBlocks)
    moe_tensor_gemm_kernel(MoeGemmParams<Format> p) {
  if constexpr (kHasWmma<Format>) {
    namespace wmma = nvcuda::wmma;
    using Tile = MoeTile<kM>;
    using Element = typename WmmaElementOf<Format>::Type;
    using Accumulator = wmma::fragment<wmma::accumulator, 16, 16, 16, float>;
    using FragmentW =
        wmma::fragment<wmma::matrix_b, 16, 16, 16, Element, wmma::col_major>;
    using FragmentX =
        wmma::fragment<wmma::matrix_a, 16, 16, 16, Element, wmma::row_major>;
    constexpr int kColumns = kGated ? Tile::kN / 2 : Tile::kN;
    extern __shared__ __align__(128) unsigned char shared[];
    u16* const stages_memory = reinterpret_cast<u16*>(shared);

    // The expert, and this block's positions.
    const int tiles_n = (p.end_n - p.begin_n + kColumns - 1) / kColumns;
    const int index = p.reverse ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    const int tile = index / tiles_n;
    const int expert = find_last(p.experts, tile, [&](int e) {
      return moe_tile_start(e, __ldg(p.expert_offsets + e), kM);
    });
    const int expert_begin = __ldg(p.expert_offsets + expert);
    const int end = __ldg(p.expert_offsets + expert + 1);
    const int first =
        expert_begin + (tile - moe_tile_start(expert, expert_begin, kM)) * kM;
    if (first >= end) return;
    const int first_n = p.begin_n + index % tiles_n * kColumns;

    const int thread = threadIdx.x;
    // Not needed before the end, when there are registers for it again.
    __shared__ int place[4];
    if (thread == 0) {
      place[0] = expert;
      place[1] = first;
      place[2] = end;
      place[3] = first_n;
    }
    const int warp = thread / 32;
    const int warp_n = warp % Tile::kWarpsN;
    const int warp_m = warp / Tile::kWarpsN;
    const int stages = (p.k + Tile::kStageK - 1) / Tile::kStageK;
    const int halves = kGated ? 2 : 1;

    // Row r of the tile's 128: a warp's 32 are 16 gates and their ups, or 32
    // neighbours. Past the last row: that row again, whose sums are not used.
    const auto column_of = [&](int r) {
      return min(first_n + (kGated ? r / 32 * 16 + r % 16 : r), p.end_n - 1);
    };
    // In units of 16 codes and of 8 elements: pointers take twice the registers.
    int code_units[Tile::kLoadsW];
    const int row_units = p.k / 16;
#pragma unroll
    for (int i = 0; i < Tile::kLoadsW; ++i) {
      const int unit = thread + i * Tile::kThreads;
      const int r = unit / Tile::kChunksPerRow;
      const int half = kGated ? r / 16 % 2 : 0;
      const int row = (expert * halves + half) * p.n + column_of(r);
      code_units[i] = row * row_units + unit % Tile::kChunksPerRow;
    }
    int x_units[Tile::kLoadsX];
#pragma unroll
    for (int i = 0; i < Tile::kLoadsX; ++i) {
      const int unit = thread + i * Tile::kThreads;
      const int position = first + unit / Tile::kUnitsPerRow;
      x_units[i] = -1;  // no row
      if (position < end) {
        const int row =
            p.top_k == 0 ? position : __ldg(p.sorted_rows + position) / p.top_k;
        x_units[i] = static_cast<int>(row * (p.x_stride / 8)) +
                     unit % Tile::kUnitsPerRow;
      }
    }

    Fp8Chunk chunks[Tile::kLoadsW];
    uint4 x[Tile::kLoadsX];
    const auto load = [&](int stage) {
#pragma unroll
      for (int i = 0; i < Tile::kLoadsW; ++i) {
        const int k = stage * Tile::kStageK +
                      (thread + i * Tile::kThreads) % Tile::kChunksPerRow * 16;
        uint4 words = make_uint4(0, 0, 0, 0);
        if (k < p.k) {
          words = __ldg(reinterpret_cast<const uint4*>(p.codes) +
                        (code_units[i] + stage * Tile::kChunksPerRow));
        }
        chunks[i] = {{words.x, words.y, words.z, words.w}};
      }
#pragma unroll
      for (int i = 0; i < Tile::kLoadsX; ++i) {
        const int k = stage * Tile::kStageK +
                      (thread + i * Tile::kThreads) % Tile::kUnitsPerRow * 8;
        x[i] = make_uint4(0, 0, 0, 0);
        if (x_units[i] >= 0 && k < p.k) {
          x[i] = __ldg(reinterpret_cast<const uint4*>(p.x) +
                       (x_units[i] + stage * Tile::kUnitsPerRow));
        }
      }
    };

    // A fragment of 16 columns lies within one block of scales. Even lanes have the
    // first fragment's, odd lanes the second's.
    int lane_scales = 0;
    if constexpr (kBlockScales) {
      const int f = thread % 2;
      const int half = expert * halves + (kGated ? f : 0);
      const int block = column_of(warp_n * 32 + f * 16) / 128;
      lane_scales = (half * p.scale_rows + block) * p.scale_stride;
    }

    Accumulator sums[Tile::kFragmentsM][2];
    Accumulator products[Tile::kFragmentsM][2];
#pragma unroll
    for (int i = 0; i < Tile::kFragmentsM; ++i) {
#pragma unroll
      for (int f = 0; f < 2; ++f) {
        wmma::fill_fragment(sums[i][f], 0.0f);
        if constexpr (kBlockScales) wmma::fill_fragment(products[i][f], 0.0f);
      }
    }

    load(0);
    for (int stage = 0; stage < stages; ++stage) {
      u16* const rows = stages_memory + stage % 2 * Tile::kStageElements;
      u16* const weights = rows + kM * Tile::kStride;
#pragma unroll
      for (int i = 0; i < Tile::kLoadsW; ++i) {
        const int unit = thread + i * Tile::kThreads;
        store_fp8_chunk<Format>(
            chunks[i], weights + unit / Tile::kChunksPerRow * Tile::kStride +
                           unit % Tile::kChunksPerRow * 16);
      }
#pragma unroll
      for (int i = 0; i < Tile::kLoadsX; ++i) {
        const int unit = thread + i * Tile::kThreads;
        *reinterpret_cast<uint4*>(
            rows + unit / Tile::kUnitsPerRow * Tile::kStride +
            unit % Tile::kUnitsPerRow * 8) = permute_like_fp8(x[i]);
      }
      if (stage + 1 < stages) load(stage + 1);
      float lane_scale = 0;
      bool block_ends = false;
      if constexpr (kBlockScales) {
        constexpr int kStages = 128 / Tile::kStageK;
        block_ends = stage % kStages == kStages - 1 || stage == stages - 1;
        if (block_ends) {
          lane_scale = __ldg(p.scales + lane_scales + stage / kStages);
        }
      }
      // Whoever writes this buffer again, two stages on, has passed the next
      // stage's barrier, and so have its readers.
      __syncthreads();
#pragma unroll
      for (int step = 0; step < Tile::kStageK / 16; ++step) {
        FragmentW w[2];
#pragma unroll
        for (int f = 0; f < 2; ++f) {
          wmma::load_matrix_sync(
              w[f],
              reinterpret_cast<const Element*>(
                  weights + (warp_n * 32 + f * 16) * Tile::kStride + step * 16),
              Tile::kStride);
        }
#pragma unroll
        for (int i = 0; i < Tile::kFragmentsM; ++i) {
          FragmentX a;
          wmma::load_matrix_sync(
              a,
              reinterpret_cast<const Element*>(
                  rows + (warp_m * Tile::kFragmentsM + i) * 16 * Tile::kStride +
                  step * 16),
              Tile::kStride);
#pragma unroll
          for (int f = 0; f < 2; ++f) {
            Accumulator& sum = kBlockScales ? products[i][f] : sums[i][f];
            wmma::mma_sync(sum, a, w[f], sum);
          }
        }
      }
      if constexpr (kBlockScales) {
        if (block_ends) {
#pragma unroll
          for (int f = 0; f < 2; ++f) {
            const float scale = __shfl_sync(0xffffffffu, lane_scale, f);
#pragma unroll
            for (int i = 0; i < Tile::kFragmentsM; ++i) {
#pragma unroll
              for (int j = 0; j < Accumulator::num_elements; ++j) {
                sums[i][f].x[j] =
                    fmaf(products[i][f].x[j], scale, sums[i][f].x[j]);
              }
              wmma::fill_fragment(products[i][f], 0.0f);
            }
          }
        }
      }
    }

    __syncthreads();  // the stages' memory becomes the sums'
    float* const sums_memory = reinterpret_cast<float*>(shared);
#pragma unroll
    for (int i = 0; i < Tile::kFragmentsM; ++i) {
#pragma unroll
      for (int f = 0; f < 2; ++f) {
        wmma::store_matrix_sync(
            sums_memory +
                (warp_m * Tile::kFragmentsM + i) * 16 * Tile::kSumStride +
                warp_n * 32 + f * 16,
            sums[i][f], Tile::kSumStride, wmma::mem_row_major);
      }
    }
    __syncthreads();
    // Eight columns at a time.
    for (int unit = thread; unit < kM * (kColumns / 8);
         unit += Tile::kThreads) {
      const int m = unit / (kColumns / 8);
      const int column = unit % (kColumns / 8) * 8;
      const int position = place[1] + m;
      const int n = place[3] + column;
      if (position >= place[2] || n >= p.end_n) continue;
      const int row = p.sum_k != 0 || p.topk_weights != nullptr
                          ? __ldg(p.sorted_rows + position)
                          : position;
      const float weight =
          p.topk_weights == nullptr ? 1.0f : __ldg(p.topk_weights + row);
      const int at = kGated ? column / 16 * 32 + column % 16 : column;
      const float* const sum = sums_memory + m * Tile::kSumStride + at;
      const i64 scale_row =
          static_cast<i64>(place[0]) * halves * p.scale_rows + n;
      const auto finish = [&](const float* from, i64 scale_at,
                              float (&finished)[8]) {
#pragma unroll
        for (int i = 0; i < 8; i += 4) {
          const float4 four = *reinterpret_cast<const float4*>(from + i);
          finished[i] = four.x;
          finished[i + 1] = four.y;
          finished[i + 2] = four.z;
          finished[i + 3] = four.w;
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          finished[i] *= kFp8CodeFactor<Format>;
          if constexpr (!kBlockScales) {
            finished[i] *= __ldg(p.scales + scale_at + i);
          }
          finished[i] *= weight;
        }
      };
      float values[8];
      finish(sum, scale_row, values);
#pragma unroll
      for (float& value : values) value = moe_activate(p.activation, value);
      if constexpr (kGated) {
        float ups[8];
        finish(sum + 16, scale_row + p.scale_rows, ups);
#pragma unroll
        for (int i = 0; i < 8; ++i) values[i] *= ups[i];
      }
      store_x8<Format>(moe_out_row(p, position, row), (n - p.begin_n) / 8,
                       values);
    }
  }
}

}  // namespace vllm::sm70

// BF16 has no code for sm_70 and sm_75, which have no BF16 tensor cores.
#define SM70_MOE_TENSOR_GEMM(Format, block_scales, gated, m)        \
  SM70_ENTRY(vllm::sm70::MoeTile<m>::kThreads,                      \
             vllm::sm70::MoeTile<m>::kSharedBytes,                  \
             (vllm::sm70::kHasWmma<vllm::sm70::Format>),            \
             vllm::sm70::moe_tensor_gemm_kernel<vllm::sm70::Format, \
                                                block_scales, gated, m>)
SM70_MOE_TENSOR_GEMM(Fp16, true, true, 16)
SM70_MOE_TENSOR_GEMM(Fp16, true, false, 16)
SM70_MOE_TENSOR_GEMM(Fp16, false, true, 16)
SM70_MOE_TENSOR_GEMM(Fp16, false, false, 16)
SM70_MOE_TENSOR_GEMM(Fp16, true, true, 64)
SM70_MOE_TENSOR_GEMM(Fp16, true, false, 64)
SM70_MOE_TENSOR_GEMM(Fp16, false, true, 64)
SM70_MOE_TENSOR_GEMM(Fp16, false, false, 64)
SM70_MOE_TENSOR_GEMM(Fp16, true, true, 128)
SM70_MOE_TENSOR_GEMM(Fp16, true, false, 128)
SM70_MOE_TENSOR_GEMM(Fp16, false, true, 128)
SM70_MOE_TENSOR_GEMM(Fp16, false, false, 128)
SM70_MOE_TENSOR_GEMM(Bf16, true, true, 16)
SM70_MOE_TENSOR_GEMM(Bf16, true, false, 16)
SM70_MOE_TENSOR_GEMM(Bf16, false, true, 16)
SM70_MOE_TENSOR_GEMM(Bf16, false, false, 16)
SM70_MOE_TENSOR_GEMM(Bf16, true, true, 64)
SM70_MOE_TENSOR_GEMM(Bf16, true, false, 64)
SM70_MOE_TENSOR_GEMM(Bf16, false, true, 64)
SM70_MOE_TENSOR_GEMM(Bf16, false, false, 64)
SM70_MOE_TENSOR_GEMM(Bf16, true, true, 128)
SM70_MOE_TENSOR_GEMM(Bf16, true, false, 128)
SM70_MOE_TENSOR_GEMM(Bf16, false, true, 128)
SM70_MOE_TENSOR_GEMM(Bf16, false, false, 128)
#undef SM70_MOE_TENSOR_GEMM
