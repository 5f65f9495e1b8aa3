# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Questions to a served retrieval model, and whether the answers are right."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from benchmarks.needle.task import MAX_DIGITS, Sample
from tools.gate.server import NAME

ANSWER_TOKENS = MAX_DIGITS + 2
"""The longest answer, its end and one more: a model that does not end is seen."""

TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Answer:
    """What the server said to one question.

    Attributes:
        text: the answer.
        reason: ``finish_reason``.
        tokens: ids, the end token included.

    """

    text: str
    reason: str
    tokens: tuple[int, ...]

    def is_right(self, value: str) -> bool:
        """Whether it is exactly the value and ended by itself."""
        return self.text == value and self.reason == "stop"


@contextmanager
def client(url: str) -> Iterator[httpx.Client]:
    """Open a client of a server that no proxy of the environment gets between."""
    with httpx.Client(base_url=url, timeout=TIMEOUT_S, trust_env=False) as opened:
        yield opened


def request(sample: Sample, turn: int = 0, **parameters: Any) -> dict[str, Any]:
    """Return the chat request that asks one of the sample's questions greedily."""
    return {
        "model": NAME,
        "messages": sample.messages(turn),
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "return_token_ids": True,
        **parameters,
    }


def parsed(body: dict[str, Any]) -> Answer:
    """Return the answer in a chat response."""
    choice = body["choices"][0]
    return Answer(
        choice["message"]["content"] or "",
        choice["finish_reason"],
        tuple(choice["token_ids"]),
    )


def ask(http: httpx.Client, sample: Sample, turn: int = 0) -> Answer:
    """Ask one of the sample's questions.

    Raises:
        httpx.HTTPError: the server did not answer with 200.

    """
    response = http.post("/v1/chat/completions", json=request(sample, turn))
    response.raise_for_status()
    return parsed(response.json())


def continuation(http: httpx.Client, prompt: list[int], count: int) -> tuple[int, ...]:
    """Return ``count`` greedy tokens after ``prompt``, end tokens or not.

    Raises:
        httpx.HTTPError: the server did not answer with 200.

    """
    response = http.post(
        "/v1/completions",
        json={
            "model": NAME,
            "prompt": prompt,
            "max_tokens": count,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        },
    )
    response.raise_for_status()
    return tuple(response.json()["choices"][0]["token_ids"])
