# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
#
# What CMakeLists.txt reads from torch's own package, for a machine that has
# neither a CUDA toolkit nor a CUDA build of torch. STUB_CUDA_VERSION is the
# compiler version that is claimed; TORCH_CUDA_ARCH_LIST comes from the
# environment, as it does for torch. STUB_GCC_VERSION is the host compiler's
# claimed version. Sources are configured, never compiled.

set(CMAKE_CXX_COMPILER_ID GNU)
set(CMAKE_CXX_COMPILER_VERSION "${STUB_GCC_VERSION}")

set(Torch_FOUND TRUE)
set(CUDA_FOUND TRUE)
set(CUDA_VERSION "${STUB_CUDA_VERSION}")
set(CUDA_TOOLKIT_ROOT_DIR "${CMAKE_CURRENT_LIST_DIR}")
set(TORCH_INCLUDE_DIRS "${CMAKE_CURRENT_LIST_DIR}/include")
set(TORCH_LIBRARIES torch)

add_library(torch INTERFACE IMPORTED)
add_library(CUDA::cudart INTERFACE IMPORTED)
add_library(CUDA::cublas INTERFACE IMPORTED)
add_library(CUDA::cublasLt INTERFACE IMPORTED)
add_library(CUDA::cuda_driver INTERFACE IMPORTED)

# CMake asks the compiler for its identity and for a link line. Both answers
# are given here, so that the compiler itself is never run.
set(CMAKE_CUDA_COMPILER_FORCED TRUE)
set(CMAKE_CUDA_COMPILER_ID_RUN 1)
set(CMAKE_CUDA_COMPILER_ID NVIDIA)
set(CMAKE_CUDA_COMPILER_VERSION "${STUB_CUDA_VERSION}.20")
set(CMAKE_CUDA_COMPILER_PRODUCED_OUTPUT
    "#$ LIBRARIES= -lstub\n#$ ${CMAKE_CXX_COMPILER} -lstub -o a.out\n")
set(CMAKE_CUDA_ARCHITECTURES OFF)
enable_language(CUDA)

# torch turns the list into global gencode flags; CMakeLists.txt takes them
# back out and sets its own per source.
set(_archs "$ENV{TORCH_CUDA_ARCH_LIST}")
separate_arguments(_archs)
foreach(_arch IN LISTS _archs)
  string(REPLACE "." "" _sm "${_arch}")
  string(APPEND CMAKE_CUDA_FLAGS
         " -gencode arch=compute_${_sm},code=sm_${_sm}")
endforeach()
