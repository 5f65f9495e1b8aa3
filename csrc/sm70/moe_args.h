// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The arguments of the MoE operators, checked, as plain pointers and numbers.
// Shared by the CPU and the CUDA implementations.
//
// T tokens go to k experts each: row r = t * k + j is token t's j-th expert.
// E experts are local. `sorted_rows` lists the rows of each local expert one
// after another, expert e's at positions [expert_offsets[e],
// expert_offsets[e + 1]).
#pragma once

#include <algorithm>
#include <optional>
#include <utility>

#include "linear_args.h"
#include "moe_activation.h"
#include "small_gemm_plan.h"

namespace vllm::sm70 {

// Rows and positions are 32-bit numbers on the device.
constexpr int64_t kMoeMaxRows = int64_t{1} << 30;

inline std::string list_text(std::initializer_list<int64_t> sizes) {
  std::string text = "[";
  for (int64_t size : sizes) {
    text += (text.size() == 1 ? "" : ", ") + std::to_string(size);
  }
  return text + "]";
}

inline bool has_sizes(const Tensor& tensor,
                      std::initializer_list<int64_t> sizes) {
  if (tensor.dim() != static_cast<int64_t>(sizes.size())) return false;
  int64_t i = 0;
  for (int64_t size : sizes) {
    if (tensor.size(i++) != size) return false;
  }
  return true;
}

inline void check_sizes(const Argument& argument, const Tensor& tensor,
                        std::initializer_list<int64_t> sizes,
                        const std::string& meaning) {
  if (!has_sizes(tensor, sizes)) {
    argument.fail("must have shape " + list_text(sizes) + ", " + meaning +
                  "; got " + shape_text(tensor));
  }
}

inline void check_dimensions(const Argument& argument, const Tensor& tensor,
                             int64_t dimensions, const std::string& meaning) {
  if (tensor.dim() != dimensions) {
    argument.fail("must have shape " + meaning + "; got " + shape_text(tensor));
  }
}

// Which expert each row goes to.
struct MoeChoice {
  const void* topk_ids;   // [tokens, top_k]
  bool wide_ids;          // int64, else int32
  const int* expert_map;  // [global_experts]; null: ids are local already
  int64_t global_experts;
  int64_t local_experts;
  int64_t tokens;
  int64_t top_k;

  int64_t rows() const { return tokens * top_k; }
};

inline MoeChoice moe_choice(const char* op, const Tensor& topk_ids,
                            const std::optional<Tensor>& expert_map,
                            int64_t local_experts) {
  const Argument ids(op, "topk_ids", topk_ids);
  ids.dtype({ScalarType::Int, ScalarType::Long})
      .matrix("[T, top_k]")
      .contiguous();
  if (topk_ids.numel() > kMoeMaxRows) {
    ids.fail("has more than 2^30 rows; pass fewer tokens at once");
  }
  int64_t global_experts = local_experts;
  if (expert_map.has_value()) {
    const Argument map(op, "expert_map", *expert_map);
    map.dtype({ScalarType::Int}).same_device("topk_ids", topk_ids);
    check_dimensions(map, *expert_map, 1, "[number of global experts]");
    map.contiguous();
    global_experts = expert_map->size(0);
  }
  return {topk_ids.const_data_ptr(),
          topk_ids.scalar_type() == ScalarType::Long,
          expert_map.has_value()
              ? static_cast<const int*>(expert_map->const_data_ptr())
              : nullptr,
          global_experts,
          local_experts,
          topk_ids.size(0),
          topk_ids.size(1)};
}

// What moe_route writes: `sorted_rows` [rows], `expert_offsets` [experts + 1].
// Returns the number of local experts.
inline int64_t check_routes(const char* op, const Tensor& sorted_rows,
                            const Tensor& expert_offsets,
                            const char* other_name, const Tensor& other) {
  const Argument rows(op, "sorted_rows", sorted_rows);
  rows.dtype({ScalarType::Int}).same_device(other_name, other);
  check_dimensions(rows, sorted_rows, 1, "[T * top_k]");
  rows.contiguous();
  if (sorted_rows.numel() > kMoeMaxRows) {
    rows.fail("has more than 2^30 rows; pass fewer tokens at once");
  }
  const Argument offsets(op, "expert_offsets", expert_offsets);
  offsets.dtype({ScalarType::Int}).same_device(other_name, other);
  check_dimensions(offsets, expert_offsets, 1, "[local experts + 1]");
  offsets.contiguous();
  if (expert_offsets.size(0) < 2) {
    offsets.fail("must have at least two elements, [local experts + 1]; got " +
                 shape_text(expert_offsets));
  }
  return expert_offsets.size(0) - 1;
}

struct MoeRouteArgs {
  MoeChoice choice;
  int* sorted_rows;
  int* expert_offsets;
};

inline MoeRouteArgs moe_route_args(const Tensor& topk_ids,
                                   const std::optional<Tensor>& expert_map,
                                   const Tensor& sorted_rows,
                                   const Tensor& expert_offsets) {
  constexpr const char* kOp = "moe_route";
  const int64_t experts =
      check_routes(kOp, sorted_rows, expert_offsets, "topk_ids", topk_ids);
  const MoeChoice choice = moe_choice(kOp, topk_ids, expert_map, experts);
  check_sizes(Argument(kOp, "sorted_rows", sorted_rows), sorted_rows,
              {choice.rows()}, "[T * top_k] for this topk_ids");
  return {choice, static_cast<int*>(sorted_rows.mutable_data_ptr()),
          static_cast<int*>(expert_offsets.mutable_data_ptr())};
}

// The FP8 weights of all local experts. An expert has `halves` matrices
// [rows, columns], one below the other, each with scales of its own: gate and
// up, or one.
struct MoeWeight {
  const u8* codes;
  const float* scales;
  bool block_scales;     // one for each 128 x 128 of a half; else for each row
  int64_t scale_stride;  // block scales in a row of blocks
  int64_t scale_rows;    // rows of blocks, or of scales, in a half
  int64_t experts;
  int64_t halves;
  int64_t rows;  // of a half
  int64_t columns;
};

inline MoeWeight moe_weight(const char* op, const char* name,
                            const Tensor& weight, const char* scales_name,
                            const Tensor& scales, int64_t experts,
                            int64_t halves, int64_t rows, const char* meaning,
                            const char* other_name, const Tensor& other) {
  const Argument argument(op, name, weight);
  argument.dtype({ScalarType::Float8_e4m3fn, ScalarType::Byte})
      .same_device(other_name, other);
  check_dimensions(argument, weight, 3, meaning);
  argument.contiguous();
  check_sizes(argument, weight, {experts, halves * rows, weight.size(2)},
              meaning);
  const int64_t columns = weight.size(2);
  check_columns(argument, columns);
  if (columns == 0 || rows == 0) argument.fail("must not be empty");
  if (rows % 16 != 0) {
    argument.fail(
        "must have a multiple of 16 rows for each expert (and each "
        "of gate and up); got " +
        std::to_string(rows));
  }
  const int64_t block_rows = ceil_div(rows, kFp8Block);
  const int64_t block_columns = ceil_div(columns, kFp8Block);
  const Argument scale(op, scales_name, scales);
  scale.dtype({ScalarType::Float}).same_device(other_name, other);
  const bool block_scales =
      has_sizes(scales, {experts, halves * block_rows, block_columns});
  if (!block_scales && !has_sizes(scales, {experts, halves * rows}) &&
      !has_sizes(scales, {experts, halves * rows, 1})) {
    scale.fail("must have shape " +
               list_text({experts, halves * block_rows, block_columns}) +
               ", one for each block of 128 x 128" +
               (halves == 2 ? " (gate and up have blocks of their own), or "
                            : ", or ") +
               list_text({experts, halves * rows}) +
               ", one for each row; got " + shape_text(scales));
  }
  scale.contiguous();
  return {static_cast<const u8*>(weight.const_data_ptr()),
          static_cast<const float*>(scales.const_data_ptr()),
          block_scales,
          block_scales ? block_columns : 1,
          block_scales ? block_rows : rows,
          experts,
          halves,
          rows,
          columns};
}

inline const float* moe_topk_weights(const char* op,
                                     const std::optional<Tensor>& weights,
                                     int64_t tokens, int64_t top_k,
                                     const char* other_name,
                                     const Tensor& other) {
  if (!weights.has_value()) return nullptr;
  const Argument argument(op, "topk_weights", *weights);
  argument.dtype({ScalarType::Float}).same_device(other_name, other);
  check_sizes(argument, *weights, {tokens, top_k}, "[T, top_k]");
  argument.contiguous();
  return static_cast<const float*>(weights->const_data_ptr());
}

struct MoeGateUpArgs {
  const void* x;  // [tokens, weight.columns]
  int64_t x_stride;
  void* out;  // [rows, weight.rows], in the order of sorted_rows
  OutputFormat format;
  MoeWeight weight;
  const int* sorted_rows;
  const int* expert_offsets;
  const float* topk_weights;  // [rows], or null
  MoeActivation activation;
  int64_t tokens;
  int64_t top_k;
  int64_t rows;
};

// `fp32`: whether x may be float32.
inline MoeGateUpArgs moe_gate_up_args(const Tensor& x, const Tensor& w13,
                                      const Tensor& w13_scale,
                                      const Tensor& sorted_rows,
                                      const Tensor& expert_offsets,
                                      const std::optional<Tensor>& topk_weights,
                                      const Tensor& out, int64_t activation,
                                      bool fp32) {
  constexpr const char* kOp = "fp8_moe_gate_up";
  if (activation < 0 || activation >= kMoeActivations) {
    fail_argument(std::string(kOp) +
                  ": activation = " + std::to_string(activation) +
                  ": expected 0 to " + std::to_string(kMoeActivations - 1) +
                  " (csrc/sm70/moe_activation.h)");
  }
  const MoeActivation act = static_cast<MoeActivation>(activation);
  const Argument x_argument(kOp, "x", x);
  check_float_dtype(x_argument, fp32);
  x_argument.matrix("[T, K]");
  const int64_t tokens = x.size(0);
  const int64_t experts =
      check_routes(kOp, sorted_rows, expert_offsets, "x", x);
  const int64_t rows = sorted_rows.size(0);
  if (tokens == 0 ? rows != 0 : rows % tokens != 0) {
    Argument(kOp, "sorted_rows", sorted_rows)
        .fail("must have top_k elements for each of the " +
              std::to_string(tokens) + " rows of x; got " +
              std::to_string(rows));
  }
  const Argument out_argument(kOp, "out", out);
  out_argument.dtype({x.scalar_type()})
      .matrix("[T * top_k, I]")
      .same_device("x", x);
  check_sizes(out_argument, out, {rows, out.size(1)},
              "[T * top_k, I] for this sorted_rows");
  out_argument.contiguous();
  const bool gated = is_gated(act);
  const MoeWeight weight = moe_weight(
      kOp, "w13", w13, "w13_scale", w13_scale, experts, gated ? 2 : 1,
      out.size(1),
      gated ? "[local experts, 2 * I, K] for this expert_offsets and out"
            : "[local experts, I, K] for this expert_offsets and out",
      "x", x);
  x_argument.shape(tokens, weight.columns, "[T, K of w13]");
  const int64_t top_k = tokens == 0 ? 1 : rows / tokens;
  return {x.const_data_ptr(),
          row_stride(kOp, "x", x),
          out.mutable_data_ptr(),
          format_of(x),
          weight,
          static_cast<const int*>(sorted_rows.const_data_ptr()),
          static_cast<const int*>(expert_offsets.const_data_ptr()),
          moe_topk_weights(kOp, topk_weights, tokens, top_k, "x", x),
          act,
          tokens,
          top_k,
          rows};
}

// Of matrices whose rows do not overlap.
inline bool overlap(const Tensor& a, const Tensor& b) {
  const auto range = [](const Tensor& tensor) {
    const uintptr_t begin =
        reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
    const int64_t elements =
        tensor.numel() == 0
            ? 0
            : (tensor.size(0) - 1) * tensor.stride(0) + tensor.size(1);
    return std::pair(begin, begin + elements * tensor.element_size());
  };
  const auto [a_begin, a_end] = range(a);
  const auto [b_begin, b_end] = range(b);
  return a_begin < b_end && b_begin < a_end;
}

struct MoeDownArgs {
  const void* act;  // [rows, weight.columns], in the order of sorted_rows
  void* partial;    // [tokens * (top_k - 1), width]: those of j >= 1
  void* out;        // [tokens, weight.rows]
  int64_t out_stride;
  int64_t width;
  OutputFormat format;
  MoeWeight weight;
  const int* sorted_rows;
  const int* expert_offsets;
  const float* topk_weights;  // [rows], or null
  MoeChoice choice;
};

inline MoeDownArgs moe_down_args(
    const Tensor& act, const Tensor& w2, const Tensor& w2_scale,
    const Tensor& sorted_rows, const Tensor& expert_offsets,
    const Tensor& topk_ids, const std::optional<Tensor>& expert_map,
    const std::optional<Tensor>& topk_weights, const Tensor& partial,
    const Tensor& out, bool fp32) {
  constexpr const char* kOp = "fp8_moe_down";
  const Argument act_argument(kOp, "act", act);
  check_float_dtype(act_argument, fp32);
  act_argument.matrix("[T * top_k, I]");
  const int64_t experts =
      check_routes(kOp, sorted_rows, expert_offsets, "act", act);
  const MoeChoice choice = moe_choice(kOp, topk_ids, expert_map, experts);
  Argument(kOp, "topk_ids", topk_ids).same_device("act", act);
  check_sizes(Argument(kOp, "sorted_rows", sorted_rows), sorted_rows,
              {choice.rows()}, "[T * top_k] for this topk_ids");
  const Argument out_argument(kOp, "out", out);
  out_argument.dtype({act.scalar_type()})
      .matrix("[T, H]")
      .same_device("act", act);
  check_sizes(out_argument, out, {choice.tokens, out.size(1)},
              "[T of topk_ids, H]");
  const MoeWeight weight = moe_weight(
      kOp, "w2", w2, "w2_scale", w2_scale, experts, 1, out.size(1),
      "[local experts, H, I] for this expert_offsets and out", "act", act);
  act_argument.shape(choice.rows(), weight.columns, "[T * top_k, I of w2]")
      .contiguous();
  const Argument partial_argument(kOp, "partial", partial);
  partial_argument.dtype({act.scalar_type()})
      .matrix("[T * (top_k - 1), width of a tile]")
      .same_device("act", act);
  const int64_t partial_rows =
      choice.tokens * std::max<int64_t>(choice.top_k - 1, 0);
  check_sizes(partial_argument, partial, {partial_rows, partial.size(1)},
              "[T * (top_k - 1), width of a tile]");
  partial_argument.contiguous();
  const int64_t width = partial.size(1);
  if (width < 16 || width % 16 != 0) {
    partial_argument.fail(
        "must have a width that is a multiple of 16 columns, 16 at least; "
        "got " +
        std::to_string(width));
  }
  // Workspaces are reused: a caller may well hand in such an output.
  if (overlap(out, partial)) out_argument.fail("must not overlap partial");
  if (overlap(out, act)) {
    out_argument.fail(
        "must not overlap act, which is read while out is written");
  }
  return {act.const_data_ptr(),
          partial.mutable_data_ptr(),
          out.mutable_data_ptr(),
          row_stride(kOp, "out", out),
          width,
          format_of(act),
          weight,
          static_cast<const int*>(sorted_rows.const_data_ptr()),
          static_cast<const int*>(expert_offsets.const_data_ptr()),
          moe_topk_weights(kOp, topk_weights, choice.tokens, choice.top_k,
                           "act", act),
          choice};
}

}  // namespace vllm::sm70
