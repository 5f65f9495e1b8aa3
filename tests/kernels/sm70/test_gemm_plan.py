# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""For which N csrc/sm70/gemm_plan.h has an algorithm chosen: it needs no GPU."""

import ctypes

import pytest

from vllm.model_executor.kernels.linear.sm70.tiling import (
    MIN_WIDTH,
    WEIGHT_SCRATCH_BYTES,
    plan_tiles,
)

from .host_plan import compile_plan

PROGRAM = """
#include "gemm_plan.h"
extern "C" long long columns(long long k) {
  return vllm::sm70::scratch_columns(k);
}
extern "C" long long bytes() { return vllm::sm70::kScratchBytes; }
extern "C" long long fewest() { return vllm::sm70::kFewestColumns; }
"""


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("plan")
    return compile_plan(PROGRAM, folder, {"columns": 1, "bytes": 0, "fewest": 0})


@pytest.mark.parametrize(
    ("k", "columns"),
    [
        (17408, 1024),  # down at TP1, then TP2 and TP4
        (8704, 2048),
        (4352, 4096),
        (5120, 4096),  # just 40 MiB
        (5136, 2048),
        (6144, 2048),
        (1, 4096),
        (2**17, 128),
        (2**40, 128),
    ],
)
def test_the_columns_that_the_scratch_holds(
    plan: ctypes.CDLL, k: int, columns: int
) -> None:
    assert plan.columns(k) == columns


def test_tiles_and_their_products_are_planned_for_the_same_memory(
    plan: ctypes.CDLL,
) -> None:
    assert plan.bytes() == WEIGHT_SCRATCH_BYTES
    assert plan.fewest() == MIN_WIDTH


@pytest.mark.parametrize(
    ("columns", "k", "gated", "asked"),
    [
        # One product in flight of 1024, 2048 or 4096 columns; two of 2048.
        (5120, 17408, False, 1024),
        (5120, 8704, False, 2048),
        (5120, 4352, False, 4096),
        (16384, 5120, False, 4096),
        (17408, 5120, True, 4096),
        (5120, 6144, False, 2048),
    ],
)
def test_the_columns_in_flight_of_the_27b_class(
    plan: ctypes.CDLL, columns: int, k: int, gated: bool, asked: int
) -> None:
    tiles = plan_tiles(columns, k, 8192, 2, gated=gated)
    in_flight = tiles.width * tiles.lanes * (2 if gated else 1)
    assert plan.columns(k) == asked == in_flight
