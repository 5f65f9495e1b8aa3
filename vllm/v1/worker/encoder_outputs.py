# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Memory of what a multimodal encoder leaves in its cache."""

import torch

import vllm.envs as envs


def own_storage(output: torch.Tensor) -> torch.Tensor:
    """Return an encoder's output in memory of its own, a copy when it shares it.

    An encoder returns a batch of items as views of one tensor. One view that stays
    in the cache keeps the whole of it, so that the cache holds more than the tokens
    that the scheduler counts. `VLLM_TRUTHFUL_PROFILE=0` leaves that as it is.

    Args:
        output: of one item, [tokens, width], any dtype.

    """
    size = output.numel() * output.element_size()
    if envs.VLLM_TRUTHFUL_PROFILE and output.untyped_storage().nbytes() > size:
        return output.clone()
    return output
