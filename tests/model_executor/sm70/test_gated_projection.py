# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The gated step takes a kernel's offer only where nothing is lost by it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm.lora.layers import MergedColumnParallelLinearWithLoRA
from vllm.model_executor.kernels.linear.sm70.kernels import Sm70NvFp4LinearKernel
from vllm.model_executor.layers.activation import GeluAndMul, SiluAndMul
from vllm.model_executor.layers.fusion.quant_activation import QuantizedActivation
from vllm.model_executor.layers.gated_projection import gated_projection
from vllm.model_executor.layers.linear import MergedColumnParallelLinear
from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4Config
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    kFp8StaticTensorSym,
)
from vllm.model_executor.models.deepseek_v2 import DeepseekV2MLP
from vllm.model_executor.models.glm4_moe import Glm4MoeMLP
from vllm.model_executor.models.llama import LlamaMLP
from vllm.model_executor.models.qwen2 import Qwen2MLP
from vllm.model_executor.models.qwen2_moe import Qwen2MoeMLP
from vllm.model_executor.models.qwen3_moe import Qwen3MoeMLP
from vllm.platforms import current_platform

HIDDEN, INTERMEDIATE = 128, 192
DTYPE = torch.bfloat16 if current_platform.is_cpu() else torch.float16


@pytest.fixture(autouse=True)
def default_device(default_vllm_config: Any, dist_init: Any) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(DTYPE)
    with torch.device(current_platform.device_type):
        yield
    torch.set_default_dtype(before)


def nvfp4_config() -> ModelOptNvFp4Config:
    config = ModelOptNvFp4Config.from_config(
        {
            "quantization": {
                "quant_algo": "NVFP4",
                "group_size": 16,
                "kv_cache_quant_algo": None,
                "exclude_modules": [],
            }
        }
    )
    config.packed_modules_mapping = {"gate_up_proj": ["gate_proj", "up_proj"]}
    return config


def load(module: torch.nn.Module) -> torch.nn.Module:
    """Give every quantized layer random weights, as loading does."""
    torch.manual_seed(0)
    for layer in module.modules():
        if not hasattr(layer, "quant_method"):
            continue
        for name, parameter in layer.named_parameters(recurse=False):
            if name == "weight":
                parameter.data.random_(0, 256)
            elif name == "weight_scale":
                scale = torch.rand(parameter.shape, dtype=torch.float32) + 0.5
                parameter.data.copy_(scale.to(parameter.dtype))
            elif name == "bias":
                parameter.data.normal_()
            else:
                parameter.data.fill_(0.03)
        layer.quant_method.process_weights_after_loading(layer)
    return module


def gate_up(cls: type = MergedColumnParallelLinear, **options: Any) -> torch.nn.Module:
    options.setdefault("bias", False)
    return load(
        cls(
            HIDDEN,
            [INTERMEDIATE] * 2,
            quant_config=nvfp4_config(),
            prefix="mlp.gate_up_proj",
            **options,
        )
    )


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What ran: "gated" steps and plain "product"s, in order."""
    found: list[str] = []
    for name, method in (
        ("gated", "apply_gated_weights"),
        ("product", "apply_weights"),
    ):
        original = getattr(Sm70NvFp4LinearKernel, method)

        def wrapper(
            self: Any,
            layer: Any,
            x: Any,
            bias: Any = None,
            original: Any = original,
            name: str = name,
        ) -> Any:
            found.append(name)
            return original(self, layer, x, bias)

        monkeypatch.setattr(Sm70NvFp4LinearKernel, method, wrapper)
    return found


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    atol = 0.02 * expected.abs().max().item()
    torch.testing.assert_close(actual, expected, atol=atol, rtol=0.02)


@pytest.mark.parametrize("tokens", [1, 300])
@pytest.mark.parametrize("bias", [False, True])
def test_the_step_is_taken(tokens: int, bias: bool, steps: list[str]) -> None:
    layer, act = gate_up(bias=bias), SiluAndMul()
    x = torch.randn(tokens, HIDDEN)
    out = gated_projection(layer, act, x)
    assert steps == ["gated"]
    assert out.shape == (tokens, INTERMEDIATE)
    close(out, act(layer(x)[0]))


class Subclass(MergedColumnParallelLinear):
    """Could do anything in its forward."""


def with_lora(layer: torch.nn.Module) -> torch.nn.Module:
    wrapper = MergedColumnParallelLinearWithLoRA(layer)
    # As after set_lora, with no adapter active.
    wrapper.apply = lambda x, bias: layer.quant_method.apply(layer, x, bias)
    return wrapper


def hooked(module: torch.nn.Module) -> torch.nn.Module:
    module.register_forward_hook(lambda module, inputs, output: None)
    return module


def pre_hooked(module: torch.nn.Module) -> torch.nn.Module:
    module.register_forward_pre_hook(lambda module, inputs: None)
    return module


def replaced(module: torch.nn.Module) -> torch.nn.Module:
    module.forward = module.forward
    return module


def without_offer(module: torch.nn.Module) -> torch.nn.Module:
    module._gated_kernel = None
    return module


def gathered(module: torch.nn.Module) -> torch.nn.Module:
    module.gather_output, module.tp_size = True, 2
    return module


CASES = {
    "subclass": (lambda: gate_up(Subclass), SiluAndMul),
    "LoRA": (lambda: with_lora(gate_up()), SiluAndMul),
    "other activation": (gate_up, GeluAndMul),
    "hook": (lambda: hooked(gate_up()), SiluAndMul),
    "pre-hook": (lambda: pre_hooked(gate_up()), SiluAndMul),
    "replaced forward": (lambda: replaced(gate_up()), SiluAndMul),
    "hook on the activation": (gate_up, lambda: hooked(SiluAndMul())),
    "bias left to the caller": (
        lambda: gate_up(bias=True, skip_bias_add=True),
        SiluAndMul,
    ),
    "no offer": (lambda: without_offer(gate_up()), SiluAndMul),
}


@pytest.mark.parametrize("case", CASES)
def test_the_two_modules_stay(case: str, steps: list[str]) -> None:
    make_layer, make_act = CASES[case]
    layer, act = make_layer(), make_act()
    x = torch.randn(5, HIDDEN)
    expected = act(layer(x)[0])
    steps.clear()
    assert torch.equal(gated_projection(layer, act, x), expected)
    assert steps == ["product"]


def test_gathered_output_stays(
    steps: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.layers import linear

    monkeypatch.setattr(linear, "tensor_model_parallel_all_gather", lambda x: x)
    gated_projection(gathered(gate_up()), SiluAndMul(), torch.randn(5, HIDDEN))
    assert steps == ["product"]


def test_a_layer_that_is_not_quantized_stays() -> None:
    layer = MergedColumnParallelLinear(HIDDEN, [INTERMEDIATE] * 2, bias=False)
    layer.weight.data.normal_()
    layer.quant_method.process_weights_after_loading(layer)
    x, act = torch.randn(5, HIDDEN), SiluAndMul()
    assert torch.equal(gated_projection(layer, act, x), act(layer(x)[0]))


def test_a_quantizing_consumer_stays(steps: list[str]) -> None:
    """The activation is quantized for down_proj where a fused kernel exists."""
    layer, act, x = gate_up(), SiluAndMul(), torch.randn(5, HIDDEN)
    down = torch.nn.Module()
    gated_projection(layer, act, x, down)
    assert steps == ["gated"]
    down._input_quant_key = kFp8StaticTensorSym
    down.requires_unquantized_input = True
    gated_projection(layer, act, x, down)
    assert steps == ["gated", "gated"]
    down.requires_unquantized_input = False
    down.input_scale = torch.tensor(1.0, dtype=torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        seen: list[Any] = []
        patch.setattr(
            "vllm.model_executor.layers.gated_projection.maybe_fused_act_quant",
            lambda act, x, linear: seen.append(linear) or x,
        )
        gated_projection(layer, act, x, down)
    assert steps == ["gated", "gated", "product"] and seen == [down]


def test_a_quantized_input_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = gate_up()
    x = torch.randn(5, HIDDEN)
    quantized = QuantizedActivation(
        x, torch.ones(1), x.dtype, x.shape, kFp8StaticTensorSym
    )
    seen: list[Any] = []

    def apply(layer: Any, given: Any, bias: Any) -> torch.Tensor:
        seen.append(given)
        return torch.zeros(5, 2 * INTERMEDIATE)

    monkeypatch.setattr(layer, "quant_method", SimpleNamespace(apply=apply))
    gated_projection(layer, SiluAndMul(), quantized)
    assert seen == [quantized]


MLPS = [LlamaMLP, Qwen2MLP, Qwen2MoeMLP, Qwen3MoeMLP, DeepseekV2MLP, Glm4MoeMLP]


@pytest.mark.parametrize("cls", MLPS, ids=lambda cls: cls.__name__)
def test_shared_mlps_take_the_step(cls: type, steps: list[str]) -> None:
    mlp: Any = load(
        cls(HIDDEN, INTERMEDIATE, "silu", quant_config=nvfp4_config(), prefix="mlp")
    )
    x = torch.randn(40, HIDDEN)
    out = mlp(x)
    assert steps == ["gated", "product"]
    expected = mlp.down_proj(mlp.act_fn(mlp.gate_up_proj(x)[0]))[0]
    close(out, expected)


@pytest.mark.parametrize("cls", MLPS, ids=lambda cls: cls.__name__)
def test_shared_mlps_without_quantization(cls: type) -> None:
    mlp: Any = cls(HIDDEN, INTERMEDIATE, "silu", prefix="mlp")
    for parameter in mlp.parameters():
        parameter.data.normal_(std=0.1)
    for layer in (mlp.gate_up_proj, mlp.down_proj):
        layer.quant_method.process_weights_after_loading(layer)
    x = torch.randn(40, HIDDEN)
    expected = mlp.down_proj(mlp.act_fn(mlp.gate_up_proj(x)[0]))[0]
    assert torch.equal(mlp(x), expected)


def test_the_choice_is_a_constant_to_the_compiler() -> None:
    """One graph without a break, whatever the number of tokens."""
    layer, act = gate_up(), SiluAndMul()
    graphs: list[torch.fx.GraphModule] = []

    def remember(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: gated_projection(layer, act, x),
        fullgraph=True,
        dynamic=True,
        backend=remember,
    )
    for tokens in (300, 2, 40):
        x = torch.randn(tokens, HIDDEN)
        assert torch.equal(compiled(x), gated_projection(layer, act, x))
    assert len(graphs) == 1
    names = [str(n.target) for n in graphs[0].graph.nodes if n.op == "call_function"]
    assert sum("sm70_nvfp4_gated_linear" in name for name in names) == 1
