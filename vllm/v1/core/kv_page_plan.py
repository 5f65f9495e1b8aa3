# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Plan the KV-cache page that all layers of a hybrid model share.

Every layer's page must have the same number of bytes, because a block id is
good for any layer. A page holds ``block_size`` tokens of an attention layer, or
one whole state of a state-space layer. When layers differ, something is
padded: the rule "the largest page wins" lets one FP16 draft layer double the
page of every FP8 target layer and of every state. The planner searches the
pages and blocks instead:

* a page is the unpadded page of at least one attention layer, and no smaller
  than the largest state;
* each attention layer takes the most tokens that fit the page, in blocks that
  its backend's kernels can read, without changing its dtype or window;
* when prefix caching (or anything else that hashes blocks) is on, every block
  divides the largest one, so that the scheduler's block, their least common
  multiple, is that largest block;
* among these, the fewest bytes for the declared workload win.

Formulae, bytes and tokens per rank, ``ceil`` for rounding up:

    token   = 2 * kv_heads * head_size * dtype_bytes             (dense K and V)
    page    = block * token               for at least one layer, >= max state
    blocks  = ceil(L / block)                      full attention, length L
              ceil(min(window - 1 + in_flight, L) / block) + 1   sliding window
              1 + spec, or 2 + spec with prefix caching          states
    request = page * width * sum over layer kinds of groups * blocks
    total   = max_num_seqs * request + page * width      (one block is the null block)

where a kind of ``n`` layers makes ``groups = ceil(n / group_size)`` groups and
``width`` is the number of layers of the widest group. These are upstream's own
``max_memory_usage_bytes`` and grouping rules, in numbers.

Nothing here touches a device, a configuration object or the environment; the
glue is in ``kv_page_plan_hooks.py``.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import lru_cache
from itertools import chain
from typing import TypeAlias

import numpy as np

from vllm.utils.math_utils import cdiv, round_up
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    KVCacheSpecKind,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    get_kv_cache_spec_kind,
)

KernelBlocks: TypeAlias = tuple[int | MultipleOf, ...]
"""Block sizes in tokens that one layer's kernels read without splitting."""

# Exact classes: a subclass may give its block size another meaning (a ring
# buffer's capacity, a sink's length), so it keeps upstream's plan.
PLANNED_ATTENTION_SPECS: tuple[type[AttentionSpec], ...] = (
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    ChunkedLocalAttentionSpec,
)

# Prefix-cache hits may become coarser than upstream's largest block by at most
# 1/8: enough to round 1648 up to 1664, too little for a new multiple of it.
LCM_SLACK = Fraction(9, 8)


class PagePlanError(ValueError):
    """No page can be planned for these layers; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The load that a plan is made for.

    Args:
        max_model_len: Longest request, tokens.
        max_num_seqs: Concurrent requests.
        max_in_flight_tokens: Tokens scheduled but not yet settled:
            ``max_num_batched_tokens`` times the concurrent batches.
        num_speculative_tokens: Draft tokens per step. They lengthen the short
            request; the states' extra blocks are in the specs already.
        short_len: A short request, tokens; decides between plans that cost the
            same at full length.

    """

    max_model_len: int
    max_num_seqs: int = 1
    max_in_flight_tokens: int = 0
    num_speculative_tokens: int = 0
    short_len: int = 1024

    def __post_init__(self) -> None:
        for name in ("max_model_len", "max_num_seqs", "short_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1.")

    @property
    def short_tokens(self) -> int:
        return min(self.short_len + self.num_speculative_tokens, self.max_model_len)


@dataclass(frozen=True, kw_only=True)
class PageConstraints:
    """What a plan must respect besides the kernels.

    Args:
        blocks_divide: Every block must divide the largest one. Needed when
            blocks are hashed: prefix caching, KV connectors.
        pages_may_be_padded: Attention pages may end in padding (the layout
            keeps each page in one piece).
        dcp_world_size: Decode context parallel size; a sharded layer's block
            spans ``block * dcp_world_size`` tokens of the sequence.
        block_multiple: Every attention block is a multiple of this, tokens.
        hash_block_size: Every hashed block spans a multiple of this, tokens
            (``prefix_match_unit``).
        keep_primary_block: The primary layers' block is at least what came in
            (what the platform, the backend or ``--block-size`` asks for).
            Primary are the first full-attention layers to register: the target's.
        lcm_divides: The scheduler's block must divide this, tokens
            (``prefix_cache_retention_interval``).
        min_lcm: The scheduler's block is at least this, tokens (multi-module
            MTP's lookahead).
        max_lcm: The scheduler's block is at most this, tokens. None: at most
            ``LCM_SLACK`` times upstream's largest block.
        keep_group_size: Group the layers as upstream does, even where wider
            groups would cost less (pipeline parallelism balances its stages
            by upstream's groups).

    """

    blocks_divide: bool = True
    pages_may_be_padded: bool = True
    dcp_world_size: int = 1
    block_multiple: int = 1
    hash_block_size: int = 1
    keep_primary_block: bool = False
    lcm_divides: int | None = None
    min_lcm: int = 1
    max_lcm: int | None = None
    keep_group_size: bool = False


@dataclass(frozen=True)
class Waste:
    """Bytes that one full-length request takes and does not use, by cause."""

    state_padding: int = 0
    """States padded up to the page."""
    page_padding: int = 0
    """Attention pages padded up to the page."""
    group_padding: int = 0
    """Slots of a block without a layer, in groups narrower than the widest."""
    last_block: int = 0
    """Token slots past the last token held."""

    @property
    def total(self) -> int:
        return (
            self.state_padding + self.page_padding + self.group_padding
        ) + self.last_block

    def __add__(self, other: Waste) -> Waste:
        return Waste(
            self.state_padding + other.state_padding,
            self.page_padding + other.page_padding,
            self.group_padding + other.group_padding,
            self.last_block + other.last_block,
        )


@dataclass(frozen=True)
class GroupPlan:
    """The layers of one kind: same spec, same block, ``num_groups`` groups."""

    spec: KVCacheSpec
    layer_names: tuple[str, ...]
    num_groups: int
    content_bytes: int
    """Bytes of a page that hold tokens or a state."""
    padding_bytes: int
    """Bytes of a page behind its content."""
    held: int
    """Tokens (attention) or states that a full-length request holds."""
    blocks_per_request: int
    blocks_per_short_request: int
    request_bytes: int
    """Bytes of all groups of this kind for one full-length request."""
    waste: Waste

    @property
    def kind(self) -> KVCacheSpecKind:
        return get_kv_cache_spec_kind(self.spec)

    @property
    def block_size(self) -> int:
        return self.spec.block_size


@dataclass(frozen=True)
class PagePlan:
    """Page, blocks and their cost. Bytes are per rank."""

    specs: Mapping[str, KVCacheSpec]
    """Each layer's spec with its planned block and padding."""
    groups: tuple[GroupPlan, ...]
    page_bytes: int
    group_size: int
    """Layers per group that the grouping aims at."""
    width: int
    """Layers of the widest group: a block takes ``width * page_bytes``."""
    lcm: int
    """Least common multiple of the blocks that prefix caching aligns, tokens."""
    hash_block: int
    """Greatest common divisor of the same blocks, tokens."""
    request_bytes: int
    """One request at ``max_model_len``."""
    short_request_bytes: int
    total_bytes: int
    """``max_num_seqs`` requests at ``max_model_len``, and the null block."""
    short_total_bytes: int
    waste: Waste
    baseline: PagePlan | None = field(default=None, repr=False)
    """What upstream's rule makes of the same layers; None if it cannot."""
    notes: tuple[str, ...] = ()

    @property
    def block_bytes(self) -> int:
        return self.width * self.page_bytes

    @property
    def num_groups(self) -> int:
        return sum(group.num_groups for group in self.groups)

    @property
    def saved_bytes(self) -> int:
        """Bytes per full-length request less than upstream's rule takes."""
        if self.baseline is None:
            return 0
        return self.baseline.request_bytes - self.request_bytes

    def tokens(self, budget_bytes: int, max_model_len: int) -> int:
        """Tokens that ``budget_bytes`` hold, as the engine reports them."""
        per_request = sum(g.num_groups * g.blocks_per_request for g in self.groups)
        num_blocks = budget_bytes // self.block_bytes
        return int(num_blocks / per_request * max_model_len)


# ---------------------------------------------------------------------------
# What one layer holds
# ---------------------------------------------------------------------------


def is_state(spec: KVCacheSpec) -> bool:
    return isinstance(spec, MambaSpec)


def state_bytes(spec: MambaSpec) -> int:
    """Bytes of one unpadded state."""
    return spec.state_content_size_bytes


def content_bytes(spec: KVCacheSpec) -> int:
    """Bytes of a page that hold something: tokens, or one state."""
    if isinstance(spec, MambaSpec):
        return state_bytes(spec)
    assert isinstance(spec, AttentionSpec)
    return spec.unpadded_page_size_bytes


def _held(
    spec: KVCacheSpec, length: int, workload: Workload, dcp_world_size: int
) -> tuple[int, int]:
    """Tokens (or states) a request of ``length`` holds, and its extra blocks."""
    if isinstance(spec, MambaSpec):
        running = 1 + spec.num_speculative_blocks
        if spec.mamba_cache_mode == "align":
            running += 1 + spec.num_prefill_checkpoint_blocks
        return running, 0
    if isinstance(spec, SlidingWindowSpec):
        window = spec.sliding_window - 1 + spec.extra_retained_tokens
        # One more block: a window rarely starts at a block's first token.
        return min(window + workload.max_in_flight_tokens, length), 1
    if isinstance(spec, ChunkedLocalAttentionSpec):
        chunk = spec.attention_chunk_size
        return min(chunk + workload.max_in_flight_tokens, length), 0
    return cdiv(length, dcp_world_size if spec.dcp_sharded else 1), 0


def blocks_per_request(
    spec: KVCacheSpec, length: int, workload: Workload, dcp_world_size: int = 1
) -> int:
    """Blocks that one request of ``length`` tokens holds in one group."""
    held, extra = _held(spec, length, workload, dcp_world_size)
    return held if is_state(spec) else cdiv(held, spec.block_size) + extra


def _hashed_span(spec: KVCacheSpec, dcp_world_size: int) -> int | None:
    """Tokens of the sequence that a hashed block spans; None if never hashed."""
    if isinstance(spec, MambaSpec):
        return spec.block_size if spec.mamba_cache_mode == "align" else None
    if not spec.prefix_cacheable:
        return None
    return spec.block_size * (dcp_world_size if spec.dcp_sharded else 1)


# ---------------------------------------------------------------------------
# Grouping, as `_get_kv_cache_groups_uniform_page_size` does it
# ---------------------------------------------------------------------------


def group_layers(specs: Mapping[str, KVCacheSpec]) -> list[list[str]]:
    """Layers that share one spec, or whose specs merge into one."""
    by_spec: dict[KVCacheSpec, list[str]] = {}
    for name, spec in specs.items():
        by_spec.setdefault(spec, []).append(name)
    kinds: list[tuple[list[str], list[KVCacheSpec]]] = []
    for spec, names in by_spec.items():
        for kind_names, kind_specs in kinds:
            try:
                type(kind_specs[0]).merge([*kind_specs, spec])
            except (AssertionError, ValueError):
                continue
            kind_names.extend(names)
            kind_specs.append(spec)
            break
        else:
            kinds.append((list(names), [spec]))
    return [names for names, _ in kinds]


def upstream_group_size(counts: Sequence[int]) -> int:
    """Layers per group: the rarest kind's count, unless the kinds are close."""
    smallest, largest = min(counts), max(counts)
    return largest if largest < smallest * 1.5 else smallest


@dataclass(frozen=True)
class _Grouping:
    size: int
    width: int
    groups: tuple[int, ...]

    @classmethod
    def make(cls, counts: Sequence[int], size: int) -> _Grouping:
        groups = tuple(cdiv(n, size) for n in counts)
        width = max(cdiv(n, k) for n, k in zip(counts, groups))
        return cls(size, width, groups)

    @property
    def slots(self) -> tuple[int, ...]:
        return tuple(self.width * k for k in self.groups)


def _groupings(counts: Sequence[int], keep: bool) -> list[_Grouping]:
    """Upstream's grouping and the wider ones that could cost less.

    Never narrower than upstream's: no kind is split into more groups, so a
    runner that needs its draft layers in one group still finds them there.
    A grouping with as many slots for every kind, or more, is left out.
    """
    size = upstream_group_size(counts)
    options = [_Grouping.make(counts, size)]
    if keep:
        return options
    for wider in range(size + 1, max(counts) + 1):
        option = _Grouping.make(counts, wider)
        if not any(
            other.width <= option.width
            and all(a <= b for a, b in zip(other.slots, option.slots))
            for other in options
        ):
            options.append(option)
    return options


# ---------------------------------------------------------------------------
# Figures of a set of specs that share one page
# ---------------------------------------------------------------------------


def evaluate(
    specs: Mapping[str, KVCacheSpec],
    workload: Workload,
    constraints: PageConstraints | None = None,
    group_size: int | None = None,
) -> PagePlan:
    """Figures of ``specs``, which share one page size, grouped by ``group_size``.

    Args:
        specs: Each layer's spec, in the order in which layers register.
        workload: The load to count for.
        constraints: Only ``dcp_world_size`` is read.
        group_size: Layers per group; upstream's rule if None.

    Raises:
        PagePlanError: The specs' pages differ.

    """
    dcp = (constraints or PageConstraints()).dcp_world_size
    pages = {spec.page_size_bytes for spec in specs.values()}
    if len(pages) != 1:
        raise PagePlanError(
            f"Layers with pages of {sorted(pages)} bytes do not share one page."
        )
    page = pages.pop()
    kinds = group_layers(specs)
    counts = [len(names) for names in kinds]
    size = group_size or upstream_group_size(counts)
    grouping = _Grouping.make(counts, size)

    groups = []
    short_slots = 0
    for names, num_groups, slots in zip(kinds, grouping.groups, grouping.slots):
        spec = specs[names[0]]
        held, _ = _held(spec, workload.max_model_len, workload, dcp)
        blocks = blocks_per_request(spec, workload.max_model_len, workload, dcp)
        short = blocks_per_request(spec, workload.short_tokens, workload, dcp)
        content = content_bytes(spec)
        layers = len(names)
        padding = (page - content) * layers * blocks
        if isinstance(spec, MambaSpec):
            waste = Waste(state_padding=padding)
        else:
            used = cdiv(held * content, spec.block_size)
            waste = Waste(
                page_padding=padding,
                last_block=(content * blocks - used) * layers,
            )
        waste += Waste(group_padding=page * (slots - layers) * blocks)
        short_slots += slots * short
        groups.append(
            GroupPlan(
                spec=spec,
                layer_names=tuple(names),
                num_groups=num_groups,
                content_bytes=content,
                padding_bytes=page - content,
                held=held,
                blocks_per_request=blocks,
                blocks_per_short_request=short,
                request_bytes=page * slots * blocks,
                waste=waste,
            )
        )

    spans = [s for spec in specs.values() if (s := _hashed_span(spec, dcp))]
    request = sum(g.request_bytes for g in groups)
    null_block = page * grouping.width
    return PagePlan(
        specs=dict(specs),
        groups=tuple(groups),
        page_bytes=page,
        group_size=size,
        width=grouping.width,
        lcm=math.lcm(*spans),
        hash_block=math.gcd(*spans),
        request_bytes=request,
        short_request_bytes=page * short_slots,
        total_bytes=workload.max_num_seqs * request + null_block,
        short_total_bytes=workload.max_num_seqs * page * short_slots + null_block,
        waste=sum((g.waste for g in groups), Waste()),
    )


# ---------------------------------------------------------------------------
# Kinds of layers and the blocks they may take
# ---------------------------------------------------------------------------


def reads(kernel_blocks: Iterable[KernelBlocks], block: int) -> bool:
    """Whether every backend reads blocks of ``block`` tokens unsplit."""
    return all(
        any(block == s if isinstance(s, int) else block % s.base == 0 for s in sizes)
        for sizes in kernel_blocks
    )


def splitting_sizes(kernel_blocks: Iterable[KernelBlocks]) -> list[int]:
    """Exact sizes into which blocks may be split for every backend."""
    kernel_blocks = list(kernel_blocks)
    exact = {s for s in chain(*kernel_blocks) if isinstance(s, int)}
    return sorted(s for s in exact if reads(kernel_blocks, s))


def readable(spec: AttentionSpec, kernel_blocks: Iterable[KernelBlocks]) -> bool:
    """Whether the backends can read the spec's blocks, split only if unpadded."""
    kernel_blocks = list(kernel_blocks)
    if reads(kernel_blocks, spec.block_size):
        return True
    return spec.page_size_bytes == spec.unpadded_page_size_bytes and any(
        spec.block_size % s == 0 for s in splitting_sizes(kernel_blocks)
    )


@dataclass(frozen=True)
class _Attention:
    """Attention layers of one kind; a block is ``m * unit`` tokens, m >= 1."""

    names: tuple[str, ...]
    spec: AttentionSpec
    kernel_blocks: frozenset[KernelBlocks]
    unit: int
    unit_bytes: int
    span: int
    """Tokens of the sequence that ``unit`` covers (more under DCP)."""
    initial: int
    """The incoming block, in units, rounded up."""
    may_pad: bool

    def masks(self, limit: int) -> tuple[np.ndarray, np.ndarray]:
        """For m in 0..limit: may fill the page exactly; may be padded up to it.

        A block that fills its page may be split into the kernels' own blocks; a
        padded one may not, since kernel blocks lie a constant stride apart.
        """
        blocks = np.arange(limit + 1, dtype=np.int64) * self.unit
        whole = np.ones(limit + 1, dtype=bool)
        for sizes in self.kernel_blocks:
            reads = np.zeros(limit + 1, dtype=bool)
            for s in sizes:
                reads |= blocks == s if isinstance(s, int) else blocks % s.base == 0
            whole &= reads
        exact = whole.copy()
        for s in splitting_sizes(self.kernel_blocks):
            exact |= blocks % s == 0
        whole[0] = exact[0] = False
        return exact, whole if self.may_pad else np.zeros_like(whole)

    def stride_fits(self, m: int, page: int) -> bool:
        """Whether a stride of ``page`` keeps the alignment the spec asks for."""
        alignment = self.spec.block_stride_alignment
        if alignment is None:
            return True
        spec = _with_block(self.spec, m * self.unit, page)
        return page % spec.get_block_stride_alignment() == 0


def _with_block(spec: AttentionSpec, block: int, page: int) -> AttentionSpec:
    spec = replace(spec, block_size=block, page_size_padded=None)
    if spec.page_size_bytes != page:
        spec = replace(spec, page_size_padded=page)
    return spec


def _check_layer(name: str, spec: KVCacheSpec, declared: bool) -> None:
    if isinstance(spec, MambaSpec):
        return
    if type(spec) not in PLANNED_ATTENTION_SPECS:
        raise PagePlanError(
            f"Layer {name} has a {type(spec).__name__}, whose block size the planner "
            "does not change."
        )
    if isinstance(spec, MLAAttentionSpec) and spec.alignment is not None:
        raise PagePlanError(
            f"Layer {name} aligns its own pages to {spec.alignment} bytes."
        )
    if not declared:
        raise PagePlanError(
            f"Layer {name} does not say which kernel blocks its backend reads."
        )


def _unit(
    spec: AttentionSpec,
    kernel_blocks: Iterable[KernelBlocks],
    constraints: PageConstraints,
    has_states: bool,
) -> int:
    """Granularity of a layer's block, tokens."""
    sizes = [s if isinstance(s, int) else s.base for s in chain(*kernel_blocks)]
    unit = math.lcm(math.gcd(*sizes), constraints.block_multiple)
    states = spec.tokens_per_state
    if isinstance(states, int):
        unit = math.lcm(unit, states)
    if spec.dcp_sharded and constraints.dcp_world_size > 1:
        spanned = constraints.hash_block_size
        unit = math.lcm(unit, spanned // math.gcd(spanned, constraints.dcp_world_size))
    else:
        unit = math.lcm(unit, constraints.hash_block_size)
    # Hybrid MLA models: the number of kernel blocks per block must be a multiple
    # of 128 / kernel block, so upstream aligns their blocks to 128 tokens.
    if isinstance(spec, MLAAttentionSpec) and has_states and spec.block_size % 128 == 0:
        unit = math.lcm(unit, 128)
    return unit


def _attention_kinds(
    specs: Mapping[str, KVCacheSpec],
    kernel_blocks: Mapping[str, KernelBlocks],
    constraints: PageConstraints,
) -> list[_Attention]:
    """Kinds of attention layers; blocks and padding as they come do not count."""
    has_states = any(is_state(spec) for spec in specs.values())
    plain: dict[str, KVCacheSpec] = {}
    for name, spec in specs.items():
        if isinstance(spec, AttentionSpec):
            states = spec.tokens_per_state
            one = states if isinstance(states, int) and states > 0 else 1
            plain[name] = replace(spec, block_size=one, page_size_padded=None)
    kinds = []
    for names in group_layers(plain):
        spec = specs[names[0]]
        assert isinstance(spec, AttentionSpec)
        sizes = frozenset(tuple(kernel_blocks[name]) for name in names)
        unit = _unit(spec, sizes, constraints, has_states)
        unpadded = replace(spec, block_size=unit, page_size_padded=None)
        sharded = constraints.dcp_world_size if spec.dcp_sharded else 1
        kinds.append(
            _Attention(
                names=tuple(names),
                spec=spec,
                kernel_blocks=sizes,
                unit=unit,
                unit_bytes=unpadded.unpadded_page_size_bytes,
                span=unit * sharded,
                initial=max(cdiv(specs[name].block_size, unit) for name in names),
                # Sparse MLA indexes the cache in whole token rows, so its pages
                # cannot end in padding of another size.
                may_pad=constraints.pages_may_be_padded
                and not isinstance(spec, MLAAttentionSpec),
            )
        )
    return kinds


@lru_cache(maxsize=4096)
def _divisors(n: int) -> tuple[int, ...]:
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return tuple(sorted({*small, *(n // d for d in small)}))


# ---------------------------------------------------------------------------
# The search
# ---------------------------------------------------------------------------


class _Search:
    """Exhaustive over pages and largest blocks, cut by lower bounds.

    For a given page and a given largest block each kind's best block is
    independent of the others': the largest one that it may take, that fits the
    page and that divides the largest block. So only (page, largest block) pairs
    are enumerated. A pair is skipped only when even blocks that ignore the
    divisibility cost more than the best plan found.
    """

    def __init__(
        self,
        specs: Mapping[str, KVCacheSpec],
        kernel_blocks: Mapping[str, KernelBlocks],
        workload: Workload,
        constraints: PageConstraints,
        max_lcm: int | None,
        affordable: int | None = None,
    ) -> None:
        """``affordable``: total bytes that some plan is known to stay within."""
        self.workload = workload
        self.constraints = constraints
        self.max_lcm = max_lcm
        self.kinds = _attention_kinds(specs, kernel_blocks, constraints)
        states: dict[str, KVCacheSpec] = {
            name: replace(spec, page_size_padded=None)
            for name, spec in specs.items()
            if isinstance(spec, MambaSpec)
        }
        state_kinds = group_layers(states) if states else []
        self.largest_state = max(map(content_bytes, states.values()), default=0)
        counts = [len(k.names) for k in self.kinds] + [len(n) for n in state_kinds]
        self.groupings = _groupings(counts, constraints.keep_group_size)
        self.state_blocks = [
            blocks_per_request(
                states[names[0]], workload.max_model_len, workload, self._dcp
            )
            for names in state_kinds
        ]
        # Each group of a request holds a block at least, whatever the page.
        least = min(
            workload.max_num_seqs * sum(g.slots) + g.width for g in self.groupings
        )
        self.max_page = None if affordable is None else affordable // least
        # Targets register before drafts, and states follow their full attention.
        self.primary = next(
            (
                i
                for i, kind in enumerate(self.kinds)
                if isinstance(kind.spec, FullAttentionSpec)
            ),
            0,
        )
        self.held = [
            _held(k.spec, workload.max_model_len, workload, self._dcp)
            for k in self.kinds
        ]
        self.short_held = [
            _held(k.spec, workload.short_tokens, workload, self._dcp)
            for k in self.kinds
        ]
        self.limits = [self._limit(i) for i in range(len(self.kinds))]
        self.masks = [k.masks(n) for k, n in zip(self.kinds, self.limits)]
        if constraints.keep_primary_block:
            for mask in self.masks[self.primary]:
                mask[: self.kinds[self.primary].initial] = False
        self.last_padded = [
            np.maximum.accumulate(np.where(padded, np.arange(len(padded)), 0))
            for _, padded in self.masks
        ]
        self.best: tuple[tuple[int, ...], _Grouping, tuple[int, ...], int] | None = None

    @property
    def _dcp(self) -> int:
        return self.constraints.dcp_world_size

    def _limit(self, i: int) -> int:
        """Largest block of kind i, in units. More cannot help: it holds a whole
        request, or twice the largest state, or what it held before."""
        kind = self.kinds[i]
        limit = max(
            cdiv(self.held[i][0], kind.unit),
            2 * cdiv(self.largest_state, kind.unit_bytes),
            kind.initial,
        )
        if self.max_lcm is not None:
            limit = min(limit, self.max_lcm // kind.span)
        if self.max_page is not None:
            limit = min(limit, self.max_page // kind.unit_bytes)
        return limit

    def _bound(self, pages: np.ndarray, most: list[np.ndarray]) -> np.ndarray:
        """Least total bytes of any plan with these pages and at most these m."""
        seqs = self.workload.max_num_seqs
        blocks = []
        for kind, (held, extra), m in zip(self.kinds, self.held, most):
            block = np.maximum(m, 1) * kind.unit
            blocks.append(-(-held // block) + extra)
        best = None
        for grouping in self.groupings:
            slots = grouping.slots
            per_request = sum(n * b for n, b in zip(slots, blocks))
            per_request += sum(
                n * b for n, b in zip(slots[len(blocks) :], self.state_blocks)
            )
            total = pages * (seqs * per_request + grouping.width)
            best = total if best is None else np.minimum(best, total)
        assert best is not None
        return best

    def _most(self, pages: np.ndarray) -> list[np.ndarray]:
        """Largest block of each kind that its kernels read in these pages, in
        units; 0 where there is none."""
        most = []
        for kind, (exact, _), padded in zip(self.kinds, self.masks, self.last_padded):
            m = np.minimum(pages // kind.unit_bytes, len(exact) - 1)
            fills = (m * kind.unit_bytes == pages) & exact[m]
            most.append(np.where(fills, m, padded[m]))
        return most

    def _pages(self) -> np.ndarray:
        """Candidate pages: those that some kind fills and all others fit."""
        found = [
            np.flatnonzero(exact) * kind.unit_bytes
            for kind, (exact, _) in zip(self.kinds, self.masks)
        ]
        pages = np.unique(np.concatenate(found)).astype(np.int64)
        pages = pages[pages >= self.largest_state]
        fits = np.ones(len(pages), dtype=bool)
        for most in self._most(pages):
            fits &= most > 0
        return pages[fits]

    def _offer(self, page: int, blocks: tuple[int, ...]) -> None:
        """Keep the plan with blocks ``m`` of each kind if it is the best yet."""
        if all(m * k.unit_bytes != page for k, m in zip(self.kinds, blocks)):
            # Nobody fills this page: a smaller one does, or the states do not fit.
            return
        spans = [k.span * m for k, m in zip(self.kinds, blocks)]
        lcm = math.lcm(*spans)
        seqs = self.workload.max_num_seqs

        def counts(held: list[tuple[int, int]]) -> list[int]:
            return [
                cdiv(n, m * k.unit) + extra
                for k, m, (n, extra) in zip(self.kinds, blocks, held)
            ] + self.state_blocks

        full, short = counts(self.held), counts(self.short_held)
        for grouping in self.groupings:
            slots = grouping.slots
            key = (
                page * (seqs * sum(map(int.__mul__, slots, full)) + grouping.width),
                page * (seqs * sum(map(int.__mul__, slots, short)) + grouping.width),
                lcm,
                sum(grouping.groups),
                page,
                *blocks,
            )
            if self.best is None or key < self.best[0]:
                self.best = key, grouping, blocks, page

    def _allowed(self, i: int, page: int, limit: int) -> list[int]:
        """Blocks of kind i, in units, that its kernels read in ``page``."""
        kind, (exact, padded) = self.kinds[i], self.masks[i]
        blocks = np.flatnonzero(padded[: limit + 1]).tolist()
        m, rest = divmod(page, kind.unit_bytes)
        if not rest and m <= limit and exact[m] and not padded[m]:
            blocks.append(m)
        if kind.spec.block_stride_alignment is not None:
            blocks = [m for m in blocks if kind.stride_fits(m, page)]
        return blocks

    def _try_page(self, page: int, most: list[int]) -> None:
        allowed = [self._allowed(i, page, limit) for i, limit in enumerate(most)]
        if not all(allowed):
            return
        if not self.constraints.blocks_divide:
            self._offer(page, tuple(blocks[-1] for blocks in allowed))
            return
        # The largest block is some kind's, so it is one of these.
        divides = self.constraints.lcm_divides
        largest = sorted(
            {
                span
                for kind, blocks in zip(self.kinds, allowed)
                for m in blocks
                if (span := m * kind.span) >= self.constraints.min_lcm
                and (not divides or divides % span == 0)
            },
            reverse=True,
        )
        if not largest:
            return
        spans = np.array(largest, dtype=np.int64)
        bounds = self._bound(
            np.full_like(spans, page),
            [np.minimum(spans // k.span, m) for k, m in zip(self.kinds, most)],
        )
        sets = [set(blocks) for blocks in allowed]
        for span, bound in zip(largest, bounds.tolist()):
            if self.best is not None and bound > self.best[0][0]:
                # A smaller largest block only raises the bound.
                break
            if blocks := self._dividing_blocks(sets, most, span):
                self._offer(page, blocks)

    def _dividing_blocks(
        self, allowed: list[set[int]], most: list[int], largest: int
    ) -> tuple[int, ...] | None:
        """The largest block of each kind that divides ``largest`` tokens."""
        blocks = []
        for kind, choices, limit in zip(self.kinds, allowed, most):
            quotient, rest = divmod(largest, kind.span)
            if rest:
                return None
            divisors = _divisors(quotient)
            for m in reversed(divisors[: bisect_right(divisors, limit)]):
                if m in choices:
                    blocks.append(m)
                    break
            else:
                return None
        return tuple(blocks)

    def beaten_by(self, total_bytes: int) -> bool:
        """Whether no plan was found that takes fewer bytes."""
        return self.best is None or total_bytes <= self.best[0][0]

    def run(self) -> None:
        pages = self._pages()
        if not len(pages):
            return
        most = self._most(pages)
        bounds = self._bound(pages, most)
        for index in np.argsort(bounds, kind="stable").tolist():
            if self.best is not None and int(bounds[index]) > self.best[0][0]:
                break
            self._try_page(int(pages[index]), [int(m[index]) for m in most])


def plan_kv_pages(
    specs: Mapping[str, KVCacheSpec],
    kernel_blocks: Mapping[str, Sequence[int | MultipleOf]],
    workload: Workload,
    constraints: PageConstraints | None = None,
    baseline: Mapping[str, KVCacheSpec] | None = None,
) -> PagePlan:
    """The page and blocks with the fewest bytes for ``workload``.

    Args:
        specs: Each layer's spec, in the order in which layers register. The
            blocks that come in are upstream's; they bound how coarse the
            scheduler's block may become and are otherwise free.
        kernel_blocks: For each attention layer the block sizes, in tokens, that
            its backend reads without splitting. ``MultipleOf(n)`` means every
            multiple of n.
        workload: The load to plan for.
        constraints: Everything else a plan must respect.
        baseline: The same layers under upstream's rule
            (``unify_kv_cache_spec_page_size``), or None if it has no answer.
            It is kept when no plan costs fewer bytes.

    Returns:
        The plan. Layers that share one page size already keep their specs.

    Raises:
        PagePlanError: The planner cannot change one of the layers, or no page
            and blocks satisfy the constraints; the message says which.

    """
    constraints = constraints or PageConstraints()
    if not specs:
        raise PagePlanError("There is no layer to plan for.")
    upstream = None if baseline is None else evaluate(baseline, workload, constraints)
    if len({spec.page_size_bytes for spec in specs.values()}) == 1:
        return evaluate(specs, workload, constraints)
    for name, spec in specs.items():
        _check_layer(name, spec, name in kernel_blocks)
    if not any(isinstance(spec, AttentionSpec) for spec in specs.values()):
        raise PagePlanError("There is no attention layer whose block could change.")

    declared = {name: tuple(kernel_blocks[name]) for name in kernel_blocks}
    max_lcm = constraints.max_lcm
    if max_lcm is None and constraints.blocks_divide:
        max_lcm = _default_max_lcm(specs, baseline, constraints)
    usable = upstream is not None and _satisfies(upstream, declared, constraints)
    affordable = upstream.total_bytes if upstream and usable else None
    search = _Search(specs, declared, workload, constraints, max_lcm, affordable)
    search.run()
    if upstream and usable and search.beaten_by(upstream.total_bytes):
        return replace(upstream, notes=("no plan takes fewer bytes than upstream's",))
    if search.best is None:
        raise PagePlanError(
            "No page fits: states need "
            f"{search.largest_state} bytes, the attention layers' smallest blocks "
            f"{[k.unit_bytes for k in search.kinds]} bytes, and no "
            "blocks divide one another within the constraints "
            f"(largest block at most {max_lcm} tokens)."
        )
    _, grouping, blocks, page = search.best

    planned: dict[str, KVCacheSpec] = {}
    block_of = {
        name: m * kind.unit
        for kind, m in zip(search.kinds, blocks)
        for name in kind.names
    }
    primary_block = blocks[search.primary] * search.kinds[search.primary].unit
    for name, spec in specs.items():
        if isinstance(spec, MambaSpec):
            padded = None if state_bytes(spec) == page else page
            spec = replace(spec, page_size_padded=padded)
            if spec.mamba_cache_mode == "align":
                # A state is cached where a block of the primary layers ends.
                spec = replace(spec, block_size=primary_block)
        else:
            assert isinstance(spec, AttentionSpec)
            spec = _with_block(spec, block_of[name], page)
        planned[name] = spec

    plan = evaluate(planned, workload, constraints, grouping.size)
    notes = []
    primary_name = search.kinds[search.primary].names[0]
    before = specs[primary_name].block_size
    if primary_block != before:
        change = (
            (primary_block - before)
            * search.kinds[search.primary].unit_bytes
            // search.kinds[search.primary].unit
        )
        notes.append(
            f"the primary block went from {before} to {primary_block} tokens, "
            f"{change:+,} bytes a page"
        )
    return replace(plan, baseline=upstream, notes=tuple(notes))


def _satisfies(
    plan: PagePlan,
    kernel_blocks: Mapping[str, KernelBlocks],
    constraints: PageConstraints,
) -> bool:
    """Whether upstream's own plan meets the constraints."""
    dcp = constraints.dcp_world_size
    for name, spec in plan.specs.items():
        if not isinstance(spec, AttentionSpec):
            continue
        if not readable(spec, [kernel_blocks[name]]):
            return False
        if (
            spec.block_size
            * (dcp if spec.dcp_sharded else 1)
            % (constraints.hash_block_size)
        ):
            return False
    if not constraints.blocks_divide:
        return True
    spans = [_hashed_span(spec, dcp) or 1 for spec in plan.specs.values()]
    return (
        plan.lcm == max(spans)
        and plan.lcm >= constraints.min_lcm
        and not (constraints.lcm_divides and constraints.lcm_divides % plan.lcm)
    )


def _default_max_lcm(
    specs: Mapping[str, KVCacheSpec],
    baseline: Mapping[str, KVCacheSpec] | None,
    constraints: PageConstraints,
) -> int:
    """How coarse the scheduler's block may become, tokens."""
    dcp = constraints.dcp_world_size

    def largest(of: Mapping[str, KVCacheSpec]) -> int:
        return max(
            s.block_size * (dcp if s.dcp_sharded else 1)
            for s in of.values()
            if isinstance(s, AttentionSpec)
        )

    if baseline is not None:
        return int(largest(baseline) * LCM_SLACK)
    # Without an upstream answer: four of the blocks that came in, which is room
    # for two layer widths in each other's multiples.
    return 4 * round_up(largest(specs), 16)
