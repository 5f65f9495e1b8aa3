# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A server for the gate and the load tests, and what it says about itself."""

import contextlib
import os
import re
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

OPTIONS = (
    f"--served-model-name={NAME}",
    "--host=127.0.0.1",
    "--shutdown-timeout=10",
    "--no-enable-log-requests",
)


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


def options(
    model: Path, arguments: Sequence[str], cpu: bool, kv_bytes: int = KV_BYTES
) -> list[str]:
    """Return the options of ``vllm serve``, ``arguments`` last so that they win.

    On the CPU without compilation: see ``tools.demo.settings.demo_options``. On a
    GPU with less than half of it, so that two servers start side by side.
    """
    result = [*OPTIONS]
    if not settings.has_option(arguments, "--kv-cache-memory-bytes"):
        result.append(f"--kv-cache-memory-bytes={kv_bytes}")
    if not cpu:
        result.append("--gpu-memory-utilization=0.4")
    else:
        result.append("--enforce-eager")
        # The size is in the options: no other may be in the environment.
        result += settings.cpu_options(str(model), [*result, *arguments], {}, kv_bytes)
    return [*result, *arguments]


def command(environment: Path | None, *arguments: str) -> list[str]:
    """Return ``vllm ARGUMENTS`` of this installation, or of another environment.

    Raises:
        FileNotFoundError: the environment has no vLLM.

    """
    if environment is None:
        return settings.vllm_command(*arguments)
    found = [environment / "bin" / name for name in ("python", "vllm")]
    for path in found:
        if not path.exists():
            raise FileNotFoundError(
                f"{path} does not exist; --stock takes a virtual environment with "
                "vLLM in it"
            )
    return [*map(str, found), *arguments]


@contextlib.contextmanager
def serving(
    model: Path,
    arguments: Sequence[str],
    environ: Mapping[str, str],
    log: Path,
    *,
    environment: Path | None = None,
    timeout_s: float = 600.0,
) -> Iterator[Server]:
    """Serve a checkpoint while the block runs.

    Args:
        model: the checkpoint's folder.
        arguments: all options but the port.
        environ: variables over this process's own.
        log: the file of its output.
        environment: the virtual environment to serve from, None for this one.
        timeout_s: seconds that it may take to start.

    Raises:
        tools.demo.__main__.DemoError: it did not start.

    """
    port = take_port("auto")
    env = {**settings.offline_environment(os.environ), **environ}
    env.pop("VLLM_CPU_KVCACHE_SPACE", None)  # the options have the size
    line = command(environment, "serve", str(model), f"--port={port}", *arguments)
    url = f"http://127.0.0.1:{port}"
    with Group(line, log, env) as group:
        wait_for_health(group, url, log, timeout_s, Progress(sys.stderr, every_s=30))
        yield Server(url, group, log)
