# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The CPU platform leaves the blocks of a KV cache that exists alone.

The engine's process configures a second time when its handshake ends: after the KV
cache was laid out, with the configuration that the scheduler holds. A hybrid model's
blocks are longer than the platform's default, and with the default the scheduler let
prefill chunks run over their ends. The states there were then never written, and
other requests continued from older ones.
"""

import pytest

from vllm.config import CacheConfig, VllmConfig
from vllm.platforms.cpu import CpuPlatform

DEFAULT, HYBRID = 128, 384


def configured(block_size: int | None = None) -> VllmConfig:
    cache = CacheConfig() if block_size is None else CacheConfig(block_size=block_size)
    config = VllmConfig(cache_config=cache)
    CpuPlatform.check_and_update_config(config)
    return config


@pytest.mark.parametrize("asked", [None, 64])
def test_blocks_of_a_kv_cache_stay(asked):
    """Whether or not the user asked for a size: the layout has the last word."""
    config = configured(asked)
    assert config.cache_config.block_size == (asked or DEFAULT)
    config.cache_config.block_size = HYBRID
    config.cache_config.num_gpu_blocks = 40
    CpuPlatform.check_and_update_config(config)
    assert config.cache_config.block_size == HYBRID


def test_without_a_kv_cache_the_default_applies():
    """As upstream: another model's size is not kept."""
    config = configured()
    config.cache_config.block_size = HYBRID
    CpuPlatform.check_and_update_config(config)
    assert config.cache_config.block_size == DEFAULT
