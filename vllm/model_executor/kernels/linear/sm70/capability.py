# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What capability 7.0 may serve: the kernels of this package, and the gates.

A kernel registers for the quantizations that it serves. From then on the
capability gates let 7.0 through for checkpoints that need nothing else, and
the kernel takes part in the selection of linear kernels. With no kernel
registered every gate and every selection is as if this module did not exist.

Quantizations have the names of ``linear_backend_per_quant``.
"""

from collections.abc import Callable
from typing import Any

from vllm.platforms import current_platform

SM70_CAPABILITY = 70
# From here on other kernels exist: ours take part only when asked for.
TURING_CAPABILITY = 75

NVFP4_W4A4 = "nvfp4_w4a4"
NVFP4_W4A16 = "nvfp4_w4a16"
FP8 = "fp8_w8a8"
FP8_BLOCK = "fp8_block_w8a8"
FP8_WEIGHT_ONLY = "w8a16_fp8"
QUANTIZATIONS = (NVFP4_W4A4, NVFP4_W4A16, FP8, FP8_BLOCK, FP8_WEIGHT_ONLY)

BACKEND = "sm70"
BACKEND_KERNELS: set[type] = set()
"""The registered kernels: those of ``--linear-backend sm70``."""

_kernels: dict[str, list[type]] = {name: [] for name in QUANTIZATIONS}


def register(kernel: type, *quantizations: str) -> None:
    """Let ``kernel`` serve the quantizations; the first registered goes first.

    Args:
        kernel: A linear kernel class of the kind that upstream selects for the
            quantization: ``NvFp4LinearKernel``, ``FP8ScaledMMLinearKernel`` or
            ``Fp8BlockScaledMMLinearKernel``. Its ``is_supported`` must accept
            capability 70.
        quantizations: Names out of ``QUANTIZATIONS``.

    Raises:
        ValueError: for an unknown quantization, or none.

    """
    unknown = [name for name in quantizations if name not in QUANTIZATIONS]
    if unknown or not quantizations:
        raise ValueError(
            f"register({kernel.__name__}): quantizations are {unknown or 'missing'}, "
            f"expected one or more of {', '.join(QUANTIZATIONS)}"
        )
    for name in quantizations:
        if kernel not in _kernels[name]:
            _kernels[name].append(kernel)
    BACKEND_KERNELS.add(kernel)


def unregister(kernel: type) -> None:
    """Undo ``register``. A kernel that is not registered is no error."""
    for kernels in _kernels.values():
        if kernel in kernels:
            kernels.remove(kernel)
    BACKEND_KERNELS.discard(kernel)


def _is_first_choice() -> bool:
    """Whether the device is a CUDA device too old for every other kernel."""
    return current_platform.is_cuda() and not current_platform.has_device_capability(
        TURING_CAPABILITY
    )


def is_chosen_without_asking(quantization: str) -> bool:
    """Whether automatic selection considers a kernel of ours here: on a CUDA
    device below 7.5, and on the CPU, where it is the last resort."""
    return bool(_kernels[quantization]) and (
        _is_first_choice() or current_platform.is_cpu()
    )


def add_sm70_kernels(
    kernels: list[type], quantization: str, backend: str
) -> list[type]:
    """The kernels to select from, ours included where they belong.

    Args:
        kernels: Upstream's candidates, best first. Not modified.
        quantization: Any of upstream's names; ours serve ``QUANTIZATIONS``.
        backend: The value of ``linear_backend`` for the quantization.

    Returns:
        Ours first on a CUDA device below 7.5 or when ``backend`` is "sm70";
        ours alone on the CPU where there is no candidate (where there are some,
        upstream's own table has ours last); otherwise ``kernels`` as it is.

    """
    ours = [k for k in _kernels.get(quantization, ()) if k not in kernels]
    if ours and (backend == BACKEND or _is_first_choice()):
        return ours + kernels
    if ours and not kernels and current_platform.is_cpu():
        return ours
    return kernels


def moe_backend(requested: str) -> str:
    """The MoE backend that FP8 experts will get, as far as it can be told early.

    Args:
        requested: the value of ``moe_backend``.

    Returns:
        "sm70" for "auto" on a CUDA device below 7.5, where no other backend has
        FP8 experts; otherwise ``requested``.

    """
    return BACKEND if requested == "auto" and _is_first_choice() else requested


_MODELOPT_ALGORITHMS = {
    "FP8": FP8,
    "FP8_PER_CHANNEL_PER_TOKEN": FP8,
    "FP8_PB_WO": FP8_BLOCK,
    "NVFP4": NVFP4_W4A4,
    "W4A16_NVFP4": NVFP4_W4A16,
}


def _modelopt(*algorithms: str) -> set[str]:
    # An algorithm of any other name stays what it is, and is not served.
    return {_MODELOPT_ALGORITHMS.get(name, name) for name in algorithms}


# What a quantization config (by name) or a scheme (by class) needs to be
# served. Whatever is not listed keeps its minimum.
_NEEDS: dict[str, Callable[[Any], set[str]]] = {
    "fp8": lambda config: {FP8_BLOCK if config.weight_block_size else FP8},
    "fbgemm_fp8": lambda config: {FP8},
    "modelopt": lambda config: _modelopt(config.quant_method),
    "modelopt_fp4": lambda config: _modelopt(config.quant_method),
    "modelopt_mixed": lambda config: _modelopt(
        *(layer["quant_algo"].upper() for layer in config.quantized_layers.values())
    ),
    "CompressedTensorsW4A4Fp4": lambda scheme: {
        NVFP4_W4A16 if scheme.use_a16 else NVFP4_W4A4
    },
    "CompressedTensorsW8A16Fp8": lambda scheme: {FP8_WEIGHT_ONLY},
    "QuarkNVFP4": lambda scheme: {NVFP4_W4A4},
    "QuarkW8A8Fp8": lambda scheme: {FP8},
    "QuarkW8A8Fp8PerBlock": lambda scheme: {FP8_BLOCK},
}


def min_capability(owner: Any) -> int:
    """The least capability, as in 75, that serves a checkpoint or a layer.

    Args:
        owner: A ``QuantizationConfig`` instance, or the scheme instance that
            one chose for a layer.

    Returns:
        70 when upstream's minimum is higher and a kernel is registered for
        each quantization that ``owner`` needs; otherwise upstream's minimum.

    """
    upstream: int = owner.get_min_capability()
    name = owner.get_name() if hasattr(owner, "get_name") else type(owner).__name__
    if upstream <= SM70_CAPABILITY or name not in _NEEDS:
        return upstream
    needed = _NEEDS[name](owner)
    served = bool(needed) and all(_kernels.get(item) for item in needed)
    return SM70_CAPABILITY if served else upstream
