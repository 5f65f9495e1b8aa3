# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""One mail-format patch a topic, full context, ready to send upstream."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tools.fork import tree as tree_
from tools.fork.errors import ForkError
from tools.fork.export import chain
from tools.fork.git import Git
from tools.fork.series import Series
from tools.fork.tree import Workspace


def with_contents(work: Workspace, series: Series, start: str) -> str:
    """The series as commits that hold files where the tree holds links."""
    head = tree_.apply_topics(work, series, start)
    git = work.git
    parent = start
    owned: list[str] = []
    with tempfile.TemporaryDirectory(dir=work.tree / ".git") as scratch:
        index = Git(work.tree, Path(scratch) / "index")
        for topic, commit in zip(series.topics, chain(git, start, head), strict=True):
            index("read-tree", commit)
            # Earlier topics' links too: each commit's tree is a whole.
            owned += topic.added
            for path in owned:
                file = work.root / path
                mode = "100755" if file.stat().st_mode & 0o111 else "100644"
                oid = index.blob(file.read_bytes())
                index("update-index", "--cacheinfo", f"{mode},{oid},{path}")
            parent = index.commit_index(topic.message, parent)
    return parent


def write(work: Workspace, series: Series, out: Path) -> str:
    """Write the series to the folder ``out``; returns what was written.

    Raises:
        ForkError: ``out`` holds files already, or the series does not apply.
    """
    if out.exists() and any(out.iterdir()):
        raise ForkError(f"{out} is not empty; name another folder")
    out.mkdir(parents=True, exist_ok=True)
    if not work.exists():
        tree_.make(work, series)
    start = tree_.base_commit(work, series.base)
    head = with_contents(work, series, start)
    work.git(
        "format-patch",
        "--quiet",
        "--zero-commit",
        "--no-signature",
        "--no-renames",
        "--full-index",
        "--binary",
        "-o",
        str(out.resolve()),
        f"{start}..{head}",
    )
    count = len(list(out.glob("*.patch")))
    return f"{count} patches in {out}; for the base: git am --keep-non-patch"
