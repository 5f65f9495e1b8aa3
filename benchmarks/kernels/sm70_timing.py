# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The clock of the SM70 benchmarks: one call's time, and what a copy reaches."""

import functools
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

REPLAYS = 7


class Timing(NamedTuple):
    """One call's time.

    Attributes:
        seconds: the median.
        deviation: of the measurement that lies farthest off, as a part of it.
        rounds: the measurements themselves, seconds, in order.

    """

    seconds: float
    deviation: float
    rounds: tuple[float, ...]


@dataclass(frozen=True)
class Pace:
    """How calls are timed.

    A card at its power limit lowers its clock. `rest_s` keeps away from the limit,
    `lead_s` measures at it; without either, what ran before can count too.

    Attributes:
        repeats: calls of a kind in a replay, on a CPU in all; rounded down to whole
            rounds but at least one.
        replays: of each kind, on CUDA.
        rest_s: seconds of idling before each measurement. Large products one after
            the other take a card to its power limit, where they take longer; a few
            of them after a rest do not.
        lead_s: seconds of the same kind before each measurement, after the rest, so
            that the clock is the one that it can sustain.

    """

    repeats: int
    replays: int = REPLAYS
    rest_s: float = 0.0
    lead_s: float = 0.0

    def __str__(self) -> str:
        return (
            f"{self.replays} replays of {self.repeats} calls, each after "
            f"{self.rest_s:g} s of rest and {self.lead_s:g} s of the same"
        )


def ratio_by_rounds(one: Timing, other: Timing) -> tuple[float, float]:
    """Return the mean of the rounds' ratios of `one` to `other`, and its standard
    error, NaN for a single round.

    What changes from round to round, such as a clock, is in both times of a round.

    Raises:
        ValueError: they have not the same number of rounds.

    """
    ratios = [a / b for a, b in zip(one.rounds, other.rounds, strict=True)]
    if len(ratios) < 2:
        return ratios[0], float("nan")
    return statistics.mean(ratios), statistics.stdev(ratios) / len(ratios) ** 0.5


def time_calls(
    calls: Sequence[Callable[[], object]], repeats: int, device: torch.device | str
) -> Timing:
    """Time calls of one kind; see `time_in_turns`."""
    return time_in_turns([calls], Pace(repeats), device)[0]


def time_in_turns(
    kinds: Sequence[Sequence[Callable[[], object]]],
    pace: Pace,
    device: torch.device | str,
) -> list[Timing]:
    """Time kinds of calls against each other, after one round to warm up.

    The calls of a kind take turns: several on copies of their weights keep the
    weights out of the caches. So do the kinds, so that a clock that falls as the
    card warms up falls for all of them, and in such an order that each comes about
    as often after each, itself included. On CUDA the calls of a kind are captured
    into one graph, so that launches on the host cost nothing, and each measurement
    is a replay of it.

    Args:
        kinds: what to time; the calls of each.
        pace: how.
        device: where the calls run.

    """
    for calls in kinds:
        for call in calls:
            call()
    if torch.device(device).type == "cuda":
        times = _graph_times(kinds, pace)
    else:
        times = _host_times(kinds, pace)
    return [_timing(t) for t in times]


def copy_rate(repeats: int, device: torch.device | str, rest_s: float = 0.0) -> float:
    """Return the bytes read and written in a second by a copy beyond any cache."""
    size = 2**30 if torch.device(device).type == "cuda" else 2**26
    source = torch.ones(size // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    # In a graph copy_ is a memcpy node, which a Hopper GPU runs at two thirds of
    # what a kernel moves; the faster one is the ceiling.
    calls = [lambda: target.copy_(source), lambda: torch.neg(source, out=target)]
    pace = Pace(repeats, rest_s=rest_s)
    timings = time_in_turns([[call] for call in calls], pace, device)
    fastest = min(timing.seconds for timing in timings)
    return 2 * size / fastest


def _timing(times: Sequence[float]) -> Timing:
    median = statistics.median(times)
    return Timing(median, max(abs(t / median - 1) for t in times), tuple(times))


def _orders(count: int, rounds: int) -> list[list[int]]:
    """Return the order of `count` kinds in each round.

    Next is always the kind that has come least often after the one before it, the
    last of the round before included, and then least often at that place.
    """
    orders: list[list[int]] = []
    followed: Counter[tuple[int | None, int]] = Counter()
    placed: Counter[tuple[int, int]] = Counter()
    last = None
    for _ in range(rounds):
        left = list(range(count))
        orders.append([])
        for place in range(count):
            *_, kind = min((followed[last, k], placed[place, k], k) for k in left)
            left.remove(kind)
            followed[last, kind] += 1
            placed[place, kind] += 1
            orders[-1].append(kind)
            last = kind
    return orders


def _rest(seconds: float) -> None:
    if seconds:
        time.sleep(seconds)


def _lead(run: Callable[[], object], seconds: float) -> None:
    if seconds:
        start = time.perf_counter()
        while time.perf_counter() - start < seconds:
            run()


def _rounds(calls: Sequence[Callable[[], object]], repeats: int) -> int:
    return max(1, repeats // len(calls))


def _host_times(
    kinds: Sequence[Sequence[Callable[[], object]]], pace: Pace
) -> list[list[float]]:
    times: list[list[float]] = [[] for _ in kinds]
    rounds = max(_rounds(calls, pace.repeats) for calls in kinds)
    for i, order in enumerate(_orders(len(kinds), rounds)):
        for kind in order:
            if i < _rounds(kinds[kind], pace.repeats):
                _rest(pace.rest_s)
                _lead(functools.partial(_all, kinds[kind]), pace.lead_s)
                times[kind].extend(_host_time(call) for call in kinds[kind])
    return times


def _all(calls: Sequence[Callable[[], object]]) -> None:
    for call in calls:
        call()


def _host_time(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _graph_times(
    kinds: Sequence[Sequence[Callable[[], object]]], pace: Pace
) -> list[list[float]]:
    graphs = []
    for calls in kinds:
        torch.cuda.synchronize()
        graph, rounds = torch.cuda.CUDAGraph(), _rounds(calls, pace.repeats)
        with torch.cuda.graph(graph):
            for _ in range(rounds):
                for call in calls:
                    call()
        graph.replay()
        graphs.append((graph, rounds * len(calls)))
    times: list[list[float]] = [[] for _ in kinds]
    torch.cuda.synchronize()
    for order in _orders(len(kinds), pace.replays):
        for kind in order:
            graph, count = graphs[kind]
            _rest(pace.rest_s)
            _lead(functools.partial(_replay_and_wait, graph), pace.lead_s)
            start = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[kind].append(start.elapsed_time(end) / 1e3 / count)
    return times


def _replay_and_wait(graph: torch.cuda.CUDAGraph) -> None:
    graph.replay()
    torch.cuda.synchronize()
