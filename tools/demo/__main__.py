# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""``python -m tools.demo``: serve a small hybrid model, ask it, measure it, stop it.

Starts ``vllm serve`` on a free port with the trained retrieval model (or one with
random weights, written here), asks it one question through the OpenAI client and
checks the answer, runs ``vllm bench serve``, prints the server's memory lines and
stops it. Exit status 0 only if every step worked and nothing
was left running; 128 + the signal's number after a signal.
"""

import argparse
import contextlib
import json
import os
import re
import shlex
import socket
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from benchmarks.needle import task
from tools.demo import checkpoint, serverlog, settings
from tools.demo.process import Group, Interrupted, Interrupts

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / "build" / "demo"
TRAINED = ROOT / "benchmarks" / "needle" / "checkpoints" / "dense-nvfp4"
TEXT_TOKENS, TEXT_NEEDLES, TEXT_SEED = 1500, 4, 32
TAIL_LINES = 25

START_GRACE_S, STOP_GRACE_S = 3.0, 30.0
"""Seconds from SIGTERM to SIGKILL for a server that starts and one that serves.

While its engine starts, ``vllm serve`` looks at SIGTERM every ten seconds only,
and then waits for the engine without telling it; there is nothing to save yet.
"""

BENCH_INPUT_TOKENS, BENCH_OUTPUT_TOKENS = 256, 32


class DemoError(Exception):
    """A step failed; ``log`` is the file that tells why, if there is one."""

    def __init__(self, text: str, log: Path | None = None) -> None:
        super().__init__(text)
        self.log = log


@dataclass
class Progress:
    """Steps with their times, and one line that tells what is going on."""

    out: TextIO
    every_s: float = 5.0
    steps: list[tuple[str, float]] = field(default_factory=list)
    _printed: tuple[str, float] = ("", 0.0)

    @contextlib.contextmanager
    def step(self, name: str, title: str) -> Iterator[None]:
        """Announce a step and keep how long it took, failed or not."""
        self.say(f"==> {title}")
        start = time.monotonic()
        try:
            yield
        finally:
            self.clear()
            self.steps.append((name, time.monotonic() - start))

    def say(self, text: str = "") -> None:
        print(text, file=self.out, flush=True)

    def tick(self, elapsed_s: float, doing: str) -> None:
        """Show ``doing``: a line rewritten in place on a terminal, else a line
        when it has changed, at most every ``every_s`` seconds."""
        text = f"    {elapsed_s:3.0f} s  {printable(doing)}"[:110]
        last, when = self._printed
        if self.out.isatty():
            self.out.write(f"\r\x1b[K{text}")
            self.out.flush()
        elif doing != last and elapsed_s - when >= self.every_s:
            self._printed = (doing, elapsed_s)
            self.say(text)

    def clear(self) -> None:
        self._printed = ("", 0.0)
        if self.out.isatty():
            self.out.write("\r\x1b[K")
            self.out.flush()

    def times(self) -> str:
        total = sum(seconds for _, seconds in self.steps)
        parts = [f"{name} {seconds:.1f} s" for name, seconds in self.steps]
        return ", ".join(parts) + f"; {total:.1f} s in all"


def printable(text: str) -> str:
    """Return ``text`` with every character that a terminal obeys escaped."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode() for c in text
    )


def take_port(value: str, host: str = "127.0.0.1") -> int:
    """Return a free TCP port, or the one asked for if it is free.

    Raises:
        DemoError: ``value`` is no port, or something listens there.
    """
    if value != "auto" and not (value.isdecimal() and 0 < int(value) < 65536):
        raise DemoError(f"--port={value} is not a port; expected auto or 1 to 65535")
    with socket.socket() as probe:
        # As the server does, so that a port in TIME_WAIT is not taken for busy.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, 0 if value == "auto" else int(value)))
        except OSError as error:
            raise DemoError(
                f"--port={value} cannot be used on {host} ({error.strerror}); "
                "expected a free port: name another or --port auto"
            ) from error
        return probe.getsockname()[1]


def fetch(url: str, timeout_s: float = 5.0) -> str | None:
    """Return the body of a 200 answer, None when there is none (yet)."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=timeout_s) as answer:
            return answer.read().decode()
    except (urllib.error.URLError, OSError):
        return None


def wait_for_health(
    server: Group, url: str, log: Path, timeout_s: float, progress: Progress
) -> None:
    """Return when the server answers, with its last message shown meanwhile.

    Raises:
        DemoError: the server ended, or ``timeout_s`` seconds were not enough.
    """
    start = time.monotonic()
    while fetch(f"{url}/health") is None:
        elapsed = time.monotonic() - start
        if (status := server.poll()) is not None:
            raise DemoError(
                f"vllm serve ended with status {status} before it was ready", log
            )
        if elapsed > timeout_s:
            raise DemoError(
                f"vllm serve was not ready within --timeout={timeout_s:g} seconds; "
                "give it more, or see what it was doing",
                log,
            )
        doing = serverlog.activity(serverlog.read(log))
        progress.tick(elapsed, doing or "importing vLLM")
        time.sleep(0.5)


@dataclass(frozen=True)
class Question:
    """What is asked, and the whole right answer if there is one."""

    text: str
    answer: str | None = None

    def shown(self) -> str:
        """Return the text; of a long one its start, the answer's place, its end."""
        if self.answer is None or len(self.text) < 300:
            return self.text
        place = self.text.index(f" = {self.answer}.")
        parts = self.text[:40], self.text[place - 30 : place + 40], self.text[-40:]
        return f"[{len(self.text)} characters] " + " … ".join(parts)


def retrieval() -> Question:
    """Return a text with needles in it and a question for one, always the same."""
    samples = task.samples("test", TEXT_SEED, TEXT_TOKENS, TEXT_NEEDLES)
    sample = next(samples)
    return Question(sample.messages()[0]["content"], sample.turns[0][1])


def chat(url: str, model: str, question: Question, progress: Progress) -> None:
    """Stream one chat answer and print it.

    Raises:
        DemoError: the request failed, or ended without a token or a reason, or
            the answer is not the right one.
    """
    import openai

    tokens, reason, said = 0, None, ""
    progress.say(f"    user:      {printable(question.shown())}")
    progress.out.write("    assistant: ")
    try:
        client = openai.OpenAI(
            base_url=f"{url}/v1",
            api_key="none",
            max_retries=0,
            timeout=120,
            http_client=openai.DefaultHttpxClient(trust_env=False),
        )
        stream = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": question.text}],
            max_tokens=64,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        for chunk in stream:
            if chunk.usage:
                tokens = chunk.usage.completion_tokens
            for choice in chunk.choices:
                said += choice.delta.content or ""
                progress.out.write(printable(choice.delta.content or ""))
                progress.out.flush()
                reason = choice.finish_reason or reason
    except openai.OpenAIError as error:
        raise DemoError(f"the chat request failed: {error}") from error
    finally:
        progress.say()
    if not tokens or reason not in ("stop", "length"):
        raise DemoError(
            f"the chat answer has {tokens} tokens and finish_reason={reason}; "
            "expected at least one token and stop or length"
        )
    progress.say(f"    {tokens} tokens, finish_reason {reason}")
    if question.answer is None:
        return
    if (said, reason) != (question.answer, "stop"):
        raise DemoError(
            f"the answer is {printable(said)!r} ({reason}); expected "
            f"{question.answer!r} (stop), which is what the text says"
        )
    progress.say("    right: that is what the text says")


def bench_table(lines: Sequence[str]) -> list[str]:
    """Return the result table of ``vllm bench serve``, [] if there is none."""
    starts = [i for i, line in enumerate(lines) if line.startswith("====")]
    return list(lines[starts[0] : starts[-1] + 1]) if len(starts) > 1 else []


def run_bench(
    server: Group,
    interrupts: Interrupts,
    port: int,
    model: str,
    requests: int,
    progress: Progress,
) -> None:
    """Run ``vllm bench serve`` against the server and print its table.

    Raises:
        DemoError: it failed, or not every request succeeded.
    """
    options = [
        "--host=127.0.0.1",
        f"--port={port}",
        f"--model={model}",
        "--dataset-name=random",
        f"--random-input-len={BENCH_INPUT_TOKENS}",
        f"--random-output-len={BENCH_OUTPUT_TOKENS}",
        f"--num-prompts={requests}",
        "--num-warmups=2",
        "--max-concurrency=4",
        "--ignore-eos",
        "--temperature=0",
    ]
    progress.say(f"    $ vllm bench serve {shlex.join(options)}")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        log, result = folder / "bench.log", folder / "result.json"
        save = ["--save-result", f"--result-dir={folder}"]
        save.append(f"--result-filename={result.name}")
        command = settings.vllm_command("bench", "serve", *options, *save)
        with interrupts.deferred():
            bench = Group(command, log, settings.offline_environment())
            stack.enter_context(bench)
        start = time.monotonic()
        while (status := bench.poll()) is None:
            if server.poll() is not None:
                raise DemoError("vllm serve ended during the benchmark")
            doing = serverlog.advance(serverlog.read(log)) or "importing vLLM"
            progress.tick(time.monotonic() - start, doing)
            time.sleep(0.2)
        progress.clear()
        lines = serverlog.read(log)
        for line in bench_table(lines):
            progress.say(f"    {line}")
        if status != 0 or not result.exists():
            tail = "\n".join(lines[-TAIL_LINES:])
            raise DemoError(f"vllm bench serve ended with status {status}:\n{tail}")
        counts: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    if counts["completed"] != requests or counts["failed"]:
        raise DemoError(
            f"vllm bench serve completed {counts['completed']} of {requests} "
            f"requests and {counts['failed']} failed; expected all"
        )


def memory_report(url: str, log: Path) -> list[str]:
    """Return the server's memory lines, and its pages as its metrics give them."""
    lines = serverlog.memory(serverlog.read(log))
    metrics = fetch(f"{url}/metrics") or ""
    info = re.search(r"^vllm:cache_config_info\{(.*)\}", metrics, re.MULTILINE)
    labels = dict(re.findall(r'(\w+)="([^"]*)"', info[1])) if info else {}
    blocks, block = labels.get("num_gpu_blocks"), labels.get("block_size")
    if blocks and block:
        lines.append(f"KV cache blocks: {blocks} of {block} tokens")
    return lines


def here(folder: Path) -> str:
    """Return the path, short in what is printed and in the name requests ask for."""
    below = folder.is_relative_to(Path.cwd())
    return str(folder.relative_to(Path.cwd()) if below else folder)


def demo(
    args: argparse.Namespace,
    progress: Progress,
    interrupts: Interrupts,
    log: Path,
) -> None:
    """Run every step; whatever happens, stop what was started.

    Raises:
        DemoError: a step failed.
    """
    model = args.model
    question = Question(args.question or "What is the capital of France?")
    if model is None and args.quant is None:
        model = here(TRAINED)
        if args.question is None:
            question = retrieval()
    elif model is None:
        with progress.step("checkpoint", "checkpoint with random weights"):
            folder = checkpoint.write(args.cache / f"hybrid-{args.quant}", args.quant)
            model = here(folder)
            progress.say(f"    {model}")
    elif not (Path(model) / "config.json").is_file():
        raise DemoError(
            f"--model={model} has no config.json; expected a checkpoint's folder "
            "(the demo works offline): leave --model out to have one made"
        )
    port = take_port(args.port)
    url = f"http://127.0.0.1:{port}"
    with contextlib.ExitStack() as stack:
        with progress.step("start", "vllm serve"):
            options = settings.demo_options(
                model, args.server_options, os.environ, settings.on_cpu()
            )
            command = settings.vllm_command("serve", model, f"--port={port}", *options)
            progress.say(f"    $ vllm {shlex.join(command[2:])}")
            with interrupts.deferred():
                env = settings.offline_environment()
                server = Group(command, log, env, START_GRACE_S)
                # Twice: should the report fail (a closed pipe), it still stops.
                stack.enter_context(server)
                stack.callback(stop, server, progress)
            wait_for_health(server, url, log, args.timeout, progress)
            server.grace_s = STOP_GRACE_S
        try:
            with progress.step("chat", f"one chat request to {url}/v1"):
                chat(url, model, question, progress)
            with progress.step("bench", "vllm bench serve"):
                run_bench(
                    server, interrupts, port, model, args.bench_requests, progress
                )
        except DemoError as error:
            error.log = log
            raise
        progress.say("==> memory, from the server's log and metrics")
        for line in memory_report(url, log):
            progress.say(f"    {line}")


def stop(server: Group, progress: Progress) -> None:
    """Stop the server and tell what it took.

    Raises:
        DemoError: SIGTERM was not enough for a server that was ready, or
            something is left.
    """
    with progress.step("stop", "stopping the server"):
        count = len(server.members())
        try:
            killed = server.stop()
        except RuntimeError as error:
            raise DemoError(str(error)) from error
    if killed and server.grace_s == STOP_GRACE_S:
        raise DemoError(
            f"SIGTERM did not end {', '.join(killed)} within {server.grace_s:g} "
            "seconds; killed"
        )
    how = f", {len(killed)} of them killed" if killed else ""
    progress.say(f"    {count} processes ended{how}, none left")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.demo",
        description="Serve a small hybrid model, ask it, measure it, stop it.",
    )
    parser.add_argument("--model", help="checkpoint's folder")
    parser.add_argument(
        "--quant",
        choices=sorted(checkpoint.VARIANTS),
        help="make a checkpoint with random weights (default: the trained one)",
    )
    parser.add_argument(
        "--cache", type=Path, default=CACHE, help="where it is made (%(default)s)"
    )
    parser.add_argument("--port", default="auto", help="auto (default) or a number")
    parser.add_argument(
        "--timeout",
        type=float,
        default=300.0,
        help="seconds the server may take to start (%(default)s)",
    )
    parser.add_argument(
        "--question", help="ask this (default: the trained one finds a needle)"
    )
    parser.add_argument("--bench-requests", type=int, default=16, metavar="N")
    parser.add_argument(
        "--keep-log", type=Path, metavar="FILE", help="keep the server's log here"
    )
    parser.add_argument(
        "server_options",
        nargs="*",
        metavar="-- OPTION",
        help="further options of vllm serve, after --",
    )
    return parser.parse_args(argv)


def explain(error: BaseException | None) -> bool:
    """Print the error, what it came on top of, and the server's log's end.

    Returns whether a log was shown.
    """
    if error is None:
        return False
    # A server that died and left children behind is two errors, the first first.
    shown = explain(error.__context__)
    if not isinstance(error, DemoError):
        return shown
    print(f"error: {error}", file=sys.stderr)
    if error.log is None:
        return shown
    lines = serverlog.read(error.log)
    if first := serverlog.cause(lines):
        print(f"cause: {first}", file=sys.stderr)
    print(f"--- the last lines of {error.log} ---", file=sys.stderr)
    for line in lines[-TAIL_LINES:]:
        print(line, file=sys.stderr)
    print("---", file=sys.stderr)
    return True


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    # Under an ASCII locale an answer's bytes must not end the demo.
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    progress = Progress(sys.stdout)
    status = 1
    log: Path | None = args.keep_log
    keep = log is not None
    try:
        with Interrupts() as interrupts:
            args.cache.mkdir(parents=True, exist_ok=True)
            if log is None:
                descriptor, name = tempfile.mkstemp(".log", "server-", args.cache)
                os.close(descriptor)
                log = Path(name)
            demo(args, progress, interrupts, log)
        status = 0
    except DemoError as error:
        keep |= explain(error)
    except (OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
    except Interrupted as signal:
        print(f"stopped by {signal}; nothing is left running", file=sys.stderr)
        status = 128 + signal.signum
    if log is not None and not keep:
        log.unlink()
    if progress.steps:
        print(f"{'done' if status == 0 else 'failed'}: {progress.times()}", flush=True)
    return status


if __name__ == "__main__":
    raise SystemExit(main())
