# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The folder of a hybrid model with a vision tower: Qwen3.5's layout, no weights."""

import json
from pathlib import Path
from typing import Any

from tests.v1.byte_tokenizer import write_tokenizer

MEDIA = {
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
}
VISION_START, VISION_END, IMAGE, VIDEO = range(258, 262)
"""Their ids: after 256 bytes, the end and a mask."""

TOWER = dict(
    model_type="qwen3_5_vision",
    depth=27,
    hidden_size=1152,
    intermediate_size=4304,
    num_heads=16,
    num_position_embeddings=2304,
    in_channels=3,
    hidden_act="gelu_pytorch_tanh",
    patch_size=16,
    spatial_merge_size=2,
    temporal_patch_size=2,
    out_hidden_size=5120,
)
TINY_WIDTH = 128
TINY_TOWER = TOWER | dict(
    depth=2,
    hidden_size=64,
    intermediate_size=128,
    num_heads=2,
    num_position_embeddings=64,
    out_hidden_size=TINY_WIDTH,
)
TINY_TEXT: dict[str, Any] = dict(
    dtype="bfloat16",
    model_type="qwen3_5_text",
    vocab_size=512,
    hidden_size=TINY_WIDTH,
    intermediate_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    linear_key_head_dim=64,
    linear_value_head_dim=64,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    layer_types=["linear_attention"] * 3 + ["full_attention"],
    max_position_embeddings=262144,
    mamba_ssm_dtype="float32",
    rope_parameters=dict(
        rope_type="default", rope_theta=1e7, partial_rotary_factor=0.25
    ),
)


def multimodal(
    text: dict[str, Any] = TINY_TEXT, tower: dict[str, Any] = TINY_TOWER
) -> dict[str, Any]:
    """The configuration of a language model and a tower in front of it.

    Args:
        text: its `quantization_config`, if any, becomes that of the whole, without
            the tower.
        tower: of the encoder.

    """
    text = dict(text)
    quantization = text.pop("quantization_config", None)
    rope = text["rope_parameters"]
    rotary = int(text["head_dim"] * rope["partial_rotary_factor"]) // 2
    # Shares of time, height and width: [11, 11, 10] of 32.
    sections = [(rotary + 2) // 3, (rotary + 1) // 3, rotary // 3]
    text["rope_parameters"] = rope | dict(
        mrope_section=sections, mrope_interleaved=True
    )
    config = dict(
        architectures=["Qwen3_5ForConditionalGeneration"],
        model_type="qwen3_5",
        dtype=text["dtype"],
        text_config=text,
        vision_config=tower,
        tie_word_embeddings=False,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
    )
    if quantization:
        ignore = [*quantization.get("ignore", []), "*visual*"]
        config["quantization_config"] = quantization | dict(ignore=ignore)
    return config


def write_multimodal(
    folder: Path, config: dict[str, Any], image_tokens: int, video_tokens: int
) -> Path:
    """Write configuration, tokenizer and processors: an image has at most
    ``image_tokens``, each of 32 x 32 pixels, and a video of two frames
    ``video_tokens``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder, MEDIA)
    common = dict(
        patch_size=16,
        temporal_patch_size=2,
        merge_size=2,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
        processor_class="Qwen3VLProcessor",
    )
    kinds = {
        "": ("image", "Qwen2VLImageProcessorFast", image_tokens * 32 * 32),
        "video_": ("video", "Qwen3VLVideoProcessor", video_tokens * 32 * 32 * 2),
    }
    for prefix, (kind, processor, pixels) in kinds.items():
        size = dict(shortest_edge=min(4096, pixels), longest_edge=pixels)
        values = common | {f"{kind}_processor_type": processor, "size": size}
        (folder / f"{prefix}preprocessor_config.json").write_text(json.dumps(values))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder
