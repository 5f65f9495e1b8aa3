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
from collections.abc import Sequence
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
from tests.v1.worker.vision_checkpoint import (
    IMAGE,
    TINY_WIDTH,
    VISION_END,
    VISION_START,
    multimodal,
    write_multimodal,
)

pytestmark = pytest.mark.slow

ENGINE = Path(__file__).parents[1] / "worker" / "profiled_cpu_engine.py"
PROMPTS = [prompt(70), prompt(300, 1)]
IMAGE_TOKENS, VIDEO_TOKENS = 60, 16
"""Of the largest ones; a token is of 32 x 32 pixels, in a video of two frames."""


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


def run(server: Server, profile: bool, images: Sequence = (), **engine) -> dict:
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
        input=json.dumps(
            dict(
                engine=engine,
                profile=profile,
                prompts=PROMPTS + [[VISION_START, IMAGE, VISION_END, 5]] * len(images),
                images={len(PROMPTS) + i: size for i, size in enumerate(images)},
            )
        ),
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


@pytest.fixture(scope="module")
def vision(tmp_path_factory) -> Path:
    """The hybrid's layout with a vision tower, without weights."""
    folder = tmp_path_factory.mktemp("vision")
    return write_multimodal(folder, multimodal(), IMAGE_TOKENS, VIDEO_TOKENS)


@pytest.mark.parametrize("server", [FIRST, SECOND], ids=["first", "second"])
def test_a_hybrid_with_a_vision_tower(vision, server):
    """As many of the largest images as a step encodes, before the language model and
    next to a full cache; then images are served as if there had been none."""
    engine = dict(
        model=vision,
        load_format="dummy",
        enable_prefix_caching=False,
        limit_mm_per_prompt=dict(image=2, video=1),
        images=[(64, 64), (256, 192), (320, 192)],
    )
    profiled, plain = run(server, True, **engine), run(server, False, **engine)
    assert profiled["unsupported"] is None
    images = server.tokens // IMAGE_TOKENS
    item = 2 * TINY_WIDTH * IMAGE_TOKENS
    cache = 2 * TINY_WIDTH * server.tokens
    assert profiled["encoder"] == [images * item, cache]
    assert profiled["kept"] == images * item
    assert profiled["steps"][-2:] == [[images, server.tokens]] * 2
    shapes = dict(profiled["shapes"])
    # By the worker's meter, which counts no outputs: 100 a request, 1,000,000 an image.
    name = f"{images} x {server.tokens // images} with {images} images"
    peak = server.tokens + (100 + 10**6) * images
    assert shapes[name] == peak + cache - images * item
    assert shapes[f"1 x {server.tokens}"] == server.tokens + 100 + cache
    assert profiled["left"] == [0, 0, 0, 0]
    assert profiled["cached"] == [3, 0]
    assert profiled["tokens"] == plain["tokens"]
    assert len(set(map(tuple, plain["tokens"]))) > 1


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
