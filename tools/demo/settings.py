# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The ``vllm`` command lines, with the settings that a CPU needs."""

import json
import os
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

SERVE_KV_BYTES_ON_CPU = 4 * 2**30
DEMO_KV_BYTES_ON_CPU = 256 * 2**20

DEMO_OPTIONS = (
    "--host=127.0.0.1",
    "--max-model-len=2048",
    "--max-num-seqs=4",
    # The default of 0 kills the engine with its requests and logs an error;
    # with time to drain, the engine and its workers leave by themselves.
    "--shutdown-timeout=10",
)


def on_cpu() -> bool:
    """Whether the installed vLLM runs on the CPU here. Imports vLLM (seconds)."""
    from vllm.platforms import current_platform

    return current_platform.is_cpu()


def vllm_command(*arguments: str) -> list[str]:
    """Return ``vllm ARGUMENTS`` run by this interpreter's own installation.

    Raises:
        FileNotFoundError: vLLM's script is not next to this interpreter.
    """
    script = Path(sysconfig.get_path("scripts")) / "vllm"
    if not script.exists():
        raise FileNotFoundError(
            f"{script} does not exist, so vLLM is not installed for "
            f"{sys.executable}; install the fork first (pip install .)"
        )
    return [sys.executable, str(script), *arguments]


def needs_bfloat16(model: str) -> bool:
    """Whether a local ``model`` is a hybrid stored in FP16.

    Upstream's gated delta net on the CPU asserts BF16, but at the first request
    and not at start-up: the server would report health and then die.
    """
    try:
        config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    text = config.get("text_config") or config
    dtypes = [
        part.get(key) for part in (text, config) for key in ("dtype", "torch_dtype")
    ]
    dtype = next((d for d in dtypes if d), None)
    return dtype == "float16" and "linear_attention" in text.get("layer_types", ())


def has_option(arguments: Sequence[str], name: str) -> bool:
    """Whether ``--name`` is among ``arguments``, in any spelling vLLM takes."""
    given = (a.split("=", 1)[0].replace("_", "-") for a in arguments)
    return name in given


def cpu_options(
    model: str, arguments: Sequence[str], environ: Mapping[str, str], kv_bytes: int
) -> list[str]:
    """Return the options that serving ``model`` on the CPU needs.

    Options already in ``arguments`` or set in ``environ`` are left alone.
    Without a size, upstream takes 92 % of the machine's memory for the KV cache
    and stops when other processes hold some of it.
    """
    options = []
    if not environ.get("VLLM_CPU_KVCACHE_SPACE") and not has_option(
        arguments, "--kv-cache-memory-bytes"
    ):
        options.append(f"--kv-cache-memory-bytes={kv_bytes}")
    if needs_bfloat16(model) and not has_option(arguments, "--dtype"):
        options.append("--dtype=bfloat16")
    return options


def demo_options(
    model: str, arguments: Sequence[str], environ: Mapping[str, str], cpu: bool
) -> list[str]:
    """Return the demo server's options, ``arguments`` last so that they win.

    ``--enforce-eager`` on the CPU only: torch.compile takes 27 s of a 57 s start
    there (two cores, this model), wants a C++ compiler at run time, and saves
    nothing over two dozen requests. On a GPU the server starts as users start it.
    """
    options = list(DEMO_OPTIONS)
    if cpu:
        options.append("--enforce-eager")
        options += cpu_options(model, arguments, environ, DEMO_KV_BYTES_ON_CPU)
    return [*options, *arguments]


def offline_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return ``environ`` for processes that talk to nothing but each other."""
    # A proxy set in the environment would take the requests to 127.0.0.1.
    local = "127.0.0.1,localhost"
    return {
        **environ,
        "HF_HUB_OFFLINE": "1",
        "NO_PROXY": local,
        "no_proxy": local,
        "PYTHONUNBUFFERED": "1",
        # The memory lines are INFO lines.
        "VLLM_LOGGING_LEVEL": "INFO",
        "VLLM_NO_USAGE_STATS": "1",
    }
