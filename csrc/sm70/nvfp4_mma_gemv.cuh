// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// out = x @ W^T + bias for one row of x on the tensor cores of sm_80 and later,
// x in FP16, W in NVFP4.
//
// An m16n8k16 product has eight columns, for eight tokens. Here they are eight
// blocks of K: a quad's four lanes hold four chunks of two blocks each, and x is
// zero in all columns but a block's own. So each column gets the sum of one block
// of each row, which is multiplied with that block's scale in FP32, in the lane
// that has loaded the scale. Codes go into the product as they are, which leaves
// about three instructions for each; gemv.h needs five and more.
//
// Blocks of threads stay, and go through groups of rows. Their warps share out K,
// 128 elements at a time, load the next ones while they multiply, also those of the
// next group, and add up their sums in a fixed order. No weight is rounded, and two
// runs give the same bits.
#pragma once

#include "device_vec.h"
#include "kernel_entry.h"
#include "mma_fragments.h"
#include "nvfp4_chunk.h"

namespace vllm::sm70 {

struct Nvfp4MmaGemvParams {
  const u16* x;               // [k], FP16, 16-byte aligned
  const u16* bias;            // [n], or null
  u16* out;                   // [n]
  const u8* packed;           // 16-byte aligned
  const u8* block_scales;     // 2-byte aligned
  const float* global_scale;  // one value, on the device
  int n;
  int chunks;  // k / 32
};

constexpr int kMmaGemvCodes = 32;  // of a chunk
constexpr int kMmaGemvStepK = 4 * kMmaGemvCodes;
constexpr int kMmaGemvMaxK = 20480;
constexpr int kMmaGemvWarps = 8;

// Shared memory of a block: x, and the sums of two groups of rows.
constexpr int kMmaGemvWords = kMmaGemvMaxK / 8 + 2;  // of 16 bytes
template <int kTiles>
constexpr int kMmaGemvSharedBytes =
    16 * kMmaGemvWords + 4 * 2 * kMmaGemvWarps * 16 * kTiles;

// As registers allow. On an H200 loading two or three steps ahead was slower, with
// as many blocks or fewer.
template <int kTiles>
constexpr int kMmaGemvBlocks = kTiles == 1 ? 3 : 2;  // of a multiprocessor

// Grid: x over shares of the groups of 16 * kTiles rows.
template <int kTiles>
__global__ void __launch_bounds__(32 * kMmaGemvWarps, kMmaGemvBlocks<kTiles>)
    nvfp4_mma_gemv_kernel(Nvfp4MmaGemvParams p) {
  if constexpr (!kHasMma<Mma16816>) return;
  constexpr int kWarps = kMmaGemvWarps;
  constexpr int kRows = 16 * kTiles;
  constexpr int kLaneRows = 2 * kTiles;
  // Eight words a block of 16 elements, in the order of the decoding; the last
  // two uint4 are zero, and so is what lies beyond K.
  __shared__ uint4 x_words[kMmaGemvWords];
  __shared__ float all_sums[2][kWarps][kRows];

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int group = lane / 4, quad = lane % 4;
  const int steps_each = (p.chunks + 4 * kWarps - 1) / (4 * kWarps);
  const int units = (p.n + kRows - 1) / kRows;

  struct Step {
    Nvfp4Chunk<2> chunks[kLaneRows];
  };
  // Of what is loaded next: the chunks of its rows begin at `first`. Past the last
  // row or the last chunk that one again: its sums are not used, x is zero there.
  int ahead_unit = blockIdx.x, ahead_step = 0, chunk = 4 * warp + quad;
  u32 first[kLaneRows];
  const auto begin_unit = [&]() {
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
      const int row = min(ahead_unit * kRows + group + 8 * i, p.n - 1);
      first[i] = static_cast<u32>(row) * p.chunks;
    }
  };
  begin_unit();
  const auto load_ahead = [&]() {
    Step result;
    const int at = min(chunk, p.chunks - 1);
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
      result.chunks[i] =
          load_nvfp4_chunk<2>(p.packed, p.block_scales, first[i] + at);
    }
    chunk += 4 * kWarps;
    if (++ahead_step == steps_each) {
      ahead_step = 0;
      chunk = 4 * warp + quad;
      ahead_unit = min(ahead_unit + static_cast<int>(gridDim.x), units - 1);
      begin_unit();
    }
    return result;
  };
  Step next = load_ahead();

  const int x_end = steps_each * kWarps * (kMmaGemvStepK / 8);
  for (int i = threadIdx.x; i < x_end + 2; i += 32 * kWarps) {
    uint4 v = make_uint4(0, 0, 0, 0);
    if (i < p.chunks * (kMmaGemvCodes / 8)) {
      v = __ldg(reinterpret_cast<const uint4*>(p.x) + i);
    }
    x_words[i] = permute_like_nvfp4(v);
  }
  __syncthreads();
  // Column 2 * quad + b is block b of the quad's chunk; this lane holds column
  // `group`. Words 2 b and 2 b + 1 of the chunk, or zeros.
  const uint4* x_begin[2];
  int x_stride[2];
#pragma unroll
  for (int b = 0; b < 2; ++b) {
    const bool own = group == 2 * quad + b;
    x_begin[b] =
        x_words + (own ? warp * (kMmaGemvStepK / 8) + 2 * group : x_end);
    x_stride[b] = own ? kWarps * (kMmaGemvStepK / 8) : 0;
  }

  const float global_scale = __ldg(p.global_scale);
  int buffer = 0;
  for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
    float sums[kLaneRows] = {};
    u32 nan[kTiles] = {};
    const uint4* x_at[2] = {x_begin[0], x_begin[1]};
    for (int s = 0; s < steps_each; ++s) {
      const Step present = next;
      next = load_ahead();
      float products[kTiles][4] = {};
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        const uint4 v = x_at[word / 2][word % 2];
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          u32 upper[4], lower[4];
          half2s_from_e2m1x8(present.chunks[2 * tile].words[word], upper);
          half2s_from_e2m1x8(present.chunks[2 * tile + 1].words[word], lower);
          Mma16816::multiply(products[tile], upper[0], lower[0], upper[1],
                             lower[1], v.x, v.y);
          Mma16816::multiply(products[tile], upper[2], lower[2], upper[3],
                             lower[3], v.z, v.w);
        }
      }
      x_at[0] += x_stride[0];
      x_at[1] += x_stride[1];
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        // Bytes: both blocks of the upper row, both of the lower one.
        const u32 codes =
            __byte_perm(present.chunks[2 * tile].scales,
                        present.chunks[2 * tile + 1].scales, 0x5410);
        nan[tile] |= has_e4m3_nan(codes);
        u32 scales[2];
        half2s_from_e4m3x4(codes, scales);
        const float2 first = floats_from_half2(scales[0]);
        const float2 second = floats_from_half2(scales[1]);
        sums[2 * tile] += products[tile][0] * first.x;
        sums[2 * tile] += products[tile][1] * second.x;
        sums[2 * tile + 1] += products[tile][2] * first.y;
        sums[2 * tile + 1] += products[tile][3] * second.y;
      }
    }
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
      float sum = sums[i];
      if ((nan[i / 2] & (i % 2 == 0 ? 0x00008080u : 0x80800000u)) != 0) {
        sum = float_from_bits(0x7fc00000u);
      }
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      if (quad == 0) all_sums[buffer][warp][group + 8 * i] = sum;
    }
    // One barrier for each unit is enough: whoever writes this buffer again has
    // passed the next unit's barrier, and so have its readers.
    __syncthreads();
    const int row = unit * kRows + threadIdx.x;
    if (threadIdx.x < kRows && row < p.n) {
      float sum = all_sums[buffer][0][threadIdx.x];
#pragma unroll
      for (int w = 1; w < kWarps; ++w) sum += all_sums[buffer][w][threadIdx.x];
      // 2^14 of the codes, 2^8 of the scales.
      float result = sum * 0x1p22f * global_scale;
      if (p.bias != nullptr) result += Fp16::value(u32{p.bias[row]});
      p.out[row] = Fp16::bits(result);
    }
    buffer ^= 1;
  }
}

}  // namespace vllm::sm70

// Nothing of it is compiled below sm_80.
SM70_ENTRY(32 * vllm::sm70::kMmaGemvWarps, 0,
           (vllm::sm70::kHasMma<vllm::sm70::Mma16816>),
           vllm::sm70::nvfp4_mma_gemv_kernel<1>)
SM70_ENTRY(32 * vllm::sm70::kMmaGemvWarps, 0,
           (vllm::sm70::kHasMma<vllm::sm70::Mma16816>),
           vllm::sm70::nvfp4_mma_gemv_kernel<2>)
