# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The allocator's settings: one limit added, everything else kept and restored."""

import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.platforms import current_platform
from vllm.v1.worker import allocator_scope
from vllm.v1.worker.allocator_scope import (
    TorchAllocator,
    above_segment,
    apply_serving_limit,
    find_allocator,
    in_startup_scope,
    limit_splits,
    startup_limit_mib,
    startup_scope,
    with_limit,
)

KEYS = {
    "garbage_collection_threshold": "0.8",
    "roundup_power2_divisions": "[256:1,512:2,>:4]",
    "expandable_segments": "True",
    "max_split_size_mb": "128",
    "max_non_split_rounding_mb": "80",
    "large_segment_size_mb": "64",
}
ALL = ",".join(f"{key}:{value}" for key, value in KEYS.items())


class FakeAllocator:
    """Like PyTorch's: a call resets the keys that it leaves out."""

    def __init__(self, settings: str = "") -> None:
        self.given = settings
        self.calls = [settings]
        self.released = 0

    def settings(self) -> str:
        return self.given

    def apply(self, settings: str) -> None:
        self.given = settings
        self.calls.append(settings)

    def release(self) -> None:
        self.released += 1

    def value(self, key: str) -> str | None:
        found = None
        depth, start = 0, 0
        for i, char in enumerate(self.given + ","):
            depth += (char == "[") - (char == "]")
            if char == "," and not depth:
                name, _, value = self.given[start:i].partition(":")
                if name.strip() == key:
                    found = value.strip()
                start = i + 1
        return found


@pytest.fixture
def should_do_global_cleanup_after_test() -> bool:
    """Upstream's conftest asks; nothing here starts an engine."""
    return False


@pytest.fixture(autouse=True)
def defaults(monkeypatch):
    for name in ("VLLM_ALLOCATOR_SCOPE", "VLLM_ALLOCATOR_MAX_SPLIT_MIB"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("fails", [False, True])
def test_each_key_survives(key, fails):
    user = f"{key}:{KEYS[key]}"
    allocator = FakeAllocator(user)
    failure = pytest.raises(RuntimeError, match="injected") if fails else nullcontext()
    with failure, startup_scope(allocator):
        limit = 65 if key == "large_segment_size_mb" else 21
        assert allocator.value("max_split_size_mb") == str(limit)
        if key != "max_split_size_mb":
            assert allocator.value(key) == KEYS[key]
        if fails:
            raise RuntimeError("injected")
    assert allocator.given == user


@pytest.mark.parametrize("user", ["", ALL, ALL + ", ", " "])
def test_the_whole_string_comes_back(user):
    allocator = FakeAllocator(user)
    with limit_splits(21, allocator):
        for key, value in KEYS.items():
            expected = value if user.strip() else None
            if key == "max_split_size_mb":
                expected = "21"
            assert allocator.value(key) == expected
    assert allocator.given == user


def test_nested_scopes_restore_what_they_found():
    allocator = FakeAllocator(ALL)
    with limit_splits(21, allocator):
        outer = allocator.given
        with pytest.raises(KeyError), limit_splits(40, allocator):
            assert allocator.value("max_split_size_mb") == "40"
            raise KeyError
        assert allocator.given == outer
    assert allocator.given == ALL


def test_cached_memory_is_returned_on_success_only(monkeypatch):
    allocator = FakeAllocator()
    with limit_splits(21, allocator):
        assert allocator.released == 0
    assert allocator.released == 1
    with pytest.raises(RuntimeError), limit_splits(21, allocator):
        raise RuntimeError
    assert allocator.released == 1
    monkeypatch.setenv("VLLM_ALLOCATOR_SCOPE", "0")
    with limit_splits(20, allocator):
        pass
    assert allocator.released == 1


def test_the_switch_restores_upstream(monkeypatch):
    assert startup_limit_mib(FakeAllocator()) == 21
    monkeypatch.setenv("VLLM_ALLOCATOR_SCOPE", "0")
    assert startup_limit_mib(FakeAllocator("large_segment_size_mb:64")) == 20
    allocator = FakeAllocator()
    with startup_scope(allocator):
        assert allocator.calls == [""]


@pytest.mark.parametrize(
    "user, limit, expected",
    [
        ("", 21, 21),
        ("", 20, 21),
        ("", 64, 64),
        ("large_segment_size_mb:64", 21, 65),
        ("large_segment_size_mb: 64,large_segment_size_mb:32", 21, 33),
        ("large_segment_size_mb:10", 11, 11),
    ],
)
def test_the_limit_is_above_the_large_segment(user, limit, expected):
    assert above_segment(user, limit) == expected


@settings(deadline=None)
@given(
    st.fixed_dictionaries({}, optional=dict.fromkeys(KEYS, st.integers(21, 500))),
    st.integers(21, 4096),
)
def test_with_limit_adds_one_value(values, limit):
    user = ",".join(f"{key}:{value}" for key, value in values.items())
    allocator = FakeAllocator(with_limit(user, limit))
    for key, value in (values | {"max_split_size_mb": limit}).items():
        assert allocator.value(key) == str(value)


def test_pytorch_takes_what_is_written():
    """The parser is PyTorch's own; it needs no GPU, and refuses unknown keys."""
    allocator = TorchAllocator()
    original = allocator.settings()
    user = (
        "garbage_collection_threshold:0.8,roundup_power2_divisions:[256:1,512:2,>:4],"
        "max_non_split_rounding_mb:32,expandable_segments:False"
    )
    try:
        allocator.apply(user)
        with (
            pytest.MonkeyPatch.context() as patch,
            pytest.raises(RuntimeError, match="injected"),
        ):
            patch.setattr(allocator, "release", lambda: None)
            with startup_scope(allocator):
                assert allocator.settings() == user + ",max_split_size_mb:21"
                raise RuntimeError("injected")
        assert allocator.settings() == user
    finally:
        allocator.apply(original)


def test_a_phase_is_decorated(monkeypatch):
    allocator = FakeAllocator("expandable_segments:True")
    monkeypatch.setattr(allocator_scope, "find_allocator", lambda: allocator)

    @in_startup_scope
    def phase(value, *, factor):
        return allocator.value("max_split_size_mb"), value * factor

    assert phase(3, factor=2) == ("21", 6)
    assert phase.__name__ == "phase"
    assert allocator.given == "expandable_segments:True"


def test_the_log_says_once_what_was_set_and_restored(monkeypatch):
    lines = []
    monkeypatch.setattr(
        allocator_scope.logger,
        "info_once",
        lambda text, *args: lines.append(text % args),
    )
    with limit_splits(21, FakeAllocator("expandable_segments:True")):
        assert not lines
    assert len(lines) == 1
    assert "max_split_size_mb:21 was set" in lines[0]
    assert "'expandable_segments:True' restored" in lines[0]


@pytest.fixture
def cuda_like(monkeypatch):
    monkeypatch.setattr(current_platform, "is_cuda_alike", lambda: True)
    monkeypatch.setattr(torch.cuda.memory, "get_allocator_backend", lambda: "native")
    monkeypatch.delitem(sys.modules, "vllm.device_allocator.cumem", raising=False)


@pytest.mark.parametrize("instance", [None, object()])
def test_a_private_pool_is_left_alone(cuda_like, monkeypatch, instance):
    assert isinstance(find_allocator(), TorchAllocator)
    module = SimpleNamespace(CuMemAllocator=SimpleNamespace(instance=instance))
    monkeypatch.setitem(sys.modules, "vllm.device_allocator.cumem", module)
    assert (find_allocator() is None) == (instance is not None)


def test_other_allocators_and_platforms_pass_through(cuda_like, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(
            torch.cuda.memory, "get_allocator_backend", lambda: "cudaMallocAsync"
        )
        assert find_allocator() is None
    with monkeypatch.context() as patch:
        patch.delattr(torch._C, "_accelerator_setAllocatorSettings")
        assert find_allocator() is None
    monkeypatch.setattr(current_platform, "is_cuda_alike", lambda: False)
    assert find_allocator() is None
    with startup_scope(), limit_splits(21):
        pass


def test_a_limit_stays_while_serving(monkeypatch):
    monkeypatch.setenv("VLLM_ALLOCATOR_MAX_SPLIT_MIB", "64")
    allocator = FakeAllocator("expandable_segments:False")
    apply_serving_limit(allocator)
    serving = "expandable_segments:False,max_split_size_mb:64"
    assert allocator.given == serving
    with startup_scope(allocator):
        assert allocator.value("max_split_size_mb") == "21"
    assert allocator.given == serving


def test_serving_is_untouched_by_default():
    allocator = FakeAllocator("expandable_segments:True")
    apply_serving_limit(allocator)
    assert allocator.calls == ["expandable_segments:True"]


@pytest.mark.parametrize("limit", ["20", "-1", "1"])
def test_a_limit_that_cannot_work_is_refused(monkeypatch, limit):
    monkeypatch.setenv("VLLM_ALLOCATOR_MAX_SPLIT_MIB", limit)
    with pytest.raises(ValueError, match=f"MAX_SPLIT_MIB={limit}: .* at least 21 MiB"):
        apply_serving_limit(FakeAllocator())
    with pytest.raises(ValueError, match="at least 21 MiB"):
        apply_serving_limit()


def test_a_limit_without_an_allocator_warns(monkeypatch):
    monkeypatch.setenv("VLLM_ALLOCATOR_MAX_SPLIT_MIB", "64")
    monkeypatch.setattr(allocator_scope, "find_allocator", lambda: None)
    lines = []
    monkeypatch.setattr(
        allocator_scope.logger,
        "warning_once",
        lambda text, *args: lines.append(text % args),
    )
    apply_serving_limit()
    assert len(lines) == 1 and "MAX_SPLIT_MIB=64 has no effect" in lines[0]


MIB = 2**20


def _settings() -> dict:
    return torch.cuda.memory._snapshot()["allocator_settings"]


@pytest.mark.cuda
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(
    "user",
    [
        "",
        "garbage_collection_threshold:0.8",
        "roundup_power2_divisions:[256:1,512:2,>:4]",
        "expandable_segments:True",
        "max_split_size_mb:128",
        ALL,
    ],
)
def test_the_devices_settings_survive(user, fails):
    """All that the allocator itself reports, on success and on a failure."""
    torch.cuda.init()
    allocator = TorchAllocator()
    original = allocator.settings()
    try:
        allocator.apply(user)
        before = _settings()
        failure = (
            pytest.raises(RuntimeError, match="injected") if fails else nullcontext()
        )
        with failure, startup_scope():
            inside = _settings()
            limit = 65 if "large_segment_size_mb" in user else 21
            assert inside["max_split_size"] == limit * MIB
            for key in ("garbage_collection_threshold", "roundup_power2_divisions"):
                assert inside[key] == before[key]
            assert inside["expandable_segments"] == before["expandable_segments"]
            if fails:
                raise RuntimeError("injected")
        assert _settings() == before
    finally:
        # The one key that PyTorch does not reset when a call leaves it out.
        allocator.apply("large_segment_size_mb:20")
        allocator.apply(original)


@pytest.mark.cuda
def test_a_freed_block_is_not_pinned():
    """A small tensor that outlives the phase does not keep 512 MiB with it."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    with startup_scope():
        large = torch.empty(512 * MIB, dtype=torch.uint8, device="cuda")
        del large
        kept = torch.empty(2 * MIB, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_reserved() - before <= 20 * MIB
    del kept
