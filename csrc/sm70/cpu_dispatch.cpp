// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project

#include <cstdlib>
#include <stdexcept>
#include <string>

#include "cpu_kernels.h"

namespace vllm::sm70::cpu {
namespace {

struct Candidate {
  const char* name;
  const Kernels* kernels;
  bool runs_here;
};

const Kernels& choose() {
  const Candidate candidates[] = {
#ifdef __x86_64__
      {"avx512", &kAvx512,
       __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl")},
      {"avx2", &kAvx2, __builtin_cpu_supports("avx2") != 0},
#endif
      {"baseline", &kBaseline, true},
  };
  const char* asked = std::getenv("VLLM_SM70_CPU_ISA");
  std::string usable;
  for (const Candidate& candidate : candidates) {
    if (!candidate.runs_here) continue;
    if (asked == nullptr || asked == std::string(candidate.name)) {
      return *candidate.kernels;
    }
    usable += (usable.empty() ? "" : ", ") + std::string(candidate.name);
  }
  throw std::invalid_argument("VLLM_SM70_CPU_ISA=" + std::string(asked) +
                              ": expected one of what this machine has: " +
                              usable + "; unset it to use the best");
}

}  // namespace

const Kernels& kernels() {
  static const Kernels& chosen = choose();
  return chosen;
}

}  // namespace vllm::sm70::cpu
