# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""FP8 experts with bounded scratch: the plan, the choice, and the modular kernel."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from hypothesis import given
from hypothesis import strategies as st

from vllm import distributed
from vllm.model_executor.kernels.linear.sm70 import capability, ops
from vllm.model_executor.layers.fused_moe import modular_kernel as mk
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import (
    FusedMoEConfig,
    FusedMoEParallelConfig,
    RoutingMethodType,
)
from vllm.model_executor.layers.fused_moe.experts import sm70_fp8_moe
from vllm.model_executor.layers.fused_moe.experts.sm70_fp8_moe import (
    Sm70Fp8Experts,
    kernel_scales,
    plan_scratch,
    reserved_second,
)
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import (
    FusedMoEMethodBase,
)
from vllm.model_executor.layers.fused_moe.oracle.fp8 import (
    Fp8MoeBackend,
    convert_to_fp8_moe_kernel_format,
    make_fp8_moe_kernel,
    make_fp8_moe_quant_config,
    resolve_fp8_moe_weight_block_shape,
    select_fp8_moe_backend,
)
from vllm.model_executor.layers.fused_moe.token_chunks import (
    CHUNK_TOKENS,
    MIB,
    WORKSPACE_BUDGET,
    largest_chunk,
    workspace_bytes,
)
from vllm.model_executor.layers.quantization import fp8
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w8a8_fp8 import (  # noqa: E501
    CompressedTensorsW8A8Fp8MoEMethod,
)
from vllm.model_executor.layers.quantization.fp8 import Fp8Config, Fp8MoEMethod
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    GroupShape,
    create_fp8_quant_key,
    kFp8Dynamic128Sym,
    kFp8DynamicTokenSym,
    kFp8Static128BlockSym,
    kFp8StaticChannelSym,
    kFp8StaticTensorSym,
)
from vllm.platforms import PlatformEnum, current_platform
from vllm.platforms.interface import DeviceCapability
from vllm.v1.worker import workspace

from .reference import fp8_reference

BUDGET = Sm70Fp8Experts.workspace_budget_bytes
SILU = MoEActivation.SILU


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CHUNK_TOKENS, raising=False)
    monkeypatch.delenv(WORKSPACE_BUDGET, raising=False)


# The plan.

A3B = dict(top_k=8, experts=256, hidden=2048, intermediate=512, itemsize=2)
WIDE = dict(top_k=10, experts=512, hidden=2560, intermediate=512, itemsize=2)


@pytest.mark.parametrize(
    "tokens, shape, budget, width, mib",
    [
        # 64 MiB of activated rows, 1/4 of indices; a tile's column takes 7/64 MiB.
        (8192, A3B, BUDGET, 512, 120.25),
        (8192, A3B, 120 * MIB, 384, 106.25),
        (8192, A3B, 0, 2048, 288.25),
        (8192, A3B, 64 * MIB, 128, 78.25),
        (6400, WIDE, BUDGET, 512, 119.0),
        (4096, A3B, BUDGET, 1024, 88.13),
        # Decode: whole rows, in one pass.
        (64, A3B, BUDGET, 2048, 2.25),
        (1, A3B, BUDGET, 2048, 0.04),
        # One expert a token: its row is the output's.
        (8192, A3B | {"top_k": 1}, 1, 2048, 32.03),
    ],
)
def test_plan(tokens, shape, budget, width, mib):
    plan = plan_scratch(tokens, **shape, budget_bytes=budget)
    assert plan.tile_width == width
    assert plan.total / MIB == pytest.approx(mib, abs=0.01)


def test_bytes_of_a_token():
    """Of a 35B-A3B layer; upstream's way of permuted copies takes 90,112."""
    one, two = (
        plan_scratch(tokens, **A3B, budget_bytes=1).total for tokens in (1024, 2048)
    )
    # Eight activated rows and indices, and seven times a tile of 128 columns.
    assert (two - one) / 1024 == 8 * (512 * 2 + 4) + 7 * 128 * 2 == 10_016


shapes = st.fixed_dictionaries(
    {
        "top_k": st.integers(1, 16),
        "experts": st.integers(1, 512),
        "hidden": st.integers(1, 512).map(lambda n: 16 * n),
        "intermediate": st.integers(1, 256).map(lambda n: 16 * n),
        "itemsize": st.sampled_from([2, 4]),
    }
)


@given(tokens=st.integers(1, 20_000), shape=shapes, budget=st.integers(0, 2**28))
def test_the_tile_keeps_the_budget_or_is_the_narrowest(tokens, shape, budget):
    plan = plan_scratch(tokens, **shape, budget_bytes=budget)
    hidden = shape["hidden"]
    assert 0 < plan.tile_width <= hidden
    assert plan.tile_width % 128 == 0 or plan.tile_width == hidden
    rows = tokens * (shape["top_k"] - 1)
    assert plan.tile == rows * plan.tile_width * shape["itemsize"]
    if budget == 0 or rows == 0:
        assert plan.tile_width == hidden
    elif plan.total > budget:
        assert plan.tile_width == min(128, hidden)


@given(
    tokens=st.integers(1, 5000),
    more=st.integers(0, 200),
    shape=shapes,
    mib=st.integers(0, 64),
)
def test_a_longer_batch_reserves_for_a_shorter_one(tokens, more, shape, mib):
    budget = mib * MIB

    def reserved(tokens: int) -> int:
        first = plan_scratch(tokens, **shape, budget_bytes=0).first
        return first + reserved_second(tokens, **shape, budget_bytes=budget)

    plan = plan_scratch(tokens, **shape, budget_bytes=budget)
    assert plan.total <= reserved(tokens) <= reserved(tokens + more)


def test_scales_of_experts_become_scales_of_rows():
    w13, w2 = torch.empty(3, 32, 16), torch.empty(3, 16, 48)
    of_experts = torch.tensor([1.0, 2, 3])
    for scale in (of_experts, of_experts.reshape(3, 1, 1)):
        first, second = kernel_scales(w13, w2, scale, scale)
        assert torch.equal(first, of_experts[:, None].expand(3, 32))
        assert torch.equal(second, of_experts[:, None].expand(3, 16))
        assert first.is_contiguous() and second.is_contiguous()
    of_rows, of_blocks = torch.rand(3, 32, 1), torch.rand(3, 1, 1, dtype=torch.half)
    first, _ = kernel_scales(w13, w2, of_rows, of_blocks)
    assert torch.equal(first, of_rows)


# The choice.


def moe_config(**changes: Any) -> FusedMoEConfig:
    return FusedMoEConfig(
        **{
            "num_experts": 8,
            "experts_per_token": 2,
            "hidden_dim": 256,
            "intermediate_size": 128,
            "num_local_experts": 8,
            "num_logical_experts": 8,
            "activation": SILU,
            "device": "cpu",
            "routing_method": RoutingMethodType.Default,
            "moe_parallel_config": FusedMoEParallelConfig.make_no_parallel(),
            "in_dtype": torch.float16,
            "max_num_tokens": 8192,
            **changes,
        }
    )


def be_device(monkeypatch: pytest.MonkeyPatch, *version: int) -> None:
    """Make the platform a CUDA device whose kernels are there; a CPU without one."""
    platform = type(current_platform)
    enum = PlatformEnum.CUDA if version else PlatformEnum.CPU
    found = DeviceCapability(*version) if version else None
    monkeypatch.setattr(platform, "_enum", enum)
    monkeypatch.setattr(
        platform, "get_device_capability", classmethod(lambda cls, device_id=0: found)
    )
    monkeypatch.setattr(ops, "unavailable_reason", lambda device: None)


SCHEMES = {
    "fp8 block": (kFp8Static128BlockSym, kFp8Dynamic128Sym),
    "compressed-tensors channel": (kFp8StaticChannelSym, kFp8DynamicTokenSym),
    "compressed-tensors block": (kFp8Static128BlockSym, kFp8Dynamic128Sym),
    "modelopt": (kFp8StaticTensorSym, kFp8StaticTensorSym),
}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    "routing", [m for m in RoutingMethodType if m != RoutingMethodType.Unspecified]
)
def test_capability_7_0_takes_ours_for_every_routing(monkeypatch, scheme, routing):
    be_device(monkeypatch, 7, 0)
    config = moe_config(routing_method=routing)
    backend, experts = select_fp8_moe_backend(config, *SCHEMES[scheme], True)
    assert (backend, experts) == (Fp8MoeBackend.SM70, Sm70Fp8Experts)


@pytest.mark.parametrize("version", [(7, 0), (7, 5), (8, 0), (9, 0), ()])
def test_any_device_takes_ours_when_asked(monkeypatch, version):
    be_device(monkeypatch, *version)
    config = moe_config(moe_backend="sm70")
    backend, experts = select_fp8_moe_backend(config, *SCHEMES["fp8 block"])
    assert (backend, experts) == (Fp8MoeBackend.SM70, Sm70Fp8Experts)


@pytest.mark.parametrize("version", [(8, 0), (9, 0)])
def test_later_gpus_keep_upstreams_choice(monkeypatch, version):
    be_device(monkeypatch, *version)
    backend, _ = select_fp8_moe_backend(moe_config(), *SCHEMES["fp8 block"])
    assert backend != Fp8MoeBackend.SM70


@pytest.mark.parametrize("amx", [False, True])
def test_the_cpu_takes_ours_last(monkeypatch, amx):
    be_device(monkeypatch)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    config = moe_config(in_dtype=torch.bfloat16)
    backend, _ = select_fp8_moe_backend(config, *SCHEMES["fp8 block"])
    assert backend == (Fp8MoeBackend.CPU if amx else Fp8MoeBackend.SM70)


def test_capabilities_below_7_0_are_refused(monkeypatch):
    be_device(monkeypatch, 6, 1)
    with pytest.raises(ValueError, match="SM70 does not support"):
        select_fp8_moe_backend(moe_config(moe_backend="sm70"), *SCHEMES["fp8 block"])


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"has_bias": True}, "biased experts"),
        ({"swiglu_limit": 7.0}, "clamped or scaled SwiGLU"),
        ({"hidden_dim": 264}, "divisible by 16, got 264 and 128"),
        ({"intermediate_size": 72}, "divisible by 16, got 256 and 72"),
        ({"in_dtype": torch.bfloat16}, "bfloat16 activations"),
        ({"in_dtype": torch.float32}, "float32 activations"),
        ({"activation": MoEActivation.SWIGLUOAI}, "SWIGLUOAI"),
        ({"is_lora_enabled": True}, "LoRA"),
    ],
)
def test_what_the_operators_lack_is_refused(monkeypatch, changes, reason):
    be_device(monkeypatch, 7, 0)
    with pytest.raises(ValueError, match=reason):
        select_fp8_moe_backend(
            moe_config(moe_backend="sm70", **changes), *SCHEMES["fp8 block"]
        )


def test_other_blocks_are_refused_and_the_cpu_has_no_tensor_scales(monkeypatch):
    be_device(monkeypatch)
    config = moe_config(moe_backend="sm70")
    key = create_fp8_quant_key(static=True, group_shape=GroupShape(64, 64))
    with pytest.raises(ValueError, match="quantization scheme"):
        select_fp8_moe_backend(config, key, kFp8Dynamic128Sym)
    with pytest.raises(ValueError, match="one scale for each expert"):
        select_fp8_moe_backend(config, *SCHEMES["modelopt"])


@pytest.mark.parametrize(
    "version, backend, shape, shard",
    [((7, 0), "auto", [128, 128], 256), ((8, 0), "auto", [64, 64], 192)],
)
def test_a_shard_of_part_of_a_block_is_padded(
    monkeypatch, version, backend, shape, shard
):
    """Upstream refines the blocks, which only its Triton kernels take."""
    be_device(monkeypatch, *version)
    assert capability.moe_backend(backend) == ("sm70" if version == (7, 0) else "auto")
    parallel = FusedMoEParallelConfig.make_no_parallel()
    parallel.tp_size = 2
    config = moe_config(intermediate_size=384, moe_parallel_config=parallel)
    found, _ = resolve_fp8_moe_weight_block_shape(
        config, [128, 128], kFp8Dynamic128Sym, True
    )
    assert found == shape and config.intermediate_size_per_partition == shard


# The kernel.


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest):
    workspace.reset_workspace_manager()
    workspace.init_workspace_manager(torch.device(request.param))
    yield request.param
    workspace.reset_workspace_manager()


E, K, HIDDEN, INTERMEDIATE = 6, 3, 144, 80


class Layer:
    """Random FP8 weights of one layer, and what they make of an input.

    Sizes that neither blocks nor tiles divide.
    """

    def __init__(
        self,
        scales: str,
        activation: MoEActivation = SILU,
        hidden: int = HIDDEN,
        intermediate: int = INTERMEDIATE,
        experts: int = E,
    ) -> None:
        self.activation, self.experts = activation, experts
        self.parts = 2 if activation.is_gated else 1
        self.w13 = self._weight(experts, self.parts * intermediate, hidden)
        self.w2 = self._weight(experts, hidden, intermediate)
        rows = self.parts, intermediate
        self.s13 = self._scales(scales, experts, *rows, hidden)
        self.s2 = self._scales(scales, experts, 1, hidden, intermediate)
        self.kind = scales

    @staticmethod
    def _weight(*shape: int) -> torch.Tensor:
        return (torch.randn(shape) * 16).to(torch.float8_e4m3fn)

    @staticmethod
    def _scales(
        kind: str, experts: int, parts: int, rows: int, depth: int
    ) -> torch.Tensor:
        shapes = {
            "block": (experts, parts * -(-rows // 128), -(-depth // 128)),
            "channel": (experts, parts * rows, 1),
            "expert": (experts,),
        }
        return (0.5 + torch.rand(shapes[kind])) / 16 / depth**0.5

    def dense(self, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Float64 first and second weight of an expert."""

        def part(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            rows = weight.shape[0]
            if self.kind == "expert":
                scale = scale.expand(rows, 1)
            codes = weight.view(torch.uint8)
            return fp8_reference(codes, scale, torch.float32).double()

        firsts = zip(
            self.w13[expert].chunk(self.parts),
            [self.s13[expert]] * self.parts
            if self.kind == "expert"
            else self.s13[expert].chunk(self.parts),
        )
        first = torch.cat([part(*pair) for pair in firsts])
        return first, part(self.w2[expert], self.s2[expert])

    def reference(
        self,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        ids: torch.Tensor,
        on_input: bool = False,
    ) -> torch.Tensor:
        """Float64 output; ids outside of the experts are absent."""
        out = torch.zeros(x.shape, dtype=torch.float64)
        for expert in range(self.experts):
            token, slot = (ids == expert).nonzero(as_tuple=True)
            w13, w2 = self.dense(expert)
            scale = topk_weights[token, slot, None].double()
            rows = x[token].double()
            if on_input:
                rows = (x[token] * topk_weights[token, slot, None].to(x.dtype)).double()
            product = rows @ w13.T
            if self.activation == MoEActivation.RELU2_NO_MUL:
                act = product.relu().square()
            else:
                gate, up = product.chunk(2, dim=-1)
                act = torch.nn.functional.silu(gate) * up
            second = act @ w2.T
            out.index_add_(0, token, second if on_input else second * scale)
        return out

    def kernel(self, config: FusedMoEConfig, device: str) -> SimpleNamespace:
        """The modular kernel, and the weights as it takes them."""
        block = [128, 128] if self.kind == "block" else None
        w13, w2, s13, s2 = convert_to_fp8_moe_kernel_format(
            Fp8MoeBackend.SM70,
            SimpleNamespace(weight_block_size=block),  # type: ignore[arg-type]
            *(t.to(device) for t in (self.w13, self.w2, self.s13, self.s2)),
            None,
            None,
        )
        # Weights stay as they are stored.
        assert torch.equal(w13.cpu().view(torch.uint8), self.w13.view(torch.uint8))
        quant = make_fp8_moe_quant_config(
            Fp8MoeBackend.SM70, s13, s2, None, None, block_shape=block
        )
        moe = make_fp8_moe_kernel(quant, config, Sm70Fp8Experts, Fp8MoeBackend.SM70)
        return SimpleNamespace(moe=moe, w13=w13, w2=w2, activation=self.activation)


def config_of(layer: Layer, dtype: torch.dtype, **changes: Any) -> FusedMoEConfig:
    return moe_config(
        num_experts=layer.experts,
        num_local_experts=layer.experts,
        num_logical_experts=layer.experts,
        hidden_dim=layer.w2.shape[1],
        intermediate_size=layer.w2.shape[2],
        in_dtype=dtype,
        **changes,
    )


def run(
    layer: SimpleNamespace,
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    ids: torch.Tensor,
    expert_map: torch.Tensor | None = None,
    on_input: bool = False,
) -> torch.Tensor:
    device = layer.w13.device
    out = layer.moe.apply(
        x.to(device),
        layer.w13,
        layer.w2,
        topk_weights.to(device),
        ids.to(device),
        activation=layer.activation,
        global_num_experts=-1 if expert_map is None else expert_map.numel(),
        expert_map=None if expert_map is None else expert_map.to(device),
        apply_router_weight_on_input=on_input,
    )
    return out.cpu()


def route(
    tokens: int, experts: int = E, top_k: int = K
) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.rand(tokens, experts).argsort(1)[:, :top_k].int().contiguous()
    return torch.rand(tokens, top_k).softmax(1), ids


def everyone_to_one(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    topk_weights, ids = route(tokens)
    ids[:] = torch.tensor([4, 1, 0], dtype=torch.int32)
    return topk_weights, ids


def some_unused(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    return route(tokens, experts=4)


def some_absent(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    topk_weights, ids = route(tokens)
    ids[::2, 1], ids[0] = -1, -1
    return topk_weights, ids


ROUTES = [route, everyone_to_one, some_unused, some_absent]
DTYPES = [torch.float16, torch.bfloat16]


def assert_near(out: torch.Tensor, expected: torch.Tensor) -> None:
    """Three roundings: of the activated row, of the partial and of the output."""
    step = torch.finfo(out.dtype).eps
    error = (out.double() - expected).abs().max()
    assert error <= 2 * step * expected.abs().max(), (error, expected.abs().max())


@pytest.mark.parametrize("routes", ROUTES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scales", ["block", "channel", "expert"])
@pytest.mark.parametrize("tokens", [1, 7, 65])
def test_against_float64(device, scales, dtype, tokens, routes):
    torch.manual_seed(tokens)
    layer = Layer(scales)
    kernel = layer.kernel(config_of(layer, dtype), device)
    x = torch.randn(tokens, HIDDEN).to(dtype)
    topk_weights, ids = routes(tokens)
    expected = layer.reference(x, topk_weights, ids)
    out = run(kernel, x, topk_weights, ids)
    assert out.shape == x.shape and out.dtype == dtype
    assert_near(out, expected)
    assert torch.equal(out, run(kernel, x, topk_weights, ids.long()))


def fp8_method(config: FusedMoEConfig) -> FusedMoEMethodBase:
    quant = Fp8Config(is_checkpoint_fp8_serialized=True, weight_block_size=[128, 128])
    return Fp8MoEMethod(quant, SimpleNamespace(moe_config=config))  # type: ignore[arg-type]


def compressed_tensors_method(
    strategy: str, config: FusedMoEConfig
) -> FusedMoEMethodBase:
    eight = {"num_bits": 8, "type": "float", "symmetric": True}
    block = {"block_structure": [128, 128]} if strategy == "block" else {}
    weights = QuantizationArgs(**eight, strategy=strategy, **block)
    group = {"strategy": "token"}
    if strategy == "block":
        group = {"strategy": "group", "group_size": 128}
    inputs = QuantizationArgs(**eight, dynamic=True, **group)
    return CompressedTensorsW8A8Fp8MoEMethod(weights, inputs, config)


@pytest.mark.parametrize(
    "method, scales, suffix",
    [
        (fp8_method, "block", "weight_scale_inv"),
        (partial(compressed_tensors_method, "block"), "block", "weight_scale"),
        (partial(compressed_tensors_method, "channel"), "channel", "weight_scale"),
    ],
)
def test_checkpoint_formats(monkeypatch, device, method, scales, suffix):
    """Upstream's methods make parameters, and run our kernel on them as they are."""
    if device == "cpu":
        be_device(monkeypatch)
    torch.manual_seed(6)
    layer = Layer(scales, hidden=256, intermediate=128)
    method = method(config_of(layer, torch.bfloat16, moe_backend="sm70"))
    module: Any = torch.nn.Module()
    monkeypatch.setattr(fp8, "get_tensor_model_parallel_world_size", lambda: 1)
    monkeypatch.setattr(distributed, "get_tensor_model_parallel_world_size", lambda: 1)
    method.create_weights(module, E, 256, 128, torch.bfloat16)
    for name, tensor in (
        ("w13_weight", layer.w13),
        ("w2_weight", layer.w2),
        (f"w13_{suffix}", layer.s13),
        (f"w2_{suffix}", layer.s2),
    ):
        parameter = getattr(module, name)
        assert parameter.shape == tensor.shape
        parameter.data = tensor.to(device)
    module._expert_routing_tables = lambda: None
    method.process_weights_after_loading(module)
    for name, value in (
        ("activation", SILU),
        ("global_num_experts", E),
        ("expert_map", None),
        ("apply_router_weight_on_input", False),
    ):
        setattr(module, name, value)
    x, routes = torch.randn(9, 256).bfloat16(), route(9)
    out = method.apply(
        module,
        x.to(device),
        *(t.to(device) for t in routes),
        shared_experts=None,
        shared_experts_input=None,
    )
    assert isinstance(method.moe_kernel.fused_experts, Sm70Fp8Experts)
    assert_near(out.cpu(), layer.reference(x, *routes))


def test_float32_on_the_cpu(monkeypatch):
    be_device(monkeypatch)
    workspace.reset_workspace_manager()
    workspace.init_workspace_manager(torch.device("cpu"))
    torch.manual_seed(7)
    layer = Layer("block")
    config = config_of(layer, torch.float32, moe_backend="sm70")
    select_fp8_moe_backend(config, *SCHEMES["fp8 block"])
    x, routes = torch.randn(9, HIDDEN), route(9)
    out = run(layer.kernel(config, "cpu"), x, *routes)
    expected = layer.reference(x, *routes)
    assert (out - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_an_activation_without_a_gate(monkeypatch, device):
    monkeypatch.setattr(current_platform, "is_cuda_alike", lambda: True)
    torch.manual_seed(0)
    layer = Layer("block", MoEActivation.RELU2_NO_MUL)
    config = config_of(layer, torch.float16, activation=MoEActivation.RELU2_NO_MUL)
    kernel = layer.kernel(config, device)
    x, routes = torch.randn(9, HIDDEN).half(), route(9)
    assert_near(run(kernel, x, *routes), layer.reference(x, *routes))


def test_router_weight_on_the_input(device):
    torch.manual_seed(1)
    layer = Layer("block")
    kernel = layer.kernel(config_of(layer, torch.float16), device)
    x, routes = torch.randn(9, HIDDEN).half(), route(9, top_k=1)
    routes[0][:] = torch.rand(9, 1)
    expected = layer.reference(x, *routes, on_input=True)
    assert_near(run(kernel, x, *routes, on_input=True), expected)


def test_expert_parallel_ranks_add_up(device):
    torch.manual_seed(2)
    layer = Layer("channel")
    x, routes = torch.randn(11, HIDDEN).half(), route(11)
    total = torch.zeros(11, HIDDEN, dtype=torch.float64)
    for first in (0, 3):
        rank = Layer("channel", experts=3)
        for name in ("w13", "w2", "s13", "s2"):
            setattr(rank, name, getattr(layer, name)[first : first + 3].clone())
        config = config_of(rank, torch.float16)
        expert_map = torch.full((E,), -1, dtype=torch.int32)
        expert_map[first : first + 3] = torch.arange(3)
        out = run(rank.kernel(config, device), x, *routes, expert_map)
        local = torch.where(routes[1] // 3 == first // 3, routes[1] - first, -1)
        assert_near(out, rank.reference(x, routes[0], local))
        total += out.double()
    assert_near(total.half(), layer.reference(x, *routes))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scales", ["block", "channel"])
def test_neither_tiles_nor_chunks_change_a_bit(monkeypatch, device, scales, dtype):
    """Narrow tiles, ragged chunks, a last chunk of one token."""
    torch.manual_seed(3)
    layer = Layer(scales, hidden=400)
    x, routes = torch.randn(65, 400).to(dtype), route(65)

    def output(budget: int, chunk: int) -> tuple[torch.Tensor, set[int]]:
        monkeypatch.setattr(Sm70Fp8Experts, "workspace_budget_bytes", budget)
        monkeypatch.setenv(CHUNK_TOKENS, str(chunk))
        kernel = layer.kernel(config_of(layer, dtype), device)
        widths, down = set(), sm70_fp8_moe.sm70_ops.fp8_moe_down

        def spy(*args: Any, **kwargs: Any) -> None:
            widths.add(args[8].shape[1])
            down(*args, **kwargs)

        monkeypatch.setattr(sm70_fp8_moe.sm70_ops, "fp8_moe_down", spy)
        out = run(kernel, x, *routes)
        monkeypatch.setattr(sm70_fp8_moe.sm70_ops, "fp8_moe_down", down)
        return out, widths

    whole, widths = output(0, 0)
    assert widths == {400}
    assert_near(whole, layer.reference(x, *routes))
    tiled, widths = output(1, 0)
    assert widths == {128} and torch.equal(tiled, whole)
    tiled, widths = output(130_000, 0)
    assert widths == {256} and torch.equal(tiled, whole)
    for chunk in (1, 16, 32, 64):
        assert torch.equal(output(0, chunk)[0], whole)
        assert torch.equal(output(1, chunk)[0], whole)


@pytest.mark.parametrize("budget", [0, 1])
def test_an_output_in_the_workspace(monkeypatch, device, budget):
    """As where ranks exchange tokens: no buffer of the caller's has its shape."""
    torch.manual_seed(5)
    monkeypatch.setattr(Sm70Fp8Experts, "workspace_budget_bytes", budget)
    monkeypatch.setenv(CHUNK_TOKENS, "0")
    layer = Layer("block", hidden=400)
    x, routes = torch.randn(65, 400).half(), route(65)
    kernel = layer.kernel(config_of(layer, torch.float16), device)
    expected = run(kernel, x, *routes)
    impl = kernel.moe.impl
    experts = impl._fused_experts
    monkeypatch.setattr(
        impl, "_fused_experts", lambda **kw: experts(**kw | {"output_alias": None})
    )
    assert torch.equal(run(kernel, x, *routes), expected)


def test_a_budget_that_no_tile_keeps_cuts_the_batch(monkeypatch, device):
    torch.manual_seed(4)
    layer = Layer("block")
    config = config_of(layer, torch.float16)
    x, routes = torch.randn(3000, HIDDEN).half(), route(3000)
    control = run(layer.kernel(config, device), x, *routes)
    monkeypatch.setenv(WORKSPACE_BUDGET, "1")
    kernel = layer.kernel(config, device)
    experts, seen = kernel.moe.fused_experts, []
    apply = experts.apply

    def spy(**kwargs: Any) -> None:
        seen.append((kwargs["hidden_states"].shape[0], experts.batch_tokens))
        apply(**kwargs)

    monkeypatch.setattr(experts, "apply", spy)
    out = run(kernel, x, *routes)
    # 2 * (3 * 80 + 2 * 128) + 3 * 4 bytes a token in 1 MiB.
    assert seen == [(1024, 3000)] * 2 + [(952, 3000)]
    assert torch.equal(out, control)
    assert experts.batch_tokens is None


def test_the_longest_batch_reserves_for_all(monkeypatch, device):
    """What the profile reserves is enough once the workspace is locked."""
    platform = SimpleNamespace(is_cpu=lambda: False, is_rocm=lambda: False)
    monkeypatch.setattr(mk, "current_platform", platform)
    if device == "cpu":
        monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    monkeypatch.setenv(WORKSPACE_BUDGET, "1")
    torch.manual_seed(5)
    layer = Layer("block")
    kernel = layer.kernel(config_of(layer, torch.float16), device)
    run(kernel, torch.randn(1500, HIDDEN).half(), *route(1500))
    manager = workspace.current_workspace_manager()
    (buffer,) = manager._current_workspaces
    assert MIB - 4096 < buffer.numel() <= MIB
    manager.lock()
    for tokens in (1, 64, 641, 961, 1023, 1024, 1025, 1499):
        x, routes = torch.randn(tokens, HIDDEN).half(), route(tokens)
        out = run(kernel, x, *routes)
        assert_near(out, layer.reference(x, *routes))


def test_chunks_of_a_35b_a3b_layer_begin_above_its_usual_batches():
    experts = object.__new__(Sm70Fp8Experts)
    experts.moe_config = moe_config()

    def nbytes(tokens: int) -> int:
        sizes = (1024, 2048, 8, 256, 256)
        return workspace_bytes(experts, torch.float16, tokens, sizes, SILU)

    assert nbytes(8192) == BUDGET == 121 * MIB
    # 121 MiB by 10,016 bytes, less the offsets, in whole 64s.
    assert largest_chunk(nbytes, BUDGET) == 12_608
    experts.workspace_budget_bytes = 64 * MIB
    assert largest_chunk(nbytes, 64 * MIB) == 6_656
