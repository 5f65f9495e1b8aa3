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
    # 1, 2 and 3: a standard deviation of one.
    assert one == (2, pytest.approx(0.5), pytest.approx(1.25 / 2 / 3**0.5))
    # One whole round of two calls is less than three: 10 and 20.
    assert other == (15, pytest.approx(1 / 3), pytest.approx(1.25 * 5 / 15))


def test_every_second_round_runs_in_reverse(clock):
    call, order = clock
    kinds = [[call("a", 9, 1, 2)], [call("b", 9, 3, 4)]]
    one, other = sm70_timing.time_in_turns(kinds, 2, "cpu")
    assert order == ["a", "b"] + ["a", "b"] + ["b", "a"]
    assert (one.seconds, other.seconds) == (1.5, 3.5)


def test_each_measurement_comes_after_a_rest(clock, monkeypatch):
    call, order = clock
    monkeypatch.setattr(sm70_timing.time, "sleep", order.append)
    kinds = [[call("a", 9, 1, 2)], [call("b", 9, 3, 4)]]
    sm70_timing.time_in_turns(kinds, 2, "cpu", rest_s=0.5)
    assert order == ["a", "b"] + [0.5, "a", 0.5, "b"] + [0.5, "b", 0.5, "a"]


def test_one_round_at_least(clock):
    call, order = clock
    calls = [call(name, 1, 2) for name in "abc"]
    assert sm70_timing.time_calls(calls, 1, "cpu") == (2, 0, 0)
    assert order == list("abcabc")
