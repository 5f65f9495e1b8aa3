# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Token chunks: the planner, and the modular kernel with and without them."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.model_executor.layers.fused_moe import token_chunks
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import (
    FUSED_MOE_UNQUANTIZED_CONFIG,
    FusedMoEConfig,
    FusedMoEParallelConfig,
    FusedMoEQuantConfig,
    RoutingMethodType,
)
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import (
    CPUUnquantizedExperts,
)
from vllm.model_executor.layers.fused_moe.experts.marlin_moe import (
    BatchedMarlinExperts,
    MarlinExperts,
)
from vllm.model_executor.layers.fused_moe.experts.moonep_experts import MoonEPExperts
from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
from vllm.model_executor.layers.fused_moe.layer import FusedMoEFactory
from vllm.model_executor.layers.fused_moe.moe_output import UnfinalizedMoEOutput
from vllm.model_executor.layers.fused_moe.prepare_finalize.no_dp_ep import (
    MoEPrepareAndFinalizeNoDPEPModular,
)
from vllm.model_executor.layers.fused_moe.prepare_finalize.passthrough import (
    PassThroughPrepareAndFinalize,
)
from vllm.model_executor.layers.fused_moe.token_chunks import (
    ALIGNMENT,
    CHUNK_TOKENS,
    MAX_CHUNK,
    MIB,
    WORKSPACE_BUDGET,
    ChunkSettings,
    largest_chunk,
    slices,
    workspace_bytes,
)
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
    TopKWeightAndReduceNoOP,
)
from vllm.v1.worker import workspace

MAX_TOKENS = 4096
HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 32, 64, 8, 2


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CHUNK_TOKENS, raising=False)
    monkeypatch.delenv(WORKSPACE_BUDGET, raising=False)


# The settings.


@pytest.mark.parametrize(
    "tokens, budget, expected",
    [
        (None, None, (None, None)),
        ("auto", "auto", (None, None)),
        ("0", None, (0, None)),
        ("1", None, (1, None)),
        (str(MAX_TOKENS), None, (MAX_TOKENS, None)),
        ("512", "0", (512, 0)),
        ("0", "0", (0, 0)),
        (None, "128", (None, 128 * MIB)),
        # More than any batch takes is a budget that is kept.
        (None, "1000000", (None, 1000000 * MIB)),
    ],
)
def test_settings(monkeypatch, tokens, budget, expected):
    if tokens is not None:
        monkeypatch.setenv(CHUNK_TOKENS, tokens)
    if budget is not None:
        monkeypatch.setenv(WORKSPACE_BUDGET, budget)
    settings = ChunkSettings.from_environment(MAX_TOKENS)
    assert (settings.tokens, settings.budget_bytes) == expected


BAD_SETTINGS = [
    (CHUNK_TOKENS, "-1", f"{CHUNK_TOKENS}=-1: expected 1 to 4096 tokens"),
    (CHUNK_TOKENS, "4097", f"{CHUNK_TOKENS}=4097: expected 1 to 4096 tokens"),
    (CHUNK_TOKENS, "many", f"{CHUNK_TOKENS}='many': expected a whole number"),
    (CHUNK_TOKENS, "", f"{CHUNK_TOKENS}='': expected a whole number"),
    (WORKSPACE_BUDGET, "-5", f"{WORKSPACE_BUDGET}=-5: expected a number of MiB"),
    (WORKSPACE_BUDGET, "1.5", f"{WORKSPACE_BUDGET}='1.5': expected a whole number"),
]


@pytest.mark.parametrize("name, value, message", BAD_SETTINGS)
def test_bad_settings(monkeypatch, name, value, message):
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"^{message}"):
        ChunkSettings.from_environment(MAX_TOKENS)


def test_two_settings_that_decide_the_same(monkeypatch):
    monkeypatch.setenv(CHUNK_TOKENS, "512")
    monkeypatch.setenv(WORKSPACE_BUDGET, "64")
    with pytest.raises(ValueError, match="both decide the chunk; set one of them"):
        ChunkSettings.from_environment(MAX_TOKENS)


# The planner.


@pytest.mark.parametrize(
    "bytes_per_token, budget_mib, chunk",
    [
        (90_112, 704, 8192),
        (90_112, 703, 8128),
        (90_112, 128, 1472),
        (90_112, 6, 64),
        (65_536, 128, 2048),
        (MIB, 64, 64),
        (1, 1, MAX_CHUNK),
    ],
)
def test_largest_chunk(bytes_per_token, budget_mib, chunk):
    assert largest_chunk(lambda m: m * bytes_per_token, budget_mib * MIB) == chunk


def test_a_budget_too_small_for_a_chunk():
    with pytest.raises(ValueError) as error:
        largest_chunk(lambda tokens: tokens * 90_112, 5 * MIB)
    assert str(error.value) == (
        f"{WORKSPACE_BUDGET}=5: a chunk of 64 tokens takes 5.5 MiB of workspace; "
        "set at least 6, or 0 for no budget"
    )


@given(
    per_token=st.integers(1, 2**24),
    constant=st.integers(0, 2**28),
    budget=st.integers(1, 2**36),
)
def test_no_longer_chunk_fits(per_token, constant, budget):
    def nbytes(tokens: int) -> int:
        return constant + tokens * per_token

    if nbytes(ALIGNMENT) > budget:
        with pytest.raises(ValueError, match="set at least"):
            largest_chunk(nbytes, budget)
        return
    chunk = largest_chunk(nbytes, budget)
    assert chunk % ALIGNMENT == 0 and ALIGNMENT <= chunk <= MAX_CHUNK
    assert nbytes(chunk) <= budget
    assert chunk == MAX_CHUNK or nbytes(chunk + ALIGNMENT) > budget


@given(tokens=st.integers(1, 5000), chunk=st.integers(1, 5000))
def test_slices_cover_the_batch_once(tokens, chunk):
    parts = list(slices(tokens, chunk))
    assert [i for begin, end in parts for i in range(begin, end)] == [*range(tokens)]
    sizes = [end - begin for begin, end in parts]
    assert set(sizes[:-1]) <= {chunk} and 1 <= sizes[-1] <= chunk


def moe_config(dtype: torch.dtype = torch.float32, **changes: Any) -> FusedMoEConfig:
    return FusedMoEConfig(
        **{
            "num_experts": EXPERTS,
            "experts_per_token": TOP_K,
            "hidden_dim": HIDDEN,
            "intermediate_size": INTERMEDIATE,
            "num_local_experts": EXPERTS,
            "num_logical_experts": EXPERTS,
            "activation": MoEActivation.SILU,
            "device": "cpu",
            "routing_method": RoutingMethodType.Default,
            "moe_parallel_config": FusedMoEParallelConfig.make_no_parallel(),
            "in_dtype": dtype,
            "max_num_tokens": MAX_TOKENS,
            **changes,
        }
    )


# 35B-A3B: hidden 2048, 256 experts, top-8, intermediate 512; N as each class has it.
@pytest.mark.parametrize(
    "experts, N, bytes_per_token",
    [
        (TritonExperts, 1024, 8 * (2048 + 2048) * 2),
        (MarlinExperts, 512, 8 * (2048 + 2048) * 2),
    ],
)
def test_bytes_of_upstreams_experts(experts, N, bytes_per_token):
    this = object.__new__(experts)
    sizes = (N, 2048, 8, 256, 256)
    for tokens in (64, 1024, 8192):
        nbytes = workspace_bytes(this, torch.float16, tokens, sizes, MoEActivation.SILU)
        assert nbytes == tokens * bytes_per_token


# The kernel. Small whole numbers in FP32, so that sums are exact in any order.


class ToyExperts(mk.FusedMoEExpertsModular):
    """Loops over tokens in the workspaces that it was given; writes all of both."""

    def __init__(self, config: FusedMoEConfig, quant: FusedMoEQuantConfig) -> None:
        super().__init__(config, quant)
        self.calls: list[int] = []
        self.memory: set[tuple[int, int]] = set()
        self.defers = False

    @staticmethod
    def activation_format() -> mk.FusedMoEActivationFormat:
        return mk.FusedMoEActivationFormat.Standard

    @staticmethod
    def _supports_current_device() -> bool:
        return True

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return False

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return True

    @staticmethod
    def _supports_activation(activation: MoEActivation) -> bool:
        return True

    @staticmethod
    def _supports_parallel_config(parallel_config: Any) -> bool:
        return True

    def finalize_weight_and_reduce_impl(self) -> mk.TopKWeightAndReduce:
        return TopKWeightAndReduceNoOP()

    def workspace_shapes(self, M, N, K, topk, *_) -> Any:
        return (M, topk, N), (M * topk, K), (M, K)

    def apply(
        self,
        output,
        hidden_states,
        w1,
        w2,
        topk_weights,
        topk_ids,
        activation,
        global_num_experts,
        expert_map,
        a1q_scale,
        a2_scale,
        workspace13,
        workspace2,
        expert_tokens_meta,
        apply_router_weight_on_input,
    ) -> UnfinalizedMoEOutput | None:
        tokens, top_k = topk_ids.shape
        self.calls.append(tokens)
        self.memory.add((workspace13.data_ptr(), workspace2.data_ptr()))
        if self.defers:
            return UnfinalizedMoEOutput(workspace2, topk_weights, topk_ids)
        assert workspace13.shape == (tokens, top_k, w1.shape[1])
        assert workspace2.shape == (tokens * top_k, w2.shape[1])
        if a1q_scale is not None:
            hidden_states = hidden_states * a1q_scale
        local = topk_ids if expert_map is None else expert_map[topk_ids]
        for t in range(tokens):
            for j in range(top_k):
                row = workspace2[t * top_k + j]
                if local[t, j] < 0:
                    row.zero_()
                    continue
                gate_up = workspace13[t, j]
                torch.mv(w1[local[t, j]], hidden_states[t], out=gate_up)
                gate, up = gate_up.chunk(2)
                torch.mv(w2[local[t, j]], gate * up, out=row)
                if not apply_router_weight_on_input:
                    row *= topk_weights[t, j]
        result = workspace2.view(tokens, top_k, -1).sum(1)
        # What a kernel leaves behind must not matter to the next chunk. The output
        # may share the first workspace's memory.
        workspace13.fill_(float("nan"))
        workspace2.fill_(float("nan"))
        output.copy_(result)
        return None


class ScaledPrepare(MoEPrepareAndFinalizeNoDPEPModular):
    """Returns scales of activations, as if it had quantized them."""

    def __init__(self, scale: torch.Tensor) -> None:
        self.scale = scale

    def prepare(self, a1: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return a1, self.scale, None, None, None


def integers(*shape: int) -> torch.Tensor:
    return torch.randint(-2, 3, shape).float()


def weights(local: int = EXPERTS) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        integers(local, 2 * INTERMEDIATE, HIDDEN),
        integers(local, HIDDEN, INTERMEDIATE),
    )


def routing(tokens: int, top_k: int = TOP_K) -> tuple[torch.Tensor, torch.Tensor]:
    # Experts 5 and above get no token.
    ids = torch.rand(tokens, 5).argsort(1)[:, :top_k].int()
    return torch.randint(1, 4, (tokens, top_k)) / 4, ids


def kernel(
    prepare: mk.FusedMoEPrepareAndFinalizeModular | None = None,
    quant: FusedMoEQuantConfig = FUSED_MOE_UNQUANTIZED_CONFIG,
    config: FusedMoEConfig | None = None,
    experts_cls: type[mk.FusedMoEExpertsModular] = ToyExperts,
) -> mk.FusedMoEKernel:
    return mk.FusedMoEKernel(
        prepare or MoEPrepareAndFinalizeNoDPEPModular(),
        experts_cls(config or moe_config(), quant),
    )


def run(
    moe: mk.FusedMoEKernel,
    x: torch.Tensor,
    w: tuple[torch.Tensor, torch.Tensor],
    routes: tuple[torch.Tensor, torch.Tensor],
    expert_map: torch.Tensor | None = None,
    on_input: bool = False,
) -> torch.Tensor:
    out = moe.apply(
        x,
        *w,
        *routes,
        activation=MoEActivation.SILU,
        global_num_experts=EXPERTS,
        expert_map=expert_map,
        apply_router_weight_on_input=on_input,
    )
    assert isinstance(out, torch.Tensor)
    return out


@pytest.mark.parametrize(
    "tokens, chunk, calls",
    [
        (13, 5, [5, 5, 3]),
        (10, 5, [5, 5]),
        (11, 10, [10, 1]),
        (3, 1, [1, 1, 1]),
        # At most a chunk: one call, as without chunks.
        (5, 5, [5]),
        (1, 5, [1]),
        (13, 0, [13]),
        (0, 5, []),
    ],
)
def test_chunks_give_the_same_output(monkeypatch, tokens, chunk, calls):
    torch.manual_seed(tokens)
    x, w, routes = integers(tokens, HIDDEN), weights(), routing(tokens)
    control = run(kernel(), x, w, routes)
    monkeypatch.setenv(CHUNK_TOKENS, str(chunk))
    moe = kernel()
    out = run(moe, x, w, routes)
    assert moe.fused_experts.calls == calls
    assert out.shape == x.shape
    assert torch.equal(out, control)


def test_a_budget_cuts_too(monkeypatch):
    # 2 * (128 + 32) * 4 = 1280 bytes a token: 819 tokens in one MiB.
    monkeypatch.setenv(WORKSPACE_BUDGET, "1")
    torch.manual_seed(0)
    x, w, routes = integers(1700, HIDDEN), weights(), routing(1700)
    moe = kernel()
    out = run(moe, x, w, routes)
    assert moe.fused_experts.calls == [768, 768, 164]
    monkeypatch.setenv(WORKSPACE_BUDGET, "0")
    whole = kernel()
    assert torch.equal(run(whole, x, w, routes), out)
    assert whole.fused_experts.calls == [1700]


def test_off_unless_asked_for():
    x, w, routes = integers(200, HIDDEN), weights(), routing(200)
    moe = kernel()
    run(moe, x, w, routes)
    assert not moe.impl.token_chunks.enabled
    assert moe.fused_experts.calls == [200]


def test_a_class_may_have_a_budget_of_its_own(monkeypatch):
    class Bounded(ToyExperts):
        workspace_budget_bytes = 100_000

    x, w, routes = integers(100, HIDDEN), weights(), routing(100)
    moe = kernel(experts_cls=Bounded)
    run(moe, x, w, routes)
    assert moe.fused_experts.calls == [64, 36]
    for name in (CHUNK_TOKENS, WORKSPACE_BUDGET):
        monkeypatch.setenv(name, "0")
        whole = kernel(experts_cls=Bounded)
        run(whole, x, w, routes)
        assert whole.fused_experts.calls == [100]
        monkeypatch.delenv(name)


def test_a_budget_too_small_is_refused_by_the_first_long_batch(monkeypatch):
    class Wide(ToyExperts):
        def workspace_shapes(self, M, N, K, topk, *_):
            return (M, topk, 100 * N), (M * topk, K), (M, K)

    monkeypatch.setenv(WORKSPACE_BUDGET, "1")
    with pytest.raises(ValueError, match="a chunk of 64 tokens takes 6.3 MiB"):
        run(kernel(experts_cls=Wide), integers(9, HIDDEN), weights(), routing(9))


def test_expert_parallel_with_a_map_and_a_rank_without_work(monkeypatch):
    torch.manual_seed(1)
    x, w, routes = integers(12, HIDDEN), weights(2), routing(12)
    expert_map = torch.full((EXPERTS,), -1)
    expert_map[3], expert_map[0] = 0, 1
    routes[1][:4] = torch.tensor([[1, 2]])  # The first chunk has nothing for us.
    control = run(kernel(), x, w, routes, expert_map)
    monkeypatch.setenv(CHUNK_TOKENS, "4")
    out = run(kernel(), x, w, routes, expert_map)
    assert torch.equal(out, control)
    assert not out[:4].any() and out[4:].any()


def test_router_weight_on_the_input(monkeypatch):
    torch.manual_seed(2)
    x, w, routes = integers(7, HIDDEN), weights(), routing(7, 1)
    control = run(kernel(), x, w, routes, on_input=True)
    monkeypatch.setenv(CHUNK_TOKENS, "3")
    assert torch.equal(run(kernel(), x, w, routes, on_input=True), control)
    assert not torch.equal(run(kernel(), x, w, routes), control)


@pytest.mark.parametrize("shape", [(9, 1), (9, HIDDEN), (1, 1), ()])
def test_scales_of_activations_go_with_their_tokens(monkeypatch, shape):
    torch.manual_seed(3)
    x, w, routes = integers(9, HIDDEN), weights(), routing(9)
    scale = torch.randint(1, 5, shape).float()
    control = run(kernel(ScaledPrepare(scale)), x, w, routes)
    monkeypatch.setenv(CHUNK_TOKENS, "4")
    moe = kernel(ScaledPrepare(scale))
    assert torch.equal(run(moe, x, w, routes), control)
    assert moe.fused_experts.calls == [4, 4, 1]


def test_experts_that_choose_by_the_batch_see_its_size(monkeypatch):
    seen = []

    class Choosing(ToyExperts):
        batch_tokens: int | None = None

        def apply(self, *args, **kwargs):
            seen.append(self.batch_tokens)
            return super().apply(*args, **kwargs)

    monkeypatch.setenv(CHUNK_TOKENS, "4")
    moe = kernel(experts_cls=Choosing)
    for tokens in (9, 3):
        run(moe, integers(tokens, HIDDEN), weights(), routing(tokens))
    assert seen == [9, 9, 9, None]


# What cannot be cut runs whole.


def expect_whole(moe: mk.FusedMoEKernel, tokens: int = 9) -> None:
    run(moe, integers(tokens, HIDDEN), weights(), routing(tokens))
    assert moe.fused_experts.calls == [tokens]


def test_swizzled_scales_run_whole(monkeypatch):
    monkeypatch.setenv(CHUNK_TOKENS, "4")
    quant = FusedMoEQuantConfig.make(torch.int8, per_act_token_quant=True)
    quant.is_scale_swizzled = True
    quant._a1.dtype = "nvfp4"
    assert quant.quant_dtype == "nvfp4"
    expect_whole(kernel(ScaledPrepare(torch.ones(9, 1)), quant))


def test_scales_of_another_shape_run_whole(monkeypatch):
    monkeypatch.setenv(CHUNK_TOKENS, "4")
    expect_whole(kernel(ScaledPrepare(torch.ones(HIDDEN))))


def test_counts_of_the_whole_batch_run_whole(monkeypatch):
    class Counting(MoEPrepareAndFinalizeNoDPEPModular):
        def prepare(self, a1, *args, **kwargs):
            counts = mk.ExpertTokensMetadata.make_from_list([1] * EXPERTS, "cpu")
            return a1, None, counts, None, None

    monkeypatch.setenv(CHUNK_TOKENS, "4")
    expect_whole(kernel(Counting()))


def test_lora_runs_whole(monkeypatch):
    monkeypatch.setenv(CHUNK_TOKENS, "4")
    moe = kernel()
    moe.fused_experts._lora_context = SimpleNamespace()
    expect_whole(moe)


def test_a_communicators_output_is_written_whole(monkeypatch):
    class Communicating(MoEPrepareAndFinalizeNoDPEPModular):
        def allocate_fused_expert_output(self, shape, dtype, device, _):
            return torch.empty(shape, dtype=dtype, device=device)

    monkeypatch.setenv(CHUNK_TOKENS, "4")
    expect_whole(kernel(Communicating()))


def test_a_deferred_reduction_runs_whole(monkeypatch):
    monkeypatch.setenv(CHUNK_TOKENS, "4")
    parallel = FusedMoEParallelConfig.make_no_parallel()
    config = moe_config(moe_parallel_config=replace(parallel, tp_size=2))
    config.defer_moe_finalize(-1)
    moe = kernel(config=config)
    moe.fused_experts.defers = True
    out = moe.apply(
        integers(9, HIDDEN),
        *weights(),
        *routing(9),
        activation=MoEActivation.SILU,
        global_num_experts=EXPERTS,
        expert_map=None,
        apply_router_weight_on_input=False,
    )
    assert isinstance(out, UnfinalizedMoEOutput)
    assert moe.fused_experts.calls == [9]


def test_kernels_that_are_never_cut(monkeypatch):
    def reason(experts: type, prepare: Any = None) -> str | None:
        this = object.__new__(experts)
        return token_chunks.unsupported_reason(prepare, this)

    assert reason(TritonExperts) is None
    assert reason(BatchedMarlinExperts) == (
        "its activations are batched by expert, not by token"
    )
    assert reason(MoonEPExperts) == "its experts refuse chunks"
    passed = reason(TritonExperts, PassThroughPrepareAndFinalize())
    assert passed == "its experts communicate with other ranks"
    monkeypatch.setenv(CHUNK_TOKENS, "4")
    expect_whole(kernel(PassThroughPrepareAndFinalize()))


# Memory.


@pytest.fixture
def workspace_manager(monkeypatch: pytest.MonkeyPatch):
    """Upstream's workspaces, as on a GPU; the CPU's own path has none."""
    platform = SimpleNamespace(is_cpu=lambda: False, is_rocm=lambda: False)
    monkeypatch.setattr(mk, "current_platform", platform)
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    workspace.reset_workspace_manager()
    workspace.init_workspace_manager(torch.device("cpu"))
    yield workspace.current_workspace_manager()
    workspace.reset_workspace_manager()


@pytest.mark.parametrize("setting", [(CHUNK_TOKENS, "500"), (WORKSPACE_BUDGET, "1")])
def test_one_long_batch_reserves_for_all_others(
    monkeypatch, workspace_manager, setting
):
    torch.manual_seed(4)
    w = weights()
    long = integers(2000, HIDDEN), w, routing(2000)
    monkeypatch.setenv(*setting)
    moe = kernel()
    first = run(moe, *long)
    experts, impl = moe.fused_experts, moe.impl
    sizes = (2 * INTERMEDIATE, HIDDEN, TOP_K, EXPERTS, EXPERTS)
    chunk = impl.token_chunks.limit(torch.float32, sizes, MoEActivation.SILU)
    # Every chunk, the ragged one too, is in the same memory.
    assert len(experts.calls) > 2 and len(experts.memory) <= 2
    assert len({first for first, _ in experts.memory}) == 1
    (buffer,) = workspace_manager._current_workspaces
    nbytes = workspace_bytes(experts, torch.float32, chunk, sizes, MoEActivation.SILU)
    assert buffer.numel() == nbytes
    workspace_manager.lock()
    for tokens in (1, 64, chunk - 1, chunk, chunk + 1, 1999):
        run(moe, integers(tokens, HIDDEN), w, routing(tokens))
    assert torch.equal(run(moe, *long), first)
    # The control needs more, which the lock refuses.
    monkeypatch.setenv(CHUNK_TOKENS, "0")
    monkeypatch.delenv(WORKSPACE_BUDGET, raising=False)
    with pytest.raises(AssertionError, match="Workspace is locked"):
        run(kernel(), *long)


def test_an_output_in_the_workspace_survives_the_next_chunk(
    monkeypatch, workspace_manager
):
    """As on ROCm, where upstream does not write into the caller's output."""
    torch.manual_seed(5)
    x, w, routes = integers(10, HIDDEN), weights(), routing(10)
    control = run(kernel(), x, w, routes)
    monkeypatch.setattr(mk.current_platform, "is_rocm", lambda: True)
    monkeypatch.setenv(CHUNK_TOKENS, "4")
    moe = kernel()
    assert torch.equal(run(moe, x, w, routes), control)
    assert moe.fused_experts.calls == [4, 4, 2]


# Upstream's experts for the CPU, and start-up.


@pytest.mark.parametrize("chunk", ["1", "5", "16"])
def test_upstreams_cpu_experts(monkeypatch, chunk):
    torch.manual_seed(6)
    config = moe_config(torch.bfloat16)
    x = integers(37, HIDDEN).bfloat16()
    w1, w2 = (tensor.bfloat16() / 8 for tensor in weights())
    routes = routing(37)

    def output() -> torch.Tensor:
        moe = kernel(config=config, experts_cls=CPUUnquantizedExperts)
        layer = SimpleNamespace(
            w13_weight=torch.nn.Parameter(w1.clone(), requires_grad=False),
            w2_weight=torch.nn.Parameter(w2.clone(), requires_grad=False),
        )
        layer.register_parameter = lambda name, value: setattr(layer, name, value)
        moe.fused_experts.process_weights_after_loading(layer)
        return run(moe, x, (layer.w13_weight, layer.w2_weight), routes)

    control = output()
    monkeypatch.setenv(CHUNK_TOKENS, chunk)
    assert torch.equal(output(), control)


@pytest.mark.parametrize("name, value, message", BAD_SETTINGS)
def test_a_model_with_bad_settings_is_not_built(
    monkeypatch, default_vllm_config, name, value, message
):
    limit = default_vllm_config.scheduler_config.max_num_batched_tokens
    if value == "4097":
        value, message = str(limit + 1), f"{name}={limit + 1}: expected 1 to {limit}"
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message.replace("4096", str(limit))):
        FusedMoEFactory(
            EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, tp_size=1, dp_size=1, pcp_size=1
        )


@pytest.mark.parametrize(
    "setting, expected",
    [
        (None, False),
        ((CHUNK_TOKENS, "0"), False),
        ((WORKSPACE_BUDGET, "0"), False),
        ((CHUNK_TOKENS, "64"), True),
        ((WORKSPACE_BUDGET, "64"), True),
    ],
)
def test_torch_compile_does_not_trace_the_choice(monkeypatch, setting, expected):
    if setting:
        monkeypatch.setenv(*setting)
    method = SimpleNamespace(experts_cls=CPUUnquantizedExperts)
    assert token_chunks.needs_opaque_operator(method) is expected
