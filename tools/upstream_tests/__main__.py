# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""``python -m tools.upstream_tests``: upstream's tests on build/tree.

The files are those that the topics of ``patches/series.toml`` name as
``upstream_tests``. The models whose configuration they look for are stand-in
folders here, since no model hub is needed for a configuration.

``expected_failures.txt`` beside this file lists the tests that fail on this
platform on the base as well. The run fails when another test fails, and when a
listed test passes or is not there: the list is never longer than it needs to be.
``--base`` runs the same files on the base plus its CPU fixes, to make the list.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

from tools.fork import tree as tree_
from tools.fork.errors import ForkError
from tools.fork.git import Git
from tools.fork.series import load
from tools.fork.tree import Workspace

ROOT = Path(__file__).resolve().parents[2]
EXPECTED = Path(__file__).with_name("expected_failures.txt")
# The only topic that the base needs to run on a CPU at all.
CPU_FIXES = "cpu-base-defects"

_QWEN = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000,
    "rms_norm_eps": 1e-06,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
# What upstream's tests read of these models: shapes and context lengths.
CONFIGURATIONS = {
    "Qwen/Qwen3-0.6B": _QWEN,
    "Qwen/Qwen1.5-7B": _QWEN
    | {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
    },
    "facebook/opt-125m": {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "hidden_size": 768,
        "ffn_dim": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "vocab_size": 50272,
        "max_position_embeddings": 2048,
        "word_embed_proj_dim": 768,
        "do_layer_norm_before": True,
        "torch_dtype": "float16",
    },
}


def expected_failures(text: str) -> dict[str, str]:
    """Parse lines ``test id  # reason``; a line without a reason is an error."""
    found = {}
    for line in text.splitlines():
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        name, hash_, reason = line.partition("  # ")
        if not hash_ or not reason.strip():
            raise ForkError(f"{EXPECTED.name}: {name!r} gives no reason")
        found[name.strip()] = reason.strip()
    return found


def outcomes(report: Path) -> dict[str, str]:
    """Test id to ``passed``, ``failed`` or ``skipped`` from a JUnit report."""
    found: dict[str, str] = {}
    for case in ET.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        outcome = "passed"
        if kinds & {"failure", "error"}:
            outcome = "failed"
        elif "skipped" in kinds:
            outcome = "skipped"
        name = f"{case.get('classname')}::{case.get('name')}"
        # A test that passes and then fails in its teardown has two cases.
        if found.get(name) != "failed":
            found[name] = outcome
    return found


def judge(found: dict[str, str], expected: dict[str, str]) -> list[str]:
    """What is wrong with a run, one line each; empty when all is as expected."""
    wrong = [
        f"failed: {name}"
        for name, outcome in sorted(found.items())
        if outcome == "failed" and name not in expected
    ]
    wrong += [
        f"listed as failing on the base, but {found.get(name, 'not there')}: {name}"
        for name in sorted(expected)
        if found.get(name) != "failed"
    ]
    if not any(outcome == "passed" for outcome in found.values()):
        wrong.append("no test passed")
    return wrong


def base_tree(work: Workspace) -> Path:
    """A work tree of the base with its CPU fixes, and the compiled files."""
    series = load(work.root)
    folder = work.root / "build" / "base-tree"
    shutil.rmtree(folder, ignore_errors=True)
    work.git("worktree", "prune")
    start = tree_.base_commit(work, series.base)
    only = [topic for topic in series.topics if topic.name == CPU_FIXES]
    head = tree_.apply_topics(
        work,
        type(series)(series.base, series.cpu_extension, series.revision, tuple(only)),
        start,
    )
    work.git("worktree", "add", "--quiet", "--detach", str(folder), head)
    for built in (work.tree / "vllm").glob("*.so"):
        if not built.name.startswith("_sm70"):
            (folder / "vllm" / built.name).symlink_to(built)
    shutil.copy(work.tree / "vllm" / "_version.py", folder / "vllm")
    return folder


def run(tree: Path, files: list[str], scratch: Path, extra: list[str]) -> Path:
    """Run pytest on upstream's files in ``tree``; returns the report's path."""
    shutil.rmtree(scratch, ignore_errors=True)
    for name, configuration in CONFIGURATIONS.items():
        folder = scratch / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(configuration))
    report = scratch / "report.xml"
    env = dict(os.environ)
    env |= {
        "PYTHONPATH": str(tree),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["--rootdir", str(tree), "-c", str(tree / "pyproject.toml")]
    command += ["--tb=short", "-o", "junit_family=xunit1", f"--junitxml={report}"]
    command += [*extra, *(str(tree / file) for file in files)]
    subprocess.run(command, cwd=scratch, env=env)
    if not report.is_file():
        raise ForkError("pytest wrote no report: it did not run")
    return report


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.upstream_tests", description=__doc__
    )
    parser.add_argument("--base", action="store_true", help="run on the base instead")
    parser.add_argument("--topic", help="only the files that this topic names")
    parser.add_argument("pytest_args", nargs="*", help="passed to pytest, after --")
    args = parser.parse_args(argv)
    work = Workspace(ROOT)
    try:
        series = load(ROOT)
        topics = [series.topic(args.topic)] if args.topic else series.topics
        files = sorted({file for topic in topics for file in topic.upstream_tests})
        tree = base_tree(work) if args.base else work.tree
        scratch = work.root / "build" / "upstream-tests"
        found = outcomes(run(tree, files, scratch, args.pytest_args))
        expected = expected_failures(EXPECTED.read_text())
    except ForkError as err:
        print(f"tools.upstream_tests: {err}", file=sys.stderr)
        return 1
    finally:
        if args.base:
            shutil.rmtree(ROOT / "build" / "base-tree", ignore_errors=True)
            Git(work.tree)("worktree", "prune")
    if args.topic or args.pytest_args:
        expected = {name: why for name, why in expected.items() if name in found}
    wrong = judge(found, expected)
    for line in wrong:
        print(line)
    count = {kind: list(found.values()).count(kind) for kind in ("passed", "skipped")}
    failed = len(wrong)
    print(
        f"upstream's tests: {count['passed']} passed, {failed} not as expected, "
        f"{len(expected)} expected to fail, {count['skipped']} skipped by upstream"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
