# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""silu_and_mul: upstream's numbers, and no dependence on the place in a tile."""

import pytest
import torch

from vllm.model_executor.kernels.linear.sm70 import ops

from .reference import DTYPES, assert_same_bits

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
# Multiples of 8 take 128-bit accesses on CUDA; 17408 is 27B's width.
WIDTHS = [1, 3, 7, 8, 24, 100, 1088, 4352, 17408]
INFINITY = float("inf")
SPECIAL = [
    0.0,
    -0.0,
    INFINITY,
    -INFINITY,
    float("nan"),
    1e-7,
    -1e-7,
    -87.5,
    -89.0,
    88.5,
    89.0,
    -700.0,
    700.0,
    6e4,
    -6e4,
    3.0,
]


def random_input(
    rows: int, width: int, dtype: torch.dtype, device: str
) -> torch.Tensor:
    # Gates over the range where silu is neither 0 nor the identity.
    return (torch.randn(rows, 2 * width, device=device) * 6).to(dtype)


def reference_silu(gate: torch.Tensor) -> torch.Tensor:
    """Compute in FP32, where exp(-gate) is infinite below -88.7; rounded."""
    gate = gate.float()
    return gate / (1 + torch.exp(-gate))


def reference(gate_up: torch.Tensor) -> torch.Tensor:
    """Round twice, as upstream does: after silu, and after the product."""
    gate, up = gate_up.chunk(2, dim=-1)
    silu = reference_silu(gate).to(gate_up.dtype)
    return (silu.float() * (up.float() + 0.0)).to(gate_up.dtype)


def assert_nearly_all_equal(
    actual: torch.Tensor, expected: torch.Tensor, gate_up: torch.Tensor
) -> None:
    """Allow for another exp, which is off by a few units of FP32's last place.

    That may round silu the other way where it lies near the middle of two numbers
    of the dtype: rare, and one unit of silu. FP32 itself shows all of it.
    """
    assert actual.dtype == expected.dtype
    dtype = actual.dtype
    gate, up = gate_up.double().chunk(2, dim=-1)
    info = torch.finfo(dtype)

    def unit(values: torch.Tensor) -> torch.Tensor:
        return info.eps * values.double().abs().clamp_min(info.tiny)

    units_of_silu = 4 if dtype is torch.float32 else 1
    bound = units_of_silu * unit(reference_silu(gate)) * up.abs() + unit(expected)
    difference = (actual.double() - expected.double()).abs()
    assert (difference <= 1.01 * bound).all()
    if dtype is not torch.float32:
        assert (difference != 0).double().mean() < 1e-3


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", [1, 5])
def test_numbers(device: str, dtype: torch.dtype, width: int, rows: int) -> None:
    torch.manual_seed(width)
    gate_up = random_input(rows, width, dtype, device)
    # As a slice of a wider matrix, at an aligned and at an odd column.
    for first in (8, 3):
        whole = torch.full((rows, width + 24), 7.0, dtype=dtype, device=device)
        out = whole[:, first : first + width]
        out.fill_(float("nan"))
        ops.silu_and_mul(gate_up, out)
        assert_nearly_all_equal(out, reference(gate_up), gate_up)
        assert (whole[:, :first] == 7).all()
        assert (whole[:, first + width :] == 7).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_special_values(device: str, dtype: torch.dtype) -> None:
    values = torch.tensor(SPECIAL, device=device).to(dtype)
    gate, up = values.repeat_interleave(len(SPECIAL)), values.repeat(len(SPECIAL))
    gate_up = torch.cat((gate, up))[None]
    out = torch.empty(1, gate.numel(), dtype=dtype, device=device)
    ops.silu_and_mul(gate_up, out)
    expected = reference(gate_up)
    torch.testing.assert_close(
        out, expected, rtol=torch.finfo(dtype).eps * 4, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_cpu_follows_forward_native(dtype: torch.dtype) -> None:
    """What upstream's SiluAndMul.forward_native computes on the CPU."""
    torch.manual_seed(0)
    gate_up = random_input(64, 4352, dtype, "cpu")
    gate, up = gate_up.chunk(2, dim=-1)
    out = torch.empty(64, 4352, dtype=dtype)
    ops.silu_and_mul(gate_up, out)
    assert_nearly_all_equal(out, torch.nn.functional.silu(gate) * up, gate_up)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [100, 4352])
def test_cuda_has_the_bits_of_upstreams_kernel(dtype: torch.dtype, width: int) -> None:
    import vllm._custom_ops  # noqa: F401

    torch.manual_seed(0)
    gate_up = random_input(1000, width, dtype, "cuda")
    special = torch.tensor(SPECIAL, device="cuda").to(dtype)
    gate_up[:16, :16] = special
    gate_up[:16, width : width + 16] = special[:, None]
    out, expected = (
        torch.empty(1000, width, dtype=dtype, device="cuda") for _ in range(2)
    )
    ops.silu_and_mul(gate_up, out)
    torch.ops._C.silu_and_mul(expected, gate_up)
    assert_same_bits(out, expected)


@pytest.mark.cuda
def test_every_fp16_gate_has_the_bits_of_upstreams_kernel() -> None:
    """In order, where whole units of eight take the short division, and mixed."""
    import vllm._custom_ops  # noqa: F401

    torch.manual_seed(0)
    gates = torch.arange(-(2**15), 2**15, device="cuda").to(torch.int16)
    mixed = gates[torch.randperm(2**16, device="cuda")]
    # Any bits at all: infinities, NaNs and subnormals among them.
    ups = torch.randint(-(2**15), 2**15, (64, 2**16), device="cuda").to(torch.int16)
    for order in (gates, mixed):
        gate_up = torch.cat((order.expand(64, -1), ups), dim=1).view(torch.float16)
        out, expected = (
            torch.empty(64, 2**16, dtype=torch.float16, device="cuda") for _ in range(2)
        )
        ops.silu_and_mul(gate_up, out)
        torch.ops._C.silu_and_mul(expected, gate_up)
        assert_same_bits(out, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tile", [8, 96, 200, 251])
def test_tiles_equal_the_whole(device: str, dtype: torch.dtype, tile: int) -> None:
    width = 515
    gate_up = random_input(9, width, dtype, device)
    gate, up = gate_up.chunk(2, dim=-1)
    whole = torch.empty(9, width, dtype=dtype, device=device)
    ops.silu_and_mul(gate_up, whole)
    out = torch.full_like(whole, float("nan"))
    for begin in range(0, width, tile):
        columns = slice(begin, min(begin + tile, width))
        part = torch.cat((gate[:, columns], up[:, columns]), dim=-1)
        ops.silu_and_mul(part, out[:, columns])
    assert_same_bits(out, whole)


@pytest.mark.parametrize("device", DEVICES)
def test_nothing_to_do(device: str) -> None:
    for rows, width in ((0, 8), (3, 0)):
        gate_up = torch.empty(rows, 2 * width, device=device)
        ops.silu_and_mul(gate_up, torch.empty(rows, width, device=device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("gate_up", "out", "message"),
    [
        ((3, 15), (3, 7), r"gate_up must have an even number of columns; got .*15"),
        ((3, 16), (3, 7), r"out must have shape \[3, 8\], .*; got \[3, 7\]"),
        ((3, 16), (2, 8), r"out must have shape \[3, 8\], .*; got \[2, 8\]"),
        ((16,), (8,), r"gate_up must have two dimensions, \[M, 2 \* t\]"),
    ],
)
def test_bad_shapes(
    device: str, gate_up: tuple[int, ...], out: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^silu_and_mul: {message}"):
        ops.silu_and_mul(
            torch.ones(gate_up, device=device), torch.ones(out, device=device)
        )


@pytest.mark.parametrize("device", DEVICES)
def test_bad_layouts(device: str) -> None:
    gate_up, out = torch.ones(3, 16, device=device), torch.ones(3, 8, device=device)
    with pytest.raises(ValueError, match="gate_up must be contiguous"):
        ops.silu_and_mul(gate_up.t().contiguous().t(), out)
    with pytest.raises(ValueError, match="out must have rows of neighbouring"):
        ops.silu_and_mul(gate_up, out.repeat(1, 2)[:, ::2])
    with pytest.raises(ValueError, match=r"out must be torch\.float32; got torch\.fl"):
        ops.silu_and_mul(gate_up, out.half())
    with pytest.raises(ValueError, match=r"gate_up must be torch\.float16 or"):
        ops.silu_and_mul(gate_up.double(), out.double())


@pytest.mark.parametrize("device", DEVICES)
def test_torch_accepts_the_operator(device: str) -> None:
    ops.load()
    torch.library.opcheck(
        torch.ops._sm70_C.silu_and_mul.default,
        (torch.randn(3, 16, device=device), torch.empty(3, 8, device=device)),
    )
