// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Argument checks that the CPU and the CUDA implementation of an operator
// share. Each error names the operator, the argument, what it is and what was
// expected.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>

namespace vllm::sm70 {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Python sees a ValueError. (STD_TORCH_CHECK would put this file's path first.)
[[noreturn]] inline void fail_argument(const std::string& message) {
  throw std::invalid_argument(message);
}

inline std::string dtype_name(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Half:
      return "torch.float16";
    case ScalarType::BFloat16:
      return "torch.bfloat16";
    case ScalarType::Float:
      return "torch.float32";
    case ScalarType::Byte:
      return "torch.uint8";
    case ScalarType::Int:
      return "torch.int32";
    case ScalarType::Long:
      return "torch.int64";
    case ScalarType::Float8_e4m3fn:
      return "torch.float8_e4m3fn";
    default:
      return torch::headeronly::toString(dtype);
  }
}

inline std::string shape_text(const Tensor& tensor) {
  std::string text = "[";
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(tensor.size(i));
  }
  return text + "]";
}

// An operator's argument under check.
class Argument {
 public:
  Argument(const char* op, const char* name, const Tensor& tensor)
      : what_(std::string(op) + ": " + name), tensor_(tensor) {}

  const Argument& dtype(std::initializer_list<ScalarType> allowed) const {
    std::string expected;
    for (ScalarType dtype : allowed) {
      if (tensor_.scalar_type() == dtype) return *this;
      expected += (expected.empty() ? "" : " or ") + dtype_name(dtype);
    }
    fail("must be " + expected + "; got " + dtype_name(tensor_.scalar_type()));
  }

  const Argument& matrix(const char* meaning) const {
    if (tensor_.dim() != 2) {
      fail(std::string("must have two dimensions, ") + meaning +
           "; got shape " + shape_text(tensor_));
    }
    return *this;
  }

  const Argument& shape(int64_t rows, int64_t columns,
                        const std::string& meaning) const {
    if (!has_shape(rows, columns)) {
      fail("must have shape [" + std::to_string(rows) + ", " +
           std::to_string(columns) + "], " + meaning + "; got " +
           shape_text(tensor_));
    }
    return *this;
  }

  const Argument& one_element() const {
    if (tensor_.numel() != 1) {
      fail("must have exactly one element; got shape " + shape_text(tensor_));
    }
    return *this;
  }

  const Argument& contiguous() const {
    if (!tensor_.is_contiguous()) {
      fail("must be contiguous; call .contiguous() on it first");
    }
    return *this;
  }

  const Argument& same_device(const char* other_name,
                              const Tensor& other) const {
    if (tensor_.is_cuda() != other.is_cuda() ||
        tensor_.is_cpu() != other.is_cpu() ||
        tensor_.get_device_index() != other.get_device_index()) {
      fail(std::string("must be on the device of ") + other_name + ", " +
           device_text(other) + "; got " + device_text(tensor_));
    }
    return *this;
  }

  // CUDA kernels use wide loads and stores. Tensors that torch allocates start
  // at a multiple of 512 bytes; a view at an odd offset may not.
  const Argument& aligned(uintptr_t bytes) const {
    if (reinterpret_cast<uintptr_t>(tensor_.data_ptr()) % bytes != 0) {
      fail("must start at a multiple of " + std::to_string(bytes) +
           " bytes; call .clone() on this view first");
    }
    return *this;
  }

  bool has_shape(int64_t rows, int64_t columns) const {
    return tensor_.dim() == 2 && tensor_.size(0) == rows &&
           tensor_.size(1) == columns;
  }

  [[noreturn]] void fail(const std::string& problem) const {
    fail_argument(what_ + " " + problem);
  }

 private:
  static std::string device_text(const Tensor& tensor) {
    if (tensor.is_cpu()) return "cpu";
    const std::string index = std::to_string(tensor.get_device_index());
    return (tensor.is_cuda() ? "cuda:" : "device ") + index;
  }

  std::string what_;
  const Tensor& tensor_;
};

}  // namespace vllm::sm70
