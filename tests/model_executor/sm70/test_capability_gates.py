# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Capability 7.0 passes a gate when, and only when, a kernel serves it.

The platform is made to look like a V100. Each checkpoint is taken through the
gate that a real one meets: the model-wide one in ``VllmConfig``, or the one per
layer in compressed-tensors and Quark. Without a kernel the outcome is
upstream's.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm.config import VllmConfig
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear.scaled_mm import (
    BlockScaledMMLinearKernel as block_scaled,
)
from vllm.model_executor.kernels.linear.sm70 import capability as sm70
from vllm.model_executor.layers.quantization.compressed_tensors import (
    compressed_tensors,
)
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
    compressed_tensors_w8a16_fp8,
)
from vllm.model_executor.layers.quantization.fbgemm_fp8 import FBGEMMFp8Config
from vllm.model_executor.layers.quantization.fp8 import Fp8Config
from vllm.model_executor.layers.quantization.modelopt import (
    ModelOptFp8Config,
    ModelOptMixedPrecisionConfig,
    ModelOptMxFp8Config,
    ModelOptNvFp4Config,
)
from vllm.model_executor.layers.quantization.quark.quark import QuarkConfig
from vllm.model_executor.layers.quantization.quark.schemes import quark_w8a8_fp8
from vllm.model_executor.layers.quantization.utils import nvfp4_utils, w8a8_utils
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    kFp8Dynamic128Sym,
    kFp8DynamicTensorSym,
    kFp8Static128BlockSym,
    kFp8StaticTensorSym,
    kFp8StaticTokenSym,
)
from vllm.model_executor.model_loader import weight_utils
from vllm.platforms import PlatformEnum, current_platform
from vllm.platforms.interface import DeviceCapability

HALF = torch.float16


class _Kernel:
    @classmethod
    def is_supported(cls, compute_capability=None):
        return True, None

    @classmethod
    def can_implement(cls, config):
        return True, None

    def process_weights_after_loading(self, layer):
        raise NotImplementedError

    def apply_weights(self, layer, x, bias=None):
        raise NotImplementedError


class NvFp4Kernel(_Kernel, linear.NvFp4LinearKernel):
    pass


class Fp8Kernel(_Kernel, linear.FP8ScaledMMLinearKernel):
    apply_scaled_mm = None


class Fp8BlockKernel(_Kernel, block_scaled.Fp8BlockScaledMMLinearKernel):
    apply_block_scaled_mm = None


KERNELS = {
    sm70.NVFP4_W4A4: NvFp4Kernel,
    sm70.NVFP4_W4A16: NvFp4Kernel,
    sm70.FP8: Fp8Kernel,
    sm70.FP8_BLOCK: Fp8BlockKernel,
    sm70.FP8_WEIGHT_ONLY: Fp8Kernel,
}


@pytest.fixture(autouse=True)
def no_kernel(monkeypatch: pytest.MonkeyPatch):
    """Hide the kernels that this build has, and forget those of the test."""
    monkeypatch.setattr(sm70, "_kernels", {name: [] for name in sm70.QUANTIZATIONS})
    kernels = set(sm70.BACKEND_KERNELS)
    sm70.BACKEND_KERNELS.clear()
    yield
    sm70.BACKEND_KERNELS.clear()
    sm70.BACKEND_KERNELS.update(kernels)


def be_device(monkeypatch: pytest.MonkeyPatch, *version: int) -> None:
    """Make the platform a CUDA device of a capability; a CPU without one."""
    platform = type(current_platform)
    enum = PlatformEnum.CUDA if version else PlatformEnum.CPU
    found = DeviceCapability(*version) if version else None
    monkeypatch.setattr(platform, "_enum", enum)
    monkeypatch.setattr(
        platform, "get_device_capability", classmethod(lambda cls, device_id=0: found)
    )
    # Asked of a CUDA build's extension, which is not what runs here. None of
    # the kernels behind it is compiled for 7.0.
    for module, name in (
        (w8a8_utils.ops, "cutlass_scaled_mm_supports_fp8"),
        (w8a8_utils.ops, "cutlass_scaled_mm_supports_block_fp8"),
        (nvfp4_utils, "cutlass_scaled_mm_supports_fp4"),
    ):
        monkeypatch.setattr(module, name, lambda capability: False)


@pytest.fixture
def volta(monkeypatch: pytest.MonkeyPatch):
    be_device(monkeypatch, 7, 0)


def register(*quantizations: str) -> None:
    for name in quantizations:
        sm70.register(KERNELS[name], name)


def modelopt(algorithm: str, **more: Any) -> dict[str, Any]:
    more.setdefault("exclude_modules", [])
    return {"quantization": {"quant_algo": algorithm, **more}}


MIXED = modelopt(
    "MIXED_PRECISION",
    quantized_layers={
        "model.layers.0.mlp.down_proj": {"quant_algo": "NVFP4", "group_size": 16},
        "model.layers.0.self_attn.o_proj": {"quant_algo": "FP8"},
    },
)
FP8_DYNAMIC = {"quant_method": "fp8", "activation_scheme": "dynamic"}

# Config class, checkpoint's config, upstream's minimum, what it needs.
CONFIGS = {
    "fp8": (Fp8Config, FP8_DYNAMIC, 75, [sm70.FP8]),
    "fp8 block": (
        Fp8Config,
        {**FP8_DYNAMIC, "weight_block_size": [128, 128]},
        75,
        [sm70.FP8_BLOCK],
    ),
    "fbgemm": (
        FBGEMMFp8Config,
        {"modules_to_not_convert": [], "activation_scale_ub": 1200.0},
        80,
        [sm70.FP8],
    ),
    "modelopt fp8": (ModelOptFp8Config, modelopt("FP8"), 80, [sm70.FP8]),
    "modelopt fp8 channel": (
        ModelOptFp8Config,
        modelopt("FP8_PER_CHANNEL_PER_TOKEN"),
        80,
        [sm70.FP8],
    ),
    "modelopt fp8 block": (
        ModelOptFp8Config,
        modelopt("FP8_PB_WO"),
        80,
        [sm70.FP8_BLOCK],
    ),
    "modelopt nvfp4": (
        ModelOptNvFp4Config,
        modelopt("NVFP4", group_size=16, kv_cache_quant_algo=None),
        75,
        [sm70.NVFP4_W4A4],
    ),
    "modelopt nvfp4 weights": (
        ModelOptNvFp4Config,
        modelopt("W4A16_NVFP4", group_size=16, kv_cache_quant_algo=None),
        75,
        [sm70.NVFP4_W4A16],
    ),
    "modelopt mixed": (
        ModelOptMixedPrecisionConfig,
        MIXED,
        75,
        [sm70.FP8, sm70.NVFP4_W4A4],
    ),
}


def load(monkeypatch: pytest.MonkeyPatch, config_class, checkpoint):
    """The quantization config of a model, as an engine start gets it."""
    config = config_class.from_config(checkpoint)
    monkeypatch.setattr(weight_utils, "get_quant_config", lambda *args: config)
    model = SimpleNamespace(
        quantization=config.get_name(),
        dtype=HALF,
        model="model",
        hf_config=None,
        revision=None,
    )
    return VllmConfig._get_quantization_config(model, None)


@pytest.mark.parametrize("case", CONFIGS)
def test_model_gate(monkeypatch: pytest.MonkeyPatch, volta, case: str):
    config_class, checkpoint, upstream, needed = CONFIGS[case]
    refused = f"Minimum capability: {upstream}. Current capability: 70."

    with pytest.raises(ValueError, match=refused):
        load(monkeypatch, config_class, checkpoint)

    # Kernels for everything but one of its needs do not serve it.
    for missing in needed:
        register(*(name for name in sm70.QUANTIZATIONS if name != missing))
        with pytest.raises(ValueError, match=refused):
            load(monkeypatch, config_class, checkpoint)
        for kernel in KERNELS.values():
            sm70.unregister(kernel)

    register(*needed)
    assert load(monkeypatch, config_class, checkpoint).get_name()

    for name in needed:
        sm70.unregister(KERNELS[name])
    with pytest.raises(ValueError, match=refused):
        load(monkeypatch, config_class, checkpoint)


@pytest.mark.parametrize("case", CONFIGS)
def test_model_gate_keeps_older_devices_out(monkeypatch: pytest.MonkeyPatch, case: str):
    be_device(monkeypatch, 6, 1)
    register(*sm70.QUANTIZATIONS)
    config_class, checkpoint, _, _ = CONFIGS[case]
    refused = "Minimum capability: 70. Current capability: 61."
    with pytest.raises(ValueError, match=refused):
        load(monkeypatch, config_class, checkpoint)


def test_other_formats_keep_their_minimum(monkeypatch: pytest.MonkeyPatch, volta):
    register(*sm70.QUANTIZATIONS)
    with pytest.raises(ValueError, match="Minimum capability: 80"):
        load(
            monkeypatch,
            ModelOptMxFp8Config,
            modelopt("MXFP8", kv_cache_quant_algo=None),
        )
    mixed = modelopt(
        "MIXED_PRECISION",
        quantized_layers={
            "a": {"quant_algo": "NVFP4", "group_size": 16},
            "b": {"quant_algo": "MXFP8"},
        },
    )
    with pytest.raises(ValueError, match="Minimum capability: 75"):
        load(monkeypatch, ModelOptMixedPrecisionConfig, mixed)


NVFP4 = {
    "num_bits": 4,
    "type": "float",
    "strategy": "tensor_group",
    "group_size": 16,
    "symmetric": True,
    "dynamic": False,
}
FP8_WEIGHT = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
FP8_TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
FP8_GROUP = {
    "num_bits": 8,
    "type": "float",
    "strategy": "group",
    "group_size": 128,
    "dynamic": True,
}
# Format, weights, activations, what it needs, how upstream refuses it.
NVFP4_FORMAT, FP8_FORMAT = "nvfp4-pack-quantized", "float-quantized"
TOO_OLD = "Min capability: 75. Current capability: 70."
SCHEMES = {
    "nvfp4": (
        NVFP4_FORMAT,
        NVFP4,
        {**NVFP4, "dynamic": "local"},
        sm70.NVFP4_W4A4,
        TOO_OLD,
    ),
    "nvfp4 weights": (
        NVFP4_FORMAT,
        NVFP4,
        None,
        sm70.NVFP4_W4A16,
        "Forced NVFP4 kernel MarlinNvFp4LinearKernel is not supported",
    ),
    "fp8 channel": (
        FP8_FORMAT,
        {**FP8_WEIGHT, "strategy": "channel"},
        FP8_TOKEN,
        sm70.FP8_WEIGHT_ONLY,
        TOO_OLD,
    ),
    "fp8 block": (
        FP8_FORMAT,
        {**FP8_WEIGHT, "strategy": "block", "block_structure": [128, 128]},
        FP8_GROUP,
        sm70.FP8_WEIGHT_ONLY,
        TOO_OLD,
    ),
}


@pytest.mark.parametrize("case", SCHEMES)
def test_compressed_tensors_gate(
    monkeypatch: pytest.MonkeyPatch, default_vllm_config, volta, case: str
):
    form, weights, activations, needed, refused = SCHEMES[case]
    monkeypatch.setattr(
        compressed_tensors_w8a16_fp8,
        "get_current_vllm_config",
        lambda: SimpleNamespace(model_config=SimpleNamespace(dtype=HALF)),
    )
    config = compressed_tensors.CompressedTensorsConfig.from_config(
        {
            "format": form,
            "ignore": [],
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": weights,
                    "input_activations": activations,
                    "output_activations": None,
                }
            },
        }
    )
    layer = torch.nn.Linear(256, 256)

    def scheme():
        return config.get_scheme(layer, "model.layers.0.self_attn.o_proj")

    with pytest.raises((RuntimeError, ValueError), match=refused):
        scheme()
    register(needed)
    chosen = scheme()
    assert sm70.min_capability(chosen) == 70 < chosen.get_min_capability()
    if needed in (sm70.NVFP4_W4A4, sm70.NVFP4_W4A16):
        assert type(chosen.kernel) is NvFp4Kernel
    sm70.unregister(KERNELS[needed])
    with pytest.raises((RuntimeError, ValueError), match=refused):
        scheme()


def test_quark_gate(monkeypatch: pytest.MonkeyPatch, volta):
    monkeypatch.setattr(
        quark_w8a8_fp8,
        "get_current_vllm_config",
        lambda: SimpleNamespace(model_config=SimpleNamespace(dtype=HALF)),
    )
    tensor = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False}
    config = QuarkConfig.from_config(
        {
            "export": {"kv_cache_group": [], "pack_method": "reorder"},
            "exclude": [],
            "layer_quant_config": {},
            "layer_type_quant_config": {},
            "global_quant_config": {"weight": tensor, "input_tensors": tensor},
        }
    )

    def scheme():
        weight, activation, scheme_class = config.get_scheme_cls(
            torch.nn.Linear, "model.layers.0.self_attn.o_proj"
        )
        return config.init_scheme(scheme_class, weight, activation)

    refused = "Min capability: 89. Current capability: 70."
    with pytest.raises(RuntimeError, match=refused):
        scheme()
    register(sm70.FP8)
    assert sm70.min_capability(scheme()) == 70
    sm70.unregister(KERNELS[sm70.FP8])
    with pytest.raises(RuntimeError, match=refused):
        scheme()


def select(quantization: str) -> type:
    """The kernel that upstream's selection takes for a layer."""
    shape = dict(input_dtype=HALF, out_dtype=HALF, weight_shape=(256, 256))
    if quantization in (sm70.NVFP4_W4A4, sm70.NVFP4_W4A16):
        use_a16 = quantization == sm70.NVFP4_W4A16
        return type(linear.init_nvfp4_linear_kernel(use_a16=use_a16))
    if quantization == sm70.FP8_WEIGHT_ONLY:
        kernel = linear.init_wfp8_a16_linear_kernel(
            kFp8StaticTokenSym, kFp8DynamicTensorSym, **shape
        )
    elif quantization == sm70.FP8_BLOCK:
        kernel = linear.init_fp8_linear_kernel(
            kFp8Dynamic128Sym, kFp8Static128BlockSym, **shape
        )
    else:
        kernel = linear.init_fp8_linear_kernel(
            kFp8StaticTensorSym, kFp8StaticTensorSym, **shape
        )
    return type(kernel)


NO_KERNEL = "Failed to find a kernel"


@pytest.mark.parametrize(
    "quantization, upstream",
    [
        (sm70.NVFP4_W4A4, linear.EmulationNvFp4LinearKernel),
        (sm70.NVFP4_W4A16, "Forced NVFP4 kernel MarlinNvFp4LinearKernel"),
        (sm70.FP8, NO_KERNEL),
        # It accepts any CUDA device; its FP8 type does not exist on 7.0.
        (sm70.FP8_BLOCK, linear.TritonFp8BlockScaledMMKernel),
        (sm70.FP8_WEIGHT_ONLY, NO_KERNEL),
    ],
)
def test_selection_takes_a_registered_kernel(
    default_vllm_config, volta, quantization: str, upstream: type | str
):
    def expect_upstream():
        if isinstance(upstream, str):
            with pytest.raises(ValueError, match=upstream):
                select(quantization)
        else:
            assert select(quantization) is upstream

    expect_upstream()
    register(quantization)
    assert select(quantization) is KERNELS[quantization]
    sm70.unregister(KERNELS[quantization])
    expect_upstream()


def candidates(monkeypatch, quantization: str, backend: str) -> list[type]:
    monkeypatch.setattr(linear, "_get_linear_backend", lambda quantization: backend)
    table = [linear.MarlinNvFp4LinearKernel, linear.EmulationNvFp4LinearKernel]
    resolved = linear._resolve_backend_kernels(
        list(table), "test", quantization=quantization
    )
    return ["ours" if kernel is NvFp4Kernel else kernel for kernel in resolved]


@pytest.mark.parametrize(
    "device, backend, expected",
    [
        # By itself only where nothing else is fit.
        ((7, 0), "auto", ["ours", "marlin", "emulation"]),
        ((7, 5), "auto", ["marlin", "emulation"]),
        ((9, 0), "auto", ["marlin", "emulation"]),
        ((), "auto", ["marlin", "emulation"]),
        # On request anywhere.
        ((7, 0), "sm70", ["ours"]),
        ((9, 0), "sm70", ["ours"]),
        ((), "sm70", ["ours"]),
        # A request for another backend is one; without a kernel of that
        # backend selection is automatic.
        ((7, 0), "marlin", ["marlin"]),
        ((7, 0), "deep_gemm", ["ours", "marlin", "emulation"]),
        ((9, 0), "deep_gemm", ["marlin", "emulation"]),
    ],
)
def test_candidates(monkeypatch: pytest.MonkeyPatch, device, backend, expected):
    be_device(monkeypatch, *device)
    names = {
        "ours": "ours",
        "marlin": linear.MarlinNvFp4LinearKernel,
        "emulation": linear.EmulationNvFp4LinearKernel,
    }
    quantization = sm70.NVFP4_W4A4
    upstream = [names["marlin"], names["emulation"]]
    if backend == "marlin":
        upstream = upstream[:1]
    assert candidates(monkeypatch, quantization, backend) == upstream
    register(quantization)
    found = candidates(monkeypatch, quantization, backend)
    assert found == [names[name] for name in expected]
    # Registered for that quantization only.
    assert candidates(monkeypatch, sm70.NVFP4_W4A16, backend) == upstream
    assert candidates(monkeypatch, "mixed_precision", backend) == upstream


def test_the_cpu_takes_ours_where_upstream_has_no_candidate(
    monkeypatch: pytest.MonkeyPatch,
):
    register(sm70.NVFP4_W4A4)
    ours = [KERNELS[sm70.NVFP4_W4A4]]
    be_device(monkeypatch)
    assert sm70.add_sm70_kernels([], sm70.NVFP4_W4A4, "auto") == ours
    be_device(monkeypatch, 9, 0)
    assert sm70.add_sm70_kernels([], sm70.NVFP4_W4A4, "auto") == []


@pytest.mark.parametrize(
    "device, ours", [((7, 0), True), ((7, 5), False), ((9, 0), False), ((), True)]
)
def test_marlin_is_not_forced_where_ours_is_wanted(
    monkeypatch: pytest.MonkeyPatch, default_vllm_config, device, ours: bool
):
    """``init_nvfp4_linear_kernel`` forces Marlin for weight-only NVFP4."""
    be_device(monkeypatch, *device)
    monkeypatch.setattr(
        linear.MarlinNvFp4LinearKernel, "is_supported", lambda *args: (True, None)
    )
    assert select(sm70.NVFP4_W4A16) is linear.MarlinNvFp4LinearKernel
    register(sm70.NVFP4_W4A16)
    wanted = NvFp4Kernel if ours else linear.MarlinNvFp4LinearKernel
    assert select(sm70.NVFP4_W4A16) is wanted


def test_register_rejects_unknown_quantizations():
    with pytest.raises(ValueError, match=r"\['nvfp4'\], expected one or more of"):
        sm70.register(NvFp4Kernel, sm70.NVFP4_W4A4, "nvfp4")
    with pytest.raises(ValueError, match="are missing, expected"):
        sm70.register(NvFp4Kernel)
    assert not sm70.BACKEND_KERNELS and not any(sm70._kernels.values())


def test_registering_twice_is_once():
    sm70.register(NvFp4Kernel, sm70.NVFP4_W4A4)
    sm70.register(NvFp4Kernel, sm70.NVFP4_W4A4, sm70.NVFP4_W4A16)
    assert sm70._kernels[sm70.NVFP4_W4A4] == [NvFp4Kernel]
    assert {NvFp4Kernel} == sm70.BACKEND_KERNELS
    sm70.unregister(NvFp4Kernel)
    sm70.unregister(NvFp4Kernel)
    assert not sm70.BACKEND_KERNELS and not any(sm70._kernels.values())
