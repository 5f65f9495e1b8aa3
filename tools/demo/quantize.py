# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Quantise the demo checkpoint's linear layers, in the layouts of released ones.

NVFP4 follows ModelOpt (`hf_quant_config` of `quant_algo` NVFP4), FP8 the block-128
layout of Qwen's and DeepSeek's `-FP8` checkpoints. Only torch's elementwise FP32
arithmetic is used, which rounds alike on every machine.
"""

from typing import Any

import torch

NVFP4_BLOCK = 16
FP8_BLOCK = 128
E2M1_MAX, E4M3_MAX = 6.0, 448.0

E2M1_BOUNDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Midpoints between the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4 and 6."""

ACTIVATION_AMAX = 32.0
"""What the checkpoint states as the largest activation, as calibration would."""

KEPT = ("lm_head", "in_proj_a", "in_proj_b", "conv1d", "embed_tokens", "norm")
"""Parts of the names of what stays BF16, as in released checkpoints."""

UNCONVERTED = tuple(
    f"{name}.weight"
    for name in ("in_proj_a", "in_proj_b", "mlp.gate", "shared_expert_gate")
)
"""Ends of the names of linear weights that an FP8 checkpoint lists as BF16."""

FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("in_proj_qkv", "in_proj_z"),
)
"""Served as one matrix, which has one global scale."""


def is_quantised(name: str) -> bool:
    """Whether a tensor of this name is a linear weight that is quantised."""
    return name.endswith("_proj.weight") or (
        name.endswith((".in_proj_qkv.weight", ".in_proj_z.weight"))
        and not any(part in name for part in KEPT)
    )


def e2m1_codes(values: torch.Tensor) -> torch.Tensor:
    """Return uint8 codes of the nearest E2M1 values; ties go to even codes.

    Args:
        values: float32, of magnitude up to 6 (more saturates).

    """
    magnitude = values.abs()
    code = torch.zeros_like(values, dtype=torch.uint8)
    for i, bound in enumerate(E2M1_BOUNDS):
        # Code i below the midpoint is even or odd in turn: a tie leaves an even
        # one and lifts an odd one.
        above = magnitude > bound if i % 2 == 0 else magnitude >= bound
        code += above.to(torch.uint8)
    return code | (values.signbit().to(torch.uint8) << 3)


def nvfp4_tensors(weight: torch.Tensor, amax: torch.Tensor) -> dict[str, torch.Tensor]:
    """Quantise one weight as ModelOpt does.

    Args:
        weight: [N, K], K a multiple of 16.
        amax: float32, the largest magnitude of it and the weights that it is
            fused with.

    Returns:
        `weight` uint8 [N, K / 2], the element of even index in the low half of a
        byte; `weight_scale` float8_e4m3fn [N, K / 16]; `weight_scale_2` and
        `input_scale` float32 [].

    """
    blocks = weight.float().unflatten(1, (-1, NVFP4_BLOCK))
    global_scale = amax / (E2M1_MAX * E4M3_MAX)
    block_scale = blocks.abs().amax(-1) / E2M1_MAX / global_scale
    block_scale = block_scale.clamp(2**-9, E4M3_MAX).to(torch.float8_e4m3fn)
    step = (block_scale.float() * global_scale).unsqueeze(-1)
    codes = e2m1_codes(blocks / step).flatten(1)
    return {
        "weight": codes[:, ::2] | codes[:, 1::2] << 4,
        "weight_scale": block_scale,
        "weight_scale_2": global_scale,
        "input_scale": torch.tensor(ACTIVATION_AMAX / (E2M1_MAX * E4M3_MAX)),
    }


def fp8_block_tensors(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Quantise one weight to E4M3 with a scale for each block of 128 x 128.

    Args:
        weight: [N, K].

    Returns:
        `weight` float8_e4m3fn [N, K]; `weight_scale_inv` float32
        [ceil(N / 128), ceil(K / 128)], the factor.

    """
    rows, columns = weight.shape
    right, below = -columns % FP8_BLOCK, -rows % FP8_BLOCK
    padded = torch.nn.functional.pad(weight.float(), (0, right, 0, below))
    blocks = padded.unflatten(0, (-1, FP8_BLOCK)).unflatten(2, (-1, FP8_BLOCK))
    scale = blocks.abs().amax((1, 3)) / E4M3_MAX
    scale[scale == 0] = 1
    codes = blocks / scale[:, None, :, None]
    codes = codes.flatten(2, 3).flatten(0, 1)[:rows, :columns]
    return {
        "weight": codes.contiguous().to(torch.float8_e4m3fn),
        "weight_scale_inv": scale,
    }


def nvfp4(
    config: dict[str, Any], tensors: dict[str, torch.Tensor]
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return the config and the tensors of the NVFP4 (W4A4) checkpoint.

    Args:
        config: `config.json` of the BF16 model; not modified.
        tensors: the BF16 model's; not modified.

    """
    group = {"num_bits": 4, "type": "float", "group_size": NVFP4_BLOCK}
    quantization = {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": None,
        "ignore": [
            "lm_head",
            "*in_proj_ba*",
            "*in_proj_a*",
            "*in_proj_b*",
            "*conv1d*",
        ],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": group,
                "input_activations": group,
            }
        },
        "producer": {"name": "modelopt"},
    }
    result: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if not is_quantised(name):
            result[name] = tensor
            continue
        parts = (tensors[part] for part in _fused_with(name))
        amax = torch.stack([part.float().abs().amax() for part in parts]).amax()
        _add(result, name, nvfp4_tensors(tensor, amax))
    return {**config, "quantization_config": quantization}, result


def fp8(
    config: dict[str, Any], tensors: dict[str, torch.Tensor]
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return the config and the tensors of the FP8 block-128 checkpoint.

    Args:
        config: `config.json` of the BF16 model; not modified.
        tensors: the BF16 model's; not modified.

    """
    quantization = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
        "modules_to_not_convert": sorted(
            name.removesuffix(".weight")
            for name in tensors
            if name.endswith(UNCONVERTED)
        )
        + ["lm_head"],
    }
    result: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if is_quantised(name):
            _add(result, name, fp8_block_tensors(tensor))
        else:
            result[name] = tensor
    return {**config, "quantization_config": quantization}, result


def _add(
    result: dict[str, torch.Tensor], name: str, parts: dict[str, torch.Tensor]
) -> None:
    prefix = name.removesuffix("weight")
    result.update({prefix + part: tensor for part, tensor in parts.items()})


def _fused_with(name: str) -> list[str]:
    prefix, _, module = name.removesuffix(".weight").rpartition(".")
    for group in FUSED:
        if module in group:
            return [f"{prefix}.{part}.weight" for part in group]
    return [name]
