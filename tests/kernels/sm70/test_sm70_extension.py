# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the compiled extension may need from the machine that it runs on."""

import importlib.util
import os
import re
import subprocess
from pathlib import Path

import pytest

# The C and C++ runtimes, torch, the CUDA runtime and cuBLAS; nothing else.
ALLOWED_LIBRARIES = [
    r"libc\.so\.6",
    r"libm\.so\.6",
    r"libpthread\.so\.0",
    r"libdl\.so\.2",
    r"librt\.so\.1",
    r"ld-linux-[\w-]+\.so\.\d",
    r"libstdc\+\+\.so\.6",
    r"libgcc_s\.so\.1",
    r"libc10(_cuda)?\.so",
    r"libtorch(_cpu|_cuda)?\.so",
    r"libcudart\.so\.\d+",
    r"libcublas(Lt)?\.so\.\d+",
]
# torch's stable C functions, Python's, CUDA's; those of the C and C++ runtimes
# carry a version (name@GLIBC_2.17).
ALLOWED_SYMBOLS = re.compile(
    r"(aoti_torch_|torch_|Py|_Py)\w*"
    r"|(cuda|cublas|__cuda)\w*(@lib(cudart|cublas(Lt)?)\.so\.\d+)?"
    r"|\w+@(GLIBC|GLIBCXX|CXXABI|GCC)_[\w.]+"
    r"|_ITM_\w+|__gmon_start__|__cxa_finalize"
)


@pytest.fixture(scope="module")
def extension() -> Path:
    spec = importlib.util.find_spec("vllm._sm70_C")
    assert spec is not None and spec.origin is not None, (
        "vllm._sm70_C is not in this installation: run `pip install .`"
    )
    return Path(spec.origin)


def read(*command: str | Path) -> str:
    env = {**os.environ, "LC_ALL": "C"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    return done.stdout


def test_name_says_stable_abi(extension: Path) -> None:
    assert extension.name == "_sm70_C.abi3.so"


def test_needs_no_other_library(extension: Path) -> None:
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", read("readelf", "-d", extension))
    assert any(name.startswith("libtorch_cpu") for name in needed)
    allowed = re.compile("|".join(ALLOWED_LIBRARIES))
    assert [name for name in needed if not allowed.fullmatch(name)] == []


def test_names_no_folder_of_the_build_machine(extension: Path) -> None:
    paths = re.findall(
        r"\((?:RPATH|RUNPATH)\).*\[(.*)\]", read("readelf", "-d", extension)
    )
    assert [p for entry in paths for p in entry.split(":") if p[:1] != "$"] == []


def test_uses_torchs_stable_interface_only(extension: Path) -> None:
    """One build serves torch 2.11 and later as long as this holds."""
    lines = read("nm", "-D", "--undefined-only", extension).splitlines()
    symbols = [line.split()[-1] for line in lines]
    assert any(name.startswith("aoti_torch_") for name in symbols)
    assert [name for name in symbols if not ALLOWED_SYMBOLS.fullmatch(name)] == []
