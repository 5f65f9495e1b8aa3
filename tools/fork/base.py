# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Fetch the pinned releases from the package index, by name, and check them."""

from __future__ import annotations

import hashlib
import os
import shutil
import tarfile
import tempfile
from pathlib import Path

from tools.fork.errors import ForkError
from tools.fork.series import Pin

# Generated when the release was packed: the build writes them again, and a
# stale egg-info would shadow the real metadata of an editable install.
GENERATED = ("PKG-INFO", "setup.cfg", "vllm.egg-info", "vllm/_version.py")

BASE_ENV = "VLLM_FORK_BASE"
WHEEL_ENV = "VLLM_PRECOMPILED_WHEEL_LOCATION"


def sha256(path: Path) -> str:
    """The file's SHA-256 in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check(path: Path, pin: Pin, origin: str) -> None:
    """Raise ForkError unless ``path`` has the pinned hash."""
    found = sha256(path)
    if found != pin.sha256:
        raise ForkError(
            f"{origin} is not the pinned {pin.name}=={pin.version}:\n"
            f"  expected sha256 {pin.sha256}\n"
            f"  found    sha256 {found}\n"
            "Nothing was taken from it. If the release was really replaced, check "
            "it and change the pin in patches/series.toml."
        )


def _finder(name: str, *, source: bool):
    try:
        from unearth import PackageFinder
    except ImportError as err:
        raise ForkError(
            "the package 'unearth' is missing: it fetches the base from the package "
            "index. Install it with: pip install -r requirements/fork.txt"
        ) from err
    # The settings that pip takes too; without them, unearth's default index.
    urls = [
        url
        for key in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL")
        for url in os.environ.get(key, "").split()
    ]
    if source:
        return PackageFinder(index_urls=urls, no_binary=[name])
    return PackageFinder(index_urls=urls, only_binary=[name])


def download(name: str, version: str, folder: Path, *, source: bool) -> Path:
    """Download one release's archive into ``folder``, whatever its hash is.

    Args:
        name: Project name on the index.
        version: Exact version.
        folder: Where the archive is left.
        source: The source release (True) or the wheel for this machine.

    Raises:
        ForkError: The index cannot be reached or has no such file.
    """
    kind = "source release" if source else "wheel for this machine"
    advice = (
        "Check the network and PIP_INDEX_URL, or fetch the file elsewhere and name "
        f"it in {BASE_ENV if source else WHEEL_ENV}."
    )
    finder = _finder(name, source=source)
    try:
        # The index's own spelling of the version: PEP 440 makes 1.0 and 1.0.0 equal.
        best = finder.find_best_match(f"{name}=={version}").best
    except Exception as err:
        raise ForkError(
            f"the package index could not be asked for {name}=={version}: {err}. "
            f"{advice}"
        ) from err
    if best is None or best.link is None:
        raise ForkError(
            f"the package index has no {kind} of {name}=={version}, or it could not "
            f"be reached. {advice}"
        )
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        try:
            finder.download_and_unpack(best.link, scratch, scratch)
        except Exception as err:
            raise ForkError(
                f"downloading {name}=={version} failed: {err}. Nothing was kept; "
                "run the command again."
            ) from err
        archive = Path(scratch) / best.link.filename
        if not archive.is_file():
            raise ForkError(f"downloading {best.link.filename} left no file")
        target = folder / archive.name
        os.replace(archive, target)
    return target


def fetch(pin: Pin, folder: Path, *, source: bool, override: str) -> Path:
    """The pinned archive: from ``override``, the cache or the index, checked.

    Args:
        pin: What is wanted.
        folder: The cache.
        source: See :func:`download`.
        override: Environment variable that may name a local file.

    Raises:
        ForkError: As :func:`download`, and when the hash is wrong; a cached
            file with a wrong hash is fetched again.
    """
    if local := os.environ.get(override):
        path = Path(local)
        if not path.is_file():
            raise ForkError(f"{override}={local} names no file")
        check(path, pin, f"{override}={local}")
        return path
    if folder.is_dir():
        for path in sorted(folder.iterdir()):
            if path.is_file() and sha256(path) == pin.sha256:
                return path
    with tempfile.TemporaryDirectory() as scratch:
        path = download(pin.name, pin.version, Path(scratch), source=source)
        check(path, pin, path.name)
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / path.name
        partial = target.with_name(target.name + ".part")
        shutil.move(path, partial)
        os.replace(partial, target)
    return target


def unpack(archive: Path, folder: Path) -> Path:
    """Unpack a source release; returns its top folder without generated files."""
    try:
        with tarfile.open(archive) as tar:
            if hasattr(tarfile, "data_filter"):
                tar.extractall(folder, filter="data")
            else:  # Python before 3.11.4, as Debian 12 has; the hash is pinned
                tar.extractall(folder)
    except (tarfile.TarError, OSError) as err:
        raise ForkError(f"{archive.name} cannot be unpacked: {err}") from err
    tops = [path for path in folder.iterdir() if path.is_dir()]
    if len(tops) != 1:
        raise ForkError(f"{archive.name} has {len(tops)} top folders, expected one")
    for name in GENERATED:
        path = tops[0] / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    return tops[0]
