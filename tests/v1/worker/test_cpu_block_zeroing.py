# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The CPU runner clears the whole page of a new block."""

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.worker.cpu_model_runner import CPUModelRunner


@pytest.mark.parametrize("order", [("narrow", "wide"), ("wide", "narrow")])
def test_layers_of_two_widths_at_one_address(order):
    """Pages of 8 numbers: one group's layer has 4 of them, the other's all."""
    memory = torch.ones(4, 8)
    layers = {
        "narrow": SimpleNamespace(kv_cache=memory.as_strided((4, 2, 2), (8, 2, 1))),
        "wide": SimpleNamespace(kv_cache=memory.view(4, 2, 4)),
    }
    groups = [
        SimpleNamespace(
            kv_cache_spec=MagicMock(spec=FullAttentionSpec), layer_names=[name]
        )
        for name in order
    ]
    runner = SimpleNamespace(
        kv_cache_config=SimpleNamespace(kv_cache_groups=groups),
        compilation_config=SimpleNamespace(static_forward_context=layers),
    )
    CPUModelRunner._zero_block_ids(runner, [1, 3])
    assert memory.sum(1).tolist() == [8, 0, 8, 0]
