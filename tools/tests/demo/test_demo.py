# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The demo: it works, says what failed, and leaves nothing running."""

import contextlib
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import types
import uuid
from pathlib import Path

import psutil
import pytest

from tools.demo import __main__ as demo
from tools.demo import process, serve, serverlog, settings

REPO = Path(__file__).resolve().parents[3]
FAKE = Path(__file__).with_name("fake_vllm.py")
MARK = "DEMO_TEST_MARK"


def marked(mark: str) -> list[psutil.Process]:
    """Return the processes that inherited the mark, found by no code of the demo."""
    found = []
    for candidate in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if (
                candidate.pid != os.getpid()
                and candidate.status() != psutil.STATUS_ZOMBIE
                and candidate.environ().get(MARK) == mark
            ):
                found.append(candidate)
    return found


@pytest.fixture
def mark(monkeypatch):
    """A mark for every process that a test starts; none may be left at its end."""
    value = uuid.uuid4().hex
    monkeypatch.setenv(MARK, value)
    yield value
    left = marked(value)
    for leftover in left:
        leftover.kill()
    assert not left, f"left running: {left}"


@pytest.fixture
def fake(monkeypatch, mark, tmp_path):
    """Return a function that runs the demo here, with a fake server of one mode."""

    def run(mode: str, *arguments: str) -> int:
        def command(*_: str) -> list[str]:
            return [sys.executable, str(FAKE), mode]

        monkeypatch.setattr(settings, "vllm_command", command)
        monkeypatch.setattr(settings, "on_cpu", lambda: True)
        return demo.main(["--cache", str(tmp_path), *arguments])

    return run


def wait_until(condition, timeout_s: float = 60.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.1)


def loading(folder: Path) -> bool:
    """Whether the fake server of a demo in ``folder`` has set its handlers."""
    return any("Loading" in log.read_text() for log in folder.glob("server-*.log"))


@contextlib.contextmanager
def signal_later(signum: int, when):
    """Send this process a signal from a thread once ``when()`` is true."""

    def send() -> None:
        wait_until(when)
        os.kill(os.getpid(), signum)

    thread = threading.Thread(target=send)
    thread.start()
    yield
    thread.join()


# --- the real server -------------------------------------------------------------


def start_demo(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tools.demo", "--cache", str(folder), *arguments]
    return subprocess.Popen(
        command,
        cwd=REPO,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_demo_serves_answers_measures_and_stops(mark, tmp_path):
    log = tmp_path / "kept.log"
    run = start_demo(tmp_path, "--keep-log", str(log), "--bench-requests", "4")
    out, err = run.communicate(timeout=400)
    assert run.returncode == 0, out + err
    lines = [line.strip() for line in out.splitlines()]
    answer = next(line for line in lines if line.startswith("assistant:"))
    assert answer == f"assistant: {demo.retrieval().answer}"
    assert "right: that is what the text says" in lines
    rows = dict(line.split(":", 1) for line in lines if ":" in line)
    assert rows["Successful requests"].strip() == "4"
    assert rows["Failed requests"].strip() == "0"
    assert rows["Total generated tokens"].strip() == str(4 * demo.BENCH_OUTPUT_TOKENS)
    assert float(rows["Median TTFT (ms)"]) > 0
    assert "KV pages: " in out
    assert "KV cache size" in out
    assert any(line.startswith("KV cache blocks: ") for line in lines)
    assert any("processes ended, none left" in line for line in lines)
    assert lines[-1].startswith("done: start ")
    # Only the log asked for stays.
    assert {p.name for p in tmp_path.iterdir()} == {"kept.log"}


def test_the_demos_text_holds_its_answer():
    """One place says it, and what is printed of a long text shows that place."""
    question = demo.retrieval()
    assert question.answer is not None
    assert question.text.count(f" = {question.answer}.") == 1
    shown = question.shown()
    assert f" = {question.answer}." in shown and len(shown) < 300
    key = question.text.split(f" = {question.answer}.")[0][-4:]
    assert shown.endswith(f"What is {key}?")
    assert demo.Question("short").shown() == "short"


@pytest.mark.parametrize(
    ("said", "reason", "message"),
    [
        ("1234", "stop", None),
        ("12345", "stop", "the answer is '12345' (stop); expected '1234' (stop)"),
        ("1234", "length", "the answer is '1234' (length); expected '1234' (stop)"),
    ],
)
def test_a_wrong_answer_fails_the_demo(monkeypatch, said, reason, message):
    """As streamed by an OpenAI client, a character a chunk."""
    import openai

    def chunk(text, why=None, usage=None):
        delta = types.SimpleNamespace(content=text)
        choice = types.SimpleNamespace(delta=delta, finish_reason=why)
        return types.SimpleNamespace(choices=[choice], usage=usage)

    usage = types.SimpleNamespace(completion_tokens=len(said) + 1)
    stream = [*map(chunk, said), chunk(None, reason, usage)]
    create = types.SimpleNamespace(create=lambda **_: iter(stream))
    client = types.SimpleNamespace(chat=types.SimpleNamespace(completions=create))
    monkeypatch.setattr(openai, "OpenAI", lambda **_: client)
    progress = demo.Progress(io.StringIO())
    question = demo.Question("a1b2 = 1234. What is a1b2?", "1234")
    if message is None:
        demo.chat("http://nowhere", "model", question, progress)
        return
    with pytest.raises(demo.DemoError, match=re.escape(message)):
        demo.chat("http://nowhere", "model", question, progress)


def test_a_server_that_dies_at_start_up_is_reported(mark, tmp_path):
    run = start_demo(tmp_path, "--", "--max-model-len", "99999999")
    out, err = run.communicate(timeout=200)
    assert run.returncode == 1, out + err
    assert "error: vllm serve ended with status 1 before it was ready" in err
    cause = err[err.index("cause:") : err.index("--- the last lines")]
    assert "ModelConfig" in cause and "99999999" in cause
    kept = [p for p in tmp_path.iterdir() if p.suffix == ".log"]
    assert len(kept) == 1 and str(kept[0]) in err
    assert out.splitlines()[-1].startswith("failed: ")


def test_interrupting_the_start_leaves_no_engine(mark, tmp_path):
    log = tmp_path / "kept.log"
    run = start_demo(tmp_path, "--quant", "nvfp4", "--keep-log", str(log))
    # The engine's process is there: a child of the server, not of the demo.
    wait_until(lambda: log.exists() and "(EngineCore" in log.read_text(), 200)
    assert len(marked(mark)) >= 3
    start = time.monotonic()
    run.send_signal(signal.SIGINT)
    out, err = run.communicate(timeout=60)
    assert time.monotonic() - start < 20
    assert run.returncode == 128 + signal.SIGINT, out + err
    assert "stopped by SIGINT; nothing is left running" in err


# --- a fake server: how things go wrong ------------------------------------------


def test_failure_shows_cause_and_log(fake, capfd):
    assert fake("die") == 1
    err = capfd.readouterr().err
    assert "vllm serve ended with status 1" in err
    assert "cause: ValueError: the fake cannot serve this model" in err
    assert "[fake.py:1] Loading the fake" in err


def test_children_of_a_dead_server_are_killed(fake, capfd):
    assert fake("orphan") == 1
    out, err = capfd.readouterr()
    assert "error: vllm serve ended with status 1" in err
    assert "cause: ValueError: the fake cannot serve this model" in err
    assert "1 processes ended, 1 of them killed, none left" in out


def test_a_server_that_is_never_ready_times_out(fake, capfd):
    assert fake("hang", "--timeout", "1") == 1
    out, err = capfd.readouterr()
    assert "not ready within --timeout=1 seconds" in err
    assert "2 processes ended, none left" in out


@pytest.mark.parametrize("signum", process.SIGNALS)
def test_signals_stop_everything(fake, tmp_path, capfd, signum):
    before = signal.getsignal(signum)
    with signal_later(signum, lambda: loading(tmp_path)):
        assert fake("hang") == 128 + signum
    assert f"stopped by {signal.Signals(signum).name}" in capfd.readouterr().err
    assert signal.getsignal(signum) is before


def test_a_second_signal_kills_at_once(fake, tmp_path, monkeypatch):
    """The server ignores SIGTERM; nobody waits its grace out."""
    stopping = threading.Event()
    stop = process.Group.stop

    def announced(group):
        stopping.set()
        return stop(group)

    def well_into_the_wait():
        time.sleep(0.5)
        return stopping.is_set()

    monkeypatch.setattr(process.Group, "stop", announced)
    monkeypatch.setattr(demo, "START_GRACE_S", 60.0)
    start = time.monotonic()
    with (
        signal_later(signal.SIGINT, lambda: loading(tmp_path)),
        signal_later(signal.SIGINT, lambda: stopping.wait(60) and well_into_the_wait()),
    ):
        assert fake("stubborn") == 128 + signal.SIGINT
    assert time.monotonic() - start < 30


def test_a_signal_while_starting_waits_for_the_start(mark, tmp_path):
    with (
        pytest.raises(process.Interrupted),
        process.Interrupts() as interrupts,
        contextlib.ExitStack() as stack,
    ):
        with interrupts.deferred():
            group = process.Group(
                [sys.executable, str(FAKE), "hang"], tmp_path / "log", os.environ
            )
            os.kill(os.getpid(), signal.SIGTERM)
            stack.enter_context(group)
        pytest.fail("the signal was lost")
    assert not group.members()


def test_a_ready_server_that_ignores_sigterm_fails_the_demo(fake, capfd, monkeypatch):
    def ready(server, *_):
        wait_until(lambda: len(server.members()) == 3)

    def nothing(*_):
        pass

    monkeypatch.setattr(demo, "wait_for_health", ready)
    monkeypatch.setattr(demo, "chat", nothing)
    monkeypatch.setattr(demo, "run_bench", nothing)
    monkeypatch.setattr(demo, "STOP_GRACE_S", 1.0)
    assert fake("stubborn") == 1
    err = capfd.readouterr().err
    assert "error: SIGTERM did not end" in err
    assert "fake_vllm.py" in err and "time.sleep(600)" in err


def test_a_closed_output_does_not_leave_the_server(mark, tmp_path, monkeypatch):
    """``make demo | head``: every print fails once the reader is gone."""
    monkeypatch.setattr(
        settings, "vllm_command", lambda *_: [sys.executable, str(FAKE), "hang"]
    )
    monkeypatch.setattr(settings, "on_cpu", lambda: True)

    class Closed(io.StringIO):
        failed = 0

        def write(self, text: str) -> int:
            if "importing" in text or "Loading" in text or self.failed:
                self.failed += 1
                raise BrokenPipeError(32, "Broken pipe")
            return super().write(text)

    out = Closed()
    progress = demo.Progress(out, every_s=0.0)
    args = demo.parse(["--cache", str(tmp_path)])
    with process.Interrupts() as interrupts, pytest.raises(BrokenPipeError):
        demo.demo(args, progress, interrupts, tmp_path / "log")
    assert out.failed > 1


def test_stop_kills_what_ignores_sigterm(mark, tmp_path):
    group = process.Group(
        [sys.executable, str(FAKE), "stubborn"], tmp_path / "log", os.environ, 1.0
    )
    wait_until(lambda: "Loading" in (tmp_path / "log").read_text())
    # The child is in a session of its own and still known; the third is
    # multiprocessing's resource tracker.
    assert len(group.members()) == 3
    name = (tmp_path / "log").read_text().split("shared memory ")[1].split()[0]
    segment = Path("/dev/shm") / name
    assert segment.exists()
    killed = group.stop()
    assert len(killed) == 2 and str(FAKE) in killed[0]
    assert group.members() == [] and group.stop() == []
    assert not segment.exists()


def test_port_in_use_is_named(fake, capfd):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert fake("hang", "--port", str(port)) == 1
    err = capfd.readouterr().err
    assert f"error: --port={port} cannot be used on 127.0.0.1" in err
    assert "Address already in use" in err and "--port auto" in err


@pytest.mark.parametrize("port", ["0", "65536", "-1", "http", ""])
def test_a_port_that_is_none_is_named(port):
    with pytest.raises(demo.DemoError, match="is not a port; expected auto or 1 to"):
        demo.take_port(port)


def test_automatic_port_is_free():
    port = demo.take_port("auto")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", port))


def test_model_without_config_is_named(fake, capfd, tmp_path):
    assert fake("hang", "--model", str(tmp_path / "none")) == 1
    assert "has no config.json" in capfd.readouterr().err


# --- settings --------------------------------------------------------------------


def model(folder: Path, **config) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


HYBRID = ["linear_attention", "full_attention"]


@pytest.mark.parametrize(
    "config, expected",
    [
        (dict(dtype="float16", layer_types=HYBRID), True),
        (dict(torch_dtype="float16", layer_types=HYBRID), True),
        (dict(dtype="float16", text_config=dict(layer_types=HYBRID)), True),
        (dict(text_config=dict(dtype="float16", layer_types=HYBRID)), True),
        (dict(dtype="bfloat16", layer_types=HYBRID), False),
        (dict(dtype="float16", layer_types=["full_attention"]), False),
        (dict(dtype="float16"), False),
        (dict(layer_types=HYBRID), False),
    ],
)
def test_fp16_hybrids_are_cast_on_the_cpu(tmp_path, config, expected):
    path = model(tmp_path, **config)
    assert settings.needs_bfloat16(path) is expected
    options = settings.cpu_options(path, [], {}, 1)
    assert ("--dtype=bfloat16" in options) is expected
    assert "--dtype=bfloat16" not in settings.cpu_options(
        path, ["--dtype", "float16"], {}, 1
    )


def test_a_name_on_a_hub_is_not_looked_into():
    assert not settings.needs_bfloat16("org/model")


@pytest.mark.parametrize(
    "arguments, environ, expected",
    [
        ([], {}, ["--kv-cache-memory-bytes=7"]),
        (["--max-num-seqs=2"], {}, ["--kv-cache-memory-bytes=7"]),
        ([], {"VLLM_CPU_KVCACHE_SPACE": ""}, ["--kv-cache-memory-bytes=7"]),
        ([], {"VLLM_CPU_KVCACHE_SPACE": "2"}, []),
        (["--kv-cache-memory-bytes", "1G"], {}, []),
        (["--kv_cache_memory_bytes=1G"], {}, []),
    ],
)
def test_kv_cache_size_on_the_cpu(arguments, environ, expected):
    assert settings.cpu_options("org/model", arguments, environ, 7) == expected


def test_demo_options_by_platform():
    cpu = settings.demo_options("org/model", ["--seed=1"], {}, cpu=True)
    assert "--enforce-eager" in cpu
    assert f"--kv-cache-memory-bytes={settings.DEMO_KV_BYTES_ON_CPU}" in cpu
    assert cpu[-1] == "--seed=1"
    cuda = settings.demo_options("org/model", [], {}, cpu=False)
    assert cuda == list(settings.DEMO_OPTIONS)


def test_vllm_command_runs_this_installation():
    command = settings.vllm_command("--version")
    assert command[0] == sys.executable and command[2:] == ["--version"]


def test_vllm_missing_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(settings.sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(FileNotFoundError, match="vLLM is not installed.*pip install"):
        settings.vllm_command("serve")


@pytest.mark.parametrize("arguments", [[], [""], ["--port=1"]])
def test_serve_wants_a_model(arguments, capsys):
    assert serve.main(arguments) == 2
    assert "MODEL is not set\nusage: make serve MODEL=" in capsys.readouterr().err


@pytest.mark.parametrize("cpu", [True, False])
def test_serve_becomes_vllm(monkeypatch, cpu):
    replaced = []

    def execv(path, command):
        replaced.append((path, command))

    monkeypatch.setattr(os, "execv", execv)
    monkeypatch.setattr(settings, "on_cpu", lambda: cpu)
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    serve.main(["org/model", "--port=9"])
    [(path, command)] = replaced
    size = [f"--kv-cache-memory-bytes={settings.SERVE_KV_BYTES_ON_CPU}"] if cpu else []
    assert path == sys.executable
    assert command[2:] == ["serve", "org/model", *size, "--port=9"]


def test_processes_of_the_demo_go_round_proxies_and_networks():
    environment = settings.offline_environment({"http_proxy": "x", "KEPT": "1"})
    assert environment["KEPT"] == "1"
    assert "127.0.0.1" in environment["NO_PROXY"] == environment["no_proxy"]
    assert environment["HF_HUB_OFFLINE"] == "1"


# --- the server's log ------------------------------------------------------------

LOG = """\
Triton is installed, but doesn't include CPU backend. Disabling Triton.
(APIServer pid=6) INFO 11-29 23:40:20 [api_utils.py:347]        █     █     █▄   ▄█
(EngineCore pid=7) INFO 11-29 23:40:27 [core.py:133] Initializing an engine
(EngineCore pid=7) INFO 11-29 23:40:27 [omp.py:185] \tlocal_world_size=1
(Worker pid=8) INFO 11-29 23:40:35 [interface.py:1096] Setting attention block size to \
384 tokens to ensure that
(Worker pid=8) INFO 11-29 23:40:35 [interface.py:1096] Setting attention block size to \
384 tokens to ensure that
(EngineCore pid=7) INFO 11-29 23:40:35 [kv.py:2] CPU KV cache size: 465,920 tokens
Loading shards:   0% Completed | 0/1\rLoading shards: 100%|##| 1/1
(APIServer pid=6) INFO 11-29 23:40:39 [launcher.py:195] Route: /docs, Methods: GET
(EngineCore pid=7) ERROR 11-29 23:40:40 [core.py:9] Traceback (most recent call last):
(EngineCore pid=7) ERROR 11-29 23:40:40 [core.py:9]   raise ValueError("No room")
(EngineCore pid=7) ERROR 11-29 23:40:40 [core.py:9] ValueError: No room
Traceback (most recent call last):
RuntimeError: Engine core initialization failed. See root cause above.
"""


@pytest.fixture
def lines(tmp_path):
    path = tmp_path / "server.log"
    path.write_text(LOG, newline="")
    return serverlog.read(path)


def test_activity_is_the_last_telling_line(lines):
    assert serverlog.activity(lines) == "CPU KV cache size: 465,920 tokens"
    assert serverlog.activity(lines[:4]) == "Initializing an engine"
    assert serverlog.activity(lines[:2]) == ""


def test_cause_is_the_first_error_and_not_its_echo(lines):
    assert serverlog.cause(lines) == "ValueError: No room"
    assert serverlog.cause(lines[-3:]) == ""
    usage = ["usage: vllm serve", "vllm serve: error: argument --port: invalid"]
    assert serverlog.cause(usage) == usage[1]
    details = ["pydantic.ValidationError: 1 error", "  too long", "", "  more"]
    assert serverlog.cause(details) == "pydantic.ValidationError: 1 error\n  too long"


def test_memory_lines_once_each(lines):
    assert serverlog.memory(lines) == [
        "Setting attention block size to 384 tokens to ensure that",
        "CPU KV cache size: 465,920 tokens",
    ]


def test_the_memory_table_is_shown_whole():
    table = [
        "Memory of M on CPU memory node 0, MiB (measured at start-up)",
        "  may be used                         22,177.1  0.92 of 24,105.6",
        "  weights                                -18.2",
        "  KV cache, --kv-cache-memory-bytes      256.0  at most 19,971.6",
        "  needed: 1 request of 2,048 tokens        4.9  of it states 2.2",
        "  fits: 116,394 tokens in blocks of 384, 56.83 requests of 2,048 tokens",
    ]
    noise = ["  6 x model.layers.0.linear_attn     mamba    3    384     68.2 %"]
    log = [f"INFO 11-30 04:47:38 [admission.py:119] {x}" for x in table + noise]
    assert serverlog.memory(log) == table


def test_progress_bar_is_its_last_state(lines):
    assert serverlog.advance(lines) == "Loading shards: 100%|##| 1/1"
    assert serverlog.advance([]) == ""


def test_a_log_that_is_not_there_yet_is_empty(tmp_path):
    assert serverlog.read(tmp_path / "none") == []


def test_answers_cannot_drive_the_terminal():
    assert demo.printable("a\x1b[2J\n\u202e\x00é") == "a\\x1b[2J\\n\\u202e\\x00é"


def test_bench_table_is_cut_out():
    table = ["==== Result ====", "Failed requests: 0", "======"]
    assert demo.bench_table(["noise", *table, "tip"]) == table
    assert demo.bench_table(["noise"]) == []
