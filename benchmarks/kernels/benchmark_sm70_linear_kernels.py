# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Time the fused small-batch multiplications against dequantise-and-multiply.

One line for each shape, format and M:

  us       the fused operator (nvfp4_small_gemm or fp8_small_gemm)
  GB/s     of the packed weight and its scales, which must be read once
  of copy  that, as a fraction of what a large device-to-device copy moves (bytes
           read and written), measured in the same run: 1.00 is the floor
  tiles    dequantise the whole weight, then gemm_nt: what prefill does, in us
  ratio    us / tiles: below 1.00 the fused kernel is faster. The largest M where
           it is makes the threshold.
  dense    torch.mm on ready FP16 weights, in us

Last comes the dequantisation's own rate: one line for each shape and format, GB/s
of what it reads and writes.

Every time is of replays of a CUDA graph, so that launches cost nothing. An
operator runs over enough copies of the weight, in turn, that they come from
memory and not from the L2 cache. The median of seven replays counts; the largest
deviation of any of them is given at the end, to tell a difference from noise.

`--configs all` times each kernel by its number instead (csrc/sm70/small_gemm.cu),
`--splits` with K shared out among that many blocks: to choose the usual ones.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from sm70_timing import copy_rate, time_calls

from vllm.model_executor.kernels.linear.sm70 import ops

# K, N: the 27B class and its shards (docs/design).
SHAPES = {
    "gate_up-tp1": (5120, 34816),
    "gate_up-tp2": (5120, 17408),
    "gate_up-tp4": (5120, 8704),
    "down-tp1": (17408, 5120),
    "down-tp2": (8704, 5120),
    "down-tp4": (4352, 5120),
    "qkvz-tp1": (5120, 16384),
    "qkvz-tp4": (5120, 4120),
    "qkv-tp1": (5120, 14336),
    "qkv-tp4": (5120, 3584),
    "out-tp1": (6144, 5120),
    "out-tp4": (1536, 5120),
}
TOKENS = [1, 2, 4, 8, 16, 32, 64, 128, 256]
FORMATS = ["nvfp4", "fp8-block", "fp8-row"]
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
KERNELS = {
    "nvfp4": [
        *range(4),
        7,
        8,
        *range(10, 14),
        *range(15, 18),
        *range(20, 28),
        30,
        31,
    ],
    "fp8-block": [1, 2, 3, 6, 20, 21, 22, 23],
    "fp8-row": [1, 2, 3, 6, 20, 21, 22, 23],
}


class Timer:
    """Times calls, and remembers how far the measurements differed."""

    def __init__(self, calls: int) -> None:
        self.calls = calls
        self.worst_deviation = 0.0

    def __call__(self, runs: list[Callable[[], object]]) -> float:
        """Return the seconds of one call, calling each of `runs` in turn."""
        timing = time_calls(runs, max(self.calls, len(runs)), "cuda")
        self.worst_deviation = max(self.worst_deviation, timing.deviation)
        return timing.seconds


@dataclass
class Weight:
    """The tensors of one copy of a weight, as the operators take them."""

    kind: str
    tensors: tuple[torch.Tensor, ...]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def multiply(self, x: torch.Tensor, out: torch.Tensor, config: int) -> None:
        operator: Callable[..., None] = (
            ops.nvfp4_small_gemm if self.kind == "nvfp4" else ops.fp8_small_gemm
        )
        operator(x, *self.tensors, None, out, config)

    def dequantize(self, out: torch.Tensor) -> None:
        operator: Callable[..., None] = (
            ops.nvfp4_dequantize_into
            if self.kind == "nvfp4"
            else ops.fp8_dequantize_into
        )
        operator(*self.tensors, out)

    def multiply_dense(
        self, x: torch.Tensor, dense: torch.Tensor, out: torch.Tensor
    ) -> None:
        self.dequantize(dense)
        ops.gemm_nt(x, dense, None, out)


def make_weights(kind: str, columns: int, rows: int) -> list[Weight]:
    """Return copies of a random weight: together four times the L2 cache."""

    def codes(*shape: int) -> torch.Tensor:
        # No NaN, and few large scales.
        return torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda") & 0xF7

    def weight() -> Weight:
        if kind == "nvfp4":
            scales = codes(rows, columns // 16) & 0x37
            scale = torch.tensor(0.01, device="cuda")
            packed = torch.randint_like(codes(rows, columns // 2), 0, 256)
            return Weight(kind, (packed, scales, scale))
        per_block = -(-rows // 128), -(-columns // 128)
        shape = per_block if kind == "fp8-block" else (rows, 1)
        scales = torch.rand(shape, device="cuda") * 1e-3
        return Weight(kind, (codes(rows, columns) & 0xB7, scales))

    weights = [weight()]
    l2 = torch.cuda.get_device_properties().L2_cache_size
    while sum(w.nbytes for w in weights) < 4 * l2:
        weights.append(weight())
    return weights


def compare(
    timer: Timer, copy: float, shape: str, kind: str, options: argparse.Namespace
) -> str:
    """Print the lines of a shape; return that of its dequantisation."""
    columns, rows = SHAPES[shape]
    dtype = DTYPES[options.dtype]
    weights = make_weights(kind, columns, rows)
    dense = torch.empty(rows, columns, dtype=dtype, device="cuda")
    ready = []
    for weight in weights[: max(2, 1 + (1 << 29) // dense.nbytes)]:
        weight.dequantize(dense)
        ready.append(dense.clone())
    for tokens in options.tokens:
        x = torch.randn(tokens, columns, device="cuda").to(dtype)
        out = torch.empty(tokens, rows, dtype=dtype, device="cuda")
        fused = timer([partial(w.multiply, x, out, -1) for w in weights])
        tiled = timer([partial(w.multiply_dense, x, dense, out) for w in weights])
        product = timer([partial(torch.mm, x, w.t(), out=out) for w in ready])
        rate = weights[0].nbytes / fused
        print(
            f"{shape:12} {columns:6} {rows:6} {kind:9} {tokens:4} "
            f"{fused * 1e6:8.1f} {rate / 1e9:7.0f} {rate / copy:7.2f} "
            f"{tiled * 1e6:8.1f} {fused / tiled:6.2f} {product * 1e6:8.1f}"
        )
    seconds = timer([partial(w.dequantize, dense) for w in weights])
    rate = (weights[0].nbytes + dense.nbytes) / seconds
    return (
        f"{shape:12} {columns:6} {rows:6} {kind:9} "
        f"{seconds * 1e6:8.1f} {rate / 1e9:7.0f} {rate / copy:7.2f}"
    )


def compare_kernels(
    timer: Timer, copy: float, shape: str, kind: str, options: argparse.Namespace
) -> None:
    """Print the fastest kernels of a shape, best first, a line for each M."""
    columns, rows = SHAPES[shape]
    dtype = DTYPES[options.dtype]
    weights = make_weights(kind, columns, rows)
    asked = KERNELS[kind]
    if options.configs != ["all"]:
        asked = [int(config) for config in options.configs]
    for tokens in options.tokens:
        x = torch.randn(tokens, columns, device="cuda").to(dtype)
        out = torch.empty(tokens, rows, dtype=dtype, device="cuda")
        times = {}
        for kernel in asked:
            # These are for few tokens, and do not share out K among blocks.
            for_few = kernel < 10 or kernel >= 30
            if for_few and tokens > 8:
                continue
            for splits in [0] if for_few else options.splits:
                config = kernel + 100 * splits
                try:
                    times[config] = timer(
                        [partial(w.multiply, x, out, config) for w in weights]
                    )
                except ValueError:  # not for this dtype or K
                    continue
        best = sorted(times, key=lambda config: times[config])
        cells = [f"{config}:{times[config] * 1e6:.1f}" for config in best]
        usual = timer([partial(w.multiply, x, out, -1) for w in weights])
        rate = weights[0].nbytes / times[best[0]]
        print(
            f"{shape:12} {kind:9} {tokens:4} usual {usual * 1e6:.1f} us, best "
            f"{rate / copy:.2f} of copy: {' '.join(cells[: options.best])}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", default="float16", choices=list(DTYPES))
    parser.add_argument("--formats", nargs="+", default=FORMATS, choices=FORMATS)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS, help="M")
    parser.add_argument(
        "--configs", nargs="+", help="kernels by number, or all: compare these"
    )
    parser.add_argument(
        "--splits",
        nargs="+",
        type=int,
        default=[0, 1, 2, 4],
        help="with --configs; 0: as usual",
    )
    parser.add_argument("--best", type=int, default=8, help="kernels in a line")
    parser.add_argument("--calls", type=int, default=20, help="in a graph, at least")
    options = parser.parse_args()
    reason = ops.unavailable_reason("cuda")
    if reason is not None or not torch.cuda.is_available():
        parser.error(reason or "no CUDA GPU here")

    timer = Timer(options.calls)
    copy = copy_rate(options.calls, "cuda")
    print(
        f"{torch.cuda.get_device_name()}, {options.dtype}, torch {torch.__version__}, "
        f"copy {copy / 1e9:.0f} GB/s"
    )
    if options.configs:
        for shape in options.shapes:
            for kind in options.formats:
                compare_kernels(timer, copy, shape, kind, options)
    else:
        head = f"{'shape':12} {'K':>6} {'N':>6} {'format':9}"
        print(
            f"{head} {'M':>4} {'us':>8} {'GB/s':>7} {'of copy':>7} {'tiles':>8} "
            f"{'ratio':>6} {'dense':>8}"
        )
        rates = [
            compare(timer, copy, shape, kind, options)
            for shape in options.shapes
            for kind in options.formats
        ]
        print(f"\ndequantise\n{head} {'us':>8} {'GB/s':>7} {'of copy':>7}")
        print("\n".join(rates))
    print(f"\nlargest deviation of a replay: {timer.worst_deviation:.1%}")


if __name__ == "__main__":
    main()
