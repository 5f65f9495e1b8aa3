# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A real engine on the CPU: refused with the table, then served as it says."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.v1.core.memory_plan_cases import hybrid_27b, write_model

SCRIPT = """
import json, sys
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    limits = dict(max_num_seqs=2, max_num_batched_tokens=2048)
    llm = LLM(enforce_eager=True, **limits, **json.loads(sys.argv[1]))
    [out] = llm.generate("hello", SamplingParams(max_tokens=4, ignore_eos=True))
    print("TOKENS", len(out.outputs[0].token_ids))
"""


@pytest.fixture
def should_do_global_cleanup_after_test() -> bool:
    """Upstream's conftest asks; every engine here is a process of its own."""
    return False


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three gated delta nets and one attention layer, small, with dummy weights."""
    config = hybrid_27b(4) | dict(
        dtype="bfloat16",
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_attention_heads=2,
        num_key_value_heads=1,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
    )
    del config["quantization_config"]
    return write_model(tmp_path_factory.mktemp("models") / "hybrid", config)


def serve(
    folder: Path, model: Path, **engine: object
) -> subprocess.CompletedProcess[str]:
    script = folder / "serve.py"
    script.write_text(SCRIPT)
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "INFO"}
    env.pop("VLLM_CPU_KVCACHE_SPACE", None)
    plan = engine.pop("plan", None)
    if plan is not None:
        env["VLLM_MEMORY_PLAN"] = str(plan)
    settings = {"model": str(model), "load_format": "dummy"} | engine
    return subprocess.run(
        [sys.executable, str(script), json.dumps(settings)],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_cache_that_is_too_small_is_refused_with_the_table(
    tmp_path: Path, model: Path
) -> None:
    """262,144 tokens of one attention layer take 258.8 MiB with the states."""
    run = serve(tmp_path, model, kv_cache_memory_bytes=10**8, max_model_len=262144)
    assert run.returncode != 0
    assert "The KV cache does not fit." in run.stdout
    assert "needed: 1 request of 262,144 tokens" in run.stdout
    # The remedies are values, not advice.
    assert re.search(r"--kv-cache-memory-bytes \d+", run.stdout)
    assert re.search(r"--max-model-len \d+ +the longest that fits", run.stdout)
    assert "TOKENS" not in run.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "flag", "beyond"),
    [
        ("kv_cache_memory_bytes", "--kv-cache-memory-bytes", -1),
        ("max_model_len", "--max-model-len", 1),
    ],
)
def test_a_remedy_serves_and_one_step_beyond_it_does_not(
    tmp_path: Path, model: Path, setting: str, flag: str, beyond: int
) -> None:
    tight = {"kv_cache_memory_bytes": 10**8, "max_model_len": 262144}
    found = re.search(rf"{flag} (\d+)", serve(tmp_path, model, **tight).stdout)
    assert found is not None
    value = int(found[1])
    run = serve(tmp_path, model, **tight | {setting: value})
    assert run.returncode == 0, run.stdout[-4000:]
    assert "TOKENS 4" in run.stdout
    assert "(measured at start-up)" in run.stdout
    # The table's tokens are those that the server reports.
    [planned] = re.findall(r"fits: ([\d,]+) tokens", run.stdout)
    [served] = re.findall(r"KV cache size: ([\d,]+) tokens", run.stdout)
    assert planned == served
    further = serve(tmp_path, model, **tight | {setting: value + beyond})
    assert further.returncode != 0
    assert "The KV cache does not fit." in further.stdout


@pytest.mark.slow
def test_the_switch_gives_upstreams_message(tmp_path: Path, model: Path) -> None:
    run = serve(
        tmp_path, model, kv_cache_memory_bytes=10**8, max_model_len=262144, plan=0
    )
    assert run.returncode != 0
    assert "To serve at least one request with the model's max seq len" in run.stdout
    assert "Memory of" not in run.stdout
