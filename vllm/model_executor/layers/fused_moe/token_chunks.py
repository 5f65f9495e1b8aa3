# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Token chunks: a bound on the workspaces of any modular experts.

The modular kernel takes workspaces for all tokens of a batch at once, and they
grow with tokens x top_k. Here a batch that is larger than the chunk is run as
several batches: the experts see slices of it, one after another, in the same
workspaces. Each chunk but the last has the same number of tokens, and the last
is what a smaller batch would be, in the first part of the same memory.

Each chunk reads the weights of the experts that it hits again, so chunks cost
time, and experts that are not ours are cut only when a setting asks for it:

- ``VLLM_MOE_WORKSPACE_BUDGET_MIB``: the chunk is the largest that fits;
- ``VLLM_MOE_CHUNK_TOKENS``: the chunk itself; 0 never cuts, which is the control.

A batch of at most one chunk (every decode batch) takes upstream's path as it is.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

import vllm.envs as envs
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.utils.math_utils import round_up

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.modular_kernel import (
        FusedMoEExpertsModular,
        FusedMoEKernelModularImpl,
        FusedMoEPrepareAndFinalizeModular,
    )

logger = init_logger(__name__)

Sizes: TypeAlias = tuple[int, int, int, int, int]
"""N, K, top_k, and the global and local number of experts, in this order: what
`workspace_shapes` takes after the number of tokens."""

CHUNK_TOKENS = "VLLM_MOE_CHUNK_TOKENS"
WORKSPACE_BUDGET = "VLLM_MOE_WORKSPACE_BUDGET_MIB"
AUTO = "auto"
MIB = 2**20

ALIGNMENT = 64
"""Chunks that a budget chooses are multiples of this, in tokens, and at least
this long: below, a budget buys little memory for many passes over the weights."""

MAX_CHUNK = 2**20
"""Longer than any batch: a bound for the search, not for the chunk."""

_WORKSPACE_ALIGNMENT = 256
"""The workspace manager's, in bytes."""


@dataclass(frozen=True)
class ChunkSettings:
    """The two settings, as numbers.

    Attributes:
        tokens: of a chunk; 0 for no chunks, None to choose from the budget.
        budget_bytes: of workspace; 0 for no budget, None for the experts' own.

    """

    tokens: int | None
    budget_bytes: int | None

    @classmethod
    def from_environment(cls, max_num_batched_tokens: int) -> "ChunkSettings":
        """Read and check the settings.

        Args:
            max_num_batched_tokens: the largest batch of the deployment.

        Raises:
            ValueError: a value cannot work; the message names what can.

        """
        tokens = _whole_number(CHUNK_TOKENS, envs.VLLM_MOE_CHUNK_TOKENS)
        budget = _whole_number(WORKSPACE_BUDGET, envs.VLLM_MOE_WORKSPACE_BUDGET_MIB)
        if tokens is not None and not 0 <= tokens <= max_num_batched_tokens:
            raise ValueError(
                f"{CHUNK_TOKENS}={tokens}: expected 1 to {max_num_batched_tokens} "
                "tokens (max_num_batched_tokens: a longer chunk never cuts), or 0 "
                "for no chunks"
            )
        if budget is not None and budget < 0:
            raise ValueError(
                f"{WORKSPACE_BUDGET}={budget}: expected a number of MiB, or 0 for "
                "no budget"
            )
        if tokens is not None and budget:
            raise ValueError(
                f"{CHUNK_TOKENS}={tokens} and {WORKSPACE_BUDGET}={budget}: both "
                "decide the chunk; set one of them"
            )
        return cls(tokens, None if budget is None else budget * MIB)


def _whole_number(name: str, text: str) -> int | None:
    if text == AUTO:
        return None
    try:
        return int(text)
    except ValueError:
        raise ValueError(
            f'{name}={text!r}: expected a whole number, or "{AUTO}" for the default'
        ) from None


def largest_chunk(workspace_bytes: Callable[[int], int], budget_bytes: int) -> int:
    """Choose the longest chunk whose workspaces fit a budget.

    Args:
        workspace_bytes: tokens to bytes of workspace; must not fall.
        budget_bytes: what the workspaces may take.

    Returns:
        Tokens: a multiple of `ALIGNMENT`, at most `MAX_CHUNK`.

    Raises:
        ValueError: not even `ALIGNMENT` tokens fit; the message gives the least
            budget that works.

    """
    least = workspace_bytes(ALIGNMENT)
    if least > budget_bytes:
        raise ValueError(
            f"{WORKSPACE_BUDGET}={budget_bytes / MIB:g}: a chunk of {ALIGNMENT} "
            f"tokens takes {least / MIB:.1f} MiB of workspace; set at least "
            f"{-(-least // MIB)}, or 0 for no budget"
        )
    fits, too_many = 1, MAX_CHUNK // ALIGNMENT + 1
    while fits + 1 < too_many:
        middle = (fits + too_many) // 2
        if workspace_bytes(middle * ALIGNMENT) <= budget_bytes:
            fits = middle
        else:
            too_many = middle
    return fits * ALIGNMENT


def slices(tokens: int, chunk: int) -> Iterator[tuple[int, int]]:
    """Yield the chunks of a batch as [begin, end): all of `chunk` but the last."""
    for begin in range(0, tokens, chunk):
        yield begin, min(begin + chunk, tokens)


def workspace_bytes(
    experts: "FusedMoEExpertsModular",
    dtype: torch.dtype,
    tokens: int,
    sizes: Sizes,
    activation: Any,
) -> int:
    """Bytes that the modular kernel reserves for a batch of `tokens`.

    As it lays them out: the output shares the first workspace's memory, whether
    or not it is used there.

    Args:
        experts: whose `workspace_shapes` counts.
        dtype: of the layer's input.
        tokens: M.
        sizes: of the layer.
        activation: of the experts.

    Returns:
        0 for experts that keep no workspace here.

    """
    first, second, output = experts.workspace_shapes(tokens, *sizes, None, activation)
    if prod(first) == 0 and prod(second) == 0:
        return 0
    itemsize = experts.workspace_dtype(dtype).itemsize
    return sum(
        round_up(elements * itemsize, _WORKSPACE_ALIGNMENT)
        for elements in (max(prod(first), prod(output)), prod(second))
    )


class TokenChunks:
    """How one MoE layer's batches are cut; made with its kernel.

    Attributes:
        enabled: whether a batch may be cut at all; constant.

    """

    def __init__(
        self,
        prepare_finalize: "FusedMoEPrepareAndFinalizeModular",
        experts: "FusedMoEExpertsModular",
    ) -> None:
        settings = ChunkSettings.from_environment(experts.moe_config.max_num_tokens)
        self._experts = experts
        self._tokens = settings.tokens
        self._budget: int = (
            getattr(experts, "workspace_budget_bytes", 0)
            if settings.budget_bytes is None
            else settings.budget_bytes
        )
        self._limits: dict[tuple[object, ...], int | None] = {}
        self.enabled = self._budget > 0 if self._tokens is None else self._tokens > 0
        if self.enabled:
            reason = unsupported_reason(prepare_finalize, experts)
            self.enabled = reason is None
            if reason:
                _log_whole(experts, reason)

    def limit(self, dtype: torch.dtype, sizes: Sizes, activation: Any) -> int | None:
        """The chunk, in tokens; None where there is nothing to bound.

        Args:
            dtype: as for `workspace_bytes`.
            sizes: as for `workspace_bytes`.
            activation: as for `workspace_bytes`.

        Raises:
            ValueError: the budget is too small for any chunk.

        """
        if self._tokens is not None:
            return self._tokens
        key = (dtype, sizes, activation)
        if key not in self._limits:
            self._limits[key] = self._choose(dtype, sizes, activation)
        return self._limits[key]

    def _choose(self, dtype: torch.dtype, sizes: Sizes, activation: Any) -> int | None:
        def nbytes(tokens: int) -> int:
            return workspace_bytes(self._experts, dtype, tokens, sizes, activation)

        if nbytes(ALIGNMENT) == 0:
            _log_whole(self._experts, "its experts keep their scratch to themselves")
            return None
        chunk = largest_chunk(nbytes, self._budget)
        if chunk < self._experts.moe_config.max_num_tokens:
            logger.info_once(
                "%s: MoE batches above %d tokens are run in chunks, for at most %d "
                "MiB of workspace",
                type(self._experts).__name__,
                chunk,
                self._budget // MIB,
            )
        return chunk


def unsupported_reason(
    prepare_finalize: "FusedMoEPrepareAndFinalizeModular",
    experts: "FusedMoEExpertsModular",
) -> str | None:
    """Say why a kernel's batches cannot be cut by tokens, or None.

    Args:
        prepare_finalize: the kernel's first and last step.
        experts: the kernel's experts.

    """
    from vllm.model_executor.layers.fused_moe.modular_kernel import (
        FusedMoEActivationFormat,
    )
    from vllm.model_executor.layers.fused_moe.prepare_finalize.passthrough import (
        PassThroughPrepareAndFinalize,
    )

    if experts.activation_format() != FusedMoEActivationFormat.Standard:
        return "its activations are batched by expert, not by token"
    if isinstance(prepare_finalize, PassThroughPrepareAndFinalize):
        # Ranks may hold different numbers of tokens, and so of chunks.
        return "its experts communicate with other ranks"
    # Upstream's name; some experts still say so.
    if not getattr(experts, "supports_chunking", lambda: True)():
        return "its experts refuse chunks"
    return None


def _log_whole(experts: "FusedMoEExpertsModular", reason: str) -> None:
    logger.debug_once("No token chunks for %s: %s", type(experts).__name__, reason)


def in_token_chunks(run: Callable[..., Any]) -> Callable[..., Any]:
    """Let `FusedMoEKernelModularImpl._fused_experts` run chunk by chunk.

    The wrapped method takes keywords only, as its one caller gives them. Where
    no chunks are wanted, or the batch fits one, it is called as it is.
    """

    @wraps(run)
    def wrapper(kernel: "FusedMoEKernelModularImpl", **arguments: Any) -> Any:
        # A constant of the layer: torch.compile traces this on the CPU.
        if not kernel.token_chunks.enabled:
            return run(kernel, **arguments)
        return _run_in_chunks(run, kernel, arguments)

    return wrapper


def _run_in_chunks(
    run: Callable[..., Any],
    kernel: "FusedMoEKernelModularImpl",
    arguments: dict[str, Any],
) -> Any:
    experts, inputs = kernel.fused_experts, arguments["a1q"]
    _, tokens, N, K, top_k = experts.moe_problem_size(
        inputs, arguments["w1"], arguments["w2"], arguments["topk_ids"]
    )
    counts = arguments["global_num_experts"], arguments["local_num_experts"]
    sizes, activation = (N, K, top_k, *counts), arguments["activation"]
    chunk = kernel.token_chunks.limit(arguments["in_dtype"], sizes, activation)
    if chunk is None or tokens <= chunk:
        return run(kernel, **arguments)
    shape = experts.workspace_shapes(tokens, *sizes, None, activation)[2]
    dtype = experts.workspace_dtype(arguments["in_dtype"])
    reason = _whole_batch_reason(kernel, arguments, tokens, shape, dtype)
    if reason:
        _log_whole(experts, reason)
        return run(kernel, **arguments)

    output = arguments.get("output_alias")
    if (
        output is None
        or output.shape != shape
        or output.dtype != dtype
        or not output.is_contiguous()
    ):
        output = torch.empty(shape, dtype=dtype, device=inputs.device)
    with _batch_of(experts, tokens):
        for begin, end in slices(tokens, chunk):
            part = output[begin:end]
            of_the_chunk = {
                "a1q": inputs[begin:end],
                "a1q_scale": _rows(arguments["a1q_scale"], begin, end),
                "topk_weights": arguments["topk_weights"][begin:end],
                "topk_ids": arguments["topk_ids"][begin:end],
                "output_alias": part,
            }
            result = run(kernel, **arguments | of_the_chunk)
            if result is not part:
                # The next chunk overwrites the workspace that this one is in.
                part.copy_(result)
    return output


@contextmanager
def _batch_of(experts: Any, tokens: int) -> Iterator[None]:
    """Tell experts that choose a kernel by the batch how large it is.

    Those have an attribute `batch_tokens`, None outside of a chunk. With it a
    short last chunk takes the kernel, and so the bits, of the others.
    """
    if not hasattr(experts, "batch_tokens"):
        yield
        return
    experts.batch_tokens = tokens
    try:
        yield
    finally:
        experts.batch_tokens = None


def _whole_batch_reason(
    kernel: "FusedMoEKernelModularImpl",
    arguments: dict[str, Any],
    tokens: int,
    output_shape: tuple[int, ...],
    output_dtype: torch.dtype,
) -> str | None:
    """Say why this batch cannot be cut, or None."""
    experts = kernel.fused_experts
    if arguments["expert_tokens_meta"] is not None:
        return "the experts' token counts are of the whole batch"
    if getattr(experts, "_lora_context", None) is not None:
        return "LoRA indexes the tokens of the whole batch"
    if experts.moe_config.should_defer_moe_finalize(tokens):
        return "the reduction over the top-k is deferred"
    if output_shape[0] != tokens:
        return "the output's first axis is not the tokens"
    scale = arguments["a1q_scale"]
    if scale is not None and scale.numel() > 1:
        quant = experts.quant_config
        if quant.is_scale_swizzled and quant.quant_dtype in ("nvfp4", "mxfp8"):
            return "the activations' scales are swizzled"
        if scale.shape[0] != tokens:
            return f"the activations' scales have shape {tuple(scale.shape)}"
    communicated = kernel.prepare_finalize.allocate_fused_expert_output(
        output_shape,
        output_dtype,
        arguments["a1q"].device,
        experts.finalize_weight_and_reduce_impl(),
    )
    if communicated is not None:
        return "the output is a buffer of the communicator"
    return None


def _rows(scale: torch.Tensor | None, begin: int, end: int) -> torch.Tensor | None:
    """The scales of some tokens; a single one is everyone's."""
    if scale is None or scale.numel() == 1:
        return scale
    return scale[begin:end]


def needs_opaque_operator(quant_method: Any) -> bool:
    """Whether the MoE layer must be one operator for torch.compile on the CPU.

    Upstream lets it trace through the layer there. A comparison of the batch with
    the chunk would be folded into the graph as it came out for the first batch.

    Args:
        quant_method: of the layer.

    """
    experts = getattr(quant_method, "experts_cls", None)
    return current_platform.is_cpu() and (
        hasattr(experts, "workspace_budget_bytes")
        or envs.VLLM_MOE_CHUNK_TOKENS not in (AUTO, "0")
        or envs.VLLM_MOE_WORKSPACE_BUDGET_MIB not in (AUTO, "0")
    )
