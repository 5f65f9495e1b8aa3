# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Patches without context lines: what they hold and whether they are clean."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from tools.fork.errors import ForkError

_DIFF = re.compile(rb"diff --git a/(.+) b/(.+)")
_INDEX = re.compile(rb"index ([0-9a-f]{40})\.\.([0-9a-f]{40})(?: \d+)?")
_HUNK = re.compile(rb"@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@(.*)")
ABSENT = "0" * 40


@dataclass
class FilePatch:
    """One file's part of a patch: object ids before and after, and its size."""

    path: str
    before: str = ABSENT
    after: str = ABSENT
    added: int = 0
    removed: int = 0


@dataclass
class Patch:
    """A parsed patch: its files, and what breaks the rules, with line numbers."""

    files: list[FilePatch] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def strip_headings(diff: bytes) -> bytes:
    """Remove the text after the second ``@@``: it quotes a line of upstream."""
    return re.sub(rb"(?m)^(@@ -[\d,]+ \+[\d,]+ @@) .*$", rb"\1", diff)


def parse(data: bytes, name: str) -> Patch:
    """Parse ``git diff -U0 --full-index`` output.

    Args:
        data: The patch's bytes.
        name: Its path, for messages.

    Raises:
        ForkError: The file is no such diff.
    """
    patch = Patch()
    current: FilePatch | None = None
    left = [0, 0]
    for number, line in enumerate(data.split(b"\n"), 1):
        where = f"{name}:{number}"
        if left[0] > 0 or left[1] > 0 or line.startswith(b"\\ "):
            if line.startswith(b"-"):
                left[0] -= 1
            elif line.startswith(b"+"):
                left[1] -= 1
            elif line.startswith(b"\\ "):
                continue
            else:
                patch.problems.append(f"{where}: a context line")
                left[0] -= 1
                left[1] -= 1
            if min(left) < 0:
                raise ForkError(f"{where}: the hunk is longer than its header says")
            continue
        if match := _DIFF.fullmatch(line):
            if match[1] != match[2]:
                raise ForkError(f"{where}: a rename; patches edit files in place")
            current = FilePatch(match[1].decode())
            patch.files.append(current)
        elif match := _HUNK.fullmatch(line):
            if current is None:
                raise ForkError(f"{where}: a hunk before any file")
            left = [1 if n is None else int(n) for n in match.groups()[:2]]
            current.removed += left[0]
            current.added += left[1]
            if match[3].strip():
                patch.problems.append(f"{where}: a heading that quotes upstream")
        elif current is not None and (match := _INDEX.fullmatch(line)):
            current.before, current.after = match[1].decode(), match[2].decode()
        elif line and not line.startswith(
            (b"--- ", b"+++ ", b"old mode", b"new mode", b"deleted file mode")
        ):
            raise ForkError(f"{where}: not a line of a patch: {line[:60]!r}")
    if any(left):
        raise ForkError(f"{name}: the last hunk is cut short")
    for file in patch.files:
        if file.before == ABSENT and file.after == ABSENT:
            patch.problems.append(
                f"{name}: {file.path} has no full index line "
                "(made by something else than 'tools.fork export')"
            )
    return patch
