# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The retrieval model: its dimensions, the model to train, the folder to serve."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save

from benchmarks.needle.task import CHAT_TEMPLATE
from tools.demo import checkpoint, quantize
from tools.demo.checkpoint import Experts, Geometry


@dataclass(frozen=True)
class Architecture:
    """A dense model, or with ``experts`` in place of each MLP."""

    geometry: Geometry
    experts: Experts | None = None


_WIDTHS = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 2,
    "head_dim": 128,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
}
"""Every K and N of a quantised layer, as it is served, is a multiple of 256: two
tiles of 128 columns at least, whole FP8 blocks and NVFP4 groups. A state takes the
KV of 262 tokens, so that texts from 1,024 tokens on fill several pages."""

ARCHITECTURES: dict[str, Architecture] = {
    # A few minutes on one core: to try a recipe.
    "tiny": Architecture(
        Geometry(
            hidden_size=128,
            intermediate_size=256,
            num_attention_heads=1,
            head_dim=128,
            linear_num_key_heads=1,
            linear_num_value_heads=2,
            linear_key_head_dim=64,
            linear_value_head_dim=64,
        )
    ),
    # Two layers of full attention, which may have KV caches of two widths.
    "dense": Architecture(Geometry(**_WIDTHS, num_hidden_layers=8)),
    "moe": Architecture(Geometry(**_WIDTHS), Experts()),
}


def model_config(architecture: Architecture) -> dict[str, Any]:
    """Return ``config.json`` of the FP16 model: one matrix for both embeddings."""
    return {
        **checkpoint.model_config(architecture.geometry, architecture.experts),
        "dtype": "float16",
        "tie_word_embeddings": True,
    }


def build(config: dict[str, Any]) -> torch.nn.Module:
    """Return transformers' own model for a ``config.json``, FP32, initialised."""
    from transformers import AutoConfig, AutoModelForCausalLM

    known = {k: v for k, v in config.items() if k not in ("architectures", "dtype")}
    kind = known.pop("model_type")
    settings = AutoConfig.for_model(kind, **known, use_cache=False)
    return AutoModelForCausalLM.from_config(settings, dtype=torch.float32)


def load(folder: Path) -> torch.nn.Module:
    """Return the model in a folder that ``write`` made, FP32.

    Quantised weights are what they stand for; activations are not quantised.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    model = build(config)
    tensors = dequantised(load_file(folder / "model.safetensors"))
    model.load_state_dict(stacked(tensors, config))
    return model


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of the codes 0 to 7; codes from 8 on are negative."""


def dequantised(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a checkpoint's tensors in FP32, NVFP4 and FP8 weights multiplied out."""
    result: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        scale = tensors.get(f"{name}_scale")
        block = tensors.get(f"{name}_scale_inv")
        if scale is not None:
            codes = torch.stack((tensor & 15, tensor >> 4), dim=-1).flatten(1)
            values = torch.tensor([*E2M1, *(-value for value in E2M1)])[codes.int()]
            step = (scale.float() * tensors[f"{name}_scale_2"]).repeat_interleave(
                quantize.NVFP4_BLOCK, dim=1
            )
            result[name] = values * step
        elif block is not None:
            rows, columns = tensor.shape
            step = block.repeat_interleave(quantize.FP8_BLOCK, dim=0)[:rows]
            step = step.repeat_interleave(quantize.FP8_BLOCK, dim=1)[:, :columns]
            result[name] = tensor.float() * step
        elif not name.endswith(("_scale", "_scale_2", "_scale_inv", "input_scale")):
            result[name] = tensor.float()
    return result


def unstacked(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return transformers' tensors as checkpoints store them: a matrix an expert."""
    result: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        prefix, found, matrix = name.partition(".mlp.experts.")
        if not found:
            if name != "lm_head.weight":  # the embeddings'
                result[name] = tensor
            continue
        for i, expert in enumerate(tensor):
            parts = {"down_proj": expert}
            if matrix == "gate_up_proj":
                gate, up = expert.chunk(2)
                parts = {"gate_proj": gate, "up_proj": up}
            for part, weight in parts.items():
                result[f"{prefix}.mlp.experts.{i}.{part}.weight"] = weight
    return result


def stacked(
    tensors: dict[str, torch.Tensor], config: dict[str, Any]
) -> dict[str, torch.Tensor]:
    """Return ``unstacked``'s tensors as transformers has them."""
    result = {n: t for n, t in tensors.items() if ".mlp.experts." not in n}
    result["lm_head.weight"] = result["model.embed_tokens.weight"]
    count = config.get("num_experts", 0)
    for layer in range(config["num_hidden_layers"] if count else 0):
        experts = f"model.layers.{layer}.mlp.experts"
        gate_up, down = [], []
        for i in range(count):
            one = f"{experts}.{i}"
            both = [tensors[f"{one}.{part}_proj.weight"] for part in ("gate", "up")]
            gate_up.append(torch.cat(both))
            down.append(tensors[f"{one}.down_proj.weight"])
        result[f"{experts}.gate_up_proj"] = torch.stack(gate_up)
        result[f"{experts}.down_proj"] = torch.stack(down)
    return result


def exported(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the model's tensors by name, FP16 but for ``A_log`` (FP32).

    Raises:
        ValueError: a weight is beyond FP16's range.

    """
    result: dict[str, torch.Tensor] = {}
    for name, tensor in unstacked(model.state_dict()).items():
        kept = tensor.detach().cpu().float().contiguous()
        if not name.endswith("A_log"):
            kept = kept.half()
        if not kept.isfinite().all():
            raise ValueError(
                f"{name} holds values that FP16 does not: train with a lower --lr"
            )
        result[name] = kept
    return result


def write(
    out: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], card: str
) -> Path:
    """Make ``out`` a folder that ``vllm serve`` loads, and return it.

    Args:
        out: made if missing; each file is replaced as a whole.
        config: ``config.json``.
        tensors: by name, as the checkpoint stores them.
        card: ``README.md``.

    """
    weights = save(tensors, metadata={"format": "pt"})
    documents = {
        **checkpoint.tokenizer_files(),
        "generation_config.json": {
            "eos_token_id": [checkpoint.IM_END_ID, checkpoint.ENDOFTEXT_ID],
            "pad_token_id": checkpoint.ENDOFTEXT_ID,
        },
        "config.json": config,
    }
    contents = {
        "model.safetensors": weights,
        "README.md": card.encode(),
        "chat_template.jinja": CHAT_TEMPLATE.encode(),
    }
    for name, document in documents.items():
        text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
        contents[name] = text.encode()
    out.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        part = out / f".{name}.{os.getpid()}"
        part.write_bytes(content)
        part.replace(out / name)
    return out
