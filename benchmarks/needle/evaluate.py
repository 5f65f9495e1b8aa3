# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Accuracy of the retrieval model by length of the text.

``python -m benchmarks.needle.evaluate FOLDER --lengths 256,4096 --samples 200``

An answer is right if greedy decoding gives every token of it and the end token.
That needs no decoding: greedy decoding follows the right answer until its first
wrong token, so one pass over text and right answer tells. The texts are the
split ``test``, which no training sees. For a served model there is
``tools/gate``; this runs transformers' own model, in FP32 or what ``--dtype``
says, which also tells what rounding costs.
"""

import argparse
import itertools
import json
import math
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.needle import model, task

LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 64512)


@dataclass(frozen=True)
class Accuracy:
    """Exact answers at one length.

    Attributes:
        length: tokens of text, question and answer together.
        needles: keys in each text.
        samples: texts, one question each.
        exact: share of exact answers.
        low: lower end of the 95 % confidence interval (Wilson score).
        seconds: that it took.

    """

    length: int
    needles: int
    samples: int
    exact: float
    low: float
    seconds: float


def wilson_low(right: int, count: int) -> float:
    """Return the lower end of the Wilson score interval at 95 %."""
    z, share = 1.96, right / count
    middle = share + z * z / (2 * count)
    spread = z * math.sqrt(share * (1 - share) / count + (z / (2 * count)) ** 2)
    return (middle - spread) / (1 + z * z / count)


@torch.inference_mode()
def is_exact(net: torch.nn.Module, sample: task.Sample) -> bool:
    """Whether greedy decoding gives the sample's first answer and its end."""
    ids, answer = sample.tokens()
    count = sum(answer)
    device = next(net.parameters()).device
    row = torch.tensor([ids], device=device)
    logits = net(input_ids=row, use_cache=False, logits_to_keep=count + 1).logits
    return logits[0, :-1].argmax(-1).tolist() == ids[-count:]


def measure(
    net: torch.nn.Module, length: int, samples: int, needles: int, seed: int
) -> Accuracy:
    """Ask one question about each of ``samples`` texts of ``length`` tokens."""
    start = time.monotonic()
    texts = task.samples("test", seed, length, needles)
    right = sum(is_exact(net, text) for text in itertools.islice(texts, samples))
    seconds = round(time.monotonic() - start, 1)
    return Accuracy(
        length,
        needles,
        samples,
        right / samples,
        round(wilson_low(right, samples), 4),
        seconds,
    )


def table(rows: list[Accuracy]) -> str:
    """Return the rows as a Markdown table."""
    lines = [
        "| tokens | needles | texts | exact answers | at least (95 %) |",
        "|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {r.length:,} | {r.needles} | {r.samples} | {r.exact:.1%} | {r.low:.1%} |"
        for r in rows
    ]
    return "\n".join(lines)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.needle.evaluate",
        description="Accuracy of the retrieval model by length of the text.",
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument(
        "--lengths",
        type=lambda text: [int(part) for part in text.split(",")],
        default=list(LENGTHS),
        help="tokens, with commas between (default: 256 to 64512)",
    )
    parser.add_argument("--samples", type=int, default=200, help="of each length")
    parser.add_argument("--needles", type=int, default=8, help="in each text")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--dtype", choices=("float32", "float16", "bfloat16"), default="float32"
    )
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--json", type=Path, help="write the table here as JSON")
    parser.add_argument(
        "--at-least", type=float, default=0.0, help="fail below this share (0 to 1)"
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    net = model.load(args.folder).to(args.device, getattr(torch, args.dtype)).eval()
    rows = []
    for length in args.lengths:
        row = measure(net, length, args.samples, args.needles, args.seed)
        print(json.dumps(asdict(row)), file=sys.stderr, flush=True)
        rows.append(row)
    print(table(rows))
    if args.json:
        document = {
            "folder": args.folder.name,
            "dtype": args.dtype,
            "device": args.device,
            "seed": args.seed,
            "torch": torch.__version__,
            "lengths": [asdict(row) for row in rows],
        }
        args.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    short = [r.length for r in rows if r.exact < args.at_least]
    if short:
        print(
            f"error: fewer than --at-least={args.at_least} exact answers at {short}",
            file=sys.stderr,
        )
    return 1 if short else 0


if __name__ == "__main__":
    raise SystemExit(main())
