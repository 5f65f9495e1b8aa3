// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// nvfp4_small_gemm and fp8_small_gemm on CUDA: check, choose a kernel, launch.
//
// A kernel has a number, which the argument `config` of the operators asks for
// in benchmarks: config = kernel + 100 * splits, splits 0 for the usual choice.

#include <cuda_runtime.h>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <optional>
#include <type_traits>

#include "cuda_launch.h"
#include "fp8_gemv.cuh"
#include "fp8_tensor_gemm.cuh"
#include "linear_args.h"
#include "nvfp4_gemv.cuh"
#include "nvfp4_mma_gemm.cuh"
#include "nvfp4_mma_gemv.cuh"
#include "nvfp4_tensor_gemm.cuh"
#include "split_sum.cuh"

namespace vllm::sm70 {
namespace {

// What every kernel of an operator gets.
template <class Weight>
struct Call {
  const char* op;
  const GemmArgs& gemm;
  const Weight& weight;
  const Tensor& x;
  cudaStream_t stream;
  int multiprocessors;
  int shared_bytes;  // of a multiprocessor
  int64_t splits;    // asked for; 0: the usual choice
};

// The families of kernels, by the first number of each.
constexpr int kGemv = 0;       // gemv.h: any GPU
constexpr int kMma16816 = 10;  // nvfp4_mma_gemm.cuh: FP16 from sm_80 on
constexpr int kMma884 = 15;    // nvfp4_mma_gemm.cuh: FP16, meant for sm_70
constexpr int kTensor = 20;    // tensor_gemm.h: FP16; BF16 from sm_80 on
constexpr int kMmaGemv =
    30;  // nvfp4_mma_gemv.cuh: FP16, one row, from sm_80 on
constexpr int kFamilies[] = {kGemv, kMma16816, kMma884, kTensor, kMmaGemv, 100};

// A kernel by its number. `tokens` rows of x at once; needs K and the weight's
// address to be multiples of `codes` elements.
template <class Weight>
struct Kernel {
  using Run = void (*)(const Call<Weight>&);
  int number;
  bool usual;  // not for benchmarks only
  int tokens;
  int codes;
  Run fp16;
  Run bf16;  // or null
};

template <class Format>
GemvParams<Format> gemv_params(const GemmArgs& args, int codes) {
  using Storage = typename Format::Storage;
  return {static_cast<const Storage*>(args.x),
          static_cast<const Storage*>(args.bias),
          static_cast<Storage*>(args.out),
          args.x_stride,
          args.out_stride,
          static_cast<int>(args.m),
          static_cast<int>(args.n),
          static_cast<int>(args.k / codes)};
}

template <auto* kKernel, class Weight, class Params>
void run_gemv(const Call<Weight>& call, const Params& params, int tokens,
              int rows) {
  const GemvPlan plan =
      plan_gemv(call.gemm.m, call.gemm.n, params.gemv.chunks, tokens, rows,
                Entry<kKernel>::kThreads, kGemvMaxTotals, call.multiprocessors);
  const dim3 grid = checked_grid(call.op, plan.shares, plan.groups);
  check_launch(call.op,
               launch<kKernel>(grid, call.stream, params, plan.threads));
}

// Launches a kernel that takes a part of K for each y of its grid. `params_for`
// makes its parameters from where the sums of the parts go, or null.
template <auto* kKernel, class Format, class Weight, class ParamsFor>
void run_split(const Call<Weight>& call, int tile_m, int tile_n, int stage_k,
               const ParamsFor& params_for) {
  using Storage = typename Format::Storage;
  const GemmArgs& args = call.gemm;
  const TensorPlan plan =
      plan_tensor(args.m, args.n, args.k, tile_m, tile_n, stage_k,
                  call.multiprocessors, call.splits);
  const dim3 grid = checked_grid(call.op, plan.tiles, plan.splits);
  if (plan.splits == 1) {
    check_launch(call.op,
                 launch<kKernel>(grid, call.stream, params_for(nullptr)));
    return;
  }
  // From torch's allocator, which knows CUDA graphs.
  const Tensor memory = torch::stable::new_empty(
      call.x, {plan.splits, args.m, args.n}, ScalarType::Float);
  float* const sums = static_cast<float*>(memory.mutable_data_ptr());
  check_launch(call.op, launch<kKernel>(grid, call.stream, params_for(sums)));
  const SplitSumParams<Format> params{sums,
                                      static_cast<const Storage*>(args.bias),
                                      static_cast<Storage*>(args.out),
                                      args.out_stride,
                                      static_cast<int>(plan.splits),
                                      static_cast<int>(args.m),
                                      static_cast<int>(args.n)};
  const dim3 sum_grid =
      checked_grid(call.op, ceil_div(args.n, kSplitSumThreads),
                   std::min<int64_t>(args.m, 65535));
  check_launch(call.op, launch<&split_sum_kernel<Format>>(sum_grid, call.stream,
                                                          params));
}

template <class Format>
TensorGemmParams<Format> tensor_params(const GemmArgs& args,
                                       float* split_sums) {
  using Storage = typename Format::Storage;
  return {static_cast<const Storage*>(args.x),
          static_cast<const Storage*>(args.bias),
          static_cast<Storage*>(args.out),
          split_sums,
          args.x_stride,
          args.out_stride,
          static_cast<int>(args.m),
          static_cast<int>(args.n),
          static_cast<int>(args.k)};
}

// ---- NVFP4 ----

template <class Format, int kTokens, int kCodes, int kRows>
void nvfp4_gemv(const Call<Nvfp4Weight>& call) {
  const Nvfp4GemvParams<Format> params{
      gemv_params<Format>(call.gemm, kCodes), call.weight.packed,
      call.weight.block_scales, call.weight.global_scale};
  run_gemv<&nvfp4_gemv_kernel<Format, kTokens, kCodes, kRows>>(call, params,
                                                               kTokens, kRows);
}

template <class Format, int kM, int kN, int kCodes, int kDepth>
void nvfp4_tensor(const Call<Nvfp4Weight>& call) {
  using Tile = TensorTile<kM, kN, kCodes>;
  run_split<&nvfp4_tensor_gemm_kernel<Format, kM, kN, kCodes, kDepth>, Format>(
      call, kM, kN, Tile::kStageK, [&](float* split_sums) {
        return Nvfp4TensorGemmParams<Format>{
            tensor_params<Format>(call.gemm, split_sums), call.weight.packed,
            call.weight.block_scales, call.weight.global_scale};
      });
}

template <class Mma, int kTokenTiles, int kWarps>
void nvfp4_mma(const Call<Nvfp4Weight>& call) {
  const GemmArgs& args = call.gemm;
  run_split<&nvfp4_mma_gemm_kernel<Mma, kTokenTiles, kWarps>, Fp16>(
      call, kMmaTokens * kTokenTiles, kMmaRows, kNvfp4MmaStepK * kWarps,
      [&](float* split_sums) {
        return Nvfp4MmaGemmParams{static_cast<const u16*>(args.x),
                                  static_cast<const u16*>(args.bias),
                                  static_cast<u16*>(args.out),
                                  split_sums,
                                  call.weight.packed,
                                  call.weight.block_scales,
                                  call.weight.global_scale,
                                  args.x_stride,
                                  args.out_stride,
                                  static_cast<int>(args.m),
                                  static_cast<int>(args.n),
                                  static_cast<int>(args.k / kNvfp4MmaCodes)};
      });
}

template <int kTiles>
void nvfp4_mma_gemv(const Call<Nvfp4Weight>& call) {
  const GemmArgs& args = call.gemm;
  const Nvfp4MmaGemvParams params{static_cast<const u16*>(args.x),
                                  static_cast<const u16*>(args.bias),
                                  static_cast<u16*>(args.out),
                                  call.weight.packed,
                                  call.weight.block_scales,
                                  call.weight.global_scale,
                                  static_cast<int>(args.n),
                                  static_cast<int>(args.k / kMmaGemvCodes)};
  const dim3 grid = checked_grid(
      call.op,
      plan_mma_gemv(ceil_div(args.n, 16 * kTiles), kMmaGemvBlocks<kTiles>,
                    kMmaGemvSharedBytes<kTiles>, call.shared_bytes,
                    call.multiprocessors));
  check_launch(call.op, launch<&nvfp4_mma_gemv_kernel<kTiles>>(
                            grid, call.stream, params));
}

constexpr Kernel<Nvfp4Weight> kNvfp4Kernels[] = {
    {0, true, 1, 32, nvfp4_gemv<Fp16, 1, 32, 2>, nvfp4_gemv<Bf16, 1, 32, 2>},
    {1, true, 1, 16, nvfp4_gemv<Fp16, 1, 16, 4>, nvfp4_gemv<Bf16, 1, 16, 4>},
    {2, true, 2, 16, nvfp4_gemv<Fp16, 2, 16, 4>, nvfp4_gemv<Bf16, 2, 16, 4>},
    {3, true, 4, 16, nvfp4_gemv<Fp16, 4, 16, 4>, nvfp4_gemv<Bf16, 4, 16, 4>},
    {7, false, 2, 16, nvfp4_gemv<Fp16, 2, 16, 8>, nullptr},
    {8, false, 4, 16, nvfp4_gemv<Fp16, 4, 16, 2>, nullptr},
    {10, false, 8, 32, nvfp4_mma<Mma16816, 1, 8>, nullptr},
    {11, false, 16, 32, nvfp4_mma<Mma16816, 2, 8>, nullptr},
    {12, true, 8, 32, nvfp4_mma<Mma16816, 1, 4>, nullptr},
    {13, true, 16, 32, nvfp4_mma<Mma16816, 2, 4>, nullptr},
    {15, true, 8, 32, nvfp4_mma<Mma884, 1, 8>, nullptr},
    {16, false, 16, 32, nvfp4_mma<Mma884, 2, 8>, nullptr},
    {17, false, 8, 32, nvfp4_mma<Mma884, 1, 4>, nullptr},
    {20, true, 16, 16, nvfp4_tensor<Fp16, 16, 64, 16, 4>,
     nvfp4_tensor<Bf16, 16, 64, 16, 4>},
    {21, true, 32, 16, nvfp4_tensor<Fp16, 32, 64, 16, 4>,
     nvfp4_tensor<Bf16, 32, 64, 16, 4>},
    {22, true, 64, 16, nvfp4_tensor<Fp16, 64, 64, 16, 4>,
     nvfp4_tensor<Bf16, 64, 64, 16, 4>},
    {23, false, 16, 32, nvfp4_tensor<Fp16, 16, 64, 32, 4>, nullptr},
    {24, false, 16, 16, nvfp4_tensor<Fp16, 16, 32, 16, 4>, nullptr},
    {25, false, 16, 32, nvfp4_tensor<Fp16, 16, 32, 32, 4>, nullptr},
    {26, false, 32, 32, nvfp4_tensor<Fp16, 32, 64, 32, 2>, nullptr},
    {27, false, 64, 32, nvfp4_tensor<Fp16, 64, 128, 32, 2>, nullptr},
    {30, true, 1, 32, nvfp4_mma_gemv<1>, nullptr},
    {31, false, 1, 32, nvfp4_mma_gemv<2>, nullptr},
};

// ---- FP8 ----

template <class Format, int kTokens, int kRows>
void fp8_gemv(const Call<Fp8Weight>& call) {
  const Fp8GemvParams<Format> params{
      gemv_params<Format>(call.gemm, 16), call.weight.codes, call.weight.scales,
      static_cast<int>(call.weight.scale_stride)};
  if (call.weight.block_scales) {
    run_gemv<&fp8_gemv_kernel<Format, true, kTokens, kRows>>(call, params,
                                                             kTokens, kRows);
  } else {
    run_gemv<&fp8_gemv_kernel<Format, false, kTokens, kRows>>(call, params,
                                                              kTokens, kRows);
  }
}

template <class Format, bool kBlockScales, int kM, int kN, int kDepth>
void fp8_tensor_scaled(const Call<Fp8Weight>& call) {
  using Tile = TensorTile<kM, kN, 16>;
  run_split<&fp8_tensor_gemm_kernel<Format, kBlockScales, kM, kN, kDepth>,
            Format>(call, kM, kN, Tile::kStageK, [&](float* split_sums) {
    return Fp8TensorGemmParams<Format>{
        tensor_params<Format>(call.gemm, split_sums), call.weight.codes,
        call.weight.scales, static_cast<int>(call.weight.scale_stride)};
  });
}

template <class Format, int kM, int kN, int kDepth>
void fp8_tensor(const Call<Fp8Weight>& call) {
  if (call.weight.block_scales) {
    fp8_tensor_scaled<Format, true, kM, kN, kDepth>(call);
  } else {
    fp8_tensor_scaled<Format, false, kM, kN, kDepth>(call);
  }
}

constexpr Kernel<Fp8Weight> kFp8Kernels[] = {
    {1, true, 1, 16, fp8_gemv<Fp16, 1, 4>, fp8_gemv<Bf16, 1, 4>},
    {2, true, 2, 16, fp8_gemv<Fp16, 2, 4>, fp8_gemv<Bf16, 2, 4>},
    {3, true, 4, 16, fp8_gemv<Fp16, 4, 4>, fp8_gemv<Bf16, 4, 4>},
    {6, false, 4, 16, fp8_gemv<Fp16, 4, 2>, nullptr},
    {20, true, 16, 16, fp8_tensor<Fp16, 16, 64, 4>,
     fp8_tensor<Bf16, 16, 64, 4>},
    {21, true, 32, 16, fp8_tensor<Fp16, 32, 64, 4>,
     fp8_tensor<Bf16, 32, 64, 4>},
    {22, true, 64, 16, fp8_tensor<Fp16, 64, 64, 2>,
     fp8_tensor<Bf16, 64, 64, 2>},
    {23, false, 16, 16, fp8_tensor<Fp16, 16, 32, 4>, nullptr},
};

// ---- choice ----

// What a GPU offers, and what a call asks for.
struct Situation {
  int capability;  // 70 for 7.0
  bool half;       // x is FP16
  bool nvfp4;
  int codes;  // 32 where the weight can be loaded 32 codes at once, else 16
  int64_t m;
  int64_t n;
  int64_t k;

  bool one_row() const {
    return capability >= 80 && nvfp4 && half && codes == 32 &&
           takes_mma_gemv(m, n, k, kMmaGemvMaxK);
  }
};

int usual_family(const Situation& at) {
  if (at.one_row()) return kMmaGemv;
  if (at.nvfp4 && at.half && at.codes == 32) {
    // Measured on an H200: from 33 tokens on the kernels that keep x in shared
    // memory are faster.
    if (at.capability >= 80 && at.m > 1 && at.m <= 32) return kMma16816;
    // sm_75 has the instruction, but no hardware for it.
    if (at.capability < 75 && at.m > 4 && at.m <= 8) return kMma884;
  }
  const bool tensor_cores = at.half || at.capability >= 80;
  return tensor_cores && at.m > 4 ? kTensor : kGemv;
}

bool in_family(int number, int family) {
  for (const int first : kFamilies) {
    if (first > family) return number >= family && number < first;
  }
  return false;
}

// The family's first kernel that takes all of x at once, or the one that takes
// most. Every family has one.
template <class Weight, size_t kCount>
const Kernel<Weight>* usual_kernel(const Kernel<Weight> (&kernels)[kCount],
                                   const Situation& at) {
  const int family = usual_family(at);
  const Kernel<Weight>* best = nullptr;
  for (const Kernel<Weight>& kernel : kernels) {
    if (kernel.usual && in_family(kernel.number, family) &&
        kernel.codes <= at.codes &&
        (best == nullptr ||
         (best->tokens < at.m && kernel.tokens > best->tokens))) {
      best = &kernel;
    }
  }
  return best;
}

// The kernel with a number, if it may run.
template <class Weight, size_t kCount>
const Kernel<Weight>* asked_kernel(const Kernel<Weight> (&kernels)[kCount],
                                   const Situation& at, int64_t number) {
  if (in_family(number, kMma16816) && at.capability < 80) return nullptr;
  if (in_family(number, kMmaGemv) && !at.one_row()) return nullptr;
  if (in_family(number, kTensor) && !at.half && at.capability < 80) {
    return nullptr;
  }
  for (const Kernel<Weight>& kernel : kernels) {
    if (kernel.number == number && kernel.codes <= at.codes &&
        (at.half || kernel.bf16 != nullptr)) {
      return &kernel;
    }
  }
  return nullptr;
}

template <class Weight, size_t kCount>
void multiply(const char* op, const Kernel<Weight> (&kernels)[kCount],
              const GemmArgs& args, const Weight& weight, const Tensor& x,
              const Tensor& out, int codes, int64_t config) {
  if (args.m == 0 || args.n == 0) return;
  const Argument x_argument(op, "x", x);
  x_argument.aligned(16);
  if (args.m > 1 && args.x_stride % 8 != 0) {
    x_argument.fail(
        "must have rows that start at multiples of 16 bytes; call "
        ".contiguous() on it first");
  }
  constexpr int64_t kMost = 0x7fffffff;
  if (args.m > kMost || args.n > kMost || args.k > kMost) {
    Argument(op, "out", out).fail("or x has a dimension above 2^31");
  }
  const DeviceStream stream(x);
  const auto attribute = [&](cudaDeviceAttr what) {
    int value = 0;
    check_launch(op,
                 cudaDeviceGetAttribute(&value, what, x.get_device_index()));
    return value;
  };
  const Situation at{attribute(cudaDevAttrComputeCapabilityMajor) * 10 +
                         attribute(cudaDevAttrComputeCapabilityMinor),
                     args.format == OutputFormat::kFp16,
                     std::is_same_v<Weight, Nvfp4Weight>,
                     codes,
                     args.m,
                     args.n,
                     args.k};
  const Kernel<Weight>* kernel = config < 0
                                     ? usual_kernel(kernels, at)
                                     : asked_kernel(kernels, at, config % 100);
  if (kernel == nullptr) {
    fail_argument(std::string(op) + ": config = " + std::to_string(config) +
                  ": there is no such kernel for this weight, dtype and GPU; "
                  "use -1 (csrc/sm70/small_gemm.cu has the numbers)");
  }
  const Call<Weight> call{
      op,
      args,
      weight,
      x,
      stream,
      attribute(cudaDevAttrMultiProcessorCount),
      attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor),
      config < 0 ? 0 : config / 100};
  (at.half ? kernel->fp16 : kernel->bf16)(call);
}

void nvfp4_small_gemm(const Tensor& x, const Tensor& packed,
                      const Tensor& block_scales, const Tensor& global_scale,
                      const std::optional<Tensor>& bias, Tensor& out,
                      int64_t config) {
  const Nvfp4Gemm args = nvfp4_gemm_args(x, packed, block_scales, global_scale,
                                         bias, out, /*fp32=*/false);
  Argument("nvfp4_small_gemm", "packed", packed).aligned(8);
  const auto aligned = [](const void* pointer, uintptr_t bytes) {
    return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
  };
  const bool wide = args.weight.columns % 32 == 0 &&
                    aligned(args.weight.packed, 16) &&
                    aligned(args.weight.block_scales, 2);
  multiply("nvfp4_small_gemm", kNvfp4Kernels, args.gemm, args.weight, x, out,
           wide ? 32 : 16, config);
}

void fp8_small_gemm(const Tensor& x, const Tensor& weight, const Tensor& scales,
                    const std::optional<Tensor>& bias, Tensor& out,
                    int64_t config) {
  const Fp8Gemm args =
      fp8_gemm_args(x, weight, scales, bias, out, /*fp32=*/false);
  Argument("fp8_small_gemm", "weight", weight).aligned(16);
  multiply("fp8_small_gemm", kFp8Kernels, args.gemm, args.weight, x, out, 16,
           config);
}

}  // namespace
}  // namespace vllm::sm70

STABLE_TORCH_LIBRARY_IMPL(_sm70_C, CUDA, m) {
  m.impl("nvfp4_small_gemm", TORCH_BOX(&vllm::sm70::nvfp4_small_gemm));
  m.impl("fp8_small_gemm", TORCH_BOX(&vllm::sm70::fp8_small_gemm));
}
