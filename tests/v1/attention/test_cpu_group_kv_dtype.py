# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""CPU attention sizes its scratchpad for the KV dtype of its own layers."""

from types import SimpleNamespace
from unittest.mock import MagicMock, patch

import pytest
import torch

from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)

BUILDER = "vllm.v1.attention.backends"


@pytest.mark.parametrize("cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("layer_dtype", ["auto", "fp8", "fp8_e5m2"])
def test_the_kv_dtype_is_the_one_of_the_layers(cache_dtype, layer_dtype):
    """A layer in kv_cache_dtype_skip_layers, or a draft, has a dtype of its own."""
    impl = MagicMock(spec=CPUAttentionBackendImpl, num_heads=4, sliding_window=None)
    layers = {"layer": SimpleNamespace(impl=impl, kv_cache_dtype=layer_dtype)}
    config = MagicMock()
    config.model_config.dtype = torch.bfloat16
    config.cache_config.cache_dtype = cache_dtype
    with (
        patch(f"{BUILDER}.utils.get_layers_from_vllm_config", return_value=layers),
        patch(f"{BUILDER}.cpu_attn.get_layers_from_vllm_config", return_value=layers),
        patch(f"{BUILDER}.cpu_attn._get_attn_isa", return_value="vec"),
    ):
        builder = CPUAttentionMetadataBuilder(
            kv_cache_spec=SimpleNamespace(num_kv_heads=2, head_size=64, block_size=32),
            layer_names=list(layers),
            vllm_config=config,
            device=torch.device("cpu"),
        )
    assert builder.kv_cache_dtype == layer_dtype
