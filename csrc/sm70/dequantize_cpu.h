// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The CPU side of dequantisation: the formulas of nvfp4_dequantize.cuh and
// fp8_dequantize.cuh.
#pragma once

#include "cpu_kernels.h"
#include "lanes_cpu.h"

namespace vllm::sm70::cpu {

// Codes first .. first + kLanes - 1 of the 16 that two words hold, in the low
// bits of the lanes.
SM70_INLINE U32Lanes unpack_e2m1(u32 low, u32 high, int first) {
#if defined(__AVX512BW__)
  const U32Lanes words = {low,  low,  low,  low,  low,  low,  low,  low,
                          high, high, high, high, high, high, high, high};
  constexpr U32Lanes kShifts = {0, 4, 8, 12, 16, 20, 24, 28,
                                0, 4, 8, 12, 16, 20, 24, 28};
  return words >> kShifts;
#else
  const U32Lanes words = U32Lanes{} + (first < 8 ? low : high);
  #if defined(__AVX2__)
  constexpr U32Lanes kShifts = {0, 4, 8, 12, 16, 20, 24, 28};
  #else
  constexpr U32Lanes kShifts = {0, 4, 8, 12};
  #endif
  return words >> (kShifts + 4 * (first % 8));
#endif
}

// Dequantises blocks [begin, end): 8 bytes of codes and one E4M3 scale give 16
// values each. Rows follow one another without a gap, so blocks are counted
// through the whole array.
template <class Format>
SM70_INLINE void nvfp4_dequantize(const u8* packed, const u8* block_scales,
                                  float global_scale,
                                  typename Format::Storage* out, i64 begin,
                                  i64 end) {
  for (i64 block = begin; block < end; ++block) {
    const float scale =
        float_from_e4m3(u32{block_scales[block]}) * global_scale;
    u32 words[2];
    __builtin_memcpy(words, packed + 8 * block, 8);  // little-endian
    for (int first = 0; first < 16; first += kLanes) {
      const F32Lanes codes =
          float_from_e2m1(unpack_e2m1(words[0], words[1], first));
      store(Format::bits(F32Lanes(codes * scale)), out + 16 * block + first);
    }
  }
}

// Dequantises `count` E4M3 values, a multiple of 16, that share one scale.
template <class Format>
SM70_INLINE void fp8_dequantize_run(const u8* weight, float scale,
                                    typename Format::Storage* out, i64 count) {
  for (i64 k = 0; k < count; k += kLanes) {
    U8Lanes bytes;
    __builtin_memcpy(&bytes, weight + k, sizeof(bytes));
    const F32Lanes codes =
        float_from_e4m3(__builtin_convertvector(bytes, U32Lanes));
    store(Format::bits(F32Lanes(codes * scale)), out + k);
  }
}

// Dequantises rows [begin, end) of the tile, which `out` holds from row 0 on.
template <class Format>
SM70_INLINE void fp8_dequantize(const Fp8Tile& tile,
                                typename Format::Storage* out, i64 begin,
                                i64 end) {
  for (i64 row = begin; row < end; ++row) {
    const i64 n = tile.row_begin + row;
    const u8* weight = tile.weight + row * tile.columns;
    typename Format::Storage* out_row = out + row * tile.columns;
    if (!tile.block_scales) {
      fp8_dequantize_run<Format>(weight, tile.scales[n], out_row, tile.columns);
      continue;
    }
    const float* scales = tile.scales + n / 128 * tile.scale_stride;
    for (i64 k = 0; k < tile.columns; k += 128) {
      const i64 left = tile.columns - k;
      fp8_dequantize_run<Format>(weight + k, scales[k / 128], out_row + k,
                                 left < 128 ? left : 128);
    }
  }
}

}  // namespace vllm::sm70::cpu
