# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Where the page planner meets vLLM: hooks that upstream's files call.

``VLLM_KV_PAGE_PLAN=0`` turns every one of them into upstream's behaviour.

* Attention layers declare the kernel blocks of their backend on their spec
  (``declares_kernel_blocks``).
* ``get_kv_cache_groups`` takes the declarations off again
  (``take_kernel_blocks``), so no other consumer of a spec ever sees them, and
  asks for a plan (``plan_pages``).
* The engine core and the workers adopt the planned block of the states
  (``sync_block_sizes``).
* The engine core prints the final table (``log_page_plan``).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm import envs
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.core.kv_page_plan import (
    GroupPlan,
    KernelBlocks,
    PageConstraints,
    PagePlan,
    PagePlanError,
    Workload,
    evaluate,
    plan_kv_pages,
)
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    UniformTypeKVCacheSpecs,
)

if TYPE_CHECKING:
    import torch

    from vllm.config import VllmConfig

logger = init_logger(__name__)

# Connectors that address every group by that group's own block size.
GROUP_WISE_CONNECTORS = frozenset({"OffloadingConnector", "SimpleCPUOffloadConnector"})

MIB = 1 << 20


class PageSizeError(NotImplementedError):
    """Layers cannot share one page size.

    A ``NotImplementedError``, as upstream's, so that its fallback for MLA next to
    sliding-window layers is still tried.
    """


def enabled() -> bool:
    return envs.VLLM_KV_PAGE_PLAN


def premature(logger: logging.Logger) -> Callable[..., None]:
    """How to log a block size that the planner may still change: at debug level
    when the final table will state it, at info level as upstream otherwise."""
    return logger.debug if enabled() else logger.info


# ---------------------------------------------------------------------------
# Kernel blocks travel on the specs, from the workers to the engine core
# ---------------------------------------------------------------------------


def declares_kernel_blocks(
    get_kv_cache_spec: Callable[[Any, VllmConfig], KVCacheSpec | None],
) -> Callable[[Any, VllmConfig], KVCacheSpec | None]:
    """Decorate ``get_kv_cache_spec`` of a layer whose block the planner may
    change: its spec then carries the block sizes that its backend reads."""

    @functools.wraps(get_kv_cache_spec)
    def wrapped(self: Any, vllm_config: VllmConfig) -> KVCacheSpec | None:
        spec = get_kv_cache_spec(self, vllm_config)
        if (
            not isinstance(spec, AttentionSpec)
            or not enabled()
            or vllm_config.attention_config.hisparse_config is not None
        ):
            return spec
        # The backend's sizes may depend on how it packs the page.
        packed = self.attn_backend.customize_spec(spec)
        sizes = self.attn_backend.get_supported_kernel_block_sizes(packed)
        return replace(spec, kernel_block_sizes=tuple(sizes)) if sizes else spec

    return wrapped


def take_kernel_blocks(
    specs: MutableMapping[str, KVCacheSpec],
) -> dict[str, KernelBlocks]:
    """Take the declared kernel blocks off ``specs``, in place."""
    taken: dict[str, KernelBlocks] = {}
    for name, spec in specs.items():
        if isinstance(spec, AttentionSpec) and spec.kernel_block_sizes is not None:
            taken[name] = spec.kernel_block_sizes
            specs[name] = replace(spec, kernel_block_sizes=None)
    return taken


# ---------------------------------------------------------------------------
# From a configuration to the planner's numbers
# ---------------------------------------------------------------------------


def workload_of(vllm_config: VllmConfig) -> Workload:
    return Workload(
        max_model_len=vllm_config.model_config.max_model_len,
        max_num_seqs=vllm_config.scheduler_config.max_num_seqs,
        max_in_flight_tokens=vllm_config.max_in_flight_tokens,
        num_speculative_tokens=vllm_config.num_speculative_tokens,
    )


def constraints_of(
    vllm_config: VllmConfig, specs: Mapping[str, KVCacheSpec]
) -> PageConstraints:
    """What the configuration asks of a plan.

    Raises:
        PagePlanError: The configuration needs upstream's blocks.

    """
    cache_config = vllm_config.cache_config
    parallel_config = vllm_config.parallel_config
    layout = cache_config.get_resolved_kv_cache_layout()
    if layout.is_block_outermost:
        raise PagePlanError(
            f"KV cache layout {layout.name} packs pages of different sizes."
        )
    if (transfer := vllm_config.kv_transfer_config) is not None:
        if transfer.kv_connector not in GROUP_WISE_CONNECTORS:
            raise PagePlanError(
                f"KV connector {transfer.kv_connector} is not known to address "
                "every group by its own block size."
            )
        if transfer.kv_connector_extra_config.get("block_size") is not None:
            raise PagePlanError(
                "kv_connector_extra_config sets one block_size for all groups."
            )
    dcp = parallel_config.decode_context_parallel_size
    multiple = parallel_config.cp_kv_cache_interleave_size if dcp > 1 else 1
    if current_platform.is_xpu() and any(
        isinstance(spec, MambaSpec) for spec in specs.values()
    ):
        # XPU's gated-delta-net kernel wants blocks of 64 tokens.
        multiple = max(multiple, 64)
    hashed = cache_config.enable_prefix_caching or transfer is not None
    return PageConstraints(
        blocks_divide=hashed,
        pages_may_be_padded=layout.is_block_compact,
        dcp_world_size=dcp,
        block_multiple=multiple,
        hash_block_size=(cache_config.prefix_match_unit or 1) if hashed else 1,
        # The platform, the backend or the user asked for at least this block.
        keep_primary_block=True,
        lcm_divides=cache_config.prefix_cache_retention_interval or None,
        min_lcm=max(vllm_config.num_prefill_lookahead_tokens, 1),
        keep_group_size=parallel_config.pipeline_parallel_size > 1,
    )


def _unify(
    specs: Mapping[str, KVCacheSpec],
) -> tuple[dict[str, KVCacheSpec] | None, Exception | None]:
    """The layers under upstream's rule, or its error."""
    # kv_cache_utils imports this module.
    from vllm.v1.core.kv_cache_utils import unify_kv_cache_spec_page_size

    try:
        return unify_kv_cache_spec_page_size(dict(specs)), None
    except (NotImplementedError, AssertionError) as error:
        return None, error


def plan_pages(
    vllm_config: VllmConfig,
    specs: Mapping[str, KVCacheSpec],
    kernel_blocks: Mapping[str, KernelBlocks],
) -> PagePlan | None:
    """The plan for layers whose pages differ; None to leave them to upstream.

    Args:
        vllm_config: Read for the workload and the constraints.
        specs: Each layer's spec as its worker made it, without declarations.
        kernel_blocks: What ``take_kernel_blocks`` took off them.

    Raises:
        PageSizeError: Neither a plan nor upstream's rule gives one page size.

    """
    if not enabled() or len({spec.page_size_bytes for spec in specs.values()}) <= 1:
        return None
    baseline, error = _unify(specs)
    try:
        if not kernel_blocks:
            raise PagePlanError("No layer says which kernel blocks its backend reads.")
        plan = plan_kv_pages(
            specs,
            kernel_blocks,
            workload_of(vllm_config),
            constraints_of(vllm_config, specs),
            baseline,
        )
    except PagePlanError as reason:
        if error is not None:
            raise page_size_error(specs, str(reason)) from error
        logger.debug("KV page plan: upstream's pages are kept. %s", reason)
        return None
    for note in plan.notes:
        logger.debug("KV page plan: %s.", note)
    return plan


def page_size_error(
    specs: Mapping[str, KVCacheSpec], reason: str = ""
) -> PageSizeError:
    """An error that names two layers, their pages and the settings that help."""
    names = sorted(specs, key=lambda name: specs[name].page_size_bytes)
    small, large = names[0], names[-1]
    for name in names:
        # The layer that cannot be padded is the one to name.
        if not isinstance(specs[name], MambaSpec) and specs[large] != specs[name]:
            small = name
            break

    def describe(name: str) -> str:
        spec = specs[name]
        dtype = f", {spec.dtype}" if isinstance(spec, AttentionSpec) else ""
        return (
            f"{name} ({type(spec).__name__}{dtype}, block {spec.block_size}) has pages "
            f"of {spec.page_size_bytes:,} bytes"
        )

    return PageSizeError(
        "KV cache layers must share one page size, and these two cannot: "
        f"{describe(small)}, {describe(large)}. {reason} "
        "To reconcile them give both the same bytes per token, or one a multiple of "
        "the other's: set --kv-cache-dtype, or kv_cache_dtype in "
        "--speculative-config for a draft's layers; or set --block-size to a "
        "multiple of both backends' kernel blocks."
    )


# ---------------------------------------------------------------------------
# Consumers of the block size
# ---------------------------------------------------------------------------


def sync_block_sizes(
    vllm_config: VllmConfig, kv_cache_groups: Sequence[KVCacheGroupSpec]
) -> None:
    """Adopt the states' planned block in the cache configuration.

    With prefix caching, states are saved where their block ends, and both the
    scheduler (``cache_config.block_size``) and the runners
    (``cache_config.mamba_block_size``) cut prefill there. Upstream sets the
    former to the smallest block of all groups, which a draft's may be: a chunk
    would then end inside a state's block and leave a state under the wrong
    prefix.
    """
    if not enabled():
        return
    transfer = vllm_config.kv_transfer_config
    if transfer is not None and transfer.kv_connector not in GROUP_WISE_CONNECTORS:
        return
    for group in kv_cache_groups:
        spec = group.kv_cache_spec
        if isinstance(spec, UniformTypeKVCacheSpecs):
            spec = spec.first_spec
        if isinstance(spec, MambaSpec) and spec.mamba_cache_mode == "align":
            vllm_config.cache_config.block_size = spec.block_size
            vllm_config.cache_config.mamba_block_size = spec.block_size
            return


def drafts_in_own_group(drafter: Any) -> bool:
    """Whether a V1 drafter must get the block table of its own group.

    Upstream hands a plain draft model the first group's block table, whose
    blocks belong to another group and may be of another size.
    """
    return enabled() and getattr(drafter, "kv_cache_gid", -1) >= 0


def widest_first(kv_caches: Iterable[torch.Tensor]) -> Iterable[torch.Tensor]:
    """Layer caches in the order in which block copies may take one per address.

    Groups overlay each other: layers of several groups start at one address,
    with as many bytes of a page as each has content. A copied block may belong
    to any of them, so the layer with the most content has to be copied.
    """
    if not enabled():
        return kv_caches
    return sorted(kv_caches, key=lambda cache: -cache.numel() * cache.element_size())


# ---------------------------------------------------------------------------
# The table at start-up
# ---------------------------------------------------------------------------


def log_page_plan(
    vllm_config: VllmConfig,
    specs: Mapping[str, KVCacheSpec],
    kv_cache_groups: Sequence[KVCacheGroupSpec],
    num_blocks: int,
) -> None:
    """Log the final page, blocks and waste of models with several groups.

    Args:
        vllm_config: Read for the workload.
        specs: Each layer's spec before its page was unified.
        kv_cache_groups: The final groups.
        num_blocks: Blocks in the pool.

    """
    if not enabled() or len(kv_cache_groups) < 2:
        return
    final = {
        name: group.kv_cache_spec
        for group in kv_cache_groups
        for name in group.layer_names
    }
    workload = workload_of(vllm_config)
    constraints = PageConstraints(
        dcp_world_size=vllm_config.parallel_config.decode_context_parallel_size
    )
    width = max(len(group.layer_names) for group in kv_cache_groups)
    try:
        plan = evaluate(final, workload, constraints, width)
        baseline, _ = _unify({name: specs[name] for name in final})
        if baseline is not None:
            upstream = evaluate(baseline, workload, constraints)
            plan = replace(plan, baseline=upstream)
    except (PagePlanError, NotImplementedError) as reason:
        # Packed layouts give every layer its own page.
        logger.debug("KV page plan: no table. %s", reason)
        return
    logger.info("%s", format_page_plan(plan, specs, workload, num_blocks))


def format_page_plan(
    plan: PagePlan,
    before: Mapping[str, KVCacheSpec],
    workload: Workload,
    num_blocks: int,
) -> str:
    """The plan as a short table.

    Args:
        plan: The final plan.
        before: Each layer's spec before planning, for the blocks that changed.
        workload: The load that the bytes are counted for.
        num_blocks: Blocks in the pool.

    """
    header = "layers|kind|groups|block|page used|held per request|blocks|waste MiB"
    rows: list[tuple[str, ...]] = [tuple(header.split("|"))]
    rows += [_row(group, before) for group in plan.groups]
    widths = [max(map(len, column)) for column in zip(*rows)]
    title = (
        f"KV pages: {plan.page_bytes:,} bytes a page, {plan.width} layer(s) a block, "
        f"{plan.num_groups} groups, scheduler block {plan.lcm} tokens; "
        f"{num_blocks:,} blocks of {plan.block_bytes:,} bytes"
    )
    lines = [title]
    for row in rows:
        # Names to the left, numbers to the right.
        cells = [c.ljust(w) for c, w in zip(row[:2], widths[:2])]
        cells += [c.rjust(w) for c, w in zip(row[2:], widths[2:])]
        lines.append("  " + "  ".join(cells))
    waste = plan.waste
    lines.append(
        f"  a request of {workload.max_model_len:,} tokens takes "
        f"{plan.request_bytes / MIB:,.1f} MiB; unused: states' padding "
        f"{waste.state_padding / MIB:,.1f}, page padding "
        f"{waste.page_padding / MIB:,.1f}, group padding "
        f"{waste.group_padding / MIB:,.1f}, last blocks "
        f"{waste.last_block / MIB:,.1f} MiB"
    )
    if plan.baseline is not None and plan.saved_bytes:
        upstream = plan.baseline
        lines.append(
            "  avoided: the largest page would be "
            f"{upstream.page_bytes:,} bytes, with a scheduler block of {upstream.lcm} "
            f"tokens and {upstream.request_bytes / MIB:,.1f} MiB a request; "
            f"{plan.saved_bytes / MIB:,.1f} MiB "
            f"({100 * plan.saved_bytes / upstream.request_bytes:.1f} %) saved"
        )
    return "\n".join(lines)


def _row(group: GroupPlan, before: Mapping[str, KVCacheSpec]) -> tuple[str, ...]:
    first = group.layer_names[0]
    was = before[first].block_size
    block = str(group.block_size)
    if was != group.block_size:
        block += f" (was {was})"
    unit = "states" if isinstance(group.spec, MambaSpec) else "tokens"
    page = group.content_bytes + group.padding_bytes
    return (
        f"{len(group.layer_names)} x {first}",
        group.kind.value,
        str(group.num_groups),
        block,
        f"{100 * group.content_bytes / page:.1f} %",
        f"{group.held:,} {unit}",
        f"{group.blocks_per_request:,}",
        f"{group.waste.total / MIB:,.1f}",
    )


__all__ = [
    "PageSizeError",
    "constraints_of",
    "declares_kernel_blocks",
    "drafts_in_own_group",
    "enabled",
    "format_page_plan",
    "log_page_plan",
    "page_size_error",
    "plan_pages",
    "premature",
    "sync_block_sizes",
    "take_kernel_blocks",
    "widest_first",
    "workload_of",
]
