// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// out = x @ W^T + bias on tensor cores, for more rows of x ("tokens") than
// gemv.h serves: the part that does not depend on the weight's format. wmma
// 16 x 16 x 16 with FP32 accumulation, which every GPU from sm_70 on has.
//
// A block of eight warps makes kM x kN outputs, kStageK of K at a time. Each
// thread holds one chunk of the packed weight for each of the next kDepth
// stages in registers (that is what keeps the memory busy), decodes the oldest
// into shared memory, and the warps multiply from there; shared memory is
// double-buffered, so that one barrier a stage is enough. kN / 16 warps stand
// side by side along N; the others take other parts of the stage's K, and
// their sums are added up in a fixed order at the end.
//
// Blocks may also share out K (grid y): then each writes FP32 sums, and
// split_sum_kernel adds them up, in a fixed order too. No atomics: two runs give
// the same bits.
#pragma once

#include <mma.h>

#include "device_vec.h"

namespace vllm::sm70 {

template <class Format>
struct TensorGemmParams {
  const typename Format::Storage* x;     // [m, k]; rows 16-byte aligned
  const typename Format::Storage* bias;  // [n], or null
  typename Format::Storage* out;         // [m, n]
  float* split_sums;  // [gridDim.y, m, n]; null for one split
  i64 x_stride;       // elements from one row to the next
  i64 out_stride;
  int m;
  int n;
  int k;  // a multiple of the weight's chunk
};

constexpr int kTensorGemmThreads = 256;

template <class Format>
struct WmmaElementOf;
template <>
struct WmmaElementOf<Fp16> {
  using Type = __half;
};
template <>
struct WmmaElementOf<Bf16> {
  using Type = __nv_bfloat16;
};

template <class Format>
constexpr bool kHasWmma = true;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
template <>
constexpr bool kHasWmma<Bf16> = false;
#endif

template <class A, class B>
constexpr bool is_same = false;
template <class A>
constexpr bool is_same<A, A> = true;

// The sizes of a tile, and its shared memory.
template <int kTileM, int kTileN, int kChunkCodes>
struct TensorTile {
  static constexpr int kM = kTileM;
  static constexpr int kN = kTileN;
  static constexpr int kCodes = kChunkCodes;
  static constexpr int kStageK = kTensorGemmThreads * kCodes / kN;
  static constexpr int kChunksPerRow = kStageK / kCodes;
  static constexpr int kWarpsN = kN / 16;
  static constexpr int kWarpsK = kTensorGemmThreads / 32 / kWarpsN;
  static constexpr int kStepsPerWarp = kStageK / 16 / kWarpsK;
  static constexpr int kFragmentsM = kM / 16;
  // 16 bytes more than a row's elements: neighbouring rows lie in other banks.
  static constexpr int kStride = kStageK + 8;
  static constexpr int kStageElements = (kM + kN) * kStride;
  static constexpr int kSumStride = kN + 4;
  static constexpr int kStageBytes = 2 * 2 * kStageElements;
  static constexpr int kSumBytes = 4 * kWarpsK * kM * kSumStride;
  static constexpr int kSharedBytes =
      kStageBytes > kSumBytes ? kStageBytes : kSumBytes;
  static_assert(kWarpsN * kWarpsK * 32 == kTensorGemmThreads);
  static_assert(kStepsPerWarp * kWarpsK * 16 == kStageK);
};

// Weight is a view of the weight that a kernel makes of its parameters:
//   Chunk                       Tile::kCodes codes and their scales as loaded;
//                               value-initialised it is all zeros
//   Chunk load(row, chunk)
//   store(chunk, out)           writes the elements, permuted within groups of
//                               8, as the kernel's format
//   uint4 permute(uint4)        the same permutation of 8 elements of x
//   kStageScales                whether sums of a stage get a factor:
//   float stage_scale(row, k)
//   float finish(sum, row)      the last factor
template <class Format, class Tile, class Weight, int kDepth>
__device__ __forceinline__ void tensor_gemm(const TensorGemmParams<Format>& p,
                                            const Weight& weight) {
  namespace wmma = nvcuda::wmma;
  using Element = typename WmmaElementOf<Format>::Type;
  using Accumulator = wmma::fragment<wmma::accumulator, 16, 16, 16, float>;
  using FragmentW =
      wmma::fragment<wmma::matrix_b, 16, 16, 16, Element, wmma::col_major>;
  using FragmentX =
      wmma::fragment<wmma::matrix_a, 16, 16, 16, Element, wmma::row_major>;
  static_assert(kDepth % 2 == 0);
  constexpr int kUnitsX = Tile::kM * Tile::kStageK / 8;  // of 16 bytes
  constexpr int kLoadsX =
      (kUnitsX + kTensorGemmThreads - 1) / kTensorGemmThreads;
  extern __shared__ __align__(128) unsigned char shared[];
  u16* const stages_memory = reinterpret_cast<u16*>(shared);

  const int thread = threadIdx.x;
  const int warp = thread / 32;
  const int warp_n = warp % Tile::kWarpsN;
  const int warp_k = warp / Tile::kWarpsN;
  const int tiles_m = (p.m + Tile::kM - 1) / Tile::kM;
  const int first_m = blockIdx.x % tiles_m * Tile::kM;
  const int first_n = blockIdx.x / tiles_m * Tile::kN;
  const int all_stages = (p.k + Tile::kStageK - 1) / Tile::kStageK;
  const int stage_begin =
      static_cast<int>(static_cast<i64>(all_stages) * blockIdx.y / gridDim.y);
  const int stage_end = static_cast<int>(static_cast<i64>(all_stages) *
                                         (blockIdx.y + 1) / gridDim.y);

  // This thread's chunk of a stage.
  const int tile_row = thread / Tile::kChunksPerRow;
  const int tile_chunk = thread % Tile::kChunksPerRow;
  // Past the last row: that row again, whose sums are not used.
  const int row = min(first_n + tile_row, p.n - 1);

  typename Weight::Chunk chunks[kDepth];
  float stage_scales[kDepth] = {};
  uint4 x[kLoadsX];

  const auto load_weight = [&](int stage, typename Weight::Chunk& chunk,
                               float& scale) {
    const int k = stage * Tile::kStageK + tile_chunk * Tile::kCodes;
    chunk = typename Weight::Chunk{};
    if (stage < stage_end && k < p.k) {
      chunk = weight.load(row, k / Tile::kCodes);
    }
    if constexpr (Weight::kStageScales) {
      if (stage < stage_end) {
        scale = weight.stage_scale(first_n, stage * Tile::kStageK);
      }
    }
  };
  const auto load_tokens = [&](int stage) {
#pragma unroll
    for (int i = 0; i < kLoadsX; ++i) {
      const int unit = thread + i * kTensorGemmThreads;
      const int m = first_m + unit / (Tile::kStageK / 8);
      const int k = stage * Tile::kStageK + unit % (Tile::kStageK / 8) * 8;
      x[i] = make_uint4(0, 0, 0, 0);
      if (stage < stage_end && unit < kUnitsX && m < p.m && k < p.k) {
        x[i] = __ldg(reinterpret_cast<const uint4*>(p.x + m * p.x_stride + k));
      }
    }
  };

  Accumulator sums[Tile::kFragmentsM];
#pragma unroll
  for (auto& sum : sums) wmma::fill_fragment(sum, 0.0f);

#pragma unroll
  for (int d = 0; d < kDepth; ++d) {
    load_weight(stage_begin + d, chunks[d], stage_scales[d]);
  }
  load_tokens(stage_begin);

  for (int base = stage_begin; base < stage_end; base += kDepth) {
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
      const int stage = base + d;
      if (stage >= stage_end) break;
      u16* const tokens = stages_memory + (d % 2) * Tile::kStageElements;
      u16* const weights = tokens + Tile::kM * Tile::kStride;
      weight.store(chunks[d], weights + tile_row * Tile::kStride +
                                  tile_chunk * Tile::kCodes);
#pragma unroll
      for (int i = 0; i < kLoadsX; ++i) {
        const int unit = thread + i * kTensorGemmThreads;
        if (unit < kUnitsX) {
          *reinterpret_cast<uint4*>(
              tokens + unit / (Tile::kStageK / 8) * Tile::kStride +
              unit % (Tile::kStageK / 8) * 8) = weight.permute(x[i]);
        }
      }
      const float scale = stage_scales[d];
      load_weight(stage + kDepth, chunks[d], stage_scales[d]);
      load_tokens(stage + 1);
      // Whoever writes this buffer again, two stages on, has passed the next
      // stage's barrier, and so have its readers.
      __syncthreads();

      const auto weight_at = [&](int step, FragmentW& w) {
        const int k = (warp_k * Tile::kStepsPerWarp + step) * 16;
        wmma::load_matrix_sync(w,
                               reinterpret_cast<const Element*>(
                                   weights + warp_n * 16 * Tile::kStride + k),
                               Tile::kStride);
      };
      const auto tokens_at = [&](int step, int i, FragmentX& a) {
        const int k = (warp_k * Tile::kStepsPerWarp + step) * 16;
        wmma::load_matrix_sync(a,
                               reinterpret_cast<const Element*>(
                                   tokens + i * 16 * Tile::kStride + k),
                               Tile::kStride);
      };
      if constexpr (Weight::kStageScales) {
        FragmentW w[Tile::kStepsPerWarp];
#pragma unroll
        for (int step = 0; step < Tile::kStepsPerWarp; ++step) {
          weight_at(step, w[step]);
        }
#pragma unroll
        for (int i = 0; i < Tile::kFragmentsM; ++i) {
          Accumulator product;
          wmma::fill_fragment(product, 0.0f);
#pragma unroll
          for (int step = 0; step < Tile::kStepsPerWarp; ++step) {
            FragmentX a;
            tokens_at(step, i, a);
            wmma::mma_sync(product, a, w[step], product);
          }
#pragma unroll
          for (int j = 0; j < Accumulator::num_elements; ++j) {
            sums[i].x[j] += product.x[j] * scale;
          }
        }
      } else {
        // Unrolled further, fragments of later steps fill the registers.
#pragma unroll(Tile::kFragmentsM == 1 ? 2 : 1)
        for (int step = 0; step < Tile::kStepsPerWarp; ++step) {
          FragmentW w;
          weight_at(step, w);
#pragma unroll
          for (int i = 0; i < Tile::kFragmentsM; ++i) {
            FragmentX a;
            tokens_at(step, i, a);
            wmma::mma_sync(sums[i], a, w, sums[i]);
          }
        }
      }
    }
  }

  __syncthreads();  // the stages' memory becomes the sums'
  float* const sums_memory = reinterpret_cast<float*>(shared);
#pragma unroll
  for (int i = 0; i < Tile::kFragmentsM; ++i) {
    wmma::store_matrix_sync(
        sums_memory + (warp_k * Tile::kM + i * 16) * Tile::kSumStride +
            warp_n * 16,
        sums[i], Tile::kSumStride, wmma::mem_row_major);
  }
  __syncthreads();
  for (int index = thread; index < Tile::kM * Tile::kN;
       index += kTensorGemmThreads) {
    const int m = first_m + index / Tile::kN;
    const int n = first_n + index % Tile::kN;
    if (m >= p.m || n >= p.n) continue;
    const float* const at =
        sums_memory + index / Tile::kN * Tile::kSumStride + index % Tile::kN;
    float sum = at[0];
#pragma unroll
    for (int w = 1; w < Tile::kWarpsK; ++w) {
      sum += at[w * Tile::kM * Tile::kSumStride];
    }
    float result = weight.finish(sum, n);
    if (p.split_sums != nullptr) {
      p.split_sums[(static_cast<i64>(blockIdx.y) * p.m + m) * p.n + n] = result;
      continue;
    }
    if (p.bias != nullptr) result += Format::value(u32{p.bias[n]});
    p.out[m * p.out_stride + n] = Format::bits(result);
  }
}

}  // namespace vllm::sm70
