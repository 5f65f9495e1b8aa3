# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The two settings of the SM70 linear kernels, read when a layer is created.

Both become constants of the compiled graph. They are part of its cache key, as
every variable of vllm/envs.py is.
"""

from dataclasses import dataclass

import vllm.envs as envs
from vllm.model_executor.kernels.linear.sm70.tiling import check_width
from vllm.platforms import current_platform

TILE_WIDTH = "VLLM_SM70_TILE_WIDTH"
SMALL_BATCH = "VLLM_SM70_SMALL_BATCH"

AUTO_WIDTH = -1
"""As an operator's argument: the width is chosen from the shape."""

MAX_SMALL_BATCH = 65536

_SMALL_BATCH_CUDA = 64
# Two threads of a CPU with AVX512-BF16, BF16, NVFP4 and FP8: tiles win from 7 or
# 8 tokens on.
_SMALL_BATCH_CPU = 6


@dataclass(frozen=True)
class LinearSettings:
    """As the operators take them.

    Attributes:
        tile_width: output columns of a tile, 0 for no tiles, or `AUTO_WIDTH`.
        small_batch: up to so many tokens the packed weight is read directly.

    """

    tile_width: int
    small_batch: int

    @classmethod
    def from_environment(cls) -> "LinearSettings":
        """Read the settings.

        Raises:
            ValueError: a value cannot work; the message names the allowed range.

        """
        width, batch = envs.VLLM_SM70_TILE_WIDTH, envs.VLLM_SM70_SMALL_BATCH
        return cls(
            AUTO_WIDTH
            if width == "auto"
            else check_width(_integer(TILE_WIDTH, width), TILE_WIDTH),
            _default_small_batch() if batch == "auto" else _check_small_batch(batch),
        )


def _default_small_batch() -> int:
    return _SMALL_BATCH_CPU if current_platform.is_cpu() else _SMALL_BATCH_CUDA


def _check_small_batch(text: str) -> int:
    value = _integer(SMALL_BATCH, text)
    if 0 <= value <= MAX_SMALL_BATCH:
        return value
    raise ValueError(
        f"{SMALL_BATCH}={value}: expected 0 (always tiles) to {MAX_SMALL_BATCH} "
        "tokens; leave it unset for the measured default"
    )


def _integer(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(
            f'{name}={text!r}: expected a whole number, or "auto" for the default'
        ) from None
