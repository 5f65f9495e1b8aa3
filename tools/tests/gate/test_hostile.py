# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Hostile requests get upstream's error codes, and the server goes on."""

import asyncio
import json
import resource
from urllib.parse import urlsplit

import httpx
import pytest

from tools.gate import client
from tools.gate.server import NAME
from tools.tests.gate.scene import MAX_TOKENS

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("still_right")]

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
VOCABULARY = 259
CONNECTIONS = 1000


def chat(**parameters) -> dict:
    return {
        "model": NAME,
        "messages": [{"role": "user", "content": "What is a1b2?"}],
        "max_tokens": 4,
        **parameters,
    }


def completion(**parameters) -> dict:
    return {"model": NAME, "prompt": "What is", "max_tokens": 4, **parameters}


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (CHAT, chat(model="another"), 404),
        (CHAT, chat(messages=[]), 400),
        (CHAT, chat(messages="a text"), 400),
        (CHAT, chat(messages=[{"content": "no role"}]), 400),
        (CHAT, chat(temperature=-1), 400),
        (CHAT, chat(temperature="hot"), 400),
        (CHAT, chat(top_p=0), 400),
        (CHAT, chat(top_p=1.5), 400),
        (CHAT, chat(top_k=-2), 400),
        (CHAT, chat(min_p=2), 400),
        (CHAT, chat(presence_penalty=100), 400),
        (CHAT, chat(repetition_penalty=0), 400),
        (CHAT, chat(n=0), 400),
        (CHAT, chat(n=-1), 400),
        (CHAT, chat(n=10**9), 400),
        (CHAT, chat(max_tokens=-1), 400),
        (CHAT, chat(max_tokens=10**12), 400),
        (CHAT, chat(min_tokens=100), 400),
        (CHAT, chat(logprobs=True, top_logprobs=10**6), 400),
        (CHAT, chat(top_logprobs=3), 400),
        (CHAT, chat(prompt_logprobs=10**6), 400),
        (CHAT, chat(stop=[""]), 400),
        (CHAT, chat(seed=2**70), 400),
        (CHAT, chat(stream_options={"include_usage": True}), 400),
        (CHAT, chat(response_format={"type": "nothing"}), 400),
        (CHAT, chat(logit_bias={str(10**9): 1}), 400),
        (COMPLETIONS, completion(prompt=""), 400),
        (COMPLETIONS, completion(prompt=[]), 400),
        (COMPLETIONS, completion(prompt={"a": 1}), 400),
        (COMPLETIONS, completion(prompt=[VOCABULARY + 1]), 400),
        (COMPLETIONS, completion(prompt=[-1]), 400),
        (COMPLETIONS, completion(prompt=[65] * (MAX_TOKENS + 1)), 400),
        (COMPLETIONS, completion(prompt="a" * 10**6), 400),
        (COMPLETIONS, completion(logprobs=10**6), 400),
        (COMPLETIONS, completion(logprobs=-2), 400),
    ],
)
def test_invalid_requests(served, path, body, status):
    """An error in upstream's form, with its code."""
    with client.client(served.url) as http:
        response = http.post(path, json=body)
    assert response.status_code == status, response.text
    assert response.json()["error"]["code"] == status


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b"", "application/json"),
        (b"{", "application/json"),
        (b'{"model": "needle", "messages": ', "application/json"),
        (b"[" * 100_000, "application/json"),
        (b"\xff\xfe\x00", "application/json"),
        (b"null", "application/json"),
        (json.dumps(chat()).encode(), "text/plain"),
    ],
)
def test_broken_json(served, path, body, kind):
    """No body that is a request."""
    with client.client(served.url) as http:
        response = http.post(path, content=body, headers={"Content-Type": kind})
    assert 400 <= response.status_code < 500, response.text


def test_the_longest_text(served):
    """A prompt that leaves room for one token is served, and one more is not."""
    with client.client(served.url) as http:
        for length, status in ((MAX_TOKENS - 1, 200), (MAX_TOKENS, 400)):
            body = completion(prompt=[65] * length, max_tokens=1)
            assert http.post(COMPLETIONS, json=body).status_code == status


def test_many_answers_to_one_question(served):
    """More answers than run at a time."""
    with client.client(served.url) as http:
        response = http.post(CHAT, json=chat(n=100, temperature=1))
    assert response.status_code == 200, response.text
    assert len(response.json()["choices"]) == 100


def test_clients_that_vanish(served):
    """Connections cut in the middle of an answer give their requests up."""

    async def vanish() -> None:
        where = urlsplit(served.url)
        reader, writer = await asyncio.open_connection(where.hostname, where.port)
        body = json.dumps(
            completion(max_tokens=1000, ignore_eos=True, stream=True)
        ).encode()
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: here\r\n"
            b"Content-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        await reader.readuntil(b"data: ")
        writer.transport.abort()

    async def all_of_them() -> None:
        await asyncio.gather(*(vanish() for _ in range(12)))

    asyncio.run(all_of_them())
    metrics = served.metrics()
    for _ in range(100):
        if not metrics["vllm:num_requests_running"]:
            break
        metrics = served.metrics()
    assert metrics["vllm:num_requests_running"] == 0
    assert metrics["vllm:kv_cache_usage_perc"] == 0


def test_a_thousand_connections(served, questions):
    """A thousand that say nothing or half a request; a question is still answered."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = CONNECTIONS + 200
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard), hard))

    async def crowd() -> client.Answer:
        where = urlsplit(served.url)
        opened = []
        for number in range(CONNECTIONS):
            pair = await asyncio.open_connection(where.hostname, where.port)
            opened.append(pair)
            if number % 2:
                pair[1].write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: h")
        async with httpx.AsyncClient(
            base_url=served.url, timeout=600, trust_env=False
        ) as http:
            asked = questions[0]
            body = client.request(asked.text, asked.turn)
            response = await http.post(CHAT, json=body)
        for _, writer in opened:
            writer.transport.abort()
        return client.parsed(response.json())

    try:
        assert asyncio.run(crowd()).is_right(questions[0].value)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
