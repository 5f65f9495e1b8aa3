# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Admission at start-up: one table from what was measured, and a refusal with
the remedies when a request of ``max_model_len`` does not fit.

``VLLM_MEMORY_PLAN=0`` leaves upstream's messages. Upstream's own checks stay in
place behind this one, so nothing that they refuse is served; and this one
refuses nothing that they accept, except an explicit KV cache
(``--kv-cache-memory-bytes``, or a stored start-up plan) that the device has no
room for, which would run out of memory under load.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import nn

from vllm import envs
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import KVCacheSpec

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.memory_plan.activations import Sizes
    from vllm.v1.core.memory_plan.planner import Planner
    from vllm.v1.core.memory_plan.table import MemoryPlan
    from vllm.v1.executor import Executor
    from vllm.v1.worker.memory_report import StartupMemory

logger = init_logger(__name__)


class MemoryPlanError(ValueError):
    """The configuration does not fit; the message is the table."""


@dataclass(frozen=True)
class RankReport:
    """What one worker knows of its memory, in bytes.

    Attributes:
        rank: global rank.
        device: the card's name.
        total: its memory.
        free: free at start-up, or now where that was not recorded.
        weights: parameters and buffers of the model and its draft.
        process: the worker's resident memory; 0 on a GPU.
        sizes: for the activation formulae; None when they could not be read.
        startup: what start-up measured; None on platforms that do not.
        settable: the setting of the KV cache's bytes.

    """

    rank: int
    device: str
    total: int
    free: int
    weights: int
    process: int
    sizes: Sizes | None
    startup: StartupMemory | None
    settable: str


def utilization_that_fits(free: int, total: int) -> str:
    """A sentence that names the highest utilization for ``free`` of ``total``
    bytes; empty where there is none, or with ``VLLM_MEMORY_PLAN=0``."""
    from vllm.v1.core.memory_plan.planner import floor_hundredth

    highest = floor_hundredth(free, total)
    if not envs.VLLM_MEMORY_PLAN or highest <= 0:
        return ""
    return f" The highest that fits now is --gpu-memory-utilization {highest:g}."


def admit(
    vllm_config: VllmConfig,
    executor: Executor,
    specs: Sequence[dict[str, KVCacheSpec]],
    available: Sequence[int],
) -> None:
    """Log the memory table, or refuse to serve with it.

    Args:
        vllm_config: the engine's configuration; not modified.
        executor: asked for each rank's figures.
        specs: each rank's KV-cache specs.
        available: bytes that each rank has for the KV cache.

    Raises:
        MemoryPlanError: one request of ``max_model_len`` does not fit, or an
            explicit KV cache is larger than the device has room for.

    """
    if (
        not envs.VLLM_MEMORY_PLAN
        or envs.VLLM_ELASTIC_EP_SCALE_UP_LAUNCH
        or not any(specs)
        or vllm_config.attention_config.hisparse_config is not None
        or vllm_config.cache_config.num_gpu_blocks_override is not None
    ):
        return
    try:
        reports = executor.collective_rpc(report_of)
        planner = planner_of(vllm_config, reports, specs, available)
        plan = planner.plan()
        if vllm_config.model_config.original_max_model_len == -1 and plan.short:
            plan = planner.longest() or plan
    except Exception as error:
        # A table is no reason not to serve. Upstream's checks follow.
        logger.debug("No memory table: %r", error, exc_info=True)
        return
    from vllm.v1.core.memory_plan.table import format_plan

    if plan.fits:
        logger.info("%s", format_plan(plan))
    elif plan.over or vllm_config.model_config.original_max_model_len != -1:
        raise MemoryPlanError(_refusal(planner, plan))


def _refusal(planner: Planner, plan: MemoryPlan) -> str:
    from vllm.v1.core.memory_plan.table import format_plan

    try:
        planner = planner.with_encoders()
    except Exception as error:
        # There are remedies without it.
        logger.debug("No encoder in the remedies: %r", error, exc_info=True)
    try:
        plan = planner.with_remedies()
    except Exception as error:
        logger.debug("No remedies: %r", error, exc_info=True)
    return (
        f"The KV cache does not fit.\n{format_plan(plan)}\n"
        "  (VLLM_MEMORY_PLAN=0 leaves this check to upstream's)"
    )


def planner_of(
    vllm_config: VllmConfig,
    reports: Sequence[RankReport],
    specs: Sequence[dict[str, KVCacheSpec]],
    available: Sequence[int],
) -> Planner:
    """A planner over what the ranks measured.

    Args:
        vllm_config: the engine's configuration; not modified.
        reports: of each rank, in order.
        specs: each rank's KV-cache specs.
        available: bytes that each rank has for the KV cache.

    """
    from vllm.v1.core.memory_plan.activations import Sizes
    from vllm.v1.core.memory_plan.model import copy_config
    from vllm.v1.core.memory_plan.planner import Device, Planner, Rank

    config = copy_config(vllm_config)
    startups = [report.startup for report in reports]
    explicit = [s.kv_explicit for s in startups if s is not None and s.kv_explicit]
    is_explicit = bool(explicit or config.cache_config.kv_cache_memory_bytes)
    # What a reservation of upstream's leaves of it.
    config.cache_config.kv_cache_memory_bytes = min(available) if is_explicit else None
    device = Device(
        reports[0].device,
        min(report.total for report in reports),
        min(report.free for report in reports),
        reports[0].settable,
    )
    requested = device.requested(config.cache_config.gpu_memory_utilization)
    measured = [
        _figures(report, requested, None if is_explicit else memory)
        for report, memory in zip(reports, available)
    ]
    ranks = [
        Rank(report.rank, dict(of_rank), report.weights, report.sizes or Sizes(2))
        for report, of_rank in zip(reports, specs)
    ]
    return Planner(config, ranks, device, measured=measured)


def _figures(report: RankReport, requested: int, available: int | None) -> Any:
    """A rank's measured figures; what is unaccounted for is outside of torch, so
    that they add up to what the KV cache really gets."""
    from vllm.v1.core.memory_plan.activations import Peak
    from vllm.v1.core.memory_plan.planner import RankFigures

    startup = report.startup
    if startup is None:
        rest = report.process - report.weights
        if not report.process and available is not None:
            rest = requested - available - report.weights
        return RankFigures(
            report.rank, report.weights, Peak(0, "", "", ()), outside=max(0, rest)
        )
    figures = RankFigures(
        rank=report.rank,
        weights=startup.weights,
        activation=Peak(
            startup.activation_peak, startup.activation_shape, "", (), startup.shapes
        ),
        resident=startup.persistent,
        outside=startup.non_torch,
        fragmentation=startup.fragmentation,
        graphs=startup.graphs_reserved,
    )
    if available is None:
        return figures
    unaccounted = requested - figures.used - available
    return replace(figures, outside=figures.outside + unaccounted)


# ---------------------------------------------------------------------------
# In the workers
# ---------------------------------------------------------------------------


def report_of(worker: Any) -> RankReport:
    """Called in each worker: its memory, and the sizes of its model."""
    from vllm.platforms import current_platform
    from vllm.v1.core.memory_plan.model import allocated_bytes

    runner = worker.model_runner
    target = runner.get_model()
    speculator = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
    draft = getattr(speculator, "model", None)
    models = [model for model in (target, draft) if isinstance(model, nn.Module)]
    startup = getattr(worker, "startup_memory", None)
    if current_platform.is_cpu():
        import os

        import psutil

        from vllm.v1.core.memory_plan.planner import cpu_device

        device = cpu_device()
        name, total, free = device.name, device.total, device.free or 0
        process = psutil.Process(os.getpid()).memory_info().rss
        # Free but for the KV cache: what the process holds is counted as used.
        free += process
        settable = device.settable if _set_by_environment() else ""
    else:
        name = current_platform.get_device_name()
        process, settable = 0, ""
        snapshot = getattr(worker, "init_snapshot", None)
        total = startup.total if startup else getattr(snapshot, "total_memory", 0)
        free = startup.free_at_start if startup else getattr(snapshot, "free_memory", 0)
    return RankReport(
        rank=worker.rank,
        device=name,
        total=total,
        free=free,
        weights=allocated_bytes(models),
        process=process,
        sizes=_sizes(worker.vllm_config, target, draft),
        startup=startup,
        settable=settable or "--kv-cache-memory-bytes",
    )


def _set_by_environment() -> bool:
    return bool(envs.VLLM_CPU_KVCACHE_SPACE)


def _sizes(vllm_config: VllmConfig, target: Any, draft: Any) -> Sizes | None:
    from vllm.v1.core.memory_plan.sizes import read_sizes

    try:
        return read_sizes(vllm_config, target, draft)
    except Exception as error:
        logger.debug("No sizes for the memory table: %r", error, exc_info=True)
        return None
