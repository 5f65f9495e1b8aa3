# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The KV page plan, served on a GPU: the same answers, more of them fit.

The trained retrieval model with an FP8 KV cache, and a DFlash draft with random
weights whose FP16 KV is eight times as wide: three sliding-window layers and one of
full attention. Each engine is a process of its own. The first starts alone, so that
it tunes the Triton kernels and the others find what it chose; then those with the
plan on start together, then those with it off. Four minutes on an H200.
"""

import itertools
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.needle import task
from tests.v1.e2e.test_kv_page_plan_cpu import (
    ENGINE_PARTS,
    dflash_weights,
    write_weights,
)
from tools.demo import checkpoint

pytestmark = [pytest.mark.cuda, pytest.mark.slow]

TARGET = Path(task.__file__).parent / "checkpoints" / "dense-fp16"
HIDDEN, HEAD = 256, 128
SPACE = ord(" ")
WINDOW = 1024
GUESSES = 3
MAX_TOKENS = 8192
TIMEOUT_S = 400

# Serves the prompts of a task.
ENGINE = (
    ENGINE_PARTS
    + """
def poison(worker, num_blocks):
    # All blocks but the null block, which stands for what a window left behind,
    # hold NaN in FP8, FP16 and FP32: a read of what was neither written nor zeroed
    # changes tokens. Returns the layers that do so.
    count = 0
    for view in tensors(worker.model_runner.kv_caches):
        blocks = view[view.shape[0] // num_blocks :]
        if blocks.is_floating_point():
            blocks.fill_(float("nan"))
        else:
            blocks.view(torch.uint8).fill_(255)
        count += 1
    return count

task = json.load(open(sys.argv[1]))
llm = LLM(**task["engine"])
cache = llm.llm_engine.vllm_config.cache_config
poisoned = 0
if task["poison"]:
    [poisoned] = llm.collective_rpc(poison, args=(cache.num_gpu_blocks,))
result = answers(llm, task["prompts"], 48) | dict(poisoned=poisoned)
json.dump(result, open(sys.argv[2], "w"))
"""
)


@pytest.fixture
def should_do_global_cleanup_after_test() -> bool:
    """Upstream's conftest asks; every engine here is a process of its own."""
    return False


@dataclass
class Served:
    tokens: list[list[int]]
    cached: list[int]
    capacity: int
    accepted: int | None
    poisoned: int
    log: str


@dataclass(frozen=True)
class Question:
    """A prompt, and the tokens of its exact answer, the end token included."""

    prompt: list[int]
    answer: list[int]

    def is_right(self, tokens: list[int]) -> bool:
        return tokens[: len(self.answer)] == self.answer


def question(sample: task.Sample, turn: int) -> Question:
    ids, is_answer = task.Sample(sample.text, (sample.turns[turn],)).tokens()
    cut = is_answer.index(True)
    return Question(ids[:cut], ids[cut:])


def texts(length: int) -> list[task.Sample]:
    drawn = task.samples("test", 41, length, needles=8, questions=2)
    return list(itertools.islice(drawn, 3))


def filler(length: int) -> list[int]:
    """The start of a text, to be continued: less sure of each token than answers,
    and a space now and then, which the draft guesses."""
    ids, _ = texts(2 * length)[0].tokens()
    return ids[:length]


QUESTIONS = [question(text, 0) for n in (700, 2100, 6000) for text in texts(n)]
PLAIN = [q.prompt for q in QUESTIONS] + [filler(n) for n in (900, 3000)]

LONG = texts(6000)[0]
REPEATED = [question(LONG, 0), question(LONG, 0), question(LONG, 1)]
# A text, the same again, another question; then three other ends after three
# quarters of it: where the first of them leaves the text, a state is kept.
ENDS = [REPEATED[0].prompt[:4500] + filler(n) for n in (300, 400, 500)]
SHARED = [q.prompt for q in REPEATED] + ENDS

DRAFT, NO_DRAFT, CACHING, NAN = "draft", "no draft", "prefix caching", "NaN"
PROMPTS = {DRAFT: PLAIN, NO_DRAFT: PLAIN, CACHING: SHARED, NAN: PLAIN}
Key = tuple[str, bool]
"""What is served, and whether the page plan is on."""

WAVES: tuple[tuple[Key, ...], ...] = (
    ((DRAFT, True),),
    ((NO_DRAFT, True), (CACHING, True), (NAN, True)),
    ((DRAFT, False), (NO_DRAFT, False), (CACHING, False)),
)


def write_draft(folder: Path, layer_types: list[str], dtype: torch.dtype) -> None:
    """A DFlash draft (first version) with random weights and two KV heads.

    A slot to guess holds the embedding of a space, so that guesses are right now
    and then; what attention adds makes the others."""
    layers, heads, kv_heads = len(layer_types), 4, 2
    config = dict(
        architectures=["DFlashDraftModel"],
        model_type="qwen3",
        vocab_size=259,
        hidden_size=HIDDEN,
        intermediate_size=HIDDEN,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=HEAD,
        max_position_embeddings=262144,
        dtype=str(dtype).removeprefix("torch."),
        rms_norm_eps=1e-6,
        hidden_act="silu",
        tie_word_embeddings=False,
        rope_theta=1e7,
        attention_bias=False,
        block_size=GUESSES + 1,
        num_target_layers=8,
        layer_types=layer_types,
        sliding_window=WINDOW,
        use_sliding_window=True,
        max_window_layers=0,
        dflash_config=dict(mask_token_id=SPACE, target_layer_ids=[1, 5]),
    )
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    write_weights(folder, dflash_weights(config, 0.05))
    for name, document in checkpoint.tokenizer_files().items():
        (folder / name).write_text(json.dumps(document))


def engine_options(what: str, draft: Path) -> dict[str, Any]:
    """The engine's arguments on a GPU."""
    options: dict[str, Any] = dict(
        model=str(TARGET),
        dtype="float16",
        kv_cache_dtype="fp8",
        attention_backend="TRITON_ATTN",
        additional_config=dict(gdn_prefill_backend="triton"),
        enforce_eager=True,
        enable_prefix_caching=what == CACHING,
        max_model_len=MAX_TOKENS,
        max_num_seqs=4,
        # Four blocks of the plan, one of upstream's.
        max_num_batched_tokens=2400,
        kv_cache_memory_bytes=128 << 20,
        gpu_memory_utilization=0.1,
        disable_log_stats=False,
    )
    if what != NO_DRAFT:
        options["speculative_config"] = dict(
            model=str(draft),
            method="dflash",
            num_speculative_tokens=GUESSES,
            kv_cache_dtype="auto",
        )
    return options


class Engine:
    """One process that serves and ends."""

    def __init__(self, folder: Path, what: str, plan: bool, options: dict) -> None:
        name = f"{what.replace(' ', '-')}-{'on' if plan else 'off'}"
        self.log, self.result = folder / f"{name}.log", folder / f"{name}.json"
        asked = folder / f"{name}.task.json"
        prompts = PROMPTS[what]
        asked.write_text(
            json.dumps(dict(engine=options, prompts=prompts, poison=what == NAN))
        )
        environ = os.environ | dict(
            VLLM_KV_PAGE_PLAN=str(int(plan)),
            VLLM_ENABLE_V1_MULTIPROCESSING="0",
            VLLM_USE_FLASHINFER_SAMPLER="0",
            # Others start on this card meanwhile.
            VLLM_TRUTHFUL_PROFILE="0",
            VLLM_NO_USAGE_STATS="1",
            HF_HUB_OFFLINE="1",
        )
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", ENGINE, str(asked), str(self.result)],
                env=environ,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def wait(self) -> None:
        try:
            self.process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def served(self) -> Served:
        log = self.log.read_text(errors="replace")
        assert self.process.returncode == 0, f"{self.process.returncode}\n{log[-9000:]}"
        return Served(**json.loads(self.result.read_text()), log=log)


@pytest.fixture(scope="module")
def engines(tmp_path_factory) -> dict[Key, Engine]:
    """Every engine, ended."""
    folder = tmp_path_factory.mktemp("engines")
    draft = folder / "draft"
    layer_types = ["sliding_attention"] * 3 + ["full_attention"]
    write_draft(draft, layer_types, torch.float16)
    result: dict[Key, Engine] = {}
    for wave in WAVES:
        for what, plan in wave:
            options = engine_options(what, draft)
            result[what, plan] = Engine(folder, what, plan, options)
        for key in wave:
            result[key].wait()
    return result


def right(served: Served) -> list[bool]:
    return [q.is_right(tokens) for q, tokens in zip(QUESTIONS, served.tokens)]


def test_tokens_and_guesses_are_the_same(engines):
    on, off = engines[DRAFT, True].served(), engines[DRAFT, False].served()
    assert on.tokens == off.tokens
    # The guesses read the draft's own KV: not one may differ.
    assert on.accepted == off.accepted
    assert on.accepted


def test_more_tokens_fit(engines):
    on, off = engines[DRAFT, True].served(), engines[DRAFT, False].served()
    assert on.capacity > 1.15 * off.capacity
    assert "KV pages: " in on.log and "avoided: the largest page" in on.log
    assert "Setting attention block size" in off.log
    assert "KV pages: " not in off.log


def test_answers_are_those_without_a_draft(engines):
    """Slots, block tables and zeroed blocks of every group are right."""
    on, plain = engines[DRAFT, True].served(), engines[NO_DRAFT, True].served()
    assert right(on) == right(plain)
    assert sum(right(plain)) >= len(QUESTIONS) - 1


def test_no_read_of_what_was_never_written(engines):
    on, poisoned = engines[DRAFT, True].served(), engines[NAN, True].served()
    assert poisoned.poisoned
    assert poisoned.tokens == on.tokens
    assert poisoned.accepted == on.accepted


def test_prefixes_are_found_as_often(engines):
    on, off = engines[CACHING, True].served(), engines[CACHING, False].served()
    assert on.cached[0] == off.cached[0] == 0
    assert sum(on.cached) >= sum(off.cached) > 0, (on.cached, off.cached)
    # A repeated text, and another question about it. Of the other ends nothing is
    # found with a draft: the block that DFlash drops is the one that has a state.
    assert min(on.cached[1:3]) > 0, on.cached
    for q, tokens in zip(REPEATED, on.tokens):
        assert q.is_right(tokens)


def test_one_page_size_stays_as_it_is(engines):
    """Without a draft the plan changes nothing."""
    on, off = engines[NO_DRAFT, True].served(), engines[NO_DRAFT, False].served()
    assert on.capacity == off.capacity
    assert on.tokens == off.tokens
