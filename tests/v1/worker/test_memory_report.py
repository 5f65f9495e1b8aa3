# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the ranks report, and their worst."""

import json
from dataclasses import fields

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.v1.worker.memory_report import StartupMemory, worst

ONE = StartupMemory(
    rank=0,
    total=100,
    free_at_start=90,
    requested=80,
    weights=30,
    activation_peak=10,
    activation_shape="1 x 8192",
    persistent=3,
    non_torch=4,
    graphs_estimated=2,
    graphs_reserved=2,
    kv_budget=31,
    shapes=(("1 x 8192", 10), ("16 x 512", 9)),
    profile="truthful",
    profile_ms=1500,
)
TWO = StartupMemory(
    rank=1,
    total=99,
    free_at_start=91,
    requested=79,
    weights=20,
    activation_peak=25,
    activation_shape="16 x 512",
    persistent=2,
    non_torch=5,
    graphs_captured=7,
    kv_budget=27,
    shapes=(("1 x 8192", 11), ("16 x 512", 25)),
    profile="truthful",
    profile_ms=1400,
)


@pytest.fixture
def should_do_global_cleanup_after_test() -> bool:
    """Upstream's conftest asks; nothing here starts an engine."""
    return False


def test_worst_of_two():
    assert worst([ONE, TWO]) == StartupMemory(
        rank=1,
        total=99,
        free_at_start=90,
        requested=79,
        weights=30,
        activation_peak=25,
        activation_shape="16 x 512",
        persistent=3,
        non_torch=5,
        graphs_estimated=2,
        graphs_reserved=2,
        graphs_captured=7,
        kv_budget=27,
        shapes=(("1 x 8192", 11), ("16 x 512", 25)),
        profile="truthful",
        profile_ms=1500,
    )


def test_one_rank_is_its_own_worst():
    assert worst([ONE]) == ONE


def test_no_rank_is_refused():
    with pytest.raises(ValueError, match="no rank reported"):
        worst([])


sizes = st.integers(-(2**40), 2**40)
shapes = st.lists(st.tuples(st.sampled_from(["1 x 8", "2 x 4"]), sizes), max_size=2)
reports = st.builds(
    StartupMemory,
    **{f.name: sizes for f in fields(StartupMemory) if f.type is int},
    activation_shape=st.sampled_from(["1 x 8", "2 x 4"]),
    shapes=shapes.map(dict).map(lambda peaks: tuple(peaks.items())),
)


@settings(deadline=None)
@given(reports)
def test_a_report_crosses_a_wire(report):
    there = json.loads(json.dumps(report.to_dict()))
    assert StartupMemory.from_dict(there) == report


@settings(deadline=None)
@given(st.lists(reports, min_size=1, max_size=4))
def test_no_rank_is_worse_than_the_worst(ranks):
    result = worst(ranks)
    for rank in ranks:
        assert result.kv_budget <= rank.kv_budget
        assert result.requested <= rank.requested
        assert result.activation_peak >= rank.activation_peak
        assert result.weights >= rank.weights
        for name, size in rank.shapes:
            assert dict(result.shapes)[name] >= size
    assert worst([*ranks, *ranks]) == result


def test_an_unknown_field_is_refused():
    with pytest.raises(ValueError, match=r"unknown fields \['kv'\]"):
        StartupMemory.from_dict(ONE.to_dict() | {"kv": 1})
