# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""``vllm bench serve``, run in this process: its start costs as much as a run."""

import argparse
import asyncio
import contextlib
import io
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from tools.demo import settings
from tools.gate.server import NAME, Server


@dataclass(frozen=True)
class Speed:
    """One run, or the medians of several.

    Attributes:
        tokens_per_s: output tokens of all requests a second.
        ttft_ms: median time to the first token.
        tpot_ms: median time per further token.

    """

    tokens_per_s: float
    ttft_ms: float
    tpot_ms: float


@dataclass(frozen=True)
class Load:
    """What a run asks for: requests of random tokens, several at a time."""

    input_tokens: int
    output_tokens: int
    requests: int
    concurrency: int


class BenchError(Exception):
    """A run did not complete."""


def arguments(server: Server, tokenizer: Path, load: Load, seed: int) -> list[str]:
    """Return the options of ``vllm bench serve``."""
    return [
        f"--base-url={server.url}",
        f"--model={NAME}",
        f"--tokenizer={tokenizer}",
        "--dataset-name=random",
        f"--random-input-len={load.input_tokens}",
        f"--random-output-len={load.output_tokens}",
        f"--num-prompts={load.requests}",
        f"--max-concurrency={load.concurrency}",
        "--ignore-eos",
        "--temperature=0",
        "--disable-tqdm",
        f"--seed={seed}",
    ]


def run(server: Server, tokenizer: Path, load: Load, seed: int) -> Speed:
    """Run the benchmark once.

    Args:
        server: what is measured.
        tokenizer: the checkpoint's folder.
        load: the requests.
        seed: of their tokens: another one for each run, or prefixes hit.

    Raises:
        BenchError: it did not run, or not every request succeeded.

    """
    from vllm.benchmarks.serve import add_cli_args, main_async
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    # A proxy of the environment would take the requests to 127.0.0.1.
    offline = settings.offline_environment({})
    os.environ.update({name: offline[name] for name in ("NO_PROXY", "no_proxy")})
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    output = io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        options = arguments(server, tokenizer, load, seed)
        options += ["--save-result", f"--result-dir={folder}"]
        options.append("--result-filename=result.json")
        parsed: argparse.Namespace = parser.parse_args(options)
        try:
            with contextlib.redirect_stdout(output):
                asyncio.run(main_async(parsed))
        except (ValueError, OSError) as error:
            raise BenchError(
                f"vllm bench serve at {server.url}: {error}. See {server.log}"
            ) from error
        result = json.loads((Path(folder) / "result.json").read_text(encoding="utf-8"))
    if result["completed"] != load.requests or result["failed"]:
        raise BenchError(
            f"vllm bench serve completed {result['completed']} of {load.requests} "
            f"requests at {server.url}; expected all. See {server.log}"
        )
    return Speed(
        result["output_throughput"], result["median_ttft_ms"], result["median_tpot_ms"]
    )


def medians(runs: Sequence[Speed]) -> Speed:
    """Return the median of each figure."""
    return Speed(
        median(r.tokens_per_s for r in runs),
        median(r.ttft_ms for r in runs),
        median(r.tpot_ms for r in runs),
    )


def ratios(on: Speed, off: Speed) -> Speed:
    """Return how much worse ``on`` is than ``off``, figure by figure.

    Above one is worse, for the throughput too.
    """
    return Speed(
        off.tokens_per_s / on.tokens_per_s,
        on.ttft_ms / off.ttft_ms,
        on.tpot_ms / off.tpot_ms,
    )


def spread(runs: Sequence[Speed]) -> Speed:
    """Return how far runs of one server are apart, figure by figure: half the
    distance between the slowest and the fastest, as a part of the median."""

    def of(figures: Sequence[float]) -> float:
        return (max(figures) - min(figures)) / 2 / median(figures)

    return Speed(
        of([r.tokens_per_s for r in runs]),
        of([r.ttft_ms for r in runs]),
        of([r.tpot_ms for r in runs]),
    )


def excesses(ratio: Speed, own: Speed, limit: float) -> list[str]:
    """Return what is worse than ``limit`` by more than the control's own spread."""
    return [
        f"{name} {worse:.3f} times worse, expected at most {limit} + {noise:.3f}, "
        "the control's own spread"
        for name, worse, noise in (
            ("throughput", ratio.tokens_per_s, own.tokens_per_s),
            ("time to first token", ratio.ttft_ms, own.ttft_ms),
            ("time per token", ratio.tpot_ms, own.tpot_ms),
        )
        if worse > limit + noise
    ]
