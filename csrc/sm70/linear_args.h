// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// The arguments of the operators that multiply and activate, checked, as plain
// pointers and numbers. Shared by the CPU and the CUDA implementations.
#pragma once

#include <algorithm>
#include <optional>

#include "dequantize_args.h"

namespace vllm::sm70 {

// x, bias and out of `out = x @ W^T + bias`. All three have one dtype.
struct GemmArgs {
  const void* x;     // [m, k]
  const void* bias;  // [n], or null
  void* out;         // [m, n]
  OutputFormat format;
  int64_t x_stride;    // elements from one row to the next
  int64_t out_stride;  // the same; more than n for a slice of columns
  int64_t m;
  int64_t n;
  int64_t k;
};

// The distance of a matrix's rows, whose elements must be neighbours.
inline int64_t row_stride(const char* op, const char* name,
                          const Tensor& tensor) {
  const int64_t rows = tensor.size(0), columns = tensor.size(1);
  if (rows == 0 || columns == 0) return columns;
  if ((columns > 1 && tensor.stride(1) != 1) ||
      (rows > 1 && tensor.stride(0) < columns)) {
    Argument(op, name, tensor)
        .fail(
            "must have rows of neighbouring elements that do not overlap (a "
            "contiguous matrix or a slice of its columns); call .contiguous()");
  }
  // That of a single row may be anything.
  return rows > 1 ? tensor.stride(0) : std::max(tensor.stride(0), columns);
}

inline void check_float_dtype(const Argument& argument, bool fp32) {
  if (fp32) {
    argument.dtype({ScalarType::Half, ScalarType::BFloat16, ScalarType::Float});
  } else {
    argument.dtype({ScalarType::Half, ScalarType::BFloat16});
  }
}

// The weight [n, k] has been checked. `fp32`: whether x may be float32.
inline GemmArgs gemm_args(const char* op, const Tensor& x, const Tensor& weight,
                          const char* weight_name, int64_t n, int64_t k,
                          const std::optional<Tensor>& bias, const Tensor& out,
                          bool fp32) {
  const Argument x_argument(op, "x", x);
  check_float_dtype(x_argument, fp32);
  x_argument.matrix("[M, K]")
      .shape(x.size(0), k, std::string("[M, K of ") + weight_name + "]")
      .same_device(weight_name, weight);
  const int64_t m = x.size(0);
  if (bias.has_value()) {
    const Argument argument(op, "bias", *bias);
    argument.dtype({x.scalar_type()}).same_device("x", x);
    if (bias->dim() != 1 || bias->size(0) != n) {
      argument.fail("must have shape [" + std::to_string(n) +
                    "], one for each row of " + weight_name + "; got " +
                    shape_text(*bias));
    }
    argument.contiguous();
  }
  Argument(op, "out", out)
      .dtype({x.scalar_type()})
      .matrix("[M, N]")
      .shape(m, n, std::string("[M of x, N of ") + weight_name + "]")
      .same_device("x", x);
  return {x.const_data_ptr(),
          bias.has_value() ? bias->const_data_ptr() : nullptr,
          out.mutable_data_ptr(),
          format_of(x),
          row_stride(op, "x", x),
          row_stride(op, "out", out),
          m,
          n,
          k};
}

struct Nvfp4Gemm {
  GemmArgs gemm;
  Nvfp4Weight weight;
};

inline Nvfp4Gemm nvfp4_gemm_args(const Tensor& x, const Tensor& packed,
                                 const Tensor& block_scales,
                                 const Tensor& global_scale,
                                 const std::optional<Tensor>& bias,
                                 const Tensor& out, bool fp32) {
  constexpr const char* kOp = "nvfp4_small_gemm";
  const Nvfp4Weight weight =
      nvfp4_weight(kOp, packed, block_scales, global_scale);
  return {gemm_args(kOp, x, packed, "packed", weight.rows, weight.columns, bias,
                    out, fp32),
          weight};
}

struct Fp8Gemm {
  GemmArgs gemm;
  Fp8Weight weight;
};

inline Fp8Gemm fp8_gemm_args(const Tensor& x, const Tensor& weight,
                             const Tensor& scales,
                             const std::optional<Tensor>& bias,
                             const Tensor& out, bool fp32) {
  constexpr const char* kOp = "fp8_small_gemm";
  const Fp8Weight checked = fp8_weight(kOp, weight, scales);
  return {gemm_args(kOp, x, weight, "weight", checked.rows, checked.columns,
                    bias, out, fp32),
          checked};
}

struct GemmNtArgs {
  GemmArgs gemm;
  const void* w;     // [n, k]
  int64_t w_stride;  // elements from one row to the next
};

inline GemmNtArgs gemm_nt_args(const Tensor& x, const Tensor& w,
                               const std::optional<Tensor>& bias,
                               const Tensor& out) {
  constexpr const char* kOp = "gemm_nt";
  const Argument weight(kOp, "w", w);
  weight.dtype({ScalarType::Half, ScalarType::BFloat16}).matrix("[N, K]");
  const GemmArgs gemm =
      gemm_args(kOp, x, w, "w", w.size(0), w.size(1), bias, out, false);
  weight.dtype({x.scalar_type()});
  return {gemm, w.const_data_ptr(), row_stride(kOp, "w", w)};
}

struct SiluAndMulArgs {
  const void* gate_up;  // [rows, 2 * columns]
  void* out;            // [rows, columns]
  OutputFormat format;
  int64_t rows;
  int64_t columns;
  int64_t out_stride;  // elements
};

inline SiluAndMulArgs silu_and_mul_args(const Tensor& gate_up,
                                        const Tensor& out) {
  constexpr const char* kOp = "silu_and_mul";
  const Argument input(kOp, "gate_up", gate_up);
  check_float_dtype(input, true);
  input.matrix("[M, 2 * t]").contiguous();
  const int64_t rows = gate_up.size(0);
  if (gate_up.size(1) % 2 != 0) {
    input.fail("must have an even number of columns; got shape " +
               shape_text(gate_up));
  }
  const int64_t columns = gate_up.size(1) / 2;
  Argument(kOp, "out", out)
      .dtype({gate_up.scalar_type()})
      .matrix("[M, t]")
      .shape(rows, columns, "[M, t] for this gate_up [M, 2 * t]")
      .same_device("gate_up", gate_up);
  return {gate_up.const_data_ptr(),
          out.mutable_data_ptr(),
          format_of(gate_up),
          rows,
          columns,
          row_stride(kOp, "out", out)};
}

}  // namespace vllm::sm70
