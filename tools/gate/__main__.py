# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""``python -m tools.gate``: the fork against itself, each feature on and off.

For each feature two servers run side by side, one with its switch off. Both are
asked the same retrieval questions one at a time, then continue the same texts,
then take ``vllm bench serve`` in turns. Exit status 1 if an answer is lost, if
tokens differ that are promised to be the same, or if a ratio is worse than the
limit where speed is promised.
"""

import argparse
import itertools
import json
import platform
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.needle import task
from tools.demo import settings
from tools.demo.__main__ import DemoError, explain
from tools.demo.process import Interrupted, Interrupts
from tools.gate import bench, client, server
from tools.gate.bench import Load, Speed
from tools.gate.features import FEATURES, Feature
from tools.gate.server import Server

CHECKPOINTS = Path(__file__).resolve().parents[2] / "benchmarks/needle/checkpoints"
OUT = Path(__file__).resolve().parents[2] / "build" / "gate"
LENGTHS = {"cpu": (512, 2048), "cuda": (512, 4096, 32768, 64512)}
NEEDLES, QUESTIONS = 8, 2
CONTINUED_TOKENS = 32
MARGIN_TOKENS = 128
"""Above the longest text: the context of a server."""
LIMIT = 1.03
LEAST_RIGHT = 0.9
"""A checkpoint that answers less, both ways, shows nothing."""

STOCK = Feature(
    name="against stock vLLM",
    switch="",
    off={},
    checkpoint="dense-fp16",
    identical=False,
    why="another build rounds in its own way",
)


@dataclass
class Row:
    """What was found for one feature.

    Attributes:
        feature: its name.
        checkpoint: what was served.
        asked: questions.
        right_on, right_off: exact answers that ended by themselves.
        lost: questions answered right only with the feature off.
        identical: whether every token was the same.
        identical_promised: whether it had to be.
        ratio: with the feature on, how much worse; above one is worse.
        on, off: the medians.
        fast_promised: whether the ratio had to stay below the limit.
        failures: why the gate fails, empty if it does not.

    """

    feature: str
    checkpoint: str
    why: str
    identical_promised: bool
    fast_promised: bool
    asked: int = 0
    right_on: int = 0
    right_off: int = 0
    lost: list[str] = field(default_factory=list)
    identical: bool = True
    on: Speed | None = None
    off: Speed | None = None
    ratio: Speed | None = None
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Plan:
    """How much is asked and measured.

    Attributes:
        lengths: of the texts, in tokens.
        texts: of each length, ``QUESTIONS`` questions each.
        runs: of the benchmark, on each side.
        load: of the benchmark.
        seed: of the texts.

    """

    lengths: tuple[int, ...]
    texts: int
    runs: int
    load: Load
    seed: int


def landed(feature: Feature) -> bool:
    """Whether the installed vLLM knows the feature's switch. Imports vLLM."""
    import vllm.envs as envs

    return not feature.switch or feature.switch in envs.environment_variables


def question(row: Row, on: Server, off: Server, plan: Plan) -> None:
    """Ask both servers the same, one request at a time, and note what differs."""
    with client.client(on.url) as http_on, client.client(off.url) as http_off:
        for length in plan.lengths:
            texts = task.samples("test", plan.seed, length, NEEDLES, QUESTIONS)
            for i, text in enumerate(itertools.islice(texts, plan.texts)):
                for turn, (_, value) in enumerate(text.turns):
                    one = client.ask(http_on, text, turn)
                    other = client.ask(http_off, text, turn)
                    row.asked += 1
                    row.right_on += one.is_right(value)
                    row.right_off += other.is_right(value)
                    row.identical &= one.tokens == other.tokens
                    if other.is_right(value) and not one.is_right(value):
                        row.lost.append(
                            f"{length} tokens, text {i}, question {turn}: expected "
                            f"{value!r}, got {one.text!r} ({one.reason})"
                        )
            # Answers are sure of each token. What follows filler is not, and shows
            # a difference that they do not.
            prompt, _ = next(task.samples("test", plan.seed + 1, length)).tokens()
            cut = prompt[: length // 2]
            row.identical &= client.continuation(
                http_on, cut, CONTINUED_TOKENS
            ) == client.continuation(http_off, cut, CONTINUED_TOKENS)


def measure(row: Row, on: Server, off: Server, tokenizer: Path, plan: Plan) -> None:
    """Run the benchmark on both servers in turns, after one run each unmeasured."""
    runs: dict[bool, list[Speed]] = {True: [], False: []}
    for i in range(-1, plan.runs):
        for is_on in (True, False) if i % 2 else (False, True):
            target = on if is_on else off
            load = plan.load
            if i < 0:
                load = replace(load, requests=load.concurrency)
            speed = bench.run(target, tokenizer, load, seed=i + 1)
            if i >= 0:
                runs[is_on].append(speed)
    row.on, row.off = bench.medians(runs[True]), bench.medians(runs[False])
    row.ratio = bench.ratios(row.on, row.off)


def judge(row: Row, limit: float) -> None:
    """Write what breaks a promise into ``row.failures``."""
    row.failures += [f"lost answer: {lost}" for lost in row.lost]
    if row.right_on < LEAST_RIGHT * row.asked:
        row.failures.append(
            f"{row.right_on} of {row.asked} answers right, expected at least "
            f"{LEAST_RIGHT:.0%}"
        )
    if row.identical_promised and not row.identical:
        row.failures.append(f"tokens differ, but {row.why}")
    if row.fast_promised and row.ratio and bench.worst(row.ratio) > limit:
        row.failures.append(
            f"{bench.worst(row.ratio):.3f} times slower, expected at most {limit}"
        )


def gate(
    feature: Feature,
    device: str,
    checkpoints: Path,
    plan: Plan,
    folder: Path,
    stock: Path | None = None,
) -> Row:
    """Compare the feature on and off, or this installation with ``stock``.

    Raises:
        tools.demo.__main__.DemoError: a server did not start.
        httpx.HTTPError: a request failed.
        bench.BenchError: a benchmark did not complete.

    """
    start = time.monotonic()
    model = checkpoints / feature.checkpoint
    context = max(plan.lengths) + MARGIN_TOKENS
    arguments = server.options(
        model,
        (f"--max-model-len={context}", *feature.arguments(device)),
        device == "cpu",
    )
    row = Row(
        feature.name,
        feature.checkpoint,
        feature.why,
        feature.identical,
        device in feature.fast,
    )
    with ExitStack() as stack:
        names = {"on": feature.on, "off": feature.off}
        on, off = (
            stack.enter_context(
                server.serving(
                    model,
                    arguments,
                    environ,
                    folder / f"{feature.name.replace(' ', '-')}-{name}.log",
                    environment=stock if name == "off" else None,
                )
            )
            for name, environ in names.items()
        )
        question(row, on, off, plan)
        if plan.runs:
            measure(row, on, off, model, plan)
    row.seconds = round(time.monotonic() - start, 1)
    return row


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a Markdown table."""
    lines = [
        "| feature | served | right on, off | tokens | throughput | TTFT | TPOT | |",
        "|---|---|---:|---|---:|---:|---:|---|",
    ]
    for row in rows:
        same = "same" if row.identical else "differ"
        tokens = f"{same}, {'' if row.identical_promised else 'not '}promised"
        figures = asdict(row.ratio).values() if row.ratio else ()
        speed = " | ".join(f"{value:.3f}" for value in figures)
        verdict = "FAIL" if row.failures else "pass"
        if not row.fast_promised:
            verdict += ", speed not promised"
        lines.append(
            f"| {row.feature} | {row.checkpoint} | {row.right_on}, {row.right_off} of "
            f"{row.asked} | {tokens} | {speed or '- | - | -'} | {verdict} |"
        )
    return "\n".join(lines)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.gate",
        description="The fork against itself, each feature on and off.",
    )
    parser.add_argument(
        "--lengths",
        type=lambda text: tuple(int(part) for part in text.split(",")),
        help="of the texts, in tokens, with commas between "
        f"(CPU: {LENGTHS['cpu']}, GPU: {LENGTHS['cuda']})",
    )
    parser.add_argument(
        "--features",
        type=lambda text: text.split(","),
        help="names, with commas between (default: all that have landed)",
    )
    parser.add_argument("--texts", type=int, default=6, help="of each length")
    parser.add_argument("--runs", type=int, default=3, help="of the benchmark")
    parser.add_argument("--requests", type=int, default=8, help="of a run")
    parser.add_argument("--limit", type=float, default=LIMIT, help="of ratios")
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--checkpoints", type=Path, default=CHECKPOINTS)
    parser.add_argument(
        "--out", type=Path, default=OUT, help="for gate.json and the servers' logs"
    )
    parser.add_argument(
        "--stock",
        type=Path,
        metavar="ENVIRONMENT",
        help="also compare with the vLLM of this virtual environment",
    )
    return parser.parse_args(argv)


def report(rows: Sequence[Row], plan: Plan, device: str, card: str) -> dict[str, Any]:
    """Return the JSON report."""
    import vllm

    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "vllm": vllm.__version__,
        "device": device,
        "card": card,
        "plan": asdict(plan),
        "rows": [asdict(row) for row in rows],
    }


def card_name(device: str) -> str:
    """Return the GPU's name, or the processor's architecture."""
    if device == "cpu":
        return platform.machine()
    import torch

    return torch.cuda.get_device_name()


def chosen(names: Sequence[str] | None, device: str) -> list[Feature]:
    """Return the features to gate, with a line for each that is left out.

    Raises:
        ValueError: a name is none of ``FEATURES``.

    """
    known = {feature.name: feature for feature in FEATURES}
    if unknown := [name for name in names or () if name not in known]:
        raise ValueError(
            f"--features={','.join(unknown)}: expected some of {', '.join(known)}"
        )
    result = []
    for feature in FEATURES:
        if names is not None and feature.name not in names:
            continue
        if device not in feature.platforms:
            print(f"{feature.name}: nothing to compare on {device}", flush=True)
        elif not landed(feature):
            print(f"{feature.name}: has not landed ({feature.switch})", flush=True)
        else:
            result.append(feature)
    return result


def run(args: argparse.Namespace) -> int:
    """Gate every feature asked for; return the exit status."""
    device = "cpu" if settings.on_cpu() else "cuda"
    try:
        todo: list[tuple[Feature, Path | None]] = [
            (feature, None) for feature in chosen(args.features, device)
        ]
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.stock is not None:
        todo.append((STOCK, args.stock))
    lengths = args.lengths or LENGTHS[device]
    load = Load(min(512, max(lengths)), 32, args.requests, 4)
    plan = Plan(lengths, args.texts, args.runs, load, args.seed)
    rows: list[Row] = []
    args.out.mkdir(parents=True, exist_ok=True)
    for feature, stock in todo:
        print(f"==> {feature.name}", flush=True)
        try:
            row = gate(feature, device, args.checkpoints, plan, args.out, stock)
        except DemoError as error:
            explain(error)
            return 1
        judge(row, args.limit)
        rows.append(row)
        print(f"    {row.seconds:.0f} s", *row.failures, sep="\n    ", flush=True)
    print(table(rows))
    document = report(rows, plan, device, card_name(device))
    text = json.dumps(document, indent=2) + "\n"
    (args.out / "gate.json").write_text(text, encoding="utf-8")
    return 1 if any(row.failures for row in rows) or not rows else 0


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    try:
        with Interrupts():
            return run(args)
    except Interrupted as signal:
        print(f"stopped by {signal}; no server is left", file=sys.stderr)
        return 128 + signal.signum


if __name__ == "__main__":
    raise SystemExit(main())
