# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the gate lets through and what it does not, without a server."""

import itertools
import json
import signal
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import httpx
import pytest

from benchmarks.needle import task
from tools.demo.__main__ import DemoError
from tools.demo.process import Group
from tools.gate import __main__ as gate
from tools.gate import bench, client, server
from tools.gate.bench import Speed
from tools.gate.client import Answer
from tools.gate.features import FEATURES, Feature

FEATURE = Feature(
    name="a feature",
    switch="VLLM_KV_PAGE_PLAN",
    off={"VLLM_KV_PAGE_PLAN": "0"},
    checkpoint="some",
    identical=True,
    fast=("cpu",),
    why="it says so",
)


@pytest.fixture
def world(monkeypatch, tmp_path):
    """Servers that answer right at one speed; a test spoils one of them."""
    spoilt = SimpleNamespace(
        answer=None, tokens=None, slower=1.0, noise=0.0, started=[], waited=[], dead=[]
    )
    spoilt.ended, spoilt.left = [], []

    def is_off(where: str) -> bool:
        return where == "off"

    @contextmanager
    def starting(model, arguments, environ, log, *, environment=None):
        spoilt.started.append((dict(environ), list(arguments), environment))
        side = "off" if log.stem.endswith("off") else "on"

        def wait():
            spoilt.waited.append((log.stem, len(spoilt.started)))
            if spoilt.dead and spoilt.dead[0] == log.stem:
                raise DemoError(f"{spoilt.dead.pop(0)} ended", log)

        yield SimpleNamespace(
            url=side,
            log=log,
            wait=wait,
            terminate=lambda: spoilt.ended.append(side),
            stop=lambda: spoilt.ended.append(f"{side} of {len(spoilt.started)}"),
        )
        spoilt.left.append(side)

    @contextmanager
    def opened(url):
        yield url

    def ask(http, sample, turn=0):
        value = sample.turns[turn][1]
        if not is_off(http) and spoilt.answer:
            return spoilt.answer(value)
        return Answer(value, "stop", tuple(value.encode()))

    def continuation(http, prompt, count):
        if not is_off(http) and spoilt.tokens:
            return spoilt.tokens
        return tuple(range(count))

    def run(target, tokenizer, load, seed):
        slower = spoilt.slower() if callable(spoilt.slower) else spoilt.slower
        if is_off(target.url):
            slower = 1 + spoilt.noise * (seed - 2)
        return Speed(100 / slower, 10 * slower, 1 * slower)

    monkeypatch.setattr(server, "starting", starting)
    monkeypatch.setattr(client, "client", opened)
    monkeypatch.setattr(client, "ask", ask)
    monkeypatch.setattr(client, "continuation", continuation)
    monkeypatch.setattr(bench, "run", run)
    monkeypatch.setattr(gate, "FEATURES", (FEATURE,))
    monkeypatch.setattr(gate.settings, "on_cpu", lambda: True)

    def go(*arguments: str) -> tuple[int, dict]:
        report = tmp_path / "gate.json"
        options = [f"--out={tmp_path}", "--lengths=300,500", "--texts=2", *arguments]
        status = gate.main(options)
        return status, json.loads(report.read_text()) if report.exists() else {}

    spoilt.go = go
    return spoilt


def test_a_fork_that_keeps_its_promises_passes(world, capsys):
    status, report = world.go()
    assert status == 0
    (row,) = report["rows"]
    # Two lengths, two texts of each, two questions a text.
    assert (row["asked"], row["right_on"], row["right_off"]) == (8, 8, 8)
    assert row["identical"] and not row["lost"] and not row["failures"]
    assert row["pairs"][-1]["ratio"] == dict(tokens_per_s=1.0, ttft_ms=1.0, tpot_ms=1.0)
    assert (
        "| a feature | some | 8, 8 of 8 | same, promised |" in capsys.readouterr().out
    )
    on, off = world.started
    assert (on[0], off[0]) == ({}, {"VLLM_KV_PAGE_PLAN": "0"})
    assert on[1] == off[1]


@pytest.mark.parametrize(
    ("field", "value", "failure"),
    [
        ("answer", lambda v: Answer("0", "stop", (0,)), "lost answer: 300 tokens"),
        ("answer", lambda v: Answer(v, "length", (0,)), "(length)"),
        ("tokens", (1, 2, 3), "tokens differ, but it says so"),
        ("slower", 1.04, "time per token 1.040 times worse, expected at most 1.03 +"),
    ],
)
def test_a_broken_promise_fails(world, field, value, failure, capsys):
    setattr(world, field, value)
    status, report = world.go()
    assert status == 1
    assert failure in "\n".join(report["rows"][0]["failures"])
    assert "FAIL" in capsys.readouterr().out


def test_a_ratio_within_the_controls_own_spread_passes(world):
    """Three runs of the control, 2 % apart: 1.04 is not told from 1.03, 1.06 is."""
    world.noise = 0.02
    world.slower = 1.04
    status, report = world.go("--runs=3")
    assert status == 0
    assert report["rows"][0]["pairs"][-1]["spread"]["ttft_ms"] == pytest.approx(0.02)
    world.slower = 1.06
    assert world.go("--runs=3")[0] == 1


def test_what_is_slow_is_measured_again_on_new_servers(world, capsys):
    """Two servers of one build differ by more than their own runs do."""
    world.slower = lambda: 1.5 if len(world.started) == 2 else 0.9
    status, report = world.go("--runs=3")
    assert status == 0
    (row,) = report["rows"]
    assert [pair["ratio"]["tpot_ms"] for pair in row["pairs"]] == [1.5, 0.9]
    assert row["asked"] == 8  # its answers are not asked for again
    # The first pair has ended before the second starts, the control first.
    assert world.left == ["off", "on", "on", "off"]
    assert [stem for stem, _ in world.waited] == [
        "a-feature-on",
        "a-feature-off",
        "a-feature-2-off",
        "a-feature-2-on",
    ]
    said = capsys.readouterr().out
    assert "again, on new servers: throughput 1.500 times worse" in said
    assert "| pass, 2 pairs of servers |" in said


def test_servers_that_started_ahead_have_ended_before_new_ones_start(world):
    """What they give back would be in the new ones' profile of memory."""
    world.slower = 1.5
    assert world.go("--runs=3", "--at-once=2")[0] == 1
    assert world.ended[:4] == ["on", "off", "on of 2", "off of 2"]
    assert world.waited[-2:] == [("a-feature-2-off", 3), ("a-feature-2-on", 4)]


def test_what_is_slow_on_every_pair_fails(world):
    world.slower = 1.5
    status, report = world.go("--runs=3", "--pairs=3")
    assert status == 1
    assert len(report["rows"][0]["pairs"]) == 3
    assert len(world.started) == 6
    world.started.clear()
    assert world.go("--runs=3", "--pairs=1")[0] == 1
    assert len(world.started) == 2


def test_a_second_pair_that_does_not_start_fails_the_row(world):
    world.slower, world.dead = 1.5, ["a-feature-2-off"]
    status, report = world.go("--runs=3")
    assert status == 1
    assert report["rows"][0]["failures"][0] == "a-feature-2-off ended"


def test_what_is_not_promised_does_not_fail(world, monkeypatch):
    loose = Feature(
        **{**FEATURE.__dict__, "identical": False, "fast": ("cuda",)},
    )
    monkeypatch.setattr(gate, "FEATURES", (loose,))
    world.tokens, world.slower = (1, 2, 3), 2.0
    status, report = world.go()
    assert status == 0
    assert report["rows"][0]["pairs"][-1]["ratio"]["tpot_ms"] == 2.0
    assert not report["rows"][0]["identical"]


def test_a_checkpoint_that_answers_nothing_fails(world, monkeypatch):
    """Wrong both ways: no answer is lost, and nothing is shown."""
    monkeypatch.setattr(client, "ask", lambda *_: Answer("", "stop", ()))
    status, report = world.go()
    assert status == 1
    assert report["rows"][0]["failures"] == [
        "0 of 8 answers right, expected at least 90%"
    ]


def test_what_has_not_landed_is_said(world, monkeypatch, capsys):
    missing = Feature(**{**FEATURE.__dict__, "switch": "VLLM_NO_SUCH_SWITCH"})
    elsewhere = Feature(
        **{**FEATURE.__dict__, "name": "another", "platforms": ("cuda",)}
    )
    monkeypatch.setattr(gate, "FEATURES", (missing, elsewhere))
    status, _ = world.go()
    said = capsys.readouterr().out
    assert status == 1  # a gate that checks nothing does not pass
    assert "a feature: has not landed (VLLM_NO_SUCH_SWITCH)" in said
    assert "another: nothing to compare on cpu" in said


def test_a_signal_stops_the_servers(world, monkeypatch, capsys):
    """The contexts of both servers are left, so nothing runs on."""
    left = []

    @contextmanager
    def starting(model, arguments, environ, log, **_):
        try:
            yield SimpleNamespace(url="on", log=log, wait=lambda: None)
        finally:
            left.append(log.stem)

    def ask(*_):
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(server, "starting", starting)
    monkeypatch.setattr(client, "ask", ask)
    assert world.go()[0] == 128 + signal.SIGTERM
    assert sorted(left) == ["a-feature-off", "a-feature-on"]
    assert "stopped by SIGTERM" in capsys.readouterr().err


def test_an_unknown_feature_is_named(world, capsys):
    assert world.go("--features=nothing")[0] == 2
    assert "--features=nothing: expected some of a feature" in capsys.readouterr().err


TWO = (FEATURE, Feature(**{**FEATURE.__dict__, "name": "another"}))


def test_a_server_that_does_not_start_fails_its_row_alone(world, monkeypatch, capsys):
    monkeypatch.setattr(gate, "FEATURES", TWO)
    world.dead = ["a-feature-off"]
    status, report = world.go()
    assert status == 1
    first, second = report["rows"]
    assert first["failures"] == ["a-feature-off ended"]
    assert "| 0, 0 of 0 | -, promised | - | - | - | FAIL |" in capsys.readouterr().out
    assert second["asked"] and not second["failures"]


def test_a_request_that_fails_fails_its_row(world, monkeypatch):
    def ask(*_):
        raise httpx.ReadTimeout("too slow")

    monkeypatch.setattr(client, "ask", ask)
    status, report = world.go()
    assert status == 1
    assert report["rows"][0]["failures"] == ["ReadTimeout: too slow"]


def test_servers_may_start_ahead(world, monkeypatch):
    """The first alone, the others together; each pair is asked to end in its turn,
    and all are left in the end."""
    monkeypatch.setattr(gate, "FEATURES", TWO)
    status, report = world.go("--at-once=2", "--server-option=--enforce-eager")
    assert status == 0
    assert [row["asked"] for row in report["rows"]] == [8, 8]
    assert world.waited[0] == ("a-feature-on", 1)
    assert {count for _, count in world.waited[1:]} == {4}
    # In its turn, and again before any is awaited.
    assert world.ended == ["on", "off"] * 2 + ["off", "on"] * 2
    assert len(world.left) == len(world.started) == 4
    assert all(start[1][-1] == "--enforce-eager" for start in world.started)
    assert report["server_options"] == ["--enforce-eager"]


def test_who_does_not_start_ahead_starts_again_in_its_turn(world, monkeypatch, capsys):
    monkeypatch.setattr(gate, "FEATURES", TWO)
    world.dead = ["another-on"]
    status, report = world.go("--at-once=2")
    assert status == 0
    assert "another starts again in its turn: another-on ended" in (
        capsys.readouterr().out
    )
    assert len(world.started) == len(world.left) == 6
    assert [row["asked"] for row in report["rows"]] == [8, 8]


@pytest.mark.parametrize("option", ["--at-once", "--pairs"])
def test_none_is_refused(world, option, capsys):
    assert world.go(f"{option}=0")[0] == 2
    assert f"{option}=0: expected 1 or more" in capsys.readouterr().err


def test_stock_is_served_from_its_environment(world, tmp_path, monkeypatch):
    monkeypatch.setattr(server, "check_stock", lambda _: None)
    status, report = world.go(f"--stock={tmp_path}")
    assert status == 0
    assert [row["feature"] for row in report["rows"]] == [
        "a feature",
        "against stock vLLM",
    ]
    assert [start[2] for start in world.started] == [None, None, None, tmp_path]


def test_stock_may_be_compared_alone(world, tmp_path, monkeypatch):
    monkeypatch.setattr(server, "check_stock", lambda _: None)
    status, report = world.go("--features=", f"--stock={tmp_path}")
    assert status == 0
    assert [row["feature"] for row in report["rows"]] == ["against stock vLLM"]


def test_an_environment_without_vllm_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="--stock takes a virtual environment"):
        server.command(tmp_path, "serve")


def other_environment(folder: Path, python: str) -> Path:
    (folder / "bin").mkdir()
    (folder / "bin" / "vllm").touch()
    (folder / "bin" / "python").write_text(f"#!/bin/sh\n{python}\n")
    (folder / "bin" / "python").chmod(0o755)
    return folder


def test_stock_must_be_another_vllm(world, tmp_path, capsys):
    """This fork next to itself would show nothing."""
    environment = other_environment(tmp_path, "echo 'ModuleSpec(...)'")
    assert world.go(f"--stock={environment}")[0] == 2
    said = capsys.readouterr().err
    assert "expected a vLLM without vllm.v1.core.kv_page_plan" in said
    assert "found ModuleSpec(...)" in said


def test_stock_does_not_see_this_forks_path(tmp_path, monkeypatch):
    """On PYTHONPATH the fork would come before what the environment has."""
    monkeypatch.setenv("PYTHONPATH", "somewhere")
    environment = other_environment(tmp_path, 'test -z "$PYTHONPATH" && echo None')
    server.check_stock(environment)
    assert "PYTHONPATH" in server.environment_of(None)


def test_this_installation_is_served_by_its_module():
    line = server.command(None, "serve", "model")
    assert line == [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", "model"]


def test_the_features_are_switches_of_their_own():
    names = [feature.name for feature in FEATURES]
    assert len(set(names)) == len(names)
    # They are given with commas between.
    assert not [name for name in names if "," in name]
    for feature in FEATURES:
        assert feature.switch in feature.off
        assert feature.off != feature.on
        assert feature.why


def test_medians_and_ratios():
    runs = [Speed(10, 3, 1), Speed(20, 1, 3), Speed(30, 2, 2)]
    assert bench.medians(runs) == Speed(20, 2, 2)
    ratio = bench.ratios(Speed(50, 12, 3), Speed(100, 10, 4))
    assert ratio == Speed(2.0, 1.2, 0.75)
    assert bench.spread(runs) == Speed(0.5, 0.5, 0.5)
    own = Speed(1.0, 0.1, 0.1)
    (failure,) = bench.excesses(ratio, own, 1.03)
    assert "time to first token 1.200 times worse" in failure


def test_runs_are_interleaved(world, monkeypatch):
    """One run each to warm up, then in turns, each side first as often."""
    order = []

    def run(target, tokenizer, load, seed):
        order.append((target.url, load.requests, seed))
        return Speed(1, 1, 1)

    monkeypatch.setattr(bench, "run", run)
    assert world.go("--runs=4", "--requests=8")[0] == 0
    warm, measured = order[:2], order[2:]
    assert {(side, n) for side, n, _ in warm} == {("on", 4), ("off", 4)}
    sides = [side for side, _, _ in measured]
    assert sides == ["off", "on", "on", "off"] * 2
    assert [seed for *_, seed in measured] == [1, 1, 2, 2, 3, 3, 4, 4]


def test_a_request_asks_one_question():
    sample = next(itertools.islice(task.samples("test", 0, 300, 4, 2), 1))
    body = client.request(sample, 1, stream=True)
    assert body["messages"] == sample.messages(1)
    assert body["temperature"] == 0 and body["stream"] is True
    assert body["max_tokens"] > task.MAX_DIGITS


@pytest.mark.parametrize(
    ("text", "reason", "expected"),
    [
        ("1234", "stop", True),
        ("1234", "length", False),
        ("1234 ", "stop", False),
        ("", "stop", False),
    ],
)
def test_an_answer_is_right_only_if_exact_and_ended(text, reason, expected):
    assert Answer(text, reason, ()).is_right("1234") is expected


def test_metrics_are_summed_over_labels(monkeypatch):
    page = 'a:b{x="1",y="2"} 1.5\na:b{x="2"} 2\n# TYPE a:b gauge\nc 1e3\n'
    monkeypatch.setattr(server, "fetch", lambda *_, **__: page)
    served = server.Server("http://nowhere", cast(Group, None), Path("log"))
    assert served.metrics() == {"a:b": 3.5, "c": 1000.0}

    monkeypatch.setattr(server, "fetch", lambda *_, **__: None)
    with pytest.raises(RuntimeError, match="does not answer"):
        served.metrics()


def test_options_of_a_server(tmp_path):
    """On a CPU an FP16 hybrid is cast; two servers share a GPU; the last wins."""
    config = {"dtype": "float16", "layer_types": ["linear_attention"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    mine = ("--max-model-len=512",)
    on_cpu = server.options(tmp_path, mine, True)
    assert on_cpu[-1:] == [*mine]
    assert "--dtype=bfloat16" in on_cpu and "--enforce-eager" in on_cpu
    assert f"--kv-cache-memory-bytes={server.KV_BYTES}" in on_cpu
    on_gpu = server.options(tmp_path, ("--kv-cache-memory-bytes=1",), False)
    assert "--gpu-memory-utilization=0.4" in on_gpu
    assert "--attention-backend=TRITON_ATTN" in on_gpu
    assert [o for o in on_gpu if "kv-cache-memory" in o] == [
        "--kv-cache-memory-bytes=1"
    ]
    assert not [o for o in on_gpu if "dtype" in o or "eager" in o]
