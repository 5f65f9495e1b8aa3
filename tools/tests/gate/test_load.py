# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Sixty-four clients at once, some of which leave: right answers, nothing leaked."""

import asyncio
import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import psutil
import pytest

from tools.gate import client
from tools.gate.server import NAME, Server
from tools.tests.gate.scene import MAX_TOKENS, Question

CLIENTS = 64
QUIET_S = 30.0
WARM_ROUNDS = 3
"""Batches of new sizes still take memory in the first ones."""
LONG_PROMPT, LONG_ANSWER = 200, 320
"""Tokens: grows over a page's end while it is decoded."""


@dataclass(frozen=True)
class Held:
    """What the server's processes hold between loads."""

    resident_bytes: int
    threads: int
    descriptors: int
    processes: int


def held(served: Server) -> Held:
    """Return what is held now; a process that just ended counts for nothing."""
    found: list[tuple[int, int, int]] = []
    for process in served.processes():
        try:
            found.append(
                (
                    process.memory_info().rss,
                    process.num_threads(),
                    process.num_fds(),
                )
            )
        except psutil.NoSuchProcess:
            continue
    resident, threads, descriptors = (sum(column) for column in zip(*found))
    return Held(resident, threads, descriptors, len(found))


def settle(served: Server) -> dict[str, float]:
    """Return the metrics once no request is left, or as they are after a while."""
    end = time.monotonic() + QUIET_S
    while True:
        metrics = served.metrics()
        busy = (
            metrics["vllm:num_requests_running"],
            metrics["vllm:num_requests_waiting"],
            metrics["vllm:kv_cache_usage_perc"],
        )
        if not any(busy) or time.monotonic() > end:
            return metrics
        time.sleep(0.2)


async def right(http: httpx.AsyncClient, asked: Question) -> str | None:
    """Ask; return what is wrong with the answer."""
    response = await http.post(
        "/v1/chat/completions", json=client.request(asked.text, asked.turn)
    )
    if response.status_code != 200:
        return f"status {response.status_code}: {response.text}"
    answer = client.parsed(response.json())
    if answer.is_right(asked.value):
        return None
    return f"expected {asked.value!r}, got {answer}"


async def streamed_right(http: httpx.AsyncClient, asked: Question) -> str | None:
    """Ask for a stream; return what is wrong with what it adds up to."""
    text, reason = "", None
    tokens: list[int] = []
    body = client.request(asked.text, asked.turn, stream=True)
    async with http.stream("POST", "/v1/chat/completions", json=body) as response:
        async for line in response.aiter_lines():
            data = line.removeprefix("data: ")
            if not data or data == "[DONE]":
                continue
            for choice in json.loads(data)["choices"]:
                text += choice["delta"].get("content") or ""
                tokens += choice.get("token_ids") or []
                reason = choice["finish_reason"] or reason
    answer = client.Answer(text, str(reason), tuple(tokens))
    if answer.is_right(asked.value) and bytes(tokens[:-1]) == text.encode():
        return None
    return f"expected {asked.value!r}, got {answer} in a stream"


def long_request(asked: Question) -> dict:
    """Return a request for a text that only its length ends."""
    ids, _ = asked.text.tokens()
    return {
        "model": NAME,
        "prompt": ids[:LONG_PROMPT],
        "max_tokens": LONG_ANSWER,
        "ignore_eos": True,
        "temperature": 0,
    }


async def long(http: httpx.AsyncClient, asked: Question) -> str | None:
    """Let a text grow over several pages' ends; return what is wrong with it."""
    response = await http.post("/v1/completions", json=long_request(asked))
    if response.status_code != 200:
        return f"status {response.status_code}: {response.text}"
    count = response.json()["usage"]["completion_tokens"]
    return None if count == LONG_ANSWER else f"{count} tokens"


async def abandoned(http: httpx.AsyncClient, asked: Question) -> str | None:
    """Leave a stream after three lines of it."""
    body = long_request(asked) | {"stream": True}
    async with http.stream("POST", "/v1/completions", json=body) as response:
        seen = 0
        async for line in response.aiter_lines():
            seen += bool(line)
            if seen == 3:
                return None
    return "the stream ended by itself"


KINDS = (right, streamed_right, right, long, abandoned, streamed_right, right, long)


async def load(url: str, asked: Iterator[Question]) -> list[str]:
    """Let every client send two requests; return what went wrong."""
    limits = httpx.Limits(max_connections=None)

    async def one(number: int) -> list[str | None]:
        async with httpx.AsyncClient(
            base_url=url, timeout=600, trust_env=False, limits=limits
        ) as http:
            return [
                await KINDS[(number + turn) % len(KINDS)](http, next(asked))
                for turn in range(2)
            ]

    found = await asyncio.gather(*(one(number) for number in range(CLIENTS)))
    return [wrong for some in found for wrong in some if wrong]


@pytest.mark.slow
def test_64_clients(served, questions, still_right):
    """Every answer right, some requests preempted, and all is given back."""
    assert max(len(q.text.tokens()[0]) for q in questions) < MAX_TOKENS
    before = settle(served)
    rounds = []
    for _ in range(WARM_ROUNDS + 3):
        assert asyncio.run(load(served.url, itertools.cycle(questions))) == []
        after = settle(served)
        rounds.append(held(served))
    assert after["vllm:num_requests_running"] == 0
    assert after["vllm:num_requests_waiting"] == 0
    assert after["vllm:kv_cache_usage_perc"] == 0

    def grown(name: str) -> float:
        return after[name] - before[name]

    # Else the load was none.
    assert grown("vllm:num_preemptions_total") > 0
    assert grown("vllm:prefix_cache_hits_total") > 0
    warm, end = rounds[WARM_ROUNDS - 1], rounds[-1]
    assert end.resident_bytes < 1.05 * warm.resident_bytes
    assert end.threads <= warm.threads
    assert end.descriptors <= warm.descriptors
    assert end.processes == warm.processes
