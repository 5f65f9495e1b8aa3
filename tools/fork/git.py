# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A thin wrapper over the git command line, deaf to the user's configuration."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tools.fork.errors import ForkError

# Commits made by the tool carry this identity and date, so that the same
# series over the same base gives the same commit ids on every machine.
IDENTITY = "vllm-sm70 fork tool"
EMAIL = "fork-tool@localhost"
DATE = "2026-01-01T00:00:00+00:00"

# Upstream's files must come through byte for byte, whatever attributes say.
ATTRIBUTES = "* -text -ident -filter -eol -working-tree-encoding !diff !merge\n"

CONFIG = (
    "core.autocrlf=false",
    "core.fileMode=true",
    "core.symlinks=true",
    "core.hooksPath=/dev/null",
    "core.quotePath=false",
    "commit.gpgSign=false",
    "rebase.backend=merge",
    "rerere.enabled=false",
    "advice.detachedHead=false",
    "gc.auto=0",
    "safe.directory=*",
    f"user.name={IDENTITY}",
    f"user.email={EMAIL}",
)


class GitError(ForkError):
    """git exited with an error; ``stderr`` is what it printed."""

    def __init__(self, args: tuple[str, ...], stdout: str, stderr: str) -> None:
        self.stdout = stdout
        self.stderr = stderr
        super().__init__(f"git {' '.join(args)} failed:\n{(stderr or stdout).strip()}")


@dataclass(frozen=True)
class Git:
    """Runs git in one work tree.

    Args:
        work_tree: The folder that holds (or will hold) ``.git``.
        index: Another index file than the repository's own, so that commits
            are made without touching the work tree.
    """

    work_tree: Path
    index: Path | None = None

    def raw(
        self, *args: str, stdin: bytes | None = None, env: dict[str, str] | None = None
    ) -> bytes:
        """Run git and return its standard output; raises GitError."""
        full_env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
        full_env |= {
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_TERMINAL_PROMPT": "0",
            "LC_ALL": "C",
            "GIT_AUTHOR_DATE": DATE,
            "GIT_COMMITTER_DATE": DATE,
            # Without this, a folder that lost its .git would make git walk up
            # and act on the fork's own repository.
            "GIT_CEILING_DIRECTORIES": str(self.work_tree.parent.resolve()),
        }
        if self.index is not None:
            full_env["GIT_INDEX_FILE"] = str(self.index)
        full_env |= env or {}
        config = [part for pair in CONFIG for part in ("-c", pair)]
        try:
            done = subprocess.run(
                ["git", *config, *args],
                cwd=self.work_tree,
                input=stdin,
                stdin=subprocess.DEVNULL if stdin is None else None,
                capture_output=True,
                env=full_env,
            )
        except FileNotFoundError as err:
            raise ForkError(
                "git is not installed: the fork's tree is a git repository. "
                "Install git and run the command again."
            ) from err
        if done.returncode:
            raise GitError(
                args,
                done.stdout.decode(errors="replace"),
                done.stderr.decode(errors="replace"),
            )
        return done.stdout

    def __call__(self, *args: str, stdin: bytes | None = None) -> str:
        """Run git and return its output as text without the last newline."""
        return (
            self.raw(*args, stdin=stdin).decode(errors="surrogateescape").rstrip("\n")
        )

    def ok(self, *args: str) -> bool:
        """Whether git exits with status 0."""
        try:
            self.raw(*args)
        except GitError:
            return False
        return True

    def init(self) -> None:
        """Create the repository with the attributes that keep bytes as they are."""
        self.work_tree.mkdir(parents=True, exist_ok=True)
        self("init", "--quiet", "--initial-branch=fork")
        (self.work_tree / ".git" / "info").mkdir(exist_ok=True)
        (self.work_tree / ".git" / "info" / "attributes").write_text(ATTRIBUTES)

    def blob(self, data: bytes) -> str:
        """Store ``data`` and return its object id."""
        return self("hash-object", "-w", "--stdin", stdin=data)

    def entry(self, path: str, tree: str | None = None) -> tuple[str, str] | None:
        """(mode, object id) of ``path`` in the index or in ``tree``, if there."""
        if tree is None:
            out = self("ls-files", "-s", "--", path)
            rows = [row for row in out.splitlines() if row.split("\t", 1)[1] == path]
            if not rows:
                return None
            mode, oid, _ = rows[0].split("\t", 1)[0].split(" ")
            return mode, oid
        out = self("ls-tree", tree, "--", path)
        if not out:
            return None
        mode, _, oid = out.split("\t", 1)[0].split(" ")
        return mode, oid

    def commit_index(self, message: str, parent: str | None) -> str:
        """Commit the current index on ``parent`` and return the commit id."""
        tree = self("write-tree")
        parents = ("-p", parent) if parent else ()
        return self("commit-tree", tree, *parents, stdin=message.encode())
