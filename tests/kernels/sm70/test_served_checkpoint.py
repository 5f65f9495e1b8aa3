# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Quantized checkpoints of a hybrid model, loaded and served by our kernels."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from . import tiny_checkpoint

WIDTHS = ("auto", "0", "128")
LINEARS_OF_A_STEP = 4 * 2 + 4  # in and out of each mixer; down
GATED_OF_A_STEP = 4


@pytest.mark.parametrize("kind", ["nvfp4", "fp8"])
def test_a_served_checkpoint(kind: str, tmp_path: Path) -> None:
    """The same tokens at any tile width, none too, and after a weight reload."""
    tiny_checkpoint.write(tmp_path / kind, kind)
    run = subprocess.run(
        [sys.executable, tiny_checkpoint.__file__, str(tmp_path / kind), *WIDTHS],
        env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    results = json.loads(run.stdout.splitlines()[-1])
    tokens = results["auto"]["tokens"]
    assert [len(answer) for answer in tokens] == [12, 12]
    assert len(set(tokens[0])) > 1
    for width in WIDTHS:
        assert results[width]["tokens"] == tokens
        assert results[width]["reloaded"] == tokens
        calls = results[width]["calls"]
        # Every layer of every step, the MLP's first half as one step.
        assert calls["gated_linear"] > 0
        assert calls["gated_linear"] % GATED_OF_A_STEP == 0
        assert calls["linear"] * GATED_OF_A_STEP == (
            calls["gated_linear"] * LINEARS_OF_A_STEP
        )
    lanes = 2 if results["auto"]["device"] == "cuda" else 1
    # 128 columns: gate and up of K = 256 take less than down's K = 640.
    assert results["128"]["scratch"] == lanes * 128 * 640 * 2
    assert results["0"]["scratch"] == 0
    assert results["auto"]["scratch"] >= 1280 * 256 * 2
