# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The extension's CMake project: what it accepts, and how it refuses."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[3] / "csrc" / "sm70"


def configure(
    build: Path, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    search = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    cmake = shutil.which("cmake", path=search)
    assert cmake is not None, "cmake is not installed: pip install cmake"
    return subprocess.run(
        [cmake, "-S", PROJECT, "-B", build, *arguments],
        env={**os.environ, "PATH": search, **environment},
        capture_output=True,
        text=True,
    )


def fake_torch(folder: Path, version: str) -> str:
    package = folder / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    (package / "version.py").write_text(f"__version__ = {version!r}\ncuda = None\n")
    return str(folder)


THIS_PYTHON = f"-DVLLM_PYTHON_EXECUTABLE={sys.executable}"


def test_takes_the_arguments_of_setup_py(tmp_path: Path) -> None:
    """A CPU build, where torch was built with CUDA and nvcc may be there or not."""
    result = configure(
        tmp_path,
        THIS_PYTHON,
        "-GNinja",
        "-DVLLM_TARGET_DEVICE=cpu",
        "-DCMAKE_BUILD_TYPE=RelWithDebInfo",
        f"-DVLLM_PYTHON_PATH={':'.join(sys.path)}",
        f"-DFETCHCONTENT_BASE_DIR={tmp_path}",
        "-DNVCC_THREADS=1",
        "-DCMAKE_JOB_POOL_COMPILE:STRING=compile",
        "-DCMAKE_JOB_POOLS:STRING=compile=1",
    )
    assert result.returncode == 0, result.stderr
    assert "_sm70_C: CPU kernels only" in result.stdout
    assert "Warning" not in result.stderr


def test_torch_is_found_without_an_import(tmp_path: Path) -> None:
    result = configure(
        tmp_path / "build",
        THIS_PYTHON,
        "-DVLLM_SM70_CUDA=OFF",
        PYTHONPATH=fake_torch(tmp_path, "2.11.0+cu130"),
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "set VLLM_PYTHON_EXECUTABLE to the Python to build for"),
        (
            ["-DVLLM_PYTHON_EXECUTABLE=/nowhere/python3"],
            "/nowhere/python3 is not a Python 3.11 or later with its C headers",
        ),
        ([THIS_PYTHON], "needs torch 2.11 or later to build against; found torch 2.10"),
    ],
)
def test_refusals(tmp_path: Path, arguments: list[str], message: str) -> None:
    result = configure(
        tmp_path / "build", *arguments, PYTHONPATH=fake_torch(tmp_path, "2.10.1")
    )
    assert result.returncode != 0
    # CMake breaks its messages' lines.
    assert message in " ".join(result.stderr.split())
