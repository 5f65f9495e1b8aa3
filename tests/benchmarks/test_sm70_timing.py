# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The benchmarks' clock: kinds of calls take turns, and so do the calls of a kind."""

import pytest

from benchmarks.kernels import sm70_timing


@pytest.fixture
def clock(monkeypatch):
    """A call of `name` takes the next of its times; which ran is in `order`."""
    now, order = [0.0], []
    monkeypatch.setattr(sm70_timing.time, "perf_counter", lambda: now[0])

    def call(name, *times):
        left = list(times)

        def run():
            order.append(name)
            now[0] += left.pop(0) if left else 0.0

        return run

    return call, order


def test_kinds_take_turns_after_a_round_to_warm_up(clock):
    call, order = clock
    kinds = [[call("a", 9, 1, 3, 2)], [call("b", 9, 10), call("c", 9, 20)]]
    one, other = sm70_timing.time_in_turns(kinds, 3, "cpu")
    assert order == ["a", "b", "c"] + ["a", "b", "c"] + ["a", "a"]
    assert one == (2, pytest.approx(0.5))
    # One whole round of two calls is less than three.
    assert other == (15, pytest.approx(1 / 3))


def test_one_round_at_least(clock):
    call, order = clock
    calls = [call(name, 1, 2) for name in "abc"]
    assert sm70_timing.time_calls(calls, 1, "cpu") == (2, 0)
    assert order == list("abcabc")
