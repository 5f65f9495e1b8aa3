# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""From a configuration to a memory plan, and to the settings that mend it.

Every remedy is found by planning again with the setting changed, so it fits by
the same formulae. KV-cache groups, pages and tokens come from the functions
that the engine itself calls.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace

from vllm.config import CUDAGraphMode, VllmConfig
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.utils.math_utils import cdiv
from vllm.v1.attention.decode_scratch import shares_decode_scratch
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.memory_plan.activations import (
    Peak,
    Shape,
    Sizes,
    attention_bytes,
    peak_of,
    resident_bytes,
    sampler_bytes,
)
from vllm.v1.core.memory_plan.encoder import Encoded, EncoderSizes, encoded_of
from vllm.v1.core.memory_plan.model import copy_config, plan_models
from vllm.v1.core.memory_plan.sizes import takes_multimodal
from vllm.v1.core.memory_plan.table import KvNeed, MemoryPlan, Remedy
from vllm.v1.kv_cache_interface import (
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.worker.memory_profile import block_counts, has_states, limits_of
from vllm.v1.worker.profile_batches import (
    Batch,
    Limits,
    batches,
    crowded,
    longest,
    most_requests,
    settle,
)

logger = init_logger(__name__)

MIB = 2**20

OUTSIDE_TORCH_BYTES = 400 * MIB
"""Modules, kernels, libraries. Measured on an H200: 277 to 376 in a process of its
own, 438 in a server's engine process. Other cards were not measured."""

LIBRARY_BYTES = 36 * MIB
"""What stays of cuBLAS's workspace, 32 MiB, and of small buffers, on an H200."""

ENCODER_LIBRARY_BYTES = 32 * MIB
"""What an H200 kept besides with a multimodal encoder: a library's workspace."""

COMMUNICATOR_BYTES = 700 * MIB
"""NCCL's and the custom all-reduce's buffers with several ranks. Two H200s had 1,132
outside of torch, each of them, where one has 277 to 438. An estimate elsewhere."""

GRAPH_POOL_BYTES = 64 * MIB
GRAPH_BYTES_PER_LAYER = 283_000
"""CUDA graphs: a pool, and so much for each layer and captured size. An estimate
from others' figures: 0.56 GiB for 32 layers and 67 sizes. Start-up measures it."""

MAX_UTILIZATION = 0.98
"""The highest ``--gpu-memory-utilization`` that is offered: a card's memory is
never all free."""


@dataclass(frozen=True)
class Changes:
    """Settings that differ from the configuration's; None leaves one alone."""

    max_model_len: int | None = None
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    kv_cache_dtype: str | None = None
    num_speculative_tokens: int | None = None
    """0 serves without the draft."""
    text_only: bool | None = None
    """True serves a multimodal model without its encoders."""
    utilization: float | None = None
    explicit: int | None = None
    """Bytes of the KV cache; 0 leaves them to the utilization."""

    @property
    def of_the_model(self) -> Changes:
        """Those for which the model itself has to be made again."""
        return Changes(
            kv_cache_dtype=self.kv_cache_dtype,
            num_speculative_tokens=self.num_speculative_tokens,
            text_only=self.text_only,
        )

    @property
    def rebuild(self) -> bool:
        """Whether the model itself has to be made again."""
        return self.of_the_model != Changes()

    def and_(self, other: Changes) -> Changes:
        """Both; where both set one thing, the other's."""
        return replace(
            self,
            **{
                f.name: getattr(other, f.name)
                for f in fields(other)
                if getattr(other, f.name) is not None
            },
        )


@dataclass(frozen=True)
class RankFigures:
    """One rank's figures that are not the KV cache's, in bytes."""

    rank: int
    weights: int
    activation: Peak
    resident: int = 0
    outside: int = 0
    fragmentation: int = 0
    graphs: int = 0

    @property
    def used(self) -> int:
        used = self.weights + self.activation.bytes + self.resident + self.outside
        return used + self.graphs

    def adjusted(
        self, base: RankFigures, new: RankFigures, freed: int = 0
    ) -> RankFigures:
        """These measured figures after a change that the formulae take from
        ``base`` to ``new``. The peak is scaled, what stays is shifted. Weights are
        kept but for ``freed`` bytes: kernels repack them, so a planned difference
        is not the real one."""
        weights = self.weights - freed
        if not base.activation.bytes:
            return replace(self, weights=weights)  # No sizes to scale by.
        peak = new.activation
        ratio = self.activation.bytes / base.activation.bytes
        return replace(
            self,
            weights=weights,
            resident=max(0, self.resident + new.resident - base.resident),
            activation=replace(peak, bytes=math.ceil(peak.bytes * ratio)),
        )


@dataclass(frozen=True)
class Rank:
    """What a rank holds.

    Attributes:
        rank: global rank.
        specs: each layer's KV-cache spec, as its worker reports them.
        weights: bytes of parameters and buffers.
        sizes: what the activation formulae take.
        encoder: of a rank that runs a multimodal encoder.

    """

    rank: int
    specs: dict[str, KVCacheSpec]
    weights: int
    sizes: Sizes
    encoder: EncoderSizes | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        return self.sizes.notes + (self.encoder.notes if self.encoder else ())


@dataclass(frozen=True)
class Device:
    """What there is. ``explicit`` counts when the user set the KV cache's bytes.

    Attributes:
        name: of the card.
        total: bytes.
        free: bytes at start-up, where known.
        settable: the setting of the KV cache's bytes.

    """

    name: str
    total: int
    free: int | None = None
    settable: str = "--kv-cache-memory-bytes"

    def requested(self, utilization: float) -> int:
        """As ``request_memory`` rounds it."""
        return math.ceil(self.total * utilization)


CPU_SETTING = "VLLM_CPU_KVCACHE_SPACE"


def cpu_device() -> Device:
    """The memory of this machine, as the CPU worker sees it."""
    from vllm.utils.cpu_resource_utils import get_allowed_cpu_list, get_memory_node_info

    node = get_allowed_cpu_list()[0].numa_node
    memory = get_memory_node_info(node)
    return Device(
        f"CPU memory node {node}",
        memory.total_memory,
        memory.available_memory,
        CPU_SETTING,
    )


class Planner:
    """Plans one configuration, and changed versions of it.

    Args:
        config: the configuration, with its blocks and its KV layout resolved; never
            modified.
        ranks: what its ranks hold.
        device: what there is.
        pristine: the configuration before blocks were resolved, to make the model
            of a changed one. ``config`` if None.
        measured: each rank's measured figures, in place of the formulae's.
        made_weights: of a running model, each rank's weights before kernels repack
            them.

    """

    def __init__(
        self,
        config: VllmConfig,
        ranks: Sequence[Rank],
        device: Device,
        pristine: VllmConfig | None = None,
        measured: Sequence[RankFigures] | None = None,
        made_weights: Sequence[int] | None = None,
    ) -> None:
        self.config = config
        self.ranks = list(ranks)
        self.device = device
        self.measured = measured
        self.made_weights = made_weights
        self._pristine = pristine or config
        self.plan = functools.cache(self._plan)
        self._built = functools.cache(self._build)

    @classmethod
    def of(cls, config: VllmConfig, device: Device) -> Planner:
        """A planner for a configuration that is not running.

        Raises:
            Exception: whatever making the model raises when serving.

        """
        resolved, ranks = _make(config)
        return cls(resolved, ranks, device, pristine=config)

    def with_encoders(self) -> Planner:
        """The same planner of a running model, with its multimodal encoder's sizes
        and its weights as they were made: both need the model made again, and only
        remedies need them.

        Raises:
            Exception: whatever making the model raises when serving.

        """
        if not takes_multimodal(self.config):
            return self
        _, stages = _make(self._pristine)
        both = self._with_stages(stages)
        ranks = [
            replace(rank, encoder=made.encoder)
            if made.encoder and made.encoder.peak
            else rank
            for rank, made in both
        ]
        weights = [made.weights for _, made in both]
        return Planner(
            self.config, ranks, self.device, self._pristine, self.measured, weights
        )

    def figures(
        self,
        config: VllmConfig,
        ranks: Sequence[Rank],
        requested: int,
        explicit: int | None,
    ) -> list[RankFigures]:
        """Each rank's figures under a changed configuration; see
        `planned_figures`."""
        if config is self.config and self.measured is not None:
            return list(self.measured)
        planned = planned_figures(config, ranks, requested, explicit)
        if self.measured is None:
            return planned
        freed = [0] * len(ranks)
        if self.made_weights is not None and not takes_multimodal(config):
            # No kernel repacks an encoder's weights unless they are quantized.
            freed = [w - rank.weights for w, rank in zip(self.made_weights, ranks)]
        each = zip(self.measured, self._base, planned, freed)
        return [was.adjusted(base, new, less) for was, base, new, less in each]

    @functools.cached_property
    def _base(self) -> list[RankFigures]:
        """What the formulae give for the configuration that was measured."""
        cache = self.config.cache_config
        return planned_figures(
            self.config,
            self.ranks,
            self.device.requested(cache.gpu_memory_utilization),
            cache.kv_cache_memory_bytes or None,
        )

    def _plan(self, changes: Changes = Changes()) -> MemoryPlan:
        """The plan with ``changes`` applied, without remedies.

        Raises:
            ValueError: the changed configuration cannot be made.

        """
        config, ranks = self._built(changes.of_the_model)
        config = config if changes == Changes() else changed(config, changes)
        cache = config.cache_config
        utilization = changes.utilization or cache.gpu_memory_utilization
        explicit = cache.kv_cache_memory_bytes or None
        if changes.explicit is not None:
            explicit = changes.explicit or None
        requested = self.device.requested(utilization)
        figures = self.figures(config, ranks, requested, explicit)
        budgets = [requested - f.used for f in figures]
        kv = [
            *needs(
                config,
                [rank.specs for rank in ranks],
                budgets if explicit is None else [explicit] * len(ranks),
            )
        ]
        # The rank that lacks most: its own figures or its layers may be the reason.
        lacking = [
            (need.of(1) if need is not None and explicit is None else 0) - budget
            for need, budget in zip(kv, budgets)
        ]
        with_cache = [i for i, need in enumerate(kv) if need is not None]
        worst = max(with_cache or range(len(kv)), key=lacking.__getitem__)
        decisive = figures[worst]
        usable = self.device.free if self.device.free is not None else self.device.total
        return MemoryPlan(
            model=_model_name(config),
            device=self.device.name,
            rank=decisive.rank,
            ranks=config.parallel_config.world_size,
            measured=self.measured is not None,
            total=self.device.total,
            free=self.device.free,
            utilization=utilization,
            requested=requested,
            weights=decisive.weights,
            resident=decisive.resident,
            outside=decisive.outside,
            fragmentation=decisive.fragmentation,
            activation=decisive.activation.bytes,
            activation_shape=decisive.activation.shape,
            activation_part=decisive.activation.part,
            shapes=decisive.activation.shapes,
            graphs=decisive.graphs,
            budget=budgets[worst],
            explicit=explicit,
            limit=usable - decisive.used,
            explicit_setting=self.device.settable,
            kv=kv[worst],
            max_model_len=config.model_config.max_model_len,
            max_num_seqs=config.scheduler_config.max_num_seqs,
            max_num_batched_tokens=config.scheduler_config.max_num_batched_tokens,
            notes=tuple(dict.fromkeys(note for rank in ranks for note in rank.notes)),
        )

    def _build(self, changes: Changes) -> tuple[VllmConfig, list[Rank]]:
        if not changes.rebuild:
            return self.config, self.ranks
        config, stages = _make(changed(self._pristine, changes), with_encoder=False)
        return config, [
            replace(
                made,
                rank=rank.rank,
                encoder=None if changes.text_only else rank.encoder,
            )
            for rank, made in self._with_stages(stages)
        ]

    def _with_stages(self, stages: Sequence[Rank]) -> list[tuple[Rank, Rank]]:
        """Each rank and its pipeline stage, of which one was made: ranks of a stage
        are alike."""
        count = len(self.ranks)
        return [
            (rank, stages[i * len(stages) // count])
            for i, rank in enumerate(self.ranks)
        ]

    def longest(self) -> MemoryPlan | None:
        """The plan for the longest ``max_model_len`` that fits, None if none does."""
        found = self._model_len(self.plan(), _fits, Changes())
        return None if found is None else self.plan(found[0])

    # -- remedies -----------------------------------------------------------

    def with_remedies(self, all_requests: bool = False) -> MemoryPlan:
        """The plan as it is, and what would make it fit.

        Args:
            all_requests: the aim is ``max_num_seqs`` requests of full length where
                one of them fits already.

        """
        plan = self.plan()
        if plan.fits and not (all_requests and plan.short_for_all):
            return plan
        aim = _fits_all if plan.fits else _fits
        remedies = tuple(self._remedies(plan, aim))
        return replace(plan, remedies=remedies)

    def _remedies(
        self, plan: MemoryPlan, aim: Callable[[MemoryPlan], bool]
    ) -> Iterator[Remedy]:
        found = False
        for search in (
            self._explicit,
            self._utilization,
            self._batched_tokens,
            self._kv_dtype,
            self._model_len,
            self._speculative_tokens,
            self._sequences,
            self._text_only,
        ):
            remedy = self._search(search, plan, aim, Changes())
            if remedy is not None:
                found = True
                yield remedy[1]
        if not found:
            yield from self._combination(plan, aim)

    def _search(
        self,
        search: Callable[..., tuple[Changes, Remedy] | None],
        plan: MemoryPlan,
        aim: Callable[[MemoryPlan], bool],
        base: Changes,
    ) -> tuple[Changes, Remedy] | None:
        try:
            return search(plan, aim, base)
        except Exception as error:
            # A setting that the model or the card does not take is no remedy.
            logger.debug("Memory plan: %s left out. %s", search.__name__, error)
            return None

    def _fits(
        self, aim: Callable[[MemoryPlan], bool], base: Changes, change: Changes
    ) -> bool:
        return aim(self.plan(base.and_(change)))

    def _combination(
        self, plan: MemoryPlan, aim: Callable[[MemoryPlan], bool]
    ) -> Iterator[Remedy]:
        """Settings that mend it together, the least harmful first."""
        base, settings = Changes(), list[str]()
        for step, setting in self._steps(plan):
            try:
                self.plan(base.and_(step))
            except Exception as error:
                logger.debug("Memory plan: %s left out. %s", setting, error)
                continue
            base, settings = base.and_(step), [*settings, setting]
            if self._fits(aim, base, Changes()):
                yield Remedy(" ".join(settings), "together")
                return
            shorter = self._search(self._model_len, plan, aim, base)
            if shorter is not None:
                yield Remedy(" ".join([*settings, shorter[1].settings]), "together")
                return

    def _steps(self, plan: MemoryPlan) -> Iterator[tuple[Changes, str]]:
        if plan.explicit is not None:
            yield Changes(explicit=0), f"(without {plan.explicit_setting})"
        highest = self._highest_utilization()
        if highest > plan.utilization:
            yield (
                Changes(utilization=highest),
                f"--gpu-memory-utilization {highest:g}",
            )
        for tokens in _halves(plan.max_num_batched_tokens, self._fewest_tokens()):
            yield (
                Changes(max_num_batched_tokens=tokens),
                f"--max-num-batched-tokens {tokens}",
            )
            break
        if self._is_wide_kv():
            yield Changes(kv_cache_dtype="fp8"), "--kv-cache-dtype fp8"
        if self.config.speculative_config is not None:
            yield Changes(num_speculative_tokens=0), "(without the draft)"
        if plan.max_num_seqs > 1:
            yield Changes(max_num_seqs=1), "--max-num-seqs 1"
        if takes_multimodal(self.config):
            yield Changes(text_only=True), "--language-model-only"

    def _explicit(
        self, plan: MemoryPlan, aim: Callable[[MemoryPlan], bool], base: Changes
    ) -> tuple[Changes, Remedy] | None:
        if plan.explicit is None or plan.kv is None or plan.limit is None:
            return None
        need = plan.kv.of(plan.max_num_seqs if aim is _fits_all else 1)
        # At the limit nothing would be left for fragmentation.
        size = need if plan.over == 0 else max(plan.limit - plan.fragmentation, 0)
        if plan.explicit_setting == CPU_SETTING:
            gib = cdiv(need, 2**30)
            size, setting = gib * 2**30, f"{plan.explicit_setting}={gib}"
        else:
            setting = f"{plan.explicit_setting} {size}"
        change = Changes(explicit=size)
        if size <= 0 or not self._fits(aim, base, change):
            return None
        return change, Remedy(setting, f"{size / MIB:,.1f} MiB")

    def _highest_utilization(self) -> float:
        if self.device.free is None:
            return MAX_UTILIZATION
        return min(
            MAX_UTILIZATION, floor_hundredth(self.device.free, self.device.total)
        )

    def _utilization(
        self, plan: MemoryPlan, aim: Callable[[MemoryPlan], bool], base: Changes
    ) -> tuple[Changes, Remedy] | None:
        if plan.explicit is not None:
            return None
        lacking = plan.short_for_all if aim is _fits_all else plan.short
        needed = math.ceil((plan.requested + lacking) / plan.total * 100) / 100
        change = Changes(utilization=needed)
        highest = self._highest_utilization()
        while needed <= highest and not self._fits(aim, base, change):
            # More memory has room for more short prompts, so the peak may grow.
            needed = round(needed + 0.01, 2)
            change = Changes(utilization=needed)
        if needed > highest:
            return None
        more = self.device.requested(needed) - plan.requested
        return change, Remedy(
            f"--gpu-memory-utilization {needed:g}", f"{more / MIB:,.1f} MiB more"
        )

    def _fewest_tokens(self) -> int:
        """The least that the scheduler accepts, and that still fills a GPU."""
        block = max(self.config.cache_config.block_size or 0, 256)
        return max(block, self.config.scheduler_config.max_num_seqs)

    def _batched_tokens(
        self, plan: MemoryPlan, aim: Callable[[MemoryPlan], bool], base: Changes
    ) -> tuple[Changes, Remedy] | None:
        if _is_too_small_a_size(plan):
            return None
        if not self.config.scheduler_config.enable_chunked_prefill:
            return None
        for tokens in _halves(plan.max_num_batched_tokens, self._fewest_tokens()):
            change = Changes(max_num_batched_tokens=tokens)
            if self._fits(aim, base, change):
                less = plan.activation - self.plan(base.and_(change)).activation
                return change, Remedy(
                    f"--max-num-batched-tokens {tokens}",
                    f"activation peak {less / MIB:,.1f} MiB less",
                )
        return None

    def _is_wide_kv(self) -> bool:
        dtype = self.config.cache_config.cache_dtype
        return dtype in ("auto", "float16", "bfloat16", "float32")

    def _kv_dtype(
        self, plan: MemoryPlan, aim: Callable[[MemoryPlan], bool], base: Changes
    ) -> tuple[Changes, Remedy] | None:
        change = Changes(kv_cache_dtype="fp8")
        if plan.kv is None or not self._is_wide_kv():
            return None
        if not self._fits(aim, base, change):
            return None
        after = self.plan(base.and_(change)).kv
        assert after is not None
        return change, Remedy(
            "--kv-cache-dtype fp8",
            f"a request takes {after.request / MIB:,.1f} MiB",
        )

    def _model_len(
        self, plan: MemoryPlan, aim: Callable[[MemoryPlan], bool], base: Changes
    ) -> tuple[Changes, Remedy] | None:
        """The largest ``max_model_len`` that fits."""
        if plan.over and base.explicit is None:
            return None

        def fits(length: int) -> bool:
            return self._fits(aim, base, Changes(max_model_len=length))

        low, high = 0, plan.max_model_len
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        if low < 1:
            return None
        change = Changes(max_model_len=low)
        return change, Remedy(f"--max-model-len {low}", "the longest that fits")

    def _speculative_tokens(
        self, plan: MemoryPlan, aim: Callable[[MemoryPlan], bool], base: Changes
    ) -> tuple[Changes, Remedy] | None:
        spec = self.config.speculative_config
        if spec is None or _is_too_small_a_size(plan):
            return None
        for tokens in [*_halves(spec.num_speculative_tokens, 1), 0]:
            change = Changes(num_speculative_tokens=tokens)
            if self._fits(aim, base, change):
                setting = (
                    f"num_speculative_tokens {tokens} in --speculative-config"
                    if tokens
                    else "no --speculative-config"
                )
                return change, Remedy(setting, f"{spec.num_speculative_tokens} now")
        return None

    def _sequences(
        self, plan: MemoryPlan, aim: Callable[[MemoryPlan], bool], base: Changes
    ) -> tuple[Changes, Remedy] | None:
        counts: list[int] = _halves(plan.max_num_seqs, 1)
        if aim is _fits_all and plan.kv is not None:
            # What fits now, if nothing else gets smaller with it.
            counts = sorted({*counts, int(plan.kv.concurrency)}, reverse=True)
        for count in counts:
            change = Changes(max_num_seqs=count)
            if count and self._fits(aim, base, change):
                return change, Remedy(f"--max-num-seqs {count}", "fewer at once")
        return None

    def _text_only(
        self, plan: MemoryPlan, aim: Callable[[MemoryPlan], bool], base: Changes
    ) -> tuple[Changes, Remedy] | None:
        if _is_too_small_a_size(plan):
            return None
        change = Changes(text_only=True)
        if not takes_multimodal(self.config) or not self._fits(aim, base, change):
            return None
        less = plan.weights - self.plan(base.and_(change)).weights
        return change, Remedy(
            "--language-model-only",
            f"no images, videos or audio: weights {less / MIB:,.1f} MiB less",
        )


def _fits(plan: MemoryPlan) -> bool:
    return plan.fits


def _fits_all(plan: MemoryPlan) -> bool:
    return plan.fits and not plan.short_for_all


def _is_too_small_a_size(plan: MemoryPlan) -> bool:
    """A KV cache of a set size is short: it gets nothing of what is saved elsewhere."""
    return plan.explicit is not None and not plan.over


def _halves(value: int, least: int) -> list[int]:
    """``value`` halved again and again, down to ``least``."""
    halves = []
    while (value := value // 2) >= max(least, 1):
        halves.append(value)
    return halves


def floor_hundredth(part: int, whole: int) -> float:
    """``part`` of ``whole``, rounded down to hundredths."""
    return math.floor(part / whole * 100) / 100


def _model_name(config: VllmConfig) -> str:
    name = config.model_config.served_model_name or config.model_config.model
    return name[0] if isinstance(name, list) else str(name)


# ---------------------------------------------------------------------------
# A changed configuration
# ---------------------------------------------------------------------------


def changed(config: VllmConfig, changes: Changes) -> VllmConfig:
    """A copy of ``config`` with ``changes`` to what the formulae read.

    Raises:
        ValueError: the configuration has no draft, or no multimodal encoder, to
            change.

    """
    config = copy_config(config)
    if changes.max_model_len is not None:
        config.model_config.max_model_len = changes.max_model_len
    scheduler = config.scheduler_config
    if changes.max_num_batched_tokens is not None:
        tokens, scheduled = (
            changes.max_num_batched_tokens,
            scheduler.max_num_scheduled_tokens,
        )
        if scheduled is not None:
            # A draft makes it the batched tokens, unless it was set.
            was_set = scheduled != scheduler.max_num_batched_tokens
            scheduler.max_num_scheduled_tokens = (
                min(scheduled, tokens) if was_set else tokens
            )
        if scheduler.encoder_cache_size == scheduler.max_num_batched_tokens:
            scheduler.encoder_cache_size = tokens
            scheduler.max_num_encoder_input_tokens = tokens
        scheduler.max_num_batched_tokens = tokens
    if changes.max_num_seqs is not None:
        scheduler.max_num_seqs = changes.max_num_seqs
    cache = config.cache_config
    if changes.rebuild:
        # As they were before the blocks were fitted to the states.
        if not cache.user_specified_block_size and current_platform.is_cuda_alike():
            cache.block_size = cache.DEFAULT_BLOCK_SIZE
        cache.mamba_page_size_padded = None
    if changes.kv_cache_dtype is not None:
        cache.cache_dtype = changes.kv_cache_dtype  # type: ignore[assignment]
    if changes.num_speculative_tokens is not None:
        if config.speculative_config is None:
            raise ValueError("there is no draft, so no fewer speculative tokens")
        if changes.num_speculative_tokens == 0:
            config.speculative_config = None
        else:
            config.speculative_config.num_speculative_tokens = (
                changes.num_speculative_tokens
            )
    if changes.text_only:
        multimodal = config.model_config.multimodal_config
        if multimodal is None:
            raise ValueError("there is no multimodal encoder to serve without")
        multimodal.language_model_only = True
    return config


# ---------------------------------------------------------------------------
# The KV cache, by the engine's own functions
# ---------------------------------------------------------------------------


def groups_of(
    config: VllmConfig, specs: Sequence[dict[str, KVCacheSpec]]
) -> list[list[KVCacheGroupSpec]]:
    """Each rank's KV-cache groups, as ``get_kv_cache_configs`` makes them."""
    merged: dict[str, KVCacheSpec] = {}
    for of_rank in specs:
        merged |= of_rank
    retained = max(0, config.num_prefill_lookahead_tokens - 1)
    for name, spec in merged.items():
        if isinstance(spec, SlidingWindowSpec):
            merged[name] = replace(spec, extra_retained_tokens=retained)
    with _without_warnings():
        groups = kv_cache_utils.get_kv_cache_groups(config, merged)
    return [
        kv_cache_utils._project_kv_cache_groups_to_worker(groups, of_rank)
        for of_rank in specs
    ]


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Grouping warns about the groups each time, and a search groups often. The
    engine's own grouping warns itself."""

    def is_error(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR

    kv_cache_utils.logger.addFilter(is_error)
    try:
        yield
    finally:
        kv_cache_utils.logger.removeFilter(is_error)


def needs(
    config: VllmConfig,
    specs: Sequence[dict[str, KVCacheSpec]],
    available: Sequence[int],
) -> Iterator[KvNeed | None]:
    """What each rank's KV cache needs, and what its available bytes hold.

    None for a rank without a KV cache.
    """
    all_groups = groups_of(config, specs)
    sizes = [
        kv_cache_utils._pool_bytes_per_block(config, groups) if groups else 0
        for groups in all_groups
    ]
    blocks = min(
        (
            _blocks(config, memory, size)
            for memory, size in zip(available, sizes)
            if size
        ),
        default=0,
    )
    for groups, size in zip(all_groups, sizes):
        if not groups:
            yield None
            continue
        request = kv_cache_utils._max_memory_usage_bytes_from_groups(config, groups)
        states = [g for g in groups if isinstance(g.kv_cache_spec, MambaSpec)]
        state_blocks = sum(
            cdiv(
                g.kv_cache_spec.max_memory_usage_bytes(config),
                g.kv_cache_spec.page_size_bytes,
            )
            for g in states
        )
        tokens, concurrency = _capacity(config, groups, blocks, size)
        pages = {g.kv_cache_spec.page_size_bytes for g in groups}
        # A state's block spans the whole request unless states are cached as well.
        spans = [
            g.kv_cache_spec.block_size
            for g in groups
            if g.kv_cache_spec.prefix_cacheable and g not in states
        ] or [g.kv_cache_spec.block_size for g in groups]
        yield KvNeed(
            request=request,
            states=state_blocks * size,
            null_block=size,
            page=pages.pop() if len(pages) == 1 else 0,
            block_size=math.lcm(*spans),
            tokens=tokens,
            concurrency=concurrency,
        )


def _blocks(config: VllmConfig, memory: int, size: int) -> int:
    """Blocks of ``size`` bytes that a KV cache of ``memory`` bytes has."""
    return kv_cache_utils.may_override_num_blocks(config, max(0, memory) // size)


def room_of(
    config: VllmConfig, limits: Limits, groups: list[KVCacheGroupSpec]
) -> Callable[[int], int]:
    """Bytes of a KV cache to how many short prompts it has room for, as the profile
    at start-up counts it."""
    counts = block_counts(config, groups)
    size = kv_cache_utils._pool_bytes_per_block(config, groups)

    @functools.cache
    def blocks_of(tokens: int) -> int:
        return sum(count(tokens) for count in counts)

    return lambda memory: most_requests(
        limits, _blocks(config, memory, size), blocks_of
    )


def _capacity(
    config: VllmConfig, groups: list[KVCacheGroupSpec], blocks: int, size: int
) -> tuple[int, float]:
    if not blocks:
        return 0, 0.0
    try:
        cache = kv_cache_utils.get_kv_cache_config_from_groups(
            config, groups, blocks * size
        )
        return kv_cache_utils.get_kv_cache_capacity(config, cache)
    except ValueError as error:
        logger.debug("Memory plan: no capacity. %s", error)
        return 0, 0.0


# ---------------------------------------------------------------------------
# A rank's contents and figures, from formulae
# ---------------------------------------------------------------------------


def _make(
    config: VllmConfig, with_encoder: bool = True
) -> tuple[VllmConfig, list[Rank]]:
    models = plan_models(config, with_encoder)
    ranks = [Rank(m.rank, m.specs, m.weights_bytes, m.sizes, m.encoder) for m in models]
    return models[0].config, ranks


def peak_of_batches(sizes: Sizes, steps: Sequence[Batch]) -> Peak:
    """The highest peak of ``steps``."""
    return peak_of(sizes, [Shape(b.name, tuple(b.lengths)) for b in steps])


def planned_figures(
    config: VllmConfig, ranks: Sequence[Rank], requested: int, explicit: int | None
) -> list[RankFigures]:
    """Each rank's figures by the formulae, for the batches that start-up profiles.

    The KV cache that is left next to a step's own peak bounds how many prompts
    share it, as in `memory_profile.profile_batches`.

    Args:
        config: the configuration.
        ranks: what its ranks hold.
        requested: bytes that may be used on each rank's device.
        explicit: bytes of the KV cache, None where the rest is for it.

    """
    limits = limits_of(config)
    scheduled = config.scheduler_config.max_num_batched_tokens
    on_gpu = current_platform.is_cuda_alike()
    outside = 0
    if on_gpu:
        outside = OUTSIDE_TORCH_BYTES
        if config.parallel_config.world_size > 1:
            outside += COMMUNICATOR_BYTES
    all_groups = groups_of(config, [rank.specs for rank in ranks])
    # Once for ranks that are alike.
    made: dict[EncoderSizes | None, Encoded | None] = {
        sizes: encoded_of(config, sizes, limits) if sizes else None
        for sizes in {rank.encoder for rank in ranks}
    }
    encoded = [made[rank.encoder] for rank in ranks]

    def peaks_of(batch: Batch) -> list[Peak]:
        """Each rank's peak of it, next to a full encoder cache."""
        peaks = [peak_of_batches(rank.sizes, [batch]) for rank in ranks]
        return [e.beside(peak) if e else peak for e, peak in zip(encoded, peaks)]

    least = [
        RankFigures(
            rank=rank.rank,
            weights=rank.weights,
            activation=peak,
            resident=resident_bytes(rank.sizes, scheduled)
            + on_gpu
            * (
                LIBRARY_BYTES
                + (ENCODER_LIBRARY_BYTES if rank.encoder else 0)
                + attention_bytes(
                    rank.sizes,
                    [group.layer_names for group in groups],
                    shared=shares_decode_scratch(config),
                )
            ),
            outside=outside,
        )
        for rank, groups, peak in zip(ranks, all_groups, peaks_of(longest(limits)))
    ]
    rooms = [
        room_of(config, limits, groups) if groups else None for groups in all_groups
    ]
    states = any(has_states(groups) for groups in all_groups)

    def room(peaks: Sequence[Peak]) -> int:
        """Prompts that have room on every rank, next to its peak."""
        requests = limits.requests
        for figures, room_for, peak in zip(least, rooms, peaks):
            if room_for is not None:
                left = requested - replace(figures, activation=peak).used
                requests = min(
                    requests, room_for(left if explicit is None else explicit)
                )
        return requests

    def room_beside(requests: int) -> int:
        return room(peaks_of(crowded(limits, requests, states)))

    requests = settle(room([figures.activation for figures in least]), room_beside)
    chosen = batches(limits, requests, states)
    peaks = [peak_of_batches(rank.sizes, chosen) for rank in ranks]
    return [
        replace(
            figures,
            resident=figures.resident
            + on_gpu * sampler_bytes(rank.sizes, limits.sequences, requests),
            activation=e.highest(peak, rank.sizes) if e else peak,
            graphs=graph_bytes(config, rank.sizes),
        )
        for rank, figures, e, peak in zip(ranks, least, encoded, peaks)
    ]


def graph_bytes(config: VllmConfig, sizes: Sizes) -> int:
    """An estimate of what capturing CUDA graphs takes."""
    compilation = config.compilation_config
    if (
        not current_platform.is_cuda_alike()
        or compilation.cudagraph_mode in (None, CUDAGraphMode.NONE)
        or config.model_config.enforce_eager
    ):
        return 0
    captures = len(compilation.cudagraph_capture_sizes or ())
    return GRAPH_POOL_BYTES + GRAPH_BYTES_PER_LAYER * sizes.decoder_layers * captures
