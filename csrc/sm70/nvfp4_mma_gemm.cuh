// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// out = x @ W^T + bias on tensor cores for few rows of x ("tokens"), x in FP16, W
// in NVFP4 and decoded straight into the registers of the multiplication.
//
// A block has 32 rows of W, and its warps share out K, 128 elements at a time.
// Until their sums are added up, in a fixed order, they need neither barriers nor
// shared memory: each lane loads the next chunks of its rows while it multiplies
// the present ones, and takes its part of x from the L1 cache. That costs about
// three instructions for each element of W, whatever the number of tokens; with
// gemv.h it is four, and one more for each further token. Blocks may share out K
// as well (see split_sum.cuh).
//
// As in nvfp4_tensor_gemm.cuh, code * block scale is exact in FP16, the global
// scale multiplies the FP32 sum, and the weight is not rounded.
#pragma once

#include "device_vec.h"
#include "half2_ops.h"
#include "kernel_entry.h"
#include "mma_fragments.h"
#include "nvfp4_chunk.h"

namespace vllm::sm70 {

struct Nvfp4MmaGemmParams {
  const u16* x;               // [m, k], FP16; rows 16-byte aligned
  const u16* bias;            // [n], or null
  u16* out;                   // [m, n]
  float* split_sums;          // [gridDim.y, m, n]; null for one split
  const u8* packed;           // 16-byte aligned
  const u8* block_scales;     // 2-byte aligned
  const float* global_scale;  // one value, on the device
  i64 x_stride;               // elements from one row to the next
  i64 out_stride;
  int m;
  int n;
  int chunks;  // k / 32
};

constexpr int kNvfp4MmaCodes = 32;  // of a chunk
constexpr int kNvfp4MmaStepK = kMmaChunks * kNvfp4MmaCodes;

// What a lane loads for a step.
struct Nvfp4MmaStep {
  Nvfp4Chunk<2> chunks[kMmaChunks];
};

// The 32 elements of x that go with a chunk, in the order of its decoding.
struct Nvfp4MmaTokens {
  u32 pairs[4][4];
};

template <class Mma, int kTokenTiles>
struct Nvfp4MmaSums {
  float tiles[kTokenTiles][Mma::kSums];
};

__device__ __forceinline__ Nvfp4MmaTokens load_mma_tokens(const u16* x,
                                                          bool exists) {
  Nvfp4MmaTokens result;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint4 v = make_uint4(0, 0, 0, 0);
    if (exists) v = __ldg(reinterpret_cast<const uint4*>(x) + i);
    v = permute_like_nvfp4(v);
    result.pairs[i][0] = v.x;
    result.pairs[i][1] = v.y;
    result.pairs[i][2] = v.z;
    result.pairs[i][3] = v.w;
  }
  return result;
}

// Word kWord of a chunk: eight elements times 2^-7.
template <int kWord>
__device__ __forceinline__ void decode_nvfp4_word(const Nvfp4Chunk<2>& chunk,
                                                  u32 scales, u32 (&pairs)[4]) {
  half2s_from_e2m1x8(chunk.words[kWord], pairs);
  const u32 scale = __byte_perm(scales, 0, kWord < 2 ? 0x1010 : 0x3232);
#pragma unroll
  for (u32& pair : pairs) pair = multiply_half2(pair, scale);
}

template <int kWord, int kTokenTiles>
__device__ __forceinline__ void multiply_nvfp4_word(
    const Nvfp4MmaStep& step, const u32 (&scales)[kMmaChunks],
    const Nvfp4MmaTokens (&x)[kTokenTiles],
    Nvfp4MmaSums<Mma16816, kTokenTiles>& sums) {
  u32 rows[4][4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    decode_nvfp4_word<kWord>(step.chunks[i], scales[i], rows[i]);
  }
#pragma unroll
  for (int t = 0; t < kTokenTiles; ++t) {
    const u32(&b)[4] = x[t].pairs[kWord];
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      Mma16816::multiply<0>(sums.tiles[t], rows[0][i], rows[1][i],
                            rows[0][i + 1], rows[1][i + 1], b[i], b[i + 1]);
      Mma16816::multiply<1>(sums.tiles[t], rows[2][i], rows[3][i],
                            rows[2][i + 1], rows[3][i + 1], b[i], b[i + 1]);
    }
  }
}

template <int kWord, int kTokenTiles>
__device__ __forceinline__ void multiply_nvfp4_word(
    const Nvfp4Chunk<2>& chunk, u32 scales,
    const Nvfp4MmaTokens (&x)[kTokenTiles],
    Nvfp4MmaSums<Mma884, kTokenTiles>& sums) {
  u32 row[4];
  decode_nvfp4_word<kWord>(chunk, scales, row);
#pragma unroll
  for (int t = 0; t < kTokenTiles; ++t) {
    const u32(&b)[4] = x[t].pairs[kWord];
    Mma884::multiply(sums.tiles[t], row[0], row[1], b[0], b[1]);
    Mma884::multiply(sums.tiles[t], row[2], row[3], b[2], b[3]);
  }
}

// Grid: x over groups of 8 * kTokenTiles tokens (fastest) and of 32 rows of W, y
// over parts of K.
template <class Mma, int kTokenTiles, int kWarps>
__global__ void __launch_bounds__(32 * kWarps, 16 / kWarps)
    nvfp4_mma_gemm_kernel(Nvfp4MmaGemmParams p) {
  if constexpr (!kHasMma<Mma>) return;
  constexpr int kTokens = kMmaTokens * kTokenTiles;
  // A row more than a power of two: the lanes' sums go to different banks.
  __shared__ float all_sums[kWarps][kTokens][kMmaRows + 1];

  const int warp = threadIdx.x / 32;
  const int groups = (p.m + kTokens - 1) / kTokens;
  const int first_token = blockIdx.x % groups * kTokens;
  const int first_row = blockIdx.x / groups * kMmaRows;
  const int all_steps = (p.chunks + kMmaChunks - 1) / kMmaChunks;
  const int step_begin =
      static_cast<int>(static_cast<i64>(all_steps) * blockIdx.y / gridDim.y);
  const int step_end = static_cast<int>(static_cast<i64>(all_steps) *
                                        (blockIdx.y + 1) / gridDim.y);

  const auto load = [&](int step) {
    Nvfp4MmaStep result{};
#pragma unroll
    for (int i = 0; i < kMmaChunks; ++i) {
      const int chunk = step * kMmaChunks + Mma::chunk(i);
      if (step < step_end && chunk < p.chunks) {
        // Past the last row: that row again, whose sums are not used.
        const i64 row = min(first_row + Mma::row(i), p.n - 1);
        result.chunks[i] = load_nvfp4_chunk<2>(p.packed, p.block_scales,
                                               row * p.chunks + chunk);
      }
    }
    return result;
  };
  const auto load_tokens = [&](int tile, int chunk) {
    const int token = first_token + tile * kMmaTokens + Mma::token();
    return load_mma_tokens(
        p.x + token * p.x_stride + static_cast<i64>(chunk) * kNvfp4MmaCodes,
        token < p.m && chunk < p.chunks);
  };

  Nvfp4MmaSums<Mma, kTokenTiles> sums{};
  Nvfp4MmaStep next = load(step_begin + warp);
  for (int step = step_begin + warp; step < step_end; step += kWarps) {
    const Nvfp4MmaStep present = next;
    Nvfp4MmaTokens x[kTokenTiles];
    if constexpr (Mma::kTokenChunks == 1) {
#pragma unroll
      for (int t = 0; t < kTokenTiles; ++t) {
        x[t] = load_tokens(t, step * kMmaChunks + Mma::chunk(0));
      }
    }
    next = load(step + kWarps);
    u32 scales[kMmaChunks];
#pragma unroll
    for (int i = 0; i < kMmaChunks; ++i) {
      scales[i] = half2_from_e4m3x2(present.chunks[i].scales);
    }
    if constexpr (Mma::kTokenChunks == 1) {
      multiply_nvfp4_word<0>(present, scales, x, sums);
      multiply_nvfp4_word<1>(present, scales, x, sums);
      multiply_nvfp4_word<2>(present, scales, x, sums);
      multiply_nvfp4_word<3>(present, scales, x, sums);
    } else {
#pragma unroll
      for (int i = 0; i < kMmaChunks; ++i) {
#pragma unroll
        for (int t = 0; t < kTokenTiles; ++t) {
          x[t] = load_tokens(t, step * kMmaChunks + i);
        }
        multiply_nvfp4_word<0>(present.chunks[i], scales[i], x, sums);
        multiply_nvfp4_word<1>(present.chunks[i], scales[i], x, sums);
        multiply_nvfp4_word<2>(present.chunks[i], scales[i], x, sums);
        multiply_nvfp4_word<3>(present.chunks[i], scales[i], x, sums);
      }
    }
  }

#pragma unroll
  for (int t = 0; t < kTokenTiles; ++t) {
#pragma unroll
    for (int i = 0; i < Mma::kSums; ++i) {
      all_sums[warp][t * kMmaTokens + Mma::sum_token(i)][Mma::sum_row(i)] =
          sums.tiles[t][i];
    }
  }
  __syncthreads();
  const float global_scale = __ldg(p.global_scale);
  for (int index = threadIdx.x; index < kTokens * kMmaRows;
       index += 32 * kWarps) {
    const int token = index / kMmaRows, row = index % kMmaRows;
    const int m = first_token + token, n = first_row + row;
    if (m >= p.m || n >= p.n) continue;
    float sum = all_sums[0][token][row];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) sum += all_sums[w][token][row];
    float result = sum * 0x1p7f * global_scale;
    if (p.split_sums != nullptr) {
      p.split_sums[(static_cast<i64>(blockIdx.y) * p.m + m) * p.n + n] = result;
      continue;
    }
    if (p.bias != nullptr) result += Fp16::value(u32{p.bias[n]});
    p.out[m * p.out_stride + n] = Fp16::bits(result);
  }
}

}  // namespace vllm::sm70

// Mma16816 has no code below sm_80.
#define SM70_NVFP4_MMA_GEMM(Mma, token_tiles, warps)         \
  SM70_ENTRY(                                                \
      32 * warps, 0, (vllm::sm70::kHasMma<vllm::sm70::Mma>), \
      vllm::sm70::nvfp4_mma_gemm_kernel<vllm::sm70::Mma, token_tiles, warps>)
SM70_NVFP4_MMA_GEMM(Mma884, 1, 4)
SM70_NVFP4_MMA_GEMM(Mma884, 1, 8)
SM70_NVFP4_MMA_GEMM(Mma884, 2, 8)
SM70_NVFP4_MMA_GEMM(Mma16816, 1, 4)
SM70_NVFP4_MMA_GEMM(Mma16816, 1, 8)
SM70_NVFP4_MMA_GEMM(Mma16816, 2, 4)
SM70_NVFP4_MMA_GEMM(Mma16816, 2, 8)
#undef SM70_NVFP4_MMA_GEMM
