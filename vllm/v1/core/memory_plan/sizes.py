# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Read the sizes that the activation formulae take off a model's modules.

Works on a model that serves and on one without memory alike: only attributes
of vLLM's own layers are read, never a model's name.
"""

from __future__ import annotations

import dis
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from vllm.config import CompilationMode, VllmConfig
from vllm.distributed.parallel_state import get_pp_group
from vllm.model_executor.kernels.linear.sm70.settings import LinearSettings
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.fused_moe.token_chunks import ChunkSettings
from vllm.model_executor.layers.layernorm import GemmaRMSNorm
from vllm.model_executor.layers.linear import (
    LinearBase,
    MergedColumnParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.interfaces import supports_multimodal_embeddings
from vllm.utils.math_utils import cdiv, next_power_of_2
from vllm.v1.core.memory_plan.activations import (
    Line,
    Part,
    Sizes,
    Tiled,
    Workspace,
    attention_parts,
    gdn_parts,
    mlp_part,
    moe_part,
    moe_workspace_token,
    residual_lines,
    sm70_moe_workspace_token,
    state_part,
)

# Layers of a draft that runs over the prompt; a block draft runs over a few
# tokens for each sequence instead.
_BLOCK_DRAFTS = ("dflash", "dspark")


def read_sizes(
    vllm_config: VllmConfig,
    target: torch.nn.Module,
    draft: torch.nn.Module | None = None,
) -> Sizes:
    """Read the sizes of one rank's model.

    Args:
        vllm_config: of the target.
        target: the model, on any device.
        draft: its draft model, if it has one.

    """
    model_config = vllm_config.model_config
    assert isinstance(model_config.dtype, torch.dtype)
    itemsize = model_config.dtype.itemsize
    hidden = model_config.get_hidden_size()
    spec = vllm_config.speculative_config
    stream = list(
        residual_lines(hidden, itemsize, _residual_copies(vllm_config, target))
    )
    auxiliary = _auxiliary_states(vllm_config)
    if auxiliary:
        name = f"hidden states of {auxiliary} layers for the draft"
        stream.append(Line(name, token=auxiliary * hidden * itemsize))
    modules = list(target.modules())
    if draft is not None and spec is not None and spec.method not in _BLOCK_DRAFTS:
        modules += list(draft.modules())
    parts: dict[Part, None] = {}
    workspaces: dict[Workspace, None] = {}
    for module in modules:
        for part in _parts(vllm_config, module, itemsize):
            parts[part] = None
        if moe := _moe(module):
            workspaces[_workspace(vllm_config, module, moe, itemsize)] = None
            parts[moe_part(moe[0], moe[3], itemsize)] = None
    if auxiliary and draft is not None:
        parts[_draft_part(draft, auxiliary, hidden, itemsize)] = None
    return Sizes(
        itemsize=itemsize,
        stream=tuple(stream),
        parts=tuple(parts),
        logits=_logits(target, model_config.get_vocab_size()),
        rows_per_sequence=1 + vllm_config.num_speculative_tokens,
        second_runner=bool(vllm_config.use_v2_model_runner),
        workspaces=tuple(workspaces),
        resident_token=_resident_token(vllm_config, draft, itemsize),
        resident=_merged_weights(vllm_config, draft, itemsize),
        attention=tuple(_attention_buffers([target, draft])),
        decoder_layers=model_config.get_num_layers(vllm_config.parallel_config),
        notes=tuple(_notes(vllm_config)),
    )


def _resident_token(
    config: VllmConfig, draft: torch.nn.Module | None, itemsize: int
) -> int:
    """Bytes for each token of buffers: the draft's hidden states, and embeddings.

    The first runner has embeddings for every model, and its proposer too. The second
    has them where prompts may come with multimodal items or as embeddings, and again
    for a draft that takes the former.
    """
    model_config = config.model_config
    hidden = model_config.get_hidden_size()
    embedding = model_config.get_inputs_embeds_size()
    multimodal = takes_multimodal(config)
    first_runner = not config.use_v2_model_runner
    takes = (
        first_runner
        or (multimodal and get_pp_group().is_first_rank)
        or model_config.enable_prompt_embeds
    )
    own = embedding if takes else 0
    if draft is None:
        return own * itemsize
    spec = config.speculative_config
    block = spec is not None and spec.method in _BLOCK_DRAFTS
    if first_runner:
        drafts = embedding
    elif multimodal and not block and supports_multimodal_embeddings(draft):
        drafts = hidden
    else:
        drafts = 0
    return (own + hidden + drafts) * itemsize


def takes_multimodal(config: VllmConfig) -> bool:
    """Whether a request may have images, videos or audio: the encoder is there."""
    return config.model_config.supports_multimodal_inputs


def profiles_encoder(config: VllmConfig) -> bool:
    """Whether start-up profiles a multimodal encoder."""
    multimodal = config.model_config.multimodal_config
    return (
        takes_multimodal(config)
        and multimodal is not None
        and not multimodal.skip_mm_profiling
    )


def _residual_copies(config: VllmConfig, model: torch.nn.Module) -> int:
    """Tensors [T, hidden] that a layer finds: its own pair, and the pair that the
    model's loop still holds, unless the norm works in place or a compiled graph
    drops them."""
    eager = config.compilation_config.mode == CompilationMode.NONE
    copies = any(isinstance(module, GemmaRMSNorm) for module in model.modules())
    return 4 if eager and copies else 2


def _auxiliary_states(config: VllmConfig) -> int:
    """How many of the target's layers hand their hidden states to the draft."""
    spec = config.speculative_config
    if spec is None or spec.draft_model_config is None:
        return 0
    if spec.method not in ("eagle3", *_BLOCK_DRAFTS):
        return 0
    hf_config = spec.draft_model_config.hf_config
    block_draft = getattr(hf_config, "dflash_config", None) or {}
    layers = block_draft.get("target_layer_ids") or getattr(
        hf_config, "eagle_aux_hidden_state_layer_ids", None
    )
    # EAGLE-3's rule where the draft names none: a low, a middle and a high layer.
    return len(layers) if layers else 3


def _parts(config: VllmConfig, module: Any, itemsize: int) -> Iterator[Part]:
    linears = {
        name: child
        for name, child in module.named_children()
        if isinstance(child, LinearBase)
    }
    tiled = tuple(filter(None, (_tiled(child, False) for child in linears.values())))
    if isinstance(module, MambaBase):
        yield from _state(config, module, linears, itemsize, tiled)
        return
    latent = next((c for c in module.children() if isinstance(c, MLAAttention)), None)
    if latent is not None:
        yield from _latent_attention(latent, linears, itemsize, tiled)
        return
    attention = next(
        (child for child in module.children() if isinstance(child, Attention)), None
    )
    if attention is not None:
        query = attention.num_heads * attention.head_size
        rows = [c for c in linears.values() if isinstance(c, RowParallelLinear)]
        projected = sum(columns_of(c) for c in linears.values() if c not in rows)
        yield from attention_parts(
            sum(columns_of(c) for c in rows),
            projected,
            query,
            attention.num_kv_heads * attention.head_size,
            itemsize,
            output_gate=bool(getattr(module, "attn_output_gate", False)),
            normed=any(hasattr(module, name) for name in ("q_norm", "query_norm")),
            lets_go=_lets_go(module, "forward", "qkv"),
            quantized=_quantized_input(rows),
            tiled=tiled,
        )
        return
    down = [c for c in linears.values() if isinstance(c, RowParallelLinear)]
    up = [c for c in linears.values() if c not in down]
    if len(down) == 1 and up:
        merged = up[0] if isinstance(up[0], MergedColumnParallelLinear) else None
        gated = _tiled(merged, True) if merged is not None and len(up) == 1 else None
        inner = down[0].input_size_per_partition
        if gated is not None and gated.columns != inner:
            gated = None
        others = tuple(filter(None, (_tiled(c, False) for c in down)))
        part = mlp_part(
            columns_of(down[0]),
            inner,
            sum(columns_of(c) for c in up),
            itemsize,
            tiled if gated is None else (gated, *others),
            gated_at_once=gated is not None,
        )
        yield replace(part, lines=part.lines + _quantized_input(down))


def _lets_go(module: Any, method: str, local: str) -> bool:
    """Whether the module's method deletes this local before it returns."""
    # None too for what is compiled or wrapped: then it counts as keeping it.
    code = getattr(getattr(type(module), method, None), "__code__", None)
    operations = dis.get_instructions(code) if code else ()
    return any(op.opname == "DELETE_FAST" and op.argval == local for op in operations)


def _latent_attention(
    module: Any, linears: dict[str, Any], itemsize: int, tiled: tuple[Tiled, ...]
) -> tuple[Part, ...]:
    """Multi-head latent attention in prefill, where keys and values are made of
    the latent for every head."""
    rows = [c for c in linears.values() if isinstance(c, RowParallelLinear)]
    head = module.qk_nope_head_dim + module.qk_rope_head_dim
    return attention_parts(
        sum(columns_of(c) for c in rows),
        sum(columns_of(c) for c in linears.values() if c not in rows),
        module.num_heads * module.v_head_dim,
        module.num_heads * head,
        itemsize,
        normed=True,
        tiled=tiled,
    )


def columns_of(layer: Any) -> int:
    """Elements of a row of a linear layer's output, this rank's."""
    return getattr(layer, "output_size_per_partition", layer.output_size)


def _kernels(layer: Any) -> list[Any]:
    """What the layer's quantization method holds, its kernel among it."""
    method = getattr(layer, "quant_method", None)
    scheme = getattr(layer, "scheme", None)
    holders = [holder for holder in (method, scheme) if holder is not None]
    return [value for holder in holders for value in vars(holder).values()]


def _quantized_input(layers: list[Any]) -> tuple[Line, ...]:
    """The FP8 copy that a kernel makes of its input, a scale for each 128."""
    inputs = [
        layer.input_size_per_partition
        for layer in layers
        if any(
            hasattr(kernel, "quant_fp8") and getattr(kernel, "apply_input_quant", True)
            for kernel in _kernels(layer)
        )
    ]
    if not inputs:
        return ()
    return (Line("quantized input", token=sum(i + 4 * cdiv(i, 128) for i in inputs)),)


def _tiled(layer: Any, gated: bool) -> Tiled | None:
    """The layer as the tiling sees it, or None when its kernel is not ours."""
    from vllm.model_executor.kernels.linear.sm70.capability import BACKEND_KERNELS

    if not any(type(kernel) in BACKEND_KERNELS for kernel in _kernels(layer)):
        return None
    depth = getattr(layer, "input_size_per_partition", layer.input_size)
    width = LinearSettings.from_environment().tile_width
    return Tiled(
        columns_of(layer) // (2 if gated else 1),
        depth,
        gated,
        None if width < 0 else width,
    )


def _state(
    config: VllmConfig,
    module: Any,
    linears: dict[str, Any],
    itemsize: int,
    tiled: tuple[Tiled, ...],
) -> tuple[Part, ...]:
    tp = config.parallel_config.tensor_parallel_size
    shapes, dtypes = module.get_state_shape(), module.get_state_dtype()
    if hasattr(module, "head_k_dim") and hasattr(module, "num_v_heads"):
        return gdn_parts(
            max(1, module.num_k_heads // tp),
            max(1, module.num_v_heads // tp),
            module.head_k_dim,
            module.head_v_dim,
            itemsize,
            dtypes[-1].itemsize,
            lets_go=_lets_go(module, "_forward_core", "mixed_qkv_non_spec"),
            tiled=tiled,
        )
    state = sum(
        torch.Size(shape).numel() * dtype.itemsize
        for shape, dtype in zip(shapes, dtypes)
    )
    rows = [c for c in linears.values() if isinstance(c, RowParallelLinear)]
    inner = sum(c.input_size_per_partition for c in rows)
    projected = sum(columns_of(c) for c in linears.values() if c not in rows)
    return (state_part(projected, inner, state, itemsize),)


def _moe(module: Any) -> tuple[int, int, int, int] | None:
    """(hidden, intermediate of this rank, experts a token, experts)."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    if not isinstance(module, RoutedExperts):
        return None
    moe = module.moe_config
    return (
        module.hidden_size,
        module.intermediate_size_per_partition,
        moe.experts_per_token,
        moe.num_experts,
    )


def _workspace(
    config: VllmConfig, module: Any, moe: tuple[int, int, int, int], itemsize: int
) -> Workspace:
    """What the layer's experts keep, as their settings bound it."""
    hidden, intermediate, top_k, _ = moe
    settings = ChunkSettings.from_environment(
        config.scheduler_config.max_num_batched_tokens
    )
    experts = getattr(getattr(module, "quant_method", None), "experts_cls", None)
    own = getattr(experts, "workspace_budget_bytes", 0)
    budget = own if settings.budget_bytes is None else settings.budget_bytes
    if own:
        token = sm70_moe_workspace_token(hidden, intermediate, top_k, itemsize)
    else:
        token = moe_workspace_token(hidden, intermediate, top_k, itemsize)
    return Workspace(token, settings.tokens or 0, budget)


def _draft_part(
    draft: torch.nn.Module, auxiliary: int, hidden: int, itemsize: int
) -> Part:
    """A draft that reads the target's hidden states: their concatenation, its
    projection and norm, and keys and values for the draft's layers."""
    heads = [m for m in draft.modules() if isinstance(m, Attention)]
    keys_values = sum(2 * m.num_kv_heads * m.head_size for m in heads)
    return Part(
        "draft",
        (
            Line("concatenated hidden states", token=auxiliary * hidden * itemsize),
            Line("projected and normed", token=2 * hidden * itemsize),
            Line("keys and values of its layers", token=keys_values * itemsize),
        ),
    )


def _merged_weights(
    config: VllmConfig, draft: torch.nn.Module | None, itemsize: int
) -> int:
    """Bytes of the projection to all layers' keys and values, which a block draft
    makes of its layers' own when it runs first."""
    spec = config.speculative_config
    if draft is None or spec is None or spec.method not in _BLOCK_DRAFTS:
        return 0
    heads = [m for m in draft.modules() if isinstance(m, Attention)]
    columns = sum(2 * m.num_kv_heads * m.head_size for m in heads)
    return columns * spec.draft_model_config.get_hidden_size() * itemsize


def _attention_buffers(
    models: list[torch.nn.Module | None],
) -> Iterator[tuple[str, int]]:
    """The partial results of Triton's decode kernel, FP32: for as many tokens as it
    splits, of each head, 16 segments."""
    for model in filter(None, models):
        for module in model.modules():
            if not isinstance(module, Attention):
                continue
            if module.attn_backend.get_name() != "TRITON_ATTN":
                continue
            from vllm.v1.attention.backends import triton_attn

            tokens = triton_attn.MIN_LAUNCH_GRID_SIZE_2D // module.num_kv_heads
            rows = tokens * module.num_heads * triton_attn.NUM_PAR_SOFTMAX_SEGMENTS
            yield module.layer_name, 4 * rows * next_power_of_2(module.head_size)


def _logits(model: torch.nn.Module, vocab: int) -> int:
    return vocab if any(isinstance(m, ParallelLMHead) for m in model.modules()) else 0


def _notes(config: VllmConfig) -> Iterator[str]:
    if takes_multimodal(config) and not profiles_encoder(config):
        yield (
            "the multimodal encoder's activations and its cache are not in the plan "
            "(--skip-mm-profiling)"
        )
    if config.lora_config is not None:
        yield "LoRA's buffers are not in the plan"
