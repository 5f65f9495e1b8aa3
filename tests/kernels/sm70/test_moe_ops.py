# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The mixture-of-experts operators against references in plain torch.

Two kinds of reference, as for the linear layers. With small integers and powers of
two every product and every sum is exact, so the result must be the exact one, bit
for bit; that leaves activations that are polynomials. With random data the results
are compared with FP64, within what FP32 sums and the roundings may lose.

And two runs of the operators against each other: neither the width of a tile, nor
chunks of tokens, nor the number of rows that a kernel takes at once may show.
"""

import functools
import importlib.util
import math
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.model_executor.layers.fused_moe import sm70_ops
from vllm.model_executor.layers.fused_moe.activation import MoEActivation

from .reference import assert_same_bits, e4m3_table

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
SCALES = ["block", "row"]
# The kernels by number (csrc/sm70/moe_ops.cu): within a family the bits agree.
FAMILIES = [(1, 2, 4), (16, 64, 128)]
SILU, RELU2 = MoEActivation.SILU, MoEActivation.RELU2_NO_MUL
ROUTINGS = ["random", "mapped", "one expert", "few experts", "nobody"]


@dataclass
class Shape:
    """Sizes of a layer.

    Attributes:
        tokens: T.
        top_k: experts of a token.
        experts: local ones, unless an expert map leaves some out.
        hidden: K of the first product, and columns of the second.
        intermediate: I.

    """

    tokens: int
    top_k: int
    experts: int
    hidden: int
    intermediate: int


# K, I and N tails of every kind: less than a chunk of a warp, a stage, a block of
# scales or a tile, and more.
SHAPES = [
    Shape(19, 3, 7, 272, 144),
    Shape(1, 8, 64, 256, 128),
    Shape(5, 10, 33, 160, 272),
    Shape(70, 2, 3, 48, 80),
    Shape(150, 1, 2, 16, 16),
    Shape(7, 4, 1100, 128, 16),
]


@dataclass
class Weight:
    """A weight of every expert: [E, halves * rows, columns]."""

    codes: torch.Tensor
    scales: torch.Tensor
    values: torch.Tensor  # float32, what the two stand for


def make_weight(
    experts: int,
    halves: int,
    rows: int,
    columns: int,
    kind: str,
    device: str,
    exact: bool,
) -> Weight:
    """Return a random weight; `exact`: small integers, scales 1/2, 1, 2 or 4."""
    # 1, 1.5 and 2, with either sign; else anything but NaN.
    shape = (experts, halves * rows, columns)
    if exact:
        choice = torch.tensor([0x38, 0x3C, 0x40, 0], device=device)
        codes = choice[torch.randint(0, 4, shape, device=device)]
    else:
        codes = torch.randint(0, 0x7F, shape, device=device)
    codes = (codes + torch.randint(0, 2, shape, device=device) * 128).byte()
    if kind == "block":
        blocks = -(-rows // 128), -(-columns // 128)
        scale_shape = (experts, halves * blocks[0], blocks[1])
    else:
        scale_shape = (experts, halves * rows)
    if exact:
        scales = torch.exp2(torch.randint(-1, 3, scale_shape, device=device).float())
    else:
        scales = torch.rand(scale_shape, device=device) * 0.004
    values = e4m3_table().to(device)[codes.long()]
    if kind == "block":
        factors = scales.view(experts, halves, *blocks)
        factors = factors.repeat_interleave(128, 2).repeat_interleave(128, 3)
        factors = factors[:, :, :rows, :columns].reshape(shape)
    else:
        factors = scales[:, :, None]
    return Weight(codes, scales, values * factors)


@dataclass
class Layer:
    """A layer's weights, a batch and its routes."""

    shape: Shape
    w13: Weight
    w2: Weight
    x: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    expert_map: torch.Tensor | None
    activation: MoEActivation

    @property
    def local_experts(self) -> int:
        return self.w13.codes.shape[0]

    def local_ids(self) -> torch.Tensor:
        """Return int64 [T, k] on the CPU: local experts, -1 for none."""
        ids = self.topk_ids.long().cpu()
        known = self.shape.experts
        inside = (ids >= 0) & (ids < known)
        table = torch.arange(known)
        if self.expert_map is not None:
            table = self.expert_map.long().cpu()
        return torch.where(inside, table[ids.clamp(0, known - 1)], -1)


def make_layer(
    shape: Shape,
    kind: str = "block",
    dtype: torch.dtype = torch.float16,
    device: str = "cpu",
    routing: str = "random",
    activation: MoEActivation = SILU,
    exact: bool = False,
) -> Layer:
    """Return a random layer with one of `ROUTINGS`."""
    expert_map, local = None, shape.experts
    if routing == "mapped":
        kept = torch.rand(shape.experts) < 0.6
        kept[0] = True
        local = int(kept.sum())
        expert_map = torch.where(kept, kept.cumsum(0) - 1, -1).int().to(device)
    size = (shape.tokens, shape.top_k)
    if routing == "one expert":
        ids = torch.full(size, shape.experts // 2)
    elif routing == "few experts":
        ids = torch.randint(0, max(1, shape.experts // 3), size)
    elif routing == "nobody":
        ids = torch.full(size, -1)
    else:
        # Some absent, and some beyond all experts.
        ids = torch.randint(-1, shape.experts + 1, size)
    halves = 2 if activation.is_gated else 1
    w13 = make_weight(
        local, halves, shape.intermediate, shape.hidden, kind, device, exact
    )
    w2 = make_weight(local, 1, shape.hidden, shape.intermediate, kind, device, exact)
    # Rows with a distance, as slices of a wider matrix have.
    room = torch.empty(shape.tokens, shape.hidden + 8, dtype=dtype, device=device)
    x = room[:, : shape.hidden]
    if exact:
        x.copy_(torch.randint(-1, 2, x.shape))
        weights = torch.exp2(torch.randint(-1, 2, size).float())
    else:
        x.copy_(torch.randn(x.shape))
        weights = torch.rand(size)
    wide_ids = shape.tokens % 2 == 0
    return Layer(
        shape,
        w13,
        w2,
        x,
        (ids if wide_ids else ids.int()).to(device),
        weights.to(device),
        expert_map,
        activation,
    )


class Run:
    """The three operators on a layer, all outputs kept, in buffers of NaN."""

    def __init__(
        self,
        layer: Layer,
        width: int | None = None,
        config: int = -1,
        batch_tokens: int = -1,
        weights_on_input: bool = False,
        act: torch.Tensor | None = None,
    ) -> None:
        """Run it; `act` replaces the first product where it is given."""
        shape, device, dtype = layer.shape, layer.x.device, layer.x.dtype
        rows = shape.tokens * shape.top_k
        integers: dict[str, Any] = {"dtype": torch.int32, "device": device}
        floats: dict[str, Any] = {"dtype": dtype, "device": device}
        nan = float("nan")
        self.sorted_rows = torch.full((rows,), -7, **integers)
        self.offsets = torch.full((layer.local_experts + 1,), -7, **integers)
        sm70_ops.moe_route(
            layer.topk_ids, layer.expert_map, self.sorted_rows, self.offsets
        )
        self.act = torch.full((rows, shape.intermediate), nan, **floats)
        sm70_ops.fp8_moe_gate_up(
            layer.x,
            layer.w13.codes,
            layer.w13.scales,
            self.sorted_rows,
            self.offsets,
            layer.activation,
            self.act,
            topk_weights=layer.topk_weights if weights_on_input else None,
            batch_tokens=batch_tokens,
            config=config,
        )
        others = rows - shape.tokens  # than each token's first
        partial = torch.full((others, width or shape.hidden), nan, **floats)
        self.whole = torch.full((shape.tokens, shape.hidden + 16), 7.0, **floats)
        self.out = self.whole[:, 8 : 8 + shape.hidden]
        self.out.fill_(nan)
        sm70_ops.fp8_moe_down(
            self.act if act is None else act,
            layer.w2.codes,
            layer.w2.scales,
            self.sorted_rows,
            self.offsets,
            layer.topk_ids,
            layer.expert_map,
            None if weights_on_input else layer.topk_weights,
            partial,
            self.out,
            batch_tokens,
            config,
        )
        self.here = int(self.offsets[-1])
        # Nothing is written where no position is, nor beside `out`.
        assert self.act[self.here :].isnan().all()
        assert (self.whole[:, :8] == 7).all()
        assert (self.whole[:, 8 + shape.hidden :] == 7).all()


def positions(layer: Layer) -> Iterator[tuple[int, int]]:
    """Yield (row, local expert) in the order of the positions."""
    ids = layer.local_ids().flatten()
    for expert in range(layer.local_experts):
        for row in (ids == expert).nonzero().flatten().tolist():
            yield row, expert


def doubles(weight: Weight) -> Callable[[int], torch.Tensor]:
    """Return what gives an expert's values in FP64 on the CPU."""
    return functools.cache(lambda expert: weight.values[expert].double().cpu())


def activate(activation: MoEActivation, x: torch.Tensor) -> torch.Tensor:
    """Compute the activation without its product with up, in the dtype of x."""
    name = activation.value.removesuffix("_no_mul")
    if name == "silu":
        return x / (1 + torch.exp(-x))
    if name == "gelu":
        return x * 0.5 * torch.erfc(-x / math.sqrt(2))
    if name == "gelu_tanh":
        return (
            0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
        )
    return x.clamp_min(0) ** 2


def first_product(
    layer: Layer, weights_on_input: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the activated rows in FP64, and how far FP32 sums may be off."""
    count = layer.shape.intermediate
    x, expert_values = layer.x.double().cpu(), doubles(layer.w13)
    weights = layer.topk_weights.double().cpu().flatten()
    rows, bounds = [], []
    for row, expert in positions(layer):
        token = x[row // layer.shape.top_k]
        values = expert_values(expert)
        products = values @ token
        errors = values.abs() @ token.abs() * 2.0**-19
        if weights_on_input:
            products, errors = products * weights[row], errors * weights[row]
        gate, gate_error = products[:count], errors[:count]
        result = activate(layer.activation, gate)
        # No activation here is steeper than 1.2, but for the square.
        slope = 2 * gate.abs() if layer.activation is RELU2 else 1.2
        bound = gate_error * slope
        if layer.activation.is_gated:
            up, up_error = products[count:], errors[count:]
            bound = bound * up.abs() + result.abs() * up_error
            result = result * up
        rows.append(result)
        bounds.append(bound)
    empty = torch.empty(0, count, dtype=torch.float64)
    if not rows:
        return empty, empty
    return torch.stack(rows), torch.stack(bounds)


def second_product(
    layer: Layer, act: torch.Tensor, weights_on_input: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the layer's result in FP64, and how far it may be off before the last
    rounding; each row's part is rounded to the dtype of `act` as well."""
    eps = torch.finfo(act.dtype).eps / 2
    out = torch.zeros(layer.shape.tokens, layer.shape.hidden, dtype=torch.float64)
    bound = torch.zeros_like(out)
    expert_values = doubles(layer.w2)
    weights = layer.topk_weights.double().cpu().flatten()
    for position, (row, expert) in enumerate(positions(layer)):
        rounded = act[position].double().cpu()
        values = expert_values(expert)
        part = values @ rounded
        error = values.abs() @ rounded.abs() * 2.0**-19 + part.abs() * eps
        if not weights_on_input:
            part, error = part * weights[row], error * weights[row]
        out[row // layer.shape.top_k] += part
        bound[row // layer.shape.top_k] += error
    return out, bound


def assert_within(
    actual: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor
) -> None:
    """Compare with FP64, within the bound and one rounding."""
    info = torch.finfo(actual.dtype)
    # A few of the least numbers for parts that were rounded to zero.
    bound = bound + info.eps / 2 * (expected.abs() + bound) + 16 * info.smallest_normal
    error = (actual.double().cpu() - expected).abs()
    worst = (error / bound).nan_to_num(math.inf).max() if error.numel() else 0
    assert worst <= 1, f"error of {worst} times the bound"


def dtypes(device: str) -> list[torch.dtype]:
    floats = [torch.float16, torch.bfloat16]
    return [*floats, torch.float32] if device == "cpu" else floats


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_random_data(device: str, routing: str, kind: str, shape: Shape) -> None:
    torch.manual_seed(shape.tokens)
    for dtype in dtypes(device):
        layer = make_layer(shape, kind, dtype, device, routing)
        run = Run(layer)
        if run.here:
            assert_within(run.act[: run.here], *first_product(layer))
        assert_within(run.out, *second_product(layer, run.act))
        if routing == "nobody":
            assert (run.out == 0).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize("shape", SHAPES[:4], ids=str)
def test_exact_data(device: str, kind: str, shape: Shape) -> None:
    """A missed or doubled element, however small, shows."""
    torch.manual_seed(shape.hidden)
    dtype = torch.float16
    layer = make_layer(shape, kind, dtype, device, activation=RELU2, exact=True)
    run = Run(layer)
    assert run.here > 0
    assert_same_bits(run.act[: run.here], first_product(layer)[0].to(dtype))
    # The second product of small integers, whose parts are exact in FP16.
    act = torch.randint(-1, 2, run.act.shape, device=device).to(dtype)
    act[run.here :] = math.nan
    expected = second_product(layer, act)[0]
    assert_same_bits(Run(layer, act=act).out, expected.to(dtype))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("activation", sm70_ops.ACTIVATIONS, ids=str)
@pytest.mark.parametrize("weights_on_input", [False, True])
def test_activations(
    device: str, activation: MoEActivation, weights_on_input: bool
) -> None:
    torch.manual_seed(0)
    for kind in SCALES:
        for dtype in dtypes(device):
            layer = make_layer(
                Shape(23, 2, 5, 80, 144), kind, dtype, device, activation=activation
            )
            run = Run(layer, weights_on_input=weights_on_input)
            expected = first_product(layer, weights_on_input)
            assert_within(run.act[: run.here], *expected)
            assert_within(run.out, *second_product(layer, run.act, weights_on_input))


@st.composite
def layers(draw: st.DrawFn) -> Layer:
    sixteens = st.integers(1, 20).map(lambda n: 16 * n)
    shape = Shape(
        draw(st.integers(0, 40)),
        draw(st.integers(1, 10)),
        draw(st.integers(1, 12)),
        draw(sixteens),
        draw(sixteens),
    )
    torch.manual_seed(draw(st.integers(0, 2**32)))
    return make_layer(
        shape,
        draw(st.sampled_from(SCALES)),
        draw(st.sampled_from(dtypes("cpu"))),
        "cpu",
        draw(st.sampled_from(ROUTINGS)),
        draw(st.sampled_from(sm70_ops.ACTIVATIONS)),
    )


def slice_of(layer: Layer, begin: int, end: int) -> Layer:
    shape = Shape(**{**vars(layer.shape), "tokens": end - begin})
    return Layer(
        shape,
        layer.w13,
        layer.w2,
        layer.x[begin:end],
        layer.topk_ids[begin:end],
        layer.topk_weights[begin:end],
        layer.expert_map,
        layer.activation,
    )


def assert_chunks_do_not_show(layer: Layer, chunk: int, whole: torch.Tensor) -> None:
    tokens = layer.shape.tokens
    for begin in range(0, tokens, chunk):
        end = min(begin + chunk, tokens)
        part = Run(slice_of(layer, begin, end), batch_tokens=tokens)
        assert_same_bits(part.out, whole[begin:end])


@settings(max_examples=60, deadline=None)
@given(layers(), st.integers(1, 24), st.integers(1, 41))
def test_any_layer(layer: Layer, sixteens: int, chunk: int) -> None:
    run = Run(layer)
    if run.here:
        assert_within(run.act[: run.here], *first_product(layer))
    assert_within(run.out, *second_product(layer, run.act))
    tiled = Run(layer, width=16 * sixteens)
    assert_same_bits(tiled.out, run.out)
    assert_chunks_do_not_show(layer, chunk, run.out)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize("routing", ["random", "mapped", "one expert"])
def test_neither_tiles_nor_chunks_show(device: str, kind: str, routing: str) -> None:
    torch.manual_seed(2)
    for tokens in (60, 130):  # of the kernels for decode and for prefill
        shape = Shape(tokens, 4, 130, 208, 144)
        layer = make_layer(shape, kind, torch.float16, device, routing)
        whole = Run(layer)
        for width in (16, 128, 144, 208, 512):
            assert_same_bits(Run(layer, width=width).out, whole.out)
        for chunk in (9, 33, 64, tokens - 1):
            assert_chunks_do_not_show(layer, chunk, whole.out)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("top_k", [1, 2, 8, 10])
def test_the_sum_over_the_experts(device: str, top_k: int) -> None:
    """In ascending order, of rounded rows, at any width; absent rows are not read,
    nor is the place of the first one in the output."""
    torch.manual_seed(top_k)
    shape = Shape(21, top_k, 40, 272, 80)
    for dtype in dtypes(device):
        layer = make_layer(shape, "block", dtype, device, "mapped")
        assert layer.expert_map is not None
        absent = int((layer.expert_map < 0).nonzero()[0])
        layer.topk_ids[::4, 0] = absent
        layer.topk_ids[1::4] = absent
        layer.topk_ids[2::4, 1:] = absent
        layer.topk_ids[2::4, 0] = int((layer.expert_map >= 0).nonzero()[0])
        for config in (1, 2, 4, 16, -16, 64, -64, 128) if device == "cuda" else (-1,):
            expected = torch.zeros(21, 272, device=device)
            for j in range(top_k):
                only = torch.full_like(layer.topk_ids, absent)
                only[:, j] = layer.topk_ids[:, j]
                expected += Run(replace(layer, topk_ids=only), config=config).out
            expected = expected.to(dtype)
            assert expected[1::4].eq(0).all() and expected[2::4].ne(0).any()
            for width in (None, 16, 96, 128, 512):
                out = Run(layer, width=width, config=config).out
                assert_same_bits(out, expected)


@given(
    st.lists(st.integers(-3, 40), max_size=300),
    st.integers(1, 30),
    st.booleans(),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_routes(
    ids: list[int], experts: int, wide: bool, mapped: bool, random: Any
) -> None:
    check_routes(ids, experts, wide, mapped, random.sample, "cpu")


@pytest.mark.cuda
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("experts", [1, 2, 9, 256, 513])
@pytest.mark.parametrize("rows", [0, 1, 31, 257, 8191, 65536, 70001])
def test_routes_on_cuda(rows: int, experts: int, wide: bool, mapped: bool) -> None:
    random.seed(rows)
    ids = [random.randint(-3, experts + 3) for _ in range(rows)]
    check_routes(ids, experts, wide, mapped, random.sample, "cuda")


def check_routes(
    ids: list[int], experts: int, wide: bool, mapped: bool, sample: Any, device: str
) -> None:
    dtype = torch.int64 if wide else torch.int32
    table = list(range(experts))
    expert_map = None
    if mapped:
        kept = sample(range(experts), (experts + 1) // 2)
        table = [kept.index(e) if e in kept else -1 for e in range(experts)]
        expert_map = torch.tensor(table, dtype=torch.int32, device=device)
    local = max(table) + 1
    topk_ids = torch.tensor(ids, dtype=dtype, device=device).view(-1, 1)
    rows = torch.full((len(ids),), -7, dtype=torch.int32, device=device)
    offsets = torch.full((local + 1,), -7, dtype=torch.int32, device=device)
    sm70_ops.moe_route(topk_ids, expert_map, rows, offsets)
    of = [table[e] if 0 <= e < experts else -1 for e in ids]
    expected = sorted((e, r) for r, e in enumerate(of) if e >= 0)
    assert rows.tolist()[: len(expected)] == [r for _, r in expected]
    bounds = [sum(e < b for e, _ in expected) for b in range(local + 1)]
    assert offsets.tolist() == bounds


@pytest.mark.parametrize("device", DEVICES)
def test_nan_reaches_its_own_place_only(device: str) -> None:
    """A NaN code of an up row, one of a gate row of another expert, and NaN in the
    rows of `act` that no position has."""
    layer = make_layer(Shape(9, 2, 3, 48, 32), device=device)
    layer.topk_ids.copy_(torch.tensor([[0, 1], [2, -1], [1, 2]] * 3))
    layer.w13.codes[1, 32 + 5, 3] = 0x7F
    layer.w13.codes[2, 9, -1] = 0xFF
    run = Run(layer)
    expected = torch.zeros(run.here, 32, dtype=torch.bool)
    expected[3:9, 5] = True
    expected[9:, 9] = True
    assert torch.equal(run.act[: run.here].isnan().cpu(), expected)
    finite = torch.zeros_like(run.act)
    finite[run.here :] = math.nan
    assert (Run(layer, act=finite).out == 0).all()


@pytest.mark.cuda
@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize("activation", [SILU, RELU2], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_kernel(kind: str, activation: MoEActivation, shape: Shape) -> None:
    """At numbers of rows that fit them or not: the same bits within a family."""
    torch.manual_seed(1)
    for dtype in dtypes("cuda"):
        layer = make_layer(shape, kind, dtype, "cuda", activation=activation)
        for family in FAMILIES:
            runs = [Run(layer, config=config) for config in family]
            assert_within(runs[0].act[: runs[0].here], *first_product(layer))
            assert_within(runs[0].out, *second_product(layer, runs[0].act))
            for run in runs[1:]:
                assert_same_bits(run.act[: run.here], runs[0].act[: run.here])
                assert_same_bits(run.out, runs[0].out)


@pytest.mark.cuda
@pytest.mark.parametrize("tokens", [1, 8, 64, 1024])
def test_full_size(tokens: int) -> None:
    """The 35B-A3B layer, all multiprocessors busy, experts with and without rows."""
    torch.manual_seed(tokens)
    shape = Shape(tokens, 8, 256, 2048, 512)
    layer = make_layer(shape, device="cuda", routing="few experts")
    run = Run(layer, width=256)
    chosen = torch.randperm(tokens)[:3].tolist()
    for token in chosen:
        one = slice_of(layer, token, token + 1)
        again = Run(one, batch_tokens=tokens)
        assert_same_bits(again.out[0], run.out[token])
        assert_within(again.act[: again.here], *first_product(one))
        assert_within(again.out, *second_product(one, again.act))


@pytest.mark.cuda
@pytest.mark.parametrize("tokens", [1, 16, 200])
def test_cuda_graph_replays_with_other_routes(tokens: int) -> None:
    shape = Shape(tokens, 4, 96, 256, 144)
    layer = make_layer(shape, device="cuda", routing="mapped")
    rows = tokens * shape.top_k
    options: dict[str, Any] = {"device": "cuda"}
    sorted_rows = torch.empty(rows, dtype=torch.int32, **options)
    offsets = torch.empty(layer.local_experts + 1, dtype=torch.int32, **options)
    act = torch.empty(rows, 144, dtype=torch.float16, **options)
    partial = torch.empty(rows - tokens, 128, dtype=torch.float16, **options)
    out = torch.empty(tokens, 256, dtype=torch.float16, **options)

    def run() -> None:
        routes = sorted_rows, offsets
        sm70_ops.moe_route(layer.topk_ids, layer.expert_map, *routes)
        first = layer.w13.codes, layer.w13.scales
        sm70_ops.fp8_moe_gate_up(layer.x, *first, *routes, SILU, act)
        sm70_ops.fp8_moe_down(
            act,
            layer.w2.codes,
            layer.w2.scales,
            *routes,
            layer.topk_ids,
            layer.expert_map,
            layer.topk_weights,
            partial,
            out,
        )

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for low, high in ((0, 96), (5, 6), (-1, 0)):
        layer.topk_ids.random_(low, high)
        layer.x.normal_()
        layer.topk_weights.uniform_()
        out.fill_(math.nan)
        graph.replay()
        assert_same_bits(out, Run(layer).out)


def good_arguments(operator: str, device: str) -> dict[str, Any]:
    layer = make_layer(Shape(4, 2, 3, 64, 32), device=device)
    run = Run(layer)
    routes = {"sorted_rows": run.sorted_rows, "expert_offsets": run.offsets}
    choice = {"topk_ids": layer.topk_ids, "expert_map": None}
    if operator == "moe_route":
        return choice | routes
    if operator == "fp8_moe_gate_up":
        return {
            "x": layer.x.contiguous(),
            "w13": layer.w13.codes,
            "w13_scale": layer.w13.scales,
            **routes,
            "activation": SILU,
            "out": run.act,
            "topk_weights": layer.topk_weights,
        }
    return {
        "act": run.act,
        "w2": layer.w2.codes,
        "w2_scale": layer.w2.scales,
        **routes,
        **choice,
        "topk_weights": layer.topk_weights,
        "partial": torch.empty_like(run.act[:4]),
        "out": run.out.contiguous(),
    }


BAD_ARGUMENTS = [
    ("moe_route", "topk_ids", lambda t: t.float(), r"must be torch\.int32 or torch\."),
    ("moe_route", "topk_ids", lambda t: t[0], r"must have two dimensions, \[T, top_k"),
    ("moe_route", "topk_ids", lambda t: t.t(), r"must be contiguous"),
    ("moe_route", "expert_map", lambda t: torch.zeros(3), r"must be torch\.int32; got"),
    (
        "moe_route",
        "sorted_rows",
        lambda t: t.long(),
        r"must be torch\.int32; got torch\.i",
    ),
    (
        "moe_route",
        "sorted_rows",
        lambda t: t[:7],
        r"must have shape \[8\], .*; got \[7\]",
    ),
    (
        "moe_route",
        "expert_offsets",
        lambda t: t[:1],
        r"must have at least two elements",
    ),
    ("fp8_moe_gate_up", "x", lambda t: t.double(), r"must be torch\.float16 or"),
    ("fp8_moe_gate_up", "x", lambda t: t[:, :48], r"must have shape \[4, 64\], \[T, K"),
    (
        "fp8_moe_gate_up",
        "x",
        lambda t: t.t().contiguous().t(),
        r"must have rows of neig",
    ),
    ("fp8_moe_gate_up", "w13", lambda t: t.half(), r"must be torch\.float8_e4m3fn or"),
    (
        "fp8_moe_gate_up",
        "w13",
        lambda t: t[0],
        r"must have shape \[local experts, 2 \*",
    ),
    (
        "fp8_moe_gate_up",
        "w13",
        lambda t: t[:2],
        r"must have shape \[3, 64, 64\], .*\[2,",
    ),
    ("fp8_moe_gate_up", "w13", lambda t: t[:, :32], r"must be contiguous"),
    (
        "fp8_moe_gate_up",
        "w13",
        lambda t: t[:, :, :56].contiguous(),
        r"must hold a multiple of 16 elements in each row; got K = 56",
    ),
    ("fp8_moe_gate_up", "w13_scale", lambda t: t.half(), r"must be torch\.float32"),
    (
        "fp8_moe_gate_up",
        "w13_scale",
        lambda t: t[:, :1],
        r"must have shape \[3, 2, 1\], .*gate and up have.*\[3, 64\], one for each row",
    ),
    (
        "fp8_moe_gate_up",
        "sorted_rows",
        lambda t: t[:7],
        r"must have top_k elements for",
    ),
    ("fp8_moe_gate_up", "out", lambda t: t.bfloat16(), r"must be torch\.float16; got"),
    (
        "fp8_moe_gate_up",
        "out",
        lambda t: t[:7],
        r"must have shape \[8, 32\], .*\[7, 32",
    ),
    ("fp8_moe_gate_up", "out", lambda t: t[:, :16], r"must be contiguous"),
    ("fp8_moe_gate_up", "topk_weights", lambda t: t.half(), r"must be torch\.float32"),
    ("fp8_moe_gate_up", "topk_weights", lambda t: t[:3], r"must have shape \[4, 2\]"),
    ("fp8_moe_down", "act", lambda t: t.bfloat16(), r""),
    ("fp8_moe_down", "act", lambda t: t[:7], r"must have shape \[8, 32\], .*; got \[7"),
    ("fp8_moe_down", "w2", lambda t: t[:, :48], r"must be contiguous"),
    (
        "fp8_moe_down",
        "w2_scale",
        lambda t: t[:2],
        r"must have shape \[3, 1, 1\], .*or \[",
    ),
    ("fp8_moe_down", "topk_ids", lambda t: t[:3], r""),
    ("fp8_moe_down", "topk_weights", lambda t: t[:3], r"must have shape \[4, 2\], \[T"),
    ("fp8_moe_down", "partial", lambda t: t.float(), r"must be torch\.float16; got"),
    (
        "fp8_moe_down",
        "partial",
        lambda t: t[:3],
        r"must have shape \[4, 32\], \[T \* \(top_k - 1\), .*\[3, 32",
    ),
    (
        "fp8_moe_down",
        "partial",
        lambda t: t[:, :24].contiguous(),
        r"must have a width that is a multiple of 16 columns, 16 at least; got 24",
    ),
    (
        "fp8_moe_down",
        "out",
        lambda t: t[:3],
        r"must have shape \[4, 64\], .*; got \[3,",
    ),
    (
        "fp8_moe_down",
        "out",
        lambda t: t.repeat(1, 2)[:, ::2],
        r"must have rows of neighbouring elements",
    ),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("operator", "argument", "spoil", "message"), BAD_ARGUMENTS)
def test_bad_arguments(
    device: str, operator: str, argument: str, spoil: Any, message: str
) -> None:
    good = good_arguments(operator, device)
    call = getattr(sm70_ops, operator)
    call(**good)
    # Where two arguments disagree, the error may name the other.
    named = rf"{argument} {message}" if message else r"\w+ must "
    with pytest.raises(ValueError, match=f"^{operator}: {named}"):
        call(**good | {argument: spoil(good[argument])})


@pytest.mark.parametrize("device", DEVICES)
def test_an_output_that_overlaps_is_refused(device: str) -> None:
    """As upstream's workspaces have it, with one tile as well as with more."""
    layer = make_layer(Shape(6, 4, 3, 48, 32), device=device)
    run = Run(layer)
    good = {
        "act": run.act,
        "w2": layer.w2.codes,
        "w2_scale": layer.w2.scales,
        "sorted_rows": run.sorted_rows,
        "expert_offsets": run.offsets,
        "topk_ids": layer.topk_ids,
        "expert_map": None,
        "topk_weights": layer.topk_weights,
        "partial": torch.empty(18, 48, dtype=torch.float16, device=device),
        "out": run.out,
    }
    for name in ("act", "partial"):
        inside = good | {"out": good[name].view(-1)[-6 * 48 :].view(6, 48)}
        message = f"fp8_moe_down: out must not overlap {name}"
        with pytest.raises(ValueError, match=message):
            sm70_ops.fp8_moe_down(**inside)


@pytest.mark.parametrize("activation", ["swigluoai", MoEActivation.SWIGLUSTEP])
def test_unknown_activation(activation: Any) -> None:
    good = good_arguments("fp8_moe_gate_up", "cpu")
    with pytest.raises(ValueError, match="activation = .*: expected one of silu, gelu"):
        sm70_ops.fp8_moe_gate_up(**good | {"activation": activation})


def test_rows_of_a_half_are_a_multiple_of_16() -> None:
    good = good_arguments("fp8_moe_gate_up", "cpu")
    bad = {
        "w13": good["w13"][:, :48].contiguous(),
        "out": good["out"][:, :24].contiguous(),
    }
    with pytest.raises(ValueError, match="w13 must have a multiple of 16 rows .* 24"):
        sm70_ops.fp8_moe_gate_up(**good | bad)


@pytest.mark.parametrize(
    ("operator", "argument"),
    [("fp8_moe_gate_up", "expert_offsets"), ("fp8_moe_down", "sorted_rows")],
)
def test_routes_that_are_none(operator: str, argument: str) -> None:
    """The CPU looks at them; on CUDA that would mean to wait for the device."""
    good = good_arguments(operator, "cpu")
    good[argument][0] = 999
    message = "expert_offsets must rise|sorted_rows holds 999, expected 0"
    with pytest.raises(ValueError, match=message):
        getattr(sm70_ops, operator)(**good)


@pytest.mark.cuda
@pytest.mark.parametrize("argument", ["x", "w13", "out"])
def test_misaligned_views(argument: str) -> None:
    good = good_arguments("fp8_moe_gate_up", "cuda")
    tensor = good[argument]
    room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device="cuda")
    bad = good | {argument: room[1:].view(tensor.shape)}
    with pytest.raises(ValueError, match=f"{argument} must start at a multiple of"):
        sm70_ops.fp8_moe_gate_up(**bad)


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"config": 3}, "config = 3: there is no such kernel"),
        ({"config": -2}, "config = -2: there is no such kernel"),
        ({"batch_tokens": 3}, "batch_tokens = 3: expected at least the 4 tokens"),
    ],
)
def test_bad_choices(option: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sm70_ops.fp8_moe_gate_up(**good_arguments("fp8_moe_gate_up", "cuda") | option)


_HASH_OF_A_LAYER = """
import hashlib
import sys

import torch

torch.ops.load_library(sys.argv[1])
ops = torch.ops._sm70_C
torch.manual_seed(0)
state = hashlib.sha256()
ids = torch.randint(-1, 5, (37, 3))
rows, offsets = torch.empty(111).int(), torch.empty(6).int()
ops.moe_route(ids, None, rows, offsets)
w13 = torch.randint(0, 256, (5, 160, 272)).byte() & 0xB7
w2 = torch.randint(0, 256, (5, 272, 80)).byte() & 0xB7
s13, s2, weights = torch.rand(5, 2, 3), torch.rand(5, 272), torch.rand(37, 3)
for dtype in (torch.float16, torch.bfloat16, torch.float32):
    x = torch.randn(37, 272).to(dtype) * 0.1
    for activation in range(7):
        first = w13 if activation < 3 else w13[:, :80].contiguous()
        scales = s13 if activation < 3 else s13[:, :1].contiguous()
        act, partial = torch.zeros(111, 80).to(dtype), torch.empty(74, 48).to(dtype)
        out = torch.empty_like(x)
        ops.fp8_moe_gate_up(x, first, scales, rows, offsets, None, act, activation)
        ops.fp8_moe_down(
            act, w2, s2, rows, offsets, ids, None, weights, partial, out
        )
        for tensor in (act, out):
            assert tensor.isfinite().all()
            state.update(tensor.view(torch.uint8).numpy().tobytes())
print(state.hexdigest())
"""


def test_instruction_sets_agree() -> None:
    """Every version of the CPU kernels that this machine can run."""
    flags = set(Path("/proc/cpuinfo").read_text().split())
    usable = ["baseline"]
    usable += ["avx2"] * ("avx2" in flags)
    usable += ["avx512"] * ({"avx512bw", "avx512dq", "avx512vl"} <= flags)
    spec = importlib.util.find_spec("vllm._sm70_C")
    assert spec is not None and spec.origin is not None
    hashes = {
        subprocess.run(
            [sys.executable, "-c", _HASH_OF_A_LAYER, spec.origin],
            env={**os.environ, "VLLM_SM70_CPU_ISA": isa},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for isa in usable
    }
    assert len(hashes) == 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("operator", ["moe_route", "fp8_moe_gate_up", "fp8_moe_down"])
def test_torch_accepts_the_operators(device: str, operator: str) -> None:
    good = good_arguments(operator, device)
    if operator == "fp8_moe_gate_up":
        good["activation"] = 0
    names = [
        a.name for a in getattr(torch.ops._sm70_C, operator).default._schema.arguments
    ]
    arguments = tuple(good[name] for name in names if name in good)
    torch.library.opcheck(getattr(torch.ops._sm70_C, operator).default, arguments)
