# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Compile the headers of csrc/sm70 that need no GPU, to call what they choose."""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[3] / "csrc" / "sm70"


def compile_plan(
    program: str, folder: Path, functions: Mapping[str, int]
) -> ctypes.CDLL:
    """Compile a C++ program that includes headers of csrc/sm70, and load it.

    Args:
        program: its text.
        folder: for the library.
        functions: names of its `extern "C"` functions, and how many arguments each
            takes, all of them and the result `long long`.

    """
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    assert compiler is not None, "no C++ compiler: set CXX, as for the extension"
    library = folder / "plan.so"
    subprocess.run(
        [compiler, "-std=c++20", "-shared", "-fPIC", "-x", "c++", "-"]
        + ["-I", str(SOURCES), "-o", str(library)],
        input=program,
        text=True,
        check=True,
    )
    loaded = ctypes.CDLL(str(library))
    for name, arguments in functions.items():
        function = getattr(loaded, name)
        function.argtypes = [ctypes.c_longlong] * arguments
        function.restype = ctypes.c_longlong
    return loaded
