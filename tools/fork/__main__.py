# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""``python -m tools.fork``: make, export, check and rebase the fork's tree."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tools.fork import export, mail, rebase, tree
from tools.fork.errors import ForkError
from tools.fork.series import load
from tools.fork.tree import Workspace
from tools.fork.verify import verify

ROOT = Path(__file__).resolve().parents[2]


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="python -m tools.fork", description=__doc__)
    top.add_argument(
        "--root", type=Path, default=ROOT, help="the repository (default: this one)"
    )
    commands = top.add_subparsers(dest="command", required=True)
    sub = commands.add_parser("tree", help="make or refresh build/tree")
    sub.add_argument(
        "--discard", action="store_true", help="drop edits that are not exported"
    )
    sub = commands.add_parser("export", help="write patches back from build/tree")
    sub.add_argument(
        "--topic", metavar="NAME", help="first put uncommitted edits into this topic"
    )
    sub = commands.add_parser("add", help="list files of ours under a topic")
    sub.add_argument("topic")
    sub.add_argument("paths", nargs="+", metavar="path")
    commands.add_parser("verify", help="check that the series is clean")
    sub = commands.add_parser("rebase", help="take another release as the base")
    what = sub.add_mutually_exclusive_group(required=True)
    what.add_argument("version", nargs="?", help="the release, for example 0.33.0")
    what.add_argument("--continue", dest="resume", action="store_true")
    what.add_argument("--abort", action="store_true")
    sub = commands.add_parser("series", help="write mail-format patches for upstream")
    sub.add_argument("out", type=Path, help="an empty folder")
    return top


def run(args: argparse.Namespace) -> int:
    """Carry out one command; returns the exit status."""
    work = Workspace(args.root.resolve())
    series = load(work.root)
    if args.command == "tree":
        print(tree.make(work, series, discard=args.discard))
    elif args.command == "export":
        print(export.export(work, series, topic=args.topic))
    elif args.command == "add":
        print(export.add(work, series, args.topic, args.paths))
        print(tree.make(work, load(work.root)))
    elif args.command == "verify":
        problems = verify(work, series)
        for problem in problems:
            print(f"problem: {problem}", file=sys.stderr)
        if problems:
            return 1
        print(
            f"clean: {len(series.topics)} topics on "
            f"{series.base.name} {series.base.version}"
        )
    elif args.command == "rebase":
        if args.abort:
            print(rebase.abort(work))
        elif args.resume:
            print(rebase.resume(work, series))
        else:
            print(rebase.start(work, series, args.version))
    else:
        print(mail.write(work, series, args.out))
    return 0


def main(argv: list[str] | None = None) -> int:
    """Entry point: one clear error instead of a traceback for what users cause."""
    try:
        return run(parser().parse_args(argv))
    except ForkError as err:
        print(f"tools.fork: {err}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
