// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The operators of a mixture of experts on CUDA: check, choose a kernel, launch.
// Nothing is allocated, and nothing on the device is waited for: grids are sized
// by what the shapes allow at most.
//
// A product's kernel has a number, the rows of one expert that it makes at once,
// which the argument `config` asks for in benchmarks: 1, 2 and 4 are those of
// moe_gemv.cuh; 16, 64 and 128 those of moe_tensor_gemm.cuh, which go through every
// other tile of the second product backwards: what a tile has read last may still
// be in the L2 cache. -16, -64 and -128 do not.

#include <cuda_runtime.h>

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstdlib>
#include <optional>

#include "cuda_launch.h"
#include "moe_args.h"
#include "moe_gemv.cuh"
#include "moe_plan.h"
#include "moe_route.cuh"
#include "moe_sum.cuh"
#include "moe_tensor_gemm.cuh"

namespace vllm::sm70 {
namespace {

template <class Id>
MoeChoiceParams<Id> choice_params(const MoeChoice& choice) {
  return {static_cast<const Id*>(choice.topk_ids), choice.expert_map,
          static_cast<int>(choice.global_experts),
          static_cast<int>(choice.local_experts),
          static_cast<int>(choice.rows())};
}

template <class Body>
void for_id(const MoeChoice& choice, const Body& body) {
  choice.wide_ids ? body(i64{}) : body(int{});
}

template <class Body>
void for_float(OutputFormat format, const Body& body) {
  format == OutputFormat::kFp16 ? body(Fp16{}) : body(Bf16{});
}

void moe_route(const Tensor& topk_ids, const std::optional<Tensor>& expert_map,
               Tensor& sorted_rows, Tensor& expert_offsets) {
  constexpr const char* kOp = "moe_route";
  const MoeRouteArgs args =
      moe_route_args(topk_ids, expert_map, sorted_rows, expert_offsets);
  const DeviceStream stream(topk_ids);
  // A warp for each step of its loop, up to all that there are.
  const int64_t warps =
      std::clamp<int64_t>(ceil_div(args.choice.rows(), 32 * kMoeRouteUnroll), 1,
                          kMoeRouteThreads / 32);
  const dim3 grid =
      checked_grid(kOp, ceil_div(args.choice.local_experts, kMoeRouteExperts));
  for_id(args.choice, [&](auto id) {
    using Id = decltype(id);
    const MoeRouteParams<Id> params{choice_params<Id>(args.choice),
                                    args.sorted_rows, args.expert_offsets};
    check_launch(kOp, launch<&moe_route_kernel<Id>>(
                          grid, stream, params, static_cast<int>(32 * warps)));
  });
}

// What a product over the experts is launched with, besides its parameters.
struct Product {
  const char* op;
  const Tensor& x;
  cudaStream_t stream;
  const MoeWeight& weight;
  int64_t rows;  // T * top_k
  int kernel;    // its number
};

template <auto* kKernel, class Format>
void run_gemv(const Product& product, const MoeGemmParams<Format>& params,
              int columns) {
  const int64_t units = ceil_div(params.end_n - params.begin_n, columns);
  const int64_t shares =
      moe_gemv_shares(units, product.rows, Entry<kKernel>::kThreads / 32);
  const dim3 grid = checked_grid(product.op, shares, product.rows);
  check_launch(product.op, launch<kKernel>(grid, product.stream, params));
}

template <auto* kKernel, int kM, class Format>
void run_tensor(const Product& product, const MoeGemmParams<Format>& params,
                int columns) {
  const int64_t tiles_n = ceil_div(params.end_n - params.begin_n, columns);
  const int64_t tiles_m = product.rows / kM + product.weight.experts;
  const dim3 grid = checked_grid(product.op, tiles_m * tiles_n);
  check_launch(product.op, launch<kKernel>(grid, product.stream, params));
}

template <class Format, bool kBlockScales, bool kGated>
void run_number(const Product& product, const MoeGemmParams<Format>& params) {
  const auto gemv = [&]<int kTokens>() {
    constexpr int kRows = kMoeGemvRows<kTokens>;
    run_gemv<&moe_gemv_kernel<Format, kBlockScales, kGated, kTokens>>(
        product, params, kGated ? kRows / 2 : kRows);
  };
  const auto tensor = [&]<int kM>() {
    run_tensor<&moe_tensor_gemm_kernel<Format, kBlockScales, kGated, kM>, kM>(
        product, params, kGated ? MoeTile<kM>::kN / 2 : MoeTile<kM>::kN);
  };
  switch (product.kernel) {
    case 1:
      return gemv.template operator()<1>();
    case 2:
      return gemv.template operator()<2>();
    case 4:
      return gemv.template operator()<4>();
    case 16:
      return tensor.template operator()<16>();
    case 64:
      return tensor.template operator()<64>();
    default:
      return tensor.template operator()<128>();
  }
}

template <class Format>
void run_product(const Product& product, const MoeGemmParams<Format>& params) {
  const bool gated = product.weight.halves == 2;
  if (product.weight.block_scales) {
    gated ? run_number<Format, true, true>(product, params)
          : run_number<Format, true, false>(product, params);
  } else {
    gated ? run_number<Format, false, true>(product, params)
          : run_number<Format, false, false>(product, params);
  }
}

// The kernel's number, for this call of an operator.
int kernel_number(const char* op, const Tensor& x, const char* x_name,
                  const MoeWeight& weight, int64_t tokens, int64_t top_k,
                  int64_t batch_tokens, int64_t config) {
  int major = 0;
  check_launch(op,
               cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor,
                                      x.get_device_index()));
  if (x.scalar_type() == ScalarType::BFloat16 && major < 8) {
    Argument(op, x_name, x)
        .fail(
            "is torch.bfloat16, which this GPU has no tensor cores for; use "
            "torch.float16 (--dtype float16)");
  }
  if (batch_tokens != -1 && batch_tokens < tokens) {
    fail_argument(std::string(op) +
                  ": batch_tokens = " + std::to_string(batch_tokens) +
                  ": expected at least the " + std::to_string(tokens) +
                  " tokens of this call, or -1 for them");
  }
  if (config == -1) {
    return moe_usual_kernel(batch_tokens == -1 ? tokens : batch_tokens, tokens,
                            top_k, weight.experts);
  }
  for (int number : kMoeKernels) {
    const bool exists =
        number <= 4 ? tokens * top_k <= kMoeGemvMaxRows && config == number
                    : std::abs(config) == number;
    if (exists) return number;
  }
  fail_argument(std::string(op) + ": config = " + std::to_string(config) +
                ": there is no such kernel for this many tokens; use -1 "
                "(csrc/sm70/moe_ops.cu has the numbers)");
}

// Kernels count x in units of 8 elements and the weights in units of 16 codes,
// and hold the counts in 32 bits.
constexpr int64_t kMostUnits = 0x7fffffff;

void check_wide_rows(const Argument& argument, int64_t rows, int64_t stride) {
  argument.aligned(16);
  if (rows > 1 && stride % 8 != 0) {
    argument.fail(
        "must have rows that start at multiples of 16 bytes; call "
        ".contiguous() on it first");
  }
  if (rows > 1 && rows * stride / 8 > kMostUnits) {
    argument.fail(
        "is too large: more than 2^34 elements from its first to its "
        "last; pass fewer tokens at once");
  }
}

void check_weight(const char* op, const char* name, const Tensor& tensor) {
  const Argument argument(op, name, tensor);
  argument.aligned(16);
  if (tensor.numel() / 16 > kMostUnits) {
    argument.fail("has more than 2^35 elements");
  }
}

// What both products take alike of the arguments of their operators. The rest is
// zero, and MoeActivation::kNone.
template <class Format, class Args>
MoeGemmParams<Format> gemm_params(const Args& args) {
  const MoeWeight& weight = args.weight;
  return {.codes = weight.codes,
          .scales = weight.scales,
          .sorted_rows = args.sorted_rows,
          .expert_offsets = args.expert_offsets,
          .topk_weights = args.topk_weights,
          .scale_stride = static_cast<int>(weight.scale_stride),
          .scale_rows = static_cast<int>(weight.scale_rows),
          .experts = static_cast<int>(weight.experts),
          .n = static_cast<int>(weight.rows),
          .k = static_cast<int>(weight.columns),
          .activation = MoeActivation::kNone};
}

void fp8_moe_gate_up(const Tensor& x, const Tensor& w13,
                     const Tensor& w13_scale, const Tensor& sorted_rows,
                     const Tensor& expert_offsets,
                     const std::optional<Tensor>& topk_weights, Tensor& out,
                     int64_t activation, int64_t batch_tokens, int64_t config) {
  constexpr const char* kOp = "fp8_moe_gate_up";
  const MoeGateUpArgs args =
      moe_gate_up_args(x, w13, w13_scale, sorted_rows, expert_offsets,
                       topk_weights, out, activation, /*fp32=*/false);
  const int number = kernel_number(kOp, x, "x", args.weight, args.tokens,
                                   args.top_k, batch_tokens, config);
  if (args.rows == 0) return;
  check_wide_rows(Argument(kOp, "x", x), args.tokens, args.x_stride);
  check_weight(kOp, "w13", w13);
  Argument(kOp, "out", out).aligned(16);
  const DeviceStream stream(x);
  const Product product{kOp, x, stream, args.weight, args.rows, number};
  for_float(args.format, [&](auto f) {
    using Format = decltype(f);
    using Storage = typename Format::Storage;
    MoeGemmParams<Format> params = gemm_params<Format>(args);
    params.x = static_cast<const Storage*>(args.x);
    params.out = static_cast<Storage*>(args.out);
    params.x_stride = args.x_stride;
    params.out_stride = params.n;
    params.end_n = params.n;
    params.top_k = static_cast<int>(args.top_k);
    params.activation = args.activation;
    run_product<Format>(product, params);
  });
}

template <class Format>
void sum_tile(const char* op, cudaStream_t stream, const MoeDownArgs& args,
              int64_t begin, int64_t end) {
  using Storage = typename Format::Storage;
  const int64_t units = (end - begin) / 8;
  const int64_t total = args.choice.tokens * units;
  const dim3 grid = checked_grid(op, ceil_div(total, kMoeSumThreads));
  for_id(args.choice, [&](auto id) {
    using Id = decltype(id);
    const MoeSumParams<Format, Id> params{
        choice_params<Id>(args.choice),
        static_cast<const Storage*>(args.partial),
        static_cast<Storage*>(args.out) + begin,
        args.out_stride,
        static_cast<int>(args.width),
        static_cast<int>(units),
        static_cast<int>(args.choice.top_k),
        total};
    check_launch(op, launch<&moe_sum_kernel<Format, Id>>(grid, stream, params));
  });
}

void fp8_moe_down(const Tensor& act, const Tensor& w2, const Tensor& w2_scale,
                  const Tensor& sorted_rows, const Tensor& expert_offsets,
                  const Tensor& topk_ids,
                  const std::optional<Tensor>& expert_map,
                  const std::optional<Tensor>& topk_weights, Tensor& partial,
                  Tensor& out, int64_t batch_tokens, int64_t config) {
  constexpr const char* kOp = "fp8_moe_down";
  const MoeDownArgs args =
      moe_down_args(act, w2, w2_scale, sorted_rows, expert_offsets, topk_ids,
                    expert_map, topk_weights, partial, out, /*fp32=*/false);
  const MoeChoice& choice = args.choice;
  const MoeWeight& weight = args.weight;
  const int number = kernel_number(kOp, act, "act", weight, choice.tokens,
                                   choice.top_k, batch_tokens, config);
  if (choice.tokens == 0) return;
  check_wide_rows(Argument(kOp, "act", act), choice.rows(), weight.columns);
  check_weight(kOp, "w2", w2);
  Argument(kOp, "partial", partial).aligned(16);
  check_wide_rows(Argument(kOp, "out", out), choice.tokens, args.out_stride);
  if (args.width > kMoeMaxRows) {
    Argument(kOp, "partial", partial).fail("has more than 2^30 columns");
  }
  const DeviceStream stream(act);
  const Product product{kOp, act, stream, weight, choice.rows(), number};
  const int64_t tiles = ceil_div(weight.rows, args.width);
  for_float(args.format, [&](auto f) {
    using Format = decltype(f);
    using Storage = typename Format::Storage;
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const int64_t begin = moe_tile_begin(tile, weight.rows, args.width);
      const int64_t end = moe_tile_begin(tile + 1, weight.rows, args.width);
      if (choice.rows() != 0) {
        MoeGemmParams<Format> params = gemm_params<Format>(args);
        params.x = static_cast<const Storage*>(args.act);
        params.out = static_cast<Storage*>(args.partial);
        params.sum = static_cast<Storage*>(args.out) + begin;
        params.x_stride = params.k;
        params.out_stride = args.width;
        params.sum_stride = args.out_stride;
        params.begin_n = static_cast<int>(begin);
        params.end_n = static_cast<int>(end);
        params.sum_k = static_cast<int>(choice.top_k);
        params.reverse = config >= -1 && tile % 2 == 1;
        run_product<Format>(product, params);
      }
      sum_tile<Format>(kOp, stream, args, begin, end);
    }
  });
}

}  // namespace
}  // namespace vllm::sm70

STABLE_TORCH_LIBRARY_IMPL(_sm70_C, CUDA, m) {
  m.impl("moe_route", TORCH_BOX(&vllm::sm70::moe_route));
  m.impl("fp8_moe_gate_up", TORCH_BOX(&vllm::sm70::fp8_moe_gate_up));
  m.impl("fp8_moe_down", TORCH_BOX(&vllm::sm70::fp8_moe_down));
}
