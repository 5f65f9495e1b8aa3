# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The benchmarks' clock: kinds of calls take turns, and so do the calls of a kind."""

import contextlib
import itertools
from collections import Counter

import pytest

from benchmarks.kernels import sm70_timing
from benchmarks.kernels.sm70_timing import Pace


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
    one, other = sm70_timing.time_in_turns(kinds, Pace(3), "cpu")
    assert order == ["a", "b", "c"] + ["a", "b", "c"] + ["a", "a"]
    assert one == (2, pytest.approx(0.5), (1, 3, 2))
    # One whole round of two calls is less than three.
    assert other == (15, pytest.approx(1 / 3), (10, 20))


def test_every_second_round_runs_in_reverse(clock):
    call, order = clock
    kinds = [[call("a", 9, 1, 2)], [call("b", 9, 3, 4)]]
    one, other = sm70_timing.time_in_turns(kinds, Pace(2), "cpu")
    assert order == ["a", "b"] + ["a", "b"] + ["b", "a"]
    assert (one.seconds, other.seconds) == (1.5, 3.5)


@pytest.mark.parametrize("count", [2, 3])
def test_each_comes_as_often_after_each(count):
    """Within two, itself included; and about as often at each place of a round."""
    orders = sm70_timing._orders(count, 18)
    assert all(sorted(order) == list(range(count)) for order in orders)
    sequence = list(itertools.chain(*orders))
    follows = Counter(itertools.pairwise(sequence))
    pairs = [follows[pair] for pair in itertools.product(range(count), repeat=2)]
    assert max(pairs) - min(pairs) <= 2
    places = Counter(place for order in orders for place in enumerate(order))
    assert len(places) == count**2
    assert max(places.values()) - min(places.values()) <= 2


def test_any_number_of_kinds_has_its_rounds():
    assert sm70_timing._orders(1, 3) == [[0]] * 3
    assert [sorted(order) for order in sm70_timing._orders(9, 4)] == [
        list(range(9))
    ] * 4


def test_each_kind_leads_its_own_measurement(clock):
    """For half a second: twice 0.3 s of a, once 0.6 s of b, then one that counts."""
    call, order = clock
    kinds = [[call("a", 9, 0.3, 0.3, 1)], [call("b", 9, 0.6, 2)]]
    one, other = sm70_timing.time_in_turns(kinds, Pace(1, lead_s=0.5), "cpu")
    assert order == ["a", "b"] + ["a", "a", "a"] + ["b", "b"]
    assert (one.seconds, other.seconds) == (1, 2)


def test_each_measurement_comes_after_a_rest(clock, monkeypatch):
    call, order = clock
    monkeypatch.setattr(sm70_timing.time, "sleep", order.append)
    kinds = [[call("a", 9, 1, 2)], [call("b", 9, 3, 4)]]
    sm70_timing.time_in_turns(kinds, Pace(2, rest_s=0.5), "cpu")
    assert order == ["a", "b"] + [0.5, "a", 0.5, "b"] + [0.5, "b", 0.5, "a"]


def test_ratios_are_taken_within_a_round():
    """The clock falls by half after the first round: the ratio does not change."""
    one, other = (sm70_timing.Timing(0, 0, times) for times in [(3, 6), (2, 4)])
    assert sm70_timing.ratio_by_rounds(one, other) == (1.5, 0)
    other = other._replace(rounds=(2, 3))
    # 1.5 and 2: half their distance is the standard error.
    assert sm70_timing.ratio_by_rounds(one, other) == (1.75, pytest.approx(0.25))
    with pytest.raises(ValueError, match="shorter"):
        sm70_timing.ratio_by_rounds(one, other._replace(rounds=(2,)))


def test_a_single_round_has_no_known_error():
    one, other = (sm70_timing.Timing(0, 0, times) for times in [(3,), (2,)])
    ratio, error = sm70_timing.ratio_by_rounds(one, other)
    assert ratio == 1.5 and error != error


class Graph:
    """Stands in for a CUDA graph: a replay takes the time of its kind."""

    made: list["Graph"] = []
    clock_ms = 0.0

    def __init__(self):
        self.replays = 0
        Graph.made.append(self)

    def replay(self):
        self.replays += 1
        Graph.clock_ms += 10.0 * (1 + Graph.made.index(self)) * self.replays


class Event:
    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = Graph.clock_ms

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        return end.at - self.at


@pytest.fixture
def graphs(monkeypatch):
    cuda = sm70_timing.torch.cuda
    monkeypatch.setattr(Graph, "made", [])
    monkeypatch.setattr(Graph, "clock_ms", 0.0)
    monkeypatch.setattr(cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(cuda, "Event", Event)
    monkeypatch.setattr(cuda, "graph", lambda graph: contextlib.nullcontext())
    monkeypatch.setattr(cuda, "synchronize", lambda: None)
    return Graph.made


def test_graphs_are_replayed_in_turns(graphs, monkeypatch):
    rests = []
    monkeypatch.setattr(sm70_timing.time, "sleep", rests.append)
    calls = [0, 0]

    def call(kind):
        def run():
            calls[kind] += 1

        return run

    one, other = sm70_timing.time_in_turns(
        [[call(0)], [call(1)]], Pace(4, replays=3, rest_s=0.5), "cuda"
    )
    # Once to warm up, four times in the graph.
    assert calls == [5, 5]
    assert rests == [0.5] * 6
    # Of four calls; the first replay warms up.
    assert one.rounds == pytest.approx([20e-3 / 4, 30e-3 / 4, 40e-3 / 4])
    assert other.rounds == pytest.approx([40e-3 / 4, 60e-3 / 4, 80e-3 / 4])


def test_a_graph_leads_its_own_measurement_after_the_rest(graphs, monkeypatch):
    events = []
    cuda = sm70_timing.torch.cuda
    monkeypatch.setattr(sm70_timing.time, "perf_counter", lambda: Graph.clock_ms / 1e3)
    monkeypatch.setattr(sm70_timing.time, "sleep", events.append)
    monkeypatch.setattr(cuda, "synchronize", lambda: events.append("wait"))
    replay = Graph.replay

    def noted(graph):
        events.append(Graph.made.index(graph))
        replay(graph)

    monkeypatch.setattr(Graph, "replay", noted)
    one, other = sm70_timing.time_in_turns(
        [[lambda: None], [lambda: None]],
        Pace(1, replays=1, rest_s=9, lead_s=0.05),
        "cuda",
    )
    # Each replay of a lead is waited for: the host does not run ahead of the card.
    lead = [[9, kind, "wait", kind, "wait", kind] for kind in (0, 1)]
    assert events == ["wait", 0, "wait", 1, "wait", *lead[0], *lead[1]]
    # 10 ms to warm up, 20 and 30 to lead, 40; 20 to warm up, 40 and 60 to lead, 80.
    assert [graph.replays for graph in graphs] == [4, 4]
    assert one.rounds == pytest.approx([40e-3])
    assert other.rounds == pytest.approx([80e-3])


def test_one_round_at_least(clock):
    call, order = clock
    calls = [call(name, 1, 2) for name in "abc"]
    assert sm70_timing.time_calls(calls, 1, "cpu") == (2, 0, (2, 2, 2))
    assert order == list("abcabc")
