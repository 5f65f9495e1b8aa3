# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Check that the repository is a series that anyone can apply."""

from __future__ import annotations

import os
from pathlib import Path

from tools.fork import patchfile
from tools.fork import tree as tree_
from tools.fork.errors import ForkError
from tools.fork.git import Git
from tools.fork.series import FORK_DIRS, SERIES, Series
from tools.fork.tree import Workspace

_IGNORED = {"__pycache__"}
_IGNORED_SUFFIXES = {".so", ".pyc"}


def own_files(root: Path) -> list[str]:
    """Files below the fork's folders: git's list where there is a checkout."""
    git = Git(root)
    if (root / ".git").exists():
        out = git.raw(
            "ls-files", "-z", "--cached", "--others", "--exclude-standard", *FORK_DIRS
        )
        listed = {os.fsdecode(row) for row in out.split(b"\0") if row}
        return sorted(path for path in listed if (root / path).is_file())
    found = []
    for top in FORK_DIRS:
        for folder, dirs, files in os.walk(root / top):
            dirs[:] = [name for name in dirs if name not in _IGNORED]
            found += [
                str(Path(folder, name).relative_to(root))
                for name in files
                if Path(name).suffix not in _IGNORED_SUFFIXES
            ]
    return sorted(found)


def ledger_problems(root: Path, series: Series) -> list[str]:
    """What the ledger lacks or claims wrongly, without looking at the base."""
    problems = []
    for topic in series.topics:
        for key in ("upstream", "drop_when"):
            if not getattr(topic, key).strip():
                problems.append(f"{SERIES}: topic {topic.name!r} has no {key}")
        if not topic.hooks and not topic.added:
            problems.append(f"{SERIES}: topic {topic.name!r} changes nothing")
        if not topic.tests and not topic.upstream_tests:
            problems.append(f"{SERIES}: topic {topic.name!r} names no tests")
        problems += [
            f"{SERIES}: topic {topic.name!r} lists {path}, which is absent"
            for path in topic.added
            if not (root / path).is_file()
        ]
        patch = root / topic.patch
        if patch.is_file():
            parsed = patchfile.parse(patch.read_bytes(), topic.patch)
            problems += parsed.problems
            edited = sorted(file.path for file in parsed.files)
            if edited != sorted(topic.hooks):
                problems.append(
                    f"{topic.patch} edits {edited}, but {SERIES} lists the hooks "
                    f"{sorted(topic.hooks)}"
                )
        elif topic.hooks:
            problems.append(f"{topic.patch} is missing (it should edit {topic.hooks})")
    known = {topic.patch for topic in series.topics}
    problems += [
        f"patches/{path.name} belongs to no topic of {SERIES}"
        for path in sorted((root / "patches").glob("*.patch"))
        if f"patches/{path.name}" not in known
    ]
    owned = {path for topic in series.topics for path in topic.added}
    problems += [
        f"{path} belongs to no topic of {SERIES}"
        for path in own_files(root)
        if path not in owned
    ]
    return problems


def base_problems(work: Workspace, series: Series) -> list[str]:
    """What goes wrong against the pinned base: patches, collisions, shadowing."""
    start = tree_.base_commit(work, series.base)
    problems = []
    upstream = set(work.git("ls-tree", "-r", "--name-only", start).splitlines())
    for topic in series.topics:
        for path in topic.added:
            if path in upstream:
                problems.append(f"{path} exists in the base: edit it by a patch")
        for path in topic.upstream_tests:
            if path not in upstream:
                problems.append(
                    f"{SERIES}: topic {topic.name!r}: upstream has no test {path}"
                )
    for path in own_files(work.root):
        if path.endswith("/__init__.py") and path in upstream:
            problems.append(
                f"{path} must not exist here: with it, this folder would shadow the "
                "installed package"
            )
    try:
        tree_.apply_topics(work, series, start)
    except ForkError as err:
        problems.append(str(err))
    return problems


def verify(work: Workspace, series: Series) -> list[str]:
    """Every problem found; an empty list means that the series is clean."""
    if not work.exists():
        tree_.make(work, series)
    problems = ledger_problems(work.root, series)
    problems += [p for p in base_problems(work, series) if p not in problems]
    problems += [f"not exported: {row}" for row in tree_.unexported(work)]
    return problems
