# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The KV page plan, served on the CPU: same tokens, more of them fit.

Tiny models with random weights are written to a temporary folder. Each engine is a
process of its own, forked from one that has imported vLLM: no state is left from
the engine before, and the import, longer than an engine's whole run, is paid once.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)

from tests.v1.byte_tokenizer import write_tokenizer
from vllm.platforms import current_platform

VOCAB, HIDDEN, FFN, HEAD = 512, 128, 256, 64
COMMON = dict(
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    intermediate_size=FFN,
    head_dim=HEAD,
    max_position_embeddings=8192,
    initializer_range=0.2,
    tie_word_embeddings=False,
    eos_token_id=256,
    bos_token_id=None,
    pad_token_id=None,
)
MASK_TOKEN = 257
# Only these tokens ever win, so that a random draft is right now and then.
ACTIVE_TOKENS = 8

# What the engines here and on a GPU have in common. Prompts are served one at a
# time: which of them share a step would depend on when each arrives, and sums would
# be rounded in another order.
ENGINE_PARTS = """
import json, os, sys, torch
from vllm import LLM, SamplingParams

def tensors(caches):
    for cache in caches:
        if isinstance(cache, torch.Tensor):
            yield cache
        else:
            yield from tensors(cache)

def answers(llm, prompts, max_tokens):
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    tokens, cached = [], []
    for prompt in prompts:
        [out] = llm.generate([dict(prompt_token_ids=prompt)], sampling, use_tqdm=False)
        tokens.append(list(out.outputs[0].token_ids))
        cached.append(out.num_cached_tokens)
    metrics = {m.name: getattr(m, "value", None) for m in llm.get_metrics()}
    return dict(
        tokens=tokens,
        cached=cached,
        capacity=llm.llm_engine.vllm_config.cache_config.kv_cache_size_tokens,
        accepted=metrics.get("vllm:spec_decode_num_accepted_tokens"),
    )
"""

# Reads a task a line, forks an engine for it, and answers with the exit status.
SERVER = (
    ENGINE_PARTS
    + """
import faulthandler, traceback
import vllm.v1.engine.core, vllm.v1.worker.cpu_worker

def check_views(worker):
    # The layers whose view reaches beyond the memory that it is a view of. All
    # memory becomes NaN in BF16, FP8 and FP32: a read of what was never written
    # changes tokens or guesses.
    outside = []
    for i, view in enumerate(tensors(worker.model_runner.kv_caches)):
        storage = view.untyped_storage()
        steps = zip(view.shape, view.stride())
        last = view.storage_offset() + sum((n - 1) * step for n, step in steps)
        if (last + 1) * view.element_size() > storage.nbytes():
            outside.append(i)
        torch.empty(0, dtype=torch.uint8).set_(storage).fill_(0xFF)
    return outside

def serve(task):
    os.environ["VLLM_KV_PAGE_PLAN"] = task["plan"]
    llm = LLM(**task["engine"])
    [views_outside] = llm.collective_rpc(check_views)
    return answers(llm, task["prompts"], 16) | dict(views_outside=views_outside)

def child(task):
    log = os.open(task["log"], os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    # A damaged heap may also hang.
    faulthandler.dump_traceback_later(180, exit=True)
    status = 1
    try:
        with open(task["result"], "w") as file:
            json.dump(serve(task), file)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)

for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        child(json.loads(line))
    print("STATUS", os.waitpid(pid, 0)[1], flush=True)
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
    views_outside: list[int]
    log: str


Serve = Callable[..., Served]


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def write_weights(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    save_file(weights, folder / "model.safetensors", metadata=dict(format="pt"))


def write_model(folder: Path, model: torch.nn.Module, **config) -> Path:
    model.bfloat16().save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory) -> Path:
    """Six gated-delta-net layers and two of full attention, two KV heads."""
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        **COMMON,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=HEAD,
        linear_value_head_dim=HEAD,
        layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 2,
    )
    folder = tmp_path_factory.mktemp("hybrid")
    write_model(folder, Qwen3_5ForCausalLM(config), mamba_ssm_dtype="float32")
    weights = read_weights(folder)
    weights["lm_head.weight"][ACTIVE_TOKENS:] = 0
    for name, weight in weights.items():
        # States that hardly decay, so that a wrong one changes the tokens.
        if name.endswith("A_log"):
            weight.fill_(-6)
    write_weights(folder, weights)
    return folder


def dflash_weights(config: dict[str, Any], deviation: float) -> dict[str, torch.Tensor]:
    """Random weights of a DFlash draft that reads two layers of its target, always
    the same: matrices of this standard deviation, norms of ones."""
    hidden, inner, head = (
        config[name] for name in ("hidden_size", "intermediate_size", "head_dim")
    )
    queries = config["num_attention_heads"] * head
    keys = config["num_key_value_heads"] * head
    matrices = dict(
        q_proj=(queries, hidden),
        k_proj=(keys, hidden),
        v_proj=(keys, hidden),
        o_proj=(hidden, queries),
    )
    shapes: dict[str, tuple[int, ...]] = {
        "fc": (hidden, 2 * hidden),
        "hidden_norm": (hidden,),
        "norm": (hidden,),
    }
    for i in range(config["num_hidden_layers"]):
        layer = f"layers.{i}."
        shapes |= {f"{layer}self_attn.{n}": s for n, s in matrices.items()}
        shapes |= {f"{layer}self_attn.{n}": (head,) for n in ("q_norm", "k_norm")}
        shapes |= {f"{layer}mlp.{n}_proj": (inner, hidden) for n in ("gate", "up")}
        shapes[f"{layer}mlp.down_proj"] = (hidden, inner)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[layer + norm] = (hidden,)
    torch.manual_seed(1)
    dtype = getattr(torch, config["dtype"])
    return {
        f"{name}.weight": (
            torch.randn(shape) * deviation if len(shape) > 1 else torch.ones(shape)
        ).to(dtype)
        for name, shape in shapes.items()
    }


@pytest.fixture(scope="module")
def dflash(tmp_path_factory) -> Path:
    """A DFlash draft (first version) with three KV heads, so 1.5 times as wide."""
    folder = tmp_path_factory.mktemp("dflash")
    heads, kv_heads, layers = 6, 3, 2
    config = dict(
        architectures=["DFlashDraftModel"],
        model_type="qwen3",
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=HEAD,
        max_position_embeddings=8192,
        dtype="bfloat16",
        rms_norm_eps=1e-6,
        hidden_act="silu",
        tie_word_embeddings=False,
        attention_bias=False,
        block_size=4,
        num_target_layers=8,
        layer_types=["full_attention"] * layers,
        dflash_config=dict(mask_token_id=MASK_TOKEN, target_layer_ids=[1, 2]),
    )
    (folder / "config.json").write_text(json.dumps(config))
    write_weights(folder, dflash_weights(config, 0.1))
    write_tokenizer(folder)
    return folder


def windowed_config(kv_heads: int, layer_types: list[str]) -> Gemma3TextConfig:
    rope = dict(rope_type="default", rope_theta=10_000.0)
    return Gemma3TextConfig(
        **COMMON,
        num_hidden_layers=len(layer_types),
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        sliding_window=1024,
        layer_types=layer_types,
        query_pre_attn_scalar=HEAD,
        rope_parameters=dict(sliding_attention=rope, full_attention=rope),
    )


@pytest.fixture(scope="module")
def windowed(tmp_path_factory) -> Path:
    """Sliding-window and full attention in turns; the last two layers of the
    four add nothing, so that a draft of two layers can be the same function."""
    torch.manual_seed(2)
    config = windowed_config(2, ["sliding_attention", "full_attention"] * 2)
    folder = tmp_path_factory.mktemp("windowed")
    write_model(folder, Gemma3ForCausalLM(config))
    weights = read_weights(folder)
    # What was read counts more than the last token, so that outputs vary.
    weights["model.embed_tokens.weight"] *= 0.1
    for layer in (2, 3):
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            weights[f"model.layers.{layer}.{name}.weight"].zero_()
    write_weights(folder, weights)
    return folder


@pytest.fixture(scope="module")
def perfect_draft(windowed, tmp_path_factory) -> Path:
    """The same function with full attention and every KV head twice: within the
    window it guesses every token, from a KV cache of twice the width."""
    config = windowed_config(4, ["full_attention"] * 2)
    folder = tmp_path_factory.mktemp("draft")
    write_model(folder, Gemma3ForCausalLM(config))
    names = read_weights(folder)
    weights = {n: w for n, w in read_weights(windowed).items() if n in names}
    for name, weight in weights.items():
        if ".k_proj." in name or ".v_proj." in name:
            heads = weight.view(2, HEAD, HIDDEN).repeat_interleave(2, dim=0)
            weights[name] = heads.reshape(4 * HEAD, HIDDEN).contiguous()
    write_weights(folder, weights)
    return folder


@pytest.fixture(scope="module")
def serve(tmp_path_factory) -> Iterator[Serve]:
    """Serve prompts on an engine of its own with the page plan on or off."""
    folder = tmp_path_factory.mktemp("serve")
    env = os.environ | dict(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        HF_HUB_OFFLINE="1",
        OMP_NUM_THREADS="1",
        # Kernels' scratchpads lie between other things on the heap, so that a
        # write beyond one is a crash and not a matter of luck.
        GLIBC_TUNABLES="glibc.malloc.mmap_threshold=33554432",
    )
    with (folder / "server.log").open("w") as errors:
        server = subprocess.Popen(
            [sys.executable, "-c", SERVER],
            env=env,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
        )
    assert server.stdin is not None and server.stdout is not None
    count = 0

    def run(plan: bool, prompts: list[list[int]], **engine) -> Served:
        nonlocal count
        count += 1
        log, result = folder / f"{count}.log", folder / f"{count}.json"
        engine = dict(
            dtype="bfloat16",
            enforce_eager=True,
            max_model_len=4096,
            max_num_seqs=4,
            max_num_batched_tokens=1152,
            kv_cache_memory_bytes=64 << 20,
            disable_log_stats=False,
        ) | {k: str(v) if isinstance(v, Path) else v for k, v in engine.items()}
        # One prompt at a time: which of them share a step, and so where their
        # chunks end, would depend on when each arrives; sums are then rounded in
        # another order, and near ties of the logits flip.
        task = dict(
            plan=str(int(plan)),
            engine=engine,
            prompts=prompts,
            log=str(log),
            result=str(result),
        )
        server.stdin.write(json.dumps(task) + "\n")
        server.stdin.flush()
        lines = iter(server.stdout.readline, "")
        status = next((x for x in lines if x.startswith("STATUS ")), "no answer")
        text = (log if log.exists() else folder / "server.log").read_text()
        assert status == "STATUS 0\n", f"{status}\n{text[-60000:]}"
        return Served(**json.loads(result.read_text()), log=text)

    yield run
    # It holds nothing; an interpreter full of torch takes seconds to leave.
    server.kill()
    server.wait()


def prompt(length: int, seed: int = 0) -> list[int]:
    return [(i * i * 7 + i * (3 + seed) + seed) % 250 for i in range(length)]


def test_a_hybrid_with_a_wider_dflash_draft(serve, hybrid, dflash):
    """Same tokens, as many drafts accepted, and more fits."""
    engine = dict(
        model=hybrid,
        enable_prefix_caching=False,
        speculative_config=dict(
            model=str(dflash), method="dflash", num_speculative_tokens=3
        ),
    )
    prompts = [prompt(700), prompt(1000, 1), prompt(2300, 2)]
    on = serve(True, prompts, **engine)
    off = serve(False, prompts, **engine)
    assert on.views_outside == off.views_outside == []
    assert on.tokens == off.tokens
    # Random, but the drafts read the same KV: not one guess may differ.
    assert on.accepted == off.accepted
    assert on.accepted
    assert on.capacity > 1.15 * off.capacity
    assert "KV pages: " in on.log and "avoided: the largest page" in on.log
    assert "Setting attention block size" not in on.log
    assert "Setting attention block size" in off.log
    assert "KV pages: " not in off.log


# A prompt, prompts that share its start, and repeats: hits of several lengths.
SHARED_PREFIXES = [
    prompt(2000),
    prompt(1290) + prompt(30, 5),
    prompt(1700) + prompt(100, 6),
    prompt(2600),
    prompt(2000),
    prompt(1700) + prompt(100, 6),
    prompt(1290) + prompt(30, 5),
]


def hits(served: Served) -> int:
    return sum(served.cached)


def agreement(one: Served, other: Served) -> float:
    """Share of equal tokens. A prefix hit moves the chunks' ends, so sums are
    rounded in another order and a token may flip; a wrong state or block leaves
    no more agreement than chance."""
    pairs = [
        a == b
        for tokens, expected in zip(one.tokens, other.tokens)
        for a, b in zip(tokens, expected)
    ]
    return sum(pairs) / len(pairs)


def test_prefix_caching_of_a_windowed_model_with_a_draft(
    serve, windowed, perfect_draft
):
    """A plain draft model whose pages are twice as large, prefix caching on."""
    prompts = [
        prompt(700),
        prompt(590) + prompt(30, 5),
        prompt(690) + prompt(100, 6),
        prompt(700),
        prompt(690) + prompt(100, 6),
        prompt(590) + prompt(30, 5),
    ]
    engine = dict(model=windowed, enable_prefix_caching=True)
    draft = dict(
        model=str(perfect_draft), method="draft_model", num_speculative_tokens=3
    )
    on = serve(True, prompts, **engine, speculative_config=draft)
    off = serve(False, prompts, **engine, speculative_config=draft)
    plain = serve(True, prompts, **engine)
    assert on.views_outside == off.views_outside == plain.views_outside == []
    assert agreement(on, plain) > 0.6
    # Sixteen tokens a request: three guessed, one more from the target, four
    # times; the draft read the right blocks.
    assert on.accepted is not None and on.accepted > 0.8 * 6 * 12
    assert hits(on) >= hits(off) > 0
    assert on.capacity > off.capacity


@pytest.mark.skipif(
    not (torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported())
    or not current_platform.is_cpu(),
    reason="FP8 KV on the CPU needs AVX-512 or AMX.",
)
def test_prefix_caching_of_a_hybrid_with_two_kv_widths(serve, hybrid):
    """One full-attention layer keeps BF16 KV next to FP8: states and prefix
    caching, without a draft, since the CPU cannot serve both."""
    engine = dict(
        model=hybrid,
        kv_cache_dtype="fp8",
        kv_cache_dtype_skip_layers=["7"],
        # Seven of the smallest blocks, three and a half of the states'.
        max_num_batched_tokens=1350,
    )
    on = serve(True, SHARED_PREFIXES, enable_prefix_caching=True, **engine)
    off = serve(False, SHARED_PREFIXES, enable_prefix_caching=True, **engine)
    uncached = serve(True, SHARED_PREFIXES, enable_prefix_caching=False, **engine)
    assert on.views_outside == off.views_outside == uncached.views_outside == []
    assert agreement(on, uncached) > 0.6
    assert hits(on) >= hits(off) > 0 == hits(uncached)
    assert on.capacity > 1.15 * off.capacity
