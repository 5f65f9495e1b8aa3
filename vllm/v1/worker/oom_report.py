# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Say once what an out-of-memory error found, and which setting to change."""

import threading
from collections.abc import Callable
from contextlib import ContextDecorator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from vllm.logger import init_logger
from vllm.utils.mem_constants import MiB_bytes

logger = init_logger(__name__)

LOADING = "loading the model"
PROFILING = "profiling"
KV_CACHE = "allocating the KV cache"
WARMING_UP = "compiling, warming up and capturing graphs"
SERVING = "serving"

_ADVICE = {
    LOADING: "use a smaller or quantized checkpoint, more GPUs "
    "(--tensor-parallel-size) or --cpu-offload-gb",
    PROFILING: "lower --max-num-batched-tokens, then --max-num-seqs",
    KV_CACHE: "lower --gpu-memory-utilization or --kv-cache-memory",
    WARMING_UP: "lower --gpu-memory-utilization or --max-num-seqs, or capture fewer "
    "graphs with --max-cudagraph-capture-size",
    SERVING: "lower --gpu-memory-utilization or --kv-cache-memory",
}

FRAGMENTED = 256 * MiB_bytes
"""From this much inactive memory on, the allocator's settings are worth a try."""

_REPORTED = "_vllm_oom_reported"
_active = threading.local()


@dataclass(frozen=True)
class DeviceMemory:
    """A device's memory, in bytes."""

    allocated: int
    reserved: int
    free: int
    total: int

    @property
    def inactive(self) -> int:
        """Reserved by the allocator and not allocated, in bytes."""
        return self.reserved - self.allocated

    @classmethod
    def measure(cls) -> "DeviceMemory":
        """Read the current device's figures."""
        free, total = torch.accelerator.get_memory_info()
        return cls(
            allocated=torch.accelerator.memory_allocated(),
            reserved=torch.accelerator.memory_reserved(),
            free=free,
            total=total,
        )


def describe(phase: str, memory: DeviceMemory) -> str:
    """Return the report of an error in `phase`: the figures, then the settings."""
    text = (
        f"Out of GPU memory while {phase}: allocated {memory.allocated} bytes, "
        f"reserved {memory.reserved}, inactive {memory.inactive}, free {memory.free}, "
        f"total {memory.total}. To change: {_ADVICE[phase]}."
    )
    if memory.inactive >= FRAGMENTED:
        text += (
            f" {memory.inactive // MiB_bytes} MiB are reserved but inactive: "
            "PYTORCH_ALLOC_CONF=expandable_segments:True makes more of them usable."
        )
    return text


def find_oom(error: BaseException | None) -> torch.OutOfMemoryError | None:
    """Return the out-of-memory error that `error` is, or was raised from."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, torch.OutOfMemoryError):
            return error
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return None


class oom_report(ContextDecorator):
    """Report an out-of-memory error that passes through, and let it pass.

    As a context manager or a decorator. The error is reported once, where the
    innermost scope sees it and most of its tensors still live, under the name of
    the outermost scope: a profiled step is profiling, not serving.
    """

    def __init__(
        self, phase: str, measure: Callable[[], DeviceMemory] = DeviceMemory.measure
    ) -> None:
        if phase not in _ADVICE:
            raise ValueError(f"unknown phase {phase!r}: expected one of {[*_ADVICE]}")
        self.phase = phase
        self.measure = measure

    def __enter__(self) -> "oom_report":
        phases = _active.__dict__.setdefault("phases", [])
        phases.append(self.phase)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        phases: list[Any] = _active.phases
        outermost = phases[0]
        phases.pop()
        if error is None:
            return
        oom = find_oom(error)
        if oom is None or getattr(oom, _REPORTED, False):
            return
        setattr(oom, _REPORTED, True)
        try:
            logger.error("%s", describe(outermost, self.measure()))
        except Exception as failure:  # the device may not answer any more
            logger.error("Out of GPU memory while %s (%s).", outermost, failure)
