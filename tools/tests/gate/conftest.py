# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""One server of the trained model for the tests that load and insult it."""

from collections.abc import Iterator

import pytest

from benchmarks.needle import task
from tools.demo import settings
from tools.gate import client, server
from tools.gate.server import Server
from tools.tests.gate.scene import (
    BLOCKS,
    CHECKPOINT,
    LENGTHS,
    MAX_REQUESTS,
    MAX_TOKENS,
    Question,
)


@pytest.fixture(scope="package")
def served(tmp_path_factory) -> Iterator[Server]:
    """Serve the trained model with a KV cache that sixteen requests overfill."""
    arguments = server.options(
        CHECKPOINT,
        (
            f"--max-model-len={MAX_TOKENS}",
            f"--max-num-seqs={MAX_REQUESTS}",
            "--max-num-batched-tokens=1024",
            "--enable-prefix-caching",
            f"--num-gpu-blocks-override={BLOCKS}",
        ),
        settings.on_cpu(),
    )
    log = tmp_path_factory.mktemp("served") / "server.log"
    # oneDNN keeps a thousand products, one for each new number of rows. That is no
    # leak, and would hide one.
    environ = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16"}
    with server.serving(CHECKPOINT, arguments, environ, log) as running:
        yield running


@pytest.fixture(scope="package")
def questions(served) -> list[Question]:
    """Questions over texts of mixed lengths, two a text, answered right alone."""
    result = []
    with client.client(served.url) as http:
        for length in LENGTHS:
            texts = task.samples("test", 7, length, needles=4, questions=2)
            for text, _ in zip(texts, range(4)):
                for turn, (_, value) in enumerate(text.turns):
                    if client.ask(http, text, turn).is_right(value):
                        result.append(Question(text, turn))
    assert len(result) >= 0.9 * 4 * 2 * len(LENGTHS)
    return result


@pytest.fixture
def still_right(served, questions) -> Iterator[None]:
    """Check after the test that the server lives and answers right."""
    yield
    assert served.is_alive(), served.log.read_text()[-8000:]
    with client.client(served.url) as http:
        for asked in questions[:2]:
            assert client.ask(http, asked.text, asked.turn).is_right(asked.value)
