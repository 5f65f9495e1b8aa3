// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The activations between an expert's two products, by number, as the operator
// fp8_moe_gate_up and its Python wrapper know them.
#pragma once

#include "fp_formats.h"

namespace vllm::sm70 {

enum class MoeActivation {
  kSilu = 0,  // of the gate, times up
  kGelu = 1,
  kGeluTanh = 2,
  kSiluNoMul = 3,  // of the one product that there is
  kGeluNoMul = 4,
  kGeluTanhNoMul = 5,
  kRelu2NoMul = 6,  // max(x, 0)^2
  kNone = 7,        // after the second product; not an argument
};
constexpr int kMoeActivations = 7;  // that may be asked for

constexpr SM70_INLINE bool is_gated(MoeActivation activation) {
  return activation < MoeActivation::kSiluNoMul;
}

}  // namespace vllm::sm70
