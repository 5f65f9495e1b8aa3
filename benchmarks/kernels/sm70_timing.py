# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The clock of the SM70 benchmarks: one call's time, and what a copy reaches."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

REPLAYS = 7


class Timing(NamedTuple):
    """One call's time.

    Attributes:
        seconds: the median.
        deviation: of the measurement that lies farthest off, as a part of it.

    """

    seconds: float
    deviation: float


def time_calls(
    calls: Sequence[Callable[[], object]], repeats: int, device: torch.device | str
) -> Timing:
    """Time calls of one kind; see `time_in_turns`."""
    return time_in_turns([calls], repeats, device)[0]


def time_in_turns(
    kinds: Sequence[Sequence[Callable[[], object]]],
    repeats: int,
    device: torch.device | str,
) -> list[Timing]:
    """Time kinds of calls against each other, after one round to warm up.

    The calls of a kind take turns: several on copies of their weights keep the
    weights out of the caches. So do the kinds, so that a clock that falls as the
    card warms up falls for all of them. On CUDA the calls of a kind are captured
    into one graph, so that launches on the host cost nothing, and each measurement
    is a replay of it.

    Args:
        kinds: what to time; the calls of each.
        repeats: calls of a kind in a replay, on a CPU in all; rounded down to whole
            rounds but at least one.
        device: where the calls run.

    """
    for calls in kinds:
        for call in calls:
            call()
    if torch.device(device).type == "cuda":
        times = _graph_times(kinds, repeats)
    else:
        times = _host_times(kinds, repeats)
    return [_timing(t) for t in times]


def copy_rate(repeats: int, device: torch.device | str) -> float:
    """Return the bytes read and written in a second by a copy beyond any cache."""
    size = 2**30 if torch.device(device).type == "cuda" else 2**26
    source = torch.ones(size // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    # In a graph copy_ is a memcpy node, which a Hopper GPU runs at two thirds of
    # what a kernel moves; the faster one is the ceiling.
    calls = [lambda: target.copy_(source), lambda: torch.neg(source, out=target)]
    fastest = min(time_calls([call], repeats, device).seconds for call in calls)
    return 2 * size / fastest


def _timing(times: Sequence[float]) -> Timing:
    median = statistics.median(times)
    return Timing(median, max(abs(t / median - 1) for t in times))


def _rounds(calls: Sequence[Callable[[], object]], repeats: int) -> int:
    return max(1, repeats // len(calls))


def _host_times(
    kinds: Sequence[Sequence[Callable[[], object]]], repeats: int
) -> list[list[float]]:
    times: list[list[float]] = [[] for _ in kinds]
    for i in range(max(_rounds(calls, repeats) for calls in kinds)):
        for calls, own in zip(kinds, times):
            if i < _rounds(calls, repeats):
                own.extend(_host_time(call) for call in calls)
    return times


def _host_time(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _graph_times(
    kinds: Sequence[Sequence[Callable[[], object]]], repeats: int
) -> list[list[float]]:
    graphs = []
    for calls in kinds:
        torch.cuda.synchronize()
        graph, rounds = torch.cuda.CUDAGraph(), _rounds(calls, repeats)
        with torch.cuda.graph(graph):
            for _ in range(rounds):
                for call in calls:
                    call()
        graph.replay()
        graphs.append((graph, rounds * len(calls)))
    times: list[list[float]] = [[] for _ in kinds]
    for _ in range(REPLAYS):
        for (graph, count), own in zip(graphs, times):
            start = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            own.append(start.elapsed_time(end) / 1e3 / count)
    return times
