# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Stands in for ``vllm serve``: fails in one of the ways a server can fail.

``fake_vllm.py MODE`` starts a child that sleeps, as the server starts its engine
(in a session of its own for ``stubborn``), says so on its output, and then:
``die`` raises; ``hang`` never listens; ``stubborn`` never listens, ignores
SIGTERM and holds shared memory, whose name it prints; ``orphan`` raises and
leaves the child behind.
"""

import signal
import subprocess
import sys
import time
from multiprocessing.shared_memory import SharedMemory

mode = sys.argv[1]
child = subprocess.Popen(
    [sys.executable, "-c", "import time; time.sleep(600)"],
    start_new_session=mode == "stubborn",
)
if mode == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    memory = SharedMemory(create=True, size=4096)
    print("shared memory", memory.name, flush=True)
if mode == "hang":
    # Ends its child first, as vLLM does.
    def leave(*_: object) -> None:
        child.kill()
        child.wait()
        sys.exit(0)

    signal.signal(signal.SIGTERM, leave)
print("(APIServer pid=1) INFO 01-02 03:04:05 [fake.py:1] Loading the fake", flush=True)
if mode in ("die", "orphan"):
    if mode == "die":
        child.kill()
        child.wait()
    raise ValueError("the fake cannot serve this model")
while True:
    time.sleep(1)
