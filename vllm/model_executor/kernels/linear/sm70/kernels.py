# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Upstream's kernel classes for NVFP4 and FP8 weights, on the SM70 operators.

Weights stay packed, and activations stay as wide as they are: a checkpoint that
asks for quantized activations too (W4A4, W8A8) is served as W4A16 or W8A16, and
its activation scales are not used.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

import vllm.envs as envs
from vllm.model_executor.kernels.linear.nvfp4.base import (
    NvFp4LinearKernel,
    NvFp4LinearLayerConfig,
)
from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import (
    FP8ScaledMMLinearKernel,
    FP8ScaledMMLinearLayerConfig,
)
from vllm.model_executor.kernels.linear.sm70 import capability, linear, ops
from vllm.model_executor.kernels.linear.sm70.scratch import scratch_of
from vllm.model_executor.kernels.linear.sm70.settings import LinearSettings
from vllm.model_executor.layers.fusion.quant_activation import QuantizedActivation
from vllm.model_executor.layers.quantization.utils.fp8_utils import (
    _upcast_e8m0_to_fp32,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    GroupShape,
    kFp8Static128BlockSym,
)
from vllm.model_executor.utils import replace_parameter
from vllm.platforms import current_platform

# A torch.nn.Module. Its attributes are what the quantization method made of it,
# which mypy would take for `Tensor | Module`.
Layer: TypeAlias = Any

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_GROUPS = (
    GroupShape.PER_TENSOR,
    GroupShape.PER_CHANNEL,
    # Upstream's other name for a weight's channels.
    GroupShape.PER_TOKEN,
    kFp8Static128BlockSym.scale.group_shape,
)


def unsupported_reason(compute_capability: int | None = None) -> str | None:
    """Say why the operators cannot serve on the current platform, or None.

    Args:
        compute_capability: as in 70; that of the current device if None.

    """
    if current_platform.is_cuda():
        if compute_capability is None:
            device = current_platform.get_device_capability()
            compute_capability = 0 if device is None else device.to_int()
        if compute_capability < capability.SM70_CAPABILITY:
            return f"requires compute capability 7.0, got {compute_capability / 10}"
        device_type = "cuda"
    elif current_platform.is_cpu():
        device_type = "cpu"
    else:
        return "requires a CUDA GPU or the CPU"
    if envs.VLLM_BATCH_INVARIANT:
        return "small batches take another algorithm (VLLM_BATCH_INVARIANT=1)"
    return ops.unavailable_reason(device_type)


class Sm70NvFp4LinearKernel(NvFp4LinearKernel):
    """NVFP4 weights with activations of 16 (or, on the CPU, 32) bits."""

    def __init__(self, config: NvFp4LinearLayerConfig) -> None:
        super().__init__(config)
        self.settings = LinearSettings.from_environment()

    @classmethod
    def is_supported(
        cls, compute_capability: int | None = None
    ) -> tuple[bool, str | None]:
        reason = unsupported_reason(compute_capability)
        return reason is None, reason

    @classmethod
    def can_implement(cls, config: NvFp4LinearLayerConfig) -> tuple[bool, str | None]:
        return True, None

    def process_weights_after_loading(self, layer: Layer) -> None:
        # The checkpoint's layout is the operators' layout.
        _make_contiguous(layer, "weight")
        _make_contiguous(layer, "weight_scale")
        rows, packed_columns = layer.weight.shape
        _prepare(layer, self, self.settings, rows, packed_columns * 2)

    def apply_weights(
        self,
        layer: Layer,
        x: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self._apply(torch.ops.vllm.sm70_nvfp4_linear, layer, x, bias)

    def apply_gated_weights(
        self, layer: Layer, x: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """As `GatedLinearKernel` says."""
        return self._apply(torch.ops.vllm.sm70_nvfp4_gated_linear, layer, x, bias)

    def _apply(
        self,
        operator: torch._ops.OpOverloadPacket,
        layer: Layer,
        x: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        weight = layer.weight, layer.weight_scale, layer.weight_global_scale
        return _call(operator, x, weight, bias, self.settings)


class Sm70Fp8LinearKernel(FP8ScaledMMLinearKernel):
    """FP8 E4M3 weights with activations of 16 (or, on the CPU, 32) bits.

    Scales are for blocks of 128 x 128, for each output channel, or for a whole
    tensor. Like upstream's other weight-only kernel it serves both kinds of layer,
    block-scaled (weight [N, K]) and not (weight [K, N], a transposed view).
    """

    def __init__(
        self, c: FP8ScaledMMLinearLayerConfig, layer_param_names: Sequence[str]
    ) -> None:
        super().__init__(c, layer_param_names)
        self.block_scaled = c.weight_quant_key == kFp8Static128BlockSym
        self.settings = LinearSettings.from_environment()

    @classmethod
    def is_supported(
        cls, compute_capability: int | None = None
    ) -> tuple[bool, str | None]:
        reason = unsupported_reason(compute_capability)
        return reason is None, reason

    @classmethod
    def can_implement(cls, c: FP8ScaledMMLinearLayerConfig) -> tuple[bool, str | None]:
        group = c.weight_quant_key.scale.group_shape
        if group not in _GROUPS:
            return False, (
                "weight scales must be for a tensor, a channel, or blocks of "
                f"128 x 128 elements; got {group}"
            )
        if c.weight_shape[1] % 16:
            return False, f"K must be a multiple of 16, got {c.weight_shape[1]}"
        if c.input_dtype not in _DTYPES or c.out_dtype != c.input_dtype:
            return False, (
                "input and output must have one dtype, float16, bfloat16 or "
                f"float32; got {c.input_dtype} and {c.out_dtype}"
            )
        if c.input_dtype == torch.float32 and not current_platform.is_cpu():
            return False, "float32 is for the CPU only"
        return True, None

    def process_weights_after_loading(self, layer: Layer) -> None:
        if self.block_scaled:
            _make_contiguous(layer, "weight")
            rows, columns = layer.weight.shape
            name = _block_scale_name(layer)
            scales = getattr(layer, name).data
            if scales.dtype in (torch.float8_e8m0fnu, torch.uint8):
                scales = _upcast_e8m0_to_fp32(scales)
            replace_parameter(layer, name, scales.float().contiguous())
        else:
            weight = layer.weight.t()
            rows, columns = weight.shape
            if not weight.is_contiguous():
                replace_parameter(layer, "weight", weight.contiguous().t())
            scales = _row_scales(
                layer.weight_scale.data, rows, getattr(layer, "logical_widths", [rows])
            )
            replace_parameter(layer, "weight_scale", scales)
        _prepare(layer, self, self.settings, rows, columns)

    def apply_weights(
        self,
        layer: Layer,
        x: torch.Tensor | QuantizedActivation,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        # `input_quant_key` says that no quantized activation is taken.
        assert isinstance(x, torch.Tensor)
        return self._apply(torch.ops.vllm.sm70_fp8_linear, layer, x, bias)

    def apply_gated_weights(
        self, layer: Layer, x: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """As `GatedLinearKernel` says."""
        return self._apply(torch.ops.vllm.sm70_fp8_gated_linear, layer, x, bias)

    def _apply(
        self,
        operator: torch._ops.OpOverloadPacket,
        layer: Layer,
        x: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        if self.block_scaled:
            weight = layer.weight, getattr(layer, _block_scale_name(layer))
        else:
            weight = layer.weight.t(), layer.weight_scale
        return _call(operator, x, weight, bias, self.settings)

    def apply_scaled_mm(
        self,
        *,
        A: torch.Tensor,
        B: torch.Tensor,
        out_dtype: torch.dtype,
        As: torch.Tensor,
        Bs: torch.Tensor,
        bias: torch.Tensor | None,
        output_shape: list,
    ) -> torch.Tensor:
        raise NotImplementedError(
            "Sm70Fp8LinearKernel multiplies by unquantized activations: use "
            "apply_weights"
        )


def _block_scale_name(layer: Layer) -> str:
    # Fp8LinearMethod's name, and everyone else's.
    has_inverse = getattr(layer, "weight_scale_inv", None) is not None
    return "weight_scale_inv" if has_inverse else "weight_scale"


def _row_scales(scales: torch.Tensor, rows: int, widths: list[int]) -> torch.Tensor:
    """Return float32 [rows, 1]: the scale of each row of a weight.

    Args:
        scales: one for the whole weight, for each row, or for each fused part.
        rows: N.
        widths: rows of each fused part.

    Raises:
        ValueError: the number of scales is none of these.

    """
    flat = scales.float().reshape(-1)
    if flat.numel() == 1:
        flat = flat.expand(rows)
    elif flat.numel() == len(widths) and sum(widths) == rows:
        counts = torch.tensor(widths, device=flat.device)
        flat = flat.repeat_interleave(counts, output_size=rows)
    elif flat.numel() != rows:
        raise ValueError(
            f"weight_scale has shape {list(scales.shape)}: expected one scale for "
            f"the weight, for each of its {rows} rows, or for each of its "
            f"{len(widths)} fused parts of {widths} rows"
        )
    return flat.reshape(rows, 1).contiguous()


def _make_contiguous(layer: Layer, name: str) -> None:
    tensor = getattr(layer, name)
    if not tensor.is_contiguous():
        replace_parameter(layer, name, tensor.data.contiguous())


def _call(
    operator: torch._ops.OpOverloadPacket,
    x: torch.Tensor,
    weight: tuple[torch.Tensor, ...],
    bias: torch.Tensor | None,
    settings: LinearSettings,
) -> torch.Tensor:
    """Call a linear operator on `x` [..., K]; returns [..., N]."""
    rows = x.reshape(-1, x.shape[-1])
    out = operator(rows, *weight, bias, settings.tile_width, settings.small_batch)
    return out.view(*x.shape[:-1], out.shape[-1])


def _prepare(
    layer: Layer,
    kernel: NvFp4LinearKernel | FP8ScaledMMLinearKernel,
    settings: LinearSettings,
    rows: int,
    columns: int,
) -> None:
    """Announce a layer of weight [rows, columns]: its scratch, its gated step."""
    device = layer.weight.device
    dtype = getattr(layer, "params_dtype", torch.float16)
    widths = getattr(layer, "logical_widths", [])
    gated = len(widths) == 2 and widths[0] == widths[1] and sum(widths) == rows
    layer._gated_kernel = kernel if gated else None
    # A gated layer may be used without its activation too, as with LoRA.
    for as_gated in {gated, False}:
        nbytes = linear.scratch_bytes(
            rows, columns, dtype, device, settings.tile_width, gated=as_gated
        )
        scratch_of(device).declare(nbytes)


capability.register(
    Sm70NvFp4LinearKernel, capability.NVFP4_W4A4, capability.NVFP4_W4A16
)
capability.register(
    Sm70Fp8LinearKernel,
    capability.FP8,
    capability.FP8_BLOCK,
    capability.FP8_WEIGHT_ONLY,
)
