// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// NVFP4 -> FP16, BF16 or FP32, element by element:
//   out = round(code * (block_scale * global_scale)), products in FP32.
//
// A weight's rows follow one another without a gap in all three arrays, so rows
// of one part are one flat run of blocks, and the kernel knows neither N nor K.
#pragma once

#include "device_vec.h"
#include "kernel_entry.h"

namespace vllm::sm70 {

template <class Format>
struct Nvfp4DequantizeParams {
  const u32* packed;          // word w: codes 8w .. 8w + 7, lowest bits first
  const u8* block_scales;     // byte b: E4M3 scale of codes 16b .. 16b + 15
  const float* global_scale;  // one value, on the device
  typename Format::Storage* out;  // 16-byte aligned
  i64 words;                      // of each part, one after the other in `out`
  i64 part_words;                 // from one part to the next in `packed`
};

constexpr int kNvfp4DequantizeThreads = 256;
constexpr int kNvfp4DequantizeWordsPerThread = 4;
constexpr int kNvfp4DequantizeWordsPerBlock =
    kNvfp4DequantizeThreads * kNvfp4DequantizeWordsPerThread;

// Bound by memory: 0.5625 bytes read and 2 (or 4) written for each element. A
// thread has four independent words in flight; a warp's loads cover 128 bytes
// and its stores 512 bytes without a gap (a 16-byte load for each thread would
// spread its stores over 2 KiB in half sectors). Grid: x over a part's words, y
// over parts.
template <class Format>
__global__ void __launch_bounds__(kNvfp4DequantizeThreads)
    nvfp4_dequantize_kernel(Nvfp4DequantizeParams<Format> p) {
  const float global_scale = *p.global_scale;
  const i64 first =
      static_cast<i64>(blockIdx.x) * kNvfp4DequantizeWordsPerBlock +
      threadIdx.x;
  const i64 part = blockIdx.y;
  const u32* packed = p.packed + part * p.part_words;
  const u8* block_scales = p.block_scales + part * (p.part_words >> 1);
  typename Format::Storage* out = p.out + part * p.words * 8;
  u32 words[kNvfp4DequantizeWordsPerThread];
  u32 scales[kNvfp4DequantizeWordsPerThread];
#pragma unroll
  for (int i = 0; i < kNvfp4DequantizeWordsPerThread; ++i) {
    const i64 word = first + i * kNvfp4DequantizeThreads;
    if (word < p.words) {
      words[i] = __ldg(packed + word);
      scales[i] = __ldg(block_scales + (word >> 1));
    }
  }
#pragma unroll
  for (int i = 0; i < kNvfp4DequantizeWordsPerThread; ++i) {
    const i64 word = first + i * kNvfp4DequantizeThreads;
    if (word < p.words) {
      const float scale = float_from_e4m3(scales[i]) * global_scale;
      float values[8];
      floats_from_e2m1x8(words[i], values);
#pragma unroll
      for (float& value : values) value *= scale;
      store_x8<Format>(out, word, values);
    }
  }
}

}  // namespace vllm::sm70

SM70_ENTRY(vllm::sm70::kNvfp4DequantizeThreads, 0, false,
           vllm::sm70::nvfp4_dequantize_kernel<vllm::sm70::Fp16>)
SM70_ENTRY(vllm::sm70::kNvfp4DequantizeThreads, 0, false,
           vllm::sm70::nvfp4_dequantize_kernel<vllm::sm70::Bf16>)
SM70_ENTRY(vllm::sm70::kNvfp4DequantizeThreads, 0, false,
           vllm::sm70::nvfp4_dequantize_kernel<vllm::sm70::Fp32>)
