# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The account that a worker gives of its memory, and what a profile falls back to.

The steps themselves run in tests/v1/e2e/test_memory_profile_cpu.py.
"""

import re
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from vllm.config import CUDAGraphMode
from vllm.distributed import parallel_state
from vllm.multimodal.inputs import PlaceholderRange
from vllm.v1.worker import allocator_scope, gpu_worker, memory_profile, oom_report
from vllm.v1.worker.encoder_outputs import own_storage
from vllm.v1.worker.memory_profile import (
    Encoder,
    EncoderOutputs,
    Passes,
    Peak,
    Profile,
    encoder_of,
    measure_startup,
    record_graphs,
    storage_bytes,
    unsupported,
)
from vllm.v1.worker.profile_batches import Batch, Limits, Media

MARGIN = 9
PASSES = Passes(shapes=(("1 x 8", 300), ("4 x 2", 500)), rebuilt=40, fragmentation=60)


@pytest.fixture
def should_do_global_cleanup_after_test() -> bool:
    """Upstream's conftest asks; nothing here starts an engine."""
    return False


def config(**changes):
    values = dict(
        model_config=SimpleNamespace(runner_type="generate", is_encoder_decoder=False),
        is_mm_encoder_only=False,
        lora_config=None,
        ec_transfer_config=None,
        kv_transfer_config=None,
        parallel_config=SimpleNamespace(
            prefill_context_parallel_size=1,
            decode_context_parallel_size=1,
            enable_dbo=False,
            enable_eplb=False,
            enable_elastic_ep=False,
        ),
        attention_config=SimpleNamespace(hisparse_config=None),
    )
    return SimpleNamespace(**values | changes)


def runner(**changes):
    return SimpleNamespace(**dict(get_kv_cache_spec=lambda: {"layer": 1}) | changes)


def test_what_is_supported():
    assert unsupported(config(), runner()) is None
    one = SimpleNamespace(num_new_sampled_tokens_per_step=1)
    assert unsupported(config(), runner(model_state=one)) is None


@pytest.mark.parametrize(
    "changes, reason",
    [
        (
            dict(
                model_config=SimpleNamespace(
                    runner_type="pooling", is_encoder_decoder=False
                )
            ),
            "a pooling model",
        ),
        (
            dict(
                model_config=SimpleNamespace(
                    runner_type="generate", is_encoder_decoder=True
                )
            ),
            "an encoder-decoder model",
        ),
        (dict(is_mm_encoder_only=True), "an encoder alone"),
        (dict(lora_config=1), "LoRA"),
        (dict(ec_transfer_config=1, kv_transfer_config=1), ".* connector, a KV .*"),
    ],
)
def test_what_is_not_is_named(changes, reason):
    assert re.fullmatch(reason, unsupported(config(**changes), runner()))


@pytest.mark.parametrize(
    "name, value, reason",
    [
        ("prefill_context_parallel_size", 2, "context parallelism"),
        ("decode_context_parallel_size", 2, "context parallelism"),
        ("enable_dbo", True, "dual batch overlap"),
        ("enable_eplb", True, "expert load balancing"),
        ("enable_elastic_ep", True, "elastic expert parallelism"),
    ],
)
def test_parallelism_that_is_not_is_named(name, value, reason):
    changed = config()
    setattr(changed.parallel_config, name, value)
    assert unsupported(changed, runner()) == reason


def test_models_that_are_not_are_named():
    none = runner(get_kv_cache_spec=dict)
    assert unsupported(config(), none) == "a model without a KV cache"
    diffusion = SimpleNamespace(num_new_sampled_tokens_per_step=8)
    assert "sampling step" in unsupported(config(), runner(model_state=diffusion))


class Snapshot(SimpleNamespace):
    """A MemorySnapshot that measures nothing."""


@pytest.fixture
def device(monkeypatch):
    """A device of 100,000 bytes, 9,000 of them in use when the worker starts."""
    state = SimpleNamespace(
        free=71_000, allocated=15_000, calls=[], passes=PASSES, estimated=0
    )
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    monkeypatch.setattr(
        memory_profile,
        "MemorySnapshot",
        lambda device: Snapshot(
            free_memory=state.free, torch_allocated=state.allocated
        ),
    )

    def profile_batches(worker, meter, memory, least, encoder):
        state.calls.append(("steps", least, memory(least)))
        state.encoder = encoder
        if isinstance(state.passes, Exception):
            raise state.passes
        return state.passes

    monkeypatch.setattr(memory_profile, "profile_batches", profile_batches)
    monkeypatch.setattr(memory_profile, "unsupported", lambda config, runner: None)
    monkeypatch.setattr(
        memory_profile, "reserve_mm_ipc_gpu_memory", lambda size, *rest: size
    )
    return state


@pytest.fixture
def lines(monkeypatch):
    found = []
    for level in ("info_once", "warning_once", "warning"):
        monkeypatch.setattr(
            memory_profile.logger,
            level,
            lambda text, *args: found.append(text % args),
        )
    return found


def worker(device, graphs=False, explicit=None):
    mode = CUDAGraphMode.FULL if graphs else CUDAGraphMode.NONE

    @contextmanager
    def scope(max_split_size_mb):
        device.calls.append(("scope", max_split_size_mb))
        yield
        device.calls.append("restored")

    def profile_run(randomize_inputs):
        device.calls.append("profile_run")

    def profile_cudagraph_memory():
        device.calls.append("graphs")
        return device.estimated

    return SimpleNamespace(
        rank=3,
        device=None,
        startup_memory=None,
        vllm_config=SimpleNamespace(
            compilation_config=SimpleNamespace(cudagraph_mode=mode)
        ),
        model_config=SimpleNamespace(multimodal_config=None),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=8),
        parallel_config=SimpleNamespace(world_size_across_dp=1),
        cache_config=SimpleNamespace(kv_cache_memory_bytes=explicit),
        init_snapshot=Snapshot(
            total_memory=100_000, free_memory=91_000, torch_allocated=1_000
        ),
        requested_memory=80_000.0,
        randomize_dummy_inputs=False,
        model_runner=SimpleNamespace(
            model_memory_usage=12_000,
            profile_run=profile_run,
            profile_cudagraph_memory=profile_cudagraph_memory,
        ),
        _scoped_allocator_max_split=scope,
    )


@contextmanager
def profiling(snapshot, weights_memory):
    """What upstream measures: 20,000 bytes held, a peak of 200 over them."""
    yield SimpleNamespace(
        total_consumed=20_000,
        transient_peak_headroom=200,
        non_kv_cache_memory=20_200,
    )


@pytest.fixture(autouse=True)
def plain_platform(monkeypatch):
    """One rank of a platform that is not ROCm."""
    one = SimpleNamespace(world_size=1)
    monkeypatch.setattr(parallel_state, "get_world_group", lambda: one)
    monkeypatch.setattr(
        gpu_worker, "maybe_rocm_profiling_fallback", lambda result: None
    )
    monkeypatch.setattr(
        memory_profile, "set_current_vllm_config", lambda config: profiling(0, 0)
    )
    monkeypatch.setattr(memory_profile, "MARGIN_BYTES", MARGIN)
    monkeypatch.delenv("VLLM_ALLOCATOR_SCOPE", raising=False)
    monkeypatch.delenv("VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS", raising=False)


def test_the_account(device, lines):
    """Upstream's pass is in the scope, and the scope ends before the steps."""
    it = worker(device)
    # 91,000 - 71,000 free are 20,000 consumed, 14,000 of them torch's since the
    # start: 12,000 weights and 2,000 more, and 40 that the KV cache brings again.
    budget = 80_000 - 20_000 - 40 - 500 - MARGIN
    assert measure_startup(it, profiling) == budget
    assert device.calls == [
        ("scope", 21),
        "profile_run",
        "restored",
        ("steps", 200, 80_000 - 20_200),
    ]
    memory = it.startup_memory
    assert memory.to_dict() == dict(
        rank=3,
        total=100_000,
        free_at_start=91_000,
        requested=80_000,
        weights=12_000,
        activation_peak=500 + MARGIN,
        activation_shape="4 x 2",
        persistent=2_040,
        non_torch=6_000,
        fragmentation=60,
        graphs_estimated=0,
        graphs_reserved=0,
        graphs_captured=0,
        kv_budget=budget,
        kv_explicit=0,
        shapes=[["1 x 8", 300], ["4 x 2", 500]],
        profile="truthful",
        profile_ms=memory.profile_ms,
    )
    # Upstream's own attributes, which its log and the start-up plan read.
    assert it.total_consumed == 20_040
    assert it.peak_activation_memory == 500 + MARGIN
    assert it.cudagraph_memory_estimate == 0
    assert it.available_kv_cache_memory_bytes == budget
    assert len(lines) == 1 and "truthful profile" in lines[0]


@pytest.mark.parametrize("charged, reserved", [("1", 700), ("0", 0)])
def test_graphs_are_reserved_as_measured(device, lines, monkeypatch, charged, reserved):
    monkeypatch.setenv("VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS", charged)
    device.estimated = 700
    it = worker(device, graphs=True)
    assert measure_startup(it, profiling) == 80_000 - 20_040 - 500 - MARGIN - reserved
    assert device.calls[-1] == "graphs"
    assert it.startup_memory.graphs_estimated == 700
    assert it.startup_memory.graphs_reserved == reserved
    assert it.peak_activation_memory == 500 + MARGIN + reserved
    assert it.cudagraph_memory_estimate == 700

    record_graphs(it, 3 * 2**20)
    assert it.startup_memory.graphs_captured == 3 * 2**20
    assert "0 MiB estimated, 0 MiB reserved, 3 MiB captured" in lines[-1]


def test_no_graphs_no_line(device, lines):
    it = worker(device)
    measure_startup(it, profiling)
    before = len(lines)
    record_graphs(it, 0)
    record_graphs(SimpleNamespace(startup_memory=None), 5)
    assert len(lines) == before


@pytest.mark.parametrize("explicit", [30_000, 70_000])
def test_an_explicit_budget_is_measured_too(device, lines, explicit):
    """It is returned as it is, and is what prompts have room in, whatever the
    utilization would leave."""
    it = worker(device, explicit=explicit)
    assert measure_startup(it, profiling) == explicit
    assert device.calls[-1] == ("steps", 200, explicit)
    assert it.startup_memory.kv_explicit == explicit
    assert it.startup_memory.kv_budget == 80_000 - 20_040 - 500 - MARGIN


class FakeProfile:
    """Steps of 1,000 tokens. A prompt keeps 182 bytes of the KV cache; a step's peak
    is 1,000 and 4 for each of its prompts."""

    limits = Limits(tokens=1000, sequences=128, model_len=2000, context=True)
    groups: list = []
    before = 0

    def __init__(self, worker, meter):
        self.steps: list[Batch] = []
        self.known: list[int] = []
        self.caches: list[int] = []
        worker.profile = self

    @contextmanager
    def cache(self, requests):
        self.caches.append(requests)
        yield

    def most_requests(self, memory):
        return max(1, min(128, memory // 182))

    def measure(self, batch, known):
        self.steps.append(batch)
        self.known.append(known)
        allocated = 1000 + 4 * batch.requests + (batch.context > 0)
        return {
            batch.name: Peak(allocated, 5),
            f"{batch.requests} x 1 decode": Peak(batch.requests, 0),
        }

    def resident(self):
        return 40


@pytest.mark.parametrize(
    "memory, crowds",
    [
        # 102 prompts have room next to their own peak, 101 next to that of 128.
        (lambda peak: 20_000 - peak, [104, 102]),
        (lambda peak: 40_000 - peak, [128]),
        # An explicit budget does not shrink.
        (lambda peak: 18_200, [100]),
    ],
)
def test_as_many_prompts_as_have_room_next_to_their_peak(monkeypatch, memory, crowds):
    monkeypatch.setattr(memory_profile, "Profile", FakeProfile)
    it, meter = SimpleNamespace(), SimpleNamespace(allocated=lambda: 30)
    passes = memory_profile.profile_batches(it, meter, memory, least=900)
    steps, settled = it.profile.steps, crowds[-1]
    assert [b.requests for b in steps if b.requests > 16] == crowds
    assert it.profile.caches == [crowds[0]]
    names = [name for name, _ in passes.shapes]
    few, many = "1 x 1000", f"{settled} x {1000 // settled}"
    assert names == [
        few,
        "1 x 1 decode",
        many,
        f"{settled} x 1 decode",
        f"16 x {1000 // 16}",
        "16 x 1 decode",
        "1 x 1000 after 999",
    ]
    assert passes.worst == (many, 1000 + 4 * settled)
    # What was too crowded is no promise, and no reason to skip a warm pass.
    assert max(it.profile.known) <= passes.worst[1]
    assert (passes.rebuilt, passes.fragmentation) == (10, 5)


def test_what_is_not_supported_warns_once(device, lines, monkeypatch):
    monkeypatch.setattr(memory_profile, "unsupported", lambda config, runner: "LoRA")
    it = worker(device)
    assert measure_startup(it, profiling) == 80_000 - 20_000 - 200
    assert it.startup_memory.profile == "upstream"
    assert it.startup_memory.shapes == (("1 x 8", 200),)
    assert "not supported with LoRA" in lines[0]
    assert "steps" not in [call[0] for call in device.calls]


def test_a_failed_profile_warns(device, lines):
    device.passes = ValueError("a backend's own limit")
    it = worker(device)
    assert measure_startup(it, profiling) == 80_000 - 20_000 - 200
    assert it.startup_memory.profile == "upstream"
    assert "ValueError: a backend's own limit" in lines[0]
    assert "VLLM_TRUTHFUL_PROFILE=0" in lines[0]


@pytest.mark.parametrize(
    "error, ranks",
    [(torch.OutOfMemoryError("full"), 1), (ValueError("one rank"), 2)],
)
def test_what_cannot_be_mended_is_raised(device, lines, error, ranks):
    """Too little memory, and a rank that the others wait for."""
    device.passes = error
    it = worker(device)
    it.parallel_config.world_size_across_dp = ranks
    with pytest.raises(type(error)) as caught:
        measure_startup(it, profiling)
    assert caught.value is error


def test_memory_that_another_process_gave_back(device, lines):
    device.free = 91_001
    with pytest.raises(RuntimeError, match="grew by 1 bytes while profiling"):
        measure_startup(worker(device), profiling)


def test_storages_count_once():
    one, two = torch.zeros(10, dtype=torch.uint8), torch.zeros(4, dtype=torch.int32)
    assert storage_bytes([one, [one[2:], (two.view(2, 2),)], None]) == 26
    assert storage_bytes([]) == 0


@pytest.mark.parametrize("second", [False, True])
def test_encoder_outputs_are_kept_until_the_end(second):
    original = {}
    cache = SimpleNamespace(encoder_outputs=original) if second else original
    it = SimpleNamespace(encoder_cache=cache)

    def outputs():
        return it.encoder_cache.encoder_outputs if second else it.encoder_cache

    with EncoderOutputs(it) as encoder:
        assert encoder.size() == 0
        outputs()["tmp_0"] = torch.zeros(100, dtype=torch.uint8)
        outputs().clear()
        assert encoder.size() == 100
    assert outputs() is original and not original
    assert it.encoder_cache is cache


def test_a_model_without_an_encoder():
    for it in (SimpleNamespace(), SimpleNamespace(encoder_cache=None)):
        with EncoderOutputs(it) as encoder:
            assert encoder.size() == 0


class Meter:
    """Counters that a step moves."""

    def __init__(self) -> None:
        self.now = self.top = self.reserved = 0

    def reset(self) -> None:
        self.top = self.reserved = self.now

    def allocated(self) -> int:
        return self.now

    def peak(self) -> int:
        return self.top

    def reserved_peak(self) -> int:
        return self.reserved

    def use(self, size: int, spare: int = 0, left: int = 0) -> None:
        self.top = max(self.top, self.now + size)
        self.reserved = max(self.reserved, self.now + size + spare)
        self.now += left


MEDIA = Media("image", [9, 8, 8, 0, 0, 0], ["data"], [PlaceholderRange(1, 2)], 1)


def test_a_full_encoder_cache_is_charged_to_every_batch(monkeypatch):
    """600 bytes, 100 of them for the item that the step encodes: 98 prompts have room
    next to that and their own peak, and 102 next to their peak alone."""
    monkeypatch.setattr(memory_profile, "Profile", FakeProfile)
    monkeypatch.setattr(
        FakeProfile,
        "measure_encoder",
        lambda it, media: ("with", Peak(7000, 90)),
        raising=False,
    )
    it, meter = SimpleNamespace(), SimpleNamespace(allocated=lambda: 30)
    encoder = Encoder(kept=200, item=100, cache=600, media=MEDIA, run=lambda: None)

    def memory(peak):
        return 20_000 - peak

    plain = memory_profile.profile_batches(it, meter, memory, least=900)
    assert [b.requests for b in it.profile.steps if b.requests > 16] == [104, 102]
    passes = memory_profile.profile_batches(it, meter, memory, 900, encoder)
    assert [b.requests for b in it.profile.steps if b.requests > 16] == [101, 98]
    assert dict(passes.shapes)["1 x 1000"] == dict(plain.shapes)["1 x 1000"] + 600
    assert dict(passes.shapes)["98 x 1 decode"] == 98 + 600
    # Its own output is in its peak: 500 others.
    assert passes.worst == ("with", 7500)
    assert (passes.rebuilt, passes.fragmentation) == (10, 90)


def encoding(measure, ranks=1, model_len=64):
    """A profile whose step that encodes is `measure`, with 100 bytes resident."""
    meter = Meter()
    meter.now = 100
    parallel = SimpleNamespace(world_size_across_dp=ranks)
    return SimpleNamespace(
        meter=meter,
        measure_encoder=measure,
        limits=Limits(tokens=8, sequences=4, model_len=model_len, context=True),
        config=SimpleNamespace(parallel_config=parallel),
    )


def fails(error):
    def measure(media):
        raise error

    return measure


def test_an_item_that_no_request_can_have_is_run_as_upstream_does():
    it = encoding(lambda media: None)
    encoder = Encoder(100, 50, 160, MEDIA, lambda: it.meter.use(900, spare=3))
    assert encoder.measure(it) == ("multimodal encoder", Peak(960, 3))


def test_a_failed_step_that_encodes_leaves_the_others(lines):
    it = encoding(fails(ValueError("no positions")))
    encoder = Encoder(100, 50, 160, MEDIA, lambda: it.meter.use(900, spare=3))
    assert encoder.measure(it) == ("multimodal encoder", Peak(960, 3))
    assert "with image inputs failed (ValueError: no positions)" in lines[0]


@pytest.mark.parametrize(
    "error, ranks", [(torch.OutOfMemoryError("full"), 1), (ValueError("one rank"), 2)]
)
def test_a_step_that_encodes_is_not_left_out(lines, error, ranks):
    """Too little memory, and a rank that the others wait for."""
    encoder = Encoder(100, 50, 160, MEDIA, lambda: None)
    with pytest.raises(type(error)) as caught:
        encoder.measure(encoding(fails(error), ranks))
    assert caught.value is error and not lines


@pytest.mark.parametrize(
    "sequences, most, each, requests",
    [(16, 1, 1, 1), (16, 8, 1, 8), (4, 8, 2, 4), (1, 3, 3, 1)],
)
def test_what_an_encoder_adds(monkeypatch, sequences, most, each, requests):
    """As many items as a step encodes, in as few prompts as may share it. Two outputs
    of 4 tokens were made, and the cache has room for 20."""
    asked = []

    def made(mm_counts):
        asked.append(mm_counts)
        return dict(
            prompt_token_ids=[5, 6],
            mm_kwargs=dict(image=["data"]),
            mm_placeholders=dict(image=["place"]),
        )

    budget = SimpleNamespace(
        get_modality_with_max_tokens=lambda: "image",
        mm_max_items_per_batch=dict(image=most),
        encoder_cache_size=20,
        processor=SimpleNamespace(get_dummy_mm_inputs=made),
    )
    monkeypatch.setattr(memory_profile, "MultiModalBudget", lambda *a, **k: budget)
    scheduler = SimpleNamespace(max_num_seqs=sequences, disable_chunked_mm_input=True)
    config = SimpleNamespace(scheduler_config=scheduler)
    batch = torch.zeros(8, 3, dtype=torch.float16)
    encoder = encoder_of(config, batch.split(4), lambda: None)
    assert asked == [dict(image=each)]
    assert (encoder.kept, encoder.item, encoder.cache) == (48, 24, 120)
    expected = Media("image", [5, 6], ["data"], ["place"], requests, whole=True)
    assert encoder.media == expected
    # A rank of a pipeline without an encoder runs the same steps.
    assert encoder_of(config, [], lambda: None).cache == 0


def test_no_output_keeps_the_batch_that_it_was_a_part_of(monkeypatch):
    batch = torch.arange(12.0).view(6, 2)
    part, whole = batch[2:4], batch.view(3, 4)
    own = own_storage(part)
    assert own.untyped_storage().nbytes() == 16 and torch.equal(own, part)
    assert own_storage(whole) is whole
    monkeypatch.setenv("VLLM_TRUTHFUL_PROFILE", "0")
    assert own_storage(part) is part


@pytest.mark.parametrize("rows", [0, 4])
def test_an_encoder_is_asked_for_where_there_is_one(device, monkeypatch, rows):
    it = worker(device)
    if rows:
        it.model_runner.encoder_cache = {}
        outputs = torch.zeros(rows, 5, dtype=torch.uint8)

        def profile_run(randomize_inputs):
            it.model_runner.encoder_cache["tmp_0"] = outputs
            it.model_runner.encoder_cache.clear()

        it.model_runner.profile_run = profile_run
    monkeypatch.setattr(
        memory_profile, "encoder_of", lambda config, outputs, run: list(outputs)
    )
    measure_startup(it, profiling)
    assert device.encoder == ([outputs] if rows else None)
    # What is kept is not consumed: it is a part of the peak.
    assert device.calls[-1][:2] == ("steps", 200 + 5 * rows)


def profile(meter, execute, model_len=64):
    """A `Profile` whose worker is `execute`, without a cache of its own."""
    it = object.__new__(Profile)
    it.meter = meter
    it.limits = Limits(tokens=8, sequences=4, model_len=model_len, context=True)
    it.counts, it.num_blocks = [lambda tokens: 1], 5
    it.runner = SimpleNamespace(execute_model_state=None)
    it.worker = SimpleNamespace(
        execute_model=execute, sample_tokens=lambda grammar: None
    )
    return it


def test_the_second_pass_counts():
    """The first one tunes, and leaves a workspace of 70 bytes behind."""
    meter, seen = Meter(), []

    def execute(scheduled):
        tokens = scheduled.total_num_scheduled_tokens
        seen.append((tokens, len(scheduled.finished_req_ids)))
        meter.use(1000 * tokens if len(seen) == 1 else 10 * tokens, spare=5)
        meter.now += 70 if len(seen) == 1 else 0

    it = profile(meter, execute)
    peaks = it.measure(Batch(2, 8), known=0)
    assert peaks == {"2 x 4": Peak(80, 5), "2 x 1 decode": Peak(20, 5)}
    assert seen == [(8, 0), (2, 0), (0, 2)] * 2
    assert meter.allocated() == 70

    # Below what is known already, one pass is enough.
    assert it.measure(Batch(1, 8), known=80)["1 x 8"] == Peak(80, 5)
    assert len(seen) == 9
    it.measure(Batch(1, 8), known=79)
    assert len(seen) == 15


def test_no_decode_where_drafts_are_sized_later():
    it = profile(Meter(), lambda scheduled: None)
    it.runner.adaptive_verification = object()
    assert list(it.measure(Batch(2, 8), known=0)) == ["2 x 4"]


def test_a_failed_step_is_taken_back():
    ended = []

    def execute(scheduled):
        if scheduled.finished_req_ids:
            ended.append(scheduled.finished_req_ids)
            raise KeyError("the end fails as well")
        raise ValueError("the step")

    it = profile(Meter(), execute)
    it.runner.execute_model_state = "of the failed step"
    with pytest.raises(ValueError, match="the step"):
        it.measure(Batch(2, 8), known=0)
    assert ended == [{"_profile_0", "_profile_1"}]
    assert it.runner.execute_model_state is None


def test_the_ranks_agree(monkeypatch):
    calls = []

    def all_reduce(values, op, group):
        calls.append((op, group))
        values.fill_(7)

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    group = SimpleNamespace(world_size=1, cpu_group="cpu")
    monkeypatch.setattr(parallel_state, "get_world_group", lambda: group)
    assert memory_profile.agree_least(9) == 9
    assert memory_profile.agree_any(True) and not memory_profile.agree_any(False)
    assert calls == []
    group.world_size = 2
    assert memory_profile.agree_least(9) == 7
    assert memory_profile.agree_any(False)
    ops = torch.distributed.ReduceOp
    assert calls == [(ops.MIN, "cpu"), (ops.MAX, "cpu")]


def test_the_switch(monkeypatch):
    monkeypatch.setattr(memory_profile.current_platform, "is_cuda_alike", lambda: True)
    monkeypatch.delenv("VLLM_TRUTHFUL_PROFILE", raising=False)
    assert memory_profile.enabled()
    monkeypatch.setenv("VLLM_TRUTHFUL_PROFILE", "0")
    assert not memory_profile.enabled()
    monkeypatch.delenv("VLLM_TRUTHFUL_PROFILE")
    monkeypatch.setattr(memory_profile.current_platform, "is_cuda_alike", lambda: False)
    assert not memory_profile.enabled()


class Allocator:
    """Settings that a scope changes and restores."""

    def __init__(self) -> None:
        self.calls = [""]

    def settings(self) -> str:
        return self.calls[-1]

    def apply(self, settings: str) -> None:
        self.calls.append(settings)

    def release(self) -> None:
        self.calls.append("released")
        self.calls.append(self.calls[-2])


@pytest.fixture
def allocator(monkeypatch):
    found = Allocator()
    monkeypatch.setattr(allocator_scope, "find_allocator", lambda: found)
    monkeypatch.setattr(gpu_worker, "maybe_apply_startup_plan", lambda it: None)
    return found


def test_the_worker_hands_over(monkeypatch, allocator):
    """With upstream's own function, and after a stored plan was applied."""
    calls = []
    monkeypatch.setattr(
        gpu_worker, "maybe_apply_startup_plan", lambda it: calls.append("plan")
    )
    monkeypatch.setattr(memory_profile, "enabled", lambda: True)
    monkeypatch.setattr(
        memory_profile, "measure_startup", lambda *args: calls.append(args) or 5
    )
    it = SimpleNamespace()
    assert gpu_worker.Worker.determine_available_memory(it) == 5
    assert calls == ["plan", (it, gpu_worker.memory_profiling)]


def test_upstreams_explicit_branch_is_in_the_scope(device, allocator, monkeypatch):
    """The control profiles as upstream does; the scope is a feature of its own."""
    monkeypatch.setattr(memory_profile, "enabled", lambda: False)
    monkeypatch.setattr(
        gpu_worker, "set_current_vllm_config", lambda config: profiling(0, 0)
    )
    it = worker(device, explicit=30_000)
    it.model_runner.profile_run = lambda randomize_inputs: allocator.calls.append("run")
    it.parallel_config = SimpleNamespace()
    assert gpu_worker.Worker.determine_available_memory(it) == 30_000
    limited = "max_split_size_mb:21"
    assert allocator.calls[:4] == ["", limited, "run", ""]
    assert it.startup_memory is None


def test_warm_up_is_a_phase_of_start_up(allocator):
    """Restored when it fails, too."""
    with pytest.raises(AttributeError, match="vllm_config"):
        gpu_worker.Worker.compile_or_warm_up_model(SimpleNamespace())
    assert allocator.calls == ["", "max_split_size_mb:21", ""]


@pytest.mark.parametrize(
    "call, phase",
    [
        (lambda it: gpu_worker.Worker.execute_model(it, it), "while serving"),
        (lambda it: gpu_worker.Worker.sample_tokens(it, None), "while serving"),
        (gpu_worker.Worker.load_model, "while loading the model"),
        (gpu_worker.Worker.determine_available_memory, "while profiling"),
        (
            lambda it: gpu_worker.Worker.initialize_from_config(it, it),
            "while allocating the KV cache",
        ),
        (gpu_worker.Worker.compile_or_warm_up_model, "while compiling"),
    ],
)
def test_every_phase_reports_an_out_of_memory_error(
    monkeypatch, allocator, call, phase
):
    class Full:
        """A worker that runs out of memory at the first thing it touches."""

        def __getattr__(self, name):
            raise torch.OutOfMemoryError("full")

    found = []
    monkeypatch.setattr(
        oom_report.logger, "error", lambda text, *args: found.append(text % args)
    )
    monkeypatch.setattr(memory_profile, "enabled", lambda: False)
    with pytest.raises(torch.OutOfMemoryError, match="^full$"):
        call(Full())
    assert len(found) == 1 and phase in found[0]


def test_a_rank_reports(device, lines):
    it = worker(device)
    assert gpu_worker.Worker.get_startup_memory(it) is None
    measure_startup(it, profiling)
    report = gpu_worker.Worker.get_startup_memory(it)
    assert report["kv_budget"] == 59_460 - MARGIN and report["rank"] == 3
