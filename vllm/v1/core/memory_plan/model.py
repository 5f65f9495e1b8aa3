# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A model without memory: its weights, its KV-cache specs and its sizes.

The model is made by vLLM's own classes on torch's ``meta`` device, where tensors
have a shape and a dtype but no bytes. So quantization, tensor and pipeline
parallel shards, tied embeddings and a draft that shares its target's are what
they are when serving, and nothing is downloaded. About half a second for 64
layers.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.utils.math_utils import round_up
from vllm.v1.core.memory_plan.activations import Sizes
from vllm.v1.core.memory_plan.encoder import EncoderSizes, read_encoder
from vllm.v1.core.memory_plan.sizes import profiles_encoder, read_sizes
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.worker.memory_profile import limits_of

logger = init_logger(__name__)

OWN_SEGMENT_BYTES, SEGMENT_BYTES = 10 * 2**20, 2 * 2**20
"""PyTorch's: tensors from here on have a segment of their own, a multiple of that."""

LOAD_FORMAT = "memory_plan"
"""The load format whose loader makes models on the ``meta`` device."""


@dataclass(frozen=True)
class PlannedModel:
    """What one rank would hold.

    Attributes:
        config: the configuration, with the blocks that the platform chose.
        rank: pipeline stage; tensor-parallel ranks of a stage hold the same.
        weights_bytes: parameters and buffers of the target and the draft, as
            `allocated_bytes` counts them.
        draft_bytes: of these, what the draft adds.
        specs: each layer's KV-cache spec, as a worker would report it.
        sizes: what the activation formulae take.
        encoder: of a stage that start-up runs a multimodal encoder in.

    """

    config: VllmConfig
    rank: int
    weights_bytes: int
    draft_bytes: int
    specs: dict[str, KVCacheSpec]
    sizes: Sizes
    encoder: EncoderSizes | None = None


def plan_models(
    vllm_config: VllmConfig, with_encoder: bool = True
) -> list[PlannedModel]:
    """One model for each pipeline stage. ``vllm_config`` is not modified.

    Args:
        vllm_config: the configuration.
        with_encoder: run a multimodal encoder too.

    Raises:
        Exception: whatever making the model raises when serving.

    """
    stages = vllm_config.parallel_config.pipeline_parallel_size
    # The first runner profiles the encoder in every stage, and charges it there.
    first_only = vllm_config.use_v2_model_runner
    return [
        _plan_stage(
            copy_config(vllm_config), stage, with_encoder and not (stage and first_only)
        )
        for stage in range(stages)
    ]


def copy_config(config: VllmConfig) -> VllmConfig:
    """A copy without the layers that a running model registered in it."""
    compilation = config.compilation_config
    layers = compilation.static_forward_context
    compilation.static_forward_context = {}
    try:
        return copy.deepcopy(config)
    finally:
        compilation.static_forward_context = layers


def bytes_of(models: Iterable[torch.nn.Module]) -> int:
    """Bytes of parameters and buffers; shared ones count once."""
    return sum(_tensor_bytes(models))


def allocated_bytes(models: Iterable[torch.nn.Module]) -> int:
    """The same as PyTorch's allocator counts it on a GPU.

    It reserves segments of 2 MiB and more for tensors of 10 MiB, which are not split
    while a model loads.
    """
    if not current_platform.is_cuda_alike():
        return bytes_of(models)
    return sum(
        round_up(size, SEGMENT_BYTES) if size >= OWN_SEGMENT_BYTES else size
        for size in _tensor_bytes(models)
    )


def _tensor_bytes(models: Iterable[torch.nn.Module]) -> Iterable[int]:
    return {
        id(tensor): tensor.nbytes
        for model in models
        for tensors in (model.parameters(), model.buffers())
        for tensor in tensors
    }.values()


def _plan_stage(config: VllmConfig, stage: int, with_encoder: bool) -> PlannedModel:
    _register_loader()
    if current_platform.is_cuda_alike():
        # As the worker does when it starts.
        assert isinstance(config.model_config.dtype, torch.dtype)
        current_platform.check_if_supports_dtype(config.model_config.dtype)
    config.load_config.load_format = LOAD_FORMAT
    config.compilation_config.static_all_moe_layers.clear()
    with _parallel_groups(config, stage), set_current_vllm_config(config):
        with _without_memory():
            from vllm.model_executor.model_loader import get_model

            target = get_model(vllm_config=config)
            draft = _draft(target, config)
            models = [target] if draft is None else [target, draft]
            current_platform.update_block_size_for_backend(config)
            specs = _kv_cache_specs(config)
            _resolve_layout(config, specs)
        encoder = None
        if with_encoder and profiles_encoder(config):
            encoder = read_encoder(config, target, limits_of(config))
        return PlannedModel(
            config=config,
            rank=stage * config.parallel_config.tensor_parallel_size,
            weights_bytes=allocated_bytes(models),
            draft_bytes=allocated_bytes(models) - allocated_bytes([target]),
            specs=specs,
            sizes=read_sizes(config, target, draft),
            encoder=encoder,
        )


def _resolve_layout(config: VllmConfig, specs: dict[str, KVCacheSpec]) -> None:
    """Record the layout of the KV cache, as workers and engine core agree on it."""
    from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
    from vllm.v1.worker.worker_base import WorkerBase

    worker = SimpleNamespace(vllm_config=config)
    names = WorkerBase.get_supported_kv_cache_layouts(worker)  # type: ignore[arg-type]
    config.cache_config.kv_cache_layout = resolve_kv_cache_layout(
        config, [names], specs.values()
    ).name


def _kv_cache_specs(config: VllmConfig) -> dict[str, KVCacheSpec]:
    # The V2 runner's module needs Triton; V1's is the same loop in a class.
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    runner = SimpleNamespace(vllm_config=config, shared_kv_cache_layers={})
    return GPUModelRunner.get_kv_cache_spec(runner)  # type: ignore[arg-type]


def _draft(target: torch.nn.Module, config: VllmConfig) -> torch.nn.Module | None:
    """The draft next to its target, made as the runner's speculator makes it."""
    spec = config.speculative_config
    if spec is None or spec.draft_model_config is None:
        return None
    if spec.method in ("ngram", "ngram_gpu", "suffix", "extract_hidden_states"):
        return None
    if config.parallel_config.pipeline_parallel_size > 1 and not (
        parallel_state.get_pp_group().is_last_rank
    ):
        return None
    if spec.uses_draft_model():
        from vllm.config import replace
        from vllm.model_executor.model_loader import get_model

        cache = config.cache_config
        if spec.kv_cache_dtype is not None:
            cache = replace(cache, cache_dtype=spec.kv_cache_dtype)
        own = replace(
            config,
            model_config=spec.draft_model_config,
            quant_config=None,
            cache_config=cache,
            parallel_config=spec.draft_parallel_config,
        )
        return get_model(vllm_config=own, prefix="draft_model")
    if spec.method == "dflash":
        from vllm.v1.worker.gpu.spec_decode.dflash.utils import load_dflash_model

        return load_dflash_model(target, config)
    from vllm.v1.worker.gpu.spec_decode.eagle.utils import load_eagle_model

    return load_eagle_model(target, config)


# ---------------------------------------------------------------------------
# What serving has and planning has not: memory, ranks, loaded weights
# ---------------------------------------------------------------------------


class _OnMeta(TorchFunctionMode):
    """Put tensors on ``meta`` whose code names a device by itself."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None:
            kwargs["device"] = "meta"
        kwargs.pop("pin_memory", None)
        return func(*args, **kwargs)


@contextlib.contextmanager
def _without_memory() -> Iterator[None]:
    from vllm.platforms.planned_gpu import layers_assumed

    with torch.device("meta"), _OnMeta(), layers_assumed():
        yield


def _register_loader() -> None:
    from vllm.model_executor import model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader
    from vllm.utils.torch_utils import set_default_torch_dtype

    if LOAD_FORMAT in model_loader._LOAD_FORMAT_TO_MODEL_LOADER:
        return

    class MetaModelLoader(BaseModelLoader):
        """Make the model, load nothing."""

        def download_model(self, model_config: Any) -> None:
            pass

        def load_weights(self, model: Any, model_config: Any) -> None:
            pass

        def load_model(
            self, vllm_config: VllmConfig, model_config: Any, prefix: str = ""
        ) -> torch.nn.Module:
            with set_default_torch_dtype(model_config.dtype):
                return self.create_model(vllm_config, model_config, prefix).eval()

    model_loader._LOAD_FORMAT_TO_MODEL_LOADER[LOAD_FORMAT] = MetaModelLoader


class _ProcessGroup:
    """torch's view of a group: methods where vLLM's has attributes."""

    def __init__(self, size: int, rank: int) -> None:
        self._size, self._rank = size, rank

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank


class _Group:
    """A process group that is only asked for its size and a rank."""

    def __init__(self, name: str, size: int, rank: int = 0) -> None:
        self.unique_name = name
        self.world_size = size
        self.rank = self.local_rank = self.rank_in_group = rank
        self.ranks = list(range(size))
        self.first_rank, self.last_rank = 0, size - 1
        self.next_rank, self.prev_rank = (rank + 1) % size, (rank - 1) % size
        self.is_first_rank, self.is_last_rank = rank == 0, rank == size - 1
        self.device = torch.device("meta")
        self.device_group = self.cpu_group = _ProcessGroup(size, rank)
        self.device_communicator = None
        self.use_device_communicator = False
        self.mq_broadcaster = None

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.world_size == 1 else torch.empty_like(tensor)

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        if self.world_size == 1:
            return tensor
        return torch.cat([tensor] * self.world_size, dim)


@contextlib.contextmanager
def _parallel_groups(config: VllmConfig, stage: int) -> Iterator[None]:
    parallel = config.parallel_config
    tp, pp = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    dp, pcp = parallel.data_parallel_size, parallel.prefill_context_parallel_size
    groups = {
        "_WORLD": _Group("world", tp * pp * pcp, stage * tp * pcp),
        "_INNER_DP_WORLD": _Group("inner_dp_world", tp * pp * pcp, stage * tp * pcp),
        "_TP": _Group("tp", tp),
        "_ETP": _Group("etp", tp),
        "_DCP": _Group("dcp", parallel.decode_context_parallel_size),
        "_PCP": _Group("pcp", pcp),
        "_PP": _Group("pp", pp, stage),
        "_DP": _Group("dp", dp),
        "_EP": _Group("ep", tp * dp * pcp),
        "_EPLB": _Group("eplb", tp * dp * pcp),
    }
    before = {name: getattr(parallel_state, name) for name in groups}
    for name, group in groups.items():
        setattr(parallel_state, name, group)
    try:
        yield
    finally:
        for name, group in before.items():
            setattr(parallel_state, name, group)
