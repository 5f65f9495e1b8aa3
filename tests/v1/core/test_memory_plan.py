# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The activation formulae and the table: exact figures, then what always holds."""

import json
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import (
    QwenGatedDeltaNetAttention,
)
from vllm.model_executor.models.llama import LlamaAttention
from vllm.model_executor.models.qwen3 import Qwen3Attention
from vllm.model_executor.models.qwen3_moe import Qwen3MoeAttention
from vllm.model_executor.models.qwen3_next import Qwen3NextAttention
from vllm.platforms.planned_gpu import GPUS, find_gpu
from vllm.v1.core.memory_plan.activations import (
    Line,
    Part,
    Peak,
    Shape,
    Sizes,
    Tiled,
    Workspace,
    attention_bytes,
    attention_parts,
    gdn_parts,
    mlp_part,
    moe_part,
    moe_workspace_token,
    peak_of,
    resident_bytes,
    residual_lines,
    sampler_bytes,
    sm70_moe_workspace_token,
    state_part,
)
from vllm.v1.core.memory_plan.planner import peak_of_batches
from vllm.v1.core.memory_plan.sizes import _lets_go
from vllm.v1.core.memory_plan.table import KvNeed, MemoryPlan, Remedy, format_plan
from vllm.v1.worker.profile_batches import Batch, Limits, batches, split

MIB = 2**20
FP16 = 2

# Qwen3.5-27B's text layers at TP1: hidden 5120, FP16, FP32 states.
GDN = gdn_parts(16, 48, 128, 128, FP16, 4)
MLP = mlp_part(5120, 17408, 34816, FP16)
GATE_UP, DOWN = Tiled(17408, 5120, True), Tiled(5120, 17408, False)
TILED = mlp_part(5120, 17408, 34816, FP16, (GATE_UP, DOWN), gated_at_once=True)
EAGER = residual_lines(5120, FP16, 4)
HYBRID = Sizes(FP16, EAGER, (*GDN, MLP), 248320)


def peak_mib(sizes: Sizes, sequences: int, tokens: int) -> float:
    return peak_of_batches(sizes, [Batch(sequences, tokens)]).bytes / MIB


FREED = 160 + 48 + 96
"""MiB of 8,192 tokens that upstream holds at its peak, the rule's last kernel: the
convolution's output, each chunk's inverse, and, since the peak is now the kernel
before it, an output that does not yet exist there. (w and u do at both.)"""


@pytest.mark.parametrize(
    ("sequences", "upstream"), [(1, 1630), (16, 1720), (128, 2392)]
)
def test_the_peaks_that_an_h200_measured(sequences: int, upstream: int) -> None:
    """MiB of real prefills of 8,192 tokens, eager, untiled, of upstream's code."""
    assert round(peak_mib(HYBRID, sequences, 8192)) == upstream - FREED


def test_a_draft_adds_the_hidden_states_it_reads() -> None:
    """2,029 MiB were measured of upstream's code with a draft that reads five
    layers."""
    auxiliary = Line("auxiliary", token=5 * 5120 * FP16)
    sizes = replace(HYBRID, stream=(*EAGER, auxiliary))
    assert peak_mib(sizes, 1, 8192) == peak_mib(HYBRID, 1, 8192) + 400
    assert peak_mib(sizes, 1, 8192) == pytest.approx(2029 - FREED, abs=1)


def test_each_line_of_the_gated_delta_net() -> None:
    peak = peak_of_batches(HYBRID, [Batch(1, 8192)])
    lines = {name: size / MIB for name, size in peak.lines}
    assert peak.part == "gated delta net"
    assert lines == {
        "hidden and residual states": 320,
        "projections (q, k, v, z, twice a and b)": 259,
        "output": 96,
        "q, k, v, decay and its sums, beta": 164.5,
        "w and u": 192,
        "new values": 96,
        "state of each chunk": 192,
        "states in and out": 6,
    }
    assert sum(size for _, size in peak.lines) == peak.bytes


def gdn_mib(dim: int, lets_go: bool = True) -> list[float]:
    """MiB of each moment of the gated delta net alone, of 8,192 tokens."""
    parts = gdn_parts(16, 48, dim, dim, FP16, 4, lets_go=lets_go)
    return [peak_mib(Sizes(FP16, (), (part,)), 1, 8192) for part in parts]


def test_the_moments_of_the_gated_delta_net() -> None:
    """259 of projections, 96 of output and 164.5 of q, k, v and decay, and then: the
    convolution's output; a chunk's matrix in FP32, its inverse, and a state; the
    inverse, w and u, and a state; w, u, new values, chunks' and two states."""
    rest = 259 + 96 + 164.5
    assert gdn_mib(128) == [
        rest + 160,
        rest + 96 + 48 + 3,
        rest + 48 + 192 + 3,
        rest + 192 + 96 + 192 + 6,
    ]
    # Where the convolution's output is kept, it is there to the end.
    assert gdn_mib(128, lets_go=False) == [
        rest + 160,
        rest + 160 + 96 + 48 + 3,
        rest + 160 + 48 + 192 + 3,
        rest + 160 + 192 + 96 + 192 + 6,
    ]


@pytest.mark.parametrize(("dim", "highest"), [(8, 1), (16, 1), (32, 1), (64, 3)])
def test_which_moment_is_the_peak_depends_on_the_heads(dim: int, highest: int) -> None:
    moments = gdn_mib(dim)
    assert moments.index(max(moments)) == highest


def test_an_mlp_and_what_tiles_leave_of_it() -> None:
    """340 MiB of product and activation become 64 of tiles, at TP1, M=8192."""
    untiled = peak_mib(Sizes(FP16, (), (MLP,)), 1, 8192)
    assert untiled == 544 + 272 + 80
    tiled = Sizes(FP16, (), (TILED,))
    assert peak_mib(tiled, 1, 8192) == 272 + 80 + 64
    assert resident_bytes(tiled, 8192) == 40 * MIB


def test_the_untiled_control_holds_a_dense_weight_for_each_call() -> None:
    part = replace(TILED, tiled=(replace(GATE_UP, width=0),))
    sizes = Sizes(FP16, (), (part,))
    assert peak_mib(sizes, 1, 8192) == 272 + 80 + 340 + 544
    assert resident_bytes(sizes, 8192) == 0


def attention_mib(parts: tuple[Part, ...]) -> list[float]:
    return [peak_mib(Sizes(FP16, (), (part,)), 1, 8192) for part in parts]


def test_attention_with_a_gate_and_norms() -> None:
    plain = attention_parts(5120, 8192, 6144, 1024, FP16)
    assert peak_mib(Sizes(FP16, (), plain), 1, 8192) == 128 + 96 + 80
    # The gate, its sigmoid, the output before and after are the four of 96.
    gated = partial(
        attention_parts, 5120, 14336, 6144, 1024, FP16, output_gate=True, normed=True
    )
    assert attention_mib(gated()) == [
        224 + (96 + 16) + 2 * 96,
        224 + (96 + 16) + 4 * 96,
        224 + (96 + 16) + 2 * 96 + 80,
    ]
    assert attention_mib(gated(lets_go=True)) == [
        224 + (96 + 16) + 2 * 96,
        4 * 96,
        2 * 96 + 80,
    ]


def test_attention_that_quantizes_the_input_of_its_projection() -> None:
    """Qwen3-30B-A3B: 345 MiB were measured on an H200 of upstream's code, 64 of them
    its two residual states."""
    copy = (Line("quantized", token=4096 + 4 * 32),)
    parts = partial(
        attention_parts, 2048, 5120, 4096, 512, FP16, normed=True, quantized=copy
    )
    assert attention_mib(parts()) == [80 + 72 + 64, 80 + 72 + 64 + 32 + 33]
    assert 64 + max(attention_mib(parts())) == 345
    assert attention_mib(parts(lets_go=True)) == [80 + 72 + 64, 64 + 32 + 33]


@pytest.mark.parametrize(
    ("layer", "lets_go"),
    [
        (Qwen3NextAttention, True),
        (Qwen3MoeAttention, True),
        (Qwen3Attention, False),
        (LlamaAttention, False),
    ],
)
def test_what_a_layer_lets_go_of_is_read_off_its_code(
    layer: type, lets_go: bool
) -> None:
    assert _lets_go(object.__new__(layer), "forward", "qkv") is lets_go


def test_a_layer_without_the_method_lets_go_of_nothing() -> None:
    linear = object.__new__(QwenGatedDeltaNetAttention)
    assert _lets_go(linear, "_forward_core", "mixed_qkv_non_spec")
    assert not _lets_go(linear, "_forward_core", "mixed_qkv")
    assert not _lets_go(object(), "_forward_core", "mixed_qkv_non_spec")


def test_experts_stay_in_their_workspaces() -> None:
    """128 experts of 768, 8 a token, hidden 2048: 16,384 + 16,384 elements."""
    token = moe_workspace_token(2048, 768, 8, FP16)
    assert token == 8 * (2048 + 2048) * FP16
    assert moe_workspace_token(2048, 4096, 8, FP16) == 8 * (8192 + 4096) * FP16
    experts = (moe_part(2048, 128, FP16),)
    sizes = Sizes(FP16, (), experts, workspaces=(Workspace(token),))
    assert resident_bytes(sizes, 8192) == 8192 * token == 512 * MIB
    assert peak_mib(sizes, 1, 1024) == (128 * 6 + 2 * 2048 * FP16) / 1024


def test_sm70_experts_keep_less() -> None:
    """256 experts of 512, 8 a token, hidden 2048; and one a token, of 16."""
    token = sm70_moe_workspace_token(2048, 512, 8, FP16)
    assert token == (8 * 512 + 7 * 2048) * FP16 == 36_864
    assert sm70_moe_workspace_token(2048, 16, 1, FP16) == 2048 * FP16


@pytest.mark.parametrize(
    ("workspace", "mib"),
    [
        (Workspace(65536), 512),
        (Workspace(65536, budget=120 * MIB), 120),
        (Workspace(65536, chunk=1024), 64),
        (Workspace(65536, chunk=16384), 512),
        (Workspace(65536, budget=1024 * MIB), 512),
    ],
)
def test_experts_that_are_bounded(workspace: Workspace, mib: int) -> None:
    assert workspace.bytes_for(8192) == mib * MIB
    small = replace(HYBRID, workspaces=(Workspace(1), workspace))
    assert resident_bytes(small, 8192) == mib * MIB


VOCAB = 248320
"""Of the 27B class. The figures were measured on an H200, in MiB."""


@pytest.mark.parametrize(
    ("requests", "drafts", "second_runner", "measured"),
    [
        (126, 0, True, 183),
        (126, 0, False, 840),
        (98, 7, True, 1147),
        (104, 7, True, 1216),
    ],
)
def test_a_decode_step_peaks_where_it_samples(
    requests: int, drafts: int, second_runner: bool, measured: int
) -> None:
    sizes = Sizes(
        FP16,
        residual_lines(5120, FP16, 4),
        logits=VOCAB,
        rows_per_sequence=1 + drafts,
        second_runner=second_runner,
    )
    peak = peak_of_batches(sizes, [Batch(requests, requests)])
    assert peak.bytes / MIB == pytest.approx(measured, rel=0.006)


def test_many_drafts_are_verified_in_parts() -> None:
    sizes = Sizes(FP16, logits=VOCAB, rows_per_sequence=8)
    peak = peak_of_batches(sizes, [Batch(1024, 8192)])
    assert peak.part == "verified drafts"
    assert peak.bytes == 1024 * 8 * VOCAB * FP16 + 2**30
    # The first runner does not.
    first = replace(sizes, second_runner=False)
    peak = peak_of_batches(first, [Batch(98, 8192)])
    assert peak.bytes == 98 * 8 * VOCAB * (FP16 + 26)


def test_the_sampler_decides_with_many_short_sequences() -> None:
    sizes = replace(HYBRID, parts=(MLP,), logits=VOCAB)
    peak = peak_of_batches(sizes, [Batch(1024, 8192)])
    assert peak.part == "sampler"
    assert peak.bytes == 320 * MIB + 1024 * VOCAB * (2 + 4)


def test_what_sampling_keeps() -> None:
    """Counts and prompts for penalties, a mask, the buffer of top-k and top-p."""
    plain, bits = Sizes(FP16, logits=VOCAB), VOCAB // 8
    assert sampler_bytes(plain, 128, 128) == 2 * 128 * (VOCAB * 4 + bits)
    assert sampler_bytes(plain, 16, 9) == 2 * 16 * (VOCAB * 4 + bits)
    assert sampler_bytes(plain, 16, 8) == (16 + 8) * VOCAB * 4 + 32 * bits
    drafts = replace(plain, rows_per_sequence=8)
    assert sampler_bytes(drafts, 16, 4) == (16 + 32) * VOCAB * 4 + 16 * 9 * bits
    assert sampler_bytes(drafts, 128, 98) == 256 * VOCAB * 4 + 128 * 9 * bits
    # The first runner keeps the buffer alone.
    first = replace(plain, second_runner=False)
    assert sampler_bytes(first, 128, 98) == 128 * VOCAB * 4


def test_attention_keeps_a_scratch_for_all_groups_or_for_each() -> None:
    sizes = Sizes(FP16, attention=(("a", 12), ("b", 12), ("draft", 20)))
    for shared in (True, False):
        assert attention_bytes(sizes, [["a", "b"], ["state"]], shared=shared) == 12
        assert attention_bytes(sizes, [], shared=shared) == 0
    groups = [["a"], ["b"], ["draft", "state"]]
    assert attention_bytes(sizes, groups, shared=True) == 32
    assert attention_bytes(sizes, groups, shared=False) == 44


def test_another_state_space_layer() -> None:
    part = state_part(1000, 500, 10_000, FP16)
    peak = peak_of_batches(Sizes(FP16, (), (part,)), [Batch(3, 100)])
    assert peak.bytes == 100 * (1000 + 4 * 500) * FP16 + 3 * 2 * 10_000


def names(limits: Limits, requests: int, has_states: bool) -> list[str]:
    return [batch.name for batch in batches(limits, requests, has_states)]


def test_the_batches_that_start_up_runs() -> None:
    limits = Limits(tokens=8192, sequences=128, model_len=65536, context=True)
    long, after = "1 x 8192", "1 x 8192 after 57343"
    assert names(limits, 128, False) == [long, "128 x 64", "16 x 512", after]
    assert names(limits, 128, True) == [long, "126 x 65", "16 x 512", after]
    assert names(limits, 16, False) == [long, "16 x 512", after]
    assert names(limits, 1, True) == [long, after]
    short = replace(limits, model_len=1025, context=False)
    assert names(short, 4, True) == ["8 x 1024"]


def test_a_prompt_beyond_a_chunk_takes_another_state() -> None:
    """126 x 65 are 252 chunks; 128 x 64 are 128, and two tokens more."""
    assert Shape("126 x 65", (65,) * 126).chunks == 2 * 126
    assert Shape("128 x 64", (64,) * 128).chunks == 128
    assert Shape("3 x 64", (65, 64, 64)).chunks == 4
    # 124 chunks of 1.5 MiB, less two prompts' states of 6 MiB, and two tokens.
    more = peak_mib(HYBRID, 126, 8190) - peak_mib(HYBRID, 128, 8192)
    token = (1630 - FREED - 192 - 6) / 8192
    assert more == pytest.approx(124 * 1.5 - 2 * 6 - 2 * token, abs=0.01)


@pytest.mark.parametrize("lengths", [(), (0,), (3, 0), (5, -1)])
def test_bad_shapes(lengths: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="a token for each"):
        Shape("bad", lengths)


def test_no_shapes() -> None:
    with pytest.raises(ValueError, match="no batch shape"):
        peak_of(HYBRID, [])


counts = st.integers(1, 4096)
small = st.integers(1, 64)


@st.composite
def models(draw: st.DrawFn, states: bool = True, tiles: bool = True) -> Sizes:
    hidden, heads = 16 * draw(small), draw(small)
    parts: list[Part] = [mlp_part(hidden, 8 * hidden, 16 * hidden, FP16)]
    if states and draw(st.booleans()):
        parts.extend(gdn_parts(heads, 2 * heads, 64, 64, FP16, 4))
    if tiles and draw(st.booleans()):
        tiled = (Tiled(8 * hidden, hidden, True),)
        parts.append(mlp_part(hidden, 8 * hidden, 0, FP16, tiled, True))
    return Sizes(FP16, residual_lines(hidden, FP16, 2), tuple(parts), draw(counts))


@st.composite
def steps_of(draw: st.DrawFn) -> tuple[Limits, int]:
    """The limits of a step, and the requests that have room."""
    limits = Limits(draw(counts), draw(counts), draw(counts) + 1, draw(st.booleans()))
    return limits, draw(st.integers(1, limits.requests))


def planned(sizes: Sizes, limits: Limits, requests: int) -> Peak:
    has_states = any(part.name == "gated delta net" for part in sizes.parts)
    return peak_of_batches(sizes, batches(limits, requests, has_states))


# A product over fewer tokens may take wider tiles, and a step of the most chunks
# has a few tokens less, so tiles are left out where that matters.


@given(models(states=False, tiles=False), counts, counts, counts)
def test_more_tokens_or_sequences_never_take_less(
    sizes: Sizes, tokens: int, sequences: int, more: int
) -> None:
    def peak(tokens: int, sequences: int) -> int:
        limits = Limits(tokens, sequences, 10_000, True)
        return planned(sizes, limits, limits.requests).bytes

    assert peak(tokens + more, sequences) >= peak(tokens, sequences)
    assert peak(tokens, sequences + more) >= peak(tokens, sequences)


@given(models(states=False), steps_of(), st.data())
def test_no_equal_split_that_has_room_takes_more(
    sizes: Sizes, step: tuple[Limits, int], data: st.DataObject
) -> None:
    limits, requests = step
    other = split(limits, data.draw(st.integers(1, requests)))
    assert planned(sizes, limits, requests).bytes >= (
        peak_of_batches(sizes, [other]).bytes
    )


@given(models(tiles=False), steps_of(), st.data())
def test_no_equal_split_takes_a_prompt_more_of_states(
    sizes: Sizes, step: tuple[Limits, int], data: st.DataObject
) -> None:
    """Chunks come in steps, so a split between the profile's batches may have a few
    more of them, but never as much as one of its prompts takes."""
    limits, requests = step
    other = split(limits, data.draw(st.integers(1, requests)))
    if other.requests > 1:
        less = Shape("without its longest", tuple(other.lengths[1:]))
        bound = peak_of(sizes, [less]).bytes
        assert planned(sizes, limits, requests).bytes >= bound


@given(models(), steps_of())
def test_a_peak_is_the_sum_of_its_lines_and_the_highest_shape(
    sizes: Sizes, step: tuple[Limits, int]
) -> None:
    peak = planned(sizes, *step)
    assert sum(size for _, size in peak.lines) == peak.bytes
    assert (
        dict(peak.shapes)[peak.shape] == peak.bytes == max(dict(peak.shapes).values())
    )


# ---------------------------------------------------------------------------
# The table
# ---------------------------------------------------------------------------

KV = KvNeed(
    request=4410 * MIB,
    states=294 * MIB,
    null_block=49 * MIB,
    page=3_211_264,
    block_size=784,
    tokens=156_558,
    concurrency=2.389,
)


def plan_of(**changes: object) -> MemoryPlan:
    values: dict = dict(
        model="m",
        device="d",
        total=32768 * MIB,
        utilization=0.93,
        requested=30474 * MIB,
        weights=17982 * MIB,
        activation=1720 * MIB,
        activation_shape="16 x 512",
        activation_part="gated delta net",
        outside=650 * MIB,
        budget=10122 * MIB,
        kv=KV,
        max_model_len=65536,
        max_num_seqs=2,
        max_num_batched_tokens=8192,
    )
    return MemoryPlan(**(values | changes))


def test_a_plan_that_fits() -> None:
    lines = format_plan(plan_of()).splitlines()
    # One column of figures, aligned to the right; remarks behind it.
    assert {line.index(".") for line in lines[1:8]} == {lines[1].index(".")}
    assert [" ".join(line.split()) for line in lines] == [
        "Memory of m on d, MiB (planned, not measured)",
        "may be used 30,474.0 0.93 of 32,768.0",
        "weights -17,982.0",
        "activation peak -1,720.0 batch of 16 x 512, gated delta net",
        "outside torch -650.0",
        "left for the KV cache 10,122.0",
        "needed: 1 request of 65,536 tokens 4,459.0 of it states 294.0",
        "needed: 2 such requests 8,869.0",
        "fits: 156,558 tokens in blocks of 784, 2.38 requests of 65,536 tokens",
    ]


@pytest.mark.parametrize(
    ("budget", "short"), [(4459, 0), (4458, 1), (100, 4359), (0, 4459), (-800, 5259)]
)
def test_what_is_short(budget: int, short: int) -> None:
    plan = plan_of(budget=budget * MIB)
    assert plan.short == short * MIB
    assert plan.fits is (short == 0)
    assert ("SHORT" in format_plan(plan)) is (short > 0)


def test_an_explicit_cache_is_held_to_the_same_truth() -> None:
    limit = 12000 * MIB
    fits = plan_of(explicit=limit, limit=limit)
    assert fits.fits
    assert fits.available == limit
    assert "at most 12,000.0" in format_plan(fits)
    over = plan_of(explicit=limit + MIB, limit=limit)
    assert not over.fits
    assert over.over == MIB
    assert "TOO MUCH" in format_plan(over)
    little = plan_of(explicit=4458 * MIB, limit=limit)
    assert (little.short, little.over, little.fits) == (MIB, 0, False)


def test_all_requests_at_once_are_no_condition() -> None:
    plan = plan_of(budget=5000 * MIB)
    assert plan.fits
    assert plan.short_for_all == (2 * 4410 + 49 - 5000) * MIB
    assert "2 requests of that length at once lack 3,869.0" in format_plan(plan)


def test_remedies_and_their_absence() -> None:
    short = plan_of(budget=0)
    assert "more GPUs (--tensor-parallel-size)" in format_plan(short)
    remedy = Remedy("--max-model-len 100", "the longest that fits")
    text = format_plan(replace(short, remedies=(remedy,)))
    assert text.splitlines()[-2:] == [
        "  to make it fit, any one of:",
        "    --max-model-len 100  the longest that fits",
    ]


def test_ranks_and_measurements_are_said() -> None:
    text = format_plan(plan_of(measured=True, rank=3, ranks=4, free=31000 * MIB))
    assert "(measured at start-up), rank 3 of 4, the tightest" in text
    assert "31,000.0 free at start" in text


def test_json_has_every_figure_and_the_verdict() -> None:
    plan = plan_of(budget=4000 * MIB, notes=("a note",))
    values = json.loads(plan.to_json())
    assert values["short"] == 459 * MIB
    assert values["fits"] is False
    assert values["kv"]["request"] == 4410 * MIB
    assert values["activation_shape"] == "16 x 512"
    assert values["notes"] == ["a note"]


def test_a_model_without_a_cache() -> None:
    assert plan_of(kv=None).fits
    assert plan_of(kv=None, budget=-MIB).short == MIB
    assert "no KV cache" in format_plan(plan_of(kv=None))


# ---------------------------------------------------------------------------
# Cards
# ---------------------------------------------------------------------------


def test_a_card_by_name() -> None:
    card = find_gpu("V100-32GB")
    assert card.sm == 70
    assert 31 * 2**30 < card.total_bytes <= 32 * 2**30
    assert find_gpu("t4", 10).total_bytes == 10 * 2**30
    assert find_gpu(None, 24).sm == 80


def test_every_card_has_less_than_its_name_says() -> None:
    for name, card in GPUS.items():
        size = name.rsplit("-", 1)[-1]
        if size.endswith("gb"):
            assert 0.9 < card.total_bytes / (int(size[:-2]) * 2**30) <= 1, name
        assert 70 <= card.sm <= 90


@pytest.mark.parametrize("memory", [0.0, -1.0, float("nan"), float("inf")])
def test_memory_that_is_none(memory: float) -> None:
    with pytest.raises(ValueError, match="--memory"):
        find_gpu("v100-32gb", memory)


def test_an_unknown_card_lists_the_known() -> None:
    with pytest.raises(ValueError, match="v100-16gb.*--memory GIB"):
        find_gpu("v1000")
    with pytest.raises(ValueError, match="--gpu"):
        find_gpu(None)
