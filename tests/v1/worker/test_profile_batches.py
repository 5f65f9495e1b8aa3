# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Which batches are profiled, and that the scheduler could have sent them."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.multimodal.inputs import PlaceholderRange
from vllm.utils.math_utils import cdiv
from vllm.v1.worker.profile_batches import (
    Batch,
    Limits,
    Media,
    chunk,
    encoder_step,
    longest,
    most_chunks,
    most_requests,
    settle,
    split,
    steps,
)

SERVER = Limits(tokens=8192, sequences=128, model_len=65536, context=True)
DFLASH = replace(SERVER, drafts=7, batched=8192, draft_slots=7)


@pytest.fixture
def should_do_global_cleanup_after_test() -> bool:
    """Upstream's conftest asks; nothing here starts an engine."""
    return False


@pytest.mark.parametrize(
    "limits, name",
    [
        (SERVER, "1 x 8192"),
        (replace(SERVER, model_len=4097), "2 x 4096"),
        # No prompt fills a step: as many as may share it, as long as they may be.
        (replace(SERVER, model_len=4097, sequences=1), "1 x 4096"),
        (replace(SERVER, model_len=1025, sequences=4), "4 x 1024"),
        (replace(SERVER, model_len=1), "128 x 1"),
        (DFLASH, "1 x 8185"),
    ],
)
def test_the_longest_prompt(limits, name):
    assert longest(limits).name == name


@pytest.mark.parametrize(
    "limits, requests, name",
    [
        (SERVER, 16, "16 x 512"),
        (SERVER, 128, "128 x 64"),
        (SERVER, 999, "128 x 64"),
        (replace(SERVER, sequences=9999), 9999, "8192 x 1"),
        (replace(SERVER, model_len=4097), 1, "2 x 4096"),
        # 128 x 64 tokens and 7 slots each are 9,088: eight slots a request.
        (DFLASH, 128, "128 x 57"),
    ],
)
def test_many_short_prompts(limits, requests, name):
    assert split(limits, requests).name == name


@pytest.mark.parametrize(
    "limits, requests, name",
    [
        (SERVER, 128, "126 x 65"),
        # The 27B: 154 tokens each are three chunks already.
        (SERVER, 53, "53 x 154"),
        (SERVER, 16, "15 x 546"),
        (SERVER, 64, "63 x 130"),
        (SERVER, 1, "1 x 8192"),
        (replace(SERVER, sequences=9999), 9999, "8192 x 1"),
        # No prompt is longer than a chunk.
        (replace(SERVER, model_len=65), 128, "128 x 64"),
        (replace(SERVER, model_len=66), 128, "126 x 65"),
        (DFLASH, 128, "113 x 65"),
    ],
)
def test_the_most_chunks(limits, requests, name):
    assert most_chunks(limits, requests).name == name


@given(
    tokens=st.integers(1, 9000),
    sequences=st.integers(1, 300),
    model_len=st.integers(1, 9000),
    requests=st.integers(1, 300),
    slots=st.integers(0, 8),
)
def test_the_most_chunks_can_be_sent(tokens, sequences, model_len, requests, slots):
    limits = Limits(
        tokens, sequences, model_len, True, slots, tokens * (1 + slots), slots
    )
    batch, equal = most_chunks(limits, requests), split(limits, requests)

    def chunks(batch):
        return sum(cdiv(length, 64) for length in batch.lengths)

    assert chunks(batch) >= chunks(equal)
    assert batch.total == limits.total(batch.requests)
    assert max(batch.lengths) <= limits.prompt
    assert batch.requests <= equal.requests


def test_uneven_lengths_fill_the_step():
    assert Batch(3, 8).lengths == [3, 3, 2]
    assert Batch(3, 8).name == "3 x 2"
    assert Batch(1, 8, context=24).name == "1 x 8 after 24"


@pytest.mark.parametrize(
    "limits, expected",
    [
        (SERVER, Batch(1, 8192, 57343)),
        # As long as a step: half of the prompt comes before.
        (replace(SERVER, model_len=8193), Batch(1, 4096, 4096)),
        (replace(SERVER, model_len=2), None),
        (replace(SERVER, context=False), None),
        # Eight places less: the token, the drafts and the one after them.
        (DFLASH, Batch(1, 8185, 65527 - 8185)),
    ],
)
def test_a_chunk_with_context(limits, expected):
    assert chunk(limits) == expected


@pytest.mark.parametrize(
    "blocks, expected", [(1, 1), (5, 1), (9, 2), (213, 53), (513, 128), (9999, 128)]
)
def test_the_kv_cache_bounds_the_requests(blocks, expected):
    """27B with FP16 KV: four groups, and a block of 784 tokens in one of them."""
    short = replace(SERVER, tokens=4096)
    assert (
        most_requests(short, blocks, lambda tokens: 3 + cdiv(tokens, 4096)) == expected
    )


def test_requests_with_one_group_and_small_blocks():
    """Tokens, not requests, fill the cache: 8192 tokens are 512 blocks of 16."""
    assert most_requests(SERVER, 513, lambda tokens: cdiv(tokens, 16)) == 128
    # One block less: the lengths that waste no block are gone.
    assert most_requests(SERVER, 512, lambda tokens: cdiv(tokens, 16)) == 1
    # Between the two, lengths that end in a block's middle need more.
    assert most_requests(SERVER, 560, lambda tokens: cdiv(tokens, 16)) == 128


@pytest.mark.parametrize(
    "memory, requests, expected",
    [
        # n prompts keep 182 n bytes, and their step takes 1,000 + 4 n of 20,000:
        # 102 have room. Next to the peak of 128 there is room for 101 only.
        (20_000, 102, 102),
        (20_000, 128, 102),
        (40_000, 128, 128),
        (0, 7, 1),
    ],
)
def test_a_step_has_room_next_to_its_own_peak(memory, requests, expected):
    asked = []

    def room_beside(count: int) -> int:
        asked.append(count)
        return max(1, (memory - 1000 - 4 * count) // 182)

    assert settle(requests, room_beside) == expected
    assert len(asked) <= 2


@given(
    st.integers(1, 200),
    st.lists(st.integers(0, 9), min_size=200, max_size=200),
    st.integers(0, 1500),
    st.integers(1, 20),
)
def test_settling_leaves_out_no_step_that_has_room(most, steps, memory, each):
    """Against a search: peaks that grow in any way with the number of prompts."""
    peaks = list(itertools.accumulate(steps))

    def room_beside(count: int) -> int:
        return max(1, (memory - peaks[count - 1]) // each)

    settled = settle(most, room_beside)
    assert 1 <= settled <= most
    assert settled >= max(n for n in range(1, most + 1) if n <= max(1, room_beside(n)))
    # What is promised for it leaves room for no more.
    assert settled == most or room_beside(settled) <= settled


def test_the_messages_of_a_batch():
    limits = replace(SERVER, tokens=10, drafts=2)
    step = steps(Batch(3, 8, 5), limits, [lambda n: cdiv(n, 4), lambda n: 1], 5)
    assert step.prefill.num_scheduled_tokens == {
        "_profile_0": 3,
        "_profile_1": 3,
        "_profile_2": 2,
    }
    assert step.prefill.total_num_scheduled_tokens == 8
    one, two, three = step.prefill.scheduled_new_reqs
    # 5 + 3 tokens and 3 to come are three blocks of four; two blocks a group.
    assert one.block_ids == ([1, 1, 1], [3])
    assert two.block_ids == ([2, 2, 2], [4])
    assert three.block_ids == ([1, 1, 1], [3])
    assert one.num_computed_tokens == 5
    assert len(one.prompt_token_ids) == len(one.prefill_token_ids) == 8
    assert one.sampling_params.prompt_logprobs is None
    decode = step.decode
    assert decode.num_scheduled_tokens == dict.fromkeys(
        ["_profile_0", "_profile_1", "_profile_2"], 3
    )
    assert decode.scheduled_cached_reqs.num_computed_tokens == [8, 8, 7]
    assert decode.scheduled_spec_decode_tokens["_profile_2"] == [0, 0]
    assert step.decode_name == "3 x 3 decode"
    assert step.end.finished_req_ids == {"_profile_0", "_profile_1", "_profile_2"}


def test_decode_takes_as_many_requests_as_a_step_has_tokens():
    limits = replace(SERVER, tokens=8, drafts=2)
    decode = steps(Batch(4, 8), limits, [lambda n: 1], 3).decode
    assert list(decode.num_scheduled_tokens) == ["_profile_0", "_profile_1"]
    limits = replace(limits, batched=8, draft_slots=2)
    assert (
        len(steps(Batch(4, 8), limits, [lambda n: 1], 3).decode.num_scheduled_tokens)
        == 1
    )


@pytest.mark.parametrize("model_len, decodes", [(10, True), (9, False)])
def test_no_decode_past_the_models_length(model_len, decodes):
    limits = Limits(tokens=8, sequences=2, model_len=model_len, context=True)
    step = steps(Batch(1, 8), limits, [lambda n: 1], 2)
    assert (step.decode is not None) == decodes


def test_too_few_blocks_are_refused():
    with pytest.raises(ValueError, match="2 blocks for 2 groups"):
        steps(Batch(1, 8), SERVER, [lambda n: 1, lambda n: 1], 2)


limits_ = st.builds(
    Limits,
    tokens=st.integers(1, 4096),
    sequences=st.integers(1, 300),
    model_len=st.integers(1, 10000),
    context=st.booleans(),
    drafts=st.integers(0, 8),
)
limits_ = st.one_of(
    limits_,
    limits_.map(
        lambda it: replace(
            it, batched=max(it.tokens, it.drafts + 1), draft_slots=it.drafts
        )
    ),
)


@settings(deadline=None)
@given(limits_, st.integers(1, 500), st.integers(2, 300), st.integers(1, 64))
def test_the_scheduler_could_send_it(limits, requests, blocks, block):
    """No step exceeds a limit of the scheduler, a block table or a block id."""

    def count(tokens: int) -> int:
        return cdiv(min(tokens, limits.model_len), block)

    batches = [longest(limits), split(limits, requests)]
    if with_context := chunk(limits):
        batches.append(with_context)
    for batch in batches:
        assert 1 <= batch.requests <= limits.sequences
        assert sum(batch.lengths) == batch.total <= limits.tokens
        assert batch.requests <= batch.total
        batched = batch.total + batch.requests * limits.draft_slots
        assert batched <= (limits.batched or limits.tokens)
        assert batch.context + max(batch.lengths) <= limits.prompt
        step = steps(batch, limits, [count], blocks)
        for new in step.prefill.scheduled_new_reqs:
            ids = new.block_ids[0]
            assert len(ids) <= cdiv(limits.model_len, block)
            assert all(1 <= i < blocks for i in ids)
        if step.decode is not None:
            decode = step.decode
            assert decode.total_num_scheduled_tokens <= limits.tokens
            assert set(decode.num_scheduled_tokens) <= step.end.finished_req_ids


@settings(deadline=None)
@given(limits_, st.integers(1, 2000), st.integers(1, 64))
def test_most_requests_have_room(limits, blocks, block):
    def count(tokens: int) -> int:
        return cdiv(tokens, block)

    most = most_requests(limits, blocks, count)
    assert longest(limits).requests <= most <= limits.requests
    if most > longest(limits).requests:
        assert sum(map(count, split(limits, most).lengths)) <= blocks - 1


IMAGES = Media(
    modality="image",
    tokens=[1, 7, 7, 7, 2, 1, 7, 7, 2, 0, 0],
    items=["one", "two"],
    positions=[PlaceholderRange(1, 3), PlaceholderRange(6, 2)],
    requests=3,
)


def test_the_messages_of_a_step_that_encodes():
    """Two images of 3 and 2 tokens in each prompt, whose 8 tokens are 2 or 3 of this
    step: the images are encoded whole, and nothing is decoded."""
    limits = Limits(tokens=8, sequences=4, model_len=64, context=True)
    step = encoder_step(IMAGES, limits, [lambda n: cdiv(n, 4), lambda n: 1], 5)
    names = ["_profile_0", "_profile_1", "_profile_2"]
    assert step.batch.name == "3 x 2 with 6 images"
    assert step.prefill.num_scheduled_tokens == dict(zip(names, [3, 3, 2]))
    assert step.prefill.total_num_scheduled_tokens == 8
    assert step.prefill.scheduled_encoder_inputs == dict.fromkeys(names, [0, 1])
    found = []
    for request in step.prefill.scheduled_new_reqs:
        assert request.prompt_token_ids == [1, 7, 7, 7, 2, 1, 7, 7]
        assert request.prefill_token_ids == request.prompt_token_ids
        features = request.mm_features
        assert [f.data for f in features] == ["one", "two"]
        assert [f.mm_position for f in features] == IMAGES.positions
        assert {f.modality for f in features} == {"image"}
        found += [f.identifier for f in features]
    # None is served from another's output, and all are dropped at the end.
    assert len(set(found)) == 6
    assert step.end.free_encoder_mm_hashes == found
    assert step.end.finished_req_ids == set(names)
    assert step.decode is None


@pytest.mark.parametrize(
    "limits, name",
    [
        # Text fills the step, which has room for more than the images.
        (SERVER, "3 x 2730 with 6 images"),
        (replace(SERVER, sequences=1), "1 x 8192 with 2 images"),
        # A place is kept for the token after a prompt: 8 of them end with the image.
        (replace(SERVER, model_len=9), "3 x 8 with 6 images"),
        (replace(SERVER, model_len=8), None),
    ],
)
def test_a_step_encodes_as_much_as_it_can(limits, name):
    step = encoder_step(IMAGES, limits, [lambda n: cdiv(n, 16)], 9)
    assert (step and step.batch.name) == name
    for request in step.prefill.scheduled_new_reqs if step else ():
        scheduled = step.prefill.num_scheduled_tokens[request.req_id]
        assert len(request.prompt_token_ids) == max(8, scheduled) < limits.model_len


@pytest.mark.parametrize(
    "tokens, requests", [(25, 3), (24, 3), (23, 2), (8, 1), (7, 0)]
)
def test_items_that_are_never_split(tokens, requests):
    """Prompts of 8 tokens, up to the end of their last image."""
    limits = Limits(tokens=tokens, sequences=4, model_len=64, context=True)
    media = replace(IMAGES, whole=True)
    assert media.share(limits) == requests
    step = encoder_step(media, limits, [lambda n: 1], 2)
    lengths = step.prefill.num_scheduled_tokens.values() if step else []
    assert len(lengths) == requests and all(length >= 8 for length in lengths)


def test_one_item_is_singular():
    one = replace(IMAGES, items=["one"], positions=IMAGES.positions[:1], requests=1)
    step = encoder_step(one, SERVER, [lambda n: 1], 2)
    assert step.batch.name == "1 x 8192 with 1 image"
    assert step.prefill.scheduled_new_reqs[0].prompt_token_ids[:6] == [1, 7, 7, 7, 4, 5]
