# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Experts over FP8 weights that stay as they are stored, with bounded scratch.

For GPUs without FP8 arithmetic (compute capability 7.0), and for the CPU. The
operators read tokens through indices, activate where the first product ends, and
make the second product in tiles of output columns that are reduced over the top-k
one by one. So of all that upstream's experts keep for tokens x top_k rows two
things are left: the activated rows, and one tile of the second product, whose rows
for each token's first expert are in the output's own place.

The tile takes what the budget leaves (``VLLM_MOE_WORKSPACE_BUDGET_MIB``, 121 by
default, 0 for whole rows). A batch for which the narrowest tile is too much is cut
into chunks of tokens. Neither changes a bit of the result.
"""

from dataclasses import dataclass
from typing import Any

import torch

import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.model_executor.layers.fused_moe import sm70_ops
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import (
    FusedMoEConfig,
    FusedMoEParallelConfig,
    FusedMoEQuantConfig,
)
from vllm.model_executor.layers.fused_moe.token_chunks import MIB, ChunkSettings
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
    TopKWeightAndReduceNoOP,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    QuantKey,
    kFp8Static128BlockSym,
    kFp8StaticChannelSym,
    kFp8StaticTensorSym,
)
from vllm.platforms import current_platform
from vllm.utils.math_utils import cdiv, round_up

TILE_ALIGNMENT = 128
"""Tiles are multiples of this, in columns: a block of scales, and a thread block's
share of the product."""

_INDEX_BYTES = 4
_INDEX_ALIGNMENT = 16
_WORKSPACE_ALIGNMENT = 256


@dataclass(frozen=True)
class MoeScratch:
    """How the scratch of one batch is laid out, in bytes but for `tile_width`.

    Attributes:
        first: workspace 1: the activated rows, tokens x top_k x intermediate; the
            modular kernel keeps room for the output in the same place.
        rows: of the rows in the order of their experts.
        offsets: of each expert's first row, and of the end.
        tile: of one tile of the second product, tokens x (top_k - 1) x
            `tile_width`.
        tile_width: columns of the tile.

    """

    first: int
    rows: int
    offsets: int
    tile: int
    tile_width: int

    @property
    def second(self) -> int:
        """Workspace 2: all the rest."""
        return self.rows + self.offsets + self.tile

    @property
    def total(self) -> int:
        """Both."""
        return self.first + self.second


def plan_scratch(
    tokens: int,
    top_k: int,
    experts: int,
    hidden: int,
    intermediate: int,
    itemsize: int,
    budget_bytes: int,
) -> MoeScratch:
    """Choose the widest tile of the second product that keeps a budget.

    Evened out over the tiles. Where not even `TILE_ALIGNMENT` columns fit, that is
    the width, and the budget is exceeded.

    Args:
        tokens: of the batch or chunk.
        top_k: experts of a token.
        experts: local ones.
        hidden: columns of the output.
        intermediate: columns of an activated row.
        itemsize: bytes of an activation.
        budget_bytes: for everything; 0 for no tiles, which is the control.

    """
    rows = tokens * top_k
    first = max(rows * intermediate, tokens * hidden) * itemsize
    first = round_up(first, _WORKSPACE_ALIGNMENT)
    sorted_rows = round_up(rows * _INDEX_BYTES, _INDEX_ALIGNMENT)
    offsets = round_up((experts + 1) * _INDEX_BYTES, _INDEX_ALIGNMENT)
    width, column = hidden, (rows - tokens) * itemsize
    if budget_bytes and column:
        fits = (budget_bytes - first - sorted_rows - offsets) // column
        if fits < hidden:
            fits = max(TILE_ALIGNMENT, fits - fits % TILE_ALIGNMENT)
            even = cdiv(hidden, cdiv(hidden, fits))
            width = min(fits, round_up(even, TILE_ALIGNMENT), hidden)
    return MoeScratch(first, sorted_rows, offsets, column * width, width)


def reserved_second(
    tokens: int,
    top_k: int,
    experts: int,
    hidden: int,
    intermediate: int,
    itemsize: int,
    budget_bytes: int,
) -> int:
    """Bytes of workspace 2 for a batch and for every shorter one.

    A shorter batch may take more: its tile may be wider. But the workspace manager
    is locked once the longest batch has been profiled, so that batch reserves the
    budget, and both workspaces together never fall with the number of tokens.

    Args:
        tokens: as for `plan_scratch`, like the other arguments.
        top_k: experts of a token.
        experts: local ones.
        hidden: columns of the output.
        intermediate: columns of an activated row.
        itemsize: bytes of an activation.
        budget_bytes: for both workspaces; 0 for no tiles.

    """
    shape = (tokens, top_k, experts, hidden, intermediate, itemsize)
    most = plan_scratch(*shape, budget_bytes=0)
    if not budget_bytes:
        return most.second
    least = plan_scratch(*shape, budget_bytes=1)
    return min(most.second, max(least.second, budget_bytes - most.first))


def kernel_scales(
    w13: torch.Tensor, w2: torch.Tensor, w13_scale: torch.Tensor, w2_scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales as the operators take them.

    Args:
        w13: [E, rows, K], for its shape.
        w2: [E, hidden, I], for its shape.
        w13_scale: one for each expert ([E], or [E, 1, 1]), row or block.
        w2_scale: likewise.

    Returns:
        float32, contiguous: an expert's own is repeated for each row, the others
        are as they came.

    """

    def prepared(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        experts, rows, _ = weight.shape
        if scale.numel() == experts:
            scale = scale.reshape(experts, 1).expand(experts, rows)
        return scale.float().contiguous()

    return prepared(w13, w13_scale), prepared(w2, w2_scale)


class Sm70Fp8Experts(mk.FusedMoEExpertsModular):
    """FP8 E4M3 weights with activations of 16 (or, on the CPU, 32) bits.

    Scales are for blocks of 128 x 128, for each output channel, or for an expert. A
    checkpoint that asks for quantized activations is served without.
    """

    workspace_budget_bytes = 121 * MIB
    """The least with which 8,192 tokens of a 35B-A3B layer (hidden 2048, intermediate
    512, top-8) have tiles of 512 columns: 64 MiB of activated rows, 56 of a tile and
    0.25 of indices. `token_chunks` reads this too."""

    batch_tokens: int | None = None
    """Set by `token_chunks`: tokens of the batch that this call is a chunk of."""

    def __init__(
        self, moe_config: FusedMoEConfig, quant_config: FusedMoEQuantConfig
    ) -> None:
        super().__init__(moe_config, quant_config)
        settings = ChunkSettings.from_environment(moe_config.max_num_tokens)
        if settings.budget_bytes is not None:
            self.workspace_budget_bytes = settings.budget_bytes

    @staticmethod
    def is_supported_config(
        cls: type[mk.FusedMoEExperts],
        moe_config: FusedMoEConfig,
        weight_key: QuantKey | None,
        activation_key: QuantKey | None,
        activation_format: mk.FusedMoEActivationFormat,
    ) -> tuple[bool, str | None]:
        supported, reason = mk.FusedMoEExperts.is_supported_config(
            cls, moe_config, weight_key, activation_key, activation_format
        )
        if not supported:
            return supported, reason
        reason = _unsupported_model(moe_config)
        if weight_key == kFp8StaticTensorSym and current_platform.is_cpu():
            # Upstream quantizes such weights anew, which it cannot on the CPU.
            reason = "kernel does not support one scale for each expert on the CPU"
        return reason is None, reason

    @property
    def expects_unquantized_inputs(self) -> bool:
        return True

    @staticmethod
    def activation_format() -> mk.FusedMoEActivationFormat:
        return mk.FusedMoEActivationFormat.Standard

    @staticmethod
    def _supports_current_device() -> bool:
        # Late: these are the linear layers' modules, which import much.
        from vllm.model_executor.kernels.linear.sm70.kernels import unsupported_reason

        return unsupported_reason() is None

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return True

    @staticmethod
    def _supports_quant_scheme(
        weight_key: QuantKey | None, activation_key: QuantKey | None
    ) -> bool:
        return weight_key in (
            kFp8Static128BlockSym,
            kFp8StaticChannelSym,
            kFp8StaticTensorSym,
        )

    @staticmethod
    def _supports_activation(activation: MoEActivation) -> bool:
        return activation in sm70_ops.ACTIVATIONS

    @staticmethod
    def _supports_parallel_config(
        moe_parallel_config: FusedMoEParallelConfig,
    ) -> bool:
        return not (
            moe_parallel_config.use_fi_nvl_two_sided_kernels
            or moe_parallel_config.use_fi_nvl_one_sided_kernels
        )

    def finalize_weight_and_reduce_impl(self) -> mk.TopKWeightAndReduce:
        return TopKWeightAndReduceNoOP()

    def workspace_shapes(
        self,
        M: int,
        N: int,
        K: int,
        topk: int,
        global_num_experts: int,
        local_num_experts: int,
        expert_tokens_meta: mk.ExpertTokensMetadata | None,
        activation: MoEActivation,
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        intermediate = self.adjust_N_for_activation(N, activation)
        itemsize = self.moe_config.in_dtype.itemsize
        second = reserved_second(
            M,
            topk,
            local_num_experts,
            K,
            intermediate,
            itemsize,
            self.workspace_budget_bytes,
        )
        return (M * topk, intermediate), (second // itemsize,), (M, K)

    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: MoEActivation,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        a1q_scale: torch.Tensor | None,
        a2_scale: torch.Tensor | None,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
        expert_tokens_meta: mk.ExpertTokensMetadata | None,
        apply_router_weight_on_input: bool,
    ) -> None:
        assert self.w1_scale is not None and self.w2_scale is not None
        tokens, top_k = topk_ids.shape
        experts, hidden, intermediate = w2.shape
        plan = plan_scratch(
            tokens,
            top_k,
            experts,
            hidden,
            intermediate,
            hidden_states.dtype.itemsize,
            self.workspace_budget_bytes,
        )
        scratch = workspace2.view(torch.uint8)[: plan.second]
        sorted_rows, offsets, tile = scratch.split((plan.rows, plan.offsets, plan.tile))
        sorted_rows = sorted_rows.view(torch.int32)[: tokens * top_k]
        offsets = offsets.view(torch.int32)[: experts + 1]
        tile = tile.view(hidden_states.dtype)
        tile = tile.view(tokens * (top_k - 1), plan.tile_width)
        activated = workspace13.view(tokens * top_k, intermediate)
        batch_tokens = tokens if self.batch_tokens is None else self.batch_tokens
        topk_ids = topk_ids.contiguous()
        result = output
        if _same_memory(output, workspace13):
            # Where the caller has no buffer for it, the modular kernel puts the
            # output into workspace 1, over the activated rows.
            result = torch.empty_like(output)
        # With `apply_router_weight_on_input` the prepare step has applied them.
        weights: Any = None
        if not apply_router_weight_on_input:
            weights = topk_weights.float().contiguous()

        sm70_ops.moe_route(topk_ids, expert_map, sorted_rows, offsets)
        sm70_ops.fp8_moe_gate_up(
            hidden_states,
            w1,
            self.w1_scale,
            sorted_rows,
            offsets,
            activation,
            activated,
            batch_tokens=batch_tokens,
        )
        sm70_ops.fp8_moe_down(
            activated,
            w2,
            self.w2_scale,
            sorted_rows,
            offsets,
            topk_ids,
            expert_map,
            weights,
            tile,
            result,
            batch_tokens=batch_tokens,
        )
        if result is not output:
            output.copy_(result)


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _unsupported_model(config: FusedMoEConfig) -> str | None:
    """Say what of a model the operators lack, or None."""
    if config.has_bias:
        return "kernel does not support biased experts"
    swiglu = (config.swiglu_limit, config.swiglu_alpha, config.swiglu_beta)
    if any(value is not None for value in swiglu):
        return "kernel does not support a clamped or scaled SwiGLU"
    sizes = config.hidden_dim, config.intermediate_size_per_partition
    if any(size % 16 for size in sizes):
        return (
            "kernel requires hidden and intermediate dimensions divisible by 16, "
            f"got {sizes[0]} and {sizes[1]}"
        )
    dtype = config.in_dtype
    if dtype == torch.float16:
        return None
    if dtype == torch.float32 and current_platform.is_cpu():
        return None
    if dtype == torch.bfloat16 and (
        current_platform.is_cpu() or current_platform.has_device_capability(80)
    ):
        return None
    return f"kernel does not support {dtype} activations on this device"
