# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""KV cache groups of one engine take turns on one scratch of the decode kernel."""

import gc
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention import decode_scratch
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
from vllm.v1.attention.decode_scratch import DECODE_SCRATCH, share_decode_scratch
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.worker.utils import AttentionGroup

NEEDLE = os.path.join(
    os.path.dirname(__file__), "../../../benchmarks/needle/checkpoints/dense-fp16"
)


def an_engine(ubatching: bool = False) -> Any:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(use_ubatching=ubatching),
        compilation_config=SimpleNamespace(static_forward_context={}),
    )


def a_builder(engine: Any, rows: int = 4, device: str = "cpu") -> Any:
    """A builder as far as its scratch goes: [rows, 6, 2], FP32."""
    builder = SimpleNamespace()
    for name in DECODE_SCRATCH:
        setattr(builder, name, torch.empty(rows, 6, 2, device=device))
    share_decode_scratch(engine, [builder])
    return builder


def places(builder: Any) -> list[int]:
    return [getattr(builder, name).data_ptr() for name in DECODE_SCRATCH]


def test_groups_of_an_engine_share() -> None:
    engine = an_engine()
    one, two = a_builder(engine), a_builder(engine)
    assert places(one) == places(two)
    # The three tensors of a builder are three.
    assert len(set(places(one))) == 3


def test_another_shape_with_as_many_elements_shares_memory_not_shape() -> None:
    engine = an_engine()
    one = a_builder(engine)
    two = SimpleNamespace(softmax_segm_output=torch.empty(2, 24))
    share_decode_scratch(engine, [two])
    assert two.softmax_segm_output.shape == (2, 24)
    assert two.softmax_segm_output.data_ptr() == one.softmax_segm_output.data_ptr()


@pytest.mark.parametrize(
    "other",
    [
        lambda engine: a_builder(engine, rows=5),
        lambda engine: a_builder(an_engine()),
        lambda engine: a_builder(engine, device="meta"),
    ],
    ids=["more tokens", "another engine", "another device"],
)
def test_what_differs_is_not_shared(other: Any) -> None:
    engine = an_engine()
    one, two = a_builder(engine), other(engine)
    assert not set(places(one)) & set(places(two))


def test_builders_without_a_scratch_stay_as_they_are() -> None:
    builder = SimpleNamespace(num_heads_q=4)
    share_decode_scratch(an_engine(), [builder])
    assert vars(builder) == {"num_heads_q": 4}


def test_micro_batches_share_nothing() -> None:
    engine = an_engine(ubatching=True)
    assert not set(places(a_builder(engine))) & set(places(a_builder(engine)))


def test_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_SHARE_DECODE_SCRATCH", "0")
    engine = an_engine()
    one, two = a_builder(engine), a_builder(engine)
    assert not set(places(one)) & set(places(two))


def test_the_scratch_goes_with_its_builders() -> None:
    """As the profile's throw-away KV cache does: later ones make a new one."""
    gc.collect()
    before = len(decode_scratch._shared)
    engine = an_engine()
    builders = [a_builder(engine), a_builder(engine)]
    assert len(decode_scratch._shared) == before + 3
    builders.clear()
    gc.collect()
    assert len(decode_scratch._shared) == before


def test_upstreams_groups_are_hooked() -> None:
    """Two groups have one scratch, of upstream's shape."""
    config: VllmConfig = EngineArgs(
        model=NEEDLE, skip_tokenizer_init=True, enforce_eager=True
    ).create_engine_config()
    spec = FullAttentionSpec(
        block_size=16, num_kv_heads=2, head_size=64, dtype=torch.float16
    )
    groups = [AttentionGroup(TritonAttentionBackend, [], spec, i) for i in range(2)]
    with set_current_vllm_config(config):
        for group in groups:
            group.create_metadata_builders(config, torch.device("cpu"))
    one, two = (group.get_metadata_builder() for group in groups)
    assert places(one) == places(two)
    rows, heads, segments, width = two.softmax_segm_output.shape
    assert (heads, segments) == (one.num_heads_q, one.num_par_softmax_segments)
    assert rows * one.num_heads_kv <= 128 < (rows + 1) * one.num_heads_kv
    assert width >= one.headdim
