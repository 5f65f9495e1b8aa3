# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A CUDA GPU that is not there, so that a configuration can be planned for it.

Which kernels, attention backends, blocks and dtypes vLLM takes follows from the
platform's answers about its device. ``assume_gpu`` makes those answers a named
card's, in a process that only plans: nothing runs on it. It has to be called
before anything else reads ``current_platform``.

On an installation without CUDA the compiled extensions are missing too. What
they are asked while models are imported (does this capability have FP8 products)
is answered here; calling anything else of theirs is an error.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from vllm.platforms.cuda import CudaPlatformBase

GIB = 2**30
MIB = 2**20


@dataclass(frozen=True)
class Gpu:
    """What a plan has to know of a card.

    Attributes:
        name: as the driver reports it; upstream's tuned configurations are
            looked up by it.
        capability: compute capability, (7, 0) for V100.
        total_bytes: what ``cudaMemGetInfo`` gives as total, which is less than
            the board's memory: ECC and the driver keep some.
        multiprocessors: of the card, for kernels that size buffers by it.

    """

    name: str
    capability: tuple[int, int]
    total_bytes: int
    multiprocessors: int

    @property
    def sm(self) -> int:
        return self.capability[0] * 10 + self.capability[1]


def _gpu(name: str, sm: int, mib: int, multiprocessors: int) -> Gpu:
    return Gpu(name, divmod(sm, 10), mib * MIB, multiprocessors)


# Totals are what `nvidia-smi` and cudaMemGetInfo report on these cards, MiB.
GPUS: dict[str, Gpu] = {
    "v100-16gb": _gpu("Tesla V100-SXM2-16GB", 70, 16_144, 80),
    "v100-32gb": _gpu("Tesla V100-SXM2-32GB", 70, 32_494, 80),
    "titan-v": _gpu("NVIDIA TITAN V", 70, 12_059, 80),
    "t4": _gpu("Tesla T4", 75, 14_918, 40),
    "rtx-2080ti": _gpu("NVIDIA GeForce RTX 2080 Ti", 75, 11_004, 68),
    "a100-40gb": _gpu("NVIDIA A100-SXM4-40GB", 80, 40_338, 108),
    "a100-80gb": _gpu("NVIDIA A100-SXM4-80GB", 80, 81_153, 108),
    "a10": _gpu("NVIDIA A10", 86, 22_502, 72),
    "rtx-3090": _gpu("NVIDIA GeForce RTX 3090", 86, 24_126, 82),
    "l4": _gpu("NVIDIA L4", 89, 22_478, 58),
    "l40s": _gpu("NVIDIA L40S", 89, 45_478, 142),
    "rtx-4090": _gpu("NVIDIA GeForce RTX 4090", 89, 24_081, 128),
    "h100": _gpu("NVIDIA H100 80GB HBM3", 90, 81_090, 132),
    "h200": _gpu("NVIDIA H200", 90, 143_156, 132),
}

UNNAMED = "a CUDA card of capability 8.0"


def find_gpu(name: str | None, memory_gib: float | None = None) -> Gpu:
    """The card to plan for.

    Args:
        name: a key of ``GPUS``, in any case; None for an unnamed card of
            capability 8.0.
        memory_gib: the card's memory in GiB, in place of the named one's.

    Raises:
        ValueError: the name is unknown, or the memory is not a positive number.

    """
    if memory_gib is not None and not 0 < memory_gib < 2**20:
        raise ValueError(
            f"--memory {memory_gib}: expected the card's memory in GiB, such as 32"
        )
    if name is None:
        if memory_gib is None:
            raise ValueError("name a card (--gpu) or its memory (--memory)")
        return Gpu(UNNAMED, (8, 0), int(memory_gib * GIB), 108)
    gpu = GPUS.get(name.strip().lower())
    if gpu is None:
        raise ValueError(
            f"--gpu {name}: expected one of {', '.join(GPUS)}; for another card "
            "take one of the same capability and give --memory GIB as well"
        )
    if memory_gib is not None:
        gpu = replace(gpu, total_bytes=int(memory_gib * GIB))
    return gpu


def assume_gpu(gpu: Gpu) -> None:
    """Make ``gpu`` the current platform of this process, for planning only.

    Raises:
        RuntimeError: something has read the platform already, and may hold on to
            another one.

    """
    from vllm import platforms

    if platforms._current_platform is not None:
        raise RuntimeError(
            "the platform has been read already; a card can only be assumed first"
        )
    _stand_in_for_extensions(gpu)
    platforms.current_platform = _platform_class(gpu)()
    _stand_in_for_triton()
    from vllm.model_executor.kernels.linear.sm70 import ops

    # The fork's own build for a CUDA card has these kernels.
    ops.unavailable_reason = lambda device_type: None


def _platform_class(gpu: Gpu) -> type[CudaPlatformBase]:
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability

    class PlannedGpuPlatform(CudaPlatformBase):
        """Upstream's CUDA platform, its device queries answered from a table."""

        planned_gpu = gpu

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(*gpu.capability)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return gpu.name

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return gpu.total_bytes

        @classmethod
        def get_device_uuid(cls, device_id: int = 0) -> str:
            return f"planned-{device_id}"

        @classmethod
        def is_fully_connected(cls, device_ids: list[int]) -> bool:
            return True

        @classmethod
        def device_count(cls) -> int:
            # As many as the plan asks for.
            return 2**10

        @classmethod
        def current_device(cls) -> int:
            return 0

        @classmethod
        def is_integrated_gpu(cls, device_id: int = 0) -> bool:
            return False

        @classmethod
        def num_compute_units(cls, device_id: int = 0) -> int:
            return gpu.multiprocessors

        @classmethod
        def is_arch_support_pdl(cls) -> bool:
            return gpu.sm >= 90

        @classmethod
        def log_warnings(cls) -> None:
            pass

    return PlannedGpuPlatform


class _Module(types.ModuleType):
    """A module that has whatever is imported from it."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _NotHere(f"{self.__name__}.{name}")


class _NotHere:
    """An operator that a plan may hold, and never calls."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{self._name} was called while planning")


def _capability_queries(gpu: Gpu) -> dict[str, bool]:
    """Upstream's compiled questions about a capability, and their answers."""
    return {
        "cutlass_scaled_mm_supports_fp8": gpu.sm >= 89,
        "cutlass_scaled_mm_supports_block_fp8": gpu.sm >= 90,
        "cutlass_scaled_mm_supports_fp4": gpu.sm >= 100,
        "cutlass_group_gemm_supported": gpu.sm >= 90,
        "mxfp4_experts_quant_supported": gpu.sm >= 100,
        "moe_permute_unpermute_supported": True,
    }


class Operators(torch._ops._OpNamespace):
    """A namespace of compiled operators, of which some may be missing."""

    def __init__(self, name: str, answers: dict[str, bool]) -> None:
        super().__init__(name)
        self._answers = answers

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in self._answers:
                return lambda *args: self._answers[name]
            # Imports ask `hasattr` before they describe an operator to torch;
            # layers take what a CUDA build always has.
            if name.startswith("_") or not _layers_are_made:
                raise
            return _NotHere(f"{self.name}::{name}")


_layers_are_made = False


class _CudaObject:
    """A stream or an event that a layer holds on to."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass


@contextlib.contextmanager
def layers_assumed() -> Iterator[None]:
    """While layers are made: a compiled operator that is missing may be looked up,
    and without CUDA a stream or an event may be made."""
    global _layers_are_made
    held = {} if torch.cuda.is_available() else {"Stream": None, "Event": None}
    for name in held:
        held[name] = getattr(torch.cuda, name)
        setattr(torch.cuda, name, _CudaObject)
    _layers_are_made = True
    try:
        yield
    finally:
        _layers_are_made = False
        for name, original in held.items():
            setattr(torch.cuda, name, original)


def _stand_in_for_extensions(gpu: Gpu) -> None:
    if importlib.util.find_spec("vllm._C_stable_libtorch") is not None:
        return  # A CUDA build: everything is there.
    for name in ("vllm._C_stable_libtorch", "vllm._moe_C_stable_libtorch"):
        sys.modules[name] = _Module(name)
    answers = _capability_queries(gpu)
    for name in ("_C", "_moe_C"):
        setattr(torch.ops, name, Operators(name, answers))
    if gpu.sm >= 75:
        package = "vllm.vllm_flash_attn"
        flash = _Module(package)
        versions = {2: gpu.sm >= 80, 3: gpu.sm // 10 == 9, 4: gpu.sm // 10 == 10}
        vars(flash)["is_fa_version_supported"] = lambda v, *_: versions.get(v, False)
        vars(flash)["fa_version_unsupported_reason"] = lambda v, *_: (
            None if versions.get(v) else f"FA{v} is not for capability {gpu.sm}"
        )
        for name in ("", ".flash_attn_interface"):
            sys.modules[package + name] = flash
        for name in (".layers", ".layers.rotary"):
            sys.modules[package + name] = _Module(package + name)
        # A plan runs an encoder: the kernel writes a tensor like its first input.
        rotary = vars(sys.modules[f"{package}.layers.rotary"])
        rotary["apply_rotary_emb"] = lambda x, *_: torch.empty_like(x)


def _stand_in_for_triton() -> None:
    """Let Triton be what it is where the card is: there.

    Where the package is installed it is imported as in a process whose devices
    come later; otherwise its presence is claimed, since only kernels need it.
    """
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    from vllm import platforms

    matches = platforms.vllm_version_matches_substr
    platforms.vllm_version_matches_substr = lambda substr: False
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        from vllm import triton_utils
    finally:
        platforms.vllm_version_matches_substr = matches
        if hidden is None:
            del os.environ["CUDA_VISIBLE_DEVICES"]
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = hidden
    if not triton_utils.HAS_TRITON:
        import vllm.config.vllm

        vllm.config.vllm.HAS_TRITON = True
