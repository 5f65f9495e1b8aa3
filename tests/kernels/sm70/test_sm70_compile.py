# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Every kernel of csrc/sm70 compiles for sm_70 within its limits.

The compiler comes from the package index with the first run (see
tools/sm70_compile.py); the later tests make sure that it would notice.
"""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tools import sm70_compile as tool


@pytest.fixture(scope="module")
def toolchain() -> Any:
    return tool.fetch_toolchain()


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    shutil.copy(tool.SOURCES / "kernel_entry.h", tmp_path)
    return tmp_path


def test_every_kernel(toolchain: Any, capsys: pytest.CaptureFixture[str]) -> None:
    reports, problems = tool.compile_all(toolchain, tool.SOURCES)
    with capsys.disabled():
        print(f"\n{tool.table(reports)}")
    assert problems == []
    headers = {report.header for report in reports}
    assert headers == {path.name for path in tool.SOURCES.rglob("*.cuh")}
    assert {"nvfp4_dequantize.cuh", "fp8_dequantize.cuh"} <= headers


def test_main_prints_a_table(
    toolchain: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tool.main([]) == 0
    output = capsys.readouterr().out
    assert "nvfp4_dequantize_kernel<Fp16>" in output
    assert "0 problems" in output


# Volatile accesses keep their order, so all 96 values are live at once.
REGISTERS = """
__global__ void registers(Params p) {
  volatile float* x = p.x + threadIdx.x;
  float a[96];
#pragma unroll
  for (int i = 0; i < 96; ++i) a[i] = x[1024 * i];
#pragma unroll
  for (int i = 0; i < 96; ++i) x[1024 * i] = a[95 - i];
}
"""
SPILL = REGISTERS.replace("registers", "__launch_bounds__(1024) spill")
STACK = """
__global__ void stack(Params p) {
  float a[16];
  for (int i = 0; i < 32; ++i) a[int(p.x[i]) & 15] = i;
  p.x[0] = a[int(p.x[32]) & 15];
}
"""
SHARED = """
__global__ void shared(Params p) {
  extern __shared__ float memory[];
  memory[threadIdx.x] = p.x[threadIdx.x];
  __syncthreads();
  p.x[threadIdx.x] = memory[threadIdx.x ^ 1];
}
"""
STATIC_SHARED = """
__global__ void static_shared(Params p) {
  __shared__ float memory[8192];
  for (int i = threadIdx.x; i < 8192; i += 32) memory[i] = p.x[i];
  __syncthreads();
  p.x[threadIdx.x] = memory[8191 - threadIdx.x];
}
"""
WMMA = """
#include <mma.h>
template <int kSteps>
__global__ void wmma_kernel(Params p) {
  using namespace nvcuda::wmma;
  fragment<matrix_a, 16, 16, 16, half, row_major> a;
  fragment<matrix_b, 16, 16, 16, half, col_major> b;
  fragment<accumulator, 16, 16, 16, float> c;
  fill_fragment(c, 0.0f);
  for (int i = 0; i < kSteps; ++i) {
    load_matrix_sync(a, reinterpret_cast<half*>(p.x) + 16 * i, 16 * kSteps);
    load_matrix_sync(b, reinterpret_cast<half*>(p.x) + 256 * i, 16 * kSteps);
    mma_sync(c, a, b, c);
  }
  store_matrix_sync(p.x, c, 16, mem_row_major);
}
"""
PLAIN = """
__global__ void plain(Params p) { p.x[threadIdx.x] += 1; }
"""


def write_header(folder: Path, body: str, entries: str) -> Path:
    path = folder / "candidate.cuh"
    path.write_text(
        '#pragma once\n#include "kernel_entry.h"\n'
        f"struct Params {{ float* x; }};\n{body}\n{entries}\n"
    )
    return path


@pytest.mark.parametrize(
    ("body", "entry", "problem"),
    [
        (
            SPILL,
            "SM70_ENTRY(1024, 0, false, spill)",
            r"memory: [1-9]\d* bytes of spills",
        ),
        (
            STACK,
            "SM70_ENTRY(32, 0, false, stack)",
            "0 bytes of spills and a stack of 64",
        ),
        (
            SHARED,
            "SM70_ENTRY(32, 96 * 1024 + 16, false, shared)",
            "needs 98320 bytes of shared memory; sm_70 has 98304",
        ),
        (
            STATIC_SHARED,
            "SM70_ENTRY(32, 64 * 1024 + 16, false, static_shared)",
            "needs 98320 bytes of shared memory; sm_70 has 98304",
        ),
        (
            PLAIN,
            "SM70_ENTRY(32, 0, true, plain)",
            "no tensor-core instruction came out",
        ),
        (
            WMMA,
            "SM70_ENTRY(32, 0, false, wmma_kernel<1>)",
            "has 16 tensor-core instructions, but is not listed",
        ),
        (
            REGISTERS,
            "SM70_ENTRY(1024, 0, false, registers)",
            "cannot be launched: 1024 threads of",
        ),
    ],
)
def test_limits_are_checked(
    toolchain: Any, sources: Path, body: str, entry: str, problem: str
) -> None:
    write_header(sources, body, entry)
    reports, problems = tool.compile_all(toolchain, sources)
    assert len(reports) == 1
    assert len(problems) == 1
    assert re.search(problem, problems[0]) and "candidate.cuh" in problems[0]


def test_what_fits_passes(toolchain: Any, sources: Path) -> None:
    write_header(
        sources,
        WMMA + SHARED + STATIC_SHARED,
        "SM70_ENTRY(32, 0, true, wmma_kernel<1>)\n"
        "SM70_ENTRY(32, 0, true, wmma_kernel<2>)\n"
        "SM70_ENTRY(64, 96 * 1024, false, shared)\n"
        "SM70_ENTRY(32, 64 * 1024, false, static_shared)",
    )
    reports, problems = tool.compile_all(toolchain, sources)
    assert problems == []
    # A 16 x 16 x 16 product is sixteen HMMA.884 instructions.
    assert [report.hmma for report in reports] == [16, 32, 0, 0]
    assert [report.shared_bytes for report in reports] == [0, 0, 98304, 98304]
    assert [report.blocks_per_sm for report in reports] == [32, 32, 1, 1]


@pytest.mark.parametrize(
    ("body", "entry", "problem"),
    [
        (PLAIN, "", "lists no kernel"),
        (PLAIN + SHARED, "SM70_ENTRY(32, 0, false, plain)", "shared has no SM70_ENTRY"),
        (PLAIN, "SM70_ENTRY(32, 0, false, plain)\n" * 2, "lists a kernel twice"),
        (
            PLAIN,
            "SM70_ENTRY(32, 0, false, plain)\nSM70_ENTRY(32, 0, false, plan)",
            '"plan" is undefined',
        ),
        (
            PLAIN + '#include "other.cuh"',
            "SM70_ENTRY(32, 0, false, plain)",
            "includes another kernel header",
        ),
        (
            "__global__ __attribute__((unused)) void odd(Params p) {}" + PLAIN,
            "SM70_ENTRY(32, 0, false, plain)",
            "whose name this program cannot read",
        ),
        ("oops", "SM70_ENTRY(32, 0, false, plain)", "error"),
    ],
)
def test_no_kernel_escapes(
    toolchain: Any, sources: Path, body: str, entry: str, problem: str
) -> None:
    (sources / "other.cuh").write_text(
        '#include "kernel_entry.h"\n__global__ void other(int) {}\n'
        "SM70_ENTRY(32, 0, false, other)\n"
    )
    write_header(sources, body, entry)
    reports, problems = tool.compile_all(toolchain, sources)
    assert [report.entry.kernel for report in reports] == ["other"]
    assert len(problems) == 1
    assert problem in problems[0] and "candidate.cuh" in problems[0]


@pytest.mark.parametrize("name", ["ops.cu", "helpers.h", "bindings.cpp"])
def test_kernels_outside_a_kernel_header(
    toolchain: Any, sources: Path, name: str
) -> None:
    write_header(sources, PLAIN, "SM70_ENTRY(32, 0, false, plain)")
    (sources / name).write_text(
        "// __global__ in a comment is no kernel\n"
        "template <class T> __global__ void __launch_bounds__(32 * (1 + 1)) hidden(T t)"
    )
    _, problems = tool.compile_all(toolchain, sources)
    expected = f"{name}: kernel hidden must be in a kernel header (.cuh)"
    assert [problem.partition(", where")[0] for problem in problems] == [expected]


def test_a_folder_without_kernels(toolchain: Any, tmp_path: Path) -> None:
    _, problems = tool.compile_all(toolchain, tmp_path)
    assert problems == [f"{tmp_path}: no kernel header (*.cuh) there"]


def test_no_package_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One clear error, and no half-made folder that a later run would trust."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    cache = tmp_path / "cuda"
    assert tool.main(["--cache", str(cache)]) == 2
    assert "pip could not install nvidia-cuda-nvrtc-cu12" in capsys.readouterr().err
    assert not cache.exists()
