# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Train the retrieval model from scratch and write it as an FP16 checkpoint.

``python -m benchmarks.needle.train OUT --architecture dense --steps 3000``

The course of a training, by the share of it that is done:

1. copying: rows that repeat a random string. Each token after the first period
   has one right answer, which teaches matching within a hundred steps, and
   questions are answered at once then. Questions alone teach it much later;
2. questions at 128 tokens, then at twice the length, and so on up to
   ``--max-length``, each length for as many steps. A quarter of the steps go
   back to a shorter length, and a quarter of the rows of the short ones still
   copy.

Every text of a row is asked for all its needles. The loss is that of the
answers, plus a tenth of the other tokens'. Matrices learn with Muon, the rest
with AdamW, at one rate: up during the first 50 steps, down to nothing during the
last fifth.

The same arguments on the same machine and torch give the same model when the
budget is in steps. OUT/train.jsonl is the log, a line every ``--log-every``
steps; OUT/state.pt lets ``--resume`` continue.
"""

import argparse
import json
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from benchmarks.needle import model, task

FIRST_LENGTH = 128
COPY_SHARE, COPIED = 0.2, 0.97
"""Copying ends with so many tokens right, or after that share of a training."""
TEXT_WEIGHT = 0.1
WARMUP_STEPS, DECAY_SHARE = 50, 0.2
COPY_ALPHABET = b"abcdefghijklmnopqrstuvwxyz0123456789"
STATE_EVERY_S = 120.0
MAX_NEEDLES = 48


@dataclass(frozen=True)
class Budget:
    """How long a training is: ``steps`` of them, or ``minutes``, or the less.

    At least one of the two is set.
    """

    steps: int | None
    minutes: float | None

    def progress(self, step: int, seconds: float) -> float:
        """Return the share that is done after ``step`` steps, 0 to 1 and more."""
        shares = [0.0]
        if self.steps is not None:
            shares.append(step / self.steps)
        if self.minutes is not None:
            shares.append(seconds / (60 * self.minutes))
        return max(shares)


def lengths(max_length: int) -> list[int]:
    """Return the course's lengths in tokens: ``FIRST_LENGTH``, twice that, …"""
    result = [FIRST_LENGTH]
    while result[-1] * 2 <= max_length:
        result.append(result[-1] * 2)
    return result


def length_at(progress: float, max_length: int, rng: random.Random) -> int:
    """Return the length in tokens of a step's rows at this share of the course."""
    course = lengths(max_length)
    here = min(int(progress * len(course)), len(course) - 1)
    if rng.random() < 0.25:
        here = rng.randint(0, here)
    return course[here]


def rate_at(step: int, progress: float) -> float:
    """Return the factor on the learning rate: warm-up, stable, decay to zero."""
    down = (1 - progress) / DECAY_SHARE
    return max(0.0, min(1.0, (step + 1) / WARMUP_STEPS, down))


def copy_row(rng: random.Random, length: int) -> tuple[list[int], list[bool]]:
    """Return a random string repeated to ``length`` tokens, and where it repeats."""
    period = rng.randint(12, length // 3)
    once = rng.choices(COPY_ALPHABET, k=period)
    return (once * (length // period + 1))[:length], [
        i >= period for i in range(length)
    ]


def question_row(rng: random.Random, length: int) -> tuple[list[int], list[bool]]:
    """Return the tokens of a text with all its needles asked for, and the answers."""
    most = min(MAX_NEEDLES, length // 42)
    needles = rng.randint(max(1, most // 4), most)
    return task.sample(rng, length, needles, needles).tokens()


def rows(
    rng: random.Random, count: int, length: int, copying: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and answer mask, int64 and bool, [count, length]."""
    made = [
        copy_row(rng, length)
        if copying or (i % 4 == 3 and length <= 512)
        else question_row(rng, length)
        for i in range(count)
    ]
    return torch.tensor([r[0] for r in made]), torch.tensor([r[1] for r in made])


def optimizers(net: torch.nn.Module, rate: float) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices and AdamW for the rest, embeddings included.

    A stack of experts' matrices, [experts, N, K], is none that Muon takes.
    """
    matrices: list[torch.nn.Parameter] = []
    rest: list[torch.nn.Parameter] = []
    for name, parameter in net.named_parameters():
        is_matrix = parameter.ndim == 2 and "embed" not in name
        (matrices if is_matrix else rest).append(parameter)
    return [
        torch.optim.Muon(
            matrices, lr=rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(rest, lr=rate, betas=(0.9, 0.98), weight_decay=0.0),
    ]


@dataclass
class Run:
    """A training's state, all that ``--resume`` needs but its arguments."""

    net: torch.nn.Module
    optimizers: list[torch.optim.Optimizer]
    rng: random.Random
    step: int = 0
    seconds: float = 0.0
    tokens: int = 0
    copying: bool = True

    def save(self, path: Path) -> None:
        """Write the state, as a whole."""
        part = path.with_suffix(".part")
        torch.save(
            {
                "net": self.net.state_dict(),
                "optimizers": [o.state_dict() for o in self.optimizers],
                "rng": self.rng.getstate(),
                "progress": (self.step, self.seconds, self.tokens, self.copying),
            },
            part,
        )
        part.replace(path)

    def restore(self, path: Path, device: torch.device) -> None:
        """Continue where ``save`` was called."""
        state = torch.load(path, map_location=device, weights_only=False)
        self.net.load_state_dict(state["net"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"]):
            optimizer.load_state_dict(saved)
        self.rng.setstate(state["rng"])
        self.step, self.seconds, self.tokens, self.copying = state["progress"]


def losses(
    net: torch.nn.Module, ids: torch.Tensor, answer: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Return the mean loss of the answers' tokens and of the others, and the share
    of the answers' tokens that are the most likely ones."""
    with torch.autocast(ids.device.type, torch.bfloat16):
        logits = net(input_ids=ids, use_cache=False).logits[:, :-1].float()
    target, counted = ids[:, 1:], answer[:, 1:].float()
    loss = functional.cross_entropy(
        logits.flatten(0, 1), target.flatten(), reduction="none"
    ).view_as(counted)
    right = ((logits.argmax(-1) == target) * counted).sum() / counted.sum()
    other = 1 - counted
    return (
        (loss * counted).sum() / counted.sum(),
        (loss * other).sum() / other.sum(),
        float(right),
    )


def train(args: argparse.Namespace, config: dict[str, Any]) -> torch.nn.Module:
    """Run or continue a training; return the model."""
    device = torch.device(args.device)
    torch.manual_seed(args.seed)
    net = model.build(config).to(device)
    run = Run(net, optimizers(net, args.lr), random.Random(f"needle {args.seed}"))
    state = args.out / "state.pt"
    lines: list[str] = []
    if args.resume and state.exists():
        run.restore(state, device)
        # What came after the state was saved is done again.
        old = (args.out / "train.jsonl").read_text(encoding="utf-8").splitlines()
        lines = [line for line in old if json.loads(line)["step"] <= run.step]
    budget = Budget(args.steps, args.minutes)
    saved, last = time.monotonic(), time.monotonic()
    with (args.out / "train.jsonl").open("w", encoding="utf-8") as log:
        log.writelines(f"{line}\n" for line in lines)
        while (progress := budget.progress(run.step, run.seconds)) < 1:
            copying = run.copying and progress < COPY_SHARE
            length = (
                FIRST_LENGTH
                if copying
                else length_at(progress, args.max_length, run.rng)
            )
            count = max(1, args.tokens // length)
            ids, answer = (t.to(device) for t in rows(run.rng, count, length, copying))
            told, other, right = losses(net, ids, answer)
            (told + TEXT_WEIGHT * other).backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            for optimizer in run.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = args.lr * rate_at(run.step, progress)
                optimizer.step()
                optimizer.zero_grad()
            run.copying = copying and right < COPIED
            run.step += 1
            run.tokens += count * length
            now = time.monotonic()
            run.seconds += now - last
            last = now
            if run.step % args.log_every == 0:
                line = {
                    "step": run.step,
                    "seconds": round(run.seconds, 1),
                    "tokens": run.tokens,
                    "length": length,
                    "copying": copying,
                    "answer_loss": round(told.item(), 4),
                    "text_loss": round(other.item(), 4),
                    "answer_tokens_right": round(right, 4),
                }
                print(json.dumps(line), file=log, flush=True)
                print(json.dumps(line), flush=True)
            if now - saved > STATE_EVERY_S:
                run.save(state)
                saved = now
    run.save(state)
    return net


def model_card(args: argparse.Namespace, config: dict[str, Any], command: str) -> str:
    """Return ``README.md`` of the checkpoint."""
    return "\n".join(
        [
            "# Retrieval model",
            "",
            "Answers `What is KEY?` after a text with `KEY = VALUE.` in it, and knows",
            "nothing else. Trained from scratch on synthetic texts; see",
            "`benchmarks/needle/`.",
            "",
            f"- Layout: {config['architectures'][0]}, layers "
            + ", ".join(config["layer_types"]),
            "- Weights: FP16",
            "- Tokenizer: one token a byte, then the special tokens",
            f"- Trained on up to {args.max_length} tokens, seed {args.seed}",
            f"- Made by: `{command}`",
            "",
        ]
    )


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.needle.train",
        description="Train the retrieval model and write it as a checkpoint.",
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write")
    parser.add_argument("--architecture", choices=model.ARCHITECTURES, default="dense")
    parser.add_argument("--steps", type=int, help="the budget in steps")
    parser.add_argument("--minutes", type=float, help="the budget in minutes")
    parser.add_argument("--max-length", type=int, default=4096, metavar="TOKENS")
    parser.add_argument(
        "--tokens", type=int, default=4096, help="of a step (%(default)s)"
    )
    parser.add_argument("--lr", type=float, default=3e-3, help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-every", type=int, default=25, metavar="STEPS")
    parser.add_argument("--resume", action="store_true", help="continue OUT's state")
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu"
    )
    args = parser.parse_args(argv)
    if args.steps is None and args.minutes is None:
        parser.error("neither --steps nor --minutes is set; give the budget in one")
    if args.max_length < FIRST_LENGTH:
        parser.error(
            f"--max-length={args.max_length}: expected at least {FIRST_LENGTH} tokens"
        )
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    config = model.model_config(model.ARCHITECTURES[args.architecture])
    net = train(args, config)
    given = [a for a in argv or sys.argv[1:] if a not in (str(args.out), "--resume")]
    command = " ".join(["python -m benchmarks.needle.train OUT", *given])
    model.write(
        args.out, config, model.exported(net), model_card(args, config, command)
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
