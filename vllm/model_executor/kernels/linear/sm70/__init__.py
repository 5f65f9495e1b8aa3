# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Linear kernels for CUDA capability 7.0 (Volta), and what lets them in."""
