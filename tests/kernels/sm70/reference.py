# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Dequantisation in plain torch, from the definitions of the formats.

Nothing here shares code or tables with csrc/sm70, nor does it use torch's own
float8 casts: the values come from sign, exponent and mantissa in Python.
"""

import math

import torch

E2M1_VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_BITS = {2: torch.int16, 4: torch.int32}


def e2m1_table() -> torch.Tensor:
    """Return float32 [16]: the value of each E2M1 code."""
    return torch.tensor(E2M1_VALUES + [-value for value in E2M1_VALUES])


def e4m3_table() -> torch.Tensor:
    """Return float32 [256]: the value of each E4M3 code."""
    values = []
    for code in range(256):
        exponent, mantissa = code >> 3 & 15, code & 7
        if code & 0x7F == 0x7F:
            magnitude = math.nan
        elif exponent == 0:
            magnitude = mantissa / 8 * 2**-6
        else:
            magnitude = (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        values.append(math.copysign(magnitude, -1.0 if code & 0x80 else 1.0))
    return torch.tensor(values)


def nvfp4_reference(
    packed: torch.Tensor,
    block_scales: torch.Tensor,
    global_scale: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Dequantise uint8 [N, K / 2] with uint8 [N, K / 16] and float32 [] on the CPU."""
    low, high = (packed & 15).long(), (packed >> 4).long()
    codes = e2m1_table()[torch.stack((low, high), dim=-1)]
    scales = e4m3_table()[block_scales.long()] * global_scale
    blocks = codes.reshape(*block_scales.shape, 16) * scales[..., None]
    return blocks.reshape(packed.shape[0], 2 * packed.shape[1]).to(dtype)


def fp8_reference(
    weight: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Dequantise uint8 [N, K] with float32 block or row scales on the CPU."""
    rows, columns = weight.shape
    if scales.shape != (rows, 1):
        scales = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
        scales = scales[:rows, :columns]
    return (e4m3_table()[weight.long()] * scales).to(dtype)


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Require equal bits, signs of zero too; a NaN equals any other NaN."""
    actual, expected = actual.cpu(), expected.cpu()
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    nan = expected.isnan()
    assert torch.equal(actual.isnan(), nan)
    bits = _BITS[expected.dtype.itemsize]
    different = (actual.view(bits) != expected.view(bits)) & ~nan
    if different.any():
        where = tuple(different.nonzero()[0].tolist())
        raise AssertionError(
            f"{int(different.sum())} of {different.numel()} elements differ, first "
            f"at {where}: got {actual[where].item()!r}, expected "
            f"{expected[where].item()!r}"
        )
