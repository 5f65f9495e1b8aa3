// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// out = x @ w^T + bias through cuBLASLt, with an algorithm that does not depend
// on N: the columns of a product that is made tile by tile have the bits of the
// product made at once.
//
// cuBLAS's own choice depends on N, and may split K among blocks for a narrow
// matrix, which changes the order of the additions. Here K is never split, and
// the algorithm is chosen once for each (M, K, dtype, bias, alignment, GPU), for
// the N of gemm_plan.h. The workspace is a few bytes from torch's allocator
// (cuBLAS's kernels for Hopper count their tiles in it), so a call can be
// captured into a CUDA graph after one call outside of it.
//
// In cuBLAS's column-major terms: out^T [N, M] = (w^T)^T [N, K] * x^T [K, M].

#include <cublasLt.h>
#include <cuda_runtime.h>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "cuda_launch.h"
#include "gemm_plan.h"
#include "linear_args.h"

namespace vllm::sm70 {
namespace {

// An algorithm must take all of these: a ragged last tile, a narrow layer, a
// wide one.
constexpr int64_t kProbedColumns[] = {8, 24, 264, 3584, 34816, 262144};
constexpr int kCandidates = 64;
// A tile counter takes 4 bytes; a split K would take far more than this.
constexpr size_t kWorkspaceBytes = 256;
// Prefill meets as many different M as there are prompt lengths.
constexpr size_t kMaxPlans = 1024;

void check_cublas(const char* what, cublasStatus_t status) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  throw std::runtime_error(std::string("gemm_nt: ") + what +
                           " failed: " + cublasLtGetStatusString(status));
}

// The largest power of two up to 16 that divides a row's address in bytes.
int alignment(const void* pointer, int64_t stride) {
  const uint64_t bits = reinterpret_cast<uint64_t>(pointer) |
                        static_cast<uint64_t>(stride * 2) | 16;
  return static_cast<int>(bits & -bits);
}

// What an algorithm is chosen for: everything but N.
struct PlanKey {
  int device;
  ScalarType dtype;
  bool bias;
  int64_t m;
  int64_t k;
  int64_t w_stride;
  int64_t x_stride;
  int w_alignment;
  int x_alignment;
  int out_alignment;

  auto operator<=>(const PlanKey&) const = default;
};

// The descriptions that cuBLASLt wants; all of it lives on the stack.
class Problem {
 public:
  Problem(const PlanKey& key, int64_t n, int64_t out_stride, const void* bias) {
    const cudaDataType_t type =
        key.dtype == ScalarType::Half ? CUDA_R_16F : CUDA_R_16BF;
    check_cublas(
        "cublasLtMatmulDescInit",
        cublasLtMatmulDescInit(&operation_, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    set(CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T);
    if (key.bias) {
      set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
      set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias);
    }
    layout(w_, type, key.k, n, key.w_stride);
    layout(x_, type, key.k, key.m, key.x_stride);
    layout(out_, type, n, key.m, out_stride);
  }

  std::vector<cublasLtMatmulHeuristicResult_t> candidates(
      cublasLtHandle_t handle, const PlanKey& key) {
    cublasLtMatmulPreferenceOpaque_t preference;
    check_cublas("cublasLtMatmulPreferenceInit",
                 cublasLtMatmulPreferenceInit(&preference));
    const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t what,
                            auto value) {
      check_cublas("cublasLtMatmulPreferenceSetAttribute",
                   cublasLtMatmulPreferenceSetAttribute(&preference, what,
                                                        &value, sizeof(value)));
    };
    prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, uint64_t{kWorkspaceBytes});
    prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
           uint32_t{CUBLASLT_REDUCTION_SCHEME_NONE});
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
           static_cast<uint32_t>(key.w_alignment));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
           static_cast<uint32_t>(key.x_alignment));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
           static_cast<uint32_t>(key.out_alignment));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
           static_cast<uint32_t>(key.out_alignment));
    std::vector<cublasLtMatmulHeuristicResult_t> results(kCandidates);
    int count = 0;
    const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
        handle, &operation_, &w_, &x_, &out_, &out_, &preference, kCandidates,
        results.data(), &count);
    results.resize(status == CUBLAS_STATUS_SUCCESS ? count : 0);
    return results;
  }

  bool takes(cublasLtHandle_t handle, const cublasLtMatmulAlgo_t& algorithm) {
    cublasLtMatmulHeuristicResult_t result{};
    return cublasLtMatmulAlgoCheck(handle, &operation_, &w_, &x_, &out_, &out_,
                                   &algorithm,
                                   &result) == CUBLAS_STATUS_SUCCESS &&
           result.state == CUBLAS_STATUS_SUCCESS &&
           result.workspaceSize <= kWorkspaceBytes;
  }

  cublasStatus_t multiply(cublasLtHandle_t handle,
                          const cublasLtMatmulAlgo_t& algorithm, const void* w,
                          const void* x, void* out, void* workspace,
                          cudaStream_t stream) {
    const float one = 1.0f, zero = 0.0f;
    return cublasLtMatmul(handle, &operation_, &one, w, &w_, x, &x_, &zero, out,
                          &out_, out, &out_, &algorithm, workspace,
                          kWorkspaceBytes, stream);
  }

 private:
  template <class Value>
  void set(cublasLtMatmulDescAttributes_t what, Value value) {
    check_cublas("cublasLtMatmulDescSetAttribute",
                 cublasLtMatmulDescSetAttribute(&operation_, what, &value,
                                                sizeof(value)));
  }

  static void layout(cublasLtMatrixLayoutOpaque_t& target, cudaDataType_t type,
                     int64_t rows, int64_t columns, int64_t stride) {
    check_cublas(
        "cublasLtMatrixLayoutInit",
        cublasLtMatrixLayoutInit(&target, type, rows, columns, stride));
  }

  cublasLtMatmulDescOpaque_t operation_;
  cublasLtMatrixLayoutOpaque_t w_;
  cublasLtMatrixLayoutOpaque_t x_;
  cublasLtMatrixLayoutOpaque_t out_;
};

// Whether each output is one sum over the whole of K, made by one block.
bool keeps_k_whole(const cublasLtMatmulAlgo_t& algorithm) {
  const auto read = [&](cublasLtMatmulAlgoConfigAttributes_t what) {
    uint32_t value = 0;
    size_t written = 0;
    check_cublas("cublasLtMatmulAlgoConfigGetAttribute",
                 cublasLtMatmulAlgoConfigGetAttribute(&algorithm, what, &value,
                                                      sizeof(value), &written));
    return value;
  };
  return read(CUBLASLT_ALGO_CONFIG_SPLITK_NUM) <= 1 &&
         read(CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME) ==
             CUBLASLT_REDUCTION_SCHEME_NONE;
}

// A row distance of at least `columns` elements with just that alignment.
int64_t stride_with_alignment(int64_t columns, int bytes) {
  return ceil_div(columns, 8) * 8 + (bytes % 16) / 2;
}

// The handles and the chosen algorithms of this process.
class Plans {
 public:
  // The algorithm for `key`, fit for `problem`.
  cublasLtMatmulAlgo_t find(const PlanKey& key, int64_t n, Problem& problem) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const cublasLtHandle_t handle = handle_of(key.device);
    auto plan = plans_.find(key);
    if (plan == plans_.end()) {
      if (plans_.size() >= kMaxPlans) plans_.clear();
      plan = plans_.emplace(key, Plan{choose(handle, key), {}}).first;
    }
    std::vector<int64_t>& checked = plan->second.checked_columns;
    if (std::find(checked.begin(), checked.end(), n) == checked.end()) {
      if (!problem.takes(handle, plan->second.algorithm)) {
        // No width that a tile may have gets here: choose() has tried them.
        throw std::runtime_error(
            "gemm_nt: cuBLAS's algorithm for " + describe(key) +
            " does not take N = " + std::to_string(n) +
            "; use tiles whose width is a multiple of 8, or set the tile width "
            "to 0");
      }
      checked.push_back(n);
    }
    return plan->second.algorithm;
  }

  cublasLtHandle_t handle(int device) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return handle_of(device);
  }

 private:
  struct Plan {
    cublasLtMatmulAlgo_t algorithm;
    std::vector<int64_t> checked_columns;  // values of N
  };

  // `device` is the current device.
  cublasLtHandle_t handle_of(int device) {
    cublasLtHandle_t& handle = handles_[device];
    if (handle == nullptr) {
      check_cublas("cublasLtCreate", cublasLtCreate(&handle));
    }
    return handle;
  }

  static cublasLtMatmulAlgo_t choose(cublasLtHandle_t handle,
                                     const PlanKey& key) {
    const auto problem = [&](int64_t n) {
      // Any aligned address does for a bias that is not read.
      return Problem(key, n, stride_with_alignment(n, key.out_alignment),
                     reinterpret_cast<const void*>(uintptr_t{4096}));
    };
    for (const auto& candidate :
         problem(scratch_columns(key.k)).candidates(handle, key)) {
      if (candidate.state == CUBLAS_STATUS_SUCCESS &&
          candidate.workspaceSize <= kWorkspaceBytes &&
          keeps_k_whole(candidate.algo) &&
          std::all_of(std::begin(kProbedColumns), std::end(kProbedColumns),
                      [&](int64_t n) {
                        return problem(n).takes(handle, candidate.algo);
                      })) {
        return candidate.algo;
      }
    }
    throw std::runtime_error(
        "gemm_nt: cuBLAS has no algorithm without split K for " +
        describe(key) +
        "; check that the GPU multiplies this dtype (BF16 needs " +
        "capability 8.0)");
  }

  static std::string describe(const PlanKey& key) {
    return "M = " + std::to_string(key.m) + ", K = " + std::to_string(key.k) +
           " in " + dtype_name(key.dtype) +
           " (alignment of w, x, out: " + std::to_string(key.w_alignment) +
           ", " + std::to_string(key.x_alignment) + ", " +
           std::to_string(key.out_alignment) + " bytes)";
  }

  std::mutex mutex_;
  std::map<int, cublasLtHandle_t> handles_;
  std::map<PlanKey, Plan> plans_;
};

void gemm_nt(const Tensor& x, const Tensor& w,
             const std::optional<Tensor>& bias, Tensor& out) {
  const GemmNtArgs args = gemm_nt_args(x, w, bias, out);
  const GemmArgs& gemm = args.gemm;
  if (gemm.m == 0 || gemm.n == 0) return;
  if (gemm.k == 0) Argument("gemm_nt", "x", x).fail("must have K > 0");
  const DeviceStream stream(x);
  const PlanKey key{x.get_device_index(),
                    x.scalar_type(),
                    gemm.bias != nullptr,
                    gemm.m,
                    gemm.k,
                    args.w_stride,
                    gemm.x_stride,
                    alignment(args.w, args.w_stride),
                    alignment(gemm.x, gemm.x_stride),
                    alignment(gemm.out, gemm.out_stride)};
  // Never destroyed: at exit the CUDA context may be gone before it.
  static Plans& plans = *new Plans;
  Problem problem(key, gemm.n, gemm.out_stride, gemm.bias);
  const cublasLtMatmulAlgo_t algorithm = plans.find(key, gemm.n, problem);
  const Tensor workspace = torch::stable::new_empty(
      x, {static_cast<int64_t>(kWorkspaceBytes)}, ScalarType::Byte);
  check_cublas(
      "cublasLtMatmul",
      problem.multiply(plans.handle(key.device), algorithm, args.w, gemm.x,
                       gemm.out, workspace.mutable_data_ptr(), stream));
}

}  // namespace
}  // namespace vllm::sm70

STABLE_TORCH_LIBRARY_IMPL(_sm70_C, CUDA, m) {
  m.impl("gemm_nt", TORCH_BOX(&vllm::sm70::gemm_nt));
}
