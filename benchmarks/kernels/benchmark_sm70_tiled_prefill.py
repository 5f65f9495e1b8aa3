# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Time and memory of the SM70 linear kernels: tiled, untiled, and cuBLAS.

Three tables.

prefill: a row for each projection of a 27B-class model, shard and number of
tokens. `untiled` is the control: the same kernels, with the whole weight
dequantised first and a gated layer's gate and up products in full. `dense` is
cuBLAS on FP16 weights that lie ready, plus the activation. `bits` says whether the
tiled output equals the untiled one bit for bit. `peak` is the most memory that
torch has allocated during a call, beyond weight, input and output; the scratch
that all layers share is in it. `floor` is what the slower of arithmetic and memory
needs: the operations at the rate of the faster of two square cuBLAS products of
this run (a deep one can be a little faster still), the bytes (packed weight, input,
output) at the rate of a large copy.

decode: the packed kernel at a few tokens, against the bytes that it must read
(packed weight and scales) at the rate of the copy, and against upstream's Marlin
kernel where there is one. No activation in either.

threshold: the packed kernel against tiles, by the number of tokens; where tiles
win is the place for VLLM_SM70_SMALL_BATCH.

On CUDA, calls are captured into a graph, so that launches on the host cost nothing;
inputs and outputs rotate, and so do weights while they would fit the L2 cache.
Each time is the median of several replays; what a row compares takes
turns, a replay each; the ratio to untiled is the mean of the rounds' ratios, with
its standard error. On the CPU calls are timed one by one and peaks are not measured.

A card at its power limit lowers its clock, so what ran before a call can count too.
The products of the prefill table are timed after rests; `--lead` asks for the times
at the limit instead.
"""

import argparse
import functools
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
from sm70_timing import (
    Pace,
    Timing,
    copy_rate,
    ratio_by_rounds,
    time_in_turns,
)

from vllm.model_executor.kernels.linear.sm70 import linear, ops
from vllm.model_executor.kernels.linear.sm70.scratch import reset_scratch
from vllm.model_executor.kernels.linear.sm70.settings import AUTO_WIDTH
from vllm.model_executor.kernels.linear.sm70.tiling import MIB, TilePlan, plan_tiles

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
FORMATS = ("nvfp4", "fp8-block", "fp8-row")
MAX_SETS = 8


@dataclass(frozen=True)
class Projection:
    """A linear layer of the 27B class: hidden 5120, intermediate 17408."""

    name: str
    depth: int
    columns: int  # after the activation, if gated
    gated: bool = False
    row_parallel: bool = False

    def shard(self, tp: int) -> "Projection":
        depth, columns = self.depth, self.columns
        if self.row_parallel:
            depth //= tp
        else:
            columns //= tp
        return Projection(self.name, depth, columns, self.gated, self.row_parallel)

    @property
    def rows(self) -> int:
        """Rows of the weight."""
        return self.columns * (2 if self.gated else 1)


PROJECTIONS = {
    p.name: p
    for p in (
        Projection("gate_up", 5120, 17408, gated=True),
        Projection("down", 17408, 5120, row_parallel=True),
        Projection("qkvz", 5120, 16384),
        Projection("qkv", 5120, 14336),
        Projection("out", 6144, 5120, row_parallel=True),
    )
}


# RESTED and LED are the prefill table's on CUDA: a few large products after rests, or
# many of them after more of the same.
PLAIN = Pace(repeats=12)
RESTED = Pace(repeats=2, replays=18, rest_s=0.06)
LED = Pace(repeats=48, replays=6)


@dataclass
class Machine:
    """The device and what it was measured to do."""

    device: torch.device
    name: str
    pace: Pace
    copy_bytes_per_s: float = 0.0
    operations_per_s: float = 0.0
    l2_bytes: int = 0

    @property
    def on_cuda(self) -> bool:
        return self.device.type == "cuda"

    def floor_s(self, operations: float, nbytes: float) -> float:
        return max(operations / self.operations_per_s, nbytes / self.copy_bytes_per_s)

    def time(self, calls: Sequence[Callable[[], object]]) -> float:
        """Return the seconds of one call; the calls take turns."""
        return self.time_in_turns(calls)[0].seconds

    def time_in_turns(self, *kinds: Sequence[Callable[[], object]]) -> list[Timing]:
        """Time one call of each kind; the kinds take turns too."""
        return time_in_turns(kinds, self.pace, self.device)

    def peak_bytes(self, call: Callable[[], torch.Tensor]) -> int:
        """Return the most bytes that a call allocates, its result not counted."""
        if not self.on_cuda:
            return 0
        reset_scratch()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before - result.nbytes


def measure_machine(device: str, pace: Pace, dtype: torch.dtype) -> Machine:
    on_cuda = device == "cuda"
    name = (
        torch.cuda.get_device_name()
        if on_cuda
        else f"CPU, {torch.get_num_threads()} threads"
    )
    machine = Machine(torch.device(device), name, pace)
    if on_cuda:
        machine.l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    machine.copy_bytes_per_s = copy_rate(pace.repeats, machine.device, pace.rest_s)
    machine.operations_per_s = product_rate(machine, dtype)
    return machine


def product_rate(machine: Machine, dtype: torch.dtype) -> float:
    """Return additions and multiplications in a second of a large product."""
    rates = []
    for size in (4096, 8192) if machine.on_cuda else (1024,):
        x = torch.randn(size, size, dtype=dtype, device=machine.device)
        w = torch.randn(size, size, dtype=dtype, device=machine.device)
        seconds = machine.time([functools.partial(torch.mm, x, w.t())])
        rates.append(2 * size**3 / seconds)
    return max(rates)


@dataclass
class Case:
    """A projection with tensors to run it on."""

    machine: Machine
    projection: Projection
    tokens: int
    dtype: torch.dtype
    weights: list[linear.PackedWeight]
    packed_bytes: int
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]

    @property
    def operations(self) -> float:
        return 2.0 * self.tokens * self.projection.rows * self.projection.depth

    def plan(self, width: int, lanes: int | None) -> TilePlan:
        p = self.projection
        return plan_tiles(
            p.columns,
            p.depth,
            self.tokens,
            self.dtype.itemsize,
            gated=p.gated,
            width=None if width == AUTO_WIDTH else width,
            max_lanes=lanes or (2 if self.machine.on_cuda else 1),
        )

    def tiled(self, plan: TilePlan) -> list[Callable[[], None]]:
        run = (
            linear.multiply_gated_tiles
            if self.projection.gated
            else linear.multiply_tiles
        )
        return [
            functools.partial(run, x, w, None, plan, out) for x, w, out in self._sets()
        ]

    def peak(self, plan: TilePlan) -> int:
        call = self.tiled(plan)[0]
        out = self.outputs[0]

        def run() -> torch.Tensor:
            call()
            return out.new_empty(0)

        return self.machine.peak_bytes(run)

    def packed(self) -> list[Callable[[], None]]:
        """Calls of the packed kernel, with the activation if gated."""
        shape = (self.tokens, self.projection.rows)
        product = torch.empty(shape, dtype=self.dtype, device=self.machine.device)

        def run(x: torch.Tensor, w: linear.PackedWeight, out: torch.Tensor) -> None:
            if self.projection.gated:
                w.small_gemm(x, None, product)
                ops.silu_and_mul(product, out)
            else:
                w.small_gemm(x, None, out)

        return [functools.partial(run, x, w, out) for x, w, out in self._sets()]

    def dense(self) -> list[Callable[[], None]]:
        """Calls of cuBLAS on dense weights, and the activation."""
        shape = (self.projection.rows, self.projection.depth)
        count = 1 if self.projection.rows * self.projection.depth > 2**25 else 2
        weights = [
            torch.randn(shape, dtype=self.dtype, device=self.machine.device)
            for _ in range(count)
        ]
        product = torch.empty(
            self.tokens, shape[0], dtype=self.dtype, device=self.machine.device
        )

        def run(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> None:
            if self.projection.gated:
                torch.mm(x, w.t(), out=product)
                ops.silu_and_mul(product, out)
            else:
                torch.mm(x, w.t(), out=out)

        return [
            functools.partial(run, x, weights[i % count], out)
            for i, (x, _, out) in enumerate(self._sets())
        ]

    def _sets(
        self,
    ) -> Iterable[tuple[torch.Tensor, linear.PackedWeight, torch.Tensor]]:
        for i in range(max(len(self.weights), len(self.inputs))):
            yield (
                self.inputs[i % len(self.inputs)],
                self.weights[i % len(self.weights)],
                self.outputs[i % len(self.outputs)],
            )


def random_weight(
    weight_format: str, rows: int, depth: int, device: torch.device
) -> tuple[linear.PackedWeight, int]:
    """Return a weight of random codes, and the bytes that it holds."""

    def codes(*shape: int, top: int = 256) -> torch.Tensor:
        return torch.randint(0, top, shape, dtype=torch.uint8, device=device)

    if weight_format == "nvfp4":
        # Block scales around one, and no NaN.
        scales = codes(rows, depth // 16, top=16) + 48
        packed = codes(rows, depth // 2)
        factor = torch.tensor(0.01, device=device)
        return linear.NvFp4Weight(packed, scales, factor), packed.nbytes + scales.nbytes
    # No NaN and no zero sum: E4M3 codes below 0x7f of either sign.
    weight = codes(rows, depth, top=127) | codes(rows, depth, top=2) << 7
    shape = (
        (-(-rows // 128), -(-depth // 128))
        if weight_format == "fp8-block"
        else (rows, 1)
    )
    factors = torch.rand(shape, device=device) * 1e-3
    return linear.Fp8Weight(weight, factors), weight.nbytes + factors.nbytes


def make_case(
    machine: Machine,
    projection: Projection,
    tokens: int,
    dtype: torch.dtype,
    weight_format: str,
) -> Case:
    device = machine.device
    weight, packed_bytes = random_weight(
        weight_format, projection.rows, projection.depth, device
    )
    # Enough of them that none is left in the cache when its turn comes.
    count = min(MAX_SETS, 1 + 2 * machine.l2_bytes // packed_bytes)
    weights = [weight] + [
        random_weight(weight_format, projection.rows, projection.depth, device)[0]
        for _ in range(count - 1)
    ]
    inputs = [
        torch.randn(tokens, projection.depth, dtype=dtype, device=device)
        for _ in range(2)
    ]
    outputs = [
        torch.empty(tokens, projection.columns, dtype=dtype, device=device)
        for _ in range(2)
    ]
    return Case(
        machine, projection, tokens, dtype, weights, packed_bytes, inputs, outputs
    )


def marlin_calls(
    projection: Projection, inputs: list[torch.Tensor], count: int
) -> list[Callable[[], object]] | str:
    """Return calls of upstream's Marlin kernel on as many weights, or why not."""
    from vllm.model_executor.kernels.linear.nvfp4.base import NvFp4LinearLayerConfig
    from vllm.model_executor.kernels.linear.nvfp4.marlin import MarlinNvFp4LinearKernel

    supported, reason = MarlinNvFp4LinearKernel.is_supported()
    if not supported:
        return str(reason)
    try:
        kernel = MarlinNvFp4LinearKernel(NvFp4LinearLayerConfig())
        layers = []
        for _ in range(count):
            weight, _ = random_weight(
                "nvfp4", projection.rows, projection.depth, inputs[0].device
            )
            assert isinstance(weight, linear.NvFp4Weight)
            layer: Any = SimpleNamespace(
                weight=weight.packed,
                weight_scale=weight.block_scales.view(torch.float8_e4m3fn),
                weight_global_scale=weight.global_scale,
                output_size_per_partition=projection.rows,
                input_size_per_partition=projection.depth,
                params_dtype=inputs[0].dtype,
            )
            kernel.process_weights_after_loading(layer)
            layers.append(layer)
        calls: list[Callable[[], object]] = [
            functools.partial(kernel.apply_weights, layer, inputs[i % len(inputs)])
            for i, layer in enumerate(layers)
        ]
        calls[0]()
    except (RuntimeError, NotImplementedError, AttributeError) as error:
        # A build without the kernel for this GPU.
        return str(error).splitlines()[0]
    return calls


@dataclass
class Report:
    """Rows as they are printed, kept for `--json`."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    paces: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(self, line: str, **row: Any) -> None:
        print(line, flush=True)
        self.rows.append(row)


def run_prefill(machine: Machine, options: argparse.Namespace, report: Report) -> None:
    print(
        f"\n{'prefill':8} TP {'K':>5} {'N':>5} {'M':>5} {'width':>6} lanes bits "
        f"{'tiled ms':>9} {'untiled':>9} {'dense':>9} {'floor':>9} "
        f"{'/untiled':>8} {'':6} {'/dense':>7} {'peak MiB':>9} {'untiled':>8}"
    )
    for name in options.projections:
        for tp in options.tp:
            projection = PROJECTIONS[name].shard(tp)
            for tokens in options.tokens:
                case = make_case(
                    machine, projection, tokens, options.dtype, options.format
                )
                prefill_rows(case, tp, options, report)


def prefill_rows(
    case: Case, tp: int, options: argparse.Namespace, report: Report
) -> None:
    machine, p = case.machine, case.projection
    whole = case.plan(0, None)
    whole_peak = case.peak(whole)
    case.tiled(whole)[0]()
    expected = case.outputs[0].clone()
    dense = case.dense()
    nbytes = (
        case.packed_bytes
        + (case.inputs[0].numel() + case.outputs[0].numel()) * case.dtype.itemsize
    )
    floor_s = machine.floor_s(case.operations, nbytes)
    for width in options.tile_widths:
        for lanes in options.lanes:
            plan = case.plan(width, lanes)
            peak = case.peak(plan)
            case.outputs[0].fill_(float("nan"))
            case.tiled(plan)[0]()
            same = torch.equal(case.outputs[0], expected)
            tiled, untiled, cublas = machine.time_in_turns(
                case.tiled(plan), case.tiled(whole), dense
            )
            tiled_s, untiled_s, dense_s = (
                timing.seconds for timing in (tiled, untiled, cublas)
            )
            ratio, error = ratio_by_rounds(tiled, untiled)
            report.add(
                f"{p.name:8} {tp:2} {p.depth:5} {p.columns:5} {case.tokens:5} "
                f"{plan.width:6} {plan.lanes:5} {'same' if same else 'DIFF':4} "
                f"{tiled_s * 1e3:9.3f} {untiled_s * 1e3:9.3f} {dense_s * 1e3:9.3f} "
                f"{floor_s * 1e3:9.3f} {ratio:8.3f} ±{error:5.3f} "
                f"{tiled_s / dense_s:7.3f} {peak / MIB:9.1f} {whole_peak / MIB:8.1f}",
                table="prefill",
                projection=p.name,
                tp=tp,
                depth=p.depth,
                columns=p.columns,
                tokens=case.tokens,
                width=plan.width,
                lanes=plan.lanes,
                same_bits=same,
                tiled_s=tiled_s,
                untiled_s=untiled_s,
                dense_s=dense_s,
                untiled_ratio=ratio,
                untiled_ratio_error=error,
                floor_s=floor_s,
                operations=case.operations,
                bytes=nbytes,
                peak_bytes=peak,
                untiled_peak_bytes=whole_peak,
            )
    reset_scratch()


def run_decode(machine: Machine, options: argparse.Namespace, report: Report) -> None:
    print(
        f"\n{'decode':8} TP {'K':>5} {'N':>5} {'M':>5} {'us':>8} {'GB/s':>7} "
        f"{'of copy':>7} {'marlin us':>9} {'/marlin':>7}"
    )
    for name in options.projections:
        for tp in options.tp:
            shard = PROJECTIONS[name].shard(tp)
            # The product alone, as Marlin makes it.
            projection = Projection(shard.name, shard.depth, shard.rows)
            for tokens in options.decode_tokens:
                case = make_case(
                    machine, projection, tokens, options.dtype, options.format
                )
                calls: list[Callable[[], object]] | str = "not NVFP4"
                if options.format == "nvfp4":
                    calls = marlin_calls(projection, case.inputs, len(case.weights))
                if isinstance(calls, str):
                    seconds, marlin_s = machine.time(case.packed()), None
                    text = calls
                else:
                    packed, marlin = machine.time_in_turns(case.packed(), calls)
                    seconds, marlin_s = packed.seconds, marlin.seconds
                    text = f"{marlin_s * 1e6:9.1f} {seconds / marlin_s:7.2f}"
                rate = case.packed_bytes / seconds
                of_copy = rate / machine.copy_bytes_per_s
                report.add(
                    f"{p_text(projection, tp, tokens)} {seconds * 1e6:8.1f} "
                    f"{rate / 1e9:7.0f} {of_copy:7.2f} {text}",
                    table="decode",
                    projection=name,
                    tp=tp,
                    tokens=tokens,
                    seconds=seconds,
                    packed_bytes=case.packed_bytes,
                    of_copy=of_copy,
                    marlin_s=marlin_s,
                )


def run_threshold(
    machine: Machine, options: argparse.Namespace, report: Report
) -> None:
    print(
        f"\n{'by size':8} TP {'K':>5} {'N':>5} {'M':>5} {'packed us':>9} "
        f"{'tiles us':>9} {'tiles/packed':>12}"
    )
    for name in options.projections:
        for tp in options.tp:
            projection = PROJECTIONS[name].shard(tp)
            for tokens in options.threshold_tokens:
                case = make_case(
                    machine, projection, tokens, options.dtype, options.format
                )
                plan = case.plan(options.tile_widths[0], options.lanes[0])
                packed, tiles = machine.time_in_turns(case.packed(), case.tiled(plan))
                packed_s, tiles_s = packed.seconds, tiles.seconds
                report.add(
                    f"{p_text(projection, tp, tokens)} {packed_s * 1e6:9.1f} "
                    f"{tiles_s * 1e6:9.1f} {tiles_s / packed_s:12.2f}",
                    table="threshold",
                    projection=name,
                    tp=tp,
                    tokens=tokens,
                    packed_s=packed_s,
                    tiles_s=tiles_s,
                )


def p_text(projection: Projection, tp: int, tokens: int) -> str:
    return (
        f"{projection.name:8} {tp:2} {projection.depth:5} {projection.columns:5} "
        f"{tokens:5}"
    )


def width(text: str) -> int:
    return AUTO_WIDTH if text == "auto" else int(text)


def count(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected 1 or more")
    return number


def seconds(text: str) -> float:
    if not 0 <= (number := float(text)) < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: expected 0 or more")
    return number


def pace_of(table: str, options: argparse.Namespace) -> Pace:
    """Return how a table's calls are timed: by what is given, else by default."""
    pace = PLAIN
    if table == "prefill" and options.device == "cuda":
        if options.lead:
            pace = replace(LED, lead_s=options.lead)
        elif options.rest != 0:
            pace = RESTED
    given = {
        "repeats": options.repeats,
        "replays": options.replays,
        "rest_s": options.rest,
    }
    return replace(pace, **{k: v for k, v in given.items() if v is not None})


TABLES = {"prefill": run_prefill, "decode": run_decode, "threshold": run_threshold}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="float16", choices=list(DTYPES))
    parser.add_argument("--format", default="nvfp4", choices=FORMATS)
    parser.add_argument(
        "--tables",
        nargs="+",
        default=list(TABLES),
        choices=list(TABLES),
    )
    parser.add_argument(
        "--projections", nargs="+", default=list(PROJECTIONS), choices=list(PROJECTIONS)
    )
    parser.add_argument("--tp", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1024, 8192])
    parser.add_argument(
        "--tile-widths",
        nargs="+",
        type=width,
        default=[AUTO_WIDTH],
        help="output columns of a tile, or auto (default)",
    )
    parser.add_argument(
        "--lanes",
        nargs="+",
        type=lambda text: int(text) or None,
        default=[None],
        help="tiles in flight, 0 for the default",
    )
    parser.add_argument(
        "--decode-tokens", nargs="+", type=int, default=[1, 2, 4, 8, 16]
    )
    parser.add_argument(
        "--threshold-tokens",
        nargs="+",
        type=int,
        default=[1, 4, 16, 32, 64, 96, 128, 192, 256, 384, 512],
    )
    parser.add_argument(
        "--repeats",
        type=count,
        help=f"calls in a graph (default: {PLAIN.repeats}; {RESTED.repeats} in the "
        f"prefill table, if it rests, {LED.repeats} with --lead)",
    )
    parser.add_argument(
        "--replays",
        type=count,
        help=f"of a graph, for each median (default: {PLAIN.replays}; {RESTED.replays} "
        f"in the prefill table, if it rests, {LED.replays} with --lead)",
    )
    parser.add_argument(
        "--rest",
        type=seconds,
        metavar="SECONDS",
        help="before each replay, so that a card that lowers its clock under load "
        f"need not (default: 0; {RESTED.rest_s:g} in the prefill table on CUDA, unless "
        "--lead is given)",
    )
    parser.add_argument(
        "--lead",
        type=seconds,
        default=0.0,
        metavar="SECONDS",
        help="in the prefill table on CUDA, of the same calls before each replay, so "
        "that each runs at the clock that it can sustain; for instance 0.25",
    )
    parser.add_argument("--json", help="also write the rows to this file")
    options = parser.parse_args()
    options.dtype = DTYPES[options.dtype]

    reason = ops.unavailable_reason(options.device)
    if reason is not None:
        parser.error(reason)
    torch.manual_seed(0)
    report = Report()
    machine = None
    for table, run in TABLES.items():
        if table not in options.tables:
            continue
        pace = pace_of(table, options)
        if machine is None or machine.pace != pace:
            machine = measure_machine(options.device, pace, options.dtype)
            print(
                f"{machine.name}, torch {torch.__version__}, {options.format} to "
                f"{options.dtype}: copy {machine.copy_bytes_per_s / 1e9:.0f} GB/s, "
                f"product {machine.operations_per_s / 1e12:.1f} TFLOPS"
            )
            if machine.on_cuda:
                print(pace)
        report.paces[table] = asdict(pace)
        run(machine, options, report)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(
                {"machine": machine and machine.name, **asdict(report)}, file, indent=1
            )


if __name__ == "__main__":
    main()
