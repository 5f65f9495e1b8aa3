# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""One line for an out-of-memory error, and the error itself unchanged."""

import pytest
import torch

from vllm.v1.worker import oom_report as module
from vllm.v1.worker.oom_report import (
    PROFILING,
    SERVING,
    DeviceMemory,
    describe,
    find_oom,
    oom_report,
)

MIB = 2**20
FULL = DeviceMemory(allocated=700, reserved=1000, free=24, total=2048)


@pytest.fixture
def should_do_global_cleanup_after_test() -> bool:
    """Upstream's conftest asks; nothing here starts an engine."""
    return False


@pytest.fixture
def lines(monkeypatch):
    found = []
    monkeypatch.setattr(
        module.logger, "error", lambda text, *args: found.append(text % args)
    )
    return found


def scope(phase, memory=FULL):
    return oom_report(phase, lambda: memory)


def test_all_figures_are_named():
    text = describe(SERVING, FULL)
    for part in (
        "while serving",
        "allocated 700 bytes",
        "reserved 1000",
        "inactive 300",
        "free 24",
        "total 2048",
        "--gpu-memory-utilization",
    ):
        assert part in text
    assert "expandable_segments" not in text


def test_every_phase_names_a_setting():
    for phase in module._ADVICE:
        assert "--" in describe(phase, FULL)


@pytest.mark.parametrize(
    "inactive, advised", [(256 * MIB - 1, False), (256 * MIB, True)]
)
def test_fragmentation_names_the_allocators_setting(inactive, advised):
    memory = DeviceMemory(allocated=MIB, reserved=MIB + inactive, free=0, total=0)
    text = describe(SERVING, memory)
    assert ("expandable_segments:True" in text) == advised
    # A limit on splitting doubled what was reserved beyond the peak on an H200.
    assert "VLLM_ALLOCATOR_MAX_SPLIT_MIB" not in text


def test_the_original_exception_is_kept(lines):
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
    with pytest.raises(torch.OutOfMemoryError) as caught, scope(PROFILING):
        raise error
    assert caught.value is error
    assert str(caught.value) == "CUDA out of memory. Tried to allocate 2 GiB."
    assert len(lines) == 1 and "while profiling" in lines[0]


def test_once_under_the_outermost_name(lines):
    """A profiled step passes through the scope of serving, too."""

    @scope(SERVING)
    def execute_model():
        raise torch.OutOfMemoryError("full")

    with pytest.raises(torch.OutOfMemoryError), scope(PROFILING):
        execute_model()
    assert len(lines) == 1 and "while profiling" in lines[0]
    with pytest.raises(torch.OutOfMemoryError):
        execute_model()
    assert len(lines) == 2 and "while serving" in lines[1]


def test_a_wrapped_error_is_found(lines):
    with pytest.raises(RuntimeError, match="warming up sampler"), scope(PROFILING):
        try:
            raise torch.OutOfMemoryError("full")
        except RuntimeError as error:
            raise RuntimeError("warming up sampler") from error
    assert len(lines) == 1


def test_other_errors_and_success_are_silent(lines):
    with pytest.raises(ValueError), scope(SERVING):
        raise ValueError
    with scope(SERVING):
        pass
    assert scope(SERVING)(lambda value: value + 1)(2) == 3
    assert lines == []


def test_a_device_that_does_not_answer(lines):
    def broken():
        raise RuntimeError("device lost")

    with pytest.raises(torch.OutOfMemoryError), oom_report(SERVING, broken):
        raise torch.OutOfMemoryError("full")
    assert lines == ["Out of GPU memory while serving (device lost)."]


def test_a_cycle_of_causes_ends():
    one, two = ValueError(), KeyError()
    one.__cause__, two.__cause__ = two, one
    assert find_oom(one) is None
    assert find_oom(None) is None


def test_an_unknown_phase_is_refused():
    with pytest.raises(ValueError, match="unknown phase 'lunch'"):
        oom_report("lunch")


@pytest.mark.cuda
def test_the_devices_figures(lines):
    with pytest.raises(torch.OutOfMemoryError), oom_report(SERVING):
        torch.empty(2**50, dtype=torch.uint8, device="cuda")
    free, total = torch.cuda.mem_get_info()
    assert len(lines) == 1 and f"total {total}" in lines[0]
    memory = DeviceMemory.measure()
    assert 0 <= memory.inactive <= memory.reserved <= total and memory.free <= total
