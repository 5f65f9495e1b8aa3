# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Typed access to the operators of the native extension `vllm._sm70_C`.

The extension is loaded with the first call, so that importing this module costs
nothing and works in a build without it.
"""

import torch

_OPERATORS = (
    "nvfp4_dequantize",
    "fp8_dequantize",
    "nvfp4_small_gemm",
    "fp8_small_gemm",
    "gemm_nt",
    "silu_and_mul",
)
_OUTPUT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_loaded = False


def load() -> None:
    """Load the extension and register its operators, `torch.ops._sm70_C.*`.

    Raises:
        ImportError: this installation has no (working) `vllm._sm70_C`; the cause
            is chained.

    """
    global _loaded
    if _loaded:
        return
    try:
        import vllm._sm70_C  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"vllm._sm70_C, the extension with the SM70 kernels, cannot be loaded "
            f"({error}). It belongs to this fork's build: run `pip install .` in "
            "its repository, or choose another linear backend"
        ) from error
    # The operators write into `out` and return nothing: for torch.compile there
    # is nothing to work out.
    for name in _OPERATORS:
        torch.library.register_fake(f"_sm70_C::{name}", _returns_nothing)
    _loaded = True


def unavailable_reason(device_type: str) -> str | None:
    """Say why the operators cannot run on a type of device, or None if they can.

    Args:
        device_type: as in `torch.device.type`, such as "cpu" or "cuda".

    """
    try:
        load()
    except ImportError as error:
        return str(error)
    key = device_type.upper()
    if key not in ("CPU", "CUDA") or not torch._C._dispatch_has_kernel_for_dispatch_key(
        "_sm70_C::nvfp4_dequantize", key
    ):
        return f"vllm._sm70_C was built without kernels for {device_type}"
    return None


def nvfp4_dequantize(
    packed: torch.Tensor,
    block_scales: torch.Tensor,
    global_scale: torch.Tensor,
    dtype: torch.dtype = torch.float16,
) -> torch.Tensor:
    """Dequantise a whole NVFP4 weight.

    Each element is `code * (block_scale * global_scale)`: both products in FP32,
    then one rounding, to nearest even, to `dtype`. Block scales 0x7f and 0xff are
    NaN and make their 16 elements NaN.

    Args:
        packed: uint8 [N, K / 2]: two E2M1 codes a byte, the element of even index
            in the low half, as ModelOpt and compressed-tensors store them.
        block_scales: float8_e4m3fn (or its bytes as uint8) [N, K / 16], row by
            row, not swizzled.
        global_scale: float32, one element. The factor itself: what ModelOpt calls
            `weight_scale_2`, and the reciprocal of compressed-tensors'
            `weight_global_scale`.
        dtype: float16, bfloat16 or float32.

    Returns:
        [N, K], contiguous, of `dtype`, on the device of `packed`.

    Raises:
        ValueError: an argument has a wrong shape, dtype, device or stride, or K is
            not a multiple of 16; the message names it.

    """
    out = _new_output(packed, packed.shape[-1] * 2, dtype)
    nvfp4_dequantize_into(packed, block_scales, global_scale, out)
    return out


def nvfp4_dequantize_into(
    packed: torch.Tensor,
    block_scales: torch.Tensor,
    global_scale: torch.Tensor,
    out: torch.Tensor,
    row_begin: int = 0,
) -> None:
    """Dequantise a tile of an NVFP4 weight's rows, into memory that is there.

    Args:
        packed: as for `nvfp4_dequantize`.
        block_scales: as for `nvfp4_dequantize`.
        global_scale: as for `nvfp4_dequantize`.
        out: float16, bfloat16 or float32 [rows, K], contiguous; on CUDA it starts
            at a multiple of 16 bytes. It is overwritten with the weight's rows
            [row_begin, row_begin + rows). Or [parts, rows, K]: with those rows of
            each part of the weight, taken as [parts, N / parts, K], such as gate
            and up.
        row_begin: first row, in rows of the weight or of a part.

    Raises:
        ValueError: as for `nvfp4_dequantize`, for rows outside the weight or the
            part, and for a number of parts that does not divide N.

    """
    load()
    torch.ops._sm70_C.nvfp4_dequantize(
        packed, block_scales, global_scale, out, row_begin
    )


def fp8_dequantize(
    weight: torch.Tensor,
    scales: torch.Tensor,
    dtype: torch.dtype = torch.float16,
) -> torch.Tensor:
    """Dequantise a whole FP8 E4M3 weight.

    Each element is `code * scale`: the product in FP32, then one rounding, to
    nearest even, to `dtype`. Codes 0x7f and 0xff are NaN.

    Args:
        weight: float8_e4m3fn (or its bytes as uint8) [N, K].
        scales: float32, the factors themselves: [ceil(N / 128), ceil(K / 128)],
            one for each block of 128 x 128 elements, or [N, 1], one for each row
            (output channel).
        dtype: float16, bfloat16 or float32.

    Returns:
        [N, K], contiguous, of `dtype`, on the device of `weight`.

    Raises:
        ValueError: an argument has a wrong shape, dtype, device or stride, or K is
            not a multiple of 16; the message names it.

    """
    out = _new_output(weight, weight.shape[-1], dtype)
    fp8_dequantize_into(weight, scales, out)
    return out


def fp8_dequantize_into(
    weight: torch.Tensor,
    scales: torch.Tensor,
    out: torch.Tensor,
    row_begin: int = 0,
) -> None:
    """Dequantise a tile of an FP8 E4M3 weight's rows, into memory that is there.

    Args:
        weight: as for `fp8_dequantize`.
        scales: as for `fp8_dequantize`: those of the whole weight, whatever the
            tile.
        out: [rows, K] or [parts, rows, K], as for `nvfp4_dequantize_into`.
        row_begin: first row, in rows of the weight or of a part; any, not only
            multiples of 128.

    Raises:
        ValueError: as for `fp8_dequantize`, for rows outside the weight or the
            part, and for a number of parts that does not divide N.

    """
    load()
    torch.ops._sm70_C.fp8_dequantize(weight, scales, out, row_begin)


def nvfp4_small_gemm(
    x: torch.Tensor,
    packed: torch.Tensor,
    block_scales: torch.Tensor,
    global_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    config: int = -1,
) -> None:
    """Write `x @ W^T + bias` into `out`, W read as it is packed.

    For few rows of x: each kernel reads the whole weight once for every 4 rows
    (M <= 4), 16, 32 or 64 rows. Any M is right; from some M on, dequantising a
    tile and multiplying with `gemm_nt` is faster.

    W is not rounded: an element is `code * (block_scale * global_scale)`, with
    the global scale applied to FP32 sums on CUDA, and both products in FP32 on
    the CPU. Sums are FP32, the bias is added to them, and the result is rounded
    once. Their order depends on the shapes and the GPU, not on the run.

    Args:
        x: float16 or bfloat16, on the CPU also float32 [M, K]; rows may have a
            distance. On CUDA each row starts at a multiple of 16 bytes.
        packed: uint8 [N, K / 2], as for `nvfp4_dequantize`; on CUDA it starts at
            a multiple of 8 bytes.
        block_scales: as for `nvfp4_dequantize`.
        global_scale: as for `nvfp4_dequantize`.
        bias: [N] of the dtype of `x`, or None.
        out: [M, N] of the dtype of `x`, all of it overwritten; it may be a slice
            of a wider tensor's columns.
        config: for benchmarks, a CUDA kernel by its number in
            csrc/sm70/small_gemm.cu; -1 lets the shapes decide.

    Raises:
        ValueError: an argument has a wrong shape, dtype, device, stride or
            alignment, or K is not a multiple of 16; the message names it.

    """
    load()
    torch.ops._sm70_C.nvfp4_small_gemm(
        x, packed, block_scales, global_scale, bias, out, config
    )


def fp8_small_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    config: int = -1,
) -> None:
    """Write `x @ W^T + bias` into `out`, W read as it is stored.

    As `nvfp4_small_gemm`, with W = `code * scale`, the scale applied to FP32
    sums on CUDA and to the codes in FP32 on the CPU.

    Args:
        x: as for `nvfp4_small_gemm`.
        weight: float8_e4m3fn (or its bytes as uint8) [N, K]; on CUDA it starts at
            a multiple of 16 bytes.
        scales: as for `fp8_dequantize`.
        bias: as for `nvfp4_small_gemm`.
        out: as for `nvfp4_small_gemm`.
        config: as for `nvfp4_small_gemm`.

    Raises:
        ValueError: as for `nvfp4_small_gemm`.

    """
    load()
    torch.ops._sm70_C.fp8_small_gemm(x, weight, scales, bias, out, config)


def gemm_nt(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Write `x @ w^T + bias` into `out` through cuBLAS; CUDA only.

    The bits of an output column do not depend on how many columns are made by
    one call: K is never split, and the algorithm is chosen from M, K, the dtype,
    whether there is a bias, the distances of x's and w's rows, and the alignment
    (up to 16 bytes) of the rows of x, w and out, but not from N. So tiles of any
    width give the bits of one call, as long as they begin at multiples of 8
    columns. The bias is added to the FP32 sum, before the one rounding.

    The first call for a device makes a cuBLAS handle: capture CUDA graphs after
    it. Nothing is allocated on the device.

    Args:
        x: float16 or bfloat16 [M, K], K > 0; rows may have a distance.
        w: [N, K] of the dtype of `x`; rows may have a distance.
        bias: [N] of the dtype of `x`, or None.
        out: [M, N] of the dtype of `x`, all of it overwritten; it may be a slice
            of a wider tensor's columns.

    Raises:
        ValueError: an argument has a wrong shape, dtype, device or stride; the
            message names it.
        RuntimeError: cuBLAS has no algorithm for this, such as for bfloat16
            below capability 8.0.
        NotImplementedError: the tensors are not on a CUDA device.

    """
    load()
    torch.ops._sm70_C.gemm_nt(x, w, bias, out)


def silu_and_mul(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """Write `silu(gate) * up` into `out`.

    silu is computed in FP32 and rounded to the dtype; so is the product then. On
    CUDA these are the bits of upstream's SiluAndMul kernel, on the CPU the
    roundings of its `forward_native`. An element's bits depend on its inputs
    alone, not on its place.

    Args:
        gate_up: float16, bfloat16 or float32 [M, 2 * t], contiguous: t gates,
            then t ups.
        out: [M, t] of the same dtype, all of it overwritten; it may be a slice
            of a wider tensor's columns, but must not overlap `gate_up`.

    Raises:
        ValueError: an argument has a wrong shape, dtype, device or stride; the
            message names it.

    """
    load()
    torch.ops._sm70_C.silu_and_mul(gate_up, out)


def _new_output(weight: torch.Tensor, columns: int, dtype: torch.dtype) -> torch.Tensor:
    if dtype not in _OUTPUT_DTYPES:
        raise ValueError(
            f"dtype={dtype}: expected one of {', '.join(map(str, _OUTPUT_DTYPES))}"
        )
    return torch.empty((*weight.shape[:-1], columns), dtype=dtype, device=weight.device)


def _returns_nothing(*arguments: object) -> None:
    return None
