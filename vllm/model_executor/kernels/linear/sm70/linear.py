# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Linear layers over packed NVFP4 and FP8 weights, as `torch.ops.vllm.sm70_*`.

Each operator chooses by the number of tokens, when it runs:
- up to `small_batch` tokens one kernel reads the packed weight (decode);
- above, the weight is dequantised tile by tile into a bounded scratch, and each
  tile is multiplied into the columns of the output that it owns (prefill).

The choice is inside the operator because torch.compile would fold a Python
branch on the number of tokens into the graph, and the scratch is too because as
a graph input it is copied or pinned by every graph.

The gated operators take a weight of gate rows followed by as many up rows, and
return `silu(x @ gate.T) * (x @ up.T)`: of the gate and up products only the
tiles in flight ever exist.

Every tile width, no tiles included, gives the same bits: a product's algorithm
does not depend on the number of columns (`gemm_nt`), and dequantisation rounds
each element once, as the reference does.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from vllm.model_executor.kernels.linear.sm70 import ops
from vllm.model_executor.kernels.linear.sm70.scratch import scratch_of
from vllm.model_executor.kernels.linear.sm70.settings import AUTO_WIDTH
from vllm.model_executor.kernels.linear.sm70.tiling import TilePlan, plan_tiles
from vllm.utils.torch_utils import direct_register_custom_op


class PackedWeight(Protocol):
    """A quantized weight [N, K] that stays packed."""

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""

    def dequantize_into(self, out: torch.Tensor, row_begin: int) -> None:
        """Overwrite `out` with rows from `row_begin` on.

        Args:
            out: [rows, K], or [parts, rows, K] for those rows of each part.
            row_begin: in rows of the weight or of a part.

        """

    def small_gemm(
        self, x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
    ) -> None:
        """Overwrite `out` [M, N] with `x @ weight.T + bias`, for few rows of x."""


@dataclass(frozen=True)
class NvFp4Weight:
    """As `ops.nvfp4_dequantize` takes it."""

    packed: torch.Tensor
    block_scales: torch.Tensor
    global_scale: torch.Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.packed.shape[0], self.packed.shape[1] * 2

    def dequantize_into(self, out: torch.Tensor, row_begin: int) -> None:
        ops.nvfp4_dequantize_into(
            self.packed, self.block_scales, self.global_scale, out, row_begin
        )

    def small_gemm(
        self, x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
    ) -> None:
        ops.nvfp4_small_gemm(
            x, self.packed, self.block_scales, self.global_scale, bias, out
        )


@dataclass(frozen=True)
class Fp8Weight:
    """As `ops.fp8_dequantize` takes it."""

    weight: torch.Tensor
    scales: torch.Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]

    def dequantize_into(self, out: torch.Tensor, row_begin: int) -> None:
        ops.fp8_dequantize_into(self.weight, self.scales, out, row_begin)

    def small_gemm(
        self, x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
    ) -> None:
        ops.fp8_small_gemm(x, self.weight, self.scales, bias, out)


def linear(
    x: torch.Tensor,
    weight: PackedWeight,
    bias: torch.Tensor | None,
    tile_width: int,
    small_batch: int,
) -> torch.Tensor:
    """Multiply by a packed weight.

    Args:
        x: float16, bfloat16 or float32 [M, K].
        weight: [N, K].
        bias: like x, [N], or None.
        tile_width: output columns of a tile, 0 for no tiles, or `AUTO_WIDTH`.
        small_batch: up to so many rows of x the packed weight is read directly.

    Returns:
        [M, N], contiguous, of the dtype of x.

    Raises:
        torch.OutOfMemoryError: not even the narrowest tile fits.

    """
    x = x.contiguous()
    rows, columns = x.shape[0], weight.shape[0]
    out = x.new_empty(rows, columns)
    if 0 < rows <= small_batch or not _can_tile(x, columns):
        weight.small_gemm(x, bias, out)
    elif rows:
        plan = _plan_for(
            columns, x.shape[1], rows, x.dtype, x.device, tile_width, gated=False
        )
        multiply_tiles(x, weight, bias, plan, out)
    return out


def gated_linear(
    x: torch.Tensor,
    weight: PackedWeight,
    bias: torch.Tensor | None,
    tile_width: int,
    small_batch: int,
) -> torch.Tensor:
    """Multiply by gate and up rows, and activate: `silu(gate) * up`.

    Args:
        x: float16, bfloat16 or float32 [M, K].
        weight: [2 N, K], N gate rows, then N up rows.
        bias: like x, [2 N], or None.
        tile_width: columns of the activated output in a tile; else as `linear`.
        small_batch: as for `linear`.

    Returns:
        [M, N], contiguous, of the dtype of x.

    Raises:
        torch.OutOfMemoryError: not even the narrowest tile fits.

    """
    x = x.contiguous()
    rows, columns = x.shape[0], weight.shape[0] // 2
    out = x.new_empty(rows, columns)
    if 0 < rows <= small_batch or not _can_tile(x, columns):
        product = x.new_empty(rows, 2 * columns)
        weight.small_gemm(x, bias, product)
        ops.silu_and_mul(product, out)
    elif rows:
        plan = _plan_for(
            columns, x.shape[1], rows, x.dtype, x.device, tile_width, gated=True
        )
        multiply_gated_tiles(x, weight, bias, plan, out)
    return out


def _can_tile(x: torch.Tensor, columns: int) -> bool:
    """Whether tiles of an output of `columns` columns have the bits of the whole.

    On CUDA rows must be whole 16 bytes: cuBLAS's kernels for others add in an
    order that depends on the width, and so the packed kernel serves them.
    """
    return not x.is_cuda or columns % 8 == 0


def multiply_tiles(
    x: torch.Tensor,
    weight: PackedWeight,
    bias: torch.Tensor | None,
    plan: TilePlan,
    out: torch.Tensor,
) -> None:
    """Overwrite `out` [M, N] with `x @ weight.T + bias`, by tiles.

    Args:
        x: contiguous; else as for `linear`.
        weight: as for `linear`.
        bias: as for `linear`.
        plan: of these shapes; halved where memory is short.
        out: contiguous, of the dtype of x.

    """
    scratch = scratch_of(x.device)
    plan, memory = scratch.acquire(plan)
    with scratch.lanes(plan.lanes) as lanes:
        for index, (begin, end) in enumerate(plan.tiles()):
            lane = index % plan.lanes
            with lanes[lane]:
                tile = _view(memory[lane].weight, end - begin, x.shape[1], x.dtype)
                weight.dequantize_into(tile, begin)
                part = None if bias is None else bias[begin:end]
                _gemm_nt(x, tile, part, out[:, begin:end])


def multiply_gated_tiles(
    x: torch.Tensor,
    weight: PackedWeight,
    bias: torch.Tensor | None,
    plan: TilePlan,
    out: torch.Tensor,
) -> None:
    """Overwrite `out` [M, N] with `silu(x @ gate.T) * (x @ up.T)`, by tiles.

    Args:
        x: contiguous; else as for `gated_linear`.
        weight: as for `gated_linear`.
        bias: as for `gated_linear`.
        plan: of these shapes, gated; halved where memory is short.
        out: contiguous, of the dtype of x.

    """
    scratch = scratch_of(x.device)
    plan, memory = scratch.acquire(plan)
    columns = plan.columns
    with scratch.lanes(plan.lanes) as lanes:
        for index, (begin, end) in enumerate(plan.tiles()):
            lane, width = index % plan.lanes, end - begin
            with lanes[lane]:
                tile = _view(memory[lane].weight, 2 * width, x.shape[1], x.dtype)
                weight.dequantize_into(tile.view(2, width, x.shape[1]), begin)
                part = None
                if bias is not None:
                    up_bias = bias[columns + begin : columns + end]
                    part = torch.cat((bias[begin:end], up_bias))
                product = _view(memory[lane].product, x.shape[0], 2 * width, x.dtype)
                _gemm_nt(x, tile, part, product)
                ops.silu_and_mul(product, out[:, begin:end])


def scratch_bytes(
    rows: int,
    depth: int,
    dtype: torch.dtype,
    device: torch.device,
    tile_width: int,
    *,
    gated: bool,
) -> int:
    """The most scratch that a weight [rows, depth] takes, in bytes.

    More tokens only narrow the tiles of a gated layer, so one token wants most.
    The untiled control takes none: its buffer is each call's own.

    Args:
        rows: of the weight, gate and up together.
        depth: K.
        dtype: of the activations.
        device: where the layer runs.
        tile_width: as for `linear`.
        gated: whether `gated_linear` is meant.

    """
    columns = rows // 2 if gated else rows
    plan = _plan_for(columns, depth, 1, dtype, device, tile_width, gated)
    return 0 if plan.whole else plan.scratch_bytes


def _plan_for(
    columns: int,
    depth: int,
    tokens: int,
    dtype: torch.dtype,
    device: torch.device,
    tile_width: int,
    gated: bool,
) -> TilePlan:
    return plan_tiles(
        columns,
        depth,
        tokens,
        dtype.itemsize,
        gated=gated,
        width=None if tile_width == AUTO_WIDTH else tile_width,
        max_lanes=max_lanes(device),
    )


def max_lanes(device: torch.device) -> int:
    """Tiles in flight at once: two where streams overlap."""
    return 2 if device.type == "cuda" else 1


def _view(
    memory: torch.Tensor, rows: int, columns: int, dtype: torch.dtype
) -> torch.Tensor:
    return memory[: rows * columns * dtype.itemsize].view(dtype).view(rows, columns)


def _gemm_nt(
    x: torch.Tensor, tile: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    if x.is_cuda:
        ops.gemm_nt(x, tile, bias, out)
    elif bias is None:
        torch.mm(x, tile.t(), out=out)
    else:
        torch.addmm(bias, x, tile.t(), out=out)


def _nvfp4_linear(
    x: torch.Tensor,
    packed: torch.Tensor,
    block_scales: torch.Tensor,
    global_scale: torch.Tensor,
    bias: torch.Tensor | None,
    tile_width: int,
    small_batch: int,
) -> torch.Tensor:
    weight = NvFp4Weight(packed, block_scales, global_scale)
    return linear(x, weight, bias, tile_width, small_batch)


def _nvfp4_gated_linear(
    x: torch.Tensor,
    packed: torch.Tensor,
    block_scales: torch.Tensor,
    global_scale: torch.Tensor,
    bias: torch.Tensor | None,
    tile_width: int,
    small_batch: int,
) -> torch.Tensor:
    weight = NvFp4Weight(packed, block_scales, global_scale)
    return gated_linear(x, weight, bias, tile_width, small_batch)


def _fp8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    tile_width: int,
    small_batch: int,
) -> torch.Tensor:
    return linear(x, Fp8Weight(weight, scales), bias, tile_width, small_batch)


def _fp8_gated_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    tile_width: int,
    small_batch: int,
) -> torch.Tensor:
    return gated_linear(x, Fp8Weight(weight, scales), bias, tile_width, small_batch)


def _linear_fake(x: torch.Tensor, weight: torch.Tensor, *_: object) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def _gated_linear_fake(
    x: torch.Tensor, weight: torch.Tensor, *_: object
) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[0] // 2)


for _name, _operator, _fake in (
    ("sm70_nvfp4_linear", _nvfp4_linear, _linear_fake),
    ("sm70_nvfp4_gated_linear", _nvfp4_gated_linear, _gated_linear_fake),
    ("sm70_fp8_linear", _fp8_linear, _linear_fake),
    ("sm70_fp8_gated_linear", _fp8_gated_linear, _gated_linear_fake),
):
    # For the CPU and for CUDA, whichever the platform is.
    direct_register_custom_op(
        _name, _operator, [], _fake, dispatch_key="CompositeExplicitAutograd"
    )
