# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What csrc/sm70/moe_plan.h chooses, compiled as it is: it needs no GPU."""

import ctypes

import pytest
from hypothesis import given
from hypothesis import strategies as st

from .host_plan import compile_plan

PROGRAM = """
#include "moe_plan.h"
extern "C" long long kernel(long long batch_tokens, long long tokens,
                            long long top_k, long long experts) {
  return vllm::sm70::moe_usual_kernel(batch_tokens, tokens, top_k, experts);
}
extern "C" long long begin(long long tile, long long columns, long long width) {
  return vllm::sm70::moe_tile_begin(tile, columns, width);
}
"""
MAX_GRID_ROWS = 65535


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("plan")
    return compile_plan(PROGRAM, folder, {"kernel": 4, "begin": 3})


# Whole batches. Where all kernels were measured (H200) these are the fastest.
A3B = {1: 1, 2: 1, 4: 1, 8: 1, 16: 1, 32: 2, 64: 2, 96: 16, 512: 16, 1024: 64, 8192: 64}
WIDE = {1: 1, 8: 1, 16: 1, 32: 2, 64: 2, 128: 16, 1024: 16, 2048: 64, 8192: 64}


@pytest.mark.parametrize(
    ("top_k", "experts", "choices"), [(8, 256, A3B), (10, 512, WIDE)]
)
def test_choices(
    plan: ctypes.CDLL, top_k: int, experts: int, choices: dict[int, int]
) -> None:
    made = {tokens: plan.kernel(tokens, tokens, top_k, experts) for tokens in choices}
    assert made == choices


@given(st.integers(1, 20_000), st.integers(1, 20_000), st.integers(1, 16), st.data())
def test_chunks_share_a_family(
    plan: ctypes.CDLL, tokens: int, chunk: int, top_k: int, data: st.DataObject
) -> None:
    experts = data.draw(st.integers(1, 2048) | st.integers(2**15, 2**17))
    whole = plan.kernel(tokens, tokens, top_k, experts)
    part = plan.kernel(tokens, min(chunk, tokens), top_k, experts)
    assert part <= whole
    assert (part <= 4) == (whole <= 4)
    if whole <= 4:
        assert tokens * top_k <= MAX_GRID_ROWS


@pytest.mark.parametrize(
    ("columns", "width", "begins"),
    [
        (2048, 384, [0, 256, 640, 1024, 1280, 1664]),
        (2560, 384, [0, 256, 640, 1024, 1408, 1792, 2176]),
        (2048, 2048, [0]),
        (272, 128, [0, 128, 256]),
        (208, 144, [0, 96]),
        (208, 512, [0]),
    ],
)
def test_tiles(plan: ctypes.CDLL, columns: int, width: int, begins: list[int]) -> None:
    made = [plan.begin(i, columns, width) for i in range(len(begins) + 1)]
    assert made == [*begins, columns]


@given(
    st.integers(1, 1024).map(lambda n: 16 * n),
    st.integers(1, 128).map(lambda n: 16 * n),
)
def test_any_tiles(plan: ctypes.CDLL, columns: int, width: int) -> None:
    count = -(-columns // width)
    begins = [plan.begin(tile, columns, width) for tile in range(count + 1)]
    assert begins[0] == 0 and begins[-1] == columns
    assert all(begin % (16 if width % 128 else 128) == 0 for begin in begins[:-1])
    assert all(0 < end - begin <= width for begin, end in zip(begins, begins[1:]))
