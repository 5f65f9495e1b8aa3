# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Take another release as the base, with git's own rebase."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path

from tools.fork import base, export
from tools.fork import tree as tree_
from tools.fork.errors import ForkError
from tools.fork.git import Git, GitError
from tools.fork.series import Pin, Series, parse_message
from tools.fork.tree import Workspace


def _folder(work: Workspace) -> Path:
    # As deep as build/tree, so that the links to the repository still lead there.
    return work.root / "build" / "rebase"


def _plan(work: Workspace) -> Path:
    return work.tree / ".git" / "fork-rebase.json"


def _pin(work: Workspace, name: str, version: str, *, source: bool) -> Pin:
    folder = work.cache
    local = os.environ.get(base.BASE_ENV) if source else None
    path = Path(local) if local else None
    if path is None:
        path = base.download(name, version, folder, source=source)
    elif not path.is_file():
        raise ForkError(f"{base.BASE_ENV}={local} names no file")
    return Pin(name, version, base.sha256(path))


def start(work: Workspace, series: Series, version: str) -> str:
    """Begin a rebase on ``version``; returns what was done, in one line.

    Raises:
        ForkError: Unexported edits, an unknown version, or a conflict: the
            message then names the topic, the files and the next step.
    """
    if _plan(work).exists():
        raise ForkError(
            "a rebase is in progress in build/rebase; finish it with "
            "'python -m tools.fork rebase --continue' or drop it with --abort"
        )
    tree_.make(work, series)
    pin = _pin(work, series.base.name, version, source=True)
    try:
        wheel = _pin(work, series.cpu_extension.name, version, source=False)
    except ForkError:
        wheel = series.cpu_extension
    onto = tree_.base_commit(work, pin)
    old = tree_.base_commit(work, series.base)
    head = work.git("rev-parse", "HEAD")
    folder = _folder(work)
    shutil.rmtree(folder, ignore_errors=True)
    work.git("worktree", "prune")
    work.git("worktree", "add", "--quiet", "--detach", str(folder), head)
    plan = {"base": dataclasses.asdict(pin), "cpu_extension": dataclasses.asdict(wheel)}
    _plan(work).write_text(json.dumps(plan))
    git = Git(folder)
    try:
        git("rebase", "--quiet", "--empty=drop", "--onto", onto, old)
    except GitError as err:
        _report(work, git, err)
    return finish(work, series)


def _report(work: Workspace, git: Git, err: GitError) -> None:
    files = git("diff", "--name-only", "--diff-filter=U").split()
    name = title = "?"
    if git.ok("rev-parse", "--verify", "--quiet", "REBASE_HEAD"):
        message = git("log", "-1", "--format=%B", "REBASE_HEAD")
        found, title, _ = parse_message(message)
        name = found or "?"
    if not files:
        abort(work)
        raise ForkError(f"the rebase failed:\n{err.stderr.strip()}") from err
    raise ForkError(
        f"topic {name!r} ({title}) conflicts with the new base in:\n  "
        + "\n  ".join(files)
        + "\nIn build/rebase: edit these files, 'git add' them, then run\n"
        "  python -m tools.fork rebase --continue\n"
        "or give up with\n"
        "  python -m tools.fork rebase --abort\n"
        "The repository and build/tree are as they were."
    ) from err


def resume(work: Workspace, series: Series) -> str:
    """Go on after a conflict was resolved in build/rebase."""
    if not _plan(work).exists():
        raise ForkError("no rebase is in progress")
    git = Git(_folder(work))
    if git.ok("rev-parse", "--verify", "--quiet", "REBASE_HEAD"):
        try:
            git.raw("rebase", "--continue", env={"GIT_EDITOR": ":"})
        except GitError as err:
            _report(work, git, err)
    return finish(work, series)


def finish(work: Workspace, series: Series) -> str:
    """Write the new pins and patches, and refresh the tree from them."""
    plan = json.loads(_plan(work).read_text())
    head = Git(_folder(work))("rev-parse", "HEAD")
    rebased = dataclasses.replace(
        series, base=Pin(**plan["base"]), cpu_extension=Pin(**plan["cpu_extension"])
    )
    onto = tree_.base_commit(work, rebased.base)
    tree_.refuse_unexported(work)
    done = export.write(work, rebased, onto, head)
    kept = {
        parse_message(work.git("log", "-1", "--format=%B", commit))[0]
        for commit in export.chain(work.git, onto, head)
    }
    dropped = [topic.name for topic in series.topics if topic.name not in kept]
    _clean(work)
    text = f"rebased on {rebased.base.name} {rebased.base.version}; {done}"
    if dropped:
        text += (
            f"; dropped, since the new base has them: {', '.join(dropped)} (remove "
            "their files and documentation)"
        )
    if rebased.cpu_extension.version != rebased.base.version:
        text += (
            f"; no CPU wheel of that version: cpu_extension stays at "
            f"{rebased.cpu_extension.version}"
        )
    return text


def abort(work: Workspace) -> str:
    """Drop a rebase in progress; the repository and the tree are untouched."""
    if not _plan(work).exists():
        raise ForkError("no rebase is in progress")
    _clean(work)
    return "rebase dropped; the repository and build/tree are as they were"


def _clean(work: Workspace) -> None:
    shutil.rmtree(_folder(work), ignore_errors=True)
    work.git("worktree", "prune")
    _plan(work).unlink(missing_ok=True)
