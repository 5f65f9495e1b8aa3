// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The arguments of the dequantisation operators, checked, as plain pointers and
// numbers. Shared by the CPU and the CUDA implementation.
#pragma once

#include "fp_formats.h"
#include "tensor_checks.h"

namespace vllm::sm70 {

constexpr int64_t kNvfp4Block = 16;
constexpr int64_t kFp8Block = 128;

inline void check_columns(const Argument& argument, int64_t columns) {
  if (columns % 16 != 0) {
    argument.fail("must hold a multiple of 16 elements in each row; got K = " +
                  std::to_string(columns));
  }
}

inline OutputFormat format_of(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Half:
      return OutputFormat::kFp16;
    case ScalarType::BFloat16:
      return OutputFormat::kBf16;
    default:
      return OutputFormat::kFp32;
  }
}

// Rows of a weight that is cut into `parts` of `part_rows` rows: `rows` of each
// part, from `row_begin` of it on.
struct Tile {
  void* out;  // [parts, rows, K]
  OutputFormat out_format;
  int64_t parts;
  int64_t rows;
  int64_t part_rows;
  int64_t row_begin;
};

// `out` is [rows, K], a tile of the weight as one part, or [parts, rows, K].
inline Tile checked_tile(const char* op, const Tensor& out, int64_t row_begin,
                         const char* weight_name, const Tensor& weight,
                         int64_t columns) {
  const Argument argument(op, "out", out);
  argument.dtype({ScalarType::Half, ScalarType::BFloat16, ScalarType::Float});
  const int64_t dim = out.dim();
  if ((dim != 2 && dim != 3) || out.size(dim - 1) != columns) {
    argument.fail("must have shape [rows of the tile, " +
                  std::to_string(columns) + "] or [parts, rows of the tile, " +
                  std::to_string(columns) + "], the last being K of " +
                  weight_name + "; got " + shape_text(out));
  }
  argument.contiguous().same_device(weight_name, weight);
  const int64_t parts = dim == 3 ? out.size(0) : 1;
  if (parts < 1 || weight.size(0) % parts != 0) {
    argument.fail("must have a number of parts that divides the " +
                  std::to_string(weight.size(0)) + " rows of " + weight_name +
                  "; got " + std::to_string(parts));
  }
  const int64_t part_rows = weight.size(0) / parts;
  const int64_t rows = out.size(dim - 2);
  // Not by row_begin + rows, which may overflow.
  if (row_begin < 0 || row_begin > part_rows - rows) {
    fail_argument(std::string(op) +
                  ": row_begin and the rows of out must stay within the " +
                  std::to_string(part_rows) + " rows of " +
                  (dim == 3 ? "each part of " : "") + weight_name + "; got " +
                  std::to_string(rows) + " rows from " +
                  std::to_string(row_begin) + " on");
  }
  return {out.mutable_data_ptr(),
          format_of(out),
          parts,
          rows,
          part_rows,
          row_begin};
}

// An NVFP4 weight [rows, columns], checked.
struct Nvfp4Weight {
  const u8* packed;        // [rows, columns / 2]
  const u8* block_scales;  // [rows, columns / 16]
  const float* global_scale;
  int64_t rows;
  int64_t columns;
};

inline Nvfp4Weight nvfp4_weight(const char* op, const Tensor& packed,
                                const Tensor& block_scales,
                                const Tensor& global_scale) {
  const Argument weight(op, "packed", packed);
  weight.dtype({ScalarType::Byte}).matrix("[N, K / 2]").contiguous();
  const int64_t columns = packed.size(1) * 2;
  check_columns(weight, columns);
  Argument(op, "block_scales", block_scales)
      .dtype({ScalarType::Float8_e4m3fn, ScalarType::Byte})
      .shape(packed.size(0), columns / kNvfp4Block,
             "[N, K / 16] for this packed")
      .contiguous()
      .same_device("packed", packed);
  Argument(op, "global_scale", global_scale)
      .dtype({ScalarType::Float})
      .one_element()
      .same_device("packed", packed);
  return {static_cast<const u8*>(packed.const_data_ptr()),
          static_cast<const u8*>(block_scales.const_data_ptr()),
          static_cast<const float*>(global_scale.const_data_ptr()),
          packed.size(0), columns};
}

// An FP8 E4M3 weight [rows, columns], checked.
struct Fp8Weight {
  const u8* codes;       // [rows, columns]
  const float* scales;   // [ceil(rows / 128), scale_stride], or [rows, 1]
  bool block_scales;     // the first of the two
  int64_t scale_stride;  // ceil(columns / 128)
  int64_t rows;
  int64_t columns;
};

inline Fp8Weight fp8_weight(const char* op, const Tensor& weight,
                            const Tensor& scales) {
  const Argument weight_argument(op, "weight", weight);
  weight_argument.dtype({ScalarType::Float8_e4m3fn, ScalarType::Byte})
      .matrix("[N, K]")
      .contiguous();
  const int64_t rows = weight.size(0);
  const int64_t columns = weight.size(1);
  check_columns(weight_argument, columns);
  const int64_t block_rows = (rows + kFp8Block - 1) / kFp8Block;
  const int64_t block_columns = (columns + kFp8Block - 1) / kFp8Block;
  const Argument scales_argument(op, "scales", scales);
  scales_argument.dtype({ScalarType::Float})
      .contiguous()
      .same_device("weight", weight);
  // The two shapes are the same only where N = 1, and so are the scales.
  const bool block_scales =
      scales_argument.has_shape(block_rows, block_columns);
  if (!block_scales && !scales_argument.has_shape(rows, 1)) {
    scales_argument.fail("must have shape [" + std::to_string(block_rows) +
                         ", " + std::to_string(block_columns) +
                         "], one for each block of 128 x 128, or [" +
                         std::to_string(rows) + ", 1], one for each row; got " +
                         shape_text(scales));
  }
  return {static_cast<const u8*>(weight.const_data_ptr()),
          static_cast<const float*>(scales.const_data_ptr()),
          block_scales,
          block_columns,
          rows,
          columns};
}

struct Nvfp4DequantizeArgs {
  Nvfp4Weight weight;
  Tile tile;
};

inline Nvfp4DequantizeArgs nvfp4_dequantize_args(const Tensor& packed,
                                                 const Tensor& block_scales,
                                                 const Tensor& global_scale,
                                                 const Tensor& out,
                                                 int64_t row_begin) {
  constexpr const char* kOp = "nvfp4_dequantize";
  const Nvfp4Weight weight =
      nvfp4_weight(kOp, packed, block_scales, global_scale);
  return {weight,
          checked_tile(kOp, out, row_begin, "packed", packed, weight.columns)};
}

struct Fp8DequantizeArgs {
  Fp8Weight weight;
  Tile tile;
};

inline Fp8DequantizeArgs fp8_dequantize_args(const Tensor& weight,
                                             const Tensor& scales,
                                             const Tensor& out,
                                             int64_t row_begin) {
  constexpr const char* kOp = "fp8_dequantize";
  const Fp8Weight checked = fp8_weight(kOp, weight, scales);
  return {checked,
          checked_tile(kOp, out, row_begin, "weight", weight, checked.columns)};
}

}  // namespace vllm::sm70
