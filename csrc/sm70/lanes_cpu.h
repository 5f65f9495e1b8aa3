// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The widest vectors of the instruction set that this is compiled for. Vector
// types of GCC and clang, since plain loops over the same formulas are
// vectorised by one compiler version and left scalar by the next.
//
// Compile it with -ffp-contract=off.
#pragma once

#include "fp_formats.h"

namespace vllm::sm70 {

namespace cpu {
#if defined(__AVX512BW__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
using U8Lanes = u8 __attribute__((vector_size(kLanes)));
using U16Lanes = u16 __attribute__((vector_size(2 * kLanes)));
using U32Lanes = u32 __attribute__((vector_size(4 * kLanes)));
using F32Lanes = float __attribute__((vector_size(4 * kLanes)));
}  // namespace cpu

template <>
struct FloatOf<cpu::U32Lanes> {
  using Type = cpu::F32Lanes;
};
template <>
struct BitsOf<cpu::F32Lanes> {
  using Type = cpu::U32Lanes;
};

namespace cpu {

SM70_INLINE void store(U32Lanes bits, u32* out) {
  __builtin_memcpy(out, &bits, sizeof(bits));
}

SM70_INLINE void store(U32Lanes bits, u16* out) {
  const U16Lanes narrow = __builtin_convertvector(bits, U16Lanes);
  __builtin_memcpy(out, &narrow, sizeof(narrow));
}

SM70_INLINE U32Lanes load(const u32* in) {
  U32Lanes bits;
  __builtin_memcpy(&bits, in, sizeof(bits));
  return bits;
}

SM70_INLINE U32Lanes load(const u16* in) {
  U16Lanes bits;
  __builtin_memcpy(&bits, in, sizeof(bits));
  return __builtin_convertvector(bits, U32Lanes);
}

SM70_INLINE F32Lanes load(const float* in) {
  F32Lanes values;
  __builtin_memcpy(&values, in, sizeof(values));
  return values;
}

SM70_INLINE void store(F32Lanes values, float* out) {
  __builtin_memcpy(out, &values, sizeof(values));
}

// Reads the `count` <= kLanes bits at `in`; the lanes behind them are zero.
template <class Storage>
SM70_INLINE U32Lanes load_some(const Storage* in, i64 count) {
  if (count == kLanes) return load(in);
  Storage padded[kLanes] = {};
  __builtin_memcpy(padded, in, count * sizeof(Storage));
  return load(padded);
}

template <class Storage>
SM70_INLINE void store_some(U32Lanes bits, Storage* out, i64 count) {
  if (count == kLanes) return store(bits, out);
  Storage padded[kLanes];
  store(bits, padded);
  __builtin_memcpy(out, padded, count * sizeof(Storage));
}

}  // namespace cpu
}  // namespace vllm::sm70
