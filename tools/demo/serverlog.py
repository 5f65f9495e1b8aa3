# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Reading vLLM's log: what it is doing, why it died, what memory it took."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

PREFIX = re.compile(
    r"^(?:\((?P<process>[\w-]+) pid=\d+\) )?"
    r"(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) \S+ \S+ \[\S+:\d+\] ?"
)
NOISE = re.compile(r"^\s*$|[█▀▄]|^Route: |non-default args|OpenMP thread|^\t")
ERROR = re.compile(r"^(?:[\w.]*(?:Error|Exception)\b|.*: error: )")
SECONDARY = ("Engine core initialization failed", "WorkerProc initialization failed")
MEMORY = re.compile(
    "|".join(
        (
            # The memory plan's table: its head, its rows with a size, its verdict.
            r"^Memory of ",
            r"^  [\w:,() -]+ {2,}-?[\d,]+\.\d(  |$)",
            r"^  fits: ",
            r"Checkpoint size",
            r"for NVFP4 GEMM",
            r"KV pages: ",
            r"tokens takes [\d,.]+ MiB",
            r"Model loading took",
            r"attention block size",
            r"mamba page size",
            r"kv cache group sizes",
            r"kv lcm block sizes",
            r"for KV cache",
            r"KV cache memory",
            r"KV cache size",
            r"peak activation",
            r"Graph capturing finished",
        )
    )
)


def read(path: Path) -> list[str]:
    """Return the log's lines; a progress bar's line is its last state."""
    if not path.exists():
        return []
    text = path.read_bytes().decode("utf-8", errors="replace")
    lines = (line.rstrip("\r").rsplit("\r", 1)[-1] for line in text.split("\n"))
    return [line.rstrip() for line in lines]


def message(line: str) -> str:
    """Return the line without vLLM's process, level, time and place."""
    return PREFIX.sub("", line)


def activity(lines: Iterable[str]) -> str:
    """Return the last INFO message that tells what the server does, or ''."""
    last = ""
    for line in lines:
        match = PREFIX.match(line)
        if match and match["level"] == "INFO":
            text = line[match.end() :]
            if not NOISE.search(text):
                last = text
    return last


def advance(lines: Sequence[str]) -> str:
    """Return the last line of a progress bar, or ''."""
    return next((line for line in reversed(lines) if "%|" in line), "")


def cause(lines: Iterable[str]) -> str:
    """Return the first error that is not the echo of another process's, or ''.

    An exception whose text continues on indented lines is returned with them.
    """
    found: list[str] = []
    for line in map(message, lines):
        if found:
            if line.startswith(" ") and line.strip():
                found.append(line)
                continue
            break
        if ERROR.match(line) and not any(text in line for text in SECONDARY):
            found.append(line)
    return "\n".join(found)


def memory(lines: Iterable[str]) -> list[str]:
    """Return the messages about weights, pages, blocks and KV cache, once each."""
    texts = (message(line) for line in lines if PREFIX.match(line))
    return list(dict.fromkeys(text for text in texts if MEMORY.search(text)))
