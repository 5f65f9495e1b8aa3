# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A build for capability 7.0 alone imports and serves without FlashAttention.

Each case runs in a process of its own that stands for such a build: the CUDA
platform with a given capability, the two extensions that every CUDA build has
(as empty modules, with the operators that are asked at import), and no other.
"""

import subprocess
import sys

import pytest

from vllm.model_executor.layers.rotary_embedding import common

PRELUDE = """
import sys
import types
from importlib import import_module

import torch

MAJOR, MINOR = {capability}

for name in ("vllm._C_stable_libtorch", "vllm._moe_C_stable_libtorch"):
    sys.modules[name] = types.ModuleType(name)
# What is compiled into this installation is not part of that build.
for name in ("_C", "_C_AVX2", "_C_AVX512", "vllm_flash_attn._vllm_fa2_C",
             "vllm_flash_attn._vllm_fa3_C", "_flashmla_C", "_qutlass_C"):
    sys.modules["vllm." + name] = None

ops = torch.library.Library("_C", "FRAGMENT")
for name in ("cutlass_scaled_mm_supports_fp8", "cutlass_group_gemm_supported",
             "cutlass_scaled_mm_supports_block_fp8"):
    ops.define(name + "(int capability) -> bool")
    ops.impl(name, lambda capability: False, "CompositeImplicitAutograd")

import vllm.platforms
from vllm.platforms.cuda import CudaPlatformBase
from vllm.platforms.interface import DeviceCapability


class Device(CudaPlatformBase):
    @classmethod
    def get_device_capability(cls, device_id=0):
        return DeviceCapability(MAJOR, MINOR)

    @classmethod
    def get_device_name(cls, device_id=0):
        return "stub"


vllm.platforms.current_platform = Device()
"""


def run(capability: tuple[int, int], code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PRELUDE.format(capability=capability) + code],
        capture_output=True,
        text=True,
    )


def test_modules_that_every_model_loads_import():
    done = run(
        (7, 0),
        """
for module in ("model_executor.layers.attention", "v1.worker.gpu_worker",
               "v1.worker.gpu_model_runner", "v1.worker.gpu.model_runner",
               "v1.attention.backends.triton_attn",
               "v1.attention.backends.flash_attn",
               "model_executor.models.qwen3_next", "model_executor.models.qwen3_vl"):
    import_module("vllm." + module)
from vllm.v1.attention.backends.fa_utils import (
    get_flash_attn_version, is_fa_version_supported)
assert get_flash_attn_version(head_size=256) is None
assert not any(is_fa_version_supported(version) for version in (2, 3, 4))
print("imported")
""",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("imported\n")
    # A V100 without FlashAttention is no error worth a log line.
    assert "Cannot use FA version" not in done.stdout + done.stderr


def test_choosing_flash_attention_names_the_capability():
    done = run(
        (7, 0),
        """
from vllm.v1.attention.backends.registry import AttentionBackendEnum
backend = AttentionBackendEnum.FLASH_ATTN.get_class()
print(backend.supports_compute_capability(Device.get_device_capability()))
""",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("False\n")


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (9, 0)])
def test_missing_extensions_stay_an_error_elsewhere(capability: tuple[int, int]):
    done = run(capability, "import vllm.v1.attention.backends.fa_utils")
    assert done.returncode != 0
    assert "requires the CUDA flash attention extensions" in done.stderr


def test_rotary_embedding_without_the_kernel_is_the_native_one():
    done = run(
        (7, 0),
        """
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding.common import ApplyRotaryEmb
with set_current_vllm_config(VllmConfig()):
    rotary = ApplyRotaryEmb(enforce_enable=True)
torch.manual_seed(0)
x, angle = torch.randn(5, 3, 8), torch.randn(5, 4)
out = rotary(x, angle.cos(), angle.sin())
first, second = x.chunk(2, -1)
cos, sin = angle.cos()[:, None], angle.sin()[:, None]
expected = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
torch.testing.assert_close(out, expected, rtol=0, atol=0)
print("equal")
""",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("equal\n")


@pytest.mark.parametrize("missing", [True, False])
def test_rotary_embedding_follows_the_kernel(
    monkeypatch: pytest.MonkeyPatch, default_vllm_config, missing: bool
):
    monkeypatch.setattr(common, "flash_attention_rotary_is_missing", lambda: missing)
    monkeypatch.setattr(
        common.ApplyRotaryEmb,
        "dispatch_forward",
        lambda self, compile_native=False: self.forward_cuda,
    )
    rotary = common.ApplyRotaryEmb()
    chosen = rotary.forward_native if missing else rotary.forward_cuda
    assert rotary._forward_method == chosen
