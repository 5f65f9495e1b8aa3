# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Time and workspace of MoE experts in token chunks, against the whole batch.

A row for each layer, experts class, number of tokens and chunk, all through the
modular kernel as a model runs it, with VLLM_MOE_CHUNK_TOKENS set as the row says;
`whole` is the control, with no chunks. `ratio` is the time against it. `planned` is
what the kernel reserves for one chunk, in MiB, and `peak` the most memory that torch
allocates during the first call beyond weights, input and output, which holds the
workspaces and whatever else the experts allocate. `max` is the largest difference
from the whole batch's output as a part of the largest output: 0 means the same bits,
and upstream's Triton experts may take another kernel for another number of tokens.

The classes: `triton`, upstream's, on 16-bit weights (CUDA); `sm70`, ours on FP8
weights, once with whole rows (`sm70`) and once with the default budget for the tile
(`sm70-tiled`); `cpu`, upstream's vector experts on BF16 weights, which keep their
scratch to themselves, so that only the time tells (CPU).

On CUDA, calls are captured into a graph, so that launches on the host cost nothing.
Each time is a median. On the CPU use a small layer: `--layers small`.
"""

import argparse
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from sm70_timing import time_calls

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import (
    FUSED_MOE_UNQUANTIZED_CONFIG,
    FusedMoEConfig,
    FusedMoEParallelConfig,
    RoutingMethodType,
)
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.experts.sm70_fp8_moe import Sm70Fp8Experts
from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEKernel
from vllm.model_executor.layers.fused_moe.oracle.fp8 import (
    Fp8MoeBackend,
    make_fp8_moe_quant_config,
)
from vllm.model_executor.layers.fused_moe.prepare_finalize.no_dp_ep import (
    MoEPrepareAndFinalizeNoDPEPModular,
)
from vllm.model_executor.layers.fused_moe.token_chunks import (
    CHUNK_TOKENS,
    MIB,
    WORKSPACE_BUDGET,
    workspace_bytes,
)
from vllm.v1.worker.workspace import init_workspace_manager, reset_workspace_manager

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
CLASSES: dict[str, Any] = {
    "triton": TritonExperts,
    "sm70": Sm70Fp8Experts,
    "sm70-tiled": Sm70Fp8Experts,
    "cpu": CPUUnquantizedExperts,
}


@dataclass(frozen=True)
class Size:
    """A layer: hidden size, intermediate size, experts, experts of a token."""

    hidden: int
    intermediate: int
    experts: int
    top_k: int


LAYERS = {
    "35b-a3b": Size(2048, 512, 256, 8),
    "512x10": Size(2560, 512, 512, 10),
    "mixtral": Size(4096, 14336, 8, 2),
    "small": Size(256, 128, 16, 4),
}


@dataclass
class Layer:
    """One experts class over weights that it takes, and how to time it."""

    size: Size
    experts: str
    weights: tuple[torch.Tensor, torch.Tensor]
    scales: tuple[torch.Tensor, torch.Tensor] | None
    dtype: torch.dtype
    device: str

    def kernel(self, tokens: int, chunk: int) -> FusedMoEKernel:
        """The modular kernel as a model makes it under the settings of a row."""
        os.environ[CHUNK_TOKENS] = str(chunk)
        os.environ[WORKSPACE_BUDGET] = "auto" if self.experts == "sm70-tiled" else "0"
        config = FusedMoEConfig(
            num_experts=self.size.experts,
            experts_per_token=self.size.top_k,
            hidden_dim=self.size.hidden,
            intermediate_size=self.size.intermediate,
            num_local_experts=self.size.experts,
            num_logical_experts=self.size.experts,
            activation=MoEActivation.SILU,
            device=self.device,
            routing_method=RoutingMethodType.Default,
            moe_parallel_config=FusedMoEParallelConfig.make_no_parallel(),
            in_dtype=self.dtype,
            max_num_tokens=tokens,
        )
        quant = FUSED_MOE_UNQUANTIZED_CONFIG
        if self.scales is not None:
            quant = make_fp8_moe_quant_config(
                Fp8MoeBackend.SM70, *self.scales, None, None, block_shape=[128, 128]
            )
        experts = CLASSES[self.experts](config, quant)
        return FusedMoEKernel(MoEPrepareAndFinalizeNoDPEPModular(), experts)

    def planned_bytes(self, kernel: FusedMoEKernel, tokens: int) -> int:
        """Workspace that the kernel reserves for so many tokens."""
        size, count = self.size, self.size.experts
        sizes = (2 * size.intermediate, size.hidden, size.top_k, count, count)
        experts: Any = kernel.fused_experts
        return workspace_bytes(experts, self.dtype, tokens, sizes, MoEActivation.SILU)


def make_layer(size: Size, experts: str, dtype: torch.dtype, device: str) -> Layer:
    """Return a layer of random weights, of about unit gain."""
    shapes = (
        (size.experts, 2 * size.intermediate, size.hidden),
        (size.experts, size.hidden, size.intermediate),
    )
    if not experts.startswith("sm70"):
        weights = [
            torch.randn(shape, dtype=dtype, device=device) * shape[-1] ** -0.5
            for shape in shapes
        ]
        if experts == "cpu":
            weights = [_cpu_layout(weight) for weight in weights]
        return Layer(size, experts, (weights[0], weights[1]), None, dtype, device)
    codes, scales = [], []
    for count, rows, depth in shapes:
        # No NaN among the codes, and none of the largest exponents.
        code = torch.randint(
            256, (count, rows, depth), dtype=torch.uint8, device=device
        )
        codes.append((code & 0xB7).view(torch.float8_e4m3fn))
        blocks = (count, -(-rows // 128), -(-depth // 128))
        scales.append(torch.rand(blocks, device=device) * depth**-0.5)
    return Layer(
        size, experts, (codes[0], codes[1]), (scales[0], scales[1]), dtype, device
    )


def _cpu_layout(weight: torch.Tensor) -> torch.Tensor:
    from vllm._custom_ops import cpu_prepack_moe_weight

    return cpu_prepack_moe_weight(weight, CPUUnquantizedExperts.isa)


def make_batch(layer: Layer, tokens: int) -> SimpleNamespace:
    """Return random tokens whose experts are chosen evenly, without repeats."""
    size, device = layer.size, layer.device
    x = torch.randn(tokens, size.hidden, device=device).to(layer.dtype)
    scores = torch.rand(tokens, size.experts, device=device).softmax(-1)
    weights, ids = scores.topk(size.top_k)
    return SimpleNamespace(x=x, weights=weights, ids=ids.int())


def call_of(
    layer: Layer, kernel: FusedMoEKernel, batch: SimpleNamespace
) -> Callable[[], torch.Tensor]:
    def call() -> torch.Tensor:
        out = kernel.apply(
            batch.x,
            *layer.weights,
            batch.weights,
            batch.ids,
            activation=MoEActivation.SILU,
            global_num_experts=layer.size.experts,
            expert_map=None,
            apply_router_weight_on_input=False,
        )
        assert isinstance(out, torch.Tensor)
        return out

    return call


def peak_bytes(call: Callable[[], torch.Tensor], device: str) -> float:
    """Return the most that torch allocates during a call, its result not counted."""
    if device != "cuda":
        call()
        return float("nan")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before - result.nbytes


def measure(
    layer: Layer, tokens: int, chunks: list[int], repeats: int
) -> Iterator[tuple[str, ...]]:
    """Yield a row for the whole batch and for each chunk shorter than it."""
    batch = make_batch(layer, tokens)
    whole, expected = 0.0, torch.empty(0)
    for chunk in [0, *(c for c in chunks if c < tokens)]:
        reset_workspace_manager()
        init_workspace_manager(torch.device(layer.device))
        kernel = layer.kernel(tokens, chunk)
        call = call_of(layer, kernel, batch)
        peak = peak_bytes(call, layer.device)
        seconds = time_calls([call], repeats, layer.device).seconds
        out = call().float()
        if chunk == 0:
            whole, expected = seconds, out
        difference = (out - expected).abs().max() / expected.abs().max()
        planned = layer.planned_bytes(kernel, chunk or tokens)
        yield (
            str(chunk or "whole"),
            f"{planned / MIB:.1f}",
            f"{peak / MIB:.1f}",
            f"{seconds * 1e6:.1f}",
            f"{seconds / whole:.3f}",
            f"{difference:.1e}" if difference else "0",
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    on_cuda = torch.cuda.is_available()
    classes = ["triton", "sm70", "sm70-tiled"] if on_cuda else ["sm70", "sm70-tiled"]
    parser.add_argument("--device", default="cuda" if on_cuda else "cpu")
    parser.add_argument("--dtype", default="float16", choices=list(DTYPES))
    parser.add_argument(
        "--layers", nargs="+", default=["35b-a3b", "512x10"], choices=list(LAYERS)
    )
    parser.add_argument("--experts", nargs="+", default=classes, choices=list(CLASSES))
    parser.add_argument("--tokens", nargs="+", type=int, default=[8192, 16384])
    parser.add_argument(
        "--chunks", nargs="+", type=int, default=[512, 1024, 2048, 4096, 8192]
    )
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    torch.manual_seed(0)
    where = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    print(f"{where}, {options.dtype}, torch {torch.__version__}")
    columns = ("chunk", "planned", "peak", "us", "ratio", "max")
    head = f"{'layer':10} {'experts':10} {'tokens':>6}"
    print(head, *(f"{column:>9}" for column in columns))
    for name in options.layers:
        for experts in options.experts:
            dtype = DTYPES[options.dtype]
            layer = make_layer(LAYERS[name], experts, dtype, options.device)
            for tokens in options.tokens:
                with set_current_vllm_config(VllmConfig()):
                    for row in measure(layer, tokens, options.chunks, options.repeats):
                        print(
                            f"{name:10} {experts:10} {tokens:6}",
                            *(f"{cell:>9}" for cell in row),
                        )
            del layer


if __name__ == "__main__":
    main()
