# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A limit on block splitting while an engine starts, and the user's own after it.

Start-up frees large buffers that serving never asks for again. A small tensor that
outlives its phase and was split off such a block pins the whole segment, which
then counts as consumed and is taken from the KV cache. Blocks above the limit are
not split, so they can be returned.
"""

import functools
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import ParamSpec, Protocol, TypeVar

import torch

import vllm.envs as envs
from vllm.logger import init_logger
from vllm.platforms import current_platform

logger = init_logger(__name__)

SERVING_LIMIT = "VLLM_ALLOCATOR_MAX_SPLIT_MIB"

_LARGE_SEGMENT_MIB = 20
"""What PyTorch reserves for a tensor of 1 to 10 MiB, unless
`large_segment_size_mb` says otherwise; also its lower bound for the limit."""

_UPSTREAM_LIMIT_MIB = 20

P = ParamSpec("P")
R = TypeVar("R")


class Allocator(Protocol):
    """An allocator whose settings are one string of `key:value` pairs."""

    def settings(self) -> str:
        """Return the settings as they were last given."""

    def apply(self, settings: str) -> None:
        """Replace all settings; a key that is left out gets its default."""

    def release(self) -> None:
        """Return cached blocks to the device."""


class TorchAllocator:
    """PyTorch's caching allocator of this process."""

    def settings(self) -> str:
        """See `Allocator`."""
        get = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
        if get is not None:
            return get()
        return torch.cuda.memory._snapshot()["allocator_settings"][
            "PYTORCH_CUDA_ALLOC_CONF"
        ]

    def apply(self, settings: str) -> None:
        """See `Allocator`."""
        torch._C._accelerator_setAllocatorSettings(settings)

    def release(self) -> None:
        """See `Allocator`."""
        torch.accelerator.empty_cache()


def find_allocator() -> Allocator | None:
    """Return the allocator to limit, or None where there is nothing to do.

    Left alone are platforms without the settings API, allocators other than the
    native one, and processes whose weights live in a private pool (sleep mode):
    there the limit applies inside the pool as well and strands freed blocks
    (vllm #43951).
    """
    if (
        not current_platform.is_cuda_alike()
        or torch.cuda.memory.get_allocator_backend() != "native"
        or not hasattr(torch._C, "_accelerator_setAllocatorSettings")
        or _uses_private_pool()
    ):
        return None
    return TorchAllocator()


def _uses_private_pool() -> bool:
    module = sys.modules.get("vllm.device_allocator.cumem")
    return module is not None and module.CuMemAllocator.instance is not None


def with_limit(settings: str, limit_mib: int) -> str:
    """Return `settings` with blocks above `limit_mib` MiB kept whole.

    All other keys are repeated, since PyTorch resets what a call leaves out
    (vllm #51096). The last of two equal keys counts.
    """
    others = settings.strip().rstrip(",")
    limit = f"max_split_size_mb:{limit_mib}"
    return f"{others},{limit}" if others else limit


def above_segment(settings: str, limit_mib: int = _LARGE_SEGMENT_MIB + 1) -> int:
    """Return `limit_mib`, or the least above the large segment if that is more, MiB.

    A segment of exactly the limit is neither split nor given to a small tensor
    once it is free: every 2 MiB tensor would reserve 20 MiB anew (reported as vllm
    #51205; torch 2.11 on an H200 gave the segment to the tensor).
    """
    sizes = re.findall(r"large_segment_size_mb:\s*(\d+)", settings)
    segment = int(sizes[-1]) if sizes else _LARGE_SEGMENT_MIB
    return max(limit_mib, segment + 1)


@contextmanager
def limit_splits(limit_mib: int, allocator: Allocator | None = None) -> Iterator[None]:
    """Keep blocks above `limit_mib` MiB whole, then restore the whole settings.

    On success what is cached is returned to the device as well, so that the next
    phase, or a measurement, does not find it. Scopes nest: each restores what it
    found.
    """
    allocator = allocator or find_allocator()
    if allocator is None:
        yield
        return
    original = allocator.settings()
    try:
        allocator.apply(with_limit(original, limit_mib))
        yield
    finally:
        allocator.apply(original)
    if envs.VLLM_ALLOCATOR_SCOPE:
        allocator.release()
    logger.info_once(
        "Allocator scope: max_split_size_mb:%d was set while starting; %s restored. "
        "Each later phase of start-up does the same.",
        limit_mib,
        repr(original) if original else "PyTorch's defaults",
    )


def startup_limit_mib(allocator: Allocator | None = None) -> int:
    """Return the limit of the phases that upstream limits too, MiB.

    With `VLLM_ALLOCATOR_SCOPE=0` it is upstream's.
    """
    if not envs.VLLM_ALLOCATOR_SCOPE:
        return _UPSTREAM_LIMIT_MIB
    allocator = allocator or find_allocator()
    return above_segment(allocator.settings() if allocator else "")


def startup_scope(allocator: Allocator | None = None) -> AbstractContextManager[None]:
    """Return the scope of a phase that upstream does not limit.

    It does nothing with `VLLM_ALLOCATOR_SCOPE=0`.
    """
    if not envs.VLLM_ALLOCATOR_SCOPE:
        return nullcontext()
    return limit_splits(startup_limit_mib(allocator), allocator)


def in_startup_scope(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function that is a phase of start-up with `startup_scope`."""

    @functools.wraps(function)
    def scoped(*args: P.args, **kwargs: P.kwargs) -> R:
        with startup_scope():
            return function(*args, **kwargs)

    return scoped


def apply_serving_limit(allocator: Allocator | None = None) -> None:
    """Set the limit of `VLLM_ALLOCATOR_MAX_SPLIT_MIB` for the life of the process.

    Scopes of start-up nest in it, so what they restore is this setting. 0, the
    default, leaves the user's settings untouched.

    Raises:
        ValueError: the limit is not above the large segment.

    """
    limit = envs.VLLM_ALLOCATOR_MAX_SPLIT_MIB
    if limit == 0:
        return
    allocator = allocator or find_allocator()
    settings = allocator.settings() if allocator else ""
    least = above_segment(settings)
    if limit < least:
        raise ValueError(
            f"{SERVING_LIMIT}={limit}: expected 0 (leave the allocator alone) or at "
            f"least {least} MiB; a segment of the limit's own size is never reused"
        )
    if allocator is None:
        logger.warning_once(
            "%s=%d has no effect: it needs PyTorch's native CUDA allocator without "
            "sleep mode.",
            SERVING_LIMIT,
            limit,
        )
        return
    allocator.apply(with_limit(settings, limit))
    logger.info_once("Allocator: max_split_size_mb:%d stays set while serving.", limit)
