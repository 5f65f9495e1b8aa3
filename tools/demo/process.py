# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A child process with its own session, and the promise that nothing is left of it."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType

import psutil

SETTLE_S = 5.0
"""Seconds for processes to go that end by themselves, or were killed."""

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(BaseException):
    """One of ``SIGNALS`` arrived."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


class Interrupts:
    """While entered, ``SIGNALS`` raise ``Interrupted`` in the main thread.

    SIGINT is set too: a shell's background job starts with it ignored.
    """

    def __init__(self) -> None:
        self._pending: int | None = None
        self._deferred = False

    def __enter__(self) -> "Interrupts":
        self._old = {s: signal.signal(s, self._handle) for s in SIGNALS}
        return self

    def __exit__(self, *exc: object) -> None:
        for signum, handler in self._old.items():
            signal.signal(signum, handler)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self._deferred:
            self._pending = signum
        else:
            raise Interrupted(signum)

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Hold a signal back until the block ends, then raise it.

        Around the start of a ``Group`` and its registration with whoever stops
        it: a signal in between would leave a process that nobody knows.
        """
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False
            pending, self._pending = self._pending, None
        if pending is not None:
            raise Interrupted(pending)


def alive(process: psutil.Process) -> bool:
    """Whether the process runs. A zombie does not: it waits for its parent only."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def describe(process: psutil.Process) -> str:
    """Return the pid and the start of the command line."""
    try:
        command = " ".join(process.cmdline())[:100]
    except psutil.Error:
        command = "?"
    return f"{process.pid} ({command})"


def is_resource_tracker(process: psutil.Process) -> bool:
    """Whether the process is one of multiprocessing's resource trackers.

    It ends with the processes it serves, after it has removed the shared memory
    that they left: killed with them, it would leave that behind for good.
    """
    try:
        return "multiprocessing.resource_tracker" in " ".join(process.cmdline())
    except psutil.Error:
        return False


class Group:
    """A command in its own session, with everything that it starts.

    Output goes to ``log``, a file and not a pipe: nothing blocks when nobody
    reads. Leaving the context stops what still runs. ``grace_s``, the seconds
    between SIGTERM and SIGKILL, may be changed while it runs.
    """

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        env: Mapping[str, str],
        grace_s: float = 30.0,
    ) -> None:
        self.grace_s = grace_s
        self._known: set[psutil.Process] = set()
        self._stopped = False
        with log.open("wb") as output:
            self._leader = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(env),
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Process id of the command, which is its session's and group's id."""
        return self._leader.pid

    def poll(self) -> int | None:
        """Return the command's exit status, or None while it runs."""
        return self._leader.poll()

    def members(self) -> list[psutil.Process]:
        """Return the running processes of the session and their descendants.

        A process once seen is remembered, so that one that moves to a session
        of its own and loses its parent is still found.
        """
        for process in psutil.process_iter():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if os.getsid(process.pid) == self.pid:
                    self._known.add(process)
        for process in list(self._known):
            with contextlib.suppress(psutil.NoSuchProcess):
                self._known.update(process.children(recursive=True))
        self._known = {p for p in self._known if alive(p)}
        return sorted(self._known, key=lambda p: p.pid)

    def stop(self) -> list[str]:
        """End the command and all that it started; return what had to be killed.

        SIGTERM to the command, which ends its own children in order; after
        ``grace_s`` seconds SIGKILL to whatever still runs. A signal that arrives
        meanwhile cuts the wait short but not the killing. Returns descriptions,
        empty when SIGTERM was enough.

        Raises:
            RuntimeError: something outlived SIGKILL.
        """
        if self._stopped:  # its process id may be another's by now
            return []
        try:
            self.members()
            if self.poll() is None:
                self._leader.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._leader.wait(self.grace_s)
            if self.poll() is not None:
                self._wait(SETTLE_S)
        finally:
            doomed = [p for p in self.members() if not is_resource_tracker(p)]
            killed = [describe(p) for p in doomed]
            left = self._kill(doomed)
            if left:
                left = self._kill(left)
            self._stopped = not left
            if left:
                raise RuntimeError(
                    "still running after SIGKILL: " + ", ".join(map(describe, left))
                )
        return killed

    def _kill(self, processes: Iterable[psutil.Process]) -> list[psutil.Process]:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        return self._wait(SETTLE_S)

    def _wait(self, timeout_s: float) -> list[psutil.Process]:
        end = time.monotonic() + timeout_s
        while (left := self.members()) and time.monotonic() < end:
            self._leader.poll()  # reaps the command, else it stays a zombie
            time.sleep(0.1)
        return left

    def __enter__(self) -> "Group":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
