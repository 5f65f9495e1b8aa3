# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The truthful profile's steps, run for real on the CPU.

What a GPU adds is the allocator's counters: every step, its metadata, the throw-away
KV cache and its removal are the same code, on both model runners.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.v1.e2e.test_kv_page_plan_cpu import (  # noqa: F401
    dflash,
    hybrid,
    perfect_draft,
    prompt,
    should_do_global_cleanup_after_test,
    windowed,
)

pytestmark = pytest.mark.slow

ENGINE = Path(__file__).parents[1] / "worker" / "profiled_cpu_engine.py"
PROMPTS = [prompt(70), prompt(300, 1)]


@dataclass(frozen=True)
class Server:
    """An engine's limits, and which runner serves."""

    tokens: int = 1024
    sequences: int = 24
    model_len: int = 4096
    second_runner: bool = False


FIRST = Server()
# Triton's interpreter is slow.
SECOND = Server(tokens=160, sequences=20, model_len=512, second_runner=True)


def run(server: Server, profile: bool, **engine) -> dict:
    engine = dict(
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=server.model_len,
        max_num_seqs=server.sequences,
        max_num_batched_tokens=server.tokens,
        gpu_memory_utilization=0.2,
    ) | {k: str(v) if isinstance(v, Path) else v for k, v in engine.items()}
    done = subprocess.run(
        [sys.executable, str(ENGINE)],
        input=json.dumps(dict(engine=engine, profile=profile, prompts=PROMPTS)),
        env=os.environ
        | dict(
            VLLM_CPU_KVCACHE_SPACE="1",
            VLLM_ENABLE_V1_MULTIPROCESSING="0",
            VLLM_USE_V2_MODEL_RUNNER=str(int(server.second_runner)),
            # Two ranks would ask for a memory node each.
            VLLM_CPU_OMP_THREADS_BIND="nobind",
            HF_HUB_OFFLINE="1",
        ),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=600,
    )
    lines = [x for x in done.stdout.splitlines() if x.startswith("RESULT ")]
    assert done.returncode == 0 and len(lines) == 1, done.stdout[-60000:]
    return json.loads(lines[0].removeprefix("RESULT "))


def check(server: Server, drafts: int = 0, slots: int = 0, **engine) -> None:
    """The steps are those planned, and serving is as if there had been none.

    `slots` is what the draft adds to each request of a step.
    """
    profiled, plain = run(server, True, **engine), run(server, False, **engine)
    assert profiled["unsupported"] is None
    ahead = 1 + drafts
    longest = server.tokens - slots
    context = server.model_len - 1 - (drafts and drafts + 1) - longest
    steps = profiled["steps"]

    def peak(requests: int, tokens: int) -> int:
        """By the worker's meter: a byte a token, 100 a request."""
        return tokens + 100 * requests

    expected = {}
    for requests in (1, 16, server.sequences):
        tokens = server.tokens - slots * requests
        expected[f"{requests} x {tokens // requests}"] = peak(requests, tokens)
        expected[f"{requests} x {ahead} decode"] = peak(requests, ahead * requests)
        # The middle one is run once: it stays below the shortest prompts' peak.
        # The longest chunk is run three times, the last after its context.
        assert steps.count([requests, tokens]) == {1: 3, 16: 1}.get(requests, 2)
    expected[f"1 x {longest} after {context}"] = peak(1, longest)
    assert dict(profiled["shapes"]) == expected
    assert profiled["fragmentation"] == 7
    assert profiled["left"] == [0, 0, 0, 0]
    assert profiled["tokens"] == plain["tokens"]
    if drafts:
        # The first runner leaves out the last, whose drafts would be past the
        # model's length.
        assert profiled["drafted"] == len(steps) - (not server.second_runner)


@pytest.mark.parametrize("server", [FIRST, SECOND], ids=["first", "second"])
def test_a_hybrid(hybrid, server):  # noqa: F811
    check(server, model=hybrid, enable_prefix_caching=False)


def test_a_hybrid_with_prefix_caching(hybrid):  # noqa: F811
    """States in blocks of their own, and copied between them (mode "align")."""
    check(SECOND, model=hybrid, enable_prefix_caching=True)


@pytest.mark.parametrize("server", [FIRST, SECOND], ids=["first", "second"])
def test_a_hybrid_with_a_dflash_draft(hybrid, dflash, server):  # noqa: F811
    draft = dict(model=str(dflash), method="dflash", num_speculative_tokens=3)
    check(
        server,
        model=hybrid,
        enable_prefix_caching=False,
        speculative_config=draft,
        drafts=3,
        slots=3,
    )


def test_sliding_windows_with_a_draft_model(windowed, perfect_draft):  # noqa: F811
    draft = dict(
        model=str(perfect_draft), method="draft_model", num_speculative_tokens=3
    )
    check(
        FIRST,
        model=windowed,
        enable_prefix_caching=True,
        speculative_config=draft,
        drafts=3,
        slots=1,
    )


def test_two_ranks_agree(hybrid):  # noqa: F811
    """Both run the same steps, each over half of the heads, or the start would hang."""
    engine = dict(model=hybrid, enable_prefix_caching=False, tensor_parallel_size=2)
    profiled, plain = run(FIRST, True, **engine), run(FIRST, False, **engine)
    first, second = profiled["ranks"]
    # The second rank has room for 15 prompts, the first for all. The longest and the
    # shortest prompts twice, each with a decode step, and the longest chunk.
    assert first == second
    assert len(first["steps"]) == 2 * 2 + 2 * 2 + 1
    assert max(requests for requests, _ in first["steps"]) == 15 < FIRST.sequences
    assert first["left"] == [0, 0, 0, 0]
    assert profiled["tokens"] == plain["tokens"]
