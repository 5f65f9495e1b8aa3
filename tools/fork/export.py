# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Write the topics' patches and new files back from the tree's commits."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from tools.fork import patchfile
from tools.fork import tree as tree_
from tools.fork.errors import ForkError
from tools.fork.git import Git, GitError
from tools.fork.series import NAME, Series, Topic, parse_message, save
from tools.fork.tree import LINK, Workspace

FIXUPS = ("fixup! ", "squash! ", "amend! ")


@dataclass(frozen=True)
class Change:
    """One path that a topic's commit changes, as ``git diff-tree --raw`` says."""

    path: str
    old_mode: str
    mode: str
    oid: str
    status: str


def changes(git: Git, parent: str, commit: str) -> list[Change]:
    """Every path that ``commit`` changes against ``parent``."""
    out = git.raw(
        "diff-tree", "-r", "-z", "--raw", "--no-renames", "--no-abbrev", parent, commit
    ).decode()
    fields = out.split("\0")
    rows = []
    for head, path in zip(fields[0::2], fields[1::2]):
        old_mode, mode, _, oid, status = head[1:].split(" ")
        rows.append(Change(path, old_mode, mode, oid, status))
    return rows


def diff(git: Git, parent: str, commit: str, paths: tuple[str, ...]) -> bytes:
    """The patch of ``paths`` as this repository keeps it: no line of context."""
    if not paths:
        return b""
    out = git.raw(
        "-c",
        "diff.algorithm=histogram",
        "diff-tree",
        "-p",
        "--unified=0",
        "--full-index",
        "--no-renames",
        "--no-color",
        "--no-ext-diff",
        "--no-textconv",
        parent,
        commit,
        "--",
        *paths,
    )
    return patchfile.strip_headings(out)


def _squash_fixups(work: Workspace, start: str) -> None:
    git = work.git
    subjects = git("log", "--format=%s", f"{start}..HEAD").splitlines()
    if not any(subject.startswith(FIXUPS) for subject in subjects):
        return
    try:
        git.raw(
            "rebase",
            "--quiet",
            "--interactive",
            "--autosquash",
            "--keep-empty",
            start,
            env={"GIT_SEQUENCE_EDITOR": ":", "GIT_EDITOR": ":"},
        )
    except GitError as err:
        conflicts = git("diff", "--name-only", "--diff-filter=U").split()
        git("rebase", "--abort")
        raise ForkError(
            "a fixup does not apply at its topic, because a later topic edits the "
            f"same lines: {', '.join(conflicts) or err.stderr.strip()}. The tree is as "
            "it was. Rebase by hand in build/tree (git rebase -i), then export again."
        ) from err


def commit_to_topic(work: Workspace, name: str) -> None:
    """Commit everything uncommitted in the tree as a fixup of one topic."""
    git = work.git
    if not tree_.uncommitted(work):
        return
    for line in git("log", "--format=%H", "HEAD").splitlines():
        found, *_ = parse_message(git("log", "-1", "--format=%B", line))
        if found == name:
            break
    else:
        raise ForkError(
            f"build/tree has no commit of a topic {name!r}. Commit there with the "
            f"message 'TITLE', an empty line, the reason, an empty line, and "
            f"'Topic: {name}'; then run export."
        )
    git("add", "--all")
    git("commit", "--quiet", "--no-verify", f"--fixup={line}")


def _take_new_file(work: Workspace, change: Change, found: dict[str, bytes]) -> None:
    """Plan to move a file that was made in the tree into the repository."""
    data = work.git.raw("cat-file", "blob", change.oid)
    own = work.root / change.path
    if own.exists() and own.read_bytes() != data:
        raise ForkError(
            f"{change.path} is a new file in build/tree, and the repository has "
            "another file of that name. Keep one of them and export again."
        )
    found[change.path] = data


def _topic(
    work: Workspace, series: Series, parent: str, commit: str, moved: dict[str, bytes]
) -> tuple[Topic, bytes]:
    git = work.git
    message = git("log", "-1", "--format=%B", commit)
    name, title, why = parse_message(message)
    if name is None or not NAME.fullmatch(name):
        raise ForkError(
            f"commit {commit[:12]} ({title!r}) in build/tree names no topic: end its "
            "message with a line 'Topic: NAME' (lower-case words joined by '-'), or "
            "make it a fixup of the commit that it belongs to."
        )
    if not why:
        raise ForkError(f"commit {commit[:12]}: the topic {name!r} does not say why")
    known = {topic.name: topic for topic in series.topics}
    topic = known.get(name, Topic(name=name, title=title, why=why))
    hooks, added = [], []
    for change in changes(git, parent, commit):
        if change.status == "A":
            if change.mode == LINK:
                target = git.raw("cat-file", "blob", change.oid)
                if os.fsdecode(target) != work.link_target(change.path):
                    raise ForkError(
                        f"topic {name!r}: {change.path} is a link to "
                        f"{os.fsdecode(target)}, which is not the repository's file"
                    )
            else:
                _take_new_file(work, change, moved)
            added.append(change.path)
        elif change.old_mode == LINK:
            raise ForkError(
                f"topic {name!r} changes the link {change.path} of an earlier topic; "
                "put the link back and edit the file through it"
            )
        elif change.status in "MD":
            hooks.append(change.path)
        else:
            raise ForkError(
                f"topic {name!r} changes {change.path} in a way that a patch cannot "
                f"hold (status {change.status}, mode {change.old_mode} to "
                f"{change.mode})"
            )
    # Keep the ledger's split into files and tests; a new path goes by its folder.
    tests = {p for p in added if p in topic.tests} | {
        p for p in added if p not in topic.files and p.startswith("tests/")
    }
    listed = [p for p in topic.files if p in added and p not in tests]
    listed_tests = [p for p in topic.tests if p in tests]
    topic = dataclasses.replace(
        topic,
        title=title,
        why=why,
        hooks=tuple(sorted(hooks)),
        files=tuple(
            listed + sorted(p for p in added if p not in tests and p not in listed)
        ),
        tests=tuple(listed_tests + sorted(tests - set(listed_tests))),
    )
    return topic, diff(git, parent, commit, topic.hooks)


def chain(git: Git, start: str, head: str) -> list[str]:
    """The commits after ``start`` up to ``head``, oldest first; no merges."""
    if not git.ok("merge-base", "--is-ancestor", start, head):
        raise ForkError(
            "build/tree's history does not start from the pinned base; run "
            "'python -m tools.fork tree' (it says what would be lost)"
        )
    out = git("rev-list", "--reverse", "--topo-order", f"{start}..{head}")
    commits = out.split()
    for commit in commits:
        if len(git("rev-list", "--parents", "-1", commit).split()) != 2:
            raise ForkError(
                f"build/tree: {commit[:12]} is a merge; the series is a line"
            )
    return commits


def export(work: Workspace, series: Series, *, topic: str | None = None) -> str:
    """Export the tree's commits; returns what was written, in one line.

    Args:
        work: Where.
        series: The parsed series as it stands in the repository.
        topic: Put uncommitted edits into this topic first.

    Raises:
        ForkError: There is no tree, edits are not committed, a commit names no
            topic, or a new file collides. Nothing is written then.
    """
    if not work.exists():
        raise ForkError("there is no build/tree; run 'python -m tools.fork tree'")
    git = work.git
    start = tree_.base_commit(work, series.base)
    if topic is not None:
        commit_to_topic(work, topic)
    if dirty := tree_.uncommitted(work):
        raise ForkError(
            "build/tree has edits that no commit holds:\n  "
            + "\n  ".join(dirty[:40])
            + "\nCommit each to its topic (git commit --fixup COMMIT), or run "
            "'python -m tools.fork export --topic NAME'."
        )
    chain(git, start, "HEAD")
    _squash_fixups(work, start)
    return write(work, series, start, git("rev-parse", "HEAD"))


def write(work: Workspace, series: Series, start: str, head: str) -> str:
    """Write series.toml, patches and moved files from ``start..head``."""
    git = work.git
    parent = start
    moved: dict[str, bytes] = {}
    topics: list[Topic] = []
    patches: dict[str, bytes] = {}
    for commit in chain(git, start, head):
        topic, data = _topic(work, series, parent, commit, moved)
        if topic.name in {t.name for t in topics}:
            raise ForkError(f"build/tree has two commits of the topic {topic.name!r}")
        topics.append(topic)
        if data:
            patches[topic.patch] = data
        parent = commit

    written = []
    for path, content in moved.items():
        own = work.root / path
        own.parent.mkdir(parents=True, exist_ok=True)
        if not own.exists():
            own.write_bytes(content)
            own.chmod(int(git.entry(path, head)[0][-3:], 8))  # type: ignore[index]
            written.append(path)
    folder = work.root / "patches"
    for old in sorted(folder.glob("*.patch")):
        rel = str(Path("patches") / old.name)
        if rel not in patches:
            old.unlink()
            written.append(f"{rel} (removed)")
    for path, data in patches.items():
        own = work.root / path
        if not own.is_file() or own.read_bytes() != data:
            own.write_bytes(data)
            written.append(path)
    series = dataclasses.replace(series, topics=tuple(topics))
    if save(work.root, series):
        written.append("patches/series.toml")

    # The tree again, from what was written: commits as 'tree' makes them, links
    # where new files were. What comes out must be what went in.
    again = tree_.apply_topics(work, series, tree_.base_commit(work, series.base))
    differing = [
        change.path for change in changes(git, head, again) if change.path not in moved
    ]
    if differing:
        raise ForkError(
            f"export lost something in {', '.join(differing)}; please report this. "
            "build/tree is as it was."
        )
    git("checkout", "--quiet", "--force", "-B", "fork", again)
    work.record_head(again)
    if not written:
        return "nothing to export: the repository has every edit of build/tree"
    return "exported: " + ", ".join(written)


def add(work: Workspace, series: Series, name: str, paths: list[str]) -> str:
    """List files of the repository under a topic; returns what was listed.

    Raises:
        ForkError: The topic is unknown, a path is no file here, or another
            topic owns it.
    """
    topic = series.topic(name)
    listed = []
    for path in paths:
        pure = PurePosixPath(path)
        if pure.is_absolute() or ".." in pure.parts:
            raise ForkError(f"{path}: name it from the repository's root")
        path = str(pure)
        if not (work.root / path).is_file():
            raise ForkError(f"{path} is not a file of the repository")
        for other in series.topics:
            if path in other.added:
                raise ForkError(f"{path} belongs to the topic {other.name!r} already")
        listed.append(path)
    tests = [path for path in listed if path.startswith("tests/")]
    files = [path for path in listed if path not in tests]
    changed = dataclasses.replace(
        topic,
        files=tuple(sorted({*topic.files, *files})),
        tests=tuple(sorted({*topic.tests, *tests})),
    )
    topics = tuple(changed if t is topic else t for t in series.topics)
    save(work.root, dataclasses.replace(series, topics=topics))
    return f"{name}: {len(listed)} files added"
