# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""``vllm memory-plan`` as it is typed, on a machine without a GPU."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tests.v1.core.memory_plan_cases as cases
from vllm.entrypoints.cli import memory_plan


@pytest.fixture
def should_do_global_cleanup_after_test() -> bool:
    """Upstream's conftest asks; every command here is a process of its own."""
    return False


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of a dense model with a byte tokenizer, and no weights."""
    config = dict(
        architectures=["Qwen3ForCausalLM"],
        model_type="qwen3",
        dtype="bfloat16",
        vocab_size=2048,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        eos_token_id=256,
    )
    return cases.write_model(tmp_path_factory.mktemp("models") / "dense", config)


def vllm(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "vllm.entrypoints.cli.main", *args],
        env={**os.environ, "HF_HUB_OFFLINE": "1"} | env,
        capture_output=True,
        text=True,
    )


def test_a_plan_for_a_card(model: Path) -> None:
    run = vllm("memory-plan", str(model), "--gpu", "v100-16gb", "--json")
    assert run.returncode == 0, run.stderr[-2000:]
    plan = json.loads(run.stdout)
    assert plan["fits"]
    assert plan["measured"] is False
    assert plan["device"] == "Tesla V100-SXM2-16GB"
    # Embedding (tied), per layer qkv, o, gate, up and down, norms; rotary's table;
    # four FP32 scales of each attention layer.
    linear = 512 * (512 + 2 * 256) + 512 * 512 + 3 * 512 * 1024
    norms = 2 * (2 * 512 + 2 * 64) + 512
    parameters = 2048 * 512 + 2 * linear + norms
    scales = 2 * 4 * 4
    assert plan["weights"] == (parameters + 8192 * 64) * 2 + scales
    # A page of 16 tokens of two layers, FP16 since a V100 has no BF16.
    assert plan["kv"]["null_block"] == 2 * 16 * 2 * 4 * 64 * 2


def test_what_does_not_fit_exits_with_1(model: Path) -> None:
    run = vllm(
        "memory-plan",
        str(model),
        *("--memory", "0.5", "--max-model-len", "8192", "--max-num-seqs", "8"),
    )
    assert run.returncode == 1
    assert "a CUDA card of capability 8.0" in run.stdout
    assert "SHORT" in run.stdout
    assert "does not fit" in run.stdout


def test_without_a_card_it_is_this_machine(model: Path) -> None:
    """On the CPU, with the KV cache that the environment gives it."""
    run = vllm("memory-plan", str(model), "--json", VLLM_CPU_KVCACHE_SPACE="1")
    assert run.returncode == 0, run.stderr[-2000:]
    plan = json.loads(run.stdout)
    assert plan["device"].startswith("CPU memory node")
    assert plan["explicit"] == 2**30
    assert plan["explicit_setting"] == "VLLM_CPU_KVCACHE_SPACE"


def test_an_unknown_card_names_the_known() -> None:
    run = vllm("memory-plan", "nothing", "--gpu", "v1000")
    assert run.returncode == 2
    assert "--gpu v1000: expected one of v100-16gb" in run.stderr
    assert "Traceback" not in run.stderr


def test_what_upstream_refuses_is_refused_in_its_words(model: Path) -> None:
    unknown = vllm("memory-plan", str(model), "--gpu", "t4", "--no-such-option")
    assert unknown.returncode == 2
    assert "unrecognized arguments: --no-such-option" in unknown.stderr
    missing = vllm("memory-plan", "./no-such-model", "--gpu", "t4")
    assert missing.returncode == 2
    assert "./no-such-model" in missing.stderr
    assert "Traceback" not in missing.stderr
    dtype = vllm("memory-plan", str(model), "--gpu", "t4", "--dtype", "bfloat16")
    assert dtype.returncode == 2
    assert "Bfloat16 is only supported on GPUs" in dtype.stderr


def test_other_commands_are_not_its_business() -> None:
    assert memory_plan.maybe_run(["vllm", "serve", "memory-plan"]) is False
    assert memory_plan.maybe_run(["vllm"]) is False


def test_it_is_listed() -> None:
    parser = argparse.ArgumentParser()
    subparsers = parser.add_subparsers()
    [command] = memory_plan.cmd_init()
    command.subparser_init(subparsers)  # type: ignore[arg-type]
    assert command.name == "memory-plan"
    assert "memory-plan" in parser.format_help()
