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
