# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""KV-cache specs of public hybrid models, as their layers make them.

Sizes per rank. ``layers`` builds what the workers report before pages are
unified: the platform has aligned the attention block to the state already.
"""

from dataclasses import dataclass
from math import prod

import torch

from vllm.model_executor.layers.mamba.mamba_utils import (
    MambaStateShapeCalculator as Shapes,
)
from vllm.utils.math_utils import cdiv
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

FP8, FP16, FP32 = torch.uint8, torch.float16, torch.float32
KERNEL = 16


@dataclass(frozen=True)
class Attention:
    """``count`` layers of ``kv_heads`` heads of ``head_size``; MLA if no heads."""

    count: int
    kv_heads: int
    head_size: int
    window: int | None = None

    def spec(self, block: int, dtype: torch.dtype, tp: int) -> KVCacheSpec:
        if not self.kv_heads:
            return MLAAttentionSpec(
                block_size=block, num_kv_heads=1, head_size=self.head_size, dtype=dtype
            )
        common = dict(
            block_size=block,
            num_kv_heads=max(1, self.kv_heads // tp),
            head_size=self.head_size,
            dtype=dtype,
        )
        if self.window:
            return SlidingWindowSpec(**common, sliding_window=self.window)
        return FullAttentionSpec(**common)


@dataclass(frozen=True)
class State:
    """``count`` state layers with the shapes of upstream's own calculator."""

    count: int
    kind: str
    sizes: dict
    ssm_dtype: torch.dtype = FP32

    def shapes(self, tp: int, spec_tokens: int) -> tuple[tuple[int, ...], ...]:
        if self.kind == "mamba1":
            return Shapes.mamba1_state_shape(tp_world_size=tp, **self.sizes)
        make = getattr(Shapes, f"{self.kind}_state_shape")
        return make(tp_world_size=tp, num_spec=spec_tokens, **self.sizes)

    def dtypes(self) -> tuple[torch.dtype, ...]:
        return (FP16,) if self.kind == "short_conv" else (FP16, self.ssm_dtype)


@dataclass(frozen=True)
class Model:
    attention: tuple[Attention, ...]
    state: State | None = None


def layers(
    model: Model,
    *,
    tp: int = 1,
    kv: torch.dtype = FP16,
    draft: tuple[Attention, ...] = (),
    draft_kv: torch.dtype = FP16,
    spec_tokens: int = 0,
    prefix_caching: bool = True,
    max_model_len: int = 65536,
) -> dict[str, KVCacheSpec]:
    """Specs as workers report them, target layers first.

    The block follows ``Platform._align_hybrid_block_size``: the fewest kernel
    blocks whose page holds the state (128 tokens at a time with MLA).
    """
    first = model.attention[0]
    block, padded = KERNEL, None
    dtypes: tuple[torch.dtype, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    if model.state is not None:
        shapes = model.state.shapes(tp, spec_tokens)
        dtypes = model.state.dtypes()
        state = sum(prod(s) * d.itemsize for s, d in zip(shapes, dtypes))
        token = first.spec(1, kv, tp).page_size_bytes
        unit = KERNEL if first.kv_heads else 128
        block = unit * cdiv(state, unit * token)
        padded = None if block * token == state else block * token
    specs: dict[str, KVCacheSpec] = {}
    for kind in model.attention:
        for i in range(kind.count):
            name = f"model.{'swa' if kind.window else 'attn'}.{i}"
            specs[name] = kind.spec(block, kv, tp)
    if model.state is not None:
        for i in range(model.state.count):
            specs[f"model.state.{i}"] = MambaSpec(
                block_size=block if prefix_caching else max_model_len,
                shapes=shapes,
                dtypes=dtypes,
                page_size_padded=padded,
                mamba_cache_mode="align" if prefix_caching else "none",
                num_speculative_blocks=spec_tokens,
            )
    for kind in draft:
        for i in range(kind.count):
            name = f"draft.{'swa' if kind.window else 'attn'}.{i}"
            specs[name] = kind.spec(block, draft_kv, tp)
    return specs


def gated_delta_net(count: int, k_heads: int, v_heads: int, **kw) -> State:
    sizes = dict(
        num_k_heads=k_heads,
        num_v_heads=v_heads,
        head_k_dim=128,
        head_v_dim=128,
        conv_kernel_size=4,
    )
    return State(count, "gated_delta_net", sizes, **kw)


def mamba2(count: int, heads: int, head: int, groups: int, state: int) -> State:
    sizes = dict(
        intermediate_size=heads * head,
        n_groups=groups,
        num_heads=heads,
        head_dim=head,
        state_size=state,
        conv_kernel=4,
    )
    return State(count, "mamba2", sizes)


# Qwen3.5/3.6/3.8-27B, and the draft of the memory figures: DFlash2-like.
QWEN_27B = Model((Attention(16, 4, 256),), gated_delta_net(48, 16, 48))
QWEN_27B_FP16_STATE = Model(
    (Attention(16, 4, 256),), gated_delta_net(48, 16, 48, ssm_dtype=FP16)
)
DFLASH2 = (Attention(4, 8, 128, window=2048), Attention(1, 8, 128))
DFLASH_WINDOWED = (Attention(5, 8, 128, window=2048),)

MODELS = {
    "Qwen3-Next-80B-A3B": Model((Attention(12, 2, 256),), gated_delta_net(36, 16, 32)),
    "Qwen3.5-35B-A3B": Model((Attention(10, 2, 256),), gated_delta_net(30, 16, 32)),
    "GPT-OSS-120B": Model((Attention(18, 8, 64), Attention(18, 8, 64, window=128))),
    "Gemma-3n-E4B": Model((Attention(4, 2, 256), Attention(16, 2, 256, window=512))),
    "Granite-4.0-H-Small": Model((Attention(4, 8, 128),), mamba2(36, 128, 64, 1, 128)),
    "Nemotron-H-8B": Model((Attention(4, 8, 128),), mamba2(24, 128, 64, 8, 128)),
    "Falcon-H1-7B": Model((Attention(32, 8, 128),), mamba2(32, 128, 8, 1, 256)),
    "Jamba-v0.1": Model(
        (Attention(4, 8, 128),),
        State(
            28,
            "mamba1",
            dict(intermediate_size=8192, state_size=16, conv_kernel=4),
        ),
    ),
    "Bamba-9B": Model((Attention(3, 8, 128),), mamba2(29, 128, 64, 1, 128)),
    "Kimi-Linear-48B-A3B": Model(
        (Attention(7, 0, 576),), State(20, "kda", dict(num_heads=32, head_dim=128))
    ),
    "LFM2-1.2B": Model(
        (Attention(6, 8, 64),),
        State(10, "short_conv", dict(intermediate_size=2048, conv_kernel=3)),
    ),
}
