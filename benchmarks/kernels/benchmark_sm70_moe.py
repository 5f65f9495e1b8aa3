# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Scratch and time of the SM70 FP8 experts: bounded, unbounded, and upstream's.

prefill: a row for each layer, number of tokens and width of the second product's
tile. The width of all output columns is the unbounded form of the same kernels, and
`ratio` is the time against it; `bits` says whether the result equals it bit for
bit. `scratch` is what the three operators need besides input and output, in MiB:
the activated rows, the tile and the routes. `before` is what a step needs that
permutes its inputs and keeps both gate/up and activated rows and every expert's
output rows, as upstream's modular kernels do, at 2 bytes a number.

decode: the same at a few tokens, against the bytes of the experts that the tokens
chose, at the rate of a large copy (`of copy`: 1.00 is the floor).

upstream (CUDA only): its Triton experts, on FP8 and on 16-bit weights: the time
against ours in its unbounded form, and the most memory that torch has allocated
during a call beyond input and output, in MiB. benchmark_moe_token_chunks.py has
those in chunks of tokens.

kernels (CUDA only, with --kernels): each kernel by its number, in microseconds
(csrc/sm70/moe_ops.cu), at `--kernel-tokens` too: where they cross is the place for
moe_plan.h's constants, in `rows` of an expert on average. -1 is what it chooses.

On CUDA, calls are captured into a graph, so that launches on the host cost nothing;
calls with different routes take turns, so that decode reads its weights from memory.
Each time is a median. On the CPU use a small layer: `--layers small`.
"""

import argparse
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from sm70_timing import copy_rate, time_calls

from vllm.model_executor.kernels.linear.sm70 import ops
from vllm.model_executor.layers.fused_moe import sm70_ops
from vllm.model_executor.layers.fused_moe.activation import MoEActivation

MIB = 2**20
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
KERNELS = (-1, 1, 2, 4, 16, 64, 128)
ROUTES = 4  # calls that take turns


@dataclass(frozen=True)
class Size:
    """A layer: hidden size, intermediate size, experts, experts of a token."""

    hidden: int
    intermediate: int
    experts: int
    top_k: int

    def scratch_bytes(self, tokens: int, width: int) -> int:
        """Bytes beside input and output, the activations of 2 bytes."""
        rows = tokens * self.top_k
        tile = (rows - tokens) * 2 * width
        return rows * (2 * self.intermediate + 4) + tile + 4 * (self.experts + 1)

    def bytes_before(self, tokens: int) -> int:
        """Bytes of a step that keeps everything for tokens x top_k rows."""
        rows = tokens * self.top_k
        return rows * 2 * (2 * self.hidden + 3 * self.intermediate)

    @property
    def expert_bytes(self) -> int:
        """Bytes of an expert's FP8 codes."""
        return 3 * self.hidden * self.intermediate


LAYERS = {
    "35b-a3b": Size(2048, 512, 256, 8),
    "512x10": Size(2560, 512, 512, 10),
    "mixtral": Size(4096, 14336, 8, 2),
    "small": Size(256, 128, 16, 4),
}


@dataclass
class Weights:
    """FP8 codes as bytes, and block scales, of all experts."""

    w13: torch.Tensor
    w13_scale: torch.Tensor
    w2: torch.Tensor
    w2_scale: torch.Tensor


@dataclass
class Batch:
    """Tokens and their routes, and the output."""

    x: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    out: torch.Tensor


def make_weights(size: Size, device: str) -> Weights:
    """Return random weights without NaN, of about unit size in all."""

    def codes(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8, device=device) & 0xB7

    def scales(rows: int, columns: int) -> torch.Tensor:
        shape = size.experts, -(-rows // 128), -(-columns // 128)
        return torch.rand(shape, device=device) * columns**-0.5

    hidden, middle = size.hidden, size.intermediate
    return Weights(
        codes(size.experts, 2 * middle, hidden),
        scales(2 * middle, hidden),
        codes(size.experts, hidden, middle),
        scales(hidden, middle),
    )


def make_batch(size: Size, tokens: int, dtype: torch.dtype, device: str) -> Batch:
    """Return random tokens whose experts are chosen evenly, without repeats."""
    x = torch.randn(tokens, size.hidden, device=device).to(dtype)
    scores = torch.rand(tokens, size.experts, device=device)
    weights, ids = scores.topk(size.top_k)
    weights = weights / weights.sum(-1, keepdim=True)
    return Batch(x, ids.int(), weights, torch.empty_like(x))


def ours(
    size: Size, weights: Weights, batch: Batch, width: int, config: int = -1
) -> Callable[[], None]:
    """Return a call of the three operators, with scratch of its own."""
    tokens, rows = batch.x.shape[0], batch.topk_ids.numel()
    device, dtype = batch.x.device, batch.x.dtype
    sorted_rows = torch.empty(rows, dtype=torch.int32, device=device)
    offsets = torch.empty(size.experts + 1, dtype=torch.int32, device=device)
    act = torch.empty(rows, size.intermediate, dtype=dtype, device=device)
    partial = torch.empty(rows - tokens, width, dtype=dtype, device=device)

    def call() -> None:
        sm70_ops.moe_route(batch.topk_ids, None, sorted_rows, offsets)
        sm70_ops.fp8_moe_gate_up(
            batch.x,
            weights.w13,
            weights.w13_scale,
            sorted_rows,
            offsets,
            MoEActivation.SILU,
            act,
            batch_tokens=tokens,
            config=config,
        )
        sm70_ops.fp8_moe_down(
            act,
            weights.w2,
            weights.w2_scale,
            sorted_rows,
            offsets,
            batch.topk_ids,
            None,
            batch.topk_weights,
            partial,
            batch.out,
            tokens,
            config,
        )

    return call


def turns(
    size: Size, weights: Weights, tokens: int, width: int, config: int, run: "Machine"
) -> list[Callable[[], None]]:
    """Return calls on batches with different routes. Long ones differ anyway."""
    count = ROUTES if tokens <= 64 else 1
    batches = [make_batch(size, tokens, run.dtype, run.device) for _ in range(count)]
    return [ours(size, weights, batch, width, config) for batch in batches]


@dataclass
class Machine:
    """Where and how to time."""

    device: str
    dtype: torch.dtype
    repeats: int
    worst_deviation: float = 0

    def time(self, calls: Sequence[Callable[[], object]]) -> float:
        """Return a call's seconds, and remember how far measurements differed."""
        timing = time_calls(calls, self.repeats, self.device)
        self.worst_deviation = max(self.worst_deviation, timing.deviation)
        return timing.seconds

    def peak_bytes(self, call: Callable[[], object]) -> int:
        """Return the most that torch allocates during a call, beyond before it."""
        call()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before


def prefill(
    name: str, weights: Weights, run: Machine, options: argparse.Namespace
) -> None:
    size = LAYERS[name]
    for tokens in options.tokens:
        batch = make_batch(size, tokens, run.dtype, run.device)
        whole = run.time([ours(size, weights, batch, size.hidden)])
        expected = batch.out.clone()
        widths = [w for w in options.widths if w < size.hidden]
        for width in [size.hidden, *widths]:
            batch.out.fill_(float("nan"))
            seconds = run.time([ours(size, weights, batch, width)])
            same = "same" if torch.equal(batch.out, expected) else "DIFFER"
            # 2 operations for each number of each weight, for each row.
            rate = 2 * size.expert_bytes * tokens * size.top_k / seconds
            print(
                f"{name:10} {tokens:6} {width:6} "
                f"{size.scratch_bytes(tokens, width) / MIB:9.1f} "
                f"{size.bytes_before(tokens) / MIB:9.1f} {seconds * 1e6:10.1f} "
                f"{seconds / whole:6.3f} {rate / 1e12:8.2f} {same:>6}"
            )


def decode(
    name: str, weights: Weights, copy: float, run: Machine, options: argparse.Namespace
) -> None:
    size = LAYERS[name]
    for tokens in options.decode_tokens:
        calls = turns(size, weights, tokens, size.hidden, -1, run)
        seconds = run.time(calls)
        # The expected number of experts that even routes touch.
        missed = (1 - size.top_k / size.experts) ** tokens
        nbytes = size.experts * (1 - missed) * size.expert_bytes
        print(
            f"{name:10} {tokens:6} {seconds * 1e6:10.1f} {nbytes / seconds / 1e9:8.1f} "
            f"{nbytes / seconds / copy:8.2f}"
        )


def kernels(
    name: str, weights: Weights, run: Machine, options: argparse.Namespace
) -> None:
    size = LAYERS[name]
    every = {*options.decode_tokens, *options.kernel_tokens, *options.tokens}
    for tokens in sorted(every):
        cells = []
        for number in KERNELS:
            # Reading a weight again for every four rows takes too long.
            if 1 <= number <= 4 and tokens > 256:
                continue
            calls = turns(size, weights, tokens, size.hidden, number, run)
            cells.append(f"{number}: {run.time(calls) * 1e6:.1f}")
        rows = tokens * size.top_k / size.experts
        print(f"{name:10} {tokens:6} {rows:7.2f}  {'  '.join(cells)}")


def upstream(
    name: str, weights: Weights, run: Machine, options: argparse.Namespace
) -> None:
    """Time upstream's Triton experts."""
    from vllm.model_executor.layers.fused_moe.config import (
        FUSED_MOE_UNQUANTIZED_CONFIG,
        FusedMoEQuantConfig,
        fp8_w8a8_moe_quant_config,
    )
    from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts

    size = LAYERS[name]
    scales = weights.w13_scale, weights.w2_scale
    fp8 = [w.view(torch.float8_e4m3fn) for w in (weights.w13, weights.w2)]
    kinds = {
        "fp8": (fp8, fp8_w8a8_moe_quant_config(*scales, block_shape=[128, 128])),
        "16-bit": ([w.to(run.dtype) for w in fp8], FUSED_MOE_UNQUANTIZED_CONFIG),
    }
    for tokens in [*options.decode_tokens, *options.tokens]:
        batch = make_batch(size, tokens, run.dtype, run.device)
        base = run.time([ours(size, weights, batch, size.hidden)])
        for kind, ((w13, w2), config) in kinds.items():

            def call(
                w13: torch.Tensor = w13,
                w2: torch.Tensor = w2,
                config: FusedMoEQuantConfig = config,
                batch: Batch = batch,
            ) -> torch.Tensor:
                routes = batch.topk_weights, batch.topk_ids
                return fused_experts(batch.x, w13, w2, *routes, quant_config=config)

            peak = run.peak_bytes(call) - batch.out.nbytes
            seconds = run.time([call])
            print(
                f"{name:10} {tokens:6} {kind:>8} {peak / MIB:9.1f} "
                f"{seconds * 1e6:10.1f} {seconds / base:6.3f}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    on_cuda = torch.cuda.is_available()
    integers = functools.partial(parser.add_argument, nargs="+", type=int)
    parser.add_argument("--device", default="cuda" if on_cuda else "cpu")
    parser.add_argument("--dtype", default="float16", choices=list(DTYPES))
    parser.add_argument(
        "--layers", nargs="+", default=["35b-a3b", "512x10"], choices=list(LAYERS)
    )
    integers("--tokens", default=[1024, 2048, 6400, 8192])
    integers("--decode-tokens", default=[1, 2, 4, 8, 16, 32, 64])
    integers("--kernel-tokens", default=[96, 128, 192, 256, 512])
    integers("--widths", default=[128, 256, 384, 512, 1024], help="columns of a tile")
    parser.add_argument("--kernels", action="store_true", help="each by its number")
    parser.add_argument("--no-upstream", action="store_true")
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    device = torch.device(options.device).type
    reason = ops.unavailable_reason(device)
    if reason is not None:
        parser.error(reason)

    torch.manual_seed(0)
    run = Machine(options.device, DTYPES[options.dtype], options.repeats)
    copy = copy_rate(options.repeats, options.device)
    where = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    print(
        f"{where}, {options.dtype}, torch {torch.__version__}, "
        f"copy {copy / 1e9:.0f} GB/s"
    )
    head = f"{'layer':10} {'tokens':>6}"
    weights = {
        name: make_weights(LAYERS[name], options.device) for name in options.layers
    }
    print(
        f"\nprefill\n{head} {'width':>6} {'scratch':>9} {'before':>9} {'us':>10} "
        f"{'ratio':>6} {'TFLOP/s':>8} {'bits':>6}"
    )
    for name in options.layers:
        prefill(name, weights[name], run, options)
    print(f"\ndecode\n{head} {'us':>10} {'GB/s':>8} {'of copy':>8}")
    for name in options.layers:
        decode(name, weights[name], copy, run, options)
    if device == "cuda" and options.kernels:
        print(f"\nkernels\n{head} {'rows':>7}  us by number")
        for name in options.layers:
            kernels(name, weights[name], run, options)
    if device == "cuda" and not options.no_upstream:
        print(f"\nupstream\n{head} {'weights':>8} {'peak':>9} {'us':>10} {'/ ours':>6}")
        for name in options.layers:
            upstream(name, weights[name], run, options)
    print(f"\nlargest deviation of a measurement: {run.worst_deviation:.1%}")


if __name__ == "__main__":
    main()
