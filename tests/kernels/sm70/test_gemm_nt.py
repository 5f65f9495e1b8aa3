# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""gemm_nt: FP64's numbers, and the same bits for every width of a tile."""

import threading
from typing import Any

import pytest
import torch

from vllm.model_executor.kernels.linear.sm70 import ops

DTYPES = [torch.float16, torch.bfloat16]
# K, N of the 27B class: gate_up, down, qkvz, qkv, out at TP 1, 2 and 4 (design.md,
# section 4), ragged ones among them.
SHAPES = [
    (5120, 34816),
    (5120, 17408),
    (5120, 8704),
    (17408, 5120),
    (8704, 5120),
    (4352, 5120),
    (5120, 16384),
    (5120, 8192),
    (5120, 4128),
    (5120, 4120),
    (5120, 4096),
    (5120, 14336),
    (5120, 7168),
    (5120, 3584),
    (6144, 5120),
    (3072, 5120),
    (1536, 5120),
]
TOKENS = [1, 17, 127, 128, 129, 1024, 2048, 4096, 6400, 8192]


def random(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare on the GPU: these matrices are large. NaN, the poison, never passes."""
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    assert not expected.isnan().any()
    if not torch.equal(actual.view(torch.int16), expected.view(torch.int16)):
        different = actual != expected
        raise AssertionError(
            f"{int(different.sum())} of {different.numel()} elements differ, first "
            f"at {different.nonzero()[:1].tolist()}"
        )


def multiply(x: torch.Tensor, w: torch.Tensor, bias: Any = None) -> torch.Tensor:
    """Return the product, made by one call into the middle of a wider matrix."""
    rows = w.shape[0]
    whole = torch.full((x.shape[0], rows + 24), 7.0, dtype=x.dtype, device=x.device)
    out = whole[:, 8 : rows + 8]
    out.fill_(float("nan"))
    ops.gemm_nt(x, w, bias, out)
    assert (whole[:, :8] == 7).all() and (whole[:, rows + 8 :] == 7).all()
    return out


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 17, 128, 1000])
@pytest.mark.parametrize(("columns", "rows"), [(5120, 520), (64, 8), (1536, 1000)])
def test_close_to_float64(
    dtype: torch.dtype, has_bias: bool, tokens: int, columns: int, rows: int
) -> None:
    torch.manual_seed(tokens)
    x, w = random(tokens, columns, dtype=dtype), random(rows, columns, dtype=dtype)
    bias = random(rows, dtype=dtype) if has_bias else None
    out = multiply(x, w, bias)
    expected = x.double() @ w.double().t()
    terms = x.double().abs() @ w.double().abs().t()
    if bias is not None:
        expected += bias.double()
        terms += bias.double().abs()
    # FP32 sums, with K / 16 steps of a tensor core that may cut instead of round,
    # and one rounding to the dtype.
    bound = 2 * (columns / 16 + 16) * 2.0**-24 * terms
    bound += torch.finfo(dtype).eps / 2 * (expected.abs() + bound)
    assert ((out.double() - expected).abs() <= bound).all()


@pytest.mark.cuda
@pytest.mark.parametrize(("columns", "rows"), SHAPES)
@pytest.mark.parametrize("tokens", TOKENS)
def test_tiles_equal_the_whole(columns: int, rows: int, tokens: int) -> None:
    torch.manual_seed(0)
    x, w = random(tokens, columns), random(rows, columns)
    whole = multiply(x, w)
    for width in (256, 1000, 1088, 2048, 4352, 8704):
        if width >= rows or (tokens > 4096 and width < 1000):
            continue
        tiled = torch.full_like(whole, float("nan"))
        # As prefill does: weights in a scratch of the tile's width.
        scratch = torch.empty(width, columns, dtype=w.dtype, device="cuda")
        for begin in range(0, rows, width):
            end = min(begin + width, rows)
            part = scratch[: end - begin].copy_(w[begin:end])
            ops.gemm_nt(x, part, None, tiled[:, begin:end])
        assert_same_bits(tiled, whole)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [16, 129, 2048])
@pytest.mark.parametrize("half_width", [544, 1000, 4352])
def test_paired_tiles_equal_the_whole(
    dtype: torch.dtype, tokens: int, half_width: int
) -> None:
    """Gate and up columns side by side in one tile, with a bias."""
    torch.manual_seed(0)
    columns, rows = 5120, 2 * 8704
    x, w = random(tokens, columns, dtype=dtype), random(rows, columns, dtype=dtype)
    bias = random(rows, dtype=dtype)
    whole = multiply(x, w, bias)
    for begin in range(0, rows // 2, half_width):
        width = min(half_width, rows // 2 - begin)
        gate = slice(begin, begin + width)
        up = slice(rows // 2 + begin, rows // 2 + begin + width)
        out = torch.empty(tokens, 2 * width, dtype=dtype, device="cuda")
        ops.gemm_nt(
            x, torch.cat((w[gate], w[up])), torch.cat((bias[gate], bias[up])), out
        )
        assert_same_bits(out[:, :width], whole[:, gate])
        assert_same_bits(out[:, width:], whole[:, up])


@pytest.mark.cuda
@pytest.mark.parametrize("rows", [1, 3, 13, 100, 1001])
def test_unaligned_widths(rows: int) -> None:
    """An output whose rows start anywhere, and a K that is no multiple of 8."""
    for columns in (64, 72, 50):
        x, w = random(5, columns), random(rows, columns)
        out = torch.full((5, rows), float("nan"), dtype=x.dtype, device="cuda")
        ops.gemm_nt(x, w, None, out)
        torch.testing.assert_close(
            out.double(), x.double() @ w.double().t(), rtol=2e-3, atol=2e-3
        )


@pytest.mark.cuda
def test_rows_with_a_distance() -> None:
    wide_x, wide_w = random(33, 640), random(72, 768)
    out = multiply(wide_x[:, 64:576], wide_w[:, 128:640])
    expected = wide_x[:, 64:576].double() @ wide_w[:, 128:640].double().t()
    torch.testing.assert_close(out.double(), expected, rtol=2e-3, atol=2e-2)


@pytest.mark.cuda
def test_nothing_to_do() -> None:
    for tokens, rows in ((0, 8), (3, 0)):
        out = torch.empty(tokens, rows, dtype=torch.float16, device="cuda")
        ops.gemm_nt(random(tokens, 64), random(rows, 64), None, out)


@pytest.mark.cuda
def test_cuda_graph_replays_with_new_inputs() -> None:
    x, w, bias = random(130, 1536), random(264, 1536), random(264)
    out = torch.empty(130, 264, dtype=x.dtype, device="cuda")
    ops.gemm_nt(x, w, bias, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.gemm_nt(x, w, bias, out)
    for tensor in (x, w, bias):
        tensor.copy_(random(*tensor.shape))
    out.fill_(float("nan"))
    graph.replay()
    assert_same_bits(out, multiply(x, w, bias))


@pytest.mark.cuda
def test_allocates_nothing_but_cublas_tile_counter() -> None:
    x, w = random(300, 1536), random(264, 1536)
    out = torch.empty(300, 264, dtype=x.dtype, device="cuda")
    ops.gemm_nt(x, w, None, out)
    torch.accelerator.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    ops.gemm_nt(x, w, None, out)
    # torch hands out 512 bytes at least.
    assert torch.cuda.max_memory_allocated() - before <= 512


@pytest.mark.cuda
def test_threads_share_the_plans() -> None:
    """First calls of several threads at once, for the same and other M."""
    x, w = random(40, 512), random(136, 512)
    expected = [multiply(x[:m], w) for m in range(1, 41)]
    failures: list[int] = []

    def work() -> None:
        for m in range(1, 41):
            if not torch.equal(multiply(x[:m], w), expected[m - 1]):
                failures.append(m)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def arguments() -> dict[str, torch.Tensor]:
    return {"x": random(3, 64), "w": random(16, 64), "out": random(3, 16)}


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("argument", "spoil", "message"),
    [
        ("x", lambda t: t.float(), r"x must be torch\.float16 or torch\.bfloat16"),
        ("x", lambda t: t[:, :48], r"x must have shape \[3, 64\]"),
        ("x", lambda t: t.t().contiguous().t(), r"x must have rows of neighbouring"),
        ("w", lambda t: t.bfloat16(), r"w must be torch\.float16; got torch\.bfloat16"),
        ("w", lambda t: t[0], r"w must have two dimensions, \[N, K\]"),
        ("w", lambda t: t.t().contiguous().t(), r"w must have rows of neighbouring"),
        ("out", lambda t: t.bfloat16(), r"out must be torch\.float16"),
        ("out", lambda t: t[:, :15], r"out must have shape \[3, 16\]"),
        ("out", lambda t: t.cpu(), r"out must be on the device of x"),
    ],
)
def test_bad_arguments(argument: str, spoil: Any, message: str) -> None:
    good = arguments()
    ops.gemm_nt(**good, bias=None)
    bad = good | {argument: spoil(good[argument])}
    with pytest.raises(ValueError, match=f"^gemm_nt: {message}"):
        ops.gemm_nt(**bad, bias=None)


@pytest.mark.cuda
def test_no_columns() -> None:
    with pytest.raises(ValueError, match="gemm_nt: x must have K > 0"):
        ops.gemm_nt(random(3, 0), random(16, 0), None, random(3, 16))


def test_is_for_cuda() -> None:
    """On a CPU torch.mm does; no half-made copy of it here."""
    x, w, out = (torch.ones(8, 8, dtype=torch.float16) for _ in range(3))
    with pytest.raises(NotImplementedError, match="gemm_nt"):
        ops.gemm_nt(x, w, None, out)


@pytest.mark.cuda
def test_torch_accepts_the_operator() -> None:
    ops.load()
    torch.library.opcheck(
        torch.ops._sm70_C.gemm_nt.default,
        (random(3, 64), random(16, 64), random(16), random(3, 16)),
    )
