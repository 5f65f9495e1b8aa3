# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The KV page planner: exact tables, brute force, constraints, hooks."""

import functools
import itertools
import logging
import math
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.v1.core.kv_page_geometries import (
    DFLASH2,
    DFLASH_WINDOWED,
    FP8,
    FP16,
    MODELS,
    QWEN_27B,
    QWEN_27B_FP16_STATE,
    Attention,
    Model,
    gated_delta_net,
    layers,
)
from vllm.model_executor.layers.attention import Attention as AttentionLayer
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.core import kv_cache_utils, kv_page_plan_hooks
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import (
    KVCacheBlockCopy,
    _get_kv_cache_groups_uniform_page_size,
    _max_memory_usage_bytes_from_groups,
    _pool_bytes_per_block,
    get_kv_cache_configs,
    get_kv_cache_groups,
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
    unify_kv_cache_spec_page_size,
)
from vllm.v1.core.kv_page_plan import (
    PageConstraints,
    PagePlan,
    PagePlanError,
    Workload,
    blocks_per_request,
    content_bytes,
    evaluate,
    group_layers,
    is_state,
    plan_kv_pages,
    upstream_group_size,
)
from vllm.v1.core.kv_page_plan_hooks import PageSizeError
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.request import Request
from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.utils import (
    copy_kv_cache_blocks_inplace,
    select_common_block_size,
)

GIB = 1 << 30
ANY_16 = (MultipleOf(16),)

# The start-up of the memory figures: 64K tokens, two requests, 8192 batched
# tokens in two concurrent batches.
SCENARIO = Workload(
    max_model_len=65536,
    max_num_seqs=2,
    max_in_flight_tokens=16384,
    num_speculative_tokens=7,
)


def kernels(specs, sizes=ANY_16):
    return {n: sizes for n, s in specs.items() if isinstance(s, AttentionSpec)}


def unified(specs) -> dict[str, KVCacheSpec] | None:
    try:
        return unify_kv_cache_spec_page_size(dict(specs))
    except (NotImplementedError, AssertionError):
        return None


def make_plan(specs, workload=SCENARIO, sizes=ANY_16, **constraints) -> PagePlan:
    """The plan as the hooks ask for it, unless a test says otherwise."""
    return plan_kv_pages(
        specs,
        kernels(specs, sizes),
        workload,
        PageConstraints(**dict(keep_primary_block=True) | constraints),
        unified(specs),
    )


def block_of(plan: PagePlan, prefix: str) -> int:
    (block,) = {s.block_size for n, s in plan.specs.items() if n.startswith(prefix)}
    return block


def config(workload=SCENARIO, *, layout="LBNHC", mode="align", dcp=1, **cache):
    """The few fields of a VllmConfig that grouping and planning read."""
    cache_config = SimpleNamespace(
        block_size=16,
        mamba_block_size=None,
        mamba_cache_mode=mode,
        enable_prefix_caching=mode == "align",
        prefix_match_unit=None,
        prefix_cache_retention_interval=None,
        num_gpu_blocks_override=None,
        get_resolved_kv_cache_layout=lambda: KVCacheLayout[layout],
    )
    vars(cache_config).update(cache)
    return SimpleNamespace(
        model_config=SimpleNamespace(
            max_model_len=workload.max_model_len,
            original_max_model_len=workload.max_model_len,
        ),
        cache_config=cache_config,
        scheduler_config=SimpleNamespace(
            disable_hybrid_kv_cache_manager=False, max_num_seqs=workload.max_num_seqs
        ),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=dcp,
            cp_kv_cache_interleave_size=1,
            pipeline_parallel_size=1,
            tensor_parallel_size=1,
        ),
        attention_config=SimpleNamespace(hisparse_config=None),
        speculative_config=None,
        kv_transfer_config=None,
        max_in_flight_tokens=workload.max_in_flight_tokens,
        num_speculative_tokens=workload.num_speculative_tokens,
        num_prefill_lookahead_tokens=0,
    )


def declare(specs, sizes=ANY_16) -> dict[str, KVCacheSpec]:
    """Specs as they arrive from a worker."""
    return {
        n: replace(s, kernel_block_sizes=sizes) if isinstance(s, AttentionSpec) else s
        for n, s in specs.items()
    }


@pytest.fixture
def switch(monkeypatch):
    return lambda value: monkeypatch.setenv("VLLM_KV_PAGE_PLAN", value)


@pytest.fixture
def should_do_global_cleanup_after_test() -> bool:
    """Upstream's conftest asks; nothing here touches a device or a group."""
    return False


# ---------------------------------------------------------------------------
# Formulae: the planner counts what upstream counts
# ---------------------------------------------------------------------------


def any_spec() -> st.SearchStrategy[KVCacheSpec]:
    attention = dict(
        block_size=st.integers(1, 64).map(lambda n: 16 * n),
        num_kv_heads=st.integers(1, 8),
        head_size=st.sampled_from([64, 128, 256]),
        dtype=st.sampled_from([FP8, FP16]),
    )
    return st.one_of(
        st.builds(FullAttentionSpec, **attention),
        st.builds(
            SlidingWindowSpec,
            **attention,
            dcp_sharded=st.just(False),
            sliding_window=st.integers(1, 4096),
            extra_retained_tokens=st.integers(0, 3),
        ),
        st.builds(
            ChunkedLocalAttentionSpec,
            **attention,
            dcp_sharded=st.just(False),
            attention_chunk_size=st.integers(1, 4096),
        ),
        st.builds(
            MambaSpec,
            block_size=st.just(16),
            shapes=st.just(((4, 16), (2, 8))),
            dtypes=st.just((FP16, torch.float32)),
            mamba_cache_mode=st.just("align"),
            num_speculative_blocks=st.integers(0, 8),
            num_prefill_checkpoint_blocks=st.integers(0, 1),
        ),
    )


@settings(max_examples=400, deadline=None)
@given(
    spec=any_spec(),
    length=st.integers(1, 300_000),
    in_flight=st.integers(1, 16384),
    dcp=st.sampled_from([1, 2, 4]),
)
def test_blocks_per_request_is_upstreams(spec, length, in_flight, dcp):
    workload = Workload(max_model_len=length, max_in_flight_tokens=in_flight)
    pages = spec.max_memory_usage_bytes(config(workload, dcp=dcp)) / (
        spec.page_size_bytes
    )
    assert blocks_per_request(spec, length, workload, dcp) == pages


@settings(max_examples=300, deadline=None)
@given(
    counts=st.lists(st.integers(1, 60), min_size=2, max_size=4),
    size=st.integers(1, 60),
)
def test_total_bytes_is_upstreams(counts, size):
    """A plan's bytes are those that upstream's own accounting gives its groups."""
    specs: dict[str, KVCacheSpec] = {}
    for kind, count in enumerate(counts):
        spec = FullAttentionSpec(
            block_size=16 << kind, num_kv_heads=8 >> kind, head_size=64, dtype=FP16
        )
        specs |= {f"{kind}.{i}": spec for i in range(count)}
    size = max(size, upstream_group_size(counts))
    plan = evaluate(specs, SCENARIO, group_size=size)
    groups = _get_kv_cache_groups_uniform_page_size(specs, size)
    vllm_config = config()
    assert plan.num_groups == len(groups)
    assert plan.block_bytes == _pool_bytes_per_block(vllm_config, groups)
    assert plan.request_bytes == _max_memory_usage_bytes_from_groups(
        vllm_config, groups
    )
    assert plan.total_bytes == 2 * plan.request_bytes + plan.block_bytes
    default = _get_kv_cache_groups_uniform_page_size(specs)
    assert evaluate(specs, SCENARIO).num_groups == len(default)
    used = sum(
        g.held * g.content_bytes // g.block_size * len(g.layer_names)
        for g in plan.groups
    )
    assert plan.waste.total == plan.request_bytes - used


# ---------------------------------------------------------------------------
# The 27B class: every row of the design's table, at TP 1, 2 and 4
# ---------------------------------------------------------------------------

ROWS_27B = [
    # model, draft, kv, draft kv: state, block, page after upstream, its LCM;
    # planned page, target block, draft block (TP 1)
    ("fp16, no draft", QWEN_27B, (), 0, FP16, FP16)
    + (3_207_168, 784, 3_211_264, 784, 3_211_264, 784, None),
    ("fp16/fp16", QWEN_27B, DFLASH2, 7, FP16, FP16)
    + (3_350_528, 832, 3_407_872, 832, 3_407_872, 832, 832),
    ("fp8, no draft", QWEN_27B, (), 0, FP8, FP16)
    + (3_207_168, 1568, 3_211_264, 1568, 3_211_264, 1568, None),
    ("fp8/fp8", QWEN_27B, DFLASH2, 7, FP8, FP8)
    + (3_350_528, 1648, 3_375_104, 1648, 3_375_104, 1648, 1648),
    ("fp8/fp16", QWEN_27B, DFLASH2, 7, FP8, FP16)
    + (3_350_528, 1648, 6_750_208, 3296, 3_407_872, 1664, 832),
    ("fp8/fp16, fp16 state", QWEN_27B_FP16_STATE, DFLASH2, 7, FP8, FP16)
    + (1_777_664, 880, 3_604_480, 1760, 1_835_008, 896, 448),
]


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("row", ROWS_27B, ids=[r[0] for r in ROWS_27B])
def test_27b_table(row, tp):
    _, model, draft, spec_tokens, kv, draft_kv, *expected = row
    state, block, upstream_page, upstream_lcm, page, target, draft_block = expected
    specs = layers(
        model, tp=tp, kv=kv, draft=draft, draft_kv=draft_kv, spec_tokens=spec_tokens
    )
    mamba = specs["model.state.0"]
    assert mamba.state_content_size_bytes == state // tp
    assert specs["model.attn.0"].block_size == block
    upstream = evaluate(unified(specs), SCENARIO)
    assert (upstream.page_bytes, upstream.lcm) == (upstream_page // tp, upstream_lcm)

    plan = make_plan(specs)
    assert plan.page_bytes == page // tp
    assert block_of(plan, "model.attn") == block_of(plan, "model.state") == target
    if draft:
        assert block_of(plan, "draft") == draft_block
    assert plan.lcm == target
    assert plan.waste.page_padding == 0
    # Dtype, window and state are what they were.
    for name, spec in plan.specs.items():
        before = specs[name]
        assert type(spec) is type(before)
        assert spec == replace(
            before,
            block_size=spec.block_size,
            page_size_padded=spec.page_size_padded,
        )


@pytest.mark.parametrize(
    "gib, draft, kv, draft_kv, upstream_tokens, tokens",
    [
        (6.33, DFLASH2, FP16, FP16, 69_844, 69_844),
        (6.33, DFLASH2, FP8, FP8, 113_336, 113_336),
        (6.33, DFLASH2, FP8, FP16, 78_115, 104_794),
        (10.29, (), FP16, FP16, 156_558, 156_558),
        (10.29, (), FP8, FP16, 293_546, 293_546),
    ],
)
def test_27b_capacity_of_the_32_gb_scenario(
    gib, draft, kv, draft_kv, upstream_tokens, tokens
):
    """KV at TP 1 that an H200 held to 29.76 GiB has left, rounded to 0.01 GiB."""
    specs = layers(
        QWEN_27B,
        kv=kv,
        draft=draft,
        draft_kv=draft_kv,
        spec_tokens=7 if draft else 0,
    )
    budget = int(gib * GIB)
    upstream = evaluate(unified(specs), SCENARIO)
    assert upstream.tokens(budget, 65536) == upstream_tokens
    assert make_plan(specs).tokens(budget, 65536) == tokens


def test_27b_tp4_long_context():
    """16 full + 48 GDN + 5 windowed draft layers, 262,144 tokens, 10.57 GiB."""
    specs = layers(
        QWEN_27B, tp=4, kv=FP8, draft=DFLASH_WINDOWED, spec_tokens=7, draft_kv=FP16
    )
    long = Workload(max_model_len=262_144, max_in_flight_tokens=8192)
    budget = int(10.57 * GIB)
    assert evaluate(unified(specs), long).tokens(budget, 262_144) == 843_501
    kept = make_plan(specs, long, keep_group_size=True)
    assert kept.tokens(budget, 262_144) == 948_847
    assert (kept.lcm, kept.group_size, kept.num_groups) == (1664, 5, 15)
    plan = make_plan(specs, long)
    # Groups of 8 hold 16 and 48 layers without a gap; upstream's 5 do not.
    assert (plan.lcm, plan.width, plan.num_groups) == (1664, 8, 9)
    assert plan.tokens(budget, 262_144) == 1_136_640


def test_the_draft_block_divides_rather_than_fits():
    """Without prefix caching nothing needs to divide, and 1648 / 816 is best."""
    specs = layers(QWEN_27B, kv=FP8, draft=DFLASH2, spec_tokens=7, prefix_caching=False)
    free = make_plan(specs, blocks_divide=False)
    assert block_of(free, "model.attn") == 1648
    assert block_of(free, "draft") == 816
    assert free.lcm == 84_048
    bound = make_plan(specs)
    assert (block_of(bound, "model.attn"), block_of(bound, "draft")) == (1664, 832)
    assert bound.lcm == 1664
    (note,) = bound.notes
    assert "from 1648 to 1664 tokens, +32,768 bytes a page" in note
    # The states' block is a request's length without prefix caching.
    assert block_of(free, "model.state") == 65536


# ---------------------------------------------------------------------------
# Other public hybrid models
# ---------------------------------------------------------------------------

EAGLE = (Attention(1, 8, 128),)

# Target FP8, draft FP16, 8 GiB, the scenario's workload:
# (page, LCM, groups, tokens) under upstream's rule and planned.
PUBLIC_FP8 = {
    ("Qwen3-Next-80B-A3B", "dflash2"): (
        (9_043_968, 8832, 53, 126_925),
        (2_293_760, 2240, 53, 261_585),
    ),
    ("Qwen3-Next-80B-A3B", "windowed"): (
        (9_043_968, 8832, 12, 116_851),
        (2_293_760, 2240, 9, 276_313),
    ),
    ("Qwen3.5-35B-A3B", "dflash2"): (
        (9_043_968, 8832, 45, 148_080),
        (2_293_760, 2240, 45, 297_775),
    ),
    ("GPT-OSS-120B", "windowed"): (
        (65_536, 64, 9, 273_342),
        (65_536, 64, 7, 286_212),
    ),
    ("Gemma-3n-E4B", "windowed"): (
        (65_536, 64, 7, 489_176),
        (65_536, 64, 6, 530_726),
    ),
    ("Granite-4.0-H-Small", "dflash2"): (
        (8_781_824, 4288, 45, 139_638),
        (4_390_912, 2144, 45, 218_751),
    ),
    ("Nemotron-H-8B", "dflash2"): (
        (8_847_360, 4320, 33, 181_110),
        (4_456_448, 2176, 33, 266_993),
    ),
    ("Nemotron-H-8B", "eagle"): (
        (8_847_360, 4320, 29, 204_404),
        (4_456_448, 2176, 29, 314_932),
    ),
    ("Falcon-H1-7B", "windowed"): (
        (2_162_688, 1056, 15, 96_362),
        (1_114_112, 544, 9, 107_149),
    ),
    ("Jamba-v0.1", "windowed"): (
        (1_179_648, 576, 10, 388_519),
        (589_824, 288, 8, 464_332),
    ),
    ("Bamba-9B", "dflash2"): (
        (8_781_824, 4288, 37, 168_668),
        (4_390_912, 2144, 37, 260_545),
    ),
    # MLA next to another width: upstream has no answer at all.
    ("Kimi-Linear-48B-A3B", "dflash2"): (None, (2_359_296, 4096, 32, 419_984)),
    ("LFM2-1.2B", "windowed"): (
        (196_608, 192, 5, 526_820),
        (65_536, 64, 4, 652_225),
    ),
}
DRAFTS = {"dflash2": DFLASH2, "windowed": DFLASH_WINDOWED, "eagle": EAGLE}


def figures(plan: PagePlan) -> tuple[int, int, int, int]:
    return (
        plan.page_bytes,
        plan.lcm,
        plan.num_groups,
        plan.tokens(8 * GIB, SCENARIO.max_model_len),
    )


@pytest.mark.parametrize("case", PUBLIC_FP8, ids="-".join)
def test_public_models_with_a_draft(case):
    model, draft = case
    specs = layers(MODELS[model], kv=FP8, draft=DRAFTS[draft], spec_tokens=7)
    upstream, planned = PUBLIC_FP8[case]
    baseline = unified(specs)
    if upstream is None:
        assert baseline is None
    else:
        assert figures(evaluate(baseline, SCENARIO)) == upstream
    assert figures(make_plan(specs)) == planned


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("kv", [FP8, FP16], ids=["fp8", "fp16"])
@pytest.mark.parametrize("draft", [*DRAFTS, None])
@pytest.mark.parametrize("model", MODELS)
def test_public_models_never_lose(model, draft, kv, tp):
    specs = layers(
        MODELS[model],
        tp=tp,
        kv=kv,
        draft=DRAFTS[draft] if draft else (),
        spec_tokens=7 if draft else 0,
    )
    plan = make_plan(specs)
    baseline = unified(specs)
    if baseline is not None:
        upstream = evaluate(baseline, SCENARIO)
        assert plan.total_bytes <= upstream.total_bytes
        assert plan.num_groups <= upstream.num_groups
        assert plan.lcm <= math.ceil(
            9 / 8 * max(s.block_size for s in baseline.values())
        )
    spans = {s.block_size for s in plan.specs.values()}
    assert plan.lcm == max(spans) == math.lcm(*spans)
    assert len({s.page_size_bytes for s in plan.specs.values()}) == 1


@pytest.mark.parametrize("model", MODELS)
def test_models_with_one_page_size_are_left_alone(model):
    for kv in (FP8, FP16):
        specs = layers(MODELS[model], kv=kv)
        plan = make_plan(specs)
        assert plan.specs == specs == unified(specs)
        assert plan.group_size == upstream_group_size(
            [len(names) for names in group_layers(specs)]
        )


# ---------------------------------------------------------------------------
# Optimality: brute force over every block of every layer
# ---------------------------------------------------------------------------


class _Backend:
    def __init__(self, sizes):
        self.sizes = sizes

    def get_supported_kernel_block_sizes(self, spec=None):
        return list(self.sizes)

    def get_name(self):
        return "FAKE"


@functools.cache
def _kernel_block(block: int, sizes) -> int | None:
    """Upstream's own choice of a kernel block."""
    try:
        return select_common_block_size(block, [_Backend(sizes)])
    except ValueError:
        return None


def _readable(block: int, page: int, natural: int, sizes) -> bool:
    kernel = _kernel_block(block, sizes)
    return kernel == block or (kernel is not None and page == natural)


def brute_force(counts, tokens, held, sizes, mla, state, seqs, limits, max_lcm, divide):
    """Fewest bytes over every block, page and grouping; None if nothing fits.

    ``counts`` has the state layers last, if there are any. ``tokens`` are bytes
    per token, ``held`` (tokens, extra blocks) of a full-length request, ``state``
    is (bytes, states per request) or None.
    """
    kinds = range(len(tokens))
    sizes_up = range(upstream_group_size(counts), max(counts) + 1)
    groupings = set()
    for size in sizes_up:
        groups = [-(-n // size) for n in counts]
        width = max(-(-n // k) for n, k in zip(counts, groups))
        groupings.add((width, *groups))
    best = None
    choices = [range(1, limit + 1) for limit in limits]
    for blocks in itertools.product(*choices):
        natural = [b * t for b, t in zip(blocks, tokens)]
        page = max(natural)
        if state and page < state[0]:
            continue
        if any(mla[i] and natural[i] != page for i in kinds):
            continue
        if not all(_readable(blocks[i], page, natural[i], sizes[i]) for i in kinds):
            continue
        if divide and (
            math.lcm(*blocks) != max(blocks) or (max_lcm and max(blocks) > max_lcm)
        ):
            continue
        per_group = [-(-n // b) + extra for b, (n, extra) in zip(blocks, held)]
        per_group += [state[1]] if state else []
        for width, *groups in groupings:
            request = width * page * sum(k * n for k, n in zip(groups, per_group))
            total = seqs * request + width * page
            if best is None or total < best:
                best = total
    return best


SIZES = st.sampled_from(
    [
        (MultipleOf(1),),
        (MultipleOf(2),),
        (MultipleOf(4),),
        (2, 4),
        (4,),
        (1, MultipleOf(4)),
        (3, MultipleOf(2)),
    ]
)


@st.composite
def instances(draw):
    """A few kinds of layers with small blocks, with or without states."""
    length = draw(st.integers(1, 60))
    in_flight = draw(st.integers(0, 20))
    kinds = draw(st.integers(1, 3))
    specs: dict[str, KVCacheSpec] = {}
    sizes: dict[str, tuple] = {}
    for kind in range(kinds):
        token = draw(st.integers(1, 6))
        common = dict(
            block_size=draw(st.integers(1, 8)),
            num_kv_heads=1,
            # Widths differ, so kinds never merge.
            head_size=8 * token + kind,
            dtype=FP8,
        )
        shape = draw(st.sampled_from(["full", "window", "mla"]))
        if shape == "mla":
            spec: KVCacheSpec = MLAAttentionSpec(**common)
        elif shape == "window":
            window = draw(st.integers(1, 40))
            spec = SlidingWindowSpec(**common, sliding_window=window)
        else:
            spec = FullAttentionSpec(**common)
        kernel = draw(SIZES)
        for i in range(draw(st.integers(1, 5))):
            specs[f"{kind}.{i}"] = spec
            sizes[f"{kind}.{i}"] = kernel
    if draw(st.booleans()):
        state = MambaSpec(
            block_size=1,
            shapes=((draw(st.integers(1, 150)),),),
            dtypes=(FP8,),
            mamba_cache_mode="align",
            num_speculative_blocks=draw(st.integers(0, 3)),
        )
        specs |= {f"state.{i}": state for i in range(draw(st.integers(1, 6)))}
    workload = Workload(
        max_model_len=length,
        max_num_seqs=draw(st.integers(1, 4)),
        max_in_flight_tokens=in_flight,
    )
    constraints = PageConstraints(
        blocks_divide=draw(st.booleans()),
        max_lcm=draw(st.one_of(st.none(), st.integers(1, 40))),
    )
    return specs, sizes, workload, constraints


def _assert_optimal(specs, sizes, workload, constraints):
    if len({s.page_size_bytes for s in specs.values()}) == 1:
        return
    max_lcm = constraints.max_lcm
    if constraints.blocks_divide and max_lcm is None:
        max_lcm = 24
        constraints = replace(constraints, max_lcm=max_lcm)
    states = [s for s in specs.values() if isinstance(s, MambaSpec)]
    state_bytes = states[0].state_content_size_bytes if states else 0
    names = {}
    for name, spec in specs.items():
        if not isinstance(spec, MambaSpec):
            names.setdefault(name.split(".")[0], name)
    firsts = list(names.values())
    counts = [sum(n.startswith(f"{kind}.") for n in specs) for kind in names]
    tokens = [specs[n].unpadded_page_size_bytes // specs[n].block_size for n in firsts]
    held = []
    limits = []
    for name, token in zip(firsts, tokens):
        spec = specs[name]
        n = workload.max_model_len
        extra = 0
        if isinstance(spec, SlidingWindowSpec):
            n = min(spec.sliding_window - 1 + workload.max_in_flight_tokens, n)
            extra = 1
        held.append((n, extra))
        unit = math.gcd(*(s if isinstance(s, int) else s.base for s in sizes[name]))
        units = max(
            -(-n // unit),
            2 * -(-state_bytes // (unit * token)),
            -(-spec.block_size // unit),
        )
        limits.append(min(units * unit, max_lcm) if max_lcm else units * unit)
    expected = brute_force(
        counts + ([len(states)] if states else []),
        tokens,
        held,
        [sizes[n] for n in firsts],
        [isinstance(specs[n], MLAAttentionSpec) for n in firsts],
        (state_bytes, 2 + states[0].num_speculative_blocks) if states else None,
        workload.max_num_seqs,
        limits,
        max_lcm,
        constraints.blocks_divide,
    )
    try:
        plan = plan_kv_pages(specs, sizes, workload, constraints)
    except PagePlanError:
        assert expected is None
        return
    assert plan.total_bytes == expected
    # Upstream's answer bounds the search; it wins only if it is cheaper.
    if (baseline := unified(specs)) is not None:
        bounded = plan_kv_pages(specs, sizes, workload, constraints, baseline)
        upstream = evaluate(baseline, workload).total_bytes
        assert bounded.total_bytes == expected or (
            bounded.total_bytes == upstream < expected
        )
    # And the plan is what it says: one page, blocks that its kernels read.
    assert {s.page_size_bytes for s in plan.specs.values()} == {plan.page_bytes}
    groups = _get_kv_cache_groups_uniform_page_size(dict(plan.specs), plan.group_size)
    assert plan.request_bytes == _max_memory_usage_bytes_from_groups(
        config(workload), groups
    )


BRUTE_FORCE = settings(
    max_examples=1500,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@BRUTE_FORCE
@given(instances())
def test_brute_force_agrees(instance):
    specs, sizes, workload, constraints = instance
    attention = [s for s in specs.values() if not isinstance(s, MambaSpec)]
    # Keep the brute force small: at most about 30,000 combinations.
    largest = max(s.block_size for s in attention)
    if len({(s.head_size) for s in attention}) > 2:
        workload = replace(workload, max_model_len=min(workload.max_model_len, 24))
        constraints = replace(constraints, max_lcm=min(constraints.max_lcm or 30, 30))
    assert largest <= 8
    _assert_optimal(specs, sizes, workload, constraints)


@settings(BRUTE_FORCE, max_examples=1500)
@given(
    target=st.integers(1, 8),
    draft=st.integers(1, 12),
    state=st.integers(20, 200),
    counts=st.tuples(st.integers(1, 8), st.integers(1, 24), st.integers(1, 6)),
    window=st.one_of(st.none(), st.integers(1, 50)),
    length=st.integers(1, 200),
    kernel=st.sampled_from([(MultipleOf(1),), (MultipleOf(2),), (2,)]),
    divide=st.booleans(),
)
def test_brute_force_agrees_on_hybrids(
    target, draft, state, counts, window, length, kernel, divide
):
    """The shape that matters: states, a target, and a draft of another width."""
    full = FullAttentionSpec(block_size=2, num_kv_heads=1, head_size=target, dtype=FP16)
    common = dict(block_size=2, num_kv_heads=2, head_size=draft, dtype=FP16)
    other = (
        SlidingWindowSpec(**common, sliding_window=window)
        if window
        else FullAttentionSpec(**common)
    )
    mamba = MambaSpec(
        block_size=2, shapes=((state,),), dtypes=(FP16,), mamba_cache_mode="align"
    )
    specs: dict[str, KVCacheSpec] = {}
    for prefix, spec, count in zip("012", (full, other, mamba), counts):
        name = "state" if spec is mamba else prefix
        specs |= {f"{name}.{i}": spec for i in range(count)}
    _assert_optimal(
        specs,
        kernels(specs, kernel),
        Workload(max_model_len=length, max_num_seqs=2, max_in_flight_tokens=10),
        PageConstraints(blocks_divide=divide, max_lcm=120 if divide else None),
    )


@settings(max_examples=1000, deadline=None)
@given(instances())
def test_never_worse_than_upstream(instance):
    """With upstream's answer given, a plan costs no more, unless upstream's
    blocks do not divide or its kernels cannot read them."""
    specs, sizes, workload, constraints = instance
    baseline = unified(specs)
    if baseline is None:
        return
    constraints = replace(constraints, max_lcm=None)
    upstream = evaluate(baseline, workload)
    readable = all(
        _readable(
            spec.block_size,
            spec.page_size_bytes,
            spec.unpadded_page_size_bytes,
            sizes[name],
        )
        for name, spec in baseline.items()
        if isinstance(spec, AttentionSpec)
    )
    spans = {s.block_size for s in baseline.values()}
    divides = math.lcm(*spans) == max(spans)
    try:
        plan = plan_kv_pages(specs, sizes, workload, constraints, baseline)
    except PagePlanError:
        return
    if readable and (divides or not constraints.blocks_divide):
        assert plan.total_bytes <= upstream.total_bytes


def test_a_hundred_layers_take_less_than_50_ms():
    specs = layers(QWEN_27B, kv=FP8, draft=DFLASH2, spec_tokens=7)
    specs |= {
        f"more.{i}": SlidingWindowSpec(
            block_size=1648,
            num_kv_heads=6,
            head_size=128,
            dtype=FP16,
            sliding_window=512,
        )
        for i in range(31)
    }
    assert len(specs) == 100
    baseline, blocks = unified(specs), kernels(specs)
    took = []
    for _ in range(5):
        start = time.perf_counter()
        plan_kv_pages(specs, blocks, SCENARIO, PageConstraints(), baseline)
        took.append(time.perf_counter() - start)
    # The best of five: the limit is the planner's, not the machine's load.
    assert min(took) < 0.05, took


# ---------------------------------------------------------------------------
# Constraints
# ---------------------------------------------------------------------------


def hybrid_fp8(**kw) -> dict[str, KVCacheSpec]:
    return layers(QWEN_27B, kv=FP8, draft=DFLASH2, spec_tokens=7, **kw)


def test_kernels_with_fixed_blocks_get_unpadded_pages():
    """FlashInfer splits blocks into 64-token kernel blocks: no padding then."""
    specs = hybrid_fp8()
    plan = make_plan(specs, sizes=(16, 32, 64))
    for spec in plan.specs.values():
        if isinstance(spec, AttentionSpec):
            assert spec.page_size_padded is None
            assert spec.block_size % 16 == 0
    assert (block_of(plan, "model.attn"), block_of(plan, "draft")) == (1664, 832)


def test_kernels_that_differ_within_a_kind_must_all_read_its_blocks():
    specs = hybrid_fp8()
    blocks = kernels(specs)
    blocks["model.attn.3"] = (MultipleOf(64),)
    plan = plan_kv_pages(specs, blocks, SCENARIO, None, unified(specs))
    assert block_of(plan, "model.attn") % 64 == 0


def test_mla_pages_are_never_padded():
    specs = layers(MODELS["Kimi-Linear-48B-A3B"], draft=DFLASH2, spec_tokens=7)
    plan = make_plan(specs)
    mla = plan.specs["model.attn.0"]
    assert mla.page_size_padded is None
    assert mla.unpadded_page_size_bytes == plan.page_bytes
    # Kernel blocks of MLA decode come in multiples of 128 tokens.
    assert mla.block_size % 128 == 0


def test_layouts_that_split_pages_forbid_padding():
    full = FullAttentionSpec(block_size=16, num_kv_heads=4, head_size=48, dtype=FP16)
    window = SlidingWindowSpec(
        block_size=16, num_kv_heads=4, head_size=64, dtype=FP16, sliding_window=64
    )
    specs = {"a": full, "b": window}
    assert make_plan(specs).waste.page_padding > 0
    with pytest.raises(PagePlanError, match="No page fits"):
        plan_kv_pages(
            specs,
            kernels(specs),
            SCENARIO,
            PageConstraints(pages_may_be_padded=False, max_lcm=40),
        )


def test_context_parallelism_counts_the_span_of_a_block():
    specs = layers(QWEN_27B, kv=FP8, draft=EAGLE, spec_tokens=7)
    plan = make_plan(specs, dcp_world_size=2, block_multiple=32)
    target = plan.specs["model.attn.0"]
    assert target.block_size % 32 == 0
    assert plan.lcm == 2 * target.block_size
    assert plan.specs["draft.attn.0"].block_size * 2 == target.block_size
    # States are not sharded: their block is not scaled.
    assert plan.specs["model.state.0"].block_size == target.block_size


@pytest.mark.parametrize("unit", [64, 104, 128])
def test_every_block_is_a_multiple_of_the_hash_block(unit):
    plan = make_plan(hybrid_fp8(), hash_block_size=unit)
    assert all(s.block_size % unit == 0 for s in plan.specs.values())
    assert plan.hash_block % unit == 0


def test_the_retention_interval_is_a_multiple_of_the_scheduler_block():
    plan = make_plan(hybrid_fp8(), lcm_divides=1696 * 3)
    assert plan.lcm == 1696


def test_the_scheduler_block_covers_the_lookahead():
    specs = {
        "a": FullAttentionSpec(block_size=16, num_kv_heads=4, head_size=64, dtype=FP8),
        "b": SlidingWindowSpec(
            block_size=16, num_kv_heads=4, head_size=48, dtype=FP16, sliding_window=64
        ),
    }
    assert make_plan(specs).lcm < 48
    assert make_plan(specs, min_lcm=48, max_lcm=64).lcm >= 48


def test_a_given_block_size_is_a_lower_bound():
    specs = {
        n: replace(s, block_size=1792, page_size_padded=None)
        if not n.startswith("model.state")
        else replace(s, block_size=1792, page_size_padded=1792 * 2048)
        for n, s in hybrid_fp8().items()
    }
    free = make_plan(specs, keep_primary_block=False)
    assert block_of(free, "model.attn") == 1664
    assert block_of(make_plan(specs), "model.attn") == 1792


def test_padding_that_came_in_is_planned_anew():
    """Layers left out of KV quantization arrive padded to the primary page."""
    specs = hybrid_fp8()
    page = specs["model.attn.0"].page_size_bytes
    specs["model.swa.0"] = SlidingWindowSpec(
        block_size=640,
        num_kv_heads=4,
        head_size=256,
        dtype=FP16,
        sliding_window=1024,
        page_size_padded=page,
    )
    plan = make_plan(specs)
    # Upstream's rule doubles the block and keeps the stale padding.
    assert unified(specs) is None
    assert plan.specs["model.swa.0"].block_size == 832
    assert plan.specs["model.swa.0"].page_size_padded is None


@pytest.mark.parametrize(
    "spec, message",
    [
        (
            CircularBufferSpec(block_size=8, num_kv_heads=1, head_size=64, dtype=FP16),
            "CircularBufferSpec, whose block size the planner does not change",
        ),
        (
            MLAAttentionSpec(
                block_size=64, num_kv_heads=1, head_size=512, dtype=FP8, alignment=576
            ),
            "aligns its own pages to 576 bytes",
        ),
    ],
)
def test_layers_that_the_planner_leaves_alone(spec, message):
    with pytest.raises(PagePlanError, match=message):
        make_plan(hybrid_fp8() | {"odd": spec})


def test_layers_must_declare_their_kernels():
    specs = hybrid_fp8()
    blocks = kernels(specs)
    del blocks["draft.attn.0"]
    with pytest.raises(PagePlanError, match="draft.attn.0 does not say"):
        plan_kv_pages(specs, blocks, SCENARIO)


def test_states_alone_have_no_block_to_plan():
    small = MambaSpec(block_size=16, shapes=((8,),), dtypes=(FP16,))
    large = MambaSpec(block_size=16, shapes=((80,),), dtypes=(FP16,))
    with pytest.raises(PagePlanError, match="no attention layer"):
        plan_kv_pages({"a": small, "b": large}, {}, SCENARIO)
    with pytest.raises(PagePlanError, match="no layer"):
        plan_kv_pages({}, {}, SCENARIO)


def test_bad_workloads_are_refused():
    with pytest.raises(ValueError, match="max_model_len=0 must be at least 1"):
        Workload(max_model_len=0)


# ---------------------------------------------------------------------------
# Hooks: through upstream's own entry points
# ---------------------------------------------------------------------------


def groups_of(specs, vllm_config=None):
    return get_kv_cache_groups(vllm_config or config(), dict(specs))


def test_get_kv_cache_groups_follows_the_plan(switch):
    specs = hybrid_fp8()
    switch("1")
    groups = groups_of(declare(specs))
    by_layer = {n: g.kv_cache_spec for g in groups for n in g.layer_names}
    assert by_layer == dict(make_plan(specs).specs)
    # No declaration outlives grouping.
    assert all(
        getattr(g.kv_cache_spec, "kernel_block_sizes", None) is None for g in groups
    )


def test_the_switch_gives_upstreams_groups(switch):
    specs = hybrid_fp8()
    switch("0")
    off = groups_of(specs)
    assert {g.kv_cache_spec.page_size_bytes for g in off} == {6_750_208}
    switch("1")
    # Without declarations (a layer of another kind, a test) nothing is planned.
    assert groups_of(specs) == off
    assert groups_of(declare(specs)) != off


@pytest.mark.parametrize("model", MODELS)
def test_models_with_one_page_group_as_upstream(model, switch):
    specs = layers(MODELS[model], kv=FP8)
    switch("0")
    off = groups_of(specs)
    switch("1")
    assert groups_of(declare(specs)) == off


def test_wider_groups_keep_every_layer_once(switch):
    switch("1")
    specs = layers(QWEN_27B, tp=4, kv=FP8, draft=DFLASH_WINDOWED, spec_tokens=7)
    groups = groups_of(declare(specs))
    names = [n for g in groups for n in g.layer_names]
    assert sorted(names) == sorted(specs)
    assert len(groups) == 9
    assert max(len(g.layer_names) for g in groups) == 8


@pytest.mark.parametrize(
    "change, reason",
    [
        (dict(layout="BLHNC"), None),
        (dict(connector="NixlConnector"), "NixlConnector is not known"),
        (dict(connector="OffloadingConnector", extra=dict(block_size=16)), "one block"),
        (dict(connector="OffloadingConnector"), None),
    ],
)
def test_what_a_plan_cannot_support_it_does_not_choose(change, reason, switch, caplog):
    switch("1")
    vllm_config = config(layout=change.get("layout", "LBNHC"))
    if connector := change.get("connector"):
        vllm_config.kv_transfer_config = SimpleNamespace(
            kv_connector=connector, kv_connector_extra_config=change.get("extra", {})
        )
    hooks_logger = logging.getLogger(kv_page_plan_hooks.__name__)
    hooks_logger.addHandler(caplog.handler)
    try:
        with caplog.at_level(logging.DEBUG, logger=hooks_logger.name):
            groups = groups_of(declare(hybrid_fp8()), vllm_config)
    finally:
        hooks_logger.removeHandler(caplog.handler)
    if "layout" in change:
        # Packed layouts give each layer its own page; nothing to plan.
        assert len({g.kv_cache_spec.page_size_bytes for g in groups}) > 1
        return
    planned = {g.kv_cache_spec.page_size_bytes for g in groups} == {3_407_872}
    assert planned == (reason is None)
    if reason:
        assert reason in caplog.text


def test_pipeline_parallelism_keeps_upstreams_group_size(switch):
    switch("1")
    vllm_config = config()
    vllm_config.parallel_config.pipeline_parallel_size = 2
    specs = layers(QWEN_27B, tp=4, kv=FP8, draft=DFLASH_WINDOWED, spec_tokens=7)
    assert len(groups_of(declare(specs), vllm_config)) == 15


def scheduler_blocks(groups, vllm_config) -> tuple[int, int]:
    cache = KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=groups)
    return resolve_kv_cache_block_sizes(cache, vllm_config)


@pytest.mark.parametrize("value", ["1", "0"])
def test_layers_declare_what_their_backend_reads(value, switch):
    switch(value)
    plain = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=64, dtype=FP16)

    class Backend(_Backend):
        def customize_spec(self, spec):
            return replace(spec, num_head_slots=1)

        def get_supported_kernel_block_sizes(self, spec=None):
            # Asked about the page as the backend packs it.
            return [32] if spec.num_head_slots else [MultipleOf(16)]

    class Layer:
        attn_backend = Backend(())

        @kv_page_plan_hooks.declares_kernel_blocks
        def get_kv_cache_spec(self, vllm_config):
            return vllm_config.spec

    vllm_config = config()
    for spec, declared in ((plain, (32,)), (None, None)):
        vllm_config.spec = spec
        got = Layer().get_kv_cache_spec(vllm_config)
        assert got == spec
        sizes = getattr(got, "kernel_block_sizes", None)
        assert sizes == (declared if value == "1" else None)
    # HiSparse merges specs in the worker, before anything takes declarations off.
    vllm_config.spec = plain
    vllm_config.attention_config.hisparse_config = object()
    assert Layer().get_kv_cache_spec(vllm_config).kernel_block_sizes is None


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_both_runners_report_what_layers_declare(runner, switch):
    switch("1")
    plain = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=64, dtype=FP16)

    class Layer(AttentionLayerBase):
        attn_backend = _Backend((32, 64))
        attn_backend.customize_spec = lambda spec: spec

        def get_attn_backend(self):
            return self.attn_backend

        @kv_page_plan_hooks.declares_kernel_blocks
        def get_kv_cache_spec(self, vllm_config):
            return plain

    vllm_config = config()
    vllm_config.compilation_config = SimpleNamespace(
        static_forward_context={"model.attn.0": Layer()}
    )
    if runner == "v1":
        stub = SimpleNamespace(vllm_config=vllm_config, shared_kv_cache_layers={})
        specs = GPUModelRunner.get_kv_cache_spec(stub)
    else:
        specs = get_kv_cache_spec(vllm_config)
    # What upstream's runners add for fixed sizes is still there.
    assert specs["model.attn.0"].block_stride_alignment == MultipleOf(64)
    assert kv_page_plan_hooks.take_kernel_blocks(specs) == {"model.attn.0": (32, 64)}


def test_the_attention_layers_are_the_ones_that_declare():
    for layer in (AttentionLayer, MLAAttention):
        assert hasattr(layer.get_kv_cache_spec, "__wrapped__")


def test_the_scheduler_block_is_the_planned_lcm(switch):
    switch("1")
    vllm_config = config()
    specs = hybrid_fp8()
    groups = groups_of(declare(specs), vllm_config)
    assert scheduler_blocks(groups, vllm_config) == (1664, 832)
    switch("0")
    assert scheduler_blocks(groups_of(specs, vllm_config), vllm_config) == (3296, 1648)


def test_errors_name_layers_pages_and_settings(switch):
    switch("1")
    mla = dict(block_size=64, num_kv_heads=1, dtype=FP16)
    specs = {
        "model.layers.0.mla": MLAAttentionSpec(**mla, head_size=576),
        "model.layers.1.state": MambaSpec(
            block_size=64, shapes=((1000,),), dtypes=(FP16,)
        ),
        "draft.layers.0.mla": MLAAttentionSpec(**mla, head_size=500),
    }
    with pytest.raises(PageSizeError) as error:
        groups_of(declare(specs, (64,)))
    text = str(error.value)
    for part in (
        "model.layers.0.mla",
        "73,728 bytes",
        "draft.layers.0.mla",
        "64,000 bytes",
        "--kv-cache-dtype",
        "kv_cache_dtype in --speculative-config",
        "--block-size",
    ):
        assert part in text, (part, text)
    # Upstream's callers catch it as they catch their own.
    assert isinstance(error.value, NotImplementedError)


def test_stale_padding_is_not_a_bare_assertion(switch):
    """A padded layer next to a larger page: upstream's rule asserts."""
    specs = {
        "a": SlidingWindowSpec(
            block_size=16,
            num_kv_heads=1,
            head_size=32,
            dtype=FP16,
            sliding_window=8,
            page_size_padded=4096,
        ),
        "b": FullAttentionSpec(block_size=16, num_kv_heads=4, head_size=64, dtype=FP16),
    }
    with pytest.raises(AssertionError):
        unify_kv_cache_spec_page_size(dict(specs))
    switch("1")
    with pytest.raises(PageSizeError, match="a .*4,096 bytes.* b .*16,384 bytes"):
        groups_of(specs)
    planned = groups_of(declare(specs))
    assert len({g.kv_cache_spec.page_size_bytes for g in planned}) == 1


def test_the_engine_and_the_workers_adopt_the_states_block(switch):
    specs = hybrid_fp8()
    switch("1")
    vllm_config = config(block_size=832, mamba_block_size=1648)
    groups = groups_of(declare(specs), vllm_config)
    kv_page_plan_hooks.sync_block_sizes(vllm_config, groups)
    assert vllm_config.cache_config.block_size == 1664
    assert vllm_config.cache_config.mamba_block_size == 1664
    switch("0")
    vllm_config = config(block_size=832, mamba_block_size=1648)
    kv_page_plan_hooks.sync_block_sizes(vllm_config, groups)
    assert vllm_config.cache_config.block_size == 832
    assert vllm_config.cache_config.mamba_block_size == 1648


def test_get_kv_cache_configs_allocates_and_reports(switch, monkeypatch):
    switch("1")
    lines = []
    monkeypatch.setattr(
        kv_page_plan_hooks.logger, "info", lambda msg, *args: lines.append(msg % args)
    )
    specs = hybrid_fp8()
    budget = int(6.33 * GIB)
    (plan,) = get_kv_cache_configs(config(), [declare(specs)], [budget])
    assert plan.num_blocks == budget // 3_407_872
    (table,) = [line for line in lines if line.startswith("KV pages")]
    for part in (
        "3,407,872 bytes a page",
        "69 groups, scheduler block 1664 tokens",
        "48 x model.state.0",
        "1664 (was 1648)",
        "832 (was 1648)",
        "9 states",
        "avoided: the largest page would be 6,750,208 bytes",
        "a scheduler block of 3296 tokens",
        "(25.4 %) saved",
    ):
        assert part in table, table
    lines.clear()
    switch("0")
    (upstream,) = get_kv_cache_configs(config(), [specs], [budget])
    assert upstream.num_blocks == budget // 6_750_208
    assert not lines


# ---------------------------------------------------------------------------
# Consumers: views of one pool in blocks of several sizes
# ---------------------------------------------------------------------------


def small_pool(layout: str, draft: tuple[Attention, ...]):
    """A planned pool whose kinds differ in block and in content per page."""
    model = Model((Attention(3, 2, 32),), gated_delta_net(6, 1, 2))
    specs = layers(model, kv=FP8, draft=draft)
    vllm_config = config(layout=layout)
    (plan,) = get_kv_cache_configs(vllm_config, [declare(specs)], [1 << 28])
    spec_of = {n: g.kv_cache_spec for g in plan.kv_cache_groups for n in g.layer_names}
    raw = torch.zeros(plan.kv_cache_tensors[0].size, dtype=torch.int8)
    views: dict[str, torch.Tensor] = {}
    for tensor in plan.kv_cache_tensors:
        made = create_kv_cache_views(
            raw,
            spec_of[tensor.layers[0]],
            plan.num_blocks,
            KVCacheLayout[layout],
            tensor,
        )
        views |= dict(zip(tensor.layers, made))
    return plan, spec_of, raw, views


PADDED_DRAFT = (Attention(3, 5, 32), Attention(3, 3, 48))


@pytest.mark.parametrize("layout", ["LBNHC", "LBHNC"])
def test_blocks_of_different_layers_never_overlap(layout, switch):
    """Every token slot of every layer lies inside its block's own bytes."""
    switch("1")
    plan, spec_of, raw, views = small_pool(layout, PADDED_DRAFT)
    (page,) = {s.page_size_bytes for s in spec_of.values()}
    contents = {content_bytes(s) for s in spec_of.values()}
    assert len({s.block_size for s in spec_of.values()}) >= 2
    assert len(contents) >= 3
    for tensor in plan.kv_cache_tensors:
        for i, name in enumerate(tensor.layers):
            for block in (0, plan.num_blocks - 1):
                start = tensor.offset + i * tensor.layer_stride
                start += block * tensor.block_stride
                raw[start : start + page] = 0
                before = int(raw.count_nonzero())
                views[name][block].fill_(1)
                inside = raw[start : start + page].count_nonzero()
                assert 0 < inside == raw.count_nonzero() - before


@pytest.mark.parametrize("value", ["1", "0"])
def test_a_copied_block_is_copied_whole(value, switch):
    """Partial prefix-cache hits copy blocks; a block may be any group's."""
    switch("1")
    plan, spec_of, raw, views = small_pool("LBHNC", PADDED_DRAFT)
    (page,) = {s.page_size_bytes for s in spec_of.values()}
    content = max(map(content_bytes, spec_of.values()))
    assert content == page
    assert max(len(g.layer_names) for g in plan.kv_cache_groups) > 1
    raw.view(-1, page).copy_(torch.arange(1, 1 + raw.numel() // page)[:, None] % 127)
    states_first = sorted(views.items(), key=lambda v: not is_state(spec_of[v[0]]))
    switch(value)
    copy_kv_cache_blocks_inplace(
        [view for _, view in states_first],
        plan.num_blocks,
        [KVCacheBlockCopy(src_block_id=3, dst_block_id=9)],
    )
    whole = True
    for tensor in plan.kv_cache_tensors:
        for i, _ in enumerate(tensor.layers):
            start = tensor.offset + i * tensor.layer_stride
            pages = raw[start:].as_strided((plan.num_blocks, page), (page, 1))
            whole &= torch.equal(pages[3], pages[9])
    # Upstream copies the first view of an address: here a state's, which is
    # shorter than the page.
    assert whole == (value == "1")


def test_no_consumer_sees_a_declaration():
    """Grouping, hashing and equality ignore the field that carries kernels."""
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=64, dtype=FP16)
    declared = replace(spec, kernel_block_sizes=ANY_16)
    assert declared == spec
    assert hash(declared) == hash(spec)
    assert repr(declared) == repr(spec)
    specs = {"a": declared, "b": spec}
    assert kv_page_plan_hooks.take_kernel_blocks(specs) == {"a": ANY_16}
    assert all(s.kernel_block_sizes is None for s in specs.values())
    assert kv_cache_utils.is_kv_cache_spec_uniform(specs)


# ---------------------------------------------------------------------------
# Consumers: prefix caching of states next to a draft with smaller blocks
# ---------------------------------------------------------------------------


def cached_and_held_states(
    groups, vllm_config, prompt_tokens: int, budget: int
) -> list[tuple[int, int]]:
    """(position a cached state is found under, position it holds) of a prefill.

    Drives the scheduler's own chunk splitting and a real cache manager; a
    request's running state lies in the block that its chunk ends in.
    """
    lcm, hash_block = scheduler_blocks(groups, vllm_config)
    cache = KVCacheConfig(num_blocks=4096, kv_cache_tensors=[], kv_cache_groups=groups)
    manager = KVCacheManager(
        cache,
        max_model_len=65536,
        scheduler_block_size=lcm,
        hash_block_size=hash_block,
        enable_caching=True,
    )
    coordinator = manager.coordinator
    scheduler = SimpleNamespace(
        block_size=lcm,
        hash_block_size=hash_block,
        cache_config=vllm_config.cache_config,
        scheduler_config=SimpleNamespace(long_prefill_token_threshold=0),
        max_num_scheduled_tokens=budget,
        use_eagle_block_drop=False,
        mamba_partial_cache_hit=coordinator.enable_partial_hash_hits
        and hash_block < lcm,
        mamba_shared_prefix_checkpoint=False,
        mamba_has_prefill_checkpoint_blocks=False,
        mamba_prefill_checkpoint_alignment=None,
    )
    init_none_hash(sha256)
    request = Request(
        request_id="0",
        prompt_token_ids=[1] * prompt_tokens,
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        block_hasher=get_request_block_hasher(hash_block, sha256),
    )
    states = next(
        m for m in coordinator.single_type_managers if is_state(m.kv_cache_spec)
    )
    holds: dict[int, int] = {}
    found = set()
    while request.num_computed_tokens < prompt_tokens:
        left = min(prompt_tokens - request.num_computed_tokens, budget)
        chunk = Scheduler._mamba_block_aligned_split(scheduler, request, left)
        assert chunk > 0
        assert manager.allocate_slots(request, chunk) is not None
        request.num_computed_tokens += chunk
        blocks = states.req_to_blocks[request.request_id]
        last = (request.num_computed_tokens - 1) // states.block_size
        holds[blocks[last].block_id] = request.num_computed_tokens
        found |= {
            (block.block_hash_num_tokens, holds.get(block.block_id, -1))
            for block in blocks
            if not block.is_null and block.block_hash is not None
        }
    return sorted(found)


@pytest.mark.parametrize("budget", [2048, 2600, 4096, 8192])
def test_a_cached_state_is_the_state_of_its_prefix(budget, switch):
    switch("1")
    vllm_config = config()
    groups = groups_of(declare(hybrid_fp8()), vllm_config)
    smallest = min(g.kv_cache_spec.block_size for g in groups)
    assert smallest == 832
    vllm_config.cache_config.block_size = smallest
    kv_page_plan_hooks.sync_block_sizes(vllm_config, groups)
    states = cached_and_held_states(groups, vllm_config, 20_000, budget)
    assert len(states) >= 3
    assert all(found == held for found, held in states), states


def test_the_smallest_block_would_cache_wrong_states(switch):
    """Why ``sync_block_sizes`` is there: what the engine core sets by itself."""
    switch("1")
    vllm_config = config(block_size=832)
    groups = groups_of(declare(hybrid_fp8()), vllm_config)
    states = cached_and_held_states(groups, vllm_config, 20_000, 8192)
    assert any(found != held for found, held in states), states
