# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Typed access to the mixture-of-experts operators of `vllm._sm70_C`.

A layer is three calls, in this order, on one stream:

1. `moe_route` groups the rows by expert. Row r = t * k + j is token t's j-th
   expert, of k; "position" p is a place in that grouping.
2. `fp8_moe_gate_up` makes the activated products of each position. It reads the
   tokens through the grouping: no permuted copy exists.
3. `fp8_moe_down` makes the second product, a tile of output columns at a time, and
   sums each tile over the experts of a token.

Besides what a caller hands in nothing is allocated on the device, and nothing
waits for it, so all three can be captured in a CUDA graph and replayed with other
routes. Weights are read as they are stored, FP8 E4M3 with FP32 scales.

The bits of a token's result depend on that token, its experts and `batch_tokens`
alone: neither on the other tokens nor on the width of `partial`. So a batch may
be cut into chunks of tokens, as long as each chunk is told the whole batch's
`batch_tokens`.
"""

import functools

import torch

from vllm.model_executor.kernels.linear.sm70 import ops
from vllm.model_executor.layers.fused_moe.activation import MoEActivation

# As csrc/sm70/moe_activation.h numbers them.
_ACTIVATION_NUMBERS = {
    MoEActivation.SILU: 0,
    MoEActivation.GELU: 1,
    MoEActivation.GELU_TANH: 2,
    MoEActivation.SILU_NO_MUL: 3,
    MoEActivation.GELU_NO_MUL: 4,
    MoEActivation.GELU_TANH_NO_MUL: 5,
    MoEActivation.RELU2_NO_MUL: 6,
}

ACTIVATIONS = tuple(_ACTIVATION_NUMBERS)
"""What `fp8_moe_gate_up` can compute between the two products."""

_OPERATORS = ("moe_route", "fp8_moe_gate_up", "fp8_moe_down")


@functools.cache
def load() -> None:
    """Load the extension and register the operators, `torch.ops._sm70_C.*`.

    Raises:
        ImportError: this installation has no (working) `vllm._sm70_C`; the cause
            is chained.

    """
    ops.load()
    for name in _OPERATORS:
        # They write into arguments of theirs and return nothing.
        torch.library.register_fake(f"_sm70_C::{name}", lambda *arguments: None)


def moe_route(
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    sorted_rows: torch.Tensor,
    expert_offsets: torch.Tensor,
) -> None:
    """Group the rows by local expert, in a stable order.

    Args:
        topk_ids: int32 or int64 [T, k], contiguous: global experts. An id outside
            the experts there are, such as -1, is absent.
        expert_map: int32 [global experts], each one's local number, or -1 for an
            expert that is elsewhere; None: ids are local numbers.
        sorted_rows: int32 [T * k], overwritten: the rows of local expert 0 in
            ascending order, then those of expert 1, and so on. What lies behind
            the last, at `expert_offsets[-1]`, is unspecified.
        expert_offsets: int32 [E + 1], overwritten: expert e's rows are at
            positions `expert_offsets[e]` to `expert_offsets[e + 1]`. Its size
            says how many experts are local.

    Raises:
        ValueError: an argument has a wrong shape, dtype or device; the message
            names it.

    """
    load()
    torch.ops._sm70_C.moe_route(topk_ids, expert_map, sorted_rows, expert_offsets)


def fp8_moe_gate_up(
    x: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    sorted_rows: torch.Tensor,
    expert_offsets: torch.Tensor,
    activation: MoEActivation | str,
    out: torch.Tensor,
    topk_weights: torch.Tensor | None = None,
    batch_tokens: int = -1,
    config: int = -1,
) -> None:
    """Write each position's activated first product into `out`.

    Position p gets `act(x[t] @ gate^T) * (x[t] @ up^T)`, t being the token of row
    `sorted_rows[p]` and gate and up its expert's. An element of a weight is
    `code * scale`, the scale applied to FP32 sums on CUDA and to the codes in FP32
    on the CPU; the activation is computed in FP32, and the result rounded once.

    Args:
        x: float16 or bfloat16 (on CUDA from capability 8.0 on), on the CPU also
            float32 [T, K]; rows may have a distance. On CUDA each row starts at a
            multiple of 16 bytes.
        w13: float8_e4m3fn (or its bytes as uint8) [E, 2 * I, K], contiguous: an
            expert's gate rows, then its up rows; [E, I, K] for activations
            without a gate. K and I are multiples of 16.
        w13_scale: float32, contiguous: [E, 2 * ceil(I / 128), ceil(K / 128)], one
            for each block of 128 x 128 of gate and of up, or [E, 2 * I] or
            [E, 2 * I, 1], one for each row; without a gate 1 in place of 2.
        sorted_rows: from `moe_route`.
        expert_offsets: from `moe_route`.
        activation: one of `ACTIVATIONS`, or its value.
        out: [T * k, I] of the dtype of `x`, contiguous. Positions from
            `expert_offsets[-1]` on are left as they are.
        topk_weights: float32 [T, k], contiguous, only where the router's weight
            applies to the input: both sums are multiplied with it before the
            activation.
        batch_tokens: tokens of the batch that `x` is a chunk of; -1: x is all of
            it. It decides between the kernels for decode and for prefill.
        config: for benchmarks, a CUDA kernel by its number in
            csrc/sm70/moe_ops.cu; -1 lets the shapes decide.

    Raises:
        ValueError: an argument has a wrong shape, dtype, device, stride or
            alignment, or the activation is none of `ACTIVATIONS`; the message
            names it.

    """
    load()
    number = _ACTIVATION_NUMBERS.get(
        MoEActivation.from_str(activation)
        if isinstance(activation, str)
        else activation
    )
    if number is None:
        raise ValueError(
            f"fp8_moe_gate_up: activation = {activation}: expected one of "
            f"{', '.join(known.value for known in ACTIVATIONS)}"
        )
    torch.ops._sm70_C.fp8_moe_gate_up(
        x,
        w13,
        w13_scale,
        sorted_rows,
        expert_offsets,
        topk_weights,
        out,
        number,
        batch_tokens,
        config,
    )


def fp8_moe_down(
    act: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    sorted_rows: torch.Tensor,
    expert_offsets: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    partial: torch.Tensor,
    out: torch.Tensor,
    batch_tokens: int = -1,
    config: int = -1,
) -> None:
    """Write each token's sum over its experts' second products into `out`.

    A tile of as many output columns as `partial` has is multiplied, with the whole
    of I and each weight read once, and the sums, times the router's weight, are
    rounded to the dtype of `partial`; then they are added up over j in ascending
    order in FP32, and rounded once. An absent row counts zero. Until then the rows
    of a token's first expert are in `out`, those of the others in `partial`.

    Args:
        act: [T * k, I], contiguous, from `fp8_moe_gate_up`.
        w2: float8_e4m3fn (or its bytes as uint8) [E, H, I], contiguous; H and I
            are multiples of 16.
        w2_scale: float32, contiguous: [E, ceil(H / 128), ceil(I / 128)], one for
            each block of 128 x 128, or [E, H] or [E, H, 1], one for each row.
        sorted_rows: from `moe_route`.
        expert_offsets: from `moe_route`.
        topk_ids: as for `moe_route`: they say which rows are absent.
        expert_map: as for `moe_route`.
        topk_weights: float32 [T, k], contiguous; None: all ones.
        partial: [T * (k - 1), width] of the dtype of `act`, contiguous, the
            scratch for one tile: its width is a multiple of 16 columns, and H or
            more for all of them at once.
        out: [T, H] of the dtype of `act`, all of it overwritten; rows may have a
            distance. It must not overlap another argument.
        batch_tokens: as for `fp8_moe_gate_up`.
        config: as for `fp8_moe_gate_up`.

    Raises:
        ValueError: an argument has a wrong shape, dtype, device, stride or
            alignment; the message names it.

    """
    load()
    torch.ops._sm70_C.fp8_moe_down(
        act,
        w2,
        w2_scale,
        sorted_rows,
        expert_offsets,
        topk_ids,
        expert_map,
        topk_weights,
        partial,
        out,
        batch_tokens,
        config,
    )
