# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A server for the gate and the load tests, and what it says about itself."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tools.demo import settings
from tools.demo.__main__ import Progress, fetch, take_port, wait_for_health
from tools.demo.process import Group

NAME = "needle"
"""What requests call the model, whatever its folder."""

KV_BYTES = 256 * 2**20

START_TIMEOUT_S = 600.0

OPTIONS = (
    f"--served-model-name={NAME}",
    "--host=127.0.0.1",
    "--shutdown-timeout=10",
    "--no-enable-log-requests",
)

GPU_OPTIONS = (
    # Less than half, so that servers start side by side.
    "--gpu-memory-utilization=0.4",
    # What every card runs, compute capability 7.0 included.
    "--attention-backend=TRITON_ATTN",
    "--additional-config",
    '{"gdn_prefill_backend":"triton"}',
    # A large card would take 1024 requests, and profile as many.
    "--max-num-seqs=16",
    "--max-num-batched-tokens=8192",
)

FORK_ONLY = "vllm.v1.core.kv_page_plan"
"""A module that no other vLLM has."""


@dataclass(frozen=True)
class Server:
    """A server that answers.

    Attributes:
        url: without a slash at the end.
        group: its processes.
        log: the file of its output.

    """

    url: str
    group: Group
    log: Path

    def metrics(self) -> dict[str, float]:
        """Return its Prometheus metrics, each summed over its labels.

        Raises:
            RuntimeError: it does not answer.

        """
        text = fetch(f"{self.url}/metrics", timeout_s=30)
        if text is None:
            raise RuntimeError(f"{self.url}/metrics does not answer; see {self.log}")
        result: dict[str, float] = {}
        for line in text.splitlines():
            if match := re.match(r"([\w:]+)(?:\{.*\})? (\S+)$", line):
                name = match[1]
                result[name] = result.get(name, 0.0) + float(match[2])
        return result

    def is_alive(self) -> bool:
        """Whether it runs and reports health."""
        return (
            self.group.poll() is None
            and fetch(f"{self.url}/health", timeout_s=30) is not None
        )

    def processes(self) -> list[psutil.Process]:
        """Return its running processes."""
        return self.group.members()

    def terminate(self) -> None:
        """Ask it to end, and do not wait: leaving its context does."""
        if self.group.poll() is None:
            os.kill(self.group.pid, signal.SIGTERM)

    def stop(self) -> None:
        """End it and all its processes before its context is left."""
        self.group.stop()

    def wait(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Return when it answers.

        Raises:
            tools.demo.__main__.DemoError: it ended, or ``timeout_s`` seconds were
                not enough.

        """
        progress = Progress(sys.stderr, every_s=30)
        wait_for_health(self.group, self.url, self.log, timeout_s, progress)


def options(
    model: Path, arguments: Sequence[str], cpu: bool, kv_bytes: int = KV_BYTES
) -> list[str]:
    """Return the options of ``vllm serve``, ``arguments`` last so that they win.

    On the CPU without compilation: see ``tools.demo.settings.demo_options``.
    """
    result = [*OPTIONS]
    if not settings.has_option(arguments, "--kv-cache-memory-bytes"):
        result.append(f"--kv-cache-memory-bytes={kv_bytes}")
    if not cpu:
        result += GPU_OPTIONS
    else:
        result.append("--enforce-eager")
        # The size is in the options: no other may be in the environment.
        result += settings.cpu_options(str(model), [*result, *arguments], {}, kv_bytes)
    return [*result, *arguments]


def command(environment: Path | None, *arguments: str) -> list[str]:
    """Return ``vllm ARGUMENTS`` of this installation, or of another environment.

    This one's by its module: a folder on PYTHONPATH has no script.

    Raises:
        FileNotFoundError: the environment has no vLLM.

    """
    if environment is None:
        return [sys.executable, "-m", "vllm.entrypoints.cli.main", *arguments]
    found = [environment / "bin" / name for name in ("python", "vllm")]
    for path in found:
        if not path.exists():
            raise FileNotFoundError(
                f"{path} does not exist; --stock takes a virtual environment with "
                "vLLM in it"
            )
    return [*map(str, found), *arguments]


def environment_of(environment: Path | None) -> dict[str, str]:
    """Return the variables for a server of this installation, or of another."""
    result = settings.offline_environment(os.environ)
    result.pop("VLLM_CPU_KVCACHE_SPACE", None)  # the options have the size
    # A package that may not be there, for a choice that greedy requests do not make.
    result.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    if environment is not None:
        result.pop("PYTHONPATH", None)  # it may lead to this fork
    return result


def check_stock(environment: Path) -> None:
    """Make sure that an environment's vLLM is another one than this fork.

    Raises:
        FileNotFoundError: it has no vLLM.
        ValueError: its vLLM is this fork, or cannot be imported.

    """
    python, *_ = command(environment)
    code = f"import importlib.util as u; print(u.find_spec({FORK_ONLY!r}))"
    found = subprocess.run(
        [python, "-P", "-c", code],
        env=environment_of(environment),
        capture_output=True,
        text=True,
        check=False,
    )
    if found.returncode or not found.stdout.endswith("None\n"):
        raise ValueError(
            f"--stock={environment}: expected a vLLM without {FORK_ONLY}, which only "
            f"this fork has; found {(found.stdout + found.stderr)[-2000:]}"
        )


@contextlib.contextmanager
def starting(
    model: Path,
    arguments: Sequence[str],
    environ: Mapping[str, str],
    log: Path,
    *,
    environment: Path | None = None,
) -> Iterator[Server]:
    """Start a server, which may not answer yet, and stop it when the block ends.

    Args:
        model: the checkpoint's folder.
        arguments: all options but the port.
        environ: variables over this process's own.
        log: the file of its output.
        environment: the virtual environment to serve from, None for this one.

    Raises:
        FileNotFoundError: the environment has no vLLM.

    """
    port = take_port("auto")
    env = {**environment_of(environment), **environ}
    line = command(environment, "serve", str(model), f"--port={port}", *arguments)
    with Group(line, log, env) as group:
        yield Server(f"http://127.0.0.1:{port}", group, log)


@contextlib.contextmanager
def serving(
    model: Path,
    arguments: Sequence[str],
    environ: Mapping[str, str],
    log: Path,
    *,
    environment: Path | None = None,
) -> Iterator[Server]:
    """Serve a checkpoint while the block runs; see ``starting``.

    Raises:
        FileNotFoundError: the environment has no vLLM.
        tools.demo.__main__.DemoError: it did not start.

    """
    with starting(model, arguments, environ, log, environment=environment) as server:
        server.wait()
        yield server
