# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The fused small-batch multiplications against references in plain torch.

Two kinds of reference. With small integers and powers of two every product and
every partial sum is exact in FP32, whatever the order: the result must be the
exact sum, rounded once, bit for bit, so that a missed or doubled element, however
small, shows. With random data the result is compared with FP64, within what FP32
sums may lose.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from vllm.model_executor.kernels.linear.sm70 import ops

from .reference import (
    assert_same_bits,
    e2m1_table,
    e4m3_table,
    fp8_reference,
    nvfp4_reference,
)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
FORMATS = ["nvfp4", "fp8-block", "fp8-row"]
TOKENS = [*range(1, 18), 31, 32, 33, 64, 127, 128]
# K, N. K of every shard of the 27B class, and of less than a chunk, a warp, a
# block or a stage; N of a ragged shard, and of less than any tile.
SHAPES = [
    (5120, 4120),
    (5120, 3584),
    (17408, 24),
    (8704, 24),
    (4352, 8),
    (6144, 24),
    (3072, 8),
    (1536, 3584),
    (16, 8),
    (32, 1),
    (48, 33),
    (272, 130),
    (5136, 24),
]
# The kernels by number (csrc/sm70/small_gemm.cu), and what K must be a multiple of.
NVFP4_CONFIGS = {
    **dict.fromkeys([0, 10, 11, 12, 13, 15, 16, 17, 23, 25, 26, 27], 32),
    **dict.fromkeys([1, 2, 3, 7, 8, 20, 21, 22, 24], 16),
    **dict.fromkeys([30, 31], 32),
}
NEW_INSTRUCTION = {10, 11, 12, 13, 30, 31}
"""Kernels of one instruction that came with 8.0."""
ONE_ROW = {30, 31}
"""Kernels for one row of x."""
FP8_CONFIGS = dict.fromkeys([1, 2, 3, 6, 20, 21, 22, 23], 16)


@dataclass
class Weight:
    """A weight's tensors, as the operator takes them, and its elements."""

    operator: Callable[..., None]
    tensors: tuple[torch.Tensor, ...]
    values: torch.Tensor  # float32 [N, K], what the tensors stand for


def make_weight(kind: str, rows: int, columns: int, device: str, exact: bool) -> Weight:
    """Return a random weight.

    Args:
        kind: one of `FORMATS`.
        rows: N.
        columns: K.
        device: for all tensors.
        exact: scales are powers of two, and elements multiples of 2^-4 below 2^7.

    """

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, device=device)

    if kind == "nvfp4":
        packed = integers(0, 256, rows, columns // 2).byte()
        # Exponents 7 +- 2: 0.25 to 4. Else anything but NaN.
        scales = integers(0, 127, rows, columns // 16) | integers(0, 2, 1, 1) << 7
        if exact:
            scales = integers(5, 10, rows, columns // 16) << 3
        scales = scales.byte()
        global_scale = torch.tensor(0.5 if exact else 0.0123, device=device)
        codes = torch.stack((packed & 15, packed >> 4), -1).long()
        factors = e4m3_table().to(device)[scales.long()] * global_scale
        values = (
            e2m1_table().to(device)[codes].view(*scales.shape, 16) * factors[..., None]
        )
        return Weight(
            ops.nvfp4_small_gemm,
            (packed, scales, global_scale),
            values.view(rows, columns),
        )
    # Magnitudes of exponents 7 to 10, 1 to 15; else anything but NaN.
    low, high = (0x38, 0x58) if exact else (0, 0x7F)
    codes = integers(low, high, rows, columns) + integers(0, 2, rows, columns) * 128
    codes = codes.byte()
    shape = (-(-rows // 128), -(-columns // 128)) if kind == "fp8-block" else (rows, 1)
    if exact:
        scales = torch.exp2(integers(-1, 3, *shape).float())
    else:
        scales = torch.rand(shape, device=device) * 0.01
    factors = scales
    if kind == "fp8-block":
        factors = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
        factors = factors[:rows, :columns]
    values = e4m3_table().to(device)[codes.long()] * factors
    return Weight(ops.fp8_small_gemm, (codes, scales), values)


class Output:
    """A matrix of NaN in the middle of a wider one, which must stay as it is."""

    def __init__(self, rows: int, columns: int, dtype: torch.dtype, device: str):
        self.whole = torch.full((rows, columns + 9), 7.0, dtype=dtype, device=device)
        self.inner = self.whole[:, 3 : columns + 3]
        self.inner.fill_(float("nan"))

    def assert_nothing_outside(self) -> None:
        assert (self.whole[:, :3] == 7).all()
        assert (self.whole[:, self.inner.shape[1] + 3 :] == 7).all()


def dtypes(device: str) -> list[torch.dtype]:
    floats = [torch.float16, torch.bfloat16]
    return [*floats, torch.float32] if device == "cpu" else floats


def assert_close_to_float64(
    out: torch.Tensor,
    x: torch.Tensor,
    values: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> None:
    """Compare with FP64, within the bound of FP32 sums and one rounding.

    An FP32 sum of terms t, made by a tree of additions that is d deep, is off by
    at most about d * 2^-24 * sum |t|. The deepest trees here, those of a tensor
    core, have K / 16 steps, whose additions may cut instead of round (2^-23).
    """
    products = x.double() @ values.double().t()
    terms = x.double().abs() @ values.double().abs().t()
    if bias is not None:
        products += bias.double()
        terms += bias.double().abs()
    depth = 2 * (x.shape[1] / 16 + 64)
    bound = depth * 2.0**-24 * terms
    # Half a unit in the last place, of numbers down to the least normal one.
    info = torch.finfo(out.dtype)
    bound += info.eps / 2 * (products.abs() + bound).clamp_min(info.tiny)
    error = (out.double() - products).abs()
    worst = (error / bound).nan_to_num(float("inf")).max()
    assert worst <= 1, f"error of {worst} times the bound"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(("columns", "rows"), SHAPES)
def test_exact_sums(device: str, kind: str, columns: int, rows: int) -> None:
    torch.manual_seed(columns + rows)
    weight = make_weight(kind, rows, columns, device, exact=True)
    all_x = torch.randint(-2, 3, (max(TOKENS), columns), device=device)
    expected = all_x.float() @ weight.values.t()
    for tokens in TOKENS:
        for dtype in dtypes(device):
            if dtype is not torch.float16 and tokens not in (1, 2, 4, 5, 33):
                continue
            out = Output(tokens, rows, dtype, device)
            x = all_x[:tokens].to(dtype)
            weight.operator(x, *weight.tensors, None, out.inner)
            assert_same_bits(out.inner, expected[:tokens].to(dtype))
            out.assert_nothing_outside()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(("columns", "rows"), [(5120, 136), (17408, 24), (272, 33)])
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 7, 16, 40, 100])
def test_random_data(
    device: str, kind: str, columns: int, rows: int, tokens: int
) -> None:
    torch.manual_seed(tokens)
    weight = make_weight(kind, rows, columns, device, exact=False)
    for dtype in dtypes(device):
        # Rows with a distance, as slices of a wider matrix have.
        x = torch.randn(tokens, columns + 8, device=device).to(dtype)[:, :columns]
        bias = torch.randn(rows, device=device).to(dtype)
        for some_bias in (None, bias):
            out = Output(tokens, rows, dtype, device)
            weight.operator(x, *weight.tensors, some_bias, out.inner)
            assert_close_to_float64(out.inner, x, weight.values, some_bias)
            out.assert_nothing_outside()
            again = torch.empty_like(out.inner)
            weight.operator(x, *weight.tensors, some_bias, again)
            assert_same_bits(again, out.inner)


def test_the_references_agree() -> None:
    """`make_weight` says what dequantisation's own reference says."""
    for kind in FORMATS:
        weight = make_weight(kind, 130, 272, "cpu", exact=False)
        reference = nvfp4_reference if kind == "nvfp4" else fp8_reference
        assert_same_bits(weight.values, reference(*weight.tensors, torch.float32))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("tokens", [1, 2, 4, 5, 20, 40])
def test_nan_reaches_its_column_only(device: str, kind: str, tokens: int) -> None:
    weight = make_weight(kind, 40, 288, device, exact=True)
    codes = weight.tensors[1 if kind == "nvfp4" else 0]
    codes[7, 3] = 0x7F
    codes[39, -1] = 0xFF
    for dtype in dtypes(device):
        x = torch.zeros(tokens, 288, dtype=dtype, device=device)
        out = Output(tokens, 40, dtype, device)
        weight.operator(x, *weight.tensors, None, out.inner)
        expected = torch.zeros_like(out.inner)
        expected[:, [7, 39]] = float("nan")
        assert_same_bits(out.inner.abs(), expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", FORMATS)
def test_nothing_to_do(device: str, kind: str) -> None:
    weight = make_weight(kind, 24, 64, device, exact=True)
    x = torch.empty(0, 64, dtype=torch.float16, device=device)
    out = torch.empty(0, 24, dtype=torch.float16, device=device)
    weight.operator(x, *weight.tensors, None, out)
    empty = make_weight(kind, 0, 64, device, exact=True)
    x = torch.ones(3, 64, dtype=torch.float16, device=device)
    out = torch.empty(3, 0, dtype=torch.float16, device=device)
    empty.operator(x, *empty.tensors, None, out)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens", [1, 4, 9])
def test_no_columns_leave_the_bias(device: str, tokens: int) -> None:
    weight = make_weight("nvfp4", 24, 0, device, exact=True)
    bias = torch.randn(24, device=device).half()
    out = Output(tokens, 24, torch.float16, device)
    x = torch.empty(tokens, 0, dtype=torch.float16, device=device)
    weight.operator(x, *weight.tensors, bias, out.inner)
    assert_same_bits(out.inner, bias.expand(tokens, 24))


@pytest.mark.cuda
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("columns", [5120, 272, 48])
@pytest.mark.parametrize("splits", [0, 1, 3])
def test_every_kernel(kind: str, columns: int, splits: int) -> None:
    """The kernels that a benchmark may ask for, at M that fit them or not."""
    torch.manual_seed(columns)
    weight = make_weight(kind, 136, columns, "cuda", exact=True)
    configs = NVFP4_CONFIGS if kind == "nvfp4" else FP8_CONFIGS
    if torch.cuda.get_device_capability() < (8, 0):
        configs = {n: k for n, k in configs.items() if n not in NEW_INSTRUCTION}
    for config, multiple in configs.items():
        for tokens in (1, 3, 4, 16, 50, 130):
            x = torch.randint(-2, 3, (tokens, columns), device="cuda")
            out = Output(tokens, 136, torch.float16, "cuda")
            arguments = x.half(), *weight.tensors, None, out.inner
            if columns % multiple or (config in ONE_ROW and tokens > 1):
                with pytest.raises(ValueError, match=f"config = {config}: there is no"):
                    weight.operator(*arguments, config)
                continue
            weight.operator(*arguments, config + 100 * splits)
            assert_same_bits(out.inner, (x.float() @ weight.values.t()).half())
            out.assert_nothing_outside()


@pytest.mark.cuda
@pytest.mark.parametrize("columns", [20480, 20512])
def test_one_row_of_a_deep_weight(columns: int) -> None:
    """The kernels for one row keep x in shared memory, as far as it goes."""
    torch.manual_seed(columns)
    weight = make_weight("nvfp4", 72, columns, "cuda", exact=True)
    x = torch.randint(-2, 3, (1, columns), device="cuda")
    expected = (x.double() @ weight.values.double().t()).half()
    out = Output(1, 72, torch.float16, "cuda")
    weight.operator(x.half(), *weight.tensors, None, out.inner)
    assert_same_bits(out.inner, expected)
    out.assert_nothing_outside()
    if columns > 20480 or torch.cuda.get_device_capability() < (8, 0):
        with pytest.raises(ValueError, match="config = 30: there is no such kernel"):
            weight.operator(x.half(), *weight.tensors, None, out.inner, 30)


@pytest.mark.cuda
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(
    ("columns", "rows"), [(5120, 34816), (17408, 5120), (5120, 16384), (6144, 5120)]
)
def test_full_size(kind: str, columns: int, rows: int) -> None:
    """Grids of the real shapes, all multiprocessors busy."""
    torch.manual_seed(0)
    weight = make_weight(kind, rows, columns, "cuda", exact=True)
    for tokens in (1, 2, 4, 8, 16, 32, 64, 128):
        x = torch.randint(-2, 3, (tokens, columns), device="cuda")
        out = Output(tokens, rows, torch.float16, "cuda")
        weight.operator(x.half(), *weight.tensors, None, out.inner)
        assert_same_bits(out.inner, (x.float() @ weight.values.t()).half())
        out.assert_nothing_outside()


@pytest.mark.cuda
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("tokens", [1, 4, 16, 64])
def test_cuda_graph_replays_with_new_inputs(kind: str, tokens: int) -> None:
    # Few rows and a long K: K is shared out among blocks, which takes memory.
    columns, rows = 17408, 256
    weight = make_weight(kind, rows, columns, "cuda", exact=True)
    x = torch.randint(-2, 3, (tokens, columns), device="cuda").half()
    out = torch.empty(tokens, rows, dtype=torch.float16, device="cuda")
    weight.operator(x, *weight.tensors, None, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        weight.operator(x, *weight.tensors, None, out)
    for seed in (1, 2):
        torch.manual_seed(seed)
        new = make_weight(kind, rows, columns, "cuda", exact=True)
        for target, source in zip(weight.tensors, new.tensors):
            target.copy_(source)
        x.copy_(torch.randint(-2, 3, (tokens, columns), device="cuda"))
        out.fill_(float("nan"))
        graph.replay()
        assert_same_bits(out, (x.float() @ new.values.t()).half())


def arguments(kind: str, device: str) -> dict[str, Any]:
    weight = make_weight(kind, 32, 64, device, exact=True)
    names = (
        ("packed", "block_scales", "global_scale")
        if kind == "nvfp4"
        else ("weight", "scales")
    )
    return {
        "x": torch.ones(3, 64, dtype=torch.float16, device=device),
        **dict(zip(names, weight.tensors)),
        "bias": torch.ones(32, dtype=torch.float16, device=device),
        "out": torch.empty(3, 32, dtype=torch.float16, device=device),
    }


BAD_ARGUMENTS = [
    ("x", lambda t: t.double(), r"x must be torch\.float16 or torch\.bfloat16"),
    ("x", lambda t: t[0], r"x must have two dimensions, \[M, K\]; got shape \[64\]"),
    ("x", lambda t: t[:, :48], r"x must have shape \[3, 64\], \[M, K of .*\[3, 48\]"),
    ("x", lambda t: t.t().contiguous().t(), r"x must have rows of neighbouring"),
    ("x", lambda t: t[:1].expand(3, 64), r"x must have rows of neighbouring"),
    ("bias", lambda t: t.float(), r"bias must be torch\.float16; got torch\.float32"),
    ("bias", lambda t: t[:31], r"bias must have shape \[32\], one for each row"),
    ("bias", lambda t: t[None], r"bias must have shape \[32\], .*; got \[1, 32\]"),
    ("bias", lambda t: t.repeat(2)[::2], r"bias must be contiguous"),
    ("out", lambda t: t.bfloat16(), r"out must be torch\.float16; got torch\.bfl"),
    ("out", lambda t: t[:2], r"out must have shape \[3, 32\], .*; got \[2, 32\]"),
    ("out", lambda t: t[:, :31], r"out must have shape \[3, 32\], .*; got \[3, 31\]"),
    ("out", lambda t: t.repeat(1, 2)[:, ::2], r"out must have rows of neighbouring"),
    ("packed", lambda t: t.char(), r"packed must be torch\.uint8"),
    ("packed", lambda t: t[:, :28].contiguous(), r"packed .* multiple of 16 .* K = 56"),
    ("block_scales", lambda t: t[:, :3], r"block_scales must have shape \[32, 4\]"),
    ("global_scale", lambda t: t.double(), r"global_scale must be torch\.float32"),
    ("weight", lambda t: t.float(), r"weight must be torch\.float8_e4m3fn or torch"),
    ("scales", lambda t: t.half(), r"scales must be torch\.float32"),
    ("scales", lambda t: t.repeat(2, 1), r"scales must have shape \[1, 1\], .* or"),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("argument", "spoil", "message"), BAD_ARGUMENTS)
@pytest.mark.parametrize("kind", ["nvfp4", "fp8-block"])
def test_bad_arguments(
    device: str, kind: str, argument: str, spoil: Any, message: str
) -> None:
    operator = ops.nvfp4_small_gemm if kind == "nvfp4" else ops.fp8_small_gemm
    good = arguments(kind, device)
    operator(**good)
    if argument not in good:
        assert argument in arguments("nvfp4", device) | arguments("fp8-row", device)
        return
    bad = good | {argument: spoil(good[argument])}
    with pytest.raises(ValueError, match=f"^{operator.__name__}: {message}"):
        operator(**bad)


@pytest.mark.cuda
@pytest.mark.parametrize("kind", ["nvfp4", "fp8-row"])
@pytest.mark.parametrize("argument", ["x", "packed", "weight"])
def test_misaligned_views(kind: str, argument: str) -> None:
    good = arguments(kind, "cuda")
    if argument not in good:
        return
    tensor = good[argument]
    room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device="cuda")
    bad = good | {argument: room[1:].view(tensor.shape)}
    operator = ops.nvfp4_small_gemm if kind == "nvfp4" else ops.fp8_small_gemm
    with pytest.raises(ValueError, match=f"{argument} must start at a multiple of"):
        operator(**bad)


@pytest.mark.cuda
def test_less_aligned_weights_take_narrower_loads() -> None:
    """A weight at a multiple of 8 bytes, and scales at an odd one."""
    weight = make_weight("nvfp4", 24, 160, "cuda", exact=True)
    moved = []
    for tensor, offset in zip(weight.tensors, (8, 1)):
        room = torch.empty(tensor.numel() + offset, dtype=torch.uint8, device="cuda")
        moved.append(room[offset:].view(tensor.shape).copy_(tensor))
    for tokens in (1, 2, 4, 16):
        x = torch.randint(-2, 3, (tokens, 160), device="cuda")
        out = Output(tokens, 24, torch.float16, "cuda")
        ops.nvfp4_small_gemm(x.half(), *moved, weight.tensors[2], None, out.inner)
        assert_same_bits(out.inner, (x.float() @ weight.values.t()).half())


@pytest.mark.cuda
def test_unknown_config() -> None:
    with pytest.raises(ValueError, match="config = 99: there is no such kernel"):
        ops.nvfp4_small_gemm(**arguments("nvfp4", "cuda"), config=99)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["nvfp4", "fp8-block"])
def test_torch_accepts_the_operators(device: str, kind: str) -> None:
    ops.load()
    name = "nvfp4_small_gemm" if kind == "nvfp4" else "fp8_small_gemm"
    operator = getattr(torch.ops._sm70_C, name).default
    values = arguments(kind, device)
    torch.library.opcheck(operator, tuple(values.values()))
    torch.library.opcheck(operator, tuple((values | {"bias": None}).values()))
