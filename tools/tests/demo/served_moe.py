# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""``python served_moe.py FOLDER SETTINGS...``: answers of the MoE demo checkpoint.

Serves it in this process once for each ``budget,chunk,eager`` and prints a line of
JSON: the tokens, and what the experts were called with.
"""

import json
import os
import sys
from typing import Any
from unittest.mock import patch

PROMPTS = [[(i * 7 + i // 50) % 250 for i in range(1800)], [72, 105, 33]]


def serve(folder: str, setting: str) -> dict[str, Any]:
    """Generate greedily; say which batches and tiles the experts took."""
    budget, chunk, eager = setting.split(",")
    os.environ["VLLM_MOE_WORKSPACE_BUDGET_MIB"] = budget
    os.environ["VLLM_MOE_CHUNK_TOKENS"] = chunk
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.model_executor.layers.fused_moe import sm70_ops

    calls = set()
    down = sm70_ops.fp8_moe_down

    def spy(*args: Any, **kwargs: Any) -> None:
        topk_ids, tile = args[5], args[8]
        calls.add((kwargs["batch_tokens"], topk_ids.shape[0], tile.shape[1]))
        down(*args, **kwargs)

    with patch.object(sm70_ops, "fp8_moe_down", spy):
        llm = LLM(
            folder,
            skip_tokenizer_init=True,
            kernel_config={"linear_backend": "sm70", "moe_backend": "sm70"},
            max_model_len=2048,
            max_num_batched_tokens=2048,
            max_num_seqs=2,
            enforce_eager=eager == "eager",
            gpu_memory_utilization=0.2,
        )
        outputs = llm.generate(
            PROMPTS,
            SamplingParams(
                max_tokens=8, temperature=0, ignore_eos=True, detokenize=False
            ),
            use_tqdm=False,
        )
    del llm
    cleanup_dist_env_and_memory()
    return {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "calls": sorted(calls),
    }


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    print(json.dumps([serve(sys.argv[1], setting) for setting in sys.argv[2:]]))
