# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""``python -m tools.lint``: rules of this repository that no linter knows."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

HEADER = "SPDX-License-Identifier: Apache-2.0"
CODE = {".py", ".h", ".cuh", ".cu", ".cpp", ".cmake", ".sh"}
# A path that exists on one machine only. Paths in /proc, /dev and /usr are not.
MACHINE_PATH = re.compile(r"(?<![\w./$}])/(?:work|farm|tmp|root|home)/[A-Za-z.]")
TEXT = CODE | {".md", ".toml", ".txt", ".patch", ".json", ""}


def tracked(root: Path) -> list[Path]:
    """Files that git tracks or would track."""
    out = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        capture_output=True,
        check=True,
    ).stdout
    return [root / name.decode() for name in out.split(b"\0") if name]


def problems(path: Path) -> list[str]:
    """What is wrong with one file, one line each."""
    if path.suffix not in TEXT or not path.is_file():
        return []
    name = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return [f"{name}: not UTF-8"]
    found = []
    if path.suffix in CODE and HEADER not in "\n".join(text.splitlines()[:3]):
        found.append(f"{name}:1: no line {HEADER!r} at the top")
    for number, line in enumerate(text.splitlines(), 1):
        if MACHINE_PATH.search(line):
            found.append(f"{name}:{number}: a path of one machine: {line.strip()}")
    if path.suffix != ".patch" and text and not text.endswith("\n"):
        found.append(f"{name}: no newline at the end")
    return found


def main() -> int:
    """Entry point."""
    found = [line for path in tracked(ROOT) for line in problems(path)]
    for line in found:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
