# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Make the fork's tree: the base, then one commit a topic."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tools.fork import base, patchfile
from tools.fork.errors import ForkError
from tools.fork.git import Git, GitError
from tools.fork.series import SERIES, Pin, Series, Topic

BASE_MESSAGE = "{name} {version}\n\nThe release as published, sha256 {sha256}.\n"
LINK = "120000"


@dataclass(frozen=True)
class Workspace:
    """Where things are: the repository, its tree and the caches below build/."""

    root: Path

    @property
    def tree(self) -> Path:
        """The work tree of the whole fork."""
        return self.root / "build" / "tree"

    @property
    def cache(self) -> Path:
        """Downloaded archives."""
        return self.root / "build" / "base"

    @property
    def state(self) -> Path:
        """What the tool last left in the tree."""
        return self.tree / ".git" / "fork.json"

    @property
    def git(self) -> Git:
        """git in the tree."""
        return Git(self.tree)

    def exists(self) -> bool:
        """Whether there is a tree already."""
        return (self.tree / ".git").is_dir()

    def link_target(self, path: str) -> str:
        """What the tree's link at ``path`` points to, relative to its folder."""
        return os.path.relpath(self.root / path, (self.tree / path).parent)

    def recorded_head(self) -> str | None:
        """The commit that the tool last left, or None."""
        try:
            return json.loads(self.state.read_text())["head"]
        except (OSError, ValueError, KeyError):
            return None

    def record_head(self, head: str) -> None:
        """Remember the commit that the tool leaves."""
        partial = self.state.with_suffix(".part")
        partial.write_text(json.dumps({"head": head}) + "\n")
        os.replace(partial, self.state)


def uncommitted(work: Workspace) -> list[str]:
    """Paths in the tree that differ from its last commit, generated files aside."""
    out = work.git.raw(
        "status", "--porcelain=v1", "-z", "--untracked-files=all", "--no-renames"
    )
    return [row[3:] for row in out.decode(errors="replace").split("\0") if row]


def unexported(work: Workspace) -> list[str]:
    """What a refresh of the tree would lose, one line each."""
    if not work.exists():
        return []
    rows = [f"{path} (not committed)" for path in uncommitted(work)]
    git = work.git
    if git.ok("rev-parse", "--verify", "--quiet", "HEAD^{commit}"):
        head = git("rev-parse", "HEAD")
        recorded = work.recorded_head()
        if recorded is None or not git.ok("cat-file", "-e", f"{recorded}^{{commit}}"):
            if recorded is not None or git("rev-list", "--count", "HEAD") != "0":
                rows.append(f"commit {head[:12]} (this tool did not make it)")
        elif head != recorded:
            changed = git("diff", "--name-only", "--no-renames", recorded, head)
            rows += [f"{path} (committed, not exported)" for path in changed.split()]
            if not changed:
                rows.append(f"commit {head[:12]} (its message or order changed)")
    return rows


def refuse_unexported(work: Workspace) -> None:
    """Raise ForkError, naming the files, when the tree holds unexported edits."""
    rows = unexported(work)
    if not rows:
        return
    listing = "\n".join(f"  {row}" for row in rows[:40])
    more = f"\n  and {len(rows) - 40} more" if len(rows) > 40 else ""
    raise ForkError(
        f"build/tree holds edits that are not exported:\n{listing}{more}\n"
        "To keep them: commit each to its topic there (git commit --fixup COMMIT), "
        "then run 'python -m tools.fork export'; 'export --topic NAME' does both "
        "for edits that belong to one topic.\n"
        "To drop them: python -m tools.fork tree --discard"
    )


def base_commit(work: Workspace, pin: Pin) -> str:
    """The commit of the release in the tree's repository, made when missing."""
    git = work.git
    ref = f"refs/fork/base/{pin.sha256}"
    if git.ok("rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}"):
        return git("rev-parse", ref)
    archive = base.fetch(pin, work.cache, source=True, override=base.BASE_ENV)
    with tempfile.TemporaryDirectory(dir=work.tree / ".git") as scratch:
        folder = base.unpack(archive, Path(scratch) / "base")
        index = Git(work.tree, Path(scratch) / "index")
        # Ignored or not: what the release ships belongs to it.
        index("--work-tree", str(folder), "add", "--all", "--force", ".")
        commit = index.commit_index(BASE_MESSAGE.format(**pin.__dict__), None)
    git("update-ref", ref, commit)
    return commit


def read_patch(work: Workspace, topic: Topic) -> bytes | None:
    """The topic's patch, or None when it edits no upstream file."""
    path = work.root / topic.patch
    if path.is_file():
        return path.read_bytes()
    if topic.hooks:
        raise ForkError(
            f"{topic.patch} is missing, but the topic {topic.name!r} hooks "
            f"{', '.join(topic.hooks)}"
        )
    return None


def _apply(index: Git, topic: Topic, data: bytes) -> None:
    """Apply a patch to the index: exactly, or raise naming the file."""
    parsed = patchfile.parse(data, topic.patch)
    if parsed.problems:
        raise ForkError(
            f"{topic.patch} breaks the rules for patches:\n  "
            + "\n  ".join(parsed.problems)
        )
    for file in parsed.files:
        entry = index.entry(file.path)
        if entry is None:
            raise ForkError(
                f"topic {topic.name!r} does not apply: {file.path} does not exist in "
                "the base"
            )
        if entry[1] != file.before:
            raise ForkError(
                f"topic {topic.name!r} does not apply: {topic.patch} was made for "
                f"another content of {file.path} (object {file.before[:12]}, here "
                f"{entry[1][:12]}). A patch applies exactly or not at all: export it "
                "again, or use 'python -m tools.fork rebase' for another base."
            )
    try:
        index.raw(
            "apply",
            "--cached",
            "--unidiff-zero",
            "--whitespace=nowarn",
            "-",
            stdin=data,
        )
    except GitError as err:
        raise ForkError(
            f"topic {topic.name!r} does not apply: {topic.patch}:\n{err.stderr.strip()}"
        ) from err
    for file in parsed.files:
        after = index.entry(file.path)
        if (after[1] if after else patchfile.ABSENT) != file.after:
            raise ForkError(
                f"topic {topic.name!r}: {file.path} after the patch is not what "
                f"{topic.patch} says it should be"
            )


def apply_topics(work: Workspace, series: Series, start: str) -> str:
    """Commit every topic on ``start`` without touching the work tree.

    Returns:
        The last commit. Two runs over the same files give the same commits.
    """
    with tempfile.TemporaryDirectory(dir=work.tree / ".git") as scratch:
        index = Git(work.tree, Path(scratch) / "index")
        index("read-tree", start)
        head = start
        for topic in series.topics:
            data = read_patch(work, topic)
            if data is not None:
                _apply(index, topic, data)
            for path in topic.added:
                if not (work.root / path).is_file():
                    raise ForkError(
                        f"{SERIES}: the topic {topic.name!r} lists {path}, which is "
                        "not in the repository"
                    )
                if index.entry(path) is not None:
                    raise ForkError(
                        f"the topic {topic.name!r} adds {path}, but the tree has a "
                        "file there already: upstream's files are edited by a patch"
                    )
                oid = index.blob(os.fsencode(work.link_target(path)))
                try:
                    index(
                        "update-index", "--add", "--cacheinfo", f"{LINK},{oid},{path}"
                    )
                except GitError as err:
                    raise ForkError(
                        f"the topic {topic.name!r} cannot add {path}: "
                        f"{err.stderr.strip()}"
                    ) from err
            head = index.commit_index(topic.message, head)
    return head


def make(work: Workspace, series: Series, *, discard: bool = False) -> str:
    """Make or refresh the tree; returns what was done, in one line.

    Args:
        work: Where.
        series: The parsed series.
        discard: Drop edits in the tree that are not exported.

    Raises:
        ForkError: Unexported edits, a wrong hash, no index, a patch that does
            not apply, a listed file that is absent. The tree stays as it was.
    """
    if not discard:
        refuse_unexported(work)
    fresh = not work.exists()
    if fresh:
        if work.tree.exists() and any(work.tree.iterdir()):
            raise ForkError(
                f"{work.tree} exists and is not a tree of this tool; move it away"
            )
        work.git.init()
    git = work.git
    start = base_commit(work, series.base)
    head = apply_topics(work, series, start)
    what = f"{series.base.name} {series.base.version} + {len(series.topics)} topics"
    if fresh or not git.ok("rev-parse", "--verify", "--quiet", "HEAD^{commit}"):
        git("update-ref", "refs/heads/fork", head)
        git("symbolic-ref", "HEAD", "refs/heads/fork")
        git("reset", "--quiet", "--hard")
        done = f"build/tree made: {what}"
    else:
        before = git("rev-parse", "HEAD")
        if before == head and not (discard and uncommitted(work)):
            done = f"build/tree is up to date: {what}"
        else:
            changed = git("diff", "--name-only", "--no-renames", before, head).split()
            git("checkout", "--quiet", "--force", "-B", "fork", head)
            if discard:
                git("clean", "--quiet", "--force", "-d")
            done = f"build/tree refreshed: {what}, {len(changed)} files changed"
    work.record_head(head)
    return done
