# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Tile plans: exact values for well-known shapes, and what holds for any."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.model_executor.kernels.linear.sm70.tiling import (
    ALIGNMENT,
    MAX_WIDTH,
    MIB,
    MIN_GATED_LANE_WIDTH,
    MIN_LANE_WIDTH,
    MIN_LAST_WIDTH,
    MIN_WIDTH,
    TRANSIENT_BYTES,
    WEIGHT_SCRATCH_BYTES,
    check_width,
    plan_tiles,
)

GATED, PLAIN = True, False
HALF = 2  # bytes

# name, gated, K, N, then for two lanes at M = 8192: width, lanes, tiles, MiB of
# weight scratch, MiB of everything. K * width * 2 bytes a lane, twice if gated;
# gated products add 8192 * 2 * width * 2 bytes a lane.
PLANS = [
    ("gate_up TP1", GATED, 5120, 17408, 1024, 2, 17, 40.0, 104.0),
    ("gate_up TP2", GATED, 5120, 8704, 1024, 2, 9, 40.0, 104.0),
    ("gate_up TP4", GATED, 5120, 4352, 1024, 2, 5, 40.0, 104.0),
    ("down TP1", PLAIN, 17408, 5120, 1024, 1, 5, 34.0, 34.0),
    ("down TP2", PLAIN, 8704, 5120, 2048, 1, 3, 34.0, 34.0),
    ("down TP4", PLAIN, 4352, 5120, 4096, 1, 2, 34.0, 34.0),
    ("qkvz TP1", PLAIN, 5120, 16384, 2048, 2, 8, 40.0, 40.0),
    ("qkvz TP2", PLAIN, 5120, 8192, 2048, 2, 4, 40.0, 40.0),
    ("qkvz TP4", PLAIN, 5120, 4096, 4096, 1, 1, 40.0, 40.0),
    ("qkvz TP4, padded", PLAIN, 5120, 4120, 2176, 1, 2, 21.25, 21.25),
    ("qkvz TP4, padded more", PLAIN, 5120, 4128, 2176, 1, 2, 21.25, 21.25),
    ("qkv TP1", PLAIN, 5120, 14336, 2048, 2, 7, 40.0, 40.0),
    ("qkv TP2", PLAIN, 5120, 7168, 2048, 2, 4, 40.0, 40.0),
    ("qkv TP4", PLAIN, 5120, 3584, 3584, 1, 1, 35.0, 35.0),
    ("out TP1", PLAIN, 6144, 5120, 2048, 1, 3, 24.0, 24.0),
    ("out TP2", PLAIN, 3072, 5120, 5120, 1, 1, 30.0, 30.0),
    ("out TP4", PLAIN, 1536, 5120, 5120, 1, 1, 15.0, 15.0),
    # Other models: hidden 8192, 5376 and 4096.
    ("70B gate_up TP1", GATED, 8192, 28672, 512, 2, 56, 32.0, 64.0),
    ("70B down TP1", PLAIN, 28672, 8192, 512, 1, 16, 28.0, 28.0),
    ("70B qkv TP1", PLAIN, 8192, 10240, 2048, 1, 5, 32.0, 32.0),
    ("5376 gate_up TP1", GATED, 5376, 21504, 512, 2, 42, 21.0, 53.0),
    ("5376 down TP1", PLAIN, 21504, 5376, 512, 1, 11, 21.0, 21.0),
    ("8B gate_up TP1", GATED, 4096, 14336, 1024, 2, 14, 32.0, 96.0),
    ("8B down TP1", PLAIN, 14336, 4096, 1024, 1, 4, 28.0, 28.0),
    ("8B qkv TP1", PLAIN, 4096, 6144, 4096, 1, 2, 32.0, 32.0),
    # A sliver of a last tile: evened out where it is one of two.
    ("sliver of 128", PLAIN, 5120, 4224, 4096, 1, 2, 40.0, 40.0),
    ("sliver of 127", PLAIN, 5120, 4223, 2176, 1, 2, 21.25, 21.25),
    ("sliver of five", PLAIN, 5120, 8240, 2048, 2, 5, 40.0, 40.0),
    ("gated sliver", GATED, 17408, 620, 384, 1, 2, 25.5, 37.5),
    ("gate_up TP8", GATED, 5120, 2176, 1024, 2, 3, 40.0, 104.0),
    # Shallow: 8192 columns in flight.
    ("K = 2560", PLAIN, 2560, 16384, 4096, 2, 4, 40.0, 40.0),
    ("K = 2560, one lane", PLAIN, 2560, 12288, 8192, 1, 2, 40.0, 40.0),
]


@pytest.mark.parametrize(
    ("gated", "depth", "columns", "width", "lanes", "tiles", "scratch", "transient"),
    [row[1:] for row in PLANS],
    ids=[row[0] for row in PLANS],
)
def test_plans_of_known_shapes(
    gated: bool,
    depth: int,
    columns: int,
    width: int,
    lanes: int,
    tiles: int,
    scratch: float,
    transient: float,
) -> None:
    plan = plan_tiles(columns, depth, 8192, HALF, gated=gated)
    assert (plan.width, plan.lanes, len(list(plan.tiles()))) == (width, lanes, tiles)
    assert plan.scratch_bytes == scratch * MIB
    assert plan.transient_bytes == transient * MIB
    assert not plan.whole


def test_down_projection_needs_at_most_40_mib() -> None:
    assert plan_tiles(5120, 17408, 8192, HALF, gated=False).transient_bytes <= 40 * MIB


def test_gate_up_needs_at_most_208_mib_for_any_batch() -> None:
    for rows in (1, 8192, 16384, 65536, 262144):
        plan = plan_tiles(17408, 5120, rows, HALF, gated=True)
        assert plan.transient_bytes <= 208 * MIB


@pytest.mark.parametrize(
    ("rows", "width", "transient"),
    [
        # 2 * width * (2 * 5120 + 2 * rows) * 2 bytes.
        (8192, 1024, 104.0),
        (16384, 1024, 168.0),
        (21504, 1024, 208.0),
        (32768, 512, 148.0),
        (65536, 512, 138.0),
    ],
)
def test_more_tokens_narrow_gated_tiles(
    rows: int, width: int, transient: float
) -> None:
    plan = plan_tiles(17408, 5120, rows, HALF, gated=True)
    assert (plan.width, plan.transient_bytes / MIB) == (width, transient)


def test_the_untiled_control_is_the_whole_weight() -> None:
    plan = plan_tiles(17408, 5120, 8192, HALF, gated=True, width=0)
    assert list(plan.tiles()) == [(0, 17408)]
    assert (plan.whole, plan.lanes) == (True, 1)
    # design.md: 340 + 544 MiB.
    assert plan.weight_bytes == 340 * MIB
    assert plan.product_bytes == 544 * MIB


def test_a_chosen_width_is_taken_as_it_is() -> None:
    plan = plan_tiles(1000, 512, 1, HALF, gated=False, width=392)
    assert (plan.width, plan.lanes) == (392, 2)
    assert list(plan.tiles()) == [(0, 392), (392, 784), (784, 1000)]
    one = plan_tiles(1000, 512, 1, HALF, gated=False, width=4096)
    assert (one.width, one.lanes, one.whole) == (1000, 1, False)


def test_the_last_tile_is_not_a_sliver() -> None:
    plan = plan_tiles(4120, 5120, 1, HALF, gated=False, width=2056)
    assert list(plan.tiles()) == [(0, 2056), (2056, 4056), (4056, 4120)]
    odd = plan_tiles(4101, 5120, 1, HALF, gated=False, width=2048)
    assert list(odd.tiles()) == [(0, 2048), (2048, 4032), (4032, 4101)]


def test_halving_ends() -> None:
    plan = plan_tiles(5120, 17408, 8192, HALF, gated=False)
    seen = []
    smaller = plan.halved()
    while smaller is not None:
        seen.append((smaller.width, smaller.lanes, smaller.scratch_bytes / MIB))
        smaller = smaller.halved()
    assert seen == [(512, 1, 17.0), (256, 1, 8.5), (128, 1, 4.25)]


def test_the_untiled_control_is_halved_into_tiles() -> None:
    plan = plan_tiles(1000, 512, 8, HALF, gated=True, width=0).halved()
    assert plan is not None
    assert (plan.width, plan.whole) == (384, False)
    assert plan.weight_bytes == 384 * 2 * 512 * HALF
    assert plan.product_bytes == 384 * 2 * 8 * HALF


near_powers_of_two = st.builds(
    lambda power, more: 2**power + more, st.integers(8, 15), st.integers(-130, 130)
)


@st.composite
def problems(draw: st.DrawFn) -> dict[str, object]:
    return {
        "columns": draw(st.one_of(st.integers(1, 40000), near_powers_of_two)),
        "depth": draw(st.integers(1, 40000)),
        "rows": draw(st.integers(1, 300000)),
        "itemsize": draw(st.sampled_from([2, 4])),
        "gated": draw(st.booleans()),
        "max_lanes": draw(st.sampled_from([1, 2])),
    }


widths = st.one_of(
    st.none(), st.just(0), st.integers(MIN_WIDTH // 8, 5000).map(lambda n: 8 * n)
)


@settings(max_examples=300, deadline=None)
@given(problem=problems(), width=widths)
def test_any_plan(problem: dict, width: int | None) -> None:
    plan = plan_tiles(**problem, width=width)
    columns, parts = problem["columns"], 1 + problem["gated"]
    tiles = list(plan.tiles())
    # Every column exactly once, in order.
    assert tiles[0][0] == 0 and tiles[-1][1] == columns
    assert all(a[1] == b[0] for a, b in zip(tiles, tiles[1:]))
    for begin, end in tiles:
        assert 0 < end - begin <= plan.width
        assert begin % 8 == 0
        assert (end - begin) >= min(MIN_LAST_WIDTH, columns)
        # What the operators view in a lane's buffers fits.
        rows_bytes = parts * (end - begin) * problem["itemsize"]
        assert rows_bytes * problem["depth"] <= plan.weight_bytes
        if problem["gated"]:
            assert rows_bytes * problem["rows"] <= plan.product_bytes
    assert plan.product_bytes == 0 or problem["gated"]
    assert 1 <= plan.lanes <= problem["max_lanes"]
    assert plan.whole == (width == 0)
    assert plan.width <= columns
    if width:
        assert plan.width == min(width, columns)


@settings(max_examples=300, deadline=None)
@given(problem=problems())
def test_any_default_plan(problem: dict) -> None:
    plan = plan_tiles(**problem)
    columns, tiles = problem["columns"], list(plan.tiles())
    smallest = plan.width <= MIN_WIDTH and plan.lanes == 1
    assert smallest or plan.scratch_bytes <= WEIGHT_SCRATCH_BYTES
    assert smallest or plan.transient_bytes <= TRANSIENT_BYTES
    if len(tiles) == 1:
        return
    evened = plan.width.bit_count() > 1
    # Of all tiles in flight.
    widest = 1 << (plan.width * plan.lanes - 1).bit_length()
    twice = Fraction(2 * widest, plan.width * plan.lanes)
    assert (
        twice * plan.scratch_bytes > WEIGHT_SCRATCH_BYTES
        or twice * plan.transient_bytes > TRANSIENT_BYTES
    )
    if problem["max_lanes"] == 2:
        in_lane = widest // 2
        if problem["gated"]:
            lanes_pay = in_lane >= MIN_GATED_LANE_WIDTH
        else:
            lanes_pay = in_lane >= MIN_LANE_WIDTH and columns > 3 * in_lane
        assert plan.lanes == 1 + lanes_pay
    if plan.lanes == 1 and widest < columns < widest + ALIGNMENT:
        assert evened or widest <= 2 * ALIGNMENT
        assert tiles[1][1] - tiles[1][0] > plan.width - 2 * ALIGNMENT
    else:
        assert not evened


@settings(max_examples=300, deadline=None)
@given(problem=problems(), rows=st.integers(1, 300000))
def test_one_token_wants_the_most_scratch(problem: dict, rows: int) -> None:
    most = plan_tiles(**problem | {"rows": 1})
    assert plan_tiles(**problem | {"rows": rows}).scratch_bytes <= most.scratch_bytes


@settings(max_examples=200, deadline=None)
@given(problem=problems(), width=widths)
def test_any_halving(problem: dict, width: int | None) -> None:
    plan = plan_tiles(**problem, width=width)
    smaller = plan.halved()
    if smaller is None:
        assert plan.width <= MIN_WIDTH and plan.lanes == 1
        return
    assert not smaller.whole
    assert smaller.transient_bytes < plan.transient_bytes
    assert smaller.width >= min(MIN_WIDTH, plan.columns)
    assert list(smaller.tiles())[-1][1] == plan.columns
    # The width changes what is held, by column, by nothing.
    assert smaller.weight_bytes * plan.width == plan.weight_bytes * smaller.width
    assert smaller.product_bytes * plan.width == plan.product_bytes * smaller.width


@pytest.mark.parametrize("width", [0, 128, 136, 1024, MAX_WIDTH])
def test_widths_that_work(width: int) -> None:
    assert check_width(width, "SETTING") == width


@pytest.mark.parametrize("width", [-1, 1, 64, 127, 129, 1028, MAX_WIDTH + 8])
def test_widths_that_do_not(width: int) -> None:
    with pytest.raises(
        ValueError, match=rf"SETTING={width}: expected 0 .* 8 between 128 and 1048576"
    ):
        check_width(width, "SETTING")


@pytest.mark.parametrize(
    "sizes", [(0, 1, 1, 2), (1, 0, 1, 2), (1, 1, 0, 2), (1, 1, 1, 0)]
)
def test_sizes_must_be_positive(sizes: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="each must be at least 1"):
        plan_tiles(*sizes, gated=False)
