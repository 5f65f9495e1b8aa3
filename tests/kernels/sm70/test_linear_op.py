# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The SM70 linear operators: tiles give the bits of no tiles, on any device."""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from vllm.model_executor.kernels.linear.sm70 import linear, ops, scratch
from vllm.model_executor.kernels.linear.sm70.scratch import Scratch, scratch_of
from vllm.model_executor.kernels.linear.sm70.settings import (
    AUTO_WIDTH,
    LinearSettings,
)
from vllm.model_executor.kernels.linear.sm70.tiling import MIB, TilePlan, plan_tiles

from .reference import assert_same_bits, fp8_reference, nvfp4_reference

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
FORMATS = ["nvfp4", "fp8-block", "fp8-row"]
# Scaled down, with the ragged ends of the real ones: N = 515 is odd, 4120 / 8 and
# 3584 / 8; of a gated weight N is both halves.
SHAPES = [(272, 515), (512, 448), (256, 1030), (144, 1152)]
WIDTHS = [AUTO_WIDTH, 128, 136, 200, 256, 384, 512, 1000]
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float32: 1e-5}


@pytest.fixture(autouse=True)
def no_scratch_left() -> Iterator[None]:
    scratch.reset_scratch()
    yield
    scratch.reset_scratch()


class Weight(NamedTuple):
    """An operator's name, its weight arguments, and the weight itself, [N, K]."""

    operator: str
    arguments: tuple[torch.Tensor, ...]
    dense: Callable[[torch.dtype], torch.Tensor]

    def __call__(
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        gated: bool = False,
        width: int = AUTO_WIDTH,
        small_batch: int = 0,
    ) -> torch.Tensor:
        kind = "gated_linear" if gated else "linear"
        operator = getattr(torch.ops.vllm, f"sm70_{self.operator}_{kind}")
        return operator(x, *self.arguments, bias, width, small_batch)

    def reference(
        self, x: torch.Tensor, bias: torch.Tensor | None, gated: bool
    ) -> torch.Tensor:
        """In FP64, from the weight as rounded to the dtype of x."""
        out = x.double() @ self.dense(x.dtype).double().t().to(x.device)
        if bias is not None:
            out += bias.double()
        if gated:
            gate, up = out.chunk(2, dim=-1)
            out = gate * gate.sigmoid() * up
        return out


def make_weight(kind: str, rows: int, depth: int, device: str, seed: int = 0) -> Weight:
    generator = torch.Generator().manual_seed(seed)

    def codes(*shape: int, low: int = 0, high: int = 256) -> torch.Tensor:
        return torch.randint(low, high, shape, dtype=torch.uint8, generator=generator)

    if kind == "nvfp4":
        packed = codes(rows, depth // 2)
        scales = codes(rows, depth // 16, low=48, high=64)
        factor = torch.tensor(0.0123)
        arguments = (packed, scales, factor)
        return Weight(
            "nvfp4",
            tuple(t.to(device) for t in arguments),
            lambda dtype: nvfp4_reference(*arguments, dtype),
        )
    # Of either sign, no NaN, at most 30.
    weight = codes(rows, depth, high=0x60) | codes(rows, depth, high=2) << 7
    shape = (-(-rows // 128), -(-depth // 128)) if kind == "fp8-block" else (rows, 1)
    factors = torch.rand(shape, generator=generator) * 0.01
    return Weight(
        "fp8",
        (weight.to(device), factors.to(device)),
        lambda dtype: fp8_reference(weight, factors, dtype),
    )


def random_input(
    rows: int, depth: int, device: str, dtype: torch.dtype, seed: int = 0
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randn(rows, depth, generator=generator).to(device, dtype)


def dtypes_of(device: str) -> list[torch.dtype]:
    # The product on CUDA is for tensor cores.
    half = [torch.float16]
    if device == "cpu":
        return half + [torch.bfloat16, torch.float32]
    return half + [torch.bfloat16] * (torch.cuda.get_device_capability() >= (8, 0))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("device", DEVICES)
def test_every_tile_width_gives_the_same_bits(
    device: str, kind: str, gated: bool
) -> None:
    for (depth, columns), dtype in itertools.product(SHAPES, dtypes_of(device)):
        rows = 2 * columns if gated else columns
        weight = make_weight(kind, rows, depth, device)
        bias = random_input(1, rows, device, dtype)[0]
        for tokens, used_bias in itertools.product((1, 16, 17, 133), (None, bias)):
            x = random_input(tokens, depth, device, dtype)
            whole = weight(x, used_bias, gated=gated, width=0)
            for width in WIDTHS:
                tiled = weight(x, used_bias, gated=gated, width=width)
                assert_same_bits(tiled, whole)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("device", DEVICES)
def test_both_paths_against_fp64(
    device: str, kind: str, with_bias: bool, gated: bool
) -> None:
    depth, columns = 272, 448
    rows = 2 * columns if gated else columns
    weight = make_weight(kind, rows, depth, device)
    for dtype in dtypes_of(device):
        bias = random_input(1, rows, device, dtype)[0] if with_bias else None
        for tokens in (1, 3, 16, 33):
            x = random_input(tokens, depth, device, dtype)
            expected = weight.reference(x, bias, gated)
            for small_batch in (0, 1000):
                actual = weight(
                    x, bias, gated=gated, width=128, small_batch=small_batch
                )
                assert actual.dtype == dtype and actual.shape == expected.shape
                assert actual.is_contiguous()
                error = (actual.double() - expected).abs().max()
                assert error <= TOLERANCE[dtype] * expected.abs().max()


class Calls(list):
    """Names of the operations that ran, in order."""

    def record(self, monkeypatch: pytest.MonkeyPatch, *names: str) -> "Calls":
        for name in names:
            original = getattr(ops, name)

            def wrapper(*args: Any, original: Any = original, name: str = name) -> Any:
                self.append(name)
                return original(*args)

            monkeypatch.setattr(ops, name, wrapper)
        return self


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("kind", ["nvfp4", "fp8-row"])
@pytest.mark.parametrize("device", DEVICES)
def test_the_threshold_decides(
    device: str, kind: str, gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = make_weight(kind, 512, 128, device)
    small, dequantize = (
        f"{weight.operator}_small_gemm",
        (f"{weight.operator}_dequantize_into"),
    )
    calls = Calls().record(monkeypatch, small, dequantize, "silu_and_mul")

    def run(tokens: int) -> list[str]:
        calls.clear()
        weight(
            random_input(tokens, 128, device, torch.float16),
            gated=gated,
            width=128,
            small_batch=24,
        )
        return list(calls)

    for tokens in (1, 23, 24):
        assert run(tokens) == [small] + ["silu_and_mul"] * gated
    # Gate and up rows by one call.
    tile = [dequantize] + ["silu_and_mul"] * gated
    for tokens in (25, 64):
        assert run(tokens) == tile * (2 if gated else 4)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_no_tokens(device: str, gated: bool) -> None:
    weight = make_weight("nvfp4", 512, 128, device)
    x = torch.empty(0, 128, dtype=torch.float16, device=device)
    for small_batch in (0, 16):
        out = weight(x, gated=gated, small_batch=small_batch)
        assert out.shape == (0, 256 if gated else 512)


@pytest.mark.parametrize("device", DEVICES)
def test_strided_input(device: str) -> None:
    weight = make_weight("nvfp4", 256, 128, device)
    wide = random_input(40, 256, device, torch.float16)
    for small_batch in (0, 64):
        out = weight(wide[:, 128:], width=128, small_batch=small_batch)
        same = weight(wide[:, 128:].contiguous(), width=128, small_batch=small_batch)
        assert_same_bits(out, same)


@pytest.mark.parametrize("device", DEVICES)
def test_one_scratch_serves_every_layer(device: str) -> None:
    x = random_input(40, 256, device, torch.float16)
    of_device = scratch_of(x.device)
    assert of_device.nbytes == 0
    lanes = 2 if device == "cuda" else 1
    wide, narrow = (make_weight("nvfp4", n, 256, device) for n in (2048, 512))
    # Tiles of 128 columns: 128 * 256 * 2 bytes a lane.
    narrow(x, width=128)
    assert of_device.nbytes == lanes * 128 * 256 * 2
    address = of_device._memory.data_ptr()
    wide(x, width=128)
    wide(x, width=128, gated=True, small_batch=64)
    assert of_device._memory.data_ptr() == address
    # A gated tile holds gate and up rows.
    wide(x, width=128, gated=True)
    assert of_device.nbytes == lanes * 2 * 128 * 256 * 2
    narrow(x, width=128)
    assert of_device.nbytes == lanes * 2 * 128 * 256 * 2


@pytest.mark.parametrize("device", DEVICES)
def test_declared_sizes_are_allocated_at_the_first_use(device: str) -> None:
    weight = make_weight("nvfp4", 512, 256, device)
    x = random_input(40, 256, device, torch.float16)
    of_device = scratch_of(x.device)
    of_device.declare(3 * MIB)
    of_device.declare(1 * MIB)
    assert of_device.nbytes == 0
    weight(x, width=128)
    assert of_device.nbytes == 3 * MIB


@pytest.mark.parametrize("device", DEVICES)
def test_the_untiled_control_leaves_nothing_behind(device: str) -> None:
    weight = make_weight("nvfp4", 512, 256, device)
    x = random_input(40, 256, device, torch.float16)
    weight(x, width=0)
    weight(x, width=0, gated=True)
    assert scratch_of(x.device).nbytes == 0


@pytest.mark.parametrize("device", DEVICES)
def test_declared_bytes_cover_every_batch(device: str) -> None:
    """What a layer declares is what its widest tiles take."""
    for gated, (depth, columns) in itertools.product((False, True), SHAPES):
        rows = 2 * columns if gated else columns
        declared = linear.scratch_bytes(
            rows,
            depth,
            torch.float16,
            torch.device(device),
            AUTO_WIDTH,
            gated=gated,
        )
        for tokens in (1, 100, 1_000_000):
            plan = plan_tiles(
                columns,
                depth,
                tokens,
                2,
                gated=gated,
                max_lanes=2 if device == "cuda" else 1,
            )
            assert plan.scratch_bytes <= declared


class Limit:
    """Fails allocations of lane memory above a number of bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
        self.nbytes = nbytes
        self.failures = 0
        original = Scratch._lane_memory

        def limited(self_: Scratch, plan: TilePlan) -> Any:
            if plan.transient_bytes > self.nbytes:
                self.failures += 1
                raise torch.OutOfMemoryError("simulated")
            return original(self_, plan)

        monkeypatch.setattr(Scratch, "_lane_memory", limited)


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    messages: list[str] = []
    monkeypatch.setattr(
        scratch.logger,
        "warning_once",
        lambda message, *args: messages.append(message % args),
    )
    return messages


@pytest.mark.parametrize("width", [AUTO_WIDTH, 0, 1024])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_short_memory_narrows_the_tiles(
    device: str,
    gated: bool,
    width: int,
    monkeypatch: pytest.MonkeyPatch,
    warnings: list[str],
) -> None:
    weight = make_weight("nvfp4", 2048, 256, device)
    x = random_input(40, 256, device, torch.float16)
    expected = weight(x, gated=gated, width=width)
    scratch.reset_scratch()
    # A tile of 300 columns in one lane: weight, and product if gated.
    limit = Limit(monkeypatch, 300 * 2 * ((2 * (256 + 40)) if gated else 256))
    assert_same_bits(weight(x, gated=gated, width=width), expected)
    assert limit.failures > 0
    assert len(warnings) == 1
    assert "VLLM_SM70_TILE_WIDTH" in warnings[0] and str(x.device) in warnings[0]
    # The next call does not try the sizes that failed.
    failures = limit.failures
    assert_same_bits(weight(x, gated=gated, width=width), expected)
    assert limit.failures == failures


@pytest.mark.parametrize("device", DEVICES)
def test_no_memory_for_any_tile(
    device: str, monkeypatch: pytest.MonkeyPatch, warnings: list[str]
) -> None:
    weight = make_weight("nvfp4", 2048, 256, device)
    x = random_input(40, 256, device, torch.float16)
    Limit(monkeypatch, 100)
    with pytest.raises(torch.OutOfMemoryError, match="simulated"):
        weight(x)


def test_memory_used_by_a_graph_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a capture has seen stays allocated when a larger layer comes."""
    holder = Scratch(torch.device("cpu"))
    holder._reserve(100, transient=False)
    holder._memory_is_captured = True
    kept = holder._memory.data_ptr()
    holder._reserve(200, transient=False)
    assert [memory.data_ptr() for memory in holder._captured] == [kept]
    assert holder.nbytes == 300
    holder._reserve(300, transient=False)
    assert holder.nbytes == 400


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("kind", ["nvfp4", "fp8-block"])
@pytest.mark.parametrize("device", DEVICES)
def test_torch_accepts_the_operators(device: str, kind: str, gated: bool) -> None:
    weight = make_weight(kind, 512, 128, device)
    name = f"sm70_{weight.operator}_{'gated_linear' if gated else 'linear'}"
    operator = getattr(torch.ops.vllm, name).default
    bias = random_input(1, 512, device, torch.float16)[0]
    for tokens, used_bias in ((8, None), (40, bias)):
        x = random_input(tokens, 128, device, torch.float16)
        torch.library.opcheck(operator, (x, *weight.arguments, used_bias, 128, 16))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("device", DEVICES)
def test_one_graph_for_every_number_of_tokens(
    device: str, backend: str, gated: bool
) -> None:
    """Across the threshold: no second graph, and no scratch among its inputs."""
    weight = make_weight("nvfp4", 512, 128, device)
    graphs: list[torch.fx.GraphModule] = []
    counter = CompileCounterWithBackend(backend)

    def remember(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return counter(graph, inputs)

    def model(x: torch.Tensor) -> torch.Tensor:
        return weight(x * 2, gated=gated, width=128, small_batch=24) + 1

    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=remember)
    for tokens in (25, 24, 23, 2, 200):
        x = random_input(tokens, 128, device, torch.float16)
        assert_same_bits(compiled(x), model(x))
    assert counter.frame_count == 1 and len(graphs) == 1
    tensors = [
        node
        for node in graphs[0].graph.nodes
        if node.op == "placeholder"
        and isinstance(node.meta["example_value"], torch.Tensor)
    ]
    # x and the three parts of the weight.
    assert len(tensors) == 4
    names = [n.target for n in graphs[0].graph.nodes if n.op == "call_function"]
    assert sum("sm70" in str(name) for name in names) == 1


@pytest.mark.parametrize(
    ("width", "batch", "expected"),
    [
        ("auto", "0", (AUTO_WIDTH, 0)),
        ("0", "512", (0, 512)),
        ("1024", "65536", (1024, 65536)),
    ],
)
def test_settings(
    width: str,
    batch: str,
    expected: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_SM70_TILE_WIDTH", width)
    monkeypatch.setenv("VLLM_SM70_SMALL_BATCH", batch)
    found = LinearSettings.from_environment()
    assert (found.tile_width, found.small_batch) == expected


def test_default_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_SM70_TILE_WIDTH", raising=False)
    monkeypatch.delenv("VLLM_SM70_SMALL_BATCH", raising=False)
    found = LinearSettings.from_environment()
    assert found.tile_width == AUTO_WIDTH
    assert found.small_batch > 0


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("TILE_WIDTH", "100", "=100: expected 0 .* a multiple of 8 between 128 and"),
        ("TILE_WIDTH", "-1", "=-1: expected 0 .* a multiple of 8 between 128 and"),
        ("TILE_WIDTH", "wide", "='wide': expected a whole number, or \"auto\""),
        ("SMALL_BATCH", "-1", "=-1: expected 0 .* to 65536 tokens"),
        ("SMALL_BATCH", "65537", "=65537: expected 0 .* to 65536 tokens"),
        ("SMALL_BATCH", "", "='': expected a whole number, or \"auto\""),
    ],
)
def test_settings_that_cannot_work_are_refused(
    name: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"VLLM_SM70_{name}", value)
    with pytest.raises(ValueError, match=f"VLLM_SM70_{name}{message}"):
        LinearSettings.from_environment()


def test_settings_are_part_of_the_compile_cache_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.envs import compile_factors

    monkeypatch.setenv("VLLM_SM70_TILE_WIDTH", "256")
    monkeypatch.setenv("VLLM_SM70_SMALL_BATCH", "7")
    factors = compile_factors()
    assert factors["VLLM_SM70_TILE_WIDTH"] == "256"
    assert factors["VLLM_SM70_SMALL_BATCH"] == "7"


# design.md, section 4: K, N, gated; TP 1, 2, 4 and the padded variants.
REAL_SHAPES = [
    *[(5120, 17408 // tp, True) for tp in (1, 2, 4)],
    *[(17408 // tp, 5120, False) for tp in (1, 2, 4)],
    *[(5120, n, False) for n in (16384, 8192, 4096, 4120, 4128)],
    *[(5120, n, False) for n in (14336, 7168, 3584)],
    *[(6144 // tp, 5120, False) for tp in (1, 2, 4)],
]


@pytest.mark.cuda
@pytest.mark.parametrize(("depth", "columns", "gated"), REAL_SHAPES)
def test_real_shapes_give_the_same_bits(depth: int, columns: int, gated: bool) -> None:
    threshold = LinearSettings.from_environment().small_batch
    batches = [threshold + d for d in (-1, 0, 1)] + [1024, 2048, 4096, 6400, 8192]
    rows = 2 * columns if gated else columns
    weight = make_weight("nvfp4", rows, depth, "cuda")
    ragged = 1000
    for tokens in batches:
        x = random_input(tokens, depth, "cuda", torch.float16)
        whole = weight(x, gated=gated, width=0)
        for width in (AUTO_WIDTH, 128, 512, ragged, 1536, 4096):
            tiled = weight(x, gated=gated, width=width)
            assert torch.equal(tiled, whole), (tokens, width)
        # The path that the threshold chooses is as good as the other.
        chosen = weight(x, gated=gated, small_batch=threshold)
        error = (chosen.float() - whole.float()).abs().max()
        assert error <= 4e-3 * whole.float().abs().max()


@pytest.mark.cuda
def test_peak_memory_of_the_largest_layer() -> None:
    """design.md: 884 MiB untiled; at most 208 MiB, and 600 MiB less, tiled."""
    weight = make_weight("nvfp4", 34816, 5120, "cuda")
    x = random_input(8192, 5120, "cuda", torch.float16)

    def peak(width: int) -> int:
        weight(x[:256], gated=True, width=width)  # cuBLAS's own memory
        scratch.reset_scratch()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = weight(x, gated=True, width=width)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before - out.nbytes

    untiled, tiled = peak(0), peak(AUTO_WIDTH)
    assert untiled >= 884 * MIB
    assert tiled <= 208 * MIB
    assert untiled - tiled >= 600 * MIB


@pytest.mark.cuda
@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("tokens", [8, 200])
def test_graph_replay_with_changed_inputs(tokens: int, gated: bool, warm: bool) -> None:
    """With the scratch there before the capture, or not."""
    weight = make_weight("nvfp4", 1024, 256, "cuda")
    x = random_input(tokens, 256, "cuda", torch.float16)

    def run() -> torch.Tensor:
        first = weight(x, gated=gated, width=128, small_batch=16)
        second = weight(x + 1, gated=gated, width=128, small_batch=16)
        return first + second

    run()
    if not warm:
        scratch.reset_scratch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    # Between capture and replay, a layer that outgrows the scratch.
    wide = make_weight("nvfp4", 2048, 2048, "cuda")
    wide(random_input(200, 2048, "cuda", torch.float16))
    for seed in range(3):
        x.copy_(random_input(tokens, 256, "cuda", torch.float16, seed + 1))
        out.fill_(float("nan"))
        graph.replay()
        replayed = out.clone()
        assert_same_bits(replayed, run())


# Two layers of different shapes cut the one scratch at different places: with equal
# shapes each lane would meet only itself.
TWO_LAYERS = [((4096, 1024), 512), ((1536, 2048), 384)]


def two_layers(rows: int) -> list[Callable[[], torch.Tensor]]:
    calls = []
    for (n, k), width in TWO_LAYERS:
        weight = make_weight("nvfp4", n, k, "cuda", seed=n)
        x = random_input(rows, k, "cuda", torch.float16)
        calls.append(partial(weight, x, width=width))
    return calls


@pytest.mark.cuda
def test_two_streams_share_the_scratch() -> None:
    calls = two_layers(2048)
    expected = [call() for call in calls]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in calls]
    results: list[list[torch.Tensor]] = [[], []]
    for _ in range(20):
        for call, stream, result in zip(calls, streams, results):
            with torch.cuda.stream(stream):
                result.append(call())
    torch.cuda.synchronize()
    for outs, out in zip(results, expected):
        assert all(torch.equal(o, out) for o in outs)


@pytest.mark.cuda
def test_two_streams_in_one_capture() -> None:
    calls = two_layers(512)
    expected = [call() for call in calls]
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            second = calls[1]()
        first = calls[0]()
        main.wait_stream(side)
    for _ in range(5):
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(first, expected[0]) and torch.equal(second, expected[1])
