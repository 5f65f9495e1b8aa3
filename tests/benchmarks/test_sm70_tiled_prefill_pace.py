# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What a row of the tiled prefill benchmark is timed by: after rests, unless told."""

import argparse
import importlib
import json
import sys
from pathlib import Path

import pytest

import benchmarks

KERNELS = Path(benchmarks.__path__[0]) / "kernels"


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(KERNELS))
    return importlib.import_module("benchmark_sm70_tiled_prefill")


@pytest.mark.parametrize(
    ("table", "given", "expected"),
    [
        ("prefill", {}, (2, 18, 0.06, 0)),
        ("prefill", {"rest": 0.1, "replays": 6}, (2, 6, 0.1, 0)),
        ("prefill", {"rest": 0}, (12, 7, 0, 0)),
        ("prefill", {"lead": 0.25}, (48, 6, 0, 0.25)),
        ("prefill", {"lead": 0.25, "rest": 0.5, "repeats": 3}, (3, 6, 0.5, 0.25)),
        ("prefill", {"device": "cpu"}, (12, 7, 0, 0)),
        ("prefill", {"device": "cpu", "lead": 0.25, "rest": 0.5}, (12, 7, 0.5, 0)),
        ("decode", {}, (12, 7, 0, 0)),
        ("decode", {"lead": 0.25}, (12, 7, 0, 0)),
        ("threshold", {"rest": 0.5}, (12, 7, 0.5, 0)),
    ],
)
def test_the_pace_of_a_table(benchmark, table, given, expected):
    options = {"device": "cuda", "repeats": None, "replays": None, "rest": None}
    options |= {"lead": 0.0} | given
    pace = benchmark.pace_of(table, argparse.Namespace(**options))
    assert (pace.repeats, pace.replays, pace.rest_s, pace.lead_s) == expected


def test_every_table_of_a_run_is_in_the_file(benchmark, monkeypatch, tmp_path, capsys):
    file = tmp_path / "rows.json"
    monkeypatch.setattr(
        sys,
        "argv",
        ["benchmark", "--device", "cpu", "--projections", "out", "--tp", "4"]
        + ["--tokens", "65", "--decode-tokens", "1", "--threshold-tokens", "2"]
        + ["--repeats", "1", "--json", str(file)],
    )
    benchmark.main()
    written = json.loads(file.read_text())
    assert [row["table"] for row in written["rows"]] == list(benchmark.TABLES)
    prefill = written["rows"][0]
    assert prefill["same_bits"] and prefill["tokens"] == 65
    pace = {"repeats": 1, "replays": 7, "rest_s": 0.0, "lead_s": 0.0}
    assert written["paces"] == {table: pace for table in benchmark.TABLES}
    assert written["machine"] in capsys.readouterr().out
