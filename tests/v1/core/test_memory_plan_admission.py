# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Admission: what it refuses, what it lets through, and with which figures."""

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tests.v1.core.memory_plan_cases as cases
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
from vllm.v1.core.memory_plan import admission
from vllm.v1.core.memory_plan import planner as planner_module
from vllm.v1.core.memory_plan.activations import Sizes, gdn_parts, residual_lines
from vllm.v1.core.memory_plan.admission import (
    MemoryPlanError,
    RankReport,
    admit,
    planner_of,
    utilization_that_fits,
)
from vllm.v1.core.memory_plan.model import plan_models
from vllm.v1.core.memory_plan.planner import Changes, Rank
from vllm.v1.core.memory_plan.table import format_plan
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.worker.memory_report import StartupMemory

MIB, GIB = 2**20, 2**30
TOTAL = 32 * GIB


@pytest.fixture
def should_do_global_cleanup_after_test() -> bool:
    """Upstream's conftest asks; nothing here makes an engine."""
    return False


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[VllmConfig, dict]:
    """A small hybrid model's configuration, resolved, and its specs."""
    config = cases.hybrid_27b(8) | {"dtype": "bfloat16"}
    del config["quantization_config"]
    folder = cases.write_model(tmp_path_factory.mktemp("models") / "hybrid", config)
    made = EngineArgs(
        model=str(folder),
        max_model_len=65536,
        max_num_seqs=4,
        max_num_batched_tokens=8192,
        enforce_eager=True,
        gpu_memory_utilization=0.9,
    ).create_engine_config()
    made.cache_config.kv_cache_memory_bytes = None
    [model] = plan_models(made)
    register_all_kvcache_specs(model.config)
    return model.config, model.specs


SIZES = Sizes(2, residual_lines(5120, 2, 4), gdn_parts(16, 48, 128, 128, 2, 4), 1000)


def report(rank: int = 0, **changes: Any) -> RankReport:
    """A rank of which 20 GiB are weights and 2 GiB an activation peak."""
    figures: dict[str, Any] = dict(
        rank=rank,
        total=TOTAL,
        free_at_start=31 * GIB,
        requested=int(0.9 * TOTAL),
        weights=20 * GIB,
        activation_peak=2 * GIB,
        activation_shape="4 x 2048",
        persistent=100 * MIB,
        non_torch=400 * MIB,
        graphs_reserved=200 * MIB,
        profile="truthful",
    )
    startup = StartupMemory(**figures | changes)
    return RankReport(
        rank=rank,
        device="Card",
        total=startup.total,
        free=startup.free_at_start,
        weights=startup.weights,
        process=0,
        sizes=SIZES,
        startup=startup,
        settable="--kv-cache-memory-bytes",
    )


def executor(*reports: RankReport) -> Any:
    return SimpleNamespace(collective_rpc=lambda function: list(reports))


def table_of(error: pytest.ExceptionInfo[Exception]) -> list[str]:
    return [" ".join(line.split()) for line in str(error.value).splitlines()]


def test_what_fits_is_logged(
    served: tuple[VllmConfig, dict], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, specs = served
    logged: list[str] = []
    monkeypatch.setattr(admission.logger, "info", lambda f, *a: logged.append(f % a))
    admit(config, executor(report()), [specs], [6 * GIB])
    [table] = logged
    assert "(measured at start-up)" in table
    assert "batch of 4 x 2048" in table
    assert "fits:" in table


def test_a_shortage_names_every_line_and_what_mends_it(
    served: tuple[VllmConfig, dict],
) -> None:
    config, specs = served
    with pytest.raises(MemoryPlanError) as error:
        admit(config, executor(report()), [specs], [100 * MIB])
    lines = table_of(error)
    assert "weights -20,480.0" in lines
    assert "activation peak -2,048.0 batch of 4 x 2048" in lines
    assert "CUDA graphs -200.0" in lines
    assert "left for the KV cache 100.0" in lines
    assert "does not fit" in lines
    assert any(line.startswith("SHORT") for line in lines)
    assert any(line.startswith("--gpu-memory-utilization 0.9") for line in lines)
    assert any(line.startswith("--max-num-batched-tokens 4096") for line in lines)
    assert any(line.startswith("--max-model-len") for line in lines)


def test_the_measured_peak_is_scaled_not_replaced(
    served: tuple[VllmConfig, dict],
) -> None:
    config, specs = served
    planner = planner_of(config, [report()], [specs], [4 * GIB])
    before = planner.plan()
    half = planner.plan(Changes(max_num_batched_tokens=4096))
    assert before.activation == 2 * GIB
    # By the formulae a half, but for the states of the sequences.
    assert 0.5 < half.activation / before.activation < 0.52
    assert half.budget - before.budget == before.activation - half.activation


def test_without_sizes_fewer_tokens_are_no_remedy(
    served: tuple[VllmConfig, dict],
) -> None:
    config, specs = served
    unknown = replace(report(), sizes=None)
    planner = planner_of(config, [unknown], [specs], [100 * MIB])
    assert planner.plan(Changes(max_num_batched_tokens=1024)).activation == 2 * GIB
    settings = [remedy.settings for remedy in planner.with_remedies().remedies]
    assert any("--max-model-len" in setting for setting in settings)
    assert not any("--max-num-batched-tokens" in setting for setting in settings)


def test_the_figures_add_up_to_what_the_cache_gets(
    served: tuple[VllmConfig, dict],
) -> None:
    config, specs = served
    for available in (3 * GIB, 5 * GIB):
        plan = planner_of(config, [report()], [specs], [available]).plan()
        parts = plan.weights + plan.activation + plan.resident + plan.outside
        assert plan.budget == available
        assert plan.requested - parts - plan.graphs == available


def test_an_explicit_cache_is_checked_against_what_is_free(
    served: tuple[VllmConfig, dict],
) -> None:
    """31 GiB free, less 20 of weights, 2 of activations and 700 MiB: 8.3 GiB."""
    config, specs = served
    limit = (31 - 22) * GIB - 700 * MIB
    admit(config, executor(report(kv_explicit=limit)), [specs], [limit])
    too_much = limit + MIB
    with pytest.raises(MemoryPlanError) as error:
        admit(config, executor(report(kv_explicit=too_much)), [specs], [too_much])
    lines = table_of(error)
    assert "TOO MUCH 1.0 beyond what is there" in lines
    assert any(line.startswith(f"--kv-cache-memory-bytes {limit}") for line in lines)
    little = 100 * MIB
    with pytest.raises(MemoryPlanError, match="SHORT"):
        admit(config, executor(report(kv_explicit=little)), [specs], [little])


def test_the_worst_rank_decides_and_is_named(served: tuple[VllmConfig, dict]) -> None:
    config, specs = served
    reports = [report(0), report(1, weights=21 * GIB), report(2)]
    available = [200 * MIB, 100 * MIB, 150 * MIB]
    with pytest.raises(MemoryPlanError) as error:
        admit(config, executor(*reports), [specs] * 3, available)
    lines = table_of(error)
    assert "weights -21,504.0" in lines
    plan = planner_of(config, reports, [specs] * 3, available).plan()
    assert plan.rank == 1


def test_a_model_made_again_stands_for_every_rank_of_its_stage(
    served: tuple[VllmConfig, dict], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four ranks in two stages; of each stage one model is made."""
    config, specs = served
    small = Sizes(2, residual_lines(5120, 2, 2))
    stages = [Rank(0, specs, GIB, SIZES), Rank(2, specs, GIB, small)]
    monkeypatch.setattr(planner_module, "_make", lambda changed, **_: (changed, stages))
    reports = [report(rank) for rank in range(4)]
    planner = planner_of(config, reports, [specs] * 4, [2 * GIB] * 4)
    _, ranks = planner._built(Changes(kv_cache_dtype="fp8"))
    assert [rank.rank for rank in ranks] == [0, 1, 2, 3]
    assert [rank.sizes for rank in ranks] == [SIZES, SIZES, small, small]
    again = planner._built(Changes(kv_cache_dtype="fp8"))[0]
    requested = planner.device.requested(0.9)
    figures = planner.figures(again, ranks, requested, explicit=None)
    assert figures[0].activation.bytes == 2 * GIB > figures[2].activation.bytes
    # Repacked weights are not those of a model that was not loaded.
    assert {f.weights for f in figures} == {20 * GIB}


def test_what_was_not_measured_is_not_invented(served: tuple[VllmConfig, dict]) -> None:
    """A platform without a start-up report: weights, and all else as one line."""
    config, specs = served
    bare = RankReport(0, "CPU", TOTAL, TOTAL, 5 * GIB, 6 * GIB, None, None, "SETTING")
    plan = planner_of(config, [bare], [specs], [GIB]).plan()
    assert (plan.weights, plan.outside, plan.activation) == (5 * GIB, GIB, 0)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda config, patch: patch.setenv("VLLM_MEMORY_PLAN", "0"),
        lambda config, patch: patch.setattr(
            config.cache_config, "num_gpu_blocks_override", 4
        ),
        lambda config, patch: patch.setattr(
            config.model_config, "original_max_model_len", -1
        ),
    ],
    ids=["switch", "override", "auto-fit"],
)
def test_left_to_upstream(
    served: tuple[VllmConfig, dict], monkeypatch: pytest.MonkeyPatch, spoil: Any
) -> None:
    config, specs = served
    spoil(config, monkeypatch)
    admit(config, executor(report()), [specs], [100 * MIB])


def test_a_worker_that_cannot_answer_is_no_reason_not_to_serve(
    served: tuple[VllmConfig, dict],
) -> None:
    config, specs = served

    def fail(function: Any) -> Any:
        raise RuntimeError("no such method")

    admit(config, SimpleNamespace(collective_rpc=fail), [specs], [100 * MIB])  # type: ignore[arg-type]


def test_the_configuration_is_left_alone(served: tuple[VllmConfig, dict]) -> None:
    config, specs = served
    before = (config.compute_hash(), dict(specs))
    with pytest.raises(MemoryPlanError):
        admit(config, executor(report()), [specs], [100 * MIB])
    assert (config.compute_hash(), specs) == before
    assert config.cache_config.kv_cache_memory_bytes is None


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.integers(-MIB, 1200 * MIB))
def test_it_refuses_exactly_what_upstream_refuses(
    served: tuple[VllmConfig, dict], available: int
) -> None:
    config, specs = served

    def refuses(check: Any) -> bool:
        try:
            check()
        except ValueError:
            return True
        return False

    ours = refuses(lambda: admit(config, executor(report()), [specs], [available]))
    theirs = refuses(lambda: get_kv_cache_configs(config, [dict(specs)], [available]))
    assert ours == theirs


def test_the_worker_reports_its_model(served: tuple[VllmConfig, dict]) -> None:
    """What is called in each worker, with a model on the CPU."""
    import torch

    config, _ = served
    model = torch.nn.Linear(1000, 1000, bias=False)
    worker = SimpleNamespace(
        rank=3,
        vllm_config=config,
        model_runner=SimpleNamespace(get_model=lambda: model),
    )
    made = admission.report_of(worker)
    assert (made.rank, made.weights) == (3, 4_000_000)
    assert made.process > 4_000_000
    assert made.startup is None
    assert made.free <= made.total + made.process


@pytest.mark.parametrize(
    ("free", "said"),
    [
        (30 * GIB, " The highest that fits now is --gpu-memory-utilization 0.93."),
        (32 * GIB, " The highest that fits now is --gpu-memory-utilization 1."),
        (1, ""),
    ],
)
def test_a_utilization_that_fits(free: int, said: str) -> None:
    assert utilization_that_fits(free, TOTAL) == said


def test_the_switch_leaves_the_message_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_MEMORY_PLAN", "0")
    assert utilization_that_fits(30 * GIB, TOTAL) == ""


def test_fragmentation_is_shown_and_not_charged(
    served: tuple[VllmConfig, dict],
) -> None:
    """What the allocator holds beyond the peak lies in what stays free, or the
    table says that it does not. 31 GiB free, 22 GiB and 700 MiB used."""
    config, specs = served
    beyond = report(fragmentation=700 * MIB)
    with_room = planner_of(config, [beyond], [specs], [4 * GIB]).plan()
    bare = planner_of(config, [report()], [specs], [4 * GIB]).plan()
    assert with_room.budget == bare.budget == 4 * GIB
    assert with_room.limit == bare.limit
    assert "stay free for it" in format_plan(with_room)
    explicit = (31 - 22) * GIB - (700 + 699) * MIB
    set_by_user = report(fragmentation=700 * MIB, kv_explicit=explicit)
    full = planner_of(config, [set_by_user], [specs], [explicit]).plan()
    assert full.fits
    [line] = [r for r in format_plan(full).splitlines() if "fragmentation" in r]
    assert line.split()[3] == "700.0"
    assert line.endswith(
        "only 699.0 of the card stay free: set "
        "PYTORCH_ALLOC_CONF=expandable_segments:True"
    )
    assert "fragmentation" not in format_plan(bare)


def test_a_search_repeats_no_warning_of_the_grouping(
    served: tuple[VllmConfig, dict], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, specs = served
    grouped = kv_cache_utils.get_kv_cache_groups

    def warns(*args: Any) -> Any:
        kv_cache_utils.logger.warning("as upstream does for some drafts")
        return grouped(*args)

    monkeypatch.setattr(kv_cache_utils, "get_kv_cache_groups", warns)
    seen: list[str] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", lambda record: seen.append(record.msg))
    kv_cache_utils.logger.addHandler(handler)
    try:
        planner_of(config, [report()], [specs], [100 * MIB]).with_remedies()
        assert seen == []
        kv_cache_utils.logger.warning("once more")
    finally:
        kv_cache_utils.logger.removeHandler(handler)
    assert seen == ["once more"]
