# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A multimodal encoder in the plan: its activation peak and its output cache.

The peak is not a formula. The model's own forward runs on the largest dummy items
that upstream's budget allows, with tensors on torch's ``meta`` device, and what is
alive is counted. Kernels are left out: what they write is allocated before, by
their callers. Attention allocates its output alone, as the kernels that serve do.
An H200 measured 1,833.3 MiB for an image of 65,536 patches, and this finds 1,833.0.

The rest is the arithmetic of `memory_profile.Encoder`: a full cache is charged to
every batch, and one more batch encodes.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.encoder_budget import MultiModalBudget
from vllm.multimodal.inputs import PlaceholderRange
from vllm.utils.math_utils import cdiv
from vllm.v1.core.memory_plan.activations import Peak, Shape, Sizes, peak_of
from vllm.v1.core.memory_plan.sizes import columns_of
from vllm.v1.worker.memory_profile import most_items
from vllm.v1.worker.profile_batches import Batch, Limits, Media

logger = init_logger(__name__)

NOT_RUN = "the multimodal encoder's activations are not in the plan, only its cache"


@dataclass(frozen=True)
class EncoderSizes:
    """What one rank's encoder makes of the largest items.

    Attributes:
        token: bytes of a token's row in the output cache.
        tokens: of all items that were run, in the language model.
        prompt: tokens of a prompt of theirs, text between the items included, for
            each token of an item.
        peak: bytes of the forward pass, inputs and outputs included; 0 where it
            could not be run.

    """

    token: int
    tokens: int = 1
    prompt: Fraction = Fraction(1)
    peak: int = 0

    @property
    def notes(self) -> tuple[str, ...]:
        return () if self.peak else (NOT_RUN,)


@dataclass(frozen=True)
class Encoded:
    """What an encoder adds to the batches of a configuration.

    Attributes:
        cache: bytes of a full output cache.
        batch: that encodes, None where no step of the scheduler's does.
        others: bytes of the cache next to the outputs that the batch makes.
        peak: bytes of the encoder alone, 0 where that is not known.

    """

    cache: int
    batch: Batch | None
    others: int
    peak: int

    def beside(self, peak: Peak) -> Peak:
        """The language model's peak, next to a full cache."""
        return replace(
            peak,
            bytes=peak.bytes + self.cache,
            lines=(*peak.lines, ("encoder cache", self.cache)),
            shapes=tuple((name, size + self.cache) for name, size in peak.shapes),
        )

    def highest(self, peak: Peak, sizes: Sizes) -> Peak:
        """The same, with the batch that encodes: the encoder runs before the
        language model, so the higher of them counts."""
        peak = self.beside(peak)
        alone = "multimodal encoder"
        lines = (("encoder", self.peak), ("rest of its cache", self.others))
        encodes = Peak(self.peak + self.others, alone, "", lines)
        if self.batch is not None:
            name = self.batch.name
            step = self.beside(peak_of(sizes, [Shape(name, tuple(self.batch.lengths))]))
            encodes = replace(encodes, shape=name, part=alone)
            encodes = max(step, encodes, key=_bytes)
        elif not self.peak:
            return peak
        shapes = (*peak.shapes, (encodes.shape, encodes.bytes))
        return replace(max(peak, encodes, key=_bytes), shapes=shapes)


def _bytes(peak: Peak) -> int:
    return peak.bytes


def _budget(config: VllmConfig) -> MultiModalBudget | None:
    """Upstream's budget; None where no item passes through the encoder."""
    budget = MultiModalBudget(config, MULTIMODAL_REGISTRY, enable_cache=False)
    return budget if any(budget.mm_max_items_per_batch.values()) else None


def _media(
    config: VllmConfig, budget: MultiModalBudget, prompt: Fraction
) -> tuple[Media, int]:
    """The prompts of a step that encodes, and the tokens of each of their items."""
    modality, each, requests = most_items(config, budget)
    tokens = budget.mm_max_toks_per_item[modality]
    length = math.ceil(each * tokens * prompt)
    media = Media(
        modality=modality,
        tokens=(),
        items=[None] * each,
        positions=[PlaceholderRange(0, length)],
        requests=requests,
        whole=config.scheduler_config.disable_chunked_mm_input,
    )
    return media, tokens


def encoded_of(config: VllmConfig, sizes: EncoderSizes, limits: Limits) -> Encoded:
    """What the encoder adds to the batches, as `memory_profile.Encoder` does.

    Where ``config`` allows other items than those that were run, the peak is taken
    to grow with their tokens: no attention that serves keeps scores.

    Args:
        config: with multimodal inputs.
        sizes: of the encoder.
        limits: of a step.

    """
    budget = _budget(config)
    if budget is None:
        return Encoded(0, None, 0, 0)
    media, tokens = _media(config, budget, sizes.prompt)
    batch = media.batch(limits)
    most = budget.mm_max_items_per_batch[media.modality]
    encoded = media.share(limits) * len(media.items) if batch else most
    cache = sizes.token * max(most * tokens, budget.encoder_cache_size)
    return Encoded(
        cache=cache,
        batch=batch,
        others=max(0, cache - encoded * tokens * sizes.token),
        peak=cdiv(sizes.peak * encoded * tokens, sizes.tokens),
    )


def read_encoder(
    config: VllmConfig, model: torch.nn.Module, limits: Limits
) -> EncoderSizes | None:
    """Run a model's encoder on the ``meta`` device; None where it has none to run.

    Args:
        config: the configuration.
        model: with its parameters on that device.
        limits: of a step.

    Raises:
        Exception: what making upstream's budget raises when serving.

    """
    budget = _budget(config)
    if budget is None:
        return None
    dtype = config.model_config.dtype
    assert isinstance(dtype, torch.dtype)
    width = config.model_config.get_inputs_embeds_size()
    try:
        return _run(config, budget, model, limits)
    except Exception as error:
        logger.debug("The encoder was not run: %r", error, exc_info=True)
        return EncoderSizes(token=width * dtype.itemsize)


def _run(
    config: VllmConfig, budget: MultiModalBudget, model: Any, limits: Limits
) -> EncoderSizes:
    from vllm.multimodal.utils import group_and_batch_mm_kwargs

    modality, each, requests = most_items(config, budget)
    made = budget.processor.get_dummy_mm_inputs(mm_counts={modality: each})
    places = made["mm_placeholders"][modality]
    length = max(place.offset + place.length for place in places)
    prompt = Fraction(length, each * budget.mm_max_toks_per_item[modality])
    media, tokens = _media(config, budget, prompt)
    # None would be a cached one, and no cache is used.
    items = [(modality, item) for item in made["mm_kwargs"][modality] if item]
    items *= media.share(limits) or requests
    outputs: list[torch.Tensor] = []
    with _without_kernels(model), torch.inference_mode(), _Alive() as alive:
        for _, _, batch in group_and_batch_mm_kwargs(items, device="meta"):
            outputs.extend(model.embed_multimodal(**batch))
    rows = sum(len(output) for output in outputs)
    return EncoderSizes(
        token=sum(output.nbytes for output in outputs) // rows,
        tokens=len(items) * tokens,
        prompt=prompt,
        peak=alive.peak,
    )


class _Alive(TorchDispatchMode):
    """Counts the bytes that are alive of what operators make on ``meta``."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = {id(storage) for storage in _storages((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for storage in _storages(result):
            # A view, or what was written into: a parameter, or counted before.
            if id(storage) not in given and id(storage) not in self._sizes:
                self._sizes[id(storage)] = storage.nbytes()
                self.now += storage.nbytes()
                weakref.finalize(storage, self._dropped, id(storage))
        self.peak = max(self.peak, self.now)
        return result

    def _dropped(self, key: int) -> None:
        self.now -= self._sizes.pop(key)


def _storages(values: Any) -> list[torch.UntypedStorage]:
    # A storage has one Python object for as long as it lives.
    return [
        value.untyped_storage()
        for value in tree_leaves(values)
        if isinstance(value, torch.Tensor) and value.device.type == "meta"
    ]


class _NoDevice(TorchFunctionMode):
    """Put tensors on ``meta`` whose code names the device that is not there. Those
    of the CPU stay: their values decide shapes."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        kwargs.pop("pin_memory", None)
        if func is torch.Tensor.pin_memory:
            return args[0]
        if func is torch.Tensor.cuda:
            return args[0].to("meta")
        device = kwargs.get("device")
        if device is not None and torch.device(device).type != "cpu":
            kwargs["device"] = "meta"
        if func is torch.Tensor.to:
            args = [_on_meta(arg) for arg in args]
        return func(*args, **kwargs)


def _on_meta(value: Any) -> Any:
    if isinstance(value, str | torch.device) and torch.device(value).type != "cpu":
        return "meta"
    return value


@contextlib.contextmanager
def _without_kernels(model: torch.nn.Module) -> Iterator[None]:
    """Layers run where there is no kernel of theirs: Triton's are not launched, a
    custom operator that fails without its device runs in its native form, and of a
    linear layer that fails (weights are not repacked) there is the output."""
    from vllm.model_executor.custom_op import CustomOp
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.platforms.planned_gpu import layers_assumed

    with contextlib.ExitStack() as stack:
        stack.enter_context(layers_assumed())
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(_NoDevice())
        for kernel in _kernel_classes():
            stack.callback(setattr, kernel, "run", kernel.run)
            kernel.run = lambda self, *args, **kwargs: None
        for module in model.modules():
            if isinstance(module, CustomOp):
                own = module._forward_method
                stack.callback(setattr, module, "_forward_method", own)
                module._forward_method = _or_native(module, own)
            elif isinstance(module, LinearBase) and module.quant_method is not None:
                method: Any = module.quant_method
                stack.callback(setattr, method, "apply", method.apply)
                method.apply = _or_output(method.apply)
        yield


def _kernel_classes() -> list[Any]:
    try:
        from triton.runtime import Autotuner, Heuristics, JITFunction
    except ImportError:
        return []
    return [Autotuner, Heuristics, JITFunction]


def _or_native(module: Any, own: Any) -> Any:
    def forward(*args: Any, **kwargs: Any) -> Any:
        with contextlib.suppress(AttributeError, RuntimeError):
            return own(*args, **kwargs)
        return module.forward_native(*args, **kwargs)

    return forward


def _or_output(own: Any) -> Any:
    def apply(layer: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        with contextlib.suppress(Exception):
            return own(layer, x, *args, **kwargs)
        return x.new_empty(*x.shape[:-1], columns_of(layer))

    return apply
