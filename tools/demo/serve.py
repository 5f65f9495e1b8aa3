# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""``python -m tools.demo.serve MODEL [vllm serve options]``: in the foreground.

Replaces itself by ``vllm serve``, so signals and the exit status are vLLM's. On
a CPU it adds what a CPU needs (see ``settings.cpu_options``) and says so.
"""

import os
import shlex
import sys

from tools.demo import settings

USAGE = "usage: make serve MODEL=<folder or hub name> [ARGS='<vllm serve options>']"


def main(argv: list[str]) -> int:
    if not argv or not argv[0] or argv[0].startswith("-"):
        print(f"error: MODEL is not set\n{USAGE}", file=sys.stderr)
        return 2
    model, *arguments = argv
    options: list[str] = []
    try:
        if settings.on_cpu():
            options = settings.cpu_options(
                model, arguments, os.environ, settings.SERVE_KV_BYTES_ON_CPU
            )
        command = settings.vllm_command("serve", model, *options, *arguments)
    except (FileNotFoundError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print("$ vllm", shlex.join(command[2:]), file=sys.stderr, flush=True)
    os.execv(command[0], command)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
