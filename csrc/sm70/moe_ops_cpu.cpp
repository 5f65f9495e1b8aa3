// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The operators of a mixture of experts on the CPU.
//
// A unit of work is up to kSlabRows rows of one expert times kUnitColumns columns
// of its product. The rows of x, wherever they are, are widened to FP32 into a
// buffer of the thread's; the weight is decoded 512 elements at a time
// (small_gemm_cpu.h). Bits depend on neither the units nor the threads.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <vector>

#include "cpu_kernels.h"
#include "moe_args.h"

namespace vllm::sm70 {
namespace {

constexpr int64_t kUnitColumns = 64;
// FP32 numbers of x that a thread holds at once, unless eight rows are more.
constexpr int64_t kSlabElements = 128 * 1024;

// A row's local expert, or -1.
int64_t local_expert(const MoeChoice& choice, int64_t row) {
  const int64_t id = choice.wide_ids
                         ? static_cast<const int64_t*>(choice.topk_ids)[row]
                         : static_cast<const int*>(choice.topk_ids)[row];
  if (id < 0 || id >= choice.global_experts) return -1;
  const int64_t expert =
      choice.expert_map == nullptr ? id : choice.expert_map[id];
  return expert < choice.local_experts ? expert : -1;
}

void moe_route(const Tensor& topk_ids, const std::optional<Tensor>& expert_map,
               Tensor& sorted_rows, Tensor& expert_offsets) {
  const MoeRouteArgs args =
      moe_route_args(topk_ids, expert_map, sorted_rows, expert_offsets);
  const MoeChoice& choice = args.choice;
  // Sorting by counting: of expert e at first in next[e + 1], then its place.
  std::vector<int> next(choice.local_experts + 1, 0);
  for (int64_t row = 0; row < choice.rows(); ++row) {
    const int64_t expert = local_expert(choice, row);
    if (expert >= 0) ++next[expert + 1];
  }
  for (int64_t e = 0; e < choice.local_experts; ++e) next[e + 1] += next[e];
  std::copy(next.begin(), next.end(), args.expert_offsets);
  for (int64_t row = 0; row < choice.rows(); ++row) {
    const int64_t expert = local_expert(choice, row);
    if (expert >= 0) args.sorted_rows[next[expert]++] = static_cast<int>(row);
  }
}

// Positions [begin, end) of sorted_rows, all of one expert.
struct Slab {
  int64_t expert;
  int64_t begin;
  int64_t end;
};

// The routes are data, so they are checked where that costs nothing: here.
std::vector<Slab> make_slabs(const char* op, const MoeWeight& weight,
                             const int* sorted_rows, const int* expert_offsets,
                             int64_t rows) {
  const int64_t most = std::clamp<int64_t>(kSlabElements / weight.columns, 8,
                                           cpu::kGemmMaxTokens);
  std::vector<Slab> slabs;
  for (int64_t e = 0; e < weight.experts; ++e) {
    const int64_t begin = expert_offsets[e], end = expert_offsets[e + 1];
    if ((e == 0 && begin != 0) || end < begin || end > rows) {
      fail_argument(std::string(op) +
                    ": expert_offsets must rise from 0 to at most the " +
                    std::to_string(rows) + " elements of sorted_rows; got " +
                    std::to_string(begin) + " and then " + std::to_string(end) +
                    "; fill both with moe_route");
    }
    for (int64_t at = begin; at < end; at += most) {
      slabs.push_back({e, at, std::min(end, at + most)});
    }
  }
  for (int64_t p = 0; p < expert_offsets[weight.experts]; ++p) {
    if (sorted_rows[p] < 0 || sorted_rows[p] >= rows) {
      fail_argument(std::string(op) + ": sorted_rows holds " +
                    std::to_string(sorted_rows[p]) +
                    ", expected 0 to its size - 1; fill it with moe_route");
    }
  }
  return slabs;
}

// Rows [begin, ...) of a half of an expert's weight.
cpu::Fp8Tile half_tile(const MoeWeight& weight, int64_t expert, int64_t half,
                       int64_t begin) {
  const int64_t at = expert * weight.halves + half;
  return {weight.codes + (at * weight.rows + begin) * weight.columns,
          weight.scales + at * weight.scale_rows * weight.scale_stride,
          weight.block_scales,
          weight.scale_stride,
          begin,
          weight.columns};
}

// Multiplies columns [begin, end) of every slab, in units. `source(position)` is
// the row of x that belongs to a position; `finish(position, begin, count,
// products)` takes `count` columns from `begin` on, one array for each half.
template <class Source, class Finish>
void multiply_slabs(const MoeWeight& weight, const std::vector<Slab>& slabs,
                    OutputFormat format, int64_t begin, int64_t end,
                    const Source& source, const Finish& finish) {
  const cpu::Kernels& kernels = cpu::kernels();
  const int64_t stride =
      ceil_div(weight.columns, cpu::kGemmColumnsStep) * cpu::kGemmColumnsStep;
  const int64_t tiles = ceil_div(end - begin, kUnitColumns);
  int64_t most = 0;
  for (const Slab& slab : slabs) most = std::max(most, slab.end - slab.begin);
  const auto run = [&](int64_t first_unit, int64_t end_unit) {
    const std::unique_ptr<float[]> x(new float[most * stride]());
    const std::unique_ptr<float[]> products(new float[2 * most * kUnitColumns]);
    int64_t widened = -1;
    for (int64_t unit = first_unit; unit < end_unit; ++unit) {
      const Slab& slab = slabs[unit / tiles];
      const int64_t count = slab.end - slab.begin;
      if (widened != unit / tiles) {
        widened = unit / tiles;
        for (int64_t i = 0; i < count; ++i) {
          kernels.widen(format, source(slab.begin + i), x.get() + i * stride,
                        weight.columns);
        }
      }
      const int64_t first = begin + unit % tiles * kUnitColumns;
      const int64_t columns = std::min(kUnitColumns, end - first);
      for (int64_t half = 0; half < weight.halves; ++half) {
        const cpu::GemmTokens tokens{
            x.get(),     stride,
            count,       weight.columns,
            nullptr,     products.get() + half * most * kUnitColumns,
            kUnitColumns};
        kernels.fp8_gemm(OutputFormat::kFp32, tokens,
                         half_tile(weight, slab.expert, half, first), 0,
                         columns);
      }
      for (int64_t i = 0; i < count; ++i) {
        const float* const gate = products.get() + i * kUnitColumns;
        finish(slab.begin + i, first, columns, gate,
               gate + most * kUnitColumns);
      }
    }
  };
  torch::stable::parallel_for(0, static_cast<int64_t>(slabs.size()) * tiles, 1,
                              run);
}

// `batch_tokens` and `config` pick among CUDA kernels only.
void fp8_moe_gate_up(const Tensor& x, const Tensor& w13,
                     const Tensor& w13_scale, const Tensor& sorted_rows,
                     const Tensor& expert_offsets,
                     const std::optional<Tensor>& topk_weights, Tensor& out,
                     int64_t activation, int64_t, int64_t) {
  const MoeGateUpArgs args =
      moe_gate_up_args(x, w13, w13_scale, sorted_rows, expert_offsets,
                       topk_weights, out, activation, /*fp32=*/true);
  const int64_t bytes = element_bytes(args.format);
  const std::vector<Slab> slabs =
      make_slabs("fp8_moe_gate_up", args.weight, args.sorted_rows,
                 args.expert_offsets, args.rows);
  const auto source = [&](int64_t position) {
    const int64_t token = args.sorted_rows[position] / args.top_k;
    return static_cast<const char*>(args.x) + token * args.x_stride * bytes;
  };
  multiply_slabs(args.weight, slabs, args.format, 0, args.weight.rows, source,
                 [&](int64_t position, int64_t first, int64_t count,
                     const float* gate, const float* up) {
                   const float factor =
                       args.topk_weights == nullptr
                           ? 1.0f
                           : args.topk_weights[args.sorted_rows[position]];
                   cpu::kernels().moe_activate(
                       args.format, args.activation, gate, up, factor,
                       static_cast<char*>(args.out) +
                           (position * args.weight.rows + first) * bytes,
                       count);
                 });
}

void fp8_moe_down(const Tensor& act, const Tensor& w2, const Tensor& w2_scale,
                  const Tensor& sorted_rows, const Tensor& expert_offsets,
                  const Tensor& topk_ids,
                  const std::optional<Tensor>& expert_map,
                  const std::optional<Tensor>& topk_weights, Tensor& partial,
                  Tensor& out, int64_t, int64_t) {
  const MoeDownArgs args =
      moe_down_args(act, w2, w2_scale, sorted_rows, expert_offsets, topk_ids,
                    expert_map, topk_weights, partial, out, /*fp32=*/true);
  const cpu::Kernels& kernels = cpu::kernels();
  const MoeChoice& choice = args.choice;
  const int64_t bytes = element_bytes(args.format);
  const std::vector<Slab> slabs =
      make_slabs("fp8_moe_down", args.weight, args.sorted_rows,
                 args.expert_offsets, choice.rows());
  const auto source = [&](int64_t position) {
    return static_cast<const char*>(args.act) +
           position * args.weight.columns * bytes;
  };
  // Where a tile's part of row t * k + j is kept until it is summed up: for j = 0
  // in `out`, in the place of the sum.
  const auto part = [&](int64_t row, int64_t tile) {
    const int64_t token = row / choice.top_k, j = row % choice.top_k;
    if (j == 0) {
      return static_cast<char*>(args.out) +
             (token * args.out_stride + tile) * bytes;
    }
    const int64_t partial_row = token * (choice.top_k - 1) + j - 1;
    return static_cast<char*>(args.partial) + partial_row * args.width * bytes;
  };
  for (int64_t tile = 0; tile < args.weight.rows; tile += args.width) {
    const int64_t tile_end = std::min(tile + args.width, args.weight.rows);
    multiply_slabs(
        args.weight, slabs, args.format, tile, tile_end, source,
        [&](int64_t position, int64_t first, int64_t count,
            const float* products, const float*) {
          const int64_t row = args.sorted_rows[position];
          const float factor =
              args.topk_weights == nullptr ? 1.0f : args.topk_weights[row];
          kernels.moe_weigh(args.format, products, factor,
                            part(row, tile) + (first - tile) * bytes, count);
        });
    const int64_t work = (tile_end - tile) * (choice.top_k + 1);
    torch::stable::parallel_for(
        0, choice.tokens, std::max<int64_t>(1, 32768 / work),
        [&](int64_t begin, int64_t end) {
          std::vector<const void*> rows(choice.top_k);
          for (int64_t token = begin; token < end; ++token) {
            int64_t present = 0;
            for (int64_t j = 0; j < choice.top_k; ++j) {
              const int64_t row = token * choice.top_k + j;
              if (local_expert(choice, row) >= 0) {
                rows[present++] = part(row, tile);
              }
            }
            kernels.moe_sum(args.format, rows.data(), present,
                            static_cast<char*>(args.out) +
                                (token * args.out_stride + tile) * bytes,
                            tile_end - tile);
          }
        });
  }
}

}  // namespace
}  // namespace vllm::sm70

STABLE_TORCH_LIBRARY_IMPL(_sm70_C, CPU, m) {
  m.impl("moe_route", TORCH_BOX(&vllm::sm70::moe_route));
  m.impl("fp8_moe_gate_up", TORCH_BOX(&vllm::sm70::fp8_moe_gate_up));
  m.impl("fp8_moe_down", TORCH_BOX(&vllm::sm70::fp8_moe_down));
}
