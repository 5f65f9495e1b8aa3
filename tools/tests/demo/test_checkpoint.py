# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The demo's checkpoint: same bytes, right names and shapes, a sound tokenizer."""

import hashlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoTokenizer, GenerationConfig, Qwen3_5ForCausalLM

from tools.demo import checkpoint

REPO = Path(__file__).resolve().parents[3]
TENSORS_SHA256 = "492a810e4833c440fb4a2eb50abb7b83717f714d8679286c09e7e8469cd35d01"
"""Of names and bytes; changes with the geometry and the seed, never by machine."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return checkpoint.write(tmp_path_factory.mktemp("checkpoint") / "none")


@pytest.fixture(scope="module")
def tensors(folder) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


def digests(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.iterdir()
    }


def test_two_processes_write_the_same_bytes(tmp_path, folder):
    for name, seed, threads in (("a", "1", "1"), ("b", "2", "2")):
        subprocess.run(
            [sys.executable, "-m", "tools.demo.checkpoint", tmp_path / name],
            cwd=REPO,
            env={**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": threads},
            check=True,
        )
    assert digests(tmp_path / "a") == digests(tmp_path / "b") == digests(folder)
    assert "model.safetensors" in digests(folder)


def test_weights_are_pinned(tensors):
    sha = hashlib.sha256()
    for name in sorted(tensors):
        sha.update(name.encode())
        sha.update(tensors[name].view(torch.uint8).numpy().tobytes())
    assert sha.hexdigest() == TENSORS_SHA256


def test_a_broken_folder_is_mended_and_a_good_file_left_alone(tmp_path):
    checkpoint.write(tmp_path)
    want = digests(tmp_path)
    weights = tmp_path / "model.safetensors"
    with weights.open("r+b") as file:
        file.truncate(1000)
    (tmp_path / "tokenizer.json").unlink()
    config = (tmp_path / "config.json").stat()
    checkpoint.write(tmp_path)
    assert digests(tmp_path) == want
    after = (tmp_path / "config.json").stat()
    assert (after.st_ino, after.st_mtime_ns) == (config.st_ino, config.st_mtime_ns)


def test_unknown_variant_is_named():
    with pytest.raises(ValueError, match=r"quant='int3'.*expected one of none"):
        checkpoint.files("int3")


def test_a_place_that_cannot_be_written_is_one_clear_error(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert checkpoint.main([str(tmp_path / "file" / "out")]) == 1
    assert "cannot write the checkpoint to OUT=" in capsys.readouterr().err


def test_model_card_says_that_the_weights_are_random(folder):
    card = (folder / "README.md").read_text()
    assert "weights are random" in card
    size = (folder / "model.safetensors").stat().st_size / 2**20
    assert f"{size:.1f} MiB" in card
    assert size < 8


def test_layers_are_hybrid_and_widths_suit_the_kernels(folder, tensors):
    config = json.loads((folder / "config.json").read_text())
    assert set(config["layer_types"]) == {"linear_attention", "full_attention"}
    unquantised = ("embed_tokens", "lm_head", "in_proj_a", "in_proj_b", "conv1d")
    linear = {
        name: tensor.shape
        for name, tensor in tensors.items()
        if tensor.dim() == 2 and not any(part in name for part in unquantised)
    }
    # Six per gated delta net layer with its MLP, seven per attention layer.
    assert len(linear) == 3 * 6 + 7
    assert {n % 64 or k % 64 for n, k in linear.values()} == {0}


def test_activations_keep_to_fp16s_range(tensors):
    # |x| <= 16 before a projection (RMSNorm of 256 values), so |x @ w| <= 16 *
    # sqrt(K) * bound * sqrt(K): far below 65504 for every tensor.
    assert all(torch.isfinite(t).all() for t in tensors.values())
    assert max(t.abs().max() for t in tensors.values()) < 4


def test_transformers_finds_every_tensor_and_no_other(folder):
    loaded: Any = Qwen3_5ForCausalLM.from_pretrained(folder, output_loading_info=True)
    model, info = loaded
    assert not any(info.values()), info
    logits = model(torch.tensor([list(b"Hello")])).logits
    assert torch.isfinite(logits).all()


def test_vllm_sets_every_element_from_the_file_and_leaves_none_over(folder, tensors):
    from vllm.config import set_current_vllm_config
    from vllm.distributed import (
        cleanup_dist_env_and_memory,
        init_distributed_environment,
        initialize_model_parallel,
    )
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.network_utils import get_open_port

    config = EngineArgs(
        model=str(folder), dtype="bfloat16", enforce_eager=True, max_model_len=2048
    ).create_engine_config()
    with set_current_vllm_config(config):
        try:
            method = f"tcp://127.0.0.1:{get_open_port()}"
            init_distributed_environment(1, 0, method, 0, "gloo")
            initialize_model_parallel()
            model = initialize_model(config)
            parameters = dict(model.named_parameters())
            for parameter in parameters.values():
                parameter.data.fill_(math.nan)
            loaded = model.load_weights(iter(tensors.items()))
        finally:
            cleanup_dist_env_and_memory()
    assert loaded == set(parameters)
    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    elements = 0
    for name, parameter in parameters.items():
        # vLLM pads the vocabulary to a multiple of 64 rows; the file has none.
        padded = name in ("model.embed_tokens.weight", "lm_head.weight")
        values = parameter.data[:vocab] if padded else parameter.data
        assert not values.isnan().any(), f"{name} is not filled by the checkpoint"
        elements += values.numel()
    assert elements == sum(tensor.numel() for tensor in tensors.values())


def test_special_tokens_and_generation_config_agree(folder, tokenizer):
    for i, token in enumerate(checkpoint.SPECIAL_TOKENS):
        assert tokenizer.convert_tokens_to_ids(token) == 256 + i
    generation = GenerationConfig.from_pretrained(folder)
    assert tokenizer.eos_token_id in generation.eos_token_id
    assert generation.pad_token_id == tokenizer.pad_token_id
    config = json.loads((folder / "config.json").read_text())
    assert config["eos_token_id"] == tokenizer.eos_token_id == checkpoint.IM_END_ID
    assert config["vocab_size"] == len(tokenizer)


def test_chat_template(tokenizer):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "  2 < 3?\n"},
        {"role": "assistant", "content": "Ja – 是"},
        {"role": "user", "content": ""},
    ]
    text = (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\n  2 < 3?\n<|im_end|>\n"
        "<|im_start|>assistant\nJa – 是<|im_end|>\n"
        "<|im_start|>user\n<|im_end|>\n"
    )
    plain = tokenizer.apply_chat_template(messages, tokenize=False)
    assert plain == text
    prompt = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    assert prompt == text + "<|im_start|>assistant\n"
    ids = tokenizer.encode(prompt)
    assert ids.count(checkpoint.IM_START_ID) == 5
    assert ids.count(checkpoint.IM_END_ID) == 4
    assert tokenizer.decode(ids) == prompt


@settings(deadline=None)
@given(text=st.text())
def test_text_is_its_utf8_bytes_and_comes_back(tokenizer, text):
    if any(token in text for token in checkpoint.SPECIAL_TOKENS):
        return
    ids = tokenizer.encode(text)
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


@settings(deadline=None)
@given(data=st.binary())
def test_any_bytes_decode_as_utf8_with_replacement(tokenizer, data):
    assert tokenizer.decode(list(data)) == data.decode("utf-8", errors="replace")


def test_every_byte_is_its_own_token(tokenizer):
    tokens = tokenizer.convert_ids_to_tokens(list(range(256)))
    assert tokens == checkpoint.byte_alphabet()
    assert len(set(tokens)) == 256
