# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""NVFP4 and FP8 dequantisation against a plain torch reference, bit for bit."""

import importlib.util
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.model_executor.kernels.linear.sm70 import ops
from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import (
    dequantize_to_dtype,
)

from .reference import (
    DTYPES,
    assert_same_bits,
    e4m3_table,
    fp8_reference,
    nvfp4_reference,
)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]

# 1.0 * (1 + 2^-11) lies halfway between two FP16 numbers, the even one below;
# 1 + 3 * 2^-11 halfway, the even one above; 2^-25 halfway between 0 and the least
# FP16 subnormal; 65520 halfway between the largest FP16 number and infinity.
HALFWAY_SCALES = [1 + 2**-11, 1 + 3 * 2**-11, 2**-25, 65520.0]
GLOBAL_SCALES = [
    *HALFWAY_SCALES,
    1.0,
    0.0123,
    -0.37,
    0.0,
    1e-7,  # FP16 subnormals
    200.0,  # FP16 overflow
    1e-38,
    1e-42,  # FP32 subnormals
    1e38,  # FP32 overflow
    float("inf"),
]


def nvfp4_weight(
    rows: int, columns: int, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return random codes and scale bytes, and a global scale, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    packed = torch.randint(
        0, 256, (rows, columns // 2), dtype=torch.uint8, generator=generator
    )
    block_scales = torch.randint(
        0, 256, (rows, columns // 16), dtype=torch.uint8, generator=generator
    )
    return packed, block_scales, torch.tensor(0.0123)


def fp8_weight(
    rows: int, columns: int, kind: str, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random codes with "block" or "row" scales, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randint(
        0, 256, (rows, columns), dtype=torch.uint8, generator=generator
    )
    shape = (-(-rows // 128), -(-columns // 128)) if kind == "block" else (rows, 1)
    return weight, torch.rand(shape, generator=generator) * 0.01


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("global_scale", GLOBAL_SCALES)
def test_every_nvfp4_code_and_scale(
    device: str, dtype: torch.dtype, global_scale: float
) -> None:
    """All 16 codes in both halves of a byte, times all 256 scales."""
    codes = torch.arange(256, dtype=torch.uint8).view(1, -1).repeat(256, 1)
    block_scales = torch.arange(256, dtype=torch.uint8).view(-1, 1).repeat(1, 32)
    scale = torch.tensor(global_scale)
    expected = nvfp4_reference(codes, block_scales, scale, dtype)
    actual = ops.nvfp4_dequantize(
        codes.to(device), block_scales.to(device), scale.to(device), dtype
    )
    assert_same_bits(actual, expected)


def test_scales_reach_the_cases_they_are_for() -> None:
    """The table above is worth its name: subnormals, overflow and ties occur."""
    codes = torch.arange(256, dtype=torch.uint8).view(1, -1).repeat(256, 1)
    block_scales = torch.arange(256, dtype=torch.uint8).view(-1, 1).repeat(1, 32)

    def values(scale: float, dtype: torch.dtype) -> torch.Tensor:
        out = nvfp4_reference(codes, block_scales, torch.tensor(scale), dtype)
        return out[out.isfinite() | out.isinf()].double().abs()

    least_normal = {torch.float16: 2.0**-14, torch.float32: 2.0**-126}
    for scale, dtype in ((1e-7, torch.float16), (1e-42, torch.float32)):
        out = values(scale, dtype)
        assert ((out > 0) & (out < least_normal[dtype])).any()
    for scale, dtype in ((200.0, torch.float16), (1e38, torch.float32)):
        assert values(scale, dtype).isinf().any()
    for scale in HALFWAY_SCALES:
        exact = values(scale, torch.float32)
        rounded = values(scale, torch.float16)
        ulp = torch.where(rounded < 2**-14, 2.0**-24, 0.0)
        ulp = torch.where(rounded >= 2**-14, rounded.log2().floor().exp2() / 1024, ulp)
        halfway = (exact - rounded).abs() * 2 == ulp
        assert halfway.any() or (exact == 65520).any()


@pytest.mark.parametrize("device", DEVICES)
def test_nan_scales_make_their_block_nan(device: str) -> None:
    packed = torch.zeros(1, 24, dtype=torch.uint8)
    block_scales = torch.tensor([[0x7F, 0x38, 0xFF]], dtype=torch.uint8)
    out = ops.nvfp4_dequantize(
        packed.to(device), block_scales.to(device), torch.tensor(1.0).to(device)
    ).cpu()
    assert out[0, :16].isnan().all()
    assert (out[0, 16:32] == 0).all()
    assert out[0, 32:].isnan().all()


def test_nvfp4_layout_is_upstreams() -> None:
    """The nibble order and the scales' layout of vLLM's own emulation."""
    packed, block_scales, global_scale = nvfp4_weight(48, 256)
    expected = dequantize_to_dtype(
        packed, block_scales, global_scale, torch.float16, swizzle=False
    )
    assert_same_bits(ops.nvfp4_dequantize(packed, block_scales, global_scale), expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1.0, 0.0173, -3e-6, 2**-25, 1e3, 1e-40, 1e38])
@pytest.mark.parametrize("kind", ["block", "row"])
def test_every_fp8_code(
    device: str, dtype: torch.dtype, scale: float, kind: str
) -> None:
    weight = torch.arange(256, dtype=torch.uint8).view(1, -1).repeat(3, 1)
    scales = torch.full((1, 2) if kind == "block" else (3, 1), scale)
    actual = ops.fp8_dequantize(weight.to(device), scales.to(device), dtype)
    assert_same_bits(actual, fp8_reference(weight, scales, dtype))


@pytest.mark.parametrize("device", DEVICES)
def test_float8_tensors_are_taken_as_they_are(device: str) -> None:
    """What a checkpoint loads: float8_e4m3fn instead of its bytes."""
    packed, block_scales, global_scale = nvfp4_weight(32, 64)
    actual = ops.nvfp4_dequantize(
        packed.to(device),
        block_scales.view(torch.float8_e4m3fn).to(device),
        global_scale.reshape(1).to(device),
    )
    expected = nvfp4_reference(packed, block_scales, global_scale, torch.float16)
    assert_same_bits(actual, expected)
    weight, scales = fp8_weight(160, 144, "block")
    actual = ops.fp8_dequantize(
        weight.view(torch.float8_e4m3fn).to(device), scales.to(device)
    )
    assert_same_bits(actual, fp8_reference(weight, scales, torch.float16))


@dataclass
class Tile:
    """Rows [begin, end) of each part of a weight; `parts` 0: of the weight."""

    parts: int
    rows: int
    columns: int
    begin: int
    end: int
    dtype: torch.dtype
    seed: int

    def new_output(self, device: str) -> torch.Tensor:
        shape = (self.parts,) * bool(self.parts) + (self.end - self.begin, self.columns)
        return torch.empty(shape, dtype=self.dtype, device=device)

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        if self.parts:
            whole = whole.view(self.parts, self.rows // self.parts, self.columns)
        return whole[..., self.begin : self.end, :]


@st.composite
def tiles(draw: st.DrawFn) -> Tile:
    parts = draw(st.integers(0, 3))
    part_rows = draw(st.integers(0, 300 // max(1, parts)))
    begin = draw(st.integers(0, part_rows))
    return Tile(
        parts=parts,
        rows=max(1, parts) * part_rows,
        columns=16 * draw(st.integers(0, 45)),
        begin=begin,
        end=draw(st.integers(begin, part_rows)),
        dtype=draw(st.sampled_from(DTYPES)),
        seed=draw(st.integers(0, 2**31)),
    )


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=60, deadline=None)
@given(tile=tiles())
def test_any_nvfp4_tile(device: str, tile: Tile) -> None:
    packed, block_scales, scale = nvfp4_weight(tile.rows, tile.columns, tile.seed)
    out = tile.new_output(device)
    ops.nvfp4_dequantize_into(
        packed.to(device), block_scales.to(device), scale.to(device), out, tile.begin
    )
    expected = nvfp4_reference(packed, block_scales, scale, tile.dtype)
    assert_same_bits(out, tile.of(expected))


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=60, deadline=None)
@given(tile=tiles(), kind=st.sampled_from(["block", "row"]))
def test_any_fp8_tile(device: str, tile: Tile, kind: str) -> None:
    weight, scales = fp8_weight(tile.rows, tile.columns, kind, tile.seed)
    out = tile.new_output(device)
    ops.fp8_dequantize_into(weight.to(device), scales.to(device), out, tile.begin)
    expected = fp8_reference(weight, scales, tile.dtype)
    assert_same_bits(out, tile.of(expected))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("width", [1, 96, 128, 200, 515])
def test_tiles_through_one_scratch_equal_the_whole(device: str, width: int) -> None:
    """As tiled prefill does: one scratch, a ragged last tile, nothing beyond it."""
    rows, columns = 515, 272
    packed, block_scales, scale = (t.to(device) for t in nvfp4_weight(rows, columns))
    weight, scales = (t.to(device) for t in fp8_weight(rows, columns, "block"))
    whole_nvfp4 = ops.nvfp4_dequantize(packed, block_scales, scale)
    whole_fp8 = ops.fp8_dequantize(weight, scales)
    scratch = torch.empty(width + 1, columns, dtype=torch.float16, device=device)
    for begin in range(0, rows, width):
        end = min(begin + width, rows)
        out = scratch[: end - begin]
        scratch.fill_(-1)
        ops.nvfp4_dequantize_into(packed, block_scales, scale, out, begin)
        assert_same_bits(out, whole_nvfp4[begin:end])
        assert (scratch[end - begin :] == -1).all()
        scratch.fill_(-1)
        ops.fp8_dequantize_into(weight, scales, out, begin)
        assert_same_bits(out, whole_fp8[begin:end])
        assert (scratch[end - begin :] == -1).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("width", [1, 96, 200])
def test_gate_and_up_tiles_through_one_scratch(device: str, width: int) -> None:
    """As a gated layer's tiles: rows of both halves, and nothing beyond them."""
    half, columns = 259, 272
    packed, block_scales, scale = (
        t.to(device) for t in nvfp4_weight(2 * half, columns)
    )
    weight, scales = (t.to(device) for t in fp8_weight(2 * half, columns, "block"))
    halves = (2, half, columns)
    whole_nvfp4 = ops.nvfp4_dequantize(packed, block_scales, scale).view(halves)
    whole_fp8 = ops.fp8_dequantize(weight, scales).view(halves)
    scratch = torch.empty(2 * width + 1, columns, dtype=torch.float16, device=device)
    for begin in range(0, half, width):
        end = min(begin + width, half)
        rows = 2 * (end - begin)
        out = scratch[:rows].view(2, end - begin, columns)
        scratch.fill_(-1)
        ops.nvfp4_dequantize_into(packed, block_scales, scale, out, begin)
        assert_same_bits(out, whole_nvfp4[:, begin:end])
        assert (scratch[rows:] == -1).all()
        scratch.fill_(-1)
        ops.fp8_dequantize_into(weight, scales, out, begin)
        assert_same_bits(out, whole_fp8[:, begin:end])
        assert (scratch[rows:] == -1).all()


def nvfp4_arguments(device: str = "cpu") -> dict[str, Any]:
    packed, block_scales, global_scale = nvfp4_weight(32, 64)
    return {
        "packed": packed.to(device),
        "block_scales": block_scales.to(device),
        "global_scale": global_scale.to(device),
        "out": torch.empty(32, 64, dtype=torch.float16, device=device),
        "row_begin": 0,
    }


def fp8_arguments(device: str = "cpu") -> dict[str, Any]:
    weight, scales = fp8_weight(160, 64, "block")
    return {
        "weight": weight.to(device),
        "scales": scales.to(device),
        "out": torch.empty(160, 64, dtype=torch.float16, device=device),
        "row_begin": 0,
    }


BAD_NVFP4 = [
    ("packed", lambda t: t.char(), r"packed must be torch\.uint8; got Char"),
    ("packed", lambda t: t[0], r"packed must have two dimensions, \[N, K / 2\]; got"),
    ("packed", lambda t: t.t(), r"packed must be contiguous"),
    ("packed", lambda t: t[:, :28].contiguous(), r"packed .* multiple of 16 .* K = 56"),
    (
        "block_scales",
        lambda t: t[:, :3].contiguous(),
        r"block_scales must have shape \[32, 4\], .*; got \[32, 3\]",
    ),
    ("block_scales", lambda t: t.t(), r"block_scales must have shape \[32, 4\]"),
    (
        "block_scales",
        lambda t: t.repeat(1, 2)[:, ::2],
        r"block_scales must be contiguous",
    ),
    (
        "block_scales",
        lambda t: t.float(),
        r"block_scales must be torch\.float8_e4m3fn or torch\.uint8; got torch\.f",
    ),
    ("global_scale", lambda t: t.double(), r"global_scale must be torch\.float32"),
    ("global_scale", lambda t: t.repeat(2), r"global_scale must have exactly one"),
    (
        "out",
        lambda t: t.double(),
        r"out must be torch\.float16 or torch\.bfloat16 or torch\.float32; got Double",
    ),
    ("out", lambda t: t[:, :48], r"out must have shape .*, 64\], .*; got \[32, 48\]"),
    ("out", lambda t: t[0], r"out must have shape \[rows .*; got \[64\]"),
    ("out", lambda t: t[None, None], r"out must have shape .*; got \[1, 1, 32, 64\]"),
    ("out", lambda t: t.view(2, 16, 64)[:0], r"out .* the 32 rows of packed; got 0"),
    ("out", lambda t: t[:30].view(3, 10, 64), r"out .* the 32 rows of packed; got 3"),
    (
        "out",
        lambda t: t[:, None].repeat(1, 17, 1)[:2],
        r"row_begin .* within the 16 rows of each part of packed; got 17 rows",
    ),
    ("out", lambda t: t.repeat(1, 2)[:, ::2], r"out must be contiguous"),
    ("out", lambda t: t.repeat(2, 1), r"within the 32 rows of packed; got 64 rows fr"),
    ("row_begin", lambda _: 1, r"row_begin .* packed; got 32 rows from 1 on"),
    ("row_begin", lambda _: -1, r"row_begin .* packed; got 32 rows from -1 on"),
    ("row_begin", lambda _: 2**63 - 1, r"row_begin .* got 32 rows from 9223372036854"),
]
BAD_FP8 = [
    ("weight", lambda t: t.float(), r"weight must be torch\.float8_e4m3fn or torch"),
    ("weight", lambda t: t[0], r"weight must have two dimensions, \[N, K\]; got"),
    ("weight", lambda t: t.repeat(1, 2)[:, ::2], r"weight must be contiguous"),
    ("weight", lambda t: t[:, :24].contiguous(), r"weight .* multiple of 16 .* K = 24"),
    ("scales", lambda t: t.half(), r"scales must be torch\.float32; got torch\.fl"),
    (
        "scales",
        lambda t: t[:1],
        r"scales must have shape \[2, 1\], .* or \[160, 1\], .*; got \[1, 1\]",
    ),
    ("scales", lambda t: t[0], r"scales must have shape .*; got \[1\]"),
    ("scales", lambda t: t.repeat(2, 1)[::2], r"scales must be contiguous"),
    ("out", lambda t: t.double(), r"out must be torch\.float16"),
    ("out", lambda t: t[:, :48], r"out must have shape .*, 64\], .*; got \[160, 48\]"),
    ("out", lambda t: t[:6].view(3, 2, 64), r"out .* the 160 rows of weight; got 3"),
    (
        "out",
        lambda t: t[:, None].repeat(1, 81, 1)[:2],
        r"row_begin .* within the 80 rows of each part of weight; got 81 rows",
    ),
    ("out", lambda t: t.repeat(1, 2)[:, ::2], r"out must be contiguous"),
    ("row_begin", lambda _: 3, r"row_begin .* 160 rows of weight; got 160 rows from 3"),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("argument", "spoil", "message"), BAD_NVFP4)
def test_bad_nvfp4_input(device: str, argument: str, spoil: Any, message: str) -> None:
    arguments = nvfp4_arguments(device)
    ops.nvfp4_dequantize_into(**arguments)
    arguments[argument] = spoil(arguments[argument])
    with pytest.raises(ValueError, match="^nvfp4_dequantize: .*" + message):
        ops.nvfp4_dequantize_into(**arguments)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("argument", "spoil", "message"), BAD_FP8)
def test_bad_fp8_input(device: str, argument: str, spoil: Any, message: str) -> None:
    arguments = fp8_arguments(device)
    ops.fp8_dequantize_into(**arguments)
    arguments[argument] = spoil(arguments[argument])
    with pytest.raises(ValueError, match="^fp8_dequantize: .*" + message):
        ops.fp8_dequantize_into(**arguments)


def test_bad_output_dtype() -> None:
    with pytest.raises(ValueError, match=r"dtype=torch\.int8: expected one of"):
        ops.nvfp4_dequantize(*nvfp4_weight(16, 16), dtype=torch.int8)


def test_unavailable_reason() -> None:
    assert ops.unavailable_reason("cpu") is None
    assert "without kernels for xpu" in str(ops.unavailable_reason("xpu"))


def test_a_missing_extension_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm._sm70_C", None)
    monkeypatch.setattr(ops, "_loaded", False)
    reason = ops.unavailable_reason("cpu")
    assert reason is not None
    assert "vllm._sm70_C" in reason and "pip install ." in reason
    with pytest.raises(ImportError, match="cannot be loaded"):
        ops.nvfp4_dequantize(*nvfp4_weight(16, 16))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("make", [nvfp4_arguments, fp8_arguments])
@pytest.mark.parametrize("parts", [1, 2])
def test_torch_accepts_the_operators(device: str, make: Any, parts: int) -> None:
    """Schema, fake implementation and functionalisation agree with what happens."""
    ops.load()
    arguments = make(device)
    if parts > 1:
        arguments["out"] = arguments["out"].view(parts, -1, 64)
    name = "nvfp4_dequantize" if "packed" in arguments else "fp8_dequantize"
    torch.library.opcheck(
        getattr(torch.ops._sm70_C, name).default, tuple(arguments.values())
    )


@pytest.mark.parametrize("device", DEVICES)
def test_tiles_under_torch_compile(device: str) -> None:
    # Not for a compiler to trace, and another test may not have done it before.
    ops.load()
    packed, block_scales, scale = (t.to(device) for t in nvfp4_weight(64, 64))

    def second_half(x: torch.Tensor) -> torch.Tensor:
        tile = torch.empty(32, 64, dtype=torch.float32, device=device)
        ops.nvfp4_dequantize_into(packed, block_scales, scale, tile, 32)
        return x + tile

    x = torch.zeros(32, 64, device=device)
    compiled = torch.compile(second_half, fullgraph=True, backend="aot_eager")
    assert_same_bits(compiled(x), second_half(x))


def test_no_operator_takes_a_string() -> None:
    """torch 2.13's stable headers leak string arguments (pytorch #190493)."""
    ops.load()
    names = [
        name
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("_sm70_C::")
    ]
    assert "_sm70_C::nvfp4_dequantize" in names
    for name in names:
        operator = name.removeprefix("_sm70_C::").partition(".")[0]
        for overload in getattr(torch.ops._sm70_C, operator).overloads():
            schema = getattr(getattr(torch.ops._sm70_C, operator), overload)._schema
            assert not any("str" in str(a.type) for a in schema.arguments), schema


# With nothing of vLLM but the extension, whose import is fast.
_HASH_OF_EVERYTHING = """
import hashlib, sys
import torch
torch.ops.load_library(sys.argv[1])
ops = torch.ops._sm70_C

def codes(*shape):
    return torch.randint(0, 256, shape, dtype=torch.uint8)

torch.manual_seed(0)
nvfp4 = codes(200, 360), codes(200, 45), torch.tensor(0.0123)
fp8 = codes(200, 720), torch.rand(2, 6)
state = hashlib.sha256()

def add(out):
    # A NaN is as good as another.
    state.update(out.nan_to_num(7).view(torch.uint8).numpy().tobytes())

for dtype in (torch.float16, torch.bfloat16, torch.float32):
    out = torch.empty(200, 720, dtype=dtype)
    for operator, weight in (ops.nvfp4_dequantize, nvfp4), (ops.fp8_dequantize, fp8):
        operator(*weight, out)
        add(out)
for dtype in (torch.float16, torch.bfloat16, torch.float32):
    x, bias = torch.randn(7, 720).to(dtype), torch.randn(200).to(dtype)
    out = torch.empty(7, 200, dtype=dtype)
    for operator, weight in (
        (ops.nvfp4_small_gemm, (nvfp4[0], nvfp4[1] & 0x77, nvfp4[2])),
        (ops.fp8_small_gemm, (fp8[0] & 0x77, fp8[1])),
    ):
        operator(x, *weight, bias, out)
        assert out.isfinite().all()
        add(out)
    out = torch.empty(7, 360, dtype=dtype)
    ops.silu_and_mul(x * 9, out)
    add(out)
print(state.hexdigest())
"""


def run_with_isa(isa: str) -> subprocess.CompletedProcess[str]:
    spec = importlib.util.find_spec("vllm._sm70_C")
    assert spec is not None and spec.origin is not None
    return subprocess.run(
        [sys.executable, "-c", _HASH_OF_EVERYTHING, spec.origin],
        env={**os.environ, "VLLM_SM70_CPU_ISA": isa},
        capture_output=True,
        text=True,
    )


def test_instruction_sets_agree() -> None:
    """Every version of the CPU kernels that this machine can run."""
    flags = set(Path("/proc/cpuinfo").read_text().split())
    usable = ["baseline"]
    usable += ["avx2"] * ("avx2" in flags)
    usable += ["avx512"] * ({"avx512bw", "avx512dq", "avx512vl"} <= flags)
    results = {isa: run_with_isa(isa) for isa in usable}
    assert all(r.returncode == 0 for r in results.values()), results
    assert len({result.stdout.split()[-1] for result in results.values()}) == 1


def test_unknown_instruction_set_is_refused() -> None:
    result = run_with_isa("sse9")
    assert result.returncode != 0
    assert "VLLM_SM70_CPU_ISA=sse9: expected one of" in result.stderr
    assert "baseline; unset it" in result.stderr


@pytest.mark.cuda
def test_cuda_graph_replays_with_new_weights() -> None:
    arguments = nvfp4_arguments("cuda")
    ops.nvfp4_dequantize_into(**arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.nvfp4_dequantize_into(**arguments)
    packed, block_scales, _ = nvfp4_weight(32, 64, seed=1)
    scale = torch.tensor(0.5)
    arguments["packed"].copy_(packed)
    arguments["block_scales"].copy_(block_scales)
    arguments["global_scale"].copy_(scale)
    graph.replay()
    expected = nvfp4_reference(packed, block_scales, scale, torch.float16)
    assert_same_bits(arguments["out"], expected)


@pytest.mark.cuda
@pytest.mark.parametrize("argument", ["packed", "out"])
def test_misaligned_view_on_cuda(argument: str) -> None:
    arguments = nvfp4_arguments("cuda")
    tensor = arguments[argument]
    room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device="cuda")
    arguments[argument] = room[1:].view(tensor.shape)
    with pytest.raises(ValueError, match=f"{argument} must start at a multiple of"):
        ops.nvfp4_dequantize_into(**arguments)


@pytest.mark.cuda
def test_arguments_on_two_devices() -> None:
    arguments = nvfp4_arguments("cuda")
    arguments["global_scale"] = arguments["global_scale"].cpu()
    with pytest.raises(ValueError, match="global_scale must be on the device of pack"):
        ops.nvfp4_dequantize_into(**arguments)


@pytest.mark.cuda
@pytest.mark.parametrize("kind", ["block", "row"])
def test_full_size_on_cuda(kind: str) -> None:
    """Grids of the real shapes: 27B gate_up at TP1, compared on the device."""
    rows, columns = 34816, 5120
    packed, block_scales, scale = (t.cuda() for t in nvfp4_weight(rows, columns))
    whole = ops.nvfp4_dequantize(packed, block_scales, scale)
    for begin in range(0, rows, 4352):
        end = begin + 4352
        part = dequantize_to_dtype(
            packed[begin:end].cpu(),
            block_scales[begin:end].cpu(),
            scale.cpu(),
            torch.float16,
            swizzle=False,
        )
        assert_same_bits(whole[begin:end], part)
    # A gate and up tile of 27B: its last 1,024 rows of each.
    tile = torch.empty(2, 1024, columns, dtype=torch.float16, device="cuda")
    begin = rows // 2 - 1024
    ops.nvfp4_dequantize_into(packed, block_scales, scale, tile, begin)
    assert_same_bits(tile, whole.view(2, -1, columns)[:, begin:])
    weight, scales = (t.cuda() for t in fp8_weight(rows, columns, kind))
    out = torch.empty(rows // 4, columns, dtype=torch.float16, device="cuda")
    begin = rows - rows // 4
    ops.fp8_dequantize_into(weight, scales, out, begin)
    values = e4m3_table().cuda()[weight[begin:].int()]
    if kind == "block":
        scales = scales[begin // 128 :].repeat_interleave(128, 0)
        scales = scales.repeat_interleave(128, 1)
    else:
        scales = scales[begin:]
    assert_same_bits(out, (values * scales).half())
