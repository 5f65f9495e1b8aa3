# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Write a small hybrid checkpoint with random weights, the same bytes every time.

``python -m tools.demo.checkpoint OUT [--quant none]`` writes a folder that
``vllm serve`` loads like any model from a hub: Qwen3.5's text layout (gated
delta net in three layers of four, full attention in the fourth), safetensors
under the tensor names of the released checkpoints, a byte-level tokenizer and
a chat template. Nothing is downloaded.

Weights come from SHAKE-256 over the tensor's name, not from a framework's
generator: torch's and numpy's streams differ between versions and between
vector units, and a checkpoint that differs by machine cannot be compared.
"""

import argparse
import hashlib
import json
import math
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save

from tools.demo import quantize

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Token ids 256, 257, 258: ids below 256 are the bytes themselves."""

ENDOFTEXT_ID, IM_START_ID, IM_END_ID = range(256, 256 + len(SPECIAL_TOKENS))

CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""

SEED = "vllm-sm70 demo 1"
"""Part of every tensor's SHAKE-256 input; another seed is another model."""


@dataclass(frozen=True)
class Geometry:
    """Dimensions of a Qwen3.5 text model, named as in its ``config.json``.

    The defaults keep the head sizes of the released models (256 for attention,
    128 for the gated delta net) and make K and N of every quantisable linear
    layer a multiple of 256, so NVFP4 groups of 16, FP8 blocks of 128 and the
    column tiles of the SM70 kernels all divide them. About 7.5 MiB in BF16.
    """

    hidden_size: int = 256
    intermediate_size: int = 512
    num_hidden_layers: int = 4
    num_attention_heads: int = 2
    num_key_value_heads: int = 1
    head_dim: int = 256
    linear_conv_kernel_dim: int = 4
    linear_num_key_heads: int = 2
    linear_num_value_heads: int = 4
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    vocab_size: int = 256 + len(SPECIAL_TOKENS)
    max_position_embeddings: int = 262144

    @property
    def layer_types(self) -> list[str]:
        """Kind of each layer: every fourth is full attention."""
        return [
            "full_attention" if i % 4 == 3 else "linear_attention"
            for i in range(self.num_hidden_layers)
        ]


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of each MLP, named as in ``config.json``.

    Every expert, the shared one too, is as narrow as a block of FP8 scales.
    """

    num_experts: int = 8
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 128
    shared_expert_intermediate_size: int = 128


@dataclass
class Checkpoint:
    """``config.json`` as a dict, and every tensor under its name in the file."""

    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    weights: str
    """One phrase for the model card: how the weights are stored."""
    notes: list[str] = field(default_factory=list)


def model_config(geometry: Geometry, experts: Experts | None = None) -> dict[str, Any]:
    """Return ``config.json`` of an unquantised BF16 model of this geometry.

    BF16 with an FP32 recurrent state, as released. It serves without a flag
    everywhere: SM70 has no BF16, so vLLM's ``dtype=auto`` takes FP16 there, and
    upstream's gated delta net on the CPU takes nothing but BF16.
    """
    return {
        "architectures": [f"Qwen3_5{'Moe' if experts else ''}ForCausalLM"],
        "model_type": f"qwen3_5{'_moe' if experts else ''}_text",
        **asdict(geometry),
        **(asdict(experts) if experts else {}),
        "layer_types": geometry.layer_types,
        "attn_output_gate": True,
        "bos_token_id": None,
        "dtype": "bfloat16",
        "eos_token_id": IM_END_ID,
        "hidden_act": "silu",
        "mamba_ssm_dtype": "float32",
        "pad_token_id": ENDOFTEXT_ID,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000_000.0,
            "partial_rotary_factor": 0.25,
        },
        "tie_word_embeddings": False,
    }


def uniform(name: str, shape: tuple[int, ...], low: float, high: float) -> torch.Tensor:
    """Return FP32 values in [low, high), fixed by ``name`` and ``shape`` alone.

    Two bytes of SHAKE-256 a value, little endian; one multiply and one add in
    FP32, which IEEE 754 rounds alike on every machine.
    """
    digest = hashlib.shake_256(f"{SEED}\n{name}".encode()).digest(2 * math.prod(shape))
    unit = np.frombuffer(digest, dtype="<u2").astype(np.float32) / np.float32(65536)
    values = unit * np.float32(high - low) + np.float32(low)
    return torch.from_numpy(values.reshape(shape))


def random_tensors(
    geometry: Geometry, experts: Experts | None = None
) -> dict[str, torch.Tensor]:
    """Return every tensor of the model, BF16 but for ``A_log`` (FP32).

    Linear weights are [N, K] with variance 1/K, so activations stay near one
    at any depth, in FP16 too. ``A_log`` and ``dt_bias`` follow the architecture's
    own initialisation: decay rates of 0.01 to 16, and ones.
    """
    g = geometry
    key_dim = g.linear_num_key_heads * g.linear_key_head_dim
    value_dim = g.linear_num_value_heads * g.linear_value_head_dim
    conv_dim = 2 * key_dim + value_dim
    q_dim = g.num_attention_heads * g.head_dim
    kv_dim = g.num_key_value_heads * g.head_dim
    tensors: dict[str, torch.Tensor] = {}

    def linear(name: str, n: int, k: int) -> None:
        bound = math.sqrt(3 / k)
        tensors[name] = uniform(name, (n, k), -bound, bound).bfloat16()

    def mlp(name: str, width: int) -> None:
        linear(f"{name}.gate_proj.weight", width, g.hidden_size)
        linear(f"{name}.up_proj.weight", width, g.hidden_size)
        linear(f"{name}.down_proj.weight", g.hidden_size, width)

    def near(name: str, size: int, centre: float) -> None:
        tensors[name] = uniform(name, (size,), centre - 0.1, centre + 0.1).bfloat16()

    # One-hot inputs see a row, not a sum over K: unit variance, not 1/K.
    name = "model.embed_tokens.weight"
    bound = math.sqrt(3)
    shape = (g.vocab_size, g.hidden_size)
    tensors[name] = uniform(name, shape, -bound, bound).bfloat16()

    for i, kind in enumerate(g.layer_types):
        layer = f"model.layers.{i}"
        if kind == "linear_attention":
            gdn = f"{layer}.linear_attn"
            linear(f"{gdn}.in_proj_qkv.weight", conv_dim, g.hidden_size)
            linear(f"{gdn}.in_proj_z.weight", value_dim, g.hidden_size)
            for gate in "ba":
                name = f"{gdn}.in_proj_{gate}.weight"
                linear(name, g.linear_num_value_heads, g.hidden_size)
            name = f"{gdn}.conv1d.weight"
            bound = math.sqrt(3 / g.linear_conv_kernel_dim)
            conv_shape = (conv_dim, 1, g.linear_conv_kernel_dim)
            tensors[name] = uniform(name, conv_shape, -bound, bound).bfloat16()
            name = f"{gdn}.A_log"
            rate = uniform(name, (g.linear_num_value_heads,), 0.01, 16.0)
            tensors[name] = rate.double().log().float()
            near(f"{gdn}.dt_bias", g.linear_num_value_heads, 1.0)
            near(f"{gdn}.norm.weight", g.linear_value_head_dim, 1.0)
            linear(f"{gdn}.out_proj.weight", g.hidden_size, value_dim)
        else:
            attn = f"{layer}.self_attn"
            # Twice as wide: each head's output gate follows its query.
            linear(f"{attn}.q_proj.weight", 2 * q_dim, g.hidden_size)
            linear(f"{attn}.k_proj.weight", kv_dim, g.hidden_size)
            linear(f"{attn}.v_proj.weight", kv_dim, g.hidden_size)
            linear(f"{attn}.o_proj.weight", g.hidden_size, q_dim)
            near(f"{attn}.q_norm.weight", g.head_dim, 0.0)
            near(f"{attn}.k_norm.weight", g.head_dim, 0.0)
        if experts is None:
            mlp(f"{layer}.mlp", g.intermediate_size)
        else:
            moe = f"{layer}.mlp"
            linear(f"{moe}.gate.weight", experts.num_experts, g.hidden_size)
            for expert in range(experts.num_experts):
                mlp(f"{moe}.experts.{expert}", experts.moe_intermediate_size)
            mlp(f"{moe}.shared_expert", experts.shared_expert_intermediate_size)
            linear(f"{moe}.shared_expert_gate.weight", 1, g.hidden_size)
        # These norms scale by 1 + weight.
        near(f"{layer}.input_layernorm.weight", g.hidden_size, 0.0)
        near(f"{layer}.post_attention_layernorm.weight", g.hidden_size, 0.0)
    near("model.norm.weight", g.hidden_size, 0.0)
    linear("lm_head.weight", g.vocab_size, g.hidden_size)
    # Greedy answers then are text that a terminal can take, one character a
    # token: the largest of 96 random logits is above these zeros.
    spoken = [*range(0x20, 0x7F), IM_END_ID]
    silent = [i for i in range(g.vocab_size) if i not in spoken]
    tensors["lm_head.weight"][silent] = 0
    return tensors


def plain(geometry: Geometry) -> Checkpoint:
    """The BF16 model, nothing quantised."""
    return Checkpoint(model_config(geometry), random_tensors(geometry), "BF16")


def nvfp4(geometry: Geometry) -> Checkpoint:
    """The same weights, the linear layers' in NVFP4 as ModelOpt writes them."""
    model = plain(geometry)
    config, tensors = quantize.nvfp4(model.config, model.tensors)
    return Checkpoint(config, tensors, "NVFP4, the rest BF16")


def fp8(geometry: Geometry) -> Checkpoint:
    """The same weights, the linear layers' in FP8 with block-128 scales."""
    model = plain(geometry)
    config, tensors = quantize.fp8(model.config, model.tensors)
    return Checkpoint(config, tensors, "FP8 E4M3, the rest BF16")


def fp8_moe(geometry: Geometry) -> Checkpoint:
    """A mixture of experts in FP8 with block-128 scales, each expert's by itself.

    The router and the shared expert's gate stay BF16, as released.
    """
    experts = Experts()
    config, tensors = quantize.fp8(
        model_config(geometry, experts), random_tensors(geometry, experts)
    )
    return Checkpoint(config, tensors, "FP8 E4M3 mixture of experts, the rest BF16")


VARIANTS: dict[str, Callable[[Geometry], Checkpoint]] = {
    "none": plain,
    "nvfp4": nvfp4,
    "fp8": fp8,
    "fp8-moe": fp8_moe,
}
"""Value of ``--quant`` -> how the checkpoint is made. A quantised variant takes
``plain``'s tensors (the mixture of experts its own), replaces weights and adds its
``quantization_config``."""


def byte_alphabet() -> list[str]:
    """Return the character that stands for each byte in a byte-level vocabulary.

    Visible Latin-1 characters stand for themselves; the others get the code
    points from 256 on, in order (the convention of ``ByteLevel`` tokenizers).
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = (b for b in range(256) if b not in visible)
    moved = {b: 256 + i for i, b in enumerate(hidden)}
    return [chr(moved.get(b, b)) for b in range(256)]


def tokenizer_files() -> dict[str, Any]:
    """Return the tokenizer's JSON files: file name -> content.

    A byte is a token and its id is its value, so a text of n UTF-8 bytes is
    exactly n tokens; the special tokens follow.
    """
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }
    special = {
        256 + i: {
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for i, token in enumerate(SPECIAL_TOKENS)
    }
    tokens = [*byte_alphabet(), *SPECIAL_TOKENS]
    return {
        "tokenizer.json": {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [{"id": i, **token} for i, token in special.items()],
            "normalizer": None,
            "pre_tokenizer": byte_level,
            "post_processor": None,
            "decoder": byte_level,
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": False,
                "vocab": {token: i for i, token in enumerate(tokens)},
                "merges": [],
            },
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "added_tokens_decoder": {str(i): token for i, token in special.items()},
            "clean_up_tokenization_spaces": False,
            "eos_token": SPECIAL_TOKENS[IM_END_ID - 256],
            "pad_token": SPECIAL_TOKENS[ENDOFTEXT_ID - 256],
            "model_max_length": Geometry.max_position_embeddings,
        },
    }


def model_card(checkpoint: Checkpoint, quant: str) -> str:
    """Return ``README.md`` of the checkpoint."""
    size = sum(t.nbytes for t in checkpoint.tensors.values()) / 2**20
    return "\n".join(
        [
            "# Hybrid demo model",
            "",
            "**The weights are random: the answers mean nothing.** This checkpoint",
            "shows that a server loads, answers and stops; it says nothing about",
            "quality.",
            "",
            f"- Layout: {checkpoint.config['architectures'][0]}, layers "
            + ", ".join(checkpoint.config["layer_types"]),
            f"- Weights: {checkpoint.weights}, {size:.1f} MiB",
            "- Output rows of all tokens but printable ASCII and <|im_end|> are zero",
            "- Tokenizer: one token a byte, then " + ", ".join(SPECIAL_TOKENS),
            f"- Made by: `python -m tools.demo.checkpoint OUT --quant {quant}`",
            *checkpoint.notes,
            "",
        ]
    )


def files(quant: str = "none", geometry: Geometry | None = None) -> dict[str, bytes]:
    """Return the checkpoint's files: name -> content. Same arguments, same bytes.

    Raises:
        ValueError: ``quant`` is not a key of ``VARIANTS``.
    """
    if quant not in VARIANTS:
        raise ValueError(
            f"quant={quant!r} is not known; expected one of {', '.join(VARIANTS)}"
        )
    checkpoint = VARIANTS[quant](geometry or Geometry())
    documents = {
        **tokenizer_files(),
        "generation_config.json": {
            "eos_token_id": [IM_END_ID, ENDOFTEXT_ID],
            "pad_token_id": ENDOFTEXT_ID,
        },
        "config.json": checkpoint.config,
    }
    texts = {
        "README.md": model_card(checkpoint, quant),
        "chat_template.jinja": CHAT_TEMPLATE,
        **{
            name: json.dumps(document, indent=2, ensure_ascii=False) + "\n"
            for name, document in documents.items()
        },
    }
    return {
        "model.safetensors": save(checkpoint.tensors, metadata={"format": "pt"}),
        **{name: text.encode() for name, text in texts.items()},
    }


def write(out: Path, quant: str = "none", geometry: Geometry | None = None) -> Path:
    """Make the folder ``out`` hold the checkpoint, and return ``out``.

    A file that has the right bytes is left alone and another is replaced as a
    whole, so a server that has the old one mapped keeps it, and a folder left
    incomplete or made by an older version is mended.

    Raises:
        ValueError: ``quant`` is not a key of ``VARIANTS``.
    """
    contents = files(quant, geometry)
    out.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        path = out / name
        if path.is_file() and path.read_bytes() == content:
            continue
        part = out / f".{name}.{os.getpid()}"
        part.write_bytes(content)
        part.replace(path)
    return out


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.demo.checkpoint",
        description="Write a small hybrid checkpoint with random weights.",
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write")
    parser.add_argument("--quant", choices=sorted(VARIANTS), default="none")
    args = parser.parse_args(argv)
    try:
        out = write(args.out, args.quant)
    except OSError as error:
        print(
            f"error: cannot write the checkpoint to OUT={args.out}: {error}; "
            "name a folder that can be written",
            file=sys.stderr,
        )
        return 1
    size = (out / "model.safetensors").stat().st_size / 2**20
    print(f"{out}: {size:.1f} MiB of weights, quant {args.quant}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
