# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Measure at start-up what serving will use.

Upstream profiles one batch of dummy tokens with attention and state kernels left
out. Here the worker runs real steps: the scheduler's own messages, over a throw-away
KV cache of one block per group, for the batches between the longest prompt and as
many short ones as the KV cache has room for. The peak of a second, warm pass counts;
what the first one left behind is resident and counts as such.

The number of passes is the same on every rank: where it depends on a measurement,
the ranks agree first.
"""

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

import vllm.envs as envs
from vllm.config import CUDAGraphMode, VllmConfig, set_current_vllm_config
from vllm.logger import init_logger
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.encoder_budget import MultiModalBudget
from vllm.multimodal.gpu_ipc_memory import reserve_mm_ipc_gpu_memory
from vllm.platforms import current_platform
from vllm.utils.math_utils import cdiv
from vllm.utils.mem_constants import MiB_bytes
from vllm.utils.mem_utils import MemoryProfilingResult, MemorySnapshot
from vllm.v1.core.kv_cache_utils import (
    get_kv_cache_config_from_groups,
    get_kv_cache_groups,
)
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec
from vllm.v1.worker.allocator_scope import startup_limit_mib, startup_scope
from vllm.v1.worker.memory_report import StartupMemory
from vllm.v1.worker.profile_batches import (
    Batch,
    Limits,
    Media,
    Step,
    batches,
    crowded,
    encoder_step,
    longest,
    most_requests,
    settle,
    steps,
)

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker

logger = init_logger(__name__)

SWITCH = "VLLM_TRUTHFUL_PROFILE"

MARGIN_BYTES = 2 * MiB_bytes
"""For small tensors that a server's steps have beyond the profile's: less than half a
MiB was seen. The allocator's own unit."""


class Meter(Protocol):
    """The allocator's counters, in bytes."""

    def reset(self) -> None:
        """Wait for the device, drop what is cached, forget peaks."""

    def allocated(self) -> int:
        """Return what is allocated."""

    def peak(self) -> int:
        """Wait for the device; return the most that was allocated since `reset`."""

    def reserved_peak(self) -> int:
        """Return the most that was reserved since `reset`."""


class DeviceMeter:
    """`Meter` of the current accelerator."""

    def reset(self) -> None:
        """See `Meter`."""
        torch.accelerator.synchronize()
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats()

    def allocated(self) -> int:
        """See `Meter`."""
        return torch.accelerator.memory_allocated()

    def peak(self) -> int:
        """See `Meter`."""
        torch.accelerator.synchronize()
        return torch.accelerator.max_memory_allocated()

    def reserved_peak(self) -> int:
        """See `Meter`."""
        return torch.accelerator.max_memory_reserved()


class Peak(NamedTuple):
    """Of one step, in bytes.

    Attributes:
        allocated: the most over what was allocated before.
        fragmentation: what was reserved beyond the allocated peak.

    """

    allocated: int
    fragmentation: int


@dataclass(frozen=True)
class Passes:
    """What the real steps used, in bytes.

    Attributes:
        shapes: batches and their peaks over what is resident.
        rebuilt: resident with a KV cache besides the cache itself, and gone with
            it: metadata buffers and tables that serving allocates again.
        fragmentation: the most that was reserved beyond an allocated peak.

    """

    shapes: tuple[tuple[str, int], ...]
    rebuilt: int
    fragmentation: int

    @property
    def worst(self) -> tuple[str, int]:
        """The batch with the highest peak, and that peak."""
        return max(self.shapes, key=lambda shape: shape[1])


def enabled() -> bool:
    """Whether to profile real steps here: CUDA-like devices, unless switched off."""
    return envs.VLLM_TRUTHFUL_PROFILE and current_platform.is_cuda_alike()


def unsupported(config: VllmConfig, runner: Any) -> str | None:
    """Return why real steps cannot stand for serving, or None when they can.

    What is named here has inputs that the steps do not build, or state outside of
    the runner that they would change.
    """
    parallel = config.parallel_config
    reasons = {
        "a pooling model": config.model_config.runner_type == "pooling",
        "an encoder-decoder model": config.model_config.is_encoder_decoder,
        "an encoder alone": config.is_mm_encoder_only,
        "LoRA": config.lora_config is not None,
        "an encoder-cache connector": config.ec_transfer_config is not None,
        "a KV connector": config.kv_transfer_config is not None,
        "context parallelism": parallel.prefill_context_parallel_size > 1
        or parallel.decode_context_parallel_size > 1,
        "dual batch overlap": parallel.enable_dbo,
        "expert load balancing": parallel.enable_eplb,
        "elastic expert parallelism": parallel.enable_elastic_ep,
        "HiSparse": config.attention_config.hisparse_config is not None,
        "more than one token per sampling step": getattr(
            getattr(runner, "model_state", None), "num_new_sampled_tokens_per_step", 1
        )
        != 1,
        "a model without a KV cache": not runner.get_kv_cache_spec(),
    }
    found = [name for name, is_so in reasons.items() if is_so]
    return ", ".join(found) or None


def limits_of(config: VllmConfig) -> Limits:
    """Return what bounds a step of the scheduler."""
    scheduler, draft = config.scheduler_config, config.speculative_config
    return Limits(
        tokens=scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens,
        sequences=scheduler.max_num_seqs,
        model_len=config.model_config.max_model_len,
        context=bool(
            scheduler.enable_chunked_prefill
            or config.cache_config.enable_prefix_caching
        ),
        drafts=config.num_speculative_tokens,
        batched=scheduler.max_num_batched_tokens,
        draft_slots=draft.max_num_new_slots_for_drafting if draft else 0,
    )


def block_counts(
    config: VllmConfig, groups: Sequence[KVCacheGroupSpec]
) -> list[Callable[[int], int]]:
    """Return, for each KV cache group, tokens of a request to the blocks it holds."""
    # What it imports is fast once a model was made, and slow before.
    from vllm.v1.worker.gpu.warmup import _reserved_block_count

    return [
        partial(
            _reserved_block_count,
            kvcache_spec=group.kv_cache_spec,
            num_lookahead_tokens=config.num_lookahead_tokens,
            max_model_len=config.model_config.max_model_len,
            max_encoder_len=0,
        )
        for group in groups
    ]


def has_states(groups: Sequence[KVCacheGroupSpec]) -> bool:
    """Return whether layers of a KV cache group keep a state for each request."""
    return any(isinstance(group.kv_cache_spec, MambaSpec) for group in groups)


def agree_least(value: int) -> int:
    """Return the least `value` of all ranks, data-parallel ones included."""
    return _agree(value, torch.distributed.ReduceOp.MIN)


def agree_any(flag: bool) -> bool:
    """Return whether any rank says so."""
    return bool(_agree(int(flag), torch.distributed.ReduceOp.MAX))


def _agree(value: int, how: Any) -> int:
    from vllm.distributed.parallel_state import get_world_group

    group = get_world_group()
    if group.world_size == 1:
        return value
    values = torch.tensor([value], dtype=torch.int64)
    torch.distributed.all_reduce(values, op=how, group=group.cpu_group)
    return int(values.item())


class Profile:
    """Real steps on one worker, over a throw-away KV cache.

    Works on both model runners through what they share, `execute_model` and
    `sample_tokens`.
    """

    def __init__(self, worker: "Worker", meter: Meter) -> None:
        self.worker = worker
        self.runner: Any = worker.model_runner
        self.config = worker.vllm_config
        self.meter = meter
        self.limits = limits_of(self.config)
        with set_current_vllm_config(self.config):
            specs = self.runner.get_kv_cache_spec()
            self.groups = get_kv_cache_groups(self.config, specs)
        self.counts = block_counts(self.config, self.groups)
        self.num_blocks = 0

    @contextmanager
    def cache(self, requests: int) -> Iterator[None]:
        """Build a KV cache for steps of up to `requests`, and take it down again.

        It has a block for each group. State kernels want as many as requests, as
        they have in serving.
        """
        cache = self._cache(blocks=1 + len(self.groups))
        if cache.has_mamba_layers:
            cache = self._cache(blocks=1 + max(len(self.groups), requests))
        self.before = self.meter.allocated()
        try:
            with set_current_vllm_config(self.config):
                self.runner.initialize_kv_cache(cache, is_profiling=True)
            self.worker.cache_config.num_gpu_blocks = cache.num_blocks
            self.num_blocks = cache.num_blocks
            # No graph is captured yet; a batch that one would serve runs without.
            for owner in (self.runner, getattr(self.runner, "drafter", None)):
                if dispatcher := getattr(owner, "cudagraph_dispatcher", None):
                    dispatcher.keys_initialized = False
            yield
        finally:
            self._take_down()

    def _take_down(self) -> None:
        if self.worker.use_v2_model_runner:
            from vllm.v1.worker.gpu import cudagraph_utils

            cudagraph_utils._teardown_profiling_state(self.runner)
        else:
            self.runner._cleanup_profiling_kv_cache()

    def _cache(self, memory: int = 0, blocks: int | None = None) -> KVCacheConfig:
        """Return the cache of `memory` bytes, or of so many blocks."""
        cache = self.worker.cache_config
        saved = cache.num_gpu_blocks_override
        if blocks is not None:
            cache.num_gpu_blocks_override = blocks
        try:
            return get_kv_cache_config_from_groups(
                self.config, list(self.groups), memory
            )
        finally:
            cache.num_gpu_blocks_override = saved

    def blocks(self, memory: int) -> int:
        """Return the blocks of a KV cache of `memory` bytes."""
        return self._cache(memory).num_blocks if memory > 0 else 0

    def most_requests(self, memory: int) -> int:
        """Return how many short prompts a KV cache of `memory` bytes has room for."""
        return most_requests(
            self.limits,
            self.blocks(memory),
            lambda tokens: sum(count(tokens) for count in self.counts),
        )

    def _run(self, scheduled: Any) -> Peak:
        self.meter.reset()
        before = self.meter.allocated()
        self.worker.execute_model(scheduled)
        self.worker.sample_tokens(None)
        peak = self.meter.peak()
        return Peak(peak - before, self.meter.reserved_peak() - peak)

    def _once(self, step: Step) -> dict[str, Peak]:
        peaks = {}
        try:
            peaks[step.batch.name] = self._run(step.prefill)
            if step.decode is not None and self._can_decode:
                peaks[step.decode_name] = self._run(step.decode)
        except Exception:
            # The step's state would make the next one fail, over this error.
            self.runner.execute_model_state = None
            with suppress(Exception):
                self.worker.execute_model(step.end)
            raise
        self.worker.execute_model(step.end)
        return peaks

    @property
    def _can_decode(self) -> bool:
        # Adaptive verification sizes its drafts by costs that capture measures.
        return getattr(self.runner, "adaptive_verification", None) is None

    def measure(self, batch: Batch, known: int) -> dict[str, Peak]:
        """Return the peaks of `batch`, and of a decode step after it.

        A first pass may allocate more, to tune and to build workspaces. It is
        followed by the pass that counts, unless it already stayed below `known`
        bytes on every rank.
        """
        return self._measure(
            steps(batch, self.limits, self.counts, self.num_blocks), known
        )

    def measure_encoder(self, media: Media) -> tuple[str, Peak] | None:
        """Return the name and the peak of the step that encodes `media`, or None
        where no such step is ever run."""
        step = encoder_step(media, self.limits, self.counts, self.num_blocks)
        if step is None:
            return None
        return self._measure(step, known=0).popitem()

    def _measure(self, step: Step, known: int) -> dict[str, Peak]:
        first = self._once(step)
        highest = max(peak.allocated for peak in first.values())
        return self._once(step) if agree_any(highest > known) else first

    def resident(self) -> int:
        """Return what the cache and the passes added, the cache left out, bytes."""
        return (
            self.meter.allocated() - self.before - storage_bytes(self.runner.kv_caches)
        )


def storage_bytes(values: Any) -> int:
    """Return the bytes of the tensors in nested `values`, shared memory once."""
    storages: dict[int, int] = {}
    pending = list(values)
    while pending:
        value = pending.pop()
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        elif isinstance(value, list | tuple):
            pending.extend(value)
    return sum(storages.values())


class EncoderOutputs:
    """Keep the encoder outputs that `profile_run` makes, until the end.

    The encoder runs before the language model and its outputs stay in the cache,
    so a real step has them next to its own activations.
    """

    def __init__(self, runner: Any) -> None:
        cache = getattr(runner, "encoder_cache", None)
        # The first runner has a dictionary, the second an object around one.
        self._owner: Any = runner if isinstance(cache, dict) else cache
        self._name = "encoder_cache" if isinstance(cache, dict) else "encoder_outputs"

    def __enter__(self) -> "EncoderOutputs":
        if self._owner is not None:
            self._original = getattr(self._owner, self._name)
            setattr(self._owner, self._name, _Kept(self._original))
        return self

    def __exit__(self, *error: object) -> None:
        if self._owner is not None:
            self._original.clear()
            setattr(self._owner, self._name, self._original)

    def kept(self) -> list[torch.Tensor]:
        """Return what is kept, a tensor of [tokens, width] for each item."""
        if self._owner is None:
            return []
        return list(getattr(self._owner, self._name).values())

    def size(self) -> int:
        """Return what is kept, in bytes."""
        return storage_bytes(self.kept())


class _Kept(dict):
    """A dictionary that is not cleared."""

    def clear(self) -> None:
        """Keep what is there."""


@dataclass(frozen=True)
class Encoder:
    """What a multimodal encoder adds to the batches.

    Attributes:
        kept: bytes of the outputs that are allocated while the batches run.
        item: bytes of one of them.
        cache: bytes of a full encoder cache. It stays full once it was: an output
            is dropped when another one needs its place.
        media: as much as one step encodes.
        run: upstream's profile, which runs the encoder; it was run before.

    """

    kept: int
    item: int
    cache: int
    media: Media
    run: Callable[[], None]

    def measure(self, profile: "Profile") -> tuple[str, Peak]:
        """Return a batch that encodes, and its peak next to a full cache.

        Where no real step encodes that much, or it fails on a single rank, `run`
        does.
        """
        found = None
        try:
            found = profile.measure_encoder(self.media)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            if profile.config.parallel_config.world_size_across_dp > 1:
                raise
            logger.warning(
                "Profiling a step with %s inputs failed (%s: %s); the encoder is "
                "profiled as upstream does, without a language model next to it.",
                self.media.modality,
                type(error).__name__,
                error,
            )
        name, peak = found or self._alone(profile.meter)
        # In that peak are the outputs of the items that were encoded.
        encoded = self.media.share(profile.limits) * len(self.media.items)
        made = encoded * self.item if found else self.kept
        others = max(0, self.cache - made)
        return name, peak._replace(allocated=peak.allocated + others)

    def _alone(self, meter: Meter) -> tuple[str, Peak]:
        meter.reset()
        before = meter.allocated()
        self.run()
        peak = meter.peak()
        return "multimodal encoder", Peak(peak - before, meter.reserved_peak() - peak)


class MostItems(NamedTuple):
    """The most and largest multimodal items that a step encodes.

    Attributes:
        modality: of the items, such as "image".
        each: items of a prompt.
        requests: prompts that the encoder takes in one step.

    """

    modality: str
    each: int
    requests: int


def most_items(config: VllmConfig, budget: MultiModalBudget) -> MostItems:
    """Return what upstream's budget of an encoder comes to."""
    modality = budget.get_modality_with_max_tokens()
    most = budget.mm_max_items_per_batch[modality]
    each = cdiv(most, config.scheduler_config.max_num_seqs)
    return MostItems(modality, each, cdiv(most, each))


def encoder_of(
    config: VllmConfig, outputs: Sequence[torch.Tensor], run: Callable[[], None]
) -> Encoder:
    """Return what the encoder adds; `outputs` is what `run` left in its cache.

    A rank of a pipeline that has no encoder has no `outputs`.
    """
    budget = MultiModalBudget(config, MULTIMODAL_REGISTRY, enable_cache=False)
    modality, each, requests = most_items(config, budget)
    made = budget.processor.get_dummy_mm_inputs(mm_counts={modality: each})
    kept = storage_bytes(outputs)
    tokens = sum(len(output) for output in outputs)
    return Encoder(
        kept=kept,
        item=kept // max(1, len(outputs)),
        cache=kept * max(tokens, budget.encoder_cache_size) // max(1, tokens),
        media=Media(
            modality=modality,
            tokens=made["prompt_token_ids"],
            items=made["mm_kwargs"][modality],
            positions=made["mm_placeholders"][modality],
            requests=requests,
            whole=config.scheduler_config.disable_chunked_mm_input,
        ),
        run=run,
    )


def profile_batches(
    worker: "Worker",
    meter: Meter,
    memory: Callable[[int], int],
    least: int,
    encoder: Encoder | None = None,
) -> Passes:
    """Run the batches on the worker; see the module's docstring.

    Args:
        worker: with its model loaded and `profile_run` done once.
        meter: counts what the steps allocate.
        memory: bytes of an activation peak to the bytes that the KV cache has next
            to it. They bound how many prompts can share a step.
        least: a peak that is known to be too low, such as upstream's, in bytes.
        encoder: of a multimodal model; a full cache of its outputs is charged to
            every batch, and one batch that encodes is run as well.

    """
    profile = Profile(worker, meter)
    full = encoder.cache if encoder else 0
    limits, states = profile.limits, agree_any(has_states(profile.groups))
    measured: dict[Batch, dict[str, Peak]] = {}

    def highest(batches: Iterable[Batch]) -> int:
        found = (measured[batch].values() for batch in batches if batch in measured)
        return max((p.allocated for peaks in found for p in peaks), default=0)

    def measure(batch: Batch, beside: Iterable[Batch]) -> None:
        """Measure it next to batches that are promised as well."""
        if batch not in measured:
            measured[batch] = profile.measure(batch, highest(beside))

    def room(peak: int) -> int:
        return agree_least(profile.most_requests(memory(peak)))

    def room_beside(requests: int) -> int:
        batch = crowded(limits, requests, states)
        measure(batch, [few])
        return room(highest([batch]) + full)

    few, most = longest(limits), room(least)
    with profile.cache(most):
        measure(few, [])
        most = settle(min(most, room(highest([few]) + full)), room_beside)
        chosen = batches(limits, most, states)
        for batch in chosen:
            measure(batch, chosen)
        encoded = encoder.measure(profile) if encoder else None
        gc.collect()
        resident = profile.resident()
    # Left out are steps that were too crowded, and led to those that are not.
    peaks: dict[str, Peak] = {}
    for batch in chosen:
        for name, peak in measured[batch].items():
            peak = peak._replace(allocated=peak.allocated + full)
            peaks[name] = max(peak, peaks.get(name, peak))
    if encoded:
        peaks[encoded[0]] = encoded[1]
    return Passes(
        shapes=tuple((name, peak.allocated) for name, peak in peaks.items()),
        rebuilt=max(0, resident - (meter.allocated() - profile.before)),
        fragmentation=max(peak.fragmentation for peak in peaks.values()),
    )


def measure_startup(
    worker: "Worker",
    memory_profiling: Callable[..., AbstractContextManager[MemoryProfilingResult]],
) -> int:
    """Profile the worker; return the bytes of its KV cache.

    Stands for upstream's `determine_available_memory`, on the branch with an
    explicit budget as well: that is returned as it is, and `worker.startup_memory`
    says what there would be room for.

    Args:
        worker: with its model loaded.
        memory_profiling: upstream's context manager.

    """
    started = time.monotonic()
    runner: Any = worker.model_runner

    def run() -> None:
        with set_current_vllm_config(worker.vllm_config):
            runner.profile_run(randomize_inputs=worker.randomize_dummy_inputs)

    with EncoderOutputs(runner) as encoder:
        with (
            memory_profiling(
                worker.init_snapshot, weights_memory=int(runner.model_memory_usage)
            ) as result,
            worker._scoped_allocator_max_split(max_split_size_mb=startup_limit_mib()),
        ):
            run()
        upstream_seconds = time.monotonic() - started
        kept = encoder.size()
        # As if the kept outputs were gone: they are, where upstream measures.
        result.transient_peak_headroom += kept
        passes = _passes(worker, result, run, encoder.kept())
    memory = _account(worker, result, passes, started)
    worker.startup_memory = memory
    _log(memory, upstream_seconds)
    return reserve_mm_ipc_gpu_memory(
        memory.kv_explicit or memory.kv_budget,
        worker.model_config.multimodal_config,
        getattr(worker.parallel_config, "_api_process_count", 1),
    )


def _passes(
    worker: "Worker",
    result: MemoryProfilingResult,
    run: Callable[[], None],
    outputs: Sequence[torch.Tensor],
) -> Passes | None:
    why = unsupported(worker.vllm_config, worker.model_runner)
    if why is not None:
        logger.warning_once(
            "Activation memory is profiled as upstream does, with one batch and "
            "without attention and state kernels: real steps are not supported with "
            "%s. Leave room for what they use (--gpu-memory-utilization).",
            why,
        )
        return None
    explicit = worker.cache_config.kv_cache_memory_bytes
    beside = int(worker.requested_memory) - (
        result.non_kv_cache_memory - result.transient_peak_headroom
    )

    def memory(peak: int) -> int:
        return explicit or beside - peak

    meter = DeviceMeter()
    try:
        least = int(result.transient_peak_headroom)
        encodes = agree_any(bool(outputs))
        encoder = encoder_of(worker.vllm_config, outputs, run) if encodes else None
        return profile_batches(worker, meter, memory, least, encoder)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        if worker.parallel_config.world_size_across_dp > 1:
            # The other ranks wait in a collective: there is no way back.
            error.add_note(f"while profiling real steps; {SWITCH}=0 leaves them out")
            raise
        logger.warning(
            "Profiling real steps failed (%s: %s); activation memory is profiled as "
            "upstream does. %s=0 leaves them out.",
            type(error).__name__,
            error,
            SWITCH,
        )
        return None


def _account(
    worker: "Worker",
    result: MemoryProfilingResult,
    passes: Passes | None,
    started: float,
) -> StartupMemory:
    """Measure what is resident, then the graphs; set upstream's own attributes."""
    gc.collect()
    torch.accelerator.empty_cache()
    snapshot = MemorySnapshot(device=worker.device)
    before = worker.init_snapshot
    consumed = _consumed(result, before.free_memory - snapshot.free_memory)
    if passes is None:
        shape = f"1 x {worker.scheduler_config.max_num_batched_tokens}"
        passes = Passes(((shape, result.transient_peak_headroom),), 0, 0)
        profile, margin = "upstream", 0
    else:
        profile, margin = "truthful", MARGIN_BYTES
    estimated = _graphs(worker)
    reserved = estimated if envs.VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS else 0
    shape, peak = passes.worst
    peak += margin
    weights = int(worker.model_runner.model_memory_usage)
    torch_growth = snapshot.torch_allocated - before.torch_allocated
    persistent = max(0, torch_growth - weights) + passes.rebuilt
    consumed += passes.rebuilt
    available = int(worker.requested_memory) - consumed - peak - reserved

    worker.total_consumed = consumed
    worker.peak_activation_memory = peak + reserved
    worker.cudagraph_memory_estimate = estimated
    worker.available_kv_cache_memory_bytes = available
    return StartupMemory(
        rank=worker.rank,
        total=before.total_memory,
        free_at_start=before.free_memory,
        requested=int(worker.requested_memory),
        weights=weights,
        activation_peak=peak,
        activation_shape=shape,
        persistent=persistent,
        non_torch=consumed - weights - persistent,
        fragmentation=passes.fragmentation,
        graphs_estimated=estimated,
        graphs_reserved=reserved,
        kv_budget=available,
        kv_explicit=worker.cache_config.kv_cache_memory_bytes or 0,
        shapes=passes.shapes,
        profile=profile,
        profile_ms=round(1000 * (time.monotonic() - started)),
    )


def _consumed(result: MemoryProfilingResult, drop: int) -> int:
    """Return what this process holds now: the drop in free memory since its start.

    Raises:
        RuntimeError: free memory grew, so another process gave some back and the
            figure says nothing.

    """
    from vllm.v1.worker.gpu_worker import maybe_rocm_profiling_fallback

    fallback = maybe_rocm_profiling_fallback(result)
    if fallback is not None:
        return fallback
    if drop < 0:
        raise RuntimeError(
            f"Free GPU memory grew by {-drop} bytes while profiling: another process "
            "on this device gave memory back meanwhile. Start again, with nothing "
            "else starting or ending on the device."
        )
    return drop


def _graphs(worker: "Worker") -> int:
    """Return the bytes that graphs will take, measured on sample captures."""
    mode = worker.vllm_config.compilation_config.cudagraph_mode
    if mode == CUDAGraphMode.NONE:
        return 0
    with startup_scope():
        return worker.model_runner.profile_cudagraph_memory()


def _log(memory: StartupMemory, upstream_seconds: float) -> None:
    def mib(size: int) -> int:
        return round(size / MiB_bytes)

    shapes = ", ".join(f"{name}: {mib(size)}" for name, size in memory.shapes)
    logger.info_once(
        "Activation peaks in MiB (%s profile): %s. Resident beyond the weights: %d, "
        "outside of torch: %d, fragmentation at the peak: %d, graphs estimated: %d. "
        "KV cache: room for %d, profiled in %.1f s (%.1f s of it upstream's).",
        memory.profile,
        shapes,
        mib(memory.persistent),
        mib(memory.non_torch),
        mib(memory.fragmentation),
        mib(memory.graphs_estimated),
        mib(memory.kv_budget),
        memory.profile_ms / 1000,
        upstream_seconds,
    )


def record_graphs(worker: "Worker", captured: int) -> None:
    """Note what graph capture really took, in bytes, and print it next to the
    estimate."""
    memory = getattr(worker, "startup_memory", None)
    if memory is None:
        return
    worker.startup_memory = replace(memory, graphs_captured=captured)
    if captured or memory.graphs_estimated:
        logger.info_once(
            "CUDA graphs: %d MiB estimated, %d MiB reserved, %d MiB captured.",
            memory.graphs_estimated // MiB_bytes,
            memory.graphs_reserved // MiB_bytes,
            captured // MiB_bytes,
        )
