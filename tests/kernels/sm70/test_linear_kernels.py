# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The kernel classes: who gets them, and what they make of a layer's weights."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm.config import KernelConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.kernels import linear as upstream
from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import (
    FP8ScaledMMLinearLayerConfig,
)
from vllm.model_executor.kernels.linear.sm70 import kernels, scratch
from vllm.model_executor.kernels.linear.sm70.kernels import (
    Sm70Fp8LinearKernel,
    Sm70NvFp4LinearKernel,
)
from vllm.model_executor.kernels.linear.sm70.linear import max_lanes
from vllm.model_executor.layers.linear import MergedColumnParallelLinear
from vllm.model_executor.layers.quantization import fbgemm_fp8, fp8
from vllm.model_executor.layers.quantization.fbgemm_fp8 import FBGEMMFp8Config
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    GroupShape,
    QuantKey,
    create_fp8_quant_key,
    kFp8Dynamic128Sym,
    kFp8DynamicTensorSym,
    kFp8DynamicTokenSym,
    kFp8Static128BlockSym,
    kFp8StaticChannelSym,
    kFp8StaticTensorSym,
)
from vllm.platforms import PlatformEnum, current_platform
from vllm.platforms.interface import DeviceCapability

from .reference import assert_same_bits, fp8_reference, nvfp4_reference

HALF = torch.float16
FP8_NAMES = ("weight", "weight_scale", "input_scale", "input_scale_ub")


@pytest.fixture(autouse=True)
def no_scratch_left() -> Any:
    scratch.reset_scratch()
    yield
    scratch.reset_scratch()


def be_device(monkeypatch: pytest.MonkeyPatch, *version: int) -> None:
    """Make the platform a CUDA device of a capability, with our kernels built."""
    platform = type(current_platform)
    monkeypatch.setattr(platform, "_enum", PlatformEnum.CUDA)
    monkeypatch.setattr(
        platform,
        "get_device_capability",
        classmethod(lambda cls, device_id=0: DeviceCapability(*version)),
    )
    monkeypatch.setattr(kernels.ops, "unavailable_reason", lambda device_type: None)


def fp8_config(
    weight_key: QuantKey, activation_key: QuantKey, **changed: Any
) -> FP8ScaledMMLinearLayerConfig:
    values = {
        "weight_quant_key": weight_key,
        "activation_quant_key": activation_key,
        "weight_shape": (256, 128),
        "input_dtype": HALF,
        "out_dtype": HALF,
        **changed,
    }
    return FP8ScaledMMLinearLayerConfig(**values)


def choose_nvfp4(use_a16: bool) -> type:
    return type(upstream.init_nvfp4_linear_kernel(use_a16=use_a16))


def choose_fp8(weight_key: QuantKey, activation_key: QuantKey) -> type:
    return type(
        upstream.init_fp8_linear_kernel(
            activation_quant_key=activation_key,
            weight_quant_key=weight_key,
            input_dtype=HALF,
            out_dtype=HALF,
            weight_shape=(256, 128),
        )
    )


def choose_fp8_weight_only() -> type:
    return type(
        upstream.init_wfp8_a16_linear_kernel(
            weight_quant_key=kFp8StaticChannelSym,
            activation_quant_key=kFp8DynamicTensorSym,
            weight_shape=(256, 128),
            input_dtype=HALF,
            out_dtype=HALF,
        )
    )


CHOICES = {
    "NVFP4 W4A4": (lambda: choose_nvfp4(False), Sm70NvFp4LinearKernel),
    "NVFP4 W4A16": (lambda: choose_nvfp4(True), Sm70NvFp4LinearKernel),
    "FP8 tensor": (
        lambda: choose_fp8(kFp8StaticTensorSym, kFp8StaticTensorSym),
        Sm70Fp8LinearKernel,
    ),
    "FP8 channel": (
        lambda: choose_fp8(kFp8StaticChannelSym, kFp8DynamicTokenSym),
        Sm70Fp8LinearKernel,
    ),
    "FP8 block": (
        lambda: choose_fp8(kFp8Static128BlockSym, kFp8Dynamic128Sym),
        Sm70Fp8LinearKernel,
    ),
    "FP8 weight only": (choose_fp8_weight_only, Sm70Fp8LinearKernel),
}


@pytest.mark.parametrize("case", CHOICES)
def test_a_v100_gets_the_kernels(
    case: str, monkeypatch: pytest.MonkeyPatch, default_vllm_config: VllmConfig
) -> None:
    be_device(monkeypatch, 7, 0)
    choose, expected = CHOICES[case]
    assert choose() is expected


@pytest.mark.parametrize("case", CHOICES)
@pytest.mark.parametrize("version", [(7, 5), (8, 0), (9, 0)])
def test_later_gpus_get_them_when_asked(
    case: str, version: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    be_device(monkeypatch, *version)
    choose, expected = CHOICES[case]
    config = VllmConfig(kernel_config=KernelConfig(linear_backend="sm70"))
    with set_current_vllm_config(config):
        assert choose() is expected


@pytest.mark.parametrize("version", [(7, 5), (8, 0), (9, 0)])
def test_later_gpus_do_not_get_them_unasked(
    version: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
    default_vllm_config: VllmConfig,
) -> None:
    be_device(monkeypatch, *version)
    monkeypatch.setattr(
        upstream.MarlinNvFp4LinearKernel,
        "is_supported",
        classmethod(lambda cls, compute_capability=None: (True, None)),
    )
    assert choose_nvfp4(True) is upstream.MarlinNvFp4LinearKernel


@pytest.mark.parametrize("use_a16", [False, True])
def test_the_cpu_gets_them_for_nvfp4(
    use_a16: bool, default_vllm_config: VllmConfig
) -> None:
    if not current_platform.is_cpu():
        pytest.skip("the platform is not the CPU")
    assert choose_nvfp4(use_a16) is Sm70NvFp4LinearKernel


@pytest.mark.parametrize(
    ("version", "reason"),
    [((6, 1), "requires compute capability 7.0, got 6.1"), ((7, 0), None)],
)
def test_capabilities(
    version: tuple[int, int], reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    be_device(monkeypatch, *version)
    for kernel in (Sm70NvFp4LinearKernel, Sm70Fp8LinearKernel):
        assert kernel.is_supported() == (reason is None, reason)
        capability = DeviceCapability(*version).to_int()
        assert kernel.is_supported(capability) == (reason is None, reason)


def test_other_platforms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(current_platform), "_enum", PlatformEnum.XPU)
    supported, reason = Sm70NvFp4LinearKernel.is_supported()
    assert not supported and reason == "requires a CUDA GPU or the CPU"


def test_batch_invariance_is_not_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    supported, reason = Sm70Fp8LinearKernel.is_supported()
    assert not supported and "VLLM_BATCH_INVARIANT" in str(reason)


def test_a_missing_extension_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels.ops, "unavailable_reason", lambda device: "not built")
    assert Sm70NvFp4LinearKernel.is_supported() == (False, "not built")


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"weight_shape": (256, 24)}, "K must be a multiple of 16, got 24"),
        ({"out_dtype": torch.float32}, "one dtype"),
        ({"input_dtype": torch.int8, "out_dtype": torch.int8}, "one dtype"),
        (
            {"weight_quant_key": create_fp8_quant_key(True, GroupShape(64, 64))},
            "128 x 128",
        ),
        (
            {"weight_quant_key": create_fp8_quant_key(True, GroupShape(1, 128))},
            "128 x 128",
        ),
    ],
)
def test_fp8_layers_that_do_not_fit(changed: dict[str, Any], reason: str) -> None:
    config = fp8_config(kFp8StaticTensorSym, kFp8DynamicTensorSym, **changed)
    fits, why = Sm70Fp8LinearKernel.can_implement(config)
    assert not fits and reason in str(why)


def test_fp32_layers_are_for_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    config = fp8_config(
        kFp8StaticTensorSym,
        kFp8DynamicTensorSym,
        input_dtype=torch.float32,
        out_dtype=torch.float32,
    )
    monkeypatch.setattr(type(current_platform), "_enum", PlatformEnum.CPU)
    assert Sm70Fp8LinearKernel.can_implement(config) == (True, None)
    be_device(monkeypatch, 7, 0)
    fits, why = Sm70Fp8LinearKernel.can_implement(config)
    assert not fits and "CPU only" in str(why)


def codes(*shape: int, low: int = 0, high: int = 256) -> torch.Tensor:
    return torch.randint(low, high, shape, dtype=torch.uint8)


def module(**tensors: torch.Tensor) -> torch.nn.Module:
    layer = torch.nn.Module()
    for name, tensor in tensors.items():
        layer.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
    layer.params_dtype = HALF
    return layer


def test_nvfp4_weights_stay_where_they_are(
    default_vllm_config: VllmConfig,
) -> None:
    torch.manual_seed(0)
    packed, scales = codes(512, 64), codes(512, 8, low=48, high=64)
    layer = module(
        weight=packed,
        weight_scale=scales.view(torch.float8_e4m3fn),
        weight_global_scale=torch.tensor(0.01),
    )
    layer.logical_widths = [256, 256]
    before = {name: p.data_ptr() for name, p in layer.named_parameters()}
    kernel = upstream.init_nvfp4_linear_kernel()
    assert isinstance(kernel, Sm70NvFp4LinearKernel)
    kernel.process_weights_after_loading(layer)
    assert {name: p.data_ptr() for name, p in layer.named_parameters()} == before
    assert layer._gated_kernel is kernel

    dense = nvfp4_reference(packed, scales, torch.tensor(0.01), HALF).float()
    x = torch.randn(2, 20, 128).to(HALF)
    out = kernel.apply_weights(layer, x)
    assert out.shape == (2, 20, 512) and out.dtype == HALF
    torch.testing.assert_close(out.float(), x.float() @ dense.t(), atol=0.05, rtol=0.01)
    gate, up = out.float().chunk(2, dim=-1)
    gated = kernel.apply_gated_weights(layer, x, None)
    assert gated.shape == (2, 20, 256)
    torch.testing.assert_close(
        gated.float(), gate * gate.sigmoid() * up, atol=0.05, rtol=0.01
    )


@pytest.mark.parametrize(
    "widths", [[512], [256, 128, 128], [300, 212], [128, 128]], ids=str
)
def test_only_two_equal_halves_are_gated(
    widths: list[int], default_vllm_config: VllmConfig
) -> None:
    layer = module(
        weight=codes(512, 64),
        weight_scale=codes(512, 8).view(torch.float8_e4m3fn),
        weight_global_scale=torch.tensor(0.01),
    )
    layer.logical_widths = widths
    kernel = Sm70NvFp4LinearKernel(upstream.NvFp4LinearLayerConfig())
    kernel.process_weights_after_loading(layer)
    assert layer._gated_kernel is None


def test_layers_declare_their_scratch(default_vllm_config: VllmConfig) -> None:
    layer = module(
        weight=codes(512, 64),
        weight_scale=codes(512, 8, high=64).view(torch.float8_e4m3fn),
        weight_global_scale=torch.tensor(0.01),
    )
    kernel = Sm70NvFp4LinearKernel(upstream.NvFp4LinearLayerConfig())
    kernel.process_weights_after_loading(layer)
    kernel.apply_weights(layer, torch.zeros(300, 128, dtype=HALF))
    # One tile, the whole weight.
    assert scratch.scratch_of(layer.weight.device).nbytes == 512 * 128 * 2


def test_a_v100_has_two_lanes_and_a_cpu_one() -> None:
    assert max_lanes(torch.device("cuda", 0)) == 2
    assert max_lanes(torch.device("cpu")) == 1


def fp8_kernel(weight_key: QuantKey, activation_key: QuantKey) -> Sm70Fp8LinearKernel:
    return Sm70Fp8LinearKernel(fp8_config(weight_key, activation_key), FP8_NAMES)


@pytest.mark.parametrize("name", ["weight_scale", "weight_scale_inv"])
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.float8_e8m0fnu])
def test_fp8_block_scales(
    name: str, scale_dtype: torch.dtype, default_vllm_config: VllmConfig
) -> None:
    torch.manual_seed(0)
    weight = codes(320, 256, high=0x60)
    scales = torch.tensor([[0.25, 0.5], [1.0, 2.0], [0.125, 4.0]])
    layer = module(
        weight=weight.view(torch.float8_e4m3fn), **{name: scales.to(scale_dtype)}
    )
    address = layer.weight.data_ptr()
    kernel = fp8_kernel(kFp8Static128BlockSym, kFp8Dynamic128Sym)
    kernel.process_weights_after_loading(layer)
    assert layer.weight.data_ptr() == address
    assert_same_bits(getattr(layer, name).data, scales)
    x = torch.randn(40, 256).to(HALF)
    expected = x.float() @ fp8_reference(weight, scales, HALF).float().t()
    out = kernel.apply_weights(layer, x)
    torch.testing.assert_close(out.float(), expected, atol=0.5, rtol=0.01)


@pytest.mark.parametrize(
    ("key", "scales", "per_row"),
    [
        (kFp8StaticTensorSym, torch.tensor(0.5), [0.5] * 320),
        (kFp8StaticTensorSym, torch.tensor([0.5]), [0.5] * 320),
        # Fused parts, each with its own scale: none is requantised.
        (
            kFp8StaticTensorSym,
            torch.tensor([0.5, 0.25]),
            [0.5] * 192 + [0.25] * 128,
        ),
        (
            kFp8StaticChannelSym,
            torch.arange(1, 321) / 64,
            [i / 64 for i in range(1, 321)],
        ),
        (
            kFp8StaticChannelSym,
            (torch.arange(1, 321) / 64)[:, None].double(),
            [i / 64 for i in range(1, 321)],
        ),
    ],
    ids=["scalar", "one", "fused", "channel", "channel [N, 1]"],
)
@pytest.mark.parametrize("contiguous", [False, True])
def test_fp8_row_scales(
    key: QuantKey,
    scales: torch.Tensor,
    per_row: list[float],
    contiguous: bool,
    default_vllm_config: VllmConfig,
) -> None:
    torch.manual_seed(0)
    weight = codes(320, 128, high=0x60)
    turned = weight.view(torch.float8_e4m3fn).t()
    layer = module(
        weight=turned.contiguous() if contiguous else turned, weight_scale=scales
    )
    layer.logical_widths = [192, 128]
    kernel = fp8_kernel(key, kFp8DynamicTokenSym)
    kernel.process_weights_after_loading(layer)
    assert layer.weight.shape == (128, 320) and layer.weight.t().is_contiguous()
    expected_scales = torch.tensor(per_row)[:, None]
    assert_same_bits(layer.weight_scale.data, expected_scales)
    x = torch.randn(40, 128).to(HALF)
    expected = x.float() @ fp8_reference(weight, expected_scales, HALF).float().t()
    out = kernel.apply_weights(layer, x, torch.ones(320, dtype=HALF))
    torch.testing.assert_close(out.float(), expected + 1, atol=0.5, rtol=0.01)


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch, dist_init: Any) -> Any:
    """Layers get our kernels, in FP16, as in an engine that was told so."""
    for method in (fp8, fbgemm_fp8):
        monkeypatch.setattr(
            method,
            "get_current_vllm_config",
            lambda: SimpleNamespace(model_config=SimpleNamespace(dtype=HALF)),
        )
    before = torch.get_default_dtype()
    torch.set_default_dtype(HALF)
    config = VllmConfig(kernel_config=KernelConfig(linear_backend="sm70"))
    with set_current_vllm_config(config):
        yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize("activation", ["dynamic", "static"])
def test_fp8_fused_parts_are_not_requantised(activation: str, chosen: Any) -> None:
    """Upstream's method would bring both parts to the larger scale, and round."""
    config = fp8.Fp8Config(
        is_checkpoint_fp8_serialized=True, activation_scheme=activation
    )
    layer = MergedColumnParallelLinear(
        128, [192, 192], bias=False, quant_config=config, prefix="gate_up_proj"
    )
    torch.manual_seed(0)
    weight = codes(384, 128, high=0x60)
    layer.weight.data.copy_(weight.view(torch.float8_e4m3fn))
    layer.weight_scale.data.copy_(torch.tensor([0.01, 0.03]))
    if activation == "static":
        layer.input_scale.data.fill_(0.5)
    layer.quant_method.process_weights_after_loading(layer)
    scales = torch.tensor([0.01] * 192 + [0.03] * 192)[:, None]
    x = torch.randn(40, 128).to(HALF)
    expected = x.float() @ fp8_reference(weight, scales, HALF).float().t()
    out, _ = layer(x)
    torch.testing.assert_close(out.float(), expected, atol=0.05, rtol=0.01)
    assert isinstance(layer._gated_kernel, Sm70Fp8LinearKernel)


def test_fbgemm_checkpoints(chosen: Any) -> None:
    """Where FP8 has no hardware upstream's method repacks weights for Marlin."""
    config = FBGEMMFp8Config(ignore_list=[], input_scale_ub=1200.0)
    config.use_marlin = True
    layer = MergedColumnParallelLinear(
        128, [192, 192], bias=False, quant_config=config, prefix="gate_up_proj"
    )
    torch.manual_seed(0)
    weight = codes(384, 128, high=0x60)
    layer.weight.data.copy_(weight.view(torch.float8_e4m3fn))
    scales = 0.01 + torch.rand(384, 1, dtype=torch.float32) / 64
    layer.weight_scale.data.copy_(scales)
    layer.quant_method.process_weights_after_loading(layer)
    x = torch.randn(40, 128).to(HALF)
    expected = x.float() @ fp8_reference(weight, scales, HALF).float().t()
    out, _ = layer(x)
    torch.testing.assert_close(out.float(), expected, atol=0.05, rtol=0.01)


def test_fp8_scales_of_a_wrong_number_are_refused(
    default_vllm_config: VllmConfig,
) -> None:
    layer = module(
        weight=codes(320, 128).view(torch.float8_e4m3fn).t(),
        weight_scale=torch.ones(3),
    )
    layer.logical_widths = [192, 128]
    kernel = fp8_kernel(kFp8StaticChannelSym, kFp8DynamicTokenSym)
    with pytest.raises(ValueError, match=r"weight_scale has shape \[3\]: expected"):
        kernel.process_weights_after_loading(layer)


@pytest.mark.parametrize("width", ["0", "128", "auto"])
def test_the_setting_reaches_the_operator(
    width: str, monkeypatch: pytest.MonkeyPatch, default_vllm_config: VllmConfig
) -> None:
    monkeypatch.setenv("VLLM_SM70_TILE_WIDTH", width)
    seen: list[tuple[Any, ...]] = []
    kernel = Sm70NvFp4LinearKernel(upstream.NvFp4LinearLayerConfig())
    layer: Any = SimpleNamespace(weight=0, weight_scale=1, weight_global_scale=2)

    def operator(*arguments: Any) -> torch.Tensor:
        seen.append(arguments)
        return torch.zeros(6, 4)

    kernel._apply(operator, layer, torch.zeros(2, 3, 8), None)  # type: ignore[arg-type]
    (arguments,) = seen
    assert arguments[0].shape == (6, 8)
    assert arguments[-2] == (-1 if width == "auto" else int(width))


def test_a_setting_that_cannot_work_stops_the_start(
    monkeypatch: pytest.MonkeyPatch, default_vllm_config: VllmConfig
) -> None:
    monkeypatch.setenv("VLLM_SM70_TILE_WIDTH", "100")
    with pytest.raises(ValueError, match="VLLM_SM70_TILE_WIDTH=100"):
        upstream.init_nvfp4_linear_kernel()
    with pytest.raises(ValueError, match="VLLM_SM70_TILE_WIDTH=100"):
        fp8_kernel(kFp8Static128BlockSym, kFp8Dynamic128Sym)


def test_column_shards_have_the_bits_of_the_whole(
    default_vllm_config: VllmConfig,
) -> None:
    """Tensor parallelism over columns: each rank's part is a part of the whole."""
    torch.manual_seed(0)
    packed, scales = codes(640, 64), codes(640, 8, low=48, high=64)
    x = torch.randn(70, 128).to(HALF)

    def run(begin: int, end: int) -> torch.Tensor:
        layer = module(
            weight=packed[begin:end].clone(),
            weight_scale=scales[begin:end].clone().view(torch.float8_e4m3fn),
            weight_global_scale=torch.tensor(0.01),
        )
        kernel = Sm70NvFp4LinearKernel(upstream.NvFp4LinearLayerConfig())
        kernel.process_weights_after_loading(layer)
        return kernel.apply_weights(layer, x)

    whole = run(0, 640)
    for begin, end in ((0, 320), (320, 640), (160, 320)):
        assert_same_bits(run(begin, end), whole[:, begin:end])
