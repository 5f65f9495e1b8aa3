# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Time silu_and_mul against upstream's kernel, and against a copy of as many bytes.

One line a shape: time, GB/s of what must be read and written, the ratio of time to
upstream's `torch.ops._C.silu_and_mul` in the same run, with its standard error, and
to a copy (1.00: as fast as memory goes; below it, what is read was in a cache).

Tiles write into a slice of a wide output's columns, as prefill's do; upstream's
kernel writes a tensor of its own. On CUDA calls are captured into graphs.
"""

import argparse
from functools import partial

import torch
from sm70_timing import Pace, ratio_by_rounds, time_in_turns

from vllm.model_executor.kernels.linear.sm70 import ops
from vllm.platforms import current_platform

COLUMNS = 17408
"""Of the activated output: the 27B class at TP1."""

TILE_COLUMNS = (1024, 2048, COLUMNS)
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="float16", choices=list(DTYPES))
    parser.add_argument("--tokens", nargs="+", type=int, default=[1024, 8192])
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()

    reason = ops.unavailable_reason(options.device)
    if reason is not None:
        parser.error(reason)
    current_platform.import_kernels()
    name = (
        torch.cuda.get_device_name()
        if options.device == "cuda"
        else f"{torch.get_num_threads()} threads"
    )
    print(f"{options.device} ({name}), {options.dtype}, torch {torch.__version__}")
    print(f"{'M':>6} {'columns':>8} {'us':>9} {'GB/s':>7}  /upstream       /copy")
    factory = {"dtype": DTYPES[options.dtype], "device": options.device}
    for tokens in options.tokens:
        wide = torch.empty(tokens, COLUMNS, **factory)
        for columns in TILE_COLUMNS:
            gate_up = torch.randn(tokens, 2 * columns, **factory)
            separate = torch.empty(tokens, columns, **factory)
            moved = gate_up.nbytes + separate.nbytes
            source = torch.empty(moved // 2, dtype=torch.uint8, device=options.device)
            target = torch.empty_like(source)
            ours, upstream, copy = time_in_turns(
                [
                    [partial(ops.silu_and_mul, gate_up, wide[:, :columns])],
                    [partial(torch.ops._C.silu_and_mul, separate, gate_up)],
                    [partial(torch.bitwise_not, source, out=target)],
                ],
                Pace(options.repeats),
                options.device,
            )
            ratio, error = ratio_by_rounds(ours, upstream)
            print(
                f"{tokens:6} {columns:8} {ours.seconds * 1e6:9.1f} "
                f"{moved / ours.seconds / 1e9:7.1f}  {ratio:.3f} ±{error:.3f}    "
                f"{ours.seconds / copy.seconds:.2f}"
            )


if __name__ == "__main__":
    main()
