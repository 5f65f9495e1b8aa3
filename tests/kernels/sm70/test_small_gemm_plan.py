# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""How csrc/sm70/small_gemm_plan.h shares out one row of x: it needs no GPU."""

import ctypes

import pytest

from .host_plan import compile_plan

PROGRAM = """
#include "small_gemm_plan.h"
extern "C" long long takes(long long m, long long n, long long k) {
  return vllm::sm70::takes_mma_gemv(m, n, k, 20480);
}
extern "C" long long blocks(long long groups, long long blocks,
                            long long block_bytes, long long shared_bytes,
                            long long multiprocessors) {
  return vllm::sm70::plan_mma_gemv(groups, blocks, block_bytes, shared_bytes,
                                   multiprocessors);
}
"""
KIB = 1024


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("plan")
    return compile_plan(PROGRAM, folder, {"takes": 3, "blocks": 5})


@pytest.mark.parametrize(
    ("m", "n", "k", "takes"),
    [
        (1, 34816, 5120, True),
        (1, 1, 32, True),
        (1, 5120, 20480, True),
        # More than a block keeps of x.
        (1, 5120, 20512, False),
        (2, 34816, 5120, False),
        # Nothing to load: the output is the bias.
        (1, 34816, 0, False),
        (1, 34816, 48, False),
        # 2^32 - 1 chunks are as many as 32 bits count.
        (1, 2**32 - 1, 32, True),
        (1, 2**32, 32, False),
    ],
)
def test_what_the_kernel_for_one_row_takes(
    plan: ctypes.CDLL, m: int, n: int, k: int, takes: bool
) -> None:
    assert bool(plan.takes(m, n, k)) is takes


@pytest.mark.parametrize(
    ("groups", "shared_kib", "multiprocessors", "blocks"),
    [
        (2176, 228, 132, 396),  # H200: registers bound it
        (2176, 100, 128, 256),  # 8.6 and 8.9: two blocks of 41 KiB fit
        (2176, 40, 80, 80),  # less than a block: one is launched all the same
        (320, 228, 132, 320),  # a block for each group
    ],
)
def test_blocks_that_stay_are_all_resident(
    plan: ctypes.CDLL, groups: int, shared_kib: int, multiprocessors: int, blocks: int
) -> None:
    asked = plan.blocks(groups, 3, 42016, shared_kib * KIB, multiprocessors)
    assert asked == blocks
