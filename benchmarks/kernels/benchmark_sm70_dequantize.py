# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Time NVFP4 and FP8 dequantisation against a plain copy of as many bytes.

One line a shape and format: time, GB/s of what must be read and written, and the
ratio to the copy (1.00: as fast as memory goes). The bytes counted are the packed
weight, its block or row scales, and the output.

On CUDA an iteration is one kernel; `--repeats` of them are captured into a CUDA
graph, so that launches cost nothing, and the median of several replays is shown.
The copy is a kernel that reads and writes half the bytes each.
Weights that fit the L2 cache are reported as they run, from the cache.
On the CPU an iteration is one call, and the copy is torch's, with the same threads.
"""

import argparse
from collections.abc import Callable
from functools import partial

import torch
from sm70_timing import time_calls

from vllm.model_executor.kernels.linear.sm70 import ops

# K, N: the 27B class at TP1, and what its shards add (see docs/design).
SHAPES = {
    "gate_up TP1": (5120, 34816),
    "gate_up TP4": (5120, 8704),
    "gate_up TP1, tile": (5120, 4352),
    "down TP1": (17408, 5120),
    "down TP4": (4352, 5120),
    "qkvz TP1": (5120, 16384),
    "qkvz TP4": (5120, 4120),
    "qkv TP1": (5120, 14336),
    "out TP1": (6144, 5120),
}
DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
}


def make_case(
    weight_format: str, rows: int, columns: int, out: torch.Tensor
) -> tuple[Callable[[], None], int]:
    """Return a call that fills `out` [rows, columns], and the bytes that it reads."""
    device = out.device

    def codes(*shape: int) -> torch.Tensor:
        return torch.randint(0, 127, shape, dtype=torch.uint8, device=device)

    if weight_format == "nvfp4":
        packed, block_scales = codes(rows, columns // 2), codes(rows, columns // 16)
        global_scale = torch.tensor(0.01, device=device)
        read = packed.nbytes + block_scales.nbytes
        return (
            lambda: ops.nvfp4_dequantize_into(packed, block_scales, global_scale, out)
        ), read
    weight = codes(rows, columns)
    per_block = (-(-rows // 128), -(-columns // 128))
    scales = torch.rand(
        per_block if weight_format == "fp8-block" else (rows, 1), device=device
    )
    return lambda: ops.fp8_dequantize_into(weight, scales, out), (
        weight.nbytes + scales.nbytes
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="float16", choices=list(DTYPES))
    parser.add_argument(
        "--formats", nargs="+", default=["nvfp4", "fp8-block", "fp8-row"]
    )
    parser.add_argument(
        "--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES)
    )
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()

    reason = ops.unavailable_reason(options.device)
    if reason is not None:
        parser.error(reason)
    on_cuda = options.device == "cuda"
    name = (
        torch.cuda.get_device_name()
        if on_cuda
        else f"{torch.get_num_threads()} threads"
    )
    print(f"{options.device} ({name}), to {options.dtype}, torch {torch.__version__}")
    print(f"{'shape':18} {'K':>6} {'N':>6} {'format':10} {'us':>9} {'GB/s':>7} copy")
    for shape in options.shapes:
        columns, rows = SHAPES[shape]
        out = torch.empty(
            rows, columns, dtype=DTYPES[options.dtype], device=options.device
        )
        for weight_format in options.formats:
            run, read = make_case(weight_format, rows, columns, out)
            moved = read + out.nbytes
            source = torch.empty(moved // 2, dtype=torch.uint8, device=options.device)
            target = torch.empty_like(source)
            # Alike small enough for a cache, or not.
            copy, seconds = (
                time_calls([call], options.repeats, options.device).seconds
                for call in (partial(torch.bitwise_not, source, out=target), run)
            )
            print(
                f"{shape:18} {columns:6} {rows:6} {weight_format:10} "
                f"{seconds * 1e6:9.1f} {moved / seconds / 1e9:7.1f} "
                f"{copy / seconds:.2f}"
            )


if __name__ == "__main__":
    main()
