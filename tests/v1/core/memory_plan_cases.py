# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Configurations to plan, and a process that plans them for a card.

``python memory_plan_cases.py GPU [MEMORY_GIB] < cases.json`` reads a list of
cases and prints a list of results, each a line of JSON. The card has to be
assumed before anything reads the platform, so every card is a process.
"""

import contextlib
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock


def write_model(folder: Path, config: dict[str, Any]) -> Path:
    """A folder with a configuration and a tokenizer, and no weights."""
    from tests.v1.byte_tokenizer import write_tokenizer

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)
    return folder


COMMON: dict[str, Any] = dict(
    dtype="float16",
    rms_norm_eps=1e-6,
    hidden_act="silu",
    tie_word_embeddings=False,
    eos_token_id=256,
)


def hybrid_27b(layers: int = 64) -> dict[str, Any]:
    """Qwen3.5-27B's text layers, NVFP4, FP32 states."""
    group = {"num_bits": 4, "type": "float", "group_size": 16}
    return COMMON | dict(
        architectures=["Qwen3_5ForCausalLM"],
        model_type="qwen3_5_text",
        vocab_size=248320,
        hidden_size=5120,
        intermediate_size=17408,
        num_hidden_layers=layers,
        num_attention_heads=24,
        num_key_value_heads=4,
        head_dim=256,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_num_key_heads=16,
        linear_num_value_heads=48,
        layer_types=[
            "full_attention" if i % 4 == 3 else "linear_attention"
            for i in range(layers)
        ],
        max_position_embeddings=262144,
        attn_output_gate=True,
        mamba_ssm_dtype="float32",
        rope_parameters=dict(
            rope_type="default", rope_theta=1e7, partial_rotary_factor=0.25
        ),
        quantization_config=dict(
            quant_method="modelopt",
            quant_algo="NVFP4",
            kv_cache_quant_algo=None,
            ignore=[
                "lm_head",
                "*in_proj_ba*",
                "*in_proj_a*",
                "*in_proj_b*",
                "*conv1d*",
            ],
            config_groups=dict(
                group_0=dict(targets=["Linear"], weights=group, input_activations=group)
            ),
            producer=dict(name="modelopt"),
        ),
    )


def block_draft(target_layers: int = 64) -> dict[str, Any]:
    """A DFlash2-like draft: four window-2048 layers and a full one."""
    return COMMON | dict(
        architectures=["DFlash2DraftModel"],
        model_type="qwen3",
        vocab_size=248320,
        hidden_size=5120,
        intermediate_size=17408,
        num_hidden_layers=5,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=262144,
        rope_theta=1e7,
        attention_bias=False,
        block_size=16,
        num_target_layers=target_layers,
        layer_types=["sliding_attention"] * 4 + ["full_attention"],
        sliding_window=2048,
        use_sliding_window=True,
        max_window_layers=0,
        dflash_config=dict(
            mask_token_id=257,
            target_layer_ids=[1, 16, 31, 46, 61],
            conv_kernel_size=4,
            conv_group_size=64,
            selector_rank=64,
            selector_top_k=16,
        ),
    )


def dense_8b() -> dict[str, Any]:
    """Qwen3-8B."""
    return COMMON | dict(
        architectures=["Qwen3ForCausalLM"],
        model_type="qwen3",
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        rope_theta=1e6,
    )


def moe_30b() -> dict[str, Any]:
    """Qwen3-30B-A3B in FP8 with block-128 scales."""
    return COMMON | dict(
        architectures=["Qwen3MoeForCausalLM"],
        model_type="qwen3_moe",
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        max_position_embeddings=40960,
        rope_theta=1e6,
        quantization_config=dict(
            quant_method="fp8",
            activation_scheme="dynamic",
            weight_block_size=[128, 128],
        ),
    )


MODELS = {
    "hybrid": hybrid_27b,
    "draft": block_draft,
    "dense": dense_8b,
    "moe": moe_30b,
}


def write_models(folder: Path) -> None:
    for name, make in MODELS.items():
        write_model(folder / name, make())


# ---------------------------------------------------------------------------
# The process that plans
# ---------------------------------------------------------------------------


def _result(planner: Any, case: dict[str, Any]) -> dict[str, Any]:
    from vllm.v1.core.memory_plan.planner import Changes, needs

    plan = planner.with_remedies(all_requests=case.get("all", False))
    result = json.loads(plan.to_json())
    specs = [rank.specs for rank in planner.ranks]
    result["tokens_at"] = {}
    for budget in case.get("budgets", ()):
        need = next(needs(planner.config, specs, [budget] * len(specs)))
        assert need is not None
        result["tokens_at"][str(budget)] = need.tokens
    result["block_size_of_config"] = planner.config.cache_config.block_size
    result["parts"] = [part.name for part in planner.ranks[0].sizes.parts]
    result["shorter"] = [
        planner.plan(Changes(max_model_len=length)).kv.request
        for length in case.get("lengths", ())
    ]
    result["replanned"] = {
        name: json.loads(planner.plan(Changes(**changes)).to_json())
        for name, changes in case.get("changes", {}).items()
    }
    return result


def main() -> None:
    from vllm.platforms.planned_gpu import assume_gpu, find_gpu

    gpu = find_gpu(sys.argv[1], float(sys.argv[2]) if len(sys.argv) > 2 else None)
    assume_gpu(gpu)

    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.cli.memory_plan import _inspect_models_here
    from vllm.v1.core.memory_plan.planner import Device, Planner

    _inspect_models_here()
    for case in json.load(sys.stdin):
        config = AsyncEngineArgs(**case["engine"]).create_engine_config()
        with contextlib.ExitStack() as stack:
            if method := case.get("fails"):
                error = NotImplementedError("not without a device")
                stack.enter_context(mock.patch(method, side_effect=error))
            planner = Planner.of(config, Device(gpu.name, gpu.total_bytes))
        print("RESULT", json.dumps(_result(planner, case)), flush=True)


if __name__ == "__main__":
    main()
