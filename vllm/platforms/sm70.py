# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What a build for CUDA capability 7.0 (Volta) does without.

Such a build has no FlashAttention, neither the extensions nor the Python
files that are fetched and installed with them: every version needs capability
8.0. Modules that each model loads import the package all the same, to ask
which versions are supported.
"""

from importlib.util import find_spec

from vllm.platforms import current_platform


def flash_attention_is_not_built() -> bool:
    """Whether the device is one (CUDA, below 7.5) whose builds have no
    FlashAttention, so that its absence is no error."""
    return current_platform.is_cuda() and not current_platform.has_device_capability(75)


def flash_attention_rotary_is_missing() -> bool:
    """Whether this is a CUDA build without FlashAttention's rotary kernel.

    The kernel is a Python file (Triton) that comes with the extensions.
    """
    return current_platform.is_cuda() and not find_spec("vllm.vllm_flash_attn.layers")
