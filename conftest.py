# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What tests of ours use of upstream's tests/conftest.py, for runs from here.

In build/tree, where upstream's own conftest is, this file is out of reach.
"""

import pytest


@pytest.fixture
def default_vllm_config():
    """Run a test under a default vLLM configuration."""
    from vllm.config import VllmConfig, set_current_vllm_config

    config = VllmConfig()
    with set_current_vllm_config(config):
        yield config


@pytest.fixture
def dist_init(tmp_path):
    """Run a test in a process group and a model-parallel group of one."""
    from vllm.config import (
        VllmConfig,
        get_current_vllm_config_or_none,
        set_current_vllm_config,
    )
    from vllm.distributed import (
        cleanup_dist_env_and_memory,
        init_distributed_environment,
        initialize_model_parallel,
    )
    from vllm.platforms import current_platform

    config = get_current_vllm_config_or_none() or VllmConfig()
    backend = "gloo" if current_platform.is_cpu() else "nccl"
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{tmp_path / 'store'}", 0, backend)
        initialize_model_parallel(1, 1)
        yield
    cleanup_dist_env_and_memory()
