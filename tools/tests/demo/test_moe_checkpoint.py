# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The mixture-of-experts variant of the demo's checkpoint, as made and as served."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

from tools.demo import checkpoint

from . import served_moe

EXPERTS = checkpoint.Experts()
HIDDEN = checkpoint.Geometry.hidden_size
TENSORS_SHA256 = "6e9a69ce95942d6f1ea25d9ce6347f203b6ecbe2474de5d94b66753eaf5a9bfa"
"""Of names and bytes; changes with the geometry and the seed, never by machine."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint.write(tmp_path_factory.mktemp("moe") / "fp8-moe", "fp8-moe")


@pytest.fixture(scope="module")
def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_weights_are_pinned(tensors):
    sha = hashlib.sha256()
    for name in sorted(tensors):
        sha.update(name.encode())
        data = tensors[name].contiguous().reshape(-1).view(torch.uint8)
        sha.update(data.numpy().tobytes())
    assert sha.hexdigest() == TENSORS_SHA256


def test_every_expert_is_quantised_and_no_router_is(folder, tensors):
    config = json.loads((folder / "config.json").read_text())
    kept = config["quantization_config"]["modules_to_not_convert"]
    width = EXPERTS.moe_intermediate_size
    for layer in range(checkpoint.Geometry.num_hidden_layers):
        moe = f"model.layers.{layer}.mlp"
        names = [f"{moe}.experts.{i}" for i in range(EXPERTS.num_experts)]
        for name in [*names, f"{moe}.shared_expert"]:
            for part in ("gate_proj", "up_proj", "down_proj"):
                weight = tensors[f"{name}.{part}.weight"]
                scale = tensors[f"{name}.{part}.weight_scale_inv"]
                assert weight.dtype == torch.float8_e4m3fn
                assert weight.numel() == width * HIDDEN == 128 * 128 * scale.numel()
        for gate, rows in (("gate", EXPERTS.num_experts), ("shared_expert_gate", 1)):
            assert tensors[f"{moe}.{gate}.weight"].shape == (rows, HIDDEN)
            assert tensors[f"{moe}.{gate}.weight"].dtype == torch.bfloat16
            assert f"{moe}.{gate}" in kept
    assert not [name for name in tensors if ".mlp.gate_proj" in name]


def test_transformers_finds_the_same_model(folder, tensors):
    """Unquantised: transformers' own FP8 needs a GPU."""
    config = Qwen3_5MoeTextConfig.from_pretrained(folder)
    del config.quantization_config
    with torch.device("meta"):
        model = Qwen3_5MoeForCausalLM(config)
    names = dict(model.named_parameters())
    moe = "model.layers.0.mlp"
    assert names[f"{moe}.experts.down_proj"].shape == (
        EXPERTS.num_experts,
        HIDDEN,
        EXPERTS.moe_intermediate_size,
    )
    # It keeps the experts of a layer in two tensors; the rest is one for one.
    ours = {
        name
        for name in tensors
        if ".experts." not in name and not name.endswith("_scale_inv")
    }
    assert ours == {name for name in names if ".experts." not in name}


def served(folder: Path, cache: Path, *settings: str) -> list[dict[str, Any]]:
    run = subprocess.run(
        [sys.executable, served_moe.__file__, str(folder), *settings],
        env={
            **os.environ,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_CACHE_ROOT": str(cache),
        },
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    results: list[dict[str, Any]] = json.loads(run.stdout.splitlines()[-1])
    return results


BATCH, CHUNK, TILE = range(3)


def parts(result: dict[str, Any], of: int) -> set[int]:
    return {call[of] for call in result["calls"]}


def expect_bounded(result: dict[str, Any]) -> None:
    # 1 MiB by 2 * (2 * 128 + 128) + 2 * 4 bytes a token, in whole 64s.
    assert max(parts(result, CHUNK)) == 1344 and parts(result, TILE) == {128, HIDDEN}
    # Decode is never cut, and takes whole rows.
    for batch, chunk, tile in result["calls"]:
        assert batch > 64 or (chunk, tile) == (batch, HIDDEN)


def test_bounded_and_unbounded_scratch_give_the_same_tokens(folder, tmp_path):
    whole, bounded = served(folder, tmp_path, "0,0,eager", "1,auto,eager")
    assert [len(tokens) for tokens in whole["tokens"]] == [8, 8]
    assert len(set(whole["tokens"][0])) > 1
    assert bounded["tokens"] == whole["tokens"]
    assert all(call[BATCH] == call[CHUNK] for call in whole["calls"])
    assert parts(whole, TILE) == {HIDDEN} and max(parts(whole, BATCH)) > 1344
    expect_bounded(bounded)


@pytest.mark.slow
def test_torch_compile_does_not_fold_the_chunks(folder, tmp_path):
    """Its first batch is the longest, which is cut; later ones are not."""
    settings = ("0,0,compiled", "1,auto,compiled", "auto,37,compiled")
    whole, bounded, chunked = served(folder, tmp_path, *settings)
    assert bounded["tokens"] == chunked["tokens"] == whole["tokens"]
    expect_bounded(bounded)
    assert max(parts(chunked, CHUNK)) == 37
