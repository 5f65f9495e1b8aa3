# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""``python -m tools.gate``: the fork against itself, each feature on and off.

For each feature two servers run side by side, one with its switch off. Both are
asked the same retrieval questions one at a time, then continue the same texts,
then take ``vllm bench serve`` in turns. Exit status 1 if an answer is lost, if
tokens differ that are promised to be the same, if a ratio is worse than the limit
by more than the control's own spread where speed is promised, or if a server or a
request failed. Servers of the same build differ in speed, so a ratio that is worse
is measured again on new ones, which decide.
"""

import argparse
import functools
import itertools
import json
import platform
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, astuple, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx

from benchmarks.needle import task
from tools.demo import settings
from tools.demo.__main__ import DemoError, explain
from tools.demo.process import Interrupted, Interrupts
from tools.gate import bench, client, server
from tools.gate.bench import BenchError, Load, Speed
from tools.gate.features import FEATURES, Feature
from tools.gate.server import Server

CHECKPOINTS = Path(__file__).resolve().parents[2] / "benchmarks/needle/checkpoints"
OUT = Path(__file__).resolve().parents[2] / "build" / "gate"
LENGTHS = {"cpu": (512, 2048), "cuda": (512, 4096, 32768, 64512)}
RUNS = {"cpu": 3, "cuda": 5}
REQUESTS = {"cpu": 8, "cuda": 32}
CONCURRENCY = {"cpu": 4, "cuda": 8}
NEEDLES, QUESTIONS = 8, 2
CONTINUED_TOKENS = 32
MARGIN_TOKENS = 128
"""Above the longest text: the context of a server."""
LIMIT = 1.03
PAIRS = 2
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


@dataclass(frozen=True)
class Measured:
    """What one pair of servers took.

    Attributes:
        on, off: medians with the feature on and off.
        ratio: with the feature on, how much worse; above one is worse.
        spread: how far the control's own runs are apart; see ``bench.spread``.

    """

    on: Speed
    off: Speed
    ratio: Speed
    spread: Speed


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
        pairs: of servers that were measured; the last one decides.
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
    pairs: list[Measured] = field(default_factory=list)
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Plan:
    """How much is asked and measured.

    Attributes:
        lengths: of the texts, in tokens.
        texts: of each length, ``QUESTIONS`` questions each.
        runs: of the benchmark, on each side of a pair of servers.
        limit: of ratios.
        pairs: of servers, at most, until a ratio is below the limit.
        load: of the benchmark.
        seed: of the texts.

    """

    lengths: tuple[int, ...]
    texts: int
    runs: int
    limit: float
    pairs: int
    load: Load
    seed: int


@dataclass(frozen=True)
class Setup:
    """What all servers of the gate have in common.

    Attributes:
        device: ``cpu`` or ``cuda``.
        checkpoints: the folder that has them.
        context: of a server, in tokens.
        options: of every server, after all others.
        folder: for logs.

    """

    device: str
    checkpoints: Path
    context: int
    options: tuple[str, ...]
    folder: Path

    def model(self, feature: Feature) -> Path:
        """Return the checkpoint's folder."""
        return self.checkpoints / feature.checkpoint

    def server(
        self, comparison: "Comparison", side: str, pair: int = 0
    ) -> dict[str, Any]:
        """Return the arguments of ``server.starting`` for ``on`` or ``off``."""
        feature, stock = comparison
        model = self.model(feature)
        own = (f"--max-model-len={self.context}", *feature.arguments(self.device))
        again = f"-{pair + 1}" if pair else ""
        name = f"{feature.name.replace(' ', '-')}{again}-{side}"
        return {
            "model": model,
            "arguments": server.options(
                model, (*own, *self.options), self.device == "cpu"
            ),
            "environ": feature.on if side == "on" else feature.off,
            "log": self.folder / f"{name}.log",
            "environment": stock if side == "off" else None,
        }


SIDES = ("on", "off")
Comparison = tuple[Feature, Path | None]
"""A feature, and the environment that its control is served from: None for this."""
Pair = tuple[Server, Server]
"""With the feature on, and off."""


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
    one, other = bench.medians(runs[True]), bench.medians(runs[False])
    ratio, own = bench.ratios(one, other), bench.spread(runs[False])
    row.pairs.append(Measured(one, other, ratio, own))


def too_slow(row: Row, limit: float) -> list[str]:
    """Return the ratios that break a promise."""
    if row.fast_promised and row.pairs:
        return bench.excesses(row.pairs[-1].ratio, row.pairs[-1].spread, limit)
    return []


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
    row.failures += too_slow(row, limit)


def start_ahead(
    stack: ExitStack, comparisons: Sequence[Comparison], setup: Setup
) -> dict[str, Pair]:
    """Start the servers of several comparisons; return the pairs that answer.

    The first one alone: it tunes and compiles kernels, and the others, which start
    together, find what it chose. What another server takes or gives back meanwhile
    can spoil a memory profile; who does not start then is stopped, and has another
    try alone in its turn.
    """
    started: dict[str, tuple[ExitStack, list[Server]]] = {}
    for comparison in comparisons:
        contexts = stack.enter_context(ExitStack())
        servers: list[Server] = []
        for side in SIDES:
            context = server.starting(**setup.server(comparison, side))
            servers.append(contexts.enter_context(context))
            if not started and side == SIDES[0]:
                with suppress(DemoError):  # seen again below
                    servers[0].wait()
        started[comparison[0].name] = contexts, servers
    result: dict[str, Pair] = {}
    for name, (contexts, servers) in started.items():
        try:
            for one in servers:
                one.wait()
            result[name] = servers[0], servers[1]
        except DemoError as error:
            print(f"    {name} starts again in its turn: {error}", flush=True)
            contexts.close()
    for pair in result.values():
        for one in pair:
            # Before any is awaited, so that they end together.
            stack.callback(one.terminate)
    return result


def gate(
    comparison: Comparison, setup: Setup, plan: Plan, ahead: Pair | None = None
) -> Row:
    """Compare a feature on and off, or this installation with another.

    Args:
        comparison: what is compared.
        setup: of the servers.
        plan: how much is asked and measured.
        ahead: servers that answer already; they are asked to end, but not awaited.

    Returns:
        The row; what did not run is among its failures.

    """
    start = time.monotonic()
    feature, _ = comparison
    arguments = functools.partial(setup.server, comparison)
    tokenizer = setup.model(feature)
    row = Row(
        feature.name,
        feature.checkpoint,
        feature.why,
        feature.identical,
        setup.device in feature.fast,
    )
    try:
        with ExitStack() as stack:
            if ahead is None:
                on, off = (
                    stack.enter_context(server.serving(**arguments(side)))
                    for side in SIDES
                )
            else:
                on, off = ahead
                stack.callback(off.terminate)
                stack.callback(on.terminate)
            question(row, on, off, plan)
            if plan.runs:
                measure(row, on, off, tokenizer, plan)
        while len(row.pairs) < plan.pairs and (slow := too_slow(row, plan.limit)):
            print("    again, on new servers: " + "; ".join(slow), flush=True)
            for one in ahead or ():
                # What it still gives back would be in the new ones' profile.
                one.stop()
            with ExitStack() as stack:
                # The other one starts first.
                off, on = (
                    stack.enter_context(
                        server.serving(**arguments(side, len(row.pairs)))
                    )
                    for side in reversed(SIDES)
                )
                measure(row, on, off, tokenizer, plan)
    except DemoError as error:
        explain(error)
        row.failures.append(str(error))
    except (httpx.HTTPError, BenchError) as error:
        row.failures.append(f"{type(error).__name__}: {error}")
    row.seconds = round(time.monotonic() - start, 1)
    return row


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a Markdown table."""
    lines = [
        "| feature | served | right on, off | tokens | throughput | TTFT | TPOT | |",
        "|---|---|---:|---|---:|---:|---:|---|",
    ]
    for row in rows:
        same = ("same" if row.identical else "differ") if row.asked else "-"
        tokens = f"{same}, {'' if row.identical_promised else 'not '}promised"
        speed = ""
        if row.pairs:
            figures = zip(astuple(row.pairs[-1].ratio), astuple(row.pairs[-1].spread))
            speed = " | ".join(f"{ratio:.3f} ±{noise:.3f}" for ratio, noise in figures)
        verdict = "FAIL" if row.failures else "pass"
        if not row.fast_promised:
            verdict += ", speed not promised"
        elif len(row.pairs) > 1:
            verdict += f", {len(row.pairs)} pairs of servers"
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
        type=lambda text: text.split(",") if text else [],
        help="names, with commas between (default: all that have landed; empty: "
        "none, for --stock alone)",
    )
    parser.add_argument("--texts", type=int, default=6, help="of each length")
    parser.add_argument(
        "--runs",
        type=int,
        help=f"of the benchmark, on each side (CPU: {RUNS['cpu']}, "
        f"GPU: {RUNS['cuda']})",
    )
    parser.add_argument(
        "--requests",
        type=int,
        help=f"of a run (CPU: {REQUESTS['cpu']}, GPU: {REQUESTS['cuda']})",
    )
    parser.add_argument("--limit", type=float, default=LIMIT, help="of ratios")
    parser.add_argument(
        "--pairs",
        type=int,
        default=PAIRS,
        help="of servers, at most: a ratio above the limit is measured again on new "
        f"ones, which decide (default: {PAIRS})",
    )
    parser.add_argument(
        "--at-once",
        type=int,
        default=1,
        metavar="FEATURES",
        help="whose servers start together and wait for their turn: saves time on "
        "a machine with many cores and much memory (default: 1)",
    )
    parser.add_argument(
        "--server-option",
        action="append",
        default=[],
        metavar="OPTION",
        help="of vllm serve, for every server; give it as "
        "--server-option=--enforce-eager, and again for another",
    )
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


def report(
    rows: Sequence[Row], plan: Plan, options: Sequence[str], device: str, card: str
) -> dict[str, Any]:
    """Return the JSON report."""
    import vllm

    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "vllm": vllm.__version__,
        "device": device,
        "card": card,
        "plan": asdict(plan),
        "server_options": list(options),
        "rows": [asdict(row) for row in rows],
    }


def card_name(device: str) -> str:
    """Return the GPU's name, or the processor's architecture."""
    if device == "cpu":
        return platform.machine()
    from vllm.platforms import current_platform

    return current_platform.get_device_name()


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
        todo: list[Comparison] = [
            (feature, None) for feature in chosen(args.features, device)
        ]
        if args.at_once < 1:
            raise ValueError(f"--at-once={args.at_once}: expected 1 or more")
        if args.pairs < 1:
            raise ValueError(f"--pairs={args.pairs}: expected 1 or more")
        if args.stock is not None:
            server.check_stock(args.stock)
            todo.append((STOCK, args.stock))
    except (ValueError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    lengths = args.lengths or LENGTHS[device]
    requests = REQUESTS[device] if args.requests is None else args.requests
    runs = RUNS[device] if args.runs is None else args.runs
    load = Load(min(512, max(lengths)), 32, requests, CONCURRENCY[device])
    plan = Plan(lengths, args.texts, runs, args.limit, args.pairs, load, args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    context = max(lengths) + MARGIN_TOKENS
    options = tuple(args.server_option)
    setup = Setup(device, args.checkpoints, context, options, args.out)
    card = card_name(device)
    rows: list[Row] = []
    for i in range(0, len(todo), args.at_once):
        group = todo[i : i + args.at_once]
        with ExitStack() as stack:
            ahead = start_ahead(stack, group, setup) if args.at_once > 1 else {}
            for comparison in group:
                name = comparison[0].name
                print(f"==> {name}", flush=True)
                row = gate(comparison, setup, plan, ahead.get(name))
                judge(row, plan.limit)
                rows.append(row)
                print(
                    f"    {row.seconds:.0f} s", *row.failures, sep="\n    ", flush=True
                )
                # After each: what was found is not lost with what comes next.
                document = report(rows, plan, options, device, card)
                text = json.dumps(document, indent=2) + "\n"
                (args.out / "gate.json").write_text(text, encoding="utf-8")
    print(table(rows))
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
