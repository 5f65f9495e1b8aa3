# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The first half of a gated MLP as one step: gate and up projection, activation.

A linear kernel that can do the step at once, so that the gate and up products
never exist in full, offers itself by setting `_gated_kernel` on the layer whose
weights it has processed. Where none did, or anything does not fit, the step is
upstream's two modules.
"""

from typing import Any, Protocol, cast

import torch

from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.fusion.fused_act_quant import maybe_fused_act_quant
from vllm.model_executor.layers.fusion.quant_activation import (
    QuantizedActivation,
    get_input_quant_key,
)
from vllm.model_executor.layers.linear import LinearBase, MergedColumnParallelLinear


class GatedLinearKernel(Protocol):
    """What a layer's `_gated_kernel` can do."""

    def apply_gated_weights(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return `silu(x @ gate.T + b) * (x @ up.T + c)`, [..., N], of x [..., K].

        The rows of the layer's weight [2 N, K] are N gate rows, then N up rows,
        and so are the elements of the bias, (b, c).
        """


def gated_projection(
    gate_up_proj: torch.nn.Module,
    act_fn: torch.nn.Module,
    x: torch.Tensor | QuantizedActivation,
    down_proj: LinearBase | None = None,
) -> torch.Tensor | QuantizedActivation:
    """Apply `act_fn(gate_up_proj(x))`, in one step where a kernel offers that.

    The choice depends on the modules only, never on the number of tokens, so it
    is a constant to torch.compile.

    Args:
        gate_up_proj: the merged column-parallel projection; with LoRA, its wrapper.
        act_fn: the gated activation.
        x: [..., K].
        down_proj: if given, the activation may be quantized for this consumer,
            as `maybe_fused_act_quant` does.

    Returns:
        [..., N], this rank's part.

    """
    kernel = _fitting_kernel(gate_up_proj, act_fn, x, down_proj)
    if kernel is not None:
        assert isinstance(x, torch.Tensor)
        bias = cast(torch.Tensor | None, gate_up_proj.bias)
        return kernel.apply_gated_weights(gate_up_proj, x, bias)
    gate_up, _ = gate_up_proj(x)
    if down_proj is None:
        return act_fn(gate_up)
    return maybe_fused_act_quant(act_fn, gate_up, down_proj)


def _fitting_kernel(
    gate_up_proj: Any,
    act_fn: torch.nn.Module,
    x: torch.Tensor | QuantizedActivation,
    down_proj: LinearBase | None,
) -> GatedLinearKernel | None:
    # A subclass or a wrapper, LoRA's for one, does more than the projection.
    # (LoRA's forwards public attributes to the layer; this one is private.)
    if type(gate_up_proj) is not MergedColumnParallelLinear:
        return None
    kernel = getattr(gate_up_proj, "_gated_kernel", None)
    fits = (
        kernel is not None
        and type(act_fn) is SiluAndMul
        and isinstance(x, torch.Tensor)
        and not (gate_up_proj.gather_output and gate_up_proj.tp_size > 1)
        and not (gate_up_proj.skip_bias_add and gate_up_proj.bias is not None)
        # Whoever watches or replaces either module's forward is not bypassed.
        and not _is_instrumented(gate_up_proj)
        and not _is_instrumented(act_fn)
        and (down_proj is None or get_input_quant_key(down_proj) is None)
    )
    return kernel if fits else None


def _is_instrumented(module: torch.nn.Module) -> bool:
    return bool(
        module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
    )
