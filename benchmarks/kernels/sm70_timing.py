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
    """Time calls that take turns, after one round to warm up.

    Several calls on copies of their weights keep the weights out of the caches.
    On CUDA the calls are captured into one graph, so that launches on the host
    cost nothing, and each measurement is a replay of it.

    Args:
        calls: what to time.
        repeats: calls in all, rounded down to whole rounds but at least one round.
        device: where the calls run.

    """
    rounds = max(1, repeats // len(calls))
    for call in calls:
        call()
    if torch.device(device).type == "cuda":
        times = _graph_times(calls, rounds)
    else:
        times = [_host_time(call) for _ in range(rounds) for call in calls]
    median = statistics.median(times)
    return Timing(median, max(abs(t / median - 1) for t in times))


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


def _host_time(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _graph_times(calls: Sequence[Callable[[], object]], rounds: int) -> list[float]:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    graph.replay()
    times = []
    for _ in range(REPLAYS):
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / (rounds * len(calls)))
    return times
