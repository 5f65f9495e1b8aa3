# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The one scratch of a process and device that dequantised weight tiles share.

Every tiled operator of every layer uses the same memory, in turn. It is
allocated at the first long prefill, at the size that the largest of the loaded
layers wants, and stays: a CUDA graph that was captured with it finds it at the
same address.

Who uses it when: on CUDA all tiles run on this module's own streams, one for
each lane, which fork from the caller's stream and are joined before the
operator returns. At the fork each lane waits for all, so uses are in order even if
operators are called on several streams at once (shared experts run next to the
routed ones), and no memory needs `record_stream`. The same holds while a graph
is captured: the fork draws the lanes into the capture.

This is not `WorkspaceManager`, whose buffer belongs to whoever asks last: two
streams may use it at once, as shared and routed experts do; it refuses to grow
once it is locked, where this gives way to a smaller tile; and the CPU worker and
library users have none. It does supply the memory pool, so that the scratch is
given back in sleep mode and returns at its address.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch

from vllm.logger import init_logger
from vllm.model_executor.kernels.linear.sm70.tiling import MIB, TilePlan

logger = init_logger(__name__)

_ALIGNMENT = 256


class LaneMemory(NamedTuple):
    """What one lane works in, as bytes that start at a multiple of 256.

    Attributes:
        weight: uint8 [weight_bytes of the plan].
        product: uint8 [product_bytes of the plan].

    """

    weight: torch.Tensor
    product: torch.Tensor


class Scratch:
    """Bytes for the lanes' weight tiles on one device, and the lanes' streams."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._memory: torch.Tensor | None = None
        self._wanted_bytes = 0
        self._halvings = 0
        # Outgrown, but at an address that a captured graph writes to.
        self._captured: list[torch.Tensor] = []
        self._memory_is_captured = False
        self._streams: list[torch.cuda.Stream] = []

    @property
    def nbytes(self) -> int:
        """Bytes held now, those kept for captured graphs included."""
        held = [] if self._memory is None else [self._memory]
        return sum(memory.nbytes for memory in held + self._captured)

    def declare(self, nbytes: int) -> None:
        """Announce what a layer will want, so that the first use allocates it all.

        Args:
            nbytes: for all lanes together.

        """
        self._wanted_bytes = max(self._wanted_bytes, nbytes)

    def acquire(self, plan: TilePlan) -> tuple[TilePlan, list[LaneMemory]]:
        """Return memory for the plan, or for a smaller one if memory is short.

        The memory holds nothing of value before, and is anyone's afterwards: it
        must be used within `lanes`, before the operator returns.

        Args:
            plan: what to make room for.

        Returns:
            The plan that fits, `plan` itself as a rule, and each lane's memory.

        Raises:
            torch.OutOfMemoryError: not even the narrowest tile fits.

        """
        for _ in range(self._halvings):
            plan = plan.halved() or plan
        while True:
            try:
                return plan, self._lane_memory(plan)
            except torch.OutOfMemoryError:
                smaller = plan.halved()
                if smaller is None:
                    raise
                if self._halvings == 0:
                    logger.warning_once(
                        "Not enough memory on %s for the %.0f MiB of a quantized "
                        "layer's prefill tiles: narrowing the tiles, which makes "
                        "prefill slower. Lower --gpu-memory-utilization, or set "
                        "VLLM_SM70_TILE_WIDTH to a smaller width",
                        self.device,
                        plan.transient_bytes / MIB,
                    )
                # Later calls start from here: each failure empties the cache
                # of torch's allocator, which costs far more than a tile.
                self._halvings += 1
                plan = smaller

    def _lane_memory(self, plan: TilePlan) -> list[LaneMemory]:
        step = plan.weight_bytes + -plan.weight_bytes % _ALIGNMENT
        weights = self._reserve(step * plan.lanes, transient=plan.whole)
        return [
            LaneMemory(
                weights[lane * step : lane * step + plan.weight_bytes],
                # An activation like any other, of this call only.
                torch.empty(plan.product_bytes, dtype=torch.uint8, device=self.device),
            )
            for lane in range(plan.lanes)
        ]

    def _reserve(self, nbytes: int, transient: bool) -> torch.Tensor:
        capturing = (
            self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        )
        if self._memory is not None and self._memory.nbytes >= nbytes:
            if not transient:
                self._memory_is_captured |= capturing
                return self._memory
        elif not transient and not capturing:
            return self._grow(nbytes)
        # From the capture's own pool, which keeps it for the graph's life; or
        # for the untiled control, whose memory is not bounded.
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def _grow(self, nbytes: int) -> torch.Tensor:
        if self._memory is not None:
            if self.device.type == "cuda":
                # Other streams than the one that allocated it may use it still.
                torch.cuda.synchronize(self.device)
            if self._memory_is_captured:
                self._captured.append(self._memory)
            self._memory = None
            self._memory_is_captured = False
        with _allocation_context(self.device):
            # The declared size is a wish, and the OutOfMemory path must not
            # insist on it.
            wanted = nbytes if self._halvings else max(nbytes, self._wanted_bytes)
            self._memory = torch.empty(wanted, dtype=torch.uint8, device=self.device)
        return self._memory

    @contextmanager
    def lanes(self, count: int) -> Iterator[list[AbstractContextManager[object]]]:
        """Fork the lanes from the current stream, and join them at the end.

        Args:
            count: lanes in use.

        Yields:
            For each lane a context whose work is ordered after the caller's and
            after all lanes' earlier work. The caller's later work waits for
            all of them. On the CPU everything runs in order anyway.

        """
        if self.device.type != "cuda":
            yield [nullcontext() for _ in range(count)]
            return
        caller = torch.cuda.current_stream(self.device)
        while len(self._streams) < count:
            self._streams.append(torch.cuda.Stream(self.device))
        fork = caller.record_event()
        for stream in self._streams:
            stream.wait_event(fork)
        # Plans cut the memory at different places, so a lane's part may be what a
        # caller on another stream still uses in any lane.
        earlier = [stream.record_event() for stream in self._streams]
        for stream in self._streams:
            for event in earlier:
                stream.wait_event(event)
        try:
            yield [torch.cuda.stream(stream) for stream in self._streams[:count]]
        finally:
            for stream in self._streams:
                caller.wait_event(stream.record_event())


_scratches: dict[torch.device, Scratch] = {}


def scratch_of(device: torch.device) -> Scratch:
    """Return the device's scratch; it holds no memory before its first use."""
    if device not in _scratches:
        _scratches[device] = Scratch(device)
    return _scratches[device]


def reset_scratch() -> None:
    """Forget all scratch memory. No captured graph may be replayed afterwards."""
    _scratches.clear()


def _allocation_context(device: torch.device) -> AbstractContextManager[object]:
    from vllm.v1.worker import workspace

    if device.type == "cuda" and workspace.is_workspace_manager_initialized():
        return workspace.current_workspace_manager()._alloc_context()
    return nullcontext()
