# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""How prefill cuts a quantized weight into tiles: pure arithmetic, no device.

A linear layer has K inputs and N outputs; its weight is [N, K]. A tile is a
range of output columns over the full K: its rows of the weight are dequantised
into a buffer, multiplied, and the product is written into the columns of the
output that the tile owns. In a gated layer (gate and up projection, then the
activation) N counts the columns of the activated output, and a tile takes its
gate rows and its up rows together.

A lane is one such buffer with a stream of its own. Two lanes take turns, so
that the next tile is dequantised, and the last blocks of the previous product
finish, while the current product runs.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

MIB = 2**20

ALIGNMENT = 128
"""A default width is a multiple of this, in columns, or the whole weight: one thread
block's share of a product on every GPU of interest, and a block of FP8 scales."""

MIN_WIDTH = 128
"""The narrowest tile that a setting may ask for, in columns. Also in gemm_plan.h."""

MIN_LAST_WIDTH = 64
"""The last tile takes columns from its neighbour up to this width. A product of
a few columns only is slow, and libraries compute it in another order: MKL's
FP32 product of 8 columns differs in the last bit from the same columns of a
wide one."""

MAX_WIDTH = 2**20
"""Wider than any weight: a bound for the setting, not for the plan."""

WEIGHT_SCRATCH_BYTES = 40 * MIB
"""For all lanes together, resident from the first long prefill on. Also in
gemm_plan.h."""

TRANSIENT_BYTES = 208 * MIB
"""The above, and a gated layer's tiles of the gate and up product, which exist
while the operator runs."""

MIN_LANE_WIDTH = 2048
"""Of a tile in one of two lanes, in columns: one lane of 2048 columns is faster than
two of 1024 (down at TP2 on an H200, 8,192 tokens: 0.998 to 1.000 of untiled, and 1.016
to 1.020)."""

MIN_LANE_TILES = 2
"""For each of two lanes; of three tiles one lane makes two. Down at TP4 is faster so
at 8,192 tokens (1.005 to 1.009 instead of 1.010 to 1.011), and slower at 4,096 (1.011
to 1.020 instead of 1.007 to 1.008)."""

MIN_GATED_LANE_WIDTH = 512
"""As `MIN_LANE_WIDTH`, of a gated layer's tile, whatever their number. There two lanes
were faster than one of twice the width, or within 0.5 % of it, at 4,096 and 8,192
tokens (gate and up at TP1 and TP2, 8,192: 1.005 and 1.007, one 1.019 and 1.020).
Narrower ones were not timed."""


@dataclass(frozen=True)
class TilePlan:
    """How one weight is cut for one number of tokens.

    Attributes:
        columns: N, output columns.
        width: output columns of a tile; at most `columns`.
        lanes: tiles in flight, 1 or 2.
        weight_bytes: one lane's buffer for dequantised weight rows.
        product_bytes: one lane's gate and up product; 0 when not gated.
        whole: the untiled control. Its one tile is the whole weight, whose
            buffer is allocated for each call as if no tiles existed.

    """

    columns: int
    width: int
    lanes: int
    weight_bytes: int
    product_bytes: int
    whole: bool = False

    @property
    def scratch_bytes(self) -> int:
        """Bytes of dequantised weight that the plan holds at once."""
        return self.lanes * self.weight_bytes

    @property
    def transient_bytes(self) -> int:
        """Bytes beyond input and output: weight buffers and gated products."""
        return self.lanes * (self.weight_bytes + self.product_bytes)

    def tiles(self) -> Iterator[tuple[int, int]]:
        """Yield each tile as [begin, end), in columns of the output."""
        begin = 0
        while begin < self.columns:
            end = min(begin + self.width, self.columns)
            last = self.columns - end
            if 0 < last < MIN_LAST_WIDTH:
                # A multiple of 8, so that every tile starts at 16 bytes.
                end = (self.columns - MIN_LAST_WIDTH) // 8 * 8
            yield begin, end
            begin = end

    def halved(self) -> "TilePlan | None":
        """The plan with half the memory, or None when no smaller one works."""
        if self.width > MIN_WIDTH:
            half = self.width // 2
            half = max(MIN_WIDTH, half - half % ALIGNMENT)
            return replace(
                self,
                width=half,
                weight_bytes=self.weight_bytes // self.width * half,
                product_bytes=self.product_bytes // self.width * half,
                whole=False,
            )
        return replace(self, lanes=1) if self.lanes > 1 else None


def plan_tiles(
    columns: int,
    depth: int,
    rows: int,
    itemsize: int,
    *,
    gated: bool,
    width: int | None = None,
    max_lanes: int = 2,
    weight_budget: int = WEIGHT_SCRATCH_BYTES,
    transient_budget: int = TRANSIENT_BYTES,
) -> TilePlan:
    """Choose the tiles of one product.

    By default a weight that fits is one tile. Else the tiles in flight together are the
    largest power of two wide that keeps the weight buffers within `weight_budget` and
    all buffers within `transient_budget`. Of the widths timed on an H200 it was the
    fastest, or within 2 % of it, at 4,096 and at 8,192 tokens, where others took up to
    half as long again. Where a second and last tile would be narrower than `ALIGNMENT`,
    both get about half of the columns. Where not even `MIN_WIDTH` columns fit, that is
    the width, and the budget is exceeded.

    Args:
        columns: N, output columns; of a gated layer, after the activation.
        depth: K, input columns.
        rows: M, tokens.
        itemsize: bytes of an activation and of a dequantised weight.
        gated: whether the weight holds gate and up rows, 2 N in all.
        width: columns of a tile: None to choose, 0 for the untiled control,
            otherwise a width that `check_width` accepts.
        max_lanes: 1 or 2; 1 where nothing overlaps, as on the CPU.
        weight_budget: bytes for the lanes' weight buffers.
        transient_budget: bytes for weight buffers and gated products together.

    Raises:
        ValueError: a size is not positive.

    """
    if min(columns, depth, rows, itemsize, max_lanes) < 1:
        raise ValueError(
            f"plan_tiles: columns={columns}, depth={depth}, rows={rows}, "
            f"itemsize={itemsize}, max_lanes={max_lanes}: each must be at least 1"
        )
    parts = 2 if gated else 1
    column_weight = parts * depth * itemsize
    column_product = 2 * rows * itemsize if gated else 0

    def plan(width: int, lanes: int, whole: bool = False) -> TilePlan:
        return TilePlan(
            columns, width, lanes, width * column_weight, width * column_product, whole
        )

    if width == 0:
        return plan(columns, 1, whole=True)
    if width is not None:
        width = min(width, columns)
        return plan(width, max_lanes if width < columns else 1)

    fits_in_weight = weight_budget // column_weight
    fits_in_all = transient_budget // (column_weight + column_product)
    fits = min(fits_in_weight, fits_in_all)
    if columns <= fits:
        return plan(columns, 1)
    widest = _power_of_two(fits)
    in_lane = widest // max_lanes
    if gated:
        lanes_pay = in_lane >= MIN_GATED_LANE_WIDTH
    else:
        tiles = -(-columns // in_lane)
        lanes_pay = in_lane >= MIN_LANE_WIDTH and tiles >= MIN_LANE_TILES * max_lanes
    lanes = max_lanes if lanes_pay else 1
    if lanes == 1 and widest < columns < widest + ALIGNMENT:
        half = -(-columns // 2)
        return plan(half + -half % ALIGNMENT, lanes)
    return plan(min(widest // lanes, columns), lanes)


def _power_of_two(width: int) -> int:
    """The largest that is at most `width`, but no narrower than `MIN_WIDTH`."""
    return max(MIN_WIDTH, 1 << width.bit_length() >> 1)


def check_width(width: int, name: str) -> int:
    """Return a tile width that can work.

    Args:
        width: output columns; 0 is the untiled control.
        name: of the setting, for the message.

    Raises:
        ValueError: the width cannot work; the message says which can.

    """
    if width == 0 or (MIN_WIDTH <= width <= MAX_WIDTH and width % 8 == 0):
        return width
    raise ValueError(
        f"{name}={width}: expected 0 (no tiles) or a multiple of 8 between "
        f"{MIN_WIDTH} and {MAX_WIDTH}, in output columns; leave it unset for "
        "a width chosen from each weight's shape"
    )
