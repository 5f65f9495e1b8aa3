# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The CUDA build for capability 7.0, configured without CUDA.

CMakeLists.txt is configured against a stub of torch, of the CUDA compiler and
of FetchContent (``stub_cuda``). What CMake would then build is read back from
its file API: targets, sources, and the architectures that each source gets.
Builds for other architectures are the control.
"""

import ast
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from packaging.version import Version

import vllm

ROOT = Path(vllm.__file__).resolve().parents[1]
STUB = Path(__file__).resolve().parent / "stub_cuda"

# What CMakeLists.txt downloads, in its order.
ALL_PROJECTS = [
    "cutlass",
    "triton_kernels",
    "deepgemm",
    "deepselect",
    "fmha_sm100",
    "flashmla",
    "flashkda",
    "qutlass",
    "tml_fa4",
    "vllm-flash-attn",
]
# Extensions that do have code for 7.0.
BUILT_FOR_70 = {
    "spinloop",
    "fs_io_C",
    "cumem_allocator",
    "_C_stable_libtorch",
    "_moe_C_stable_libtorch",
    "_sm70_C",
}


@dataclass
class Build:
    """A configured (never compiled) build.

    Attributes:
        returncode: CMake's exit status.
        log: CMake's stdout and stderr, white space collapsed.
        fetched: the projects that would have been downloaded, in order.
        targets: target name -> CMake target type.
        archs: CUDA source -> its ``compute_x,sm_y`` pairs, in order.

    """

    returncode: int
    log: str
    fetched: list[str]
    targets: dict[str, str]
    archs: dict[str, list[str]]


def _program(name: str) -> str:
    beside_python = Path(sys.executable).parent / name
    found = str(beside_python) if beside_python.is_file() else shutil.which(name)
    assert found, f"{name} is not beside {sys.executable} and not on PATH: install it"
    return found


def _md5(path: str) -> str:
    return hashlib.md5((ROOT / path).read_bytes()).hexdigest()


def configure(work: Path, archs: str, cuda: str = "12.6", gcc: str = "13.2.0") -> Build:
    """Configure ROOT for the architectures (``"7.0 8.0"``), compiler and GCC."""
    # Configuring writes below vllm/, so the source folder is one of links.
    source, binary = work / "source", work / "binary"
    (source / "vllm" / "third_party").mkdir(parents=True)
    for name in ("CMakeLists.txt", "cmake", "csrc"):
        (source / name).symlink_to(ROOT / name)
    query = binary / ".cmake" / "api" / "v1" / "query" / "codemodel-v2"
    query.parent.mkdir(parents=True)
    query.touch()

    # Kernel sources are generated into csrc/ unless the generator's hash says
    # that this has been done.
    marlin = _md5("csrc/quantization/marlin/generate_kernels.py")
    marlin = f"{marlin}(ARCH:{archs.replace(' ', ',')})"
    machete = _md5("csrc/quantization/machete/generate.py")
    fetch_log = work / "fetched"
    defines = {
        "CMAKE_CUDA_COMPILER": STUB / "nvcc",
        "CMAKE_MAKE_PROGRAM": _program("ninja"),
        "CMAKE_MODULE_PATH": STUB,
        "FETCHCONTENT_BASE_DIR": work / "deps",
        "FETCH_LOG": fetch_log,
        "MACHETE_GEN_SCRIPT_HASH": machete,
        "MARLIN_GEN_SCRIPT_HASH_AND_ARCH": marlin,
        "MOE_MARLIN_GEN_SCRIPT_HASH_AND_ARCH": marlin,
        "STUB_CUDA_VERSION": cuda,
        "STUB_GCC_VERSION": gcc,
        "Torch_DIR": STUB,
        "VLLM_PYTHON_EXECUTABLE": sys.executable,
    }
    run = subprocess.run(
        [_program("cmake"), "-S", source, "-B", binary, "-G", "Ninja"]
        + [f"-D{name}={value}" for name, value in defines.items()],
        env={**os.environ, "TORCH_CUDA_ARCH_LIST": archs},
        capture_output=True,
        text=True,
    )

    build = Build(
        returncode=run.returncode,
        log=" ".join((run.stdout + run.stderr).split()),
        fetched=fetch_log.read_text().split() if fetch_log.exists() else [],
        targets={},
        archs={},
    )
    for path in (binary / ".cmake/api/v1/reply").glob("target-*.json"):
        target = json.loads(path.read_text())
        build.targets[target["name"]] = target["type"]
        for group in target.get("compileGroups", []):
            if group["language"] != "CUDA":
                continue
            flags = " ".join(f["fragment"] for f in group["compileCommandFragments"])
            # vLLM's own form, and the one that CMake makes of CUDA_ARCHITECTURES.
            found = re.findall(
                r"-(?:gencode |-generate-code=)arch=(\w+),code=\[?(\w+)\]?", flags
            )
            for index in group["sourceIndexes"]:
                name = target["sources"][index]["path"]
                build.archs[name] = [f"{arch},{code}" for arch, code in found]
    return build


def setup_extensions() -> dict[str, bool]:
    """Run setup.py's own list of extensions for a CUDA 12.6 build.

    Returns the CMake target of each extension and whether it is optional.
    """
    text = (ROOT / "setup.py").read_text()
    start, end = text.index("\next_modules = []\n"), text.index("\npackage_data = {")

    class Extension(SimpleNamespace):
        optional = False

    names = {
        "CMakeExtension": Extension,
        "CUDA_HOME": "stub",
        "USE_PRECOMPILED_EXTENSIONS": False,
        "Version": Version,
        "_build_custom_ops": lambda: True,
        "_is_cpu": lambda: False,
        "_is_cuda": lambda: True,
        "_is_hip": lambda: False,
        "_is_xpu": lambda: False,
        "envs": SimpleNamespace(VLLM_USE_PRECOMPILED=False),
        "get_nvcc_cuda_version": lambda: Version("12.6"),
    }
    exec(compile(text[start:end], "setup.py", "exec"), names)
    return {ext.name.rpartition(".")[2]: ext.optional for ext in names["ext_modules"]}


def setup_build_ext(build_lib: Path):
    """setup.py's build command for a CUDA build, reduced to what it copies."""
    tree = ast.parse((ROOT / "setup.py").read_text())
    wanted = [
        node
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == "cmake_build_ext"
    ]
    names = {
        "build_ext": type("build_ext", (), {"run": lambda self: None}),
        "os": os,
        "shutil": shutil,
        "should_bundle_tcmalloc": lambda: False,
        "_is_cuda": lambda: True,
        "_is_hip": lambda: False,
    }
    # Annotations name classes that are of no use here.
    future = ast.parse("from __future__ import annotations").body
    module = ast.Module(body=future + wanted, type_ignores=[])
    exec(compile(module, "setup.py", "exec"), names)
    command = names["cmake_build_ext"]()
    command.build_lib = str(build_lib)
    return command


@pytest.fixture(scope="module")
def volta(tmp_path_factory: pytest.TempPathFactory) -> Build:
    # CUDA 12.6 takes GCC up to 13; upstream wants 13 for DeepGEMM's sake.
    build = configure(tmp_path_factory.mktemp("volta"), "7.0", gcc="12.2.0")
    assert build.returncode == 0, build.log
    return build


def test_setup_finds_every_target(volta: Build):
    assert setup_extensions().keys() <= volta.targets.keys()


def test_targets_without_code_for_70_are_empty(volta: Build):
    extensions = setup_extensions()
    assert "_vllm_fa2_C" in extensions and "_deep_gemm_C" in extensions
    for name in extensions.keys() & BUILT_FOR_70:
        assert volta.targets[name] == "MODULE_LIBRARY"
    for name, optional in extensions.items():
        if volta.targets[name] == "UTILITY":
            # setup.py must bear that no file comes out of it.
            assert optional, name
    built = {n for n, kind in volta.targets.items() if kind == "MODULE_LIBRARY"}
    assert built == BUILT_FOR_70


@pytest.mark.parametrize("built", [False, True])
def test_setup_copies_triton_kernels_if_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, built: bool
):
    package = Path("vllm/third_party/triton_kernels")
    if built:
        (tmp_path / "lib" / package).mkdir(parents=True)
        (tmp_path / "lib" / package / "swiglu.py").touch()
    monkeypatch.chdir(tmp_path)
    setup_build_ext(tmp_path / "lib").run()
    # An empty folder would pass for the package, as a namespace.
    assert package.exists() == built
    assert (package / "swiglu.py").exists() == built


def test_downloads_cutlass_headers_only(volta: Build):
    assert volta.fetched == ["cutlass"]


def test_each_source_gets_70_and_nothing_else(volta: Build):
    assert len(volta.archs) >= 40
    assert "csrc/fused_minimax_m3_qknorm_rope_kv_insert_kernel.cu" in {
        name[name.index("csrc/") :] for name in volta.archs
    }
    assert _find(volta, "csrc/sm70/cuda_ops.cu")
    for name, archs in volta.archs.items():
        # Upstream lists moe_wna16.cu twice and so repeats its flag.
        assert set(archs) == {"compute_70,sm_70"}, name


def test_names_a_torch_without_code_for_70(volta: Build):
    arch_flags = getattr(torch._C, "_cuda_getArchFlags", lambda: None)()
    warned = "what is built here will not run on a V100 with it" in volta.log
    assert warned == ("sm_70" not in str(arch_flags))


@pytest.mark.parametrize("archs", ["7.5", "8.0", "9.0", "7.0 8.0"])
def test_other_builds_keep_everything(tmp_path: Path, archs: str):
    build = configure(tmp_path, archs)
    assert build.returncode == 0, build.log
    assert build.fetched == ALL_PROJECTS
    assert "lack of code for 7.0" not in build.log
    expected = {f"compute_{a},sm_{a}" for a in archs.replace(".", "").split()}
    assert set(build.archs[_find(build, "csrc/layernorm_kernels.cu")]) == expected


def _find(build: Build, source: str) -> str:
    return next(name for name in build.archs if name.endswith(source))


def test_other_builds_keep_the_host_compiler_check(tmp_path: Path):
    build = configure(tmp_path, "8.0", gcc="12.2.0")
    assert build.returncode != 0
    assert "GCC >= 13 is required" in build.log


def test_newer_cuda_names_the_remedy(tmp_path: Path):
    build = configure(tmp_path, "7.0", cuda="12.8")
    assert build.returncode != 0
    assert (
        "TORCH_CUDA_ARCH_LIST asks for 7.0 and the CUDA compiler is 12.8.20: 7.0 "
        "needs a version below 12.8. Install CUDA 12.6 and torch for cu126"
    ) in build.log
