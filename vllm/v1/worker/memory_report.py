# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What one rank measured at start-up, and the worst of all ranks."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

_SUPPLIES = ("total", "free_at_start", "requested", "kv_budget")
"""The rank that has least decides; of every other figure, the rank with most."""


@dataclass(frozen=True)
class StartupMemory:
    """The memory of one rank, in bytes.

    The figures add up by construction:
    `kv_budget = requested - weights - persistent - non_torch - activation_peak
    - graphs_reserved`.

    Attributes:
        rank: the worker's global rank.
        total: the device's memory.
        free_at_start: free before the model was loaded, communicators included.
        requested: what vLLM may use, `gpu_memory_utilization` of `total`.
        weights: what loading the model, the draft included, left behind.
        activation_peak: the highest transient peak of any profiled batch, over
            what stays resident, and a margin of 2 MiB where real steps ran.
        activation_shape: the batch that causes it, such as "16 x 512"; with a
            multimodal encoder, a pass that runs it has its own name.
        persistent: what else stays allocated: the runner's buffers, workspaces
            and what the first pass left behind.
        non_torch: the rest that is taken since the start: NCCL, libraries, what
            the allocator could not return.
        fragmentation: the most that was reserved beyond the allocated peak, of
            all profiled batches, under the settings that serving uses. Shown, not
            charged: the allocator returns most of it before it gives up.
        graphs_estimated: CUDA graphs as measured on sample captures.
        graphs_reserved: the part of it that is taken from the KV budget.
        graphs_captured: what capture really took; 0 before it and without graphs.
        kv_budget: left for the KV cache; negative when nothing is left.
        kv_explicit: `kv_cache_memory_bytes`, or 0 when it is not set. It is
            to be checked against `kv_budget` and does not change it.
        shapes: the peak of every profiled batch: pairs of its name and bytes.
        profile: "truthful" or "upstream": how `activation_peak` was measured.
        profile_ms: what profiling took, in milliseconds.

    """

    rank: int = 0
    total: int = 0
    free_at_start: int = 0
    requested: int = 0
    weights: int = 0
    activation_peak: int = 0
    activation_shape: str = ""
    persistent: int = 0
    non_torch: int = 0
    fragmentation: int = 0
    graphs_estimated: int = 0
    graphs_reserved: int = 0
    graphs_captured: int = 0
    kv_budget: int = 0
    kv_explicit: int = 0
    shapes: tuple[tuple[str, int], ...] = ()
    profile: str = "upstream"
    profile_ms: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as types that JSON and msgpack carry."""
        return asdict(self) | {"shapes": [list(pair) for pair in self.shapes]}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "StartupMemory":
        """Read what `to_dict` wrote.

        Raises:
            ValueError: a name is unknown: the two sides are different builds.

        """
        unknown = sorted(values.keys() - {field.name for field in fields(cls)})
        if unknown:
            raise ValueError(f"start-up memory report: unknown fields {unknown}")
        shapes = tuple((str(name), int(size)) for name, size in values["shapes"])
        return cls(**values | {"shapes": shapes})


def worst(reports: Sequence[StartupMemory]) -> StartupMemory:
    """Reconcile the ranks: of a supply the least, of a demand the most.

    The result may be of no single rank: one may hold more weights and another a
    higher peak. `rank` is the one with the smallest `kv_budget`, which is its own
    figure and not the difference of the others'.

    Raises:
        ValueError: there is no report.

    """
    if not reports:
        raise ValueError("start-up memory: no rank reported")
    tightest = min(reports, key=lambda report: report.kv_budget)
    highest = max(reports, key=lambda report: report.activation_peak)
    figures: dict[str, Any] = {
        field.name: (min if field.name in _SUPPLIES else max)(
            getattr(report, field.name) for report in reports
        )
        for field in fields(StartupMemory)
        if field.type is int and field.name != "rank"
    }
    peaks: dict[str, int] = {}
    for report in reports:
        for name, size in report.shapes:
            peaks[name] = max(size, peaks.get(name, 0))
    return replace(
        tightest,
        **figures,
        activation_shape=highest.activation_shape,
        shapes=tuple(peaks.items()),
    )
