# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""One scratch for the decode kernels of all KV cache groups.

A kernel that splits a sequence over thread blocks keeps the parts' results in a
scratch between its two launches. Upstream's metadata builders allocate one each,
and there is a builder for each KV cache group: a hybrid model with a draft can
have a group for each layer of full attention. Layers run one after another on one
stream, so the groups can take turns.
"""

from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch

import vllm.envs as envs
from vllm.config import VllmConfig

DECODE_SCRATCH = ("softmax_segm_output", "softmax_segm_max", "softmax_segm_expsum")
"""Attributes of Triton's metadata builders that are scratch, and nothing else: what
a layer leaves in them is never read by another."""

_shared: WeakValueDictionary[tuple[Any, ...], torch.Tensor] = WeakValueDictionary()


def shares_decode_scratch(config: VllmConfig) -> bool:
    """Whether the KV cache groups of a model take turns on one scratch.

    Not with VLLM_SHARE_DECODE_SCRATCH=0, and not between micro-batches, whose layers
    run at the same time on several streams.
    """
    return envs.VLLM_SHARE_DECODE_SCRATCH and not config.parallel_config.use_ubatching


def share_decode_scratch(config: VllmConfig, builders: Sequence[Any]) -> None:
    """Let a group's metadata builder use the scratch of an earlier group.

    Each tensor of `DECODE_SCRATCH` that it has becomes a view of an earlier
    builder's tensor of that name, number of elements, dtype and device; its own
    memory is given back. With the last builder the scratch goes too. Does nothing
    where `shares_decode_scratch` says no.

    Args:
        config: of the engine. Engines share nothing.
        builders: of one group: one for each micro-batch.

    """
    if not shares_decode_scratch(config):
        return
    # The builders keep the configuration alive, so no other engine's has its address
    # while the scratch is there.
    engine = id(config.compilation_config.static_forward_context)
    for builder in builders:
        for name in DECODE_SCRATCH:
            own = getattr(builder, name, None)
            if own is None:
                continue
            key = (engine, name, own.device, own.dtype, own.numel())
            earlier = _shared.setdefault(key, own)
            if earlier is not own:
                setattr(builder, name, earlier.view(own.shape))
