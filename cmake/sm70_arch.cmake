# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
#
# A build for compute capability 7.0 (Volta) and nothing newer.
#
# Included once CUDA_ARCHS is known. Sets VLLM_SM70_ONLY, and stops with the
# remedy when 7.0 was asked for and this compiler version cannot serve it.

set(VLLM_SM70_ONLY FALSE)
if(CUDA_ARCHS)
  set(VLLM_SM70_ONLY TRUE)
  foreach(_arch IN LISTS CUDA_ARCHS)
    if(_arch VERSION_GREATER_EQUAL 7.5)
      set(VLLM_SM70_ONLY FALSE)
    endif()
  endforeach()
elseif("${CUDA_ARCH_FLAGS}" MATCHES "sm_70")
  message(
    FATAL_ERROR
      "TORCH_CUDA_ARCH_LIST asks for 7.0 and the CUDA compiler is "
      "${CMAKE_CUDA_COMPILER_VERSION}: 7.0 needs a version below 12.8. Install "
      "CUDA 12.6 and torch for cu126, and set CUDA_HOME to that CUDA.")
endif()

if(VLLM_SM70_ONLY)
  run_python(
    _torch_archs
    "import torch; print(getattr(torch._C, '_cuda_getArchFlags', lambda: None)())"
    "Failed to ask torch for its CUDA architectures")
  if(NOT _torch_archs MATCHES "sm_70")
    message(
      WARNING "The installed torch has CUDA code for '${_torch_archs}', not for "
              "sm_70: what is built here will not run on a V100 with it. "
              "Install torch for cu126.")
  endif()
endif()

#
# Define a target for each name that setup.py asks for and that has no code
# for 7.0. It builds and installs nothing, and nothing is downloaded for it.
#
# FlashAttention comes closest and starts at 8.0; it does not check, so its
# sources would get no architecture at all and be compiled for the compiler's
# default. DeepGEMM and DeepSelect want a host compiler (GCC 13) that 7.0 does
# not need.
#
function(vllm_sm70_add_absent_targets)
  set(_absent
      triton_kernels
      _deep_gemm_C
      _deepselect_C
      fmha_sm100
      _flashmla_C
      _flashmla_extension_C
      _flashkda_C
      _qutlass_C
      tml_fa4
      _vllm_fa2_C
      _vllm_fa3_C
      _vllm_fa4_cutedsl_C)
  foreach(_target IN LISTS _absent)
    add_custom_target(${_target})
  endforeach()
  list(JOIN _absent " " _absent)
  message(STATUS "Not building for lack of code for 7.0: ${_absent}")
endfunction()
