# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The extension builds with CUDA, and every operator has a CUDA kernel.

test_sm70_compile.py compiles the kernels; this builds the host code that launches
them, through CMake, with nvcc 13.0 out of the package index. That is the release
that torch's own packages are for: nvcc 12.6 is in no package. No GPU is needed,
and no toolkit of the machine is used.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tools import sm70_compile
from vllm.model_executor.kernels.linear.sm70 import ops
from vllm.model_executor.layers.fused_moe import sm70_ops

pytestmark = pytest.mark.skipif(
    not str(torch.version.cuda).startswith("13."),
    reason="nvcc must be of torch's CUDA, and only that of CUDA 13 is in a package; "
    "a fork built with another has compiled the same sources",
)

SOURCES = sm70_compile.SOURCES
CACHE = sm70_compile.REPOSITORY / "build" / "cuda130"
# nvvm has the compiler proper, crt and cccl hold headers that cuda_fp16.h includes.
PACKAGES = tuple(
    f"nvidia-{part}==13.0.*"
    for part in ("cuda-nvcc", "nvvm", "cuda-crt", "cuda-runtime", "cuda-cccl")
)
PACKAGE_FILES = (
    "bin/nvcc",
    "nvvm/bin/cicc",
    "include/crt/host_config.h",
    "lib/libcudart.so.13",
    "include/cccl/nv/target",
)
SITE_PACKAGES = Path(torch.__file__).resolve().parents[1]
SEARCH = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])

# Prints which operators have a kernel, by device. RTLD_NOW is in ctypes, which
# torch loads a library with: a missing function is an error here.
LIST_KERNELS = """
import json, sys, torch
torch.ops.load_library(sys.argv[1])
names = [name for name in torch._C._dispatch_get_all_op_names()
         if name.startswith("_sm70_C::")]
has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
print(json.dumps({
    key: sorted(name.split("::")[1] for name in names if has_kernel(name, key))
    for key in ("CPU", "CUDA")
}))
"""


@pytest.fixture(scope="module")
def toolkit() -> Path:
    """The packages, arranged as an installed toolkit is."""
    inside = Path("nvidia", "cu13")
    sm70_compile.fetch_packages(
        PACKAGES,
        CACHE,
        lambda root: all((root / inside / name).exists() for name in PACKAGE_FILES),
    )
    root = CACHE / inside
    # The packages lack the names that nvcc and CMake look for.
    for link, target in (("lib64", "lib"), ("lib/libcudart.so", "libcudart.so.13")):
        if not (root / link).exists():
            (root / link).symlink_to(target)
    return root


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a build tool where no variable names another toolkit."""
    other = ("CUDA", "NVCC", "TORCH_CUDA", "CPATH", "CPLUS_INCLUDE_", "LIBRARY_PATH")
    env = {k: v for k, v in os.environ.items() if not k.startswith(other)}
    program = shutil.which(command[0], path=SEARCH)
    assert program is not None, f"{command[0]} is not installed"
    return subprocess.run(
        [program, *command[1:]],
        env={**env, "PATH": SEARCH, "LC_ALL": "C"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def build(
    toolkit: Path, sources: Path, folder: Path, target: str
) -> subprocess.CompletedProcess[str]:
    configured = run(
        *("cmake", "-S", sources, "-B", folder, "-GNinja"),
        f"-DVLLM_PYTHON_EXECUTABLE={sys.executable}",
        "-DVLLM_TARGET_DEVICE=cuda",
        f"-DCMAKE_CUDA_COMPILER={toolkit / 'bin' / 'nvcc'}",
        # The oldest that CUDA 13 knows; PTX alone, since nothing runs it.
        "-DCMAKE_CUDA_ARCHITECTURES=75-virtual",
    )
    assert configured.returncode == 0, configured.stdout
    assert "_sm70_C: CPU and CUDA kernels" in configured.stdout
    return run("cmake", "--build", folder, "--target", target)


@pytest.fixture(scope="module")
def built(toolkit: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cuda_build")
    done = build(toolkit, SOURCES, folder, "all")
    assert done.returncode == 0, done.stdout
    return folder


def test_every_source_is_compiled(built: Path) -> None:
    for suffix in (".cu", ".cpp"):
        compiled = {path.stem for path in built.rglob(f"*{suffix}.o")}
        assert compiled == {path.name for path in SOURCES.glob(f"*{suffix}")}


def test_every_operator_has_a_cuda_kernel(built: Path) -> None:
    library = built / "_sm70_C.abi3.so"
    done = run(sys.executable, "-c", LIST_KERNELS, library)
    assert done.returncode == 0, done.stdout
    kernels = json.loads(done.stdout.splitlines()[-1])
    operators = {*ops._OPERATORS, *sm70_ops._OPERATORS}
    assert set(kernels["CUDA"]) == operators
    # The one without a CPU kernel shows that a missing kernel is seen.
    assert set(kernels["CPU"]) == operators - {"gemm_nt"}


def test_no_other_toolkit_took_part(toolkit: Path, built: Path) -> None:
    """CUDA's headers and libraries are those of the packages."""
    ours = (toolkit.resolve(), SITE_PACKAGES)
    includes = (toolkit / "include", SITE_PACKAGES / "nvidia" / "cu13" / "include")
    names = {path.name for folder in includes for path in folder.glob("*.h")}
    listing = run("ninja", "-C", built, "-t", "deps").stdout
    headers = {
        Path(line.strip()).resolve()
        for line in listing.splitlines()
        if line.startswith(" ")
    }
    headers = {path for path in headers if path.name in names}
    assert {"cuda_runtime.h", "cublasLt.h"} <= {path.name for path in headers}
    # torch has a cuda.h of its own; it is in its package.
    assert [p for p in headers if not any(p.is_relative_to(o) for o in ours)] == []

    link = run("ninja", "-C", built, "-t", "commands").stdout.splitlines()[-1]
    libraries = [Path(name).resolve() for name in re.findall(r"\S+/libcu\S+", link)]
    assert len(libraries) == 2, link  # the CUDA runtime and cuBLAS
    assert all(any(p.is_relative_to(o) for o in ours) for p in libraries), link


def test_a_wrong_initialiser_is_an_error(toolkit: Path, tmp_path: Path) -> None:
    """In a template, where only its instantiation finds it."""
    sources = tmp_path / "sm70"
    shutil.copytree(SOURCES, sources)
    file = sources / "cuda_ops.cu"
    code, count = re.subn(
        r"(Params<Format> params\{)", r'\1"wrong", ', file.read_text(), count=1
    )
    assert count == 1, "cuda_ops.cu has no initialiser to break: adapt this test"
    file.write_text(code)
    target = f"CMakeFiles/_sm70_C.dir/{file.name}.o"
    done = build(toolkit, sources, tmp_path / "build", target)
    assert done.returncode != 0
    assert re.search(r"cuda_ops\.cu\(\d+\): error: .*initializ", done.stdout)
