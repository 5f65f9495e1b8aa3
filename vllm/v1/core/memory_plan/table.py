# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A memory plan in numbers, its verdict, and how it is printed."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import Any

MIB = 2**20


@dataclass(frozen=True)
class KvNeed:
    """What the KV cache needs and holds, in bytes of one rank.

    Attributes:
        request: one request of ``max_model_len`` tokens.
        states: the part of it that holds states of state-space layers.
        null_block: the block that is kept back, never a request's.
        page: bytes of a page; 0 where layers have pages of their own.
        block_size: tokens of the scheduler's block.
        tokens: what ``available`` bytes hold, as the server reports it.
        concurrency: requests of ``max_model_len`` that they hold.

    """

    request: int
    states: int
    null_block: int
    page: int
    block_size: int
    tokens: int
    concurrency: float

    def of(self, requests: int) -> int:
        """Bytes for so many requests of ``max_model_len``."""
        return requests * self.request + self.null_block


@dataclass(frozen=True)
class Remedy:
    """Settings that make the configuration fit; each was planned again.

    Attributes:
        settings: as typed on the command line.
        effect: what it changes.

    """

    settings: str
    effect: str


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """One rank's memory, in bytes: the worst rank's where there are several.

    ``budget = requested - weights - resident - outside - activation - graphs`` is
    what is left for the KV cache; it may be negative.

    Attributes:
        model: the model's name.
        device: the card's name.
        rank: the rank that decides.
        ranks: how many there are.
        measured: the figures are start-up's, not formulae's.
        total: the device's memory.
        free: of it, free at start-up; None in a plan.
        utilization: the part of ``total`` that may be used.
        requested: the same in bytes.
        weights: parameters and buffers.
        resident: scratch, workspaces and buffers that stay.
        outside: outside of torch: the context, modules, communicators.
        fragmentation: reserved beyond what is allocated at the peak. Not taken from
            the budget: the allocator returns whole free segments before it gives up.
        activation: the peak of any batch.
        activation_shape: the batch that causes it, such as "16 x 512".
        activation_part: where in a step, "" where that was not seen.
        shapes: every batch and its peak.
        graphs: reserved for CUDA graphs.
        budget: left for the KV cache.
        explicit: bytes that the user set for the KV cache, or None.
        limit: the most that may be set.
        explicit_setting: the setting that ``explicit`` came from.
        kv: what the KV cache needs and holds.
        max_model_len: tokens.
        max_num_seqs: requests.
        max_num_batched_tokens: tokens.
        remedies: what would make it fit.
        notes: what the figures leave out.

    """

    model: str
    device: str
    rank: int = 0
    ranks: int = 1
    measured: bool = False
    total: int
    free: int | None = None
    utilization: float
    requested: int
    weights: int
    resident: int = 0
    outside: int = 0
    fragmentation: int = 0
    activation: int
    activation_shape: str = ""
    activation_part: str = ""
    shapes: tuple[tuple[str, int], ...] = ()
    graphs: int = 0
    budget: int
    explicit: int | None = None
    limit: int | None = None
    explicit_setting: str = "--kv-cache-memory-bytes"
    kv: KvNeed | None
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    remedies: tuple[Remedy, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def available(self) -> int:
        """What the KV cache gets."""
        return self.budget if self.explicit is None else self.explicit

    @property
    def short(self) -> int:
        """Bytes that one request of ``max_model_len`` lacks."""
        if self.kv is None:
            return max(0, -self.budget) if self.explicit is None else 0
        return max(0, self.kv.of(1) - self.available)

    @property
    def over(self) -> int:
        """Bytes of an explicit KV cache that the device does not have."""
        if self.explicit is None or self.limit is None:
            return 0
        return max(0, self.explicit - self.limit)

    @property
    def short_for_all(self) -> int:
        """Bytes that ``max_num_seqs`` requests of ``max_model_len`` lack."""
        if self.kv is None:
            return 0
        return max(0, self.kv.of(self.max_num_seqs) - self.available)

    @property
    def fits(self) -> bool:
        return not self.short and not self.over

    def to_json(self) -> str:
        """The plan as JSON: every attribute in bytes, and the verdict."""
        values: dict[str, Any] = asdict(self)
        values |= {
            "available": self.available,
            "short": self.short,
            "over": self.over,
            "short_for_all": self.short_for_all,
            "fits": self.fits,
        }
        return json.dumps(values, indent=2)


def mib(size: int) -> str:
    return f"{size / MIB:,.1f}"


def format_plan(plan: MemoryPlan) -> str:
    """The plan as a table of a few lines; sizes in MiB."""
    how = "measured at start-up" if plan.measured else "planned, not measured"
    lines = [f"Memory of {plan.model} on {plan.device}, MiB ({how})"]
    if plan.ranks > 1:
        lines[0] += f", rank {plan.rank} of {plan.ranks}, the tightest"
    rows = list(_device_rows(plan))
    if plan.kv is not None:
        rows += _kv_rows(plan, plan.kv)
    width = max(len(mib(size)) for _, size, _ in rows) + 1
    name_width = max(len(name) for name, _, _ in rows)
    for name, size, remark in rows:
        line = f"  {name:<{name_width}}  {mib(size):>{width}}"
        lines.append(f"{line}  {remark}".rstrip())
    lines += _verdict(plan)
    lines += [f"  note: {note}" for note in plan.notes]
    return "\n".join(lines)


Row = tuple[str, int, str]


def _device_rows(plan: MemoryPlan) -> list[Row]:
    share = f"{plan.utilization:g} of {mib(plan.total)}"
    if plan.free is not None:
        share += f", {mib(plan.free)} free at start"
    where = f", {plan.activation_part}" if plan.activation_part else ""
    batch = f"batch of {plan.activation_shape}{where}" if plan.activation_shape else ""
    rows: list[Row] = [
        ("may be used", plan.requested, share),
        ("weights", -plan.weights, ""),
        ("activation peak", -plan.activation, batch),
        ("scratch, workspaces, buffers", -plan.resident, ""),
        (
            "outside torch" if plan.activation else "activations and all else",
            -plan.outside,
            "",
        ),
        ("CUDA graphs", -plan.graphs, ""),
        ("left for the KV cache", plan.budget, ""),
        ("fragmentation, not charged", plan.fragmentation, _beside(plan)),
    ]
    # Zero where a platform has none, or measures nothing.
    rows = [row for row in rows if row[1] or row[0] == "left for the KV cache"]
    if plan.explicit is not None:
        limit = "" if plan.limit is None else f"at most {mib(plan.limit)}"
        rows.append((f"KV cache, {plan.explicit_setting}", plan.explicit, limit))
    return rows


def _beside(plan: MemoryPlan) -> str:
    """Whether the card has room for the fragmentation next to all the rest."""
    if plan.free is None or plan.limit is None:
        return ""
    room = max(0, plan.limit - plan.available)
    if room >= plan.fragmentation:
        return f"{mib(room)} of the card stay free for it"
    return (
        f"only {mib(room)} of the card stay free: set "
        "PYTORCH_ALLOC_CONF=expandable_segments:True"
    )


def _kv_rows(plan: MemoryPlan, kv: KvNeed) -> list[Row]:
    states = f"of it states {mib(kv.states)}" if kv.states else ""
    rows: list[Row] = [
        (f"needed: 1 request of {plan.max_model_len:,} tokens", kv.of(1), states)
    ]
    if plan.max_num_seqs > 1:
        rows.append(
            (
                f"needed: {plan.max_num_seqs} such requests",
                kv.of(plan.max_num_seqs),
                "",
            )
        )
    if plan.short:
        rows.append(("SHORT", plan.short, "for one request"))
    if plan.over:
        rows.append(("TOO MUCH", plan.over, "beyond what is there"))
    return rows


def _verdict(plan: MemoryPlan) -> list[str]:
    lines = []
    if plan.fits and plan.kv is None:
        lines.append("  fits: the model has no KV cache")
    elif plan.fits and plan.kv is not None:
        kv = plan.kv
        held = math.floor(kv.concurrency * 100) / 100
        lines.append(
            f"  fits: {kv.tokens:,} tokens in blocks of {kv.block_size:,}, "
            f"{held:,.2f} requests of {plan.max_model_len:,} tokens"
        )
        if plan.short_for_all:
            lines.append(
                f"  {plan.max_num_seqs} requests of that length at once lack "
                f"{mib(plan.short_for_all)}: some would wait, or be recomputed"
            )
    else:
        lines.append("  does not fit")
    if plan.remedies:
        aim = "to hold them all" if plan.fits else "to make it fit"
        lines.append(f"  {aim}, any one of:")
        width = max(len(remedy.settings) for remedy in plan.remedies)
        lines += [f"    {r.settings:<{width}}  {r.effect}" for r in plan.remedies]
    elif not plan.fits:
        lines.append(
            "  no single setting mends it: use more GPUs (--tensor-parallel-size), a "
            "smaller or more quantized model, or a card with more memory"
        )
    return lines
