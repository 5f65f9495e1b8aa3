# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A hybrid model of four small layers with random quantized weights, on disk.

`python tiny_checkpoint.py FOLDER WIDTH...` serves it in this process once for
each tile width, and prints a line of JSON.
"""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

HIDDEN, INTERMEDIATE, VOCABULARY = 256, 640, 256
KEY_HEADS, VALUE_HEADS, GDN_HEAD = 2, 4, 128
HEADS, KV_HEADS, HEAD = 2, 1, 256
LAYERS = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
CONFIG = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": len(LAYERS),
    "layer_types": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": KEY_HEADS,
    "linear_num_value_heads": VALUE_HEADS,
    "linear_key_head_dim": GDN_HEAD,
    "linear_value_head_dim": GDN_HEAD,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "dtype": "bfloat16",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attn_output_gate": True,
    "mamba_ssm_dtype": "float32",
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.25,
    },
}
_NVFP4_GROUP = {"num_bits": 4, "type": "float", "group_size": 16}
QUANTIZATION = {
    "nvfp4": {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": None,
        "ignore": ["lm_head", "*in_proj_ba*", "*in_proj_a*", "*in_proj_b*", "*conv1d*"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": _NVFP4_GROUP,
                "input_activations": _NVFP4_GROUP,
            }
        },
    },
    "fp8": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head"]
        + [f"model.layers.{i}.linear_attn.in_proj_{c}" for i in range(4) for c in "ab"],
    },
}


def linears() -> Iterator[tuple[str, int, int]]:
    """Yield name, N and K of each quantized layer."""
    key, value = KEY_HEADS * GDN_HEAD, VALUE_HEADS * GDN_HEAD
    for i, kind in enumerate(LAYERS):
        layer = f"model.layers.{i}"
        if kind == "linear_attention":
            yield f"{layer}.linear_attn.in_proj_qkv", 2 * key + value, HIDDEN
            yield f"{layer}.linear_attn.in_proj_z", value, HIDDEN
            yield f"{layer}.linear_attn.out_proj", HIDDEN, value
        else:
            yield f"{layer}.self_attn.q_proj", 2 * HEADS * HEAD, HIDDEN
            yield f"{layer}.self_attn.k_proj", KV_HEADS * HEAD, HIDDEN
            yield f"{layer}.self_attn.v_proj", KV_HEADS * HEAD, HIDDEN
            yield f"{layer}.self_attn.o_proj", HIDDEN, HEADS * HEAD
        yield f"{layer}.mlp.gate_proj", INTERMEDIATE, HIDDEN
        yield f"{layer}.mlp.up_proj", INTERMEDIATE, HIDDEN
        yield f"{layer}.mlp.down_proj", HIDDEN, INTERMEDIATE


def plain_tensors() -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what stays as it is."""
    yield "model.embed_tokens.weight", torch.randn(VOCABULARY, HIDDEN)
    yield "lm_head.weight", torch.randn(VOCABULARY, HIDDEN) / HIDDEN**0.5
    yield "model.norm.weight", torch.zeros(HIDDEN)
    channels = (2 * KEY_HEADS + VALUE_HEADS) * GDN_HEAD
    for i, kind in enumerate(LAYERS):
        layer = f"model.layers.{i}"
        yield f"{layer}.input_layernorm.weight", torch.zeros(HIDDEN)
        yield f"{layer}.post_attention_layernorm.weight", torch.zeros(HIDDEN)
        if kind == "full_attention":
            yield f"{layer}.self_attn.q_norm.weight", torch.zeros(HEAD)
            yield f"{layer}.self_attn.k_norm.weight", torch.zeros(HEAD)
            continue
        gdn = f"{layer}.linear_attn"
        for gate in "ba":
            weight = torch.randn(VALUE_HEADS, HIDDEN) / HIDDEN**0.5
            yield f"{gdn}.in_proj_{gate}.weight", weight
        yield f"{gdn}.conv1d.weight", torch.randn(channels, 1, 4) / 2
        yield f"{gdn}.A_log", torch.zeros(VALUE_HEADS)
        yield f"{gdn}.dt_bias", torch.ones(VALUE_HEADS)
        yield f"{gdn}.norm.weight", torch.ones(GDN_HEAD)


def quantized_tensors(
    kind: str, rows: int, depth: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield suffix and tensor of a random weight of variance 1 / K or so."""
    if kind == "fp8":
        weight = torch.randn(rows, depth) / depth**0.5 * 64
        yield "weight", weight.to(torch.float8_e4m3fn)
        blocks = (-(-rows // 128), -(-depth // 128))
        yield "weight_scale_inv", (0.5 + torch.rand(blocks)) / 64
        return
    yield "weight", torch.randint(0, 256, (rows, depth // 2), dtype=torch.uint8)
    scales = 0.5 + torch.rand(rows, depth // 16)
    yield "weight_scale", scales.to(torch.float8_e4m3fn)
    # The root of the mean square of the E2M1 values is 2.93.
    yield "weight_scale_2", torch.tensor(1 / 2.93 / depth**0.5)
    yield "input_scale", torch.tensor(0.01)


def write(folder: Path, kind: str) -> None:
    """Write the checkpoint; `kind` is "nvfp4" (ModelOpt) or "fp8" (block 128)."""
    torch.manual_seed(0)
    tensors = {name: tensor.bfloat16() for name, tensor in plain_tensors()}
    for name, rows, depth in linears():
        for suffix, tensor in quantized_tensors(kind, rows, depth):
            tensors[f"{name}.{suffix}"] = tensor
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {**CONFIG, "quantization_config": QUANTIZATION[kind]}
    (folder / "config.json").write_text(json.dumps(config))


def generate(llm: Any) -> list[list[int]]:
    """Return the token ids of two greedy answers, prompts of 300 and 3 tokens."""
    from vllm import SamplingParams

    prompts = [[i * 7 % 250 for i in range(300)], [5, 6, 7]]
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, detokenize=False),
        use_tqdm=False,
    )
    return [list(output.outputs[0].token_ids) for output in outputs]


def serve(folder: str, width: str) -> dict[str, Any]:
    """Generate, reload the weights, generate again; say what ran."""
    os.environ["VLLM_SM70_TILE_WIDTH"] = width
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.model_executor.kernels.linear.sm70 import linear, scratch
    from vllm.platforms import current_platform

    calls = {"linear": 0, "gated_linear": 0}
    originals = {name: getattr(linear, name) for name in calls}

    def counted(name: str) -> Any:
        def wrapper(*arguments: Any) -> torch.Tensor:
            calls[name] += 1
            return originals[name](*arguments)

        return wrapper

    for name in calls:
        setattr(linear, name, counted(name))
    scratch.reset_scratch()
    llm = LLM(
        folder,
        skip_tokenizer_init=True,
        dtype="bfloat16" if current_platform.is_cpu() else "float16",
        kernel_config={"linear_backend": "sm70"},
        max_model_len=1024,
        max_num_seqs=2,
        enforce_eager=True,
        gpu_memory_utilization=0.2,
    )

    tokens = generate(llm)
    llm.reset_prefix_cache()
    llm.collective_rpc("reload_weights")
    result = {
        "tokens": tokens,
        "reloaded": generate(llm),
        "calls": dict(calls),
        "device": current_platform.device_type,
        "scratch": sum(s.nbytes for s in scratch._scratches.values()),
    }
    for name, original in originals.items():
        setattr(linear, name, original)
    del llm
    cleanup_dist_env_and_memory()
    return result


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    print(json.dumps({width: serve(sys.argv[1], width) for width in sys.argv[2:]}))
