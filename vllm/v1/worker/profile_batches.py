# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The batches that a profile runs: which ones, and as what the scheduler sends.

Pure functions of numbers and specs; nothing here touches a device.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from vllm.sampling_params import SamplingParams
from vllm.utils.math_utils import cdiv
from vllm.v1.core.sched.output import (
    CachedRequestData,
    NewRequestData,
    SchedulerOutput,
)

if TYPE_CHECKING:
    from vllm.multimodal.inputs import (
        MultiModalFeatureSpec,
        MultiModalKwargsItem,
        PlaceholderRange,
    )

MIDDLE = 16
"""Requests of the batch between the longest and the shortest prompts."""

STATE_CHUNK = 64
"""Tokens that a state kernel takes at once: gated delta nets'."""

_VOCABULARY = 250
_PREFIX = "_profile_"


@dataclass(frozen=True)
class Limits:
    """What bounds a step of the scheduler.

    Attributes:
        tokens: most tokens of a step.
        sequences: most requests of a step.
        model_len: most tokens of a request, prompt and output together.
        context: whether a prompt may be split over steps or start after a cached
            prefix, so that a chunk reads an earlier context.
        drafts: draft tokens of a request, 0 without speculative decoding.
        batched: most tokens of a step with the draft's own slots; `tokens` when 0.
        draft_slots: tokens that a draft adds to each request of a step.

    """

    tokens: int
    sequences: int
    model_len: int
    context: bool
    drafts: int = 0
    batched: int = 0
    draft_slots: int = 0

    def total(self, requests: int) -> int:
        """Most tokens of a step with `requests` requests, less than one each when
        there are too many."""
        batched = (self.batched or self.tokens) - requests * self.draft_slots
        return min(self.tokens, batched, requests * self.prompt)

    @property
    def requests(self) -> int:
        """Most requests of a step, each with a token of its own."""
        batched = (self.batched or self.tokens) // (1 + self.draft_slots)
        return max(1, min(self.sequences, self.tokens, batched))

    @property
    def prompt(self) -> int:
        """Most tokens of a prompt that is still drafted for: a place is kept for
        the output, and for the drafts and the token after them."""
        return max(1, self.model_len - 1 - (self.drafts and self.drafts + 1))


@dataclass(frozen=True)
class Batch:
    """One step of prefill: `total` tokens of `requests` prompts of equal lengths.

    Attributes:
        requests: how many prompts.
        total: their tokens in this step; the first ones are one longer when it
            does not divide.
        context: tokens that each request has computed before.
        encoded: the multimodal items that the step encodes, such as "1 image".

    """

    requests: int
    total: int
    context: int = 0
    encoded: str = ""

    @property
    def lengths(self) -> list[int]:
        """Tokens of each request in this step."""
        each, longer = divmod(self.total, self.requests)
        return [each + (i < longer) for i in range(self.requests)]

    @property
    def name(self) -> str:
        """Such as "16 x 512", "1 x 8192 after 57343" or "1 x 8192 with 1 image"."""
        name = f"{self.requests} x {self.total // self.requests}"
        if self.encoded:
            name += f" with {self.encoded}"
        return f"{name} after {self.context}" if self.context else name


@dataclass(frozen=True)
class Media:
    """A prompt with the largest inputs of a multimodal encoder.

    Attributes:
        modality: of the items, such as "image".
        tokens: of the prompt, the items' placeholders included, and any others.
        items: what the processor made of each input.
        positions: where the items are in the prompt.
        requests: how many such prompts the encoder takes in one step.
        whole: whether the scheduler never splits an item between steps.

    """

    modality: str
    tokens: Sequence[int]
    items: Sequence["MultiModalKwargsItem | None"]
    positions: Sequence["PlaceholderRange"]
    requests: int
    whole: bool = False

    @property
    def length(self) -> int:
        """Tokens of the prompt up to the end of its last item."""
        return max(place.offset + place.length for place in self.positions)

    def share(self, limits: Limits) -> int:
        """Return how many of the prompts share a step; 0 where the model's length is
        less than theirs, so that no such request is served."""
        if self.length > limits.prompt:
            return 0
        requests = min(self.requests, limits.requests)
        if self.whole:
            requests = min(requests, limits.total(requests) // self.length)
        return requests

    def batch(self, limits: Limits) -> Batch | None:
        """Return the full step that encodes as much as one can, or None where no
        request has such items."""
        requests = self.share(limits)
        if not requests:
            return None
        number = requests * len(self.items)
        encoded = f"{number} {self.modality}{'s' * (number > 1)}"
        return Batch(requests, limits.total(requests), encoded=encoded)

    def prompt(self, length: int) -> list[int]:
        """Return the prompt, with text after it when it is shorter than `length`."""
        text = range(self.length, length)
        return [*self.tokens[: self.length], *(i % _VOCABULARY for i in text)]

    def features(self, name: str) -> list["MultiModalFeatureSpec"]:
        """Return the items as those of the request `name`, which shares none."""
        from vllm.multimodal.inputs import MultiModalFeatureSpec

        return [
            MultiModalFeatureSpec(item, self.modality, f"{name}_{i}", place)
            for i, (item, place) in enumerate(zip(self.items, self.positions))
        ]


def longest(limits: Limits) -> Batch:
    """Return the step with the fewest, so the longest, prompts that fill it."""
    requests = min(limits.requests, cdiv(limits.tokens, limits.prompt))
    return Batch(requests, max(1, limits.total(requests)))


def split(limits: Limits, requests: int) -> Batch:
    """Return a full step of `requests` prompts, at least as many as `longest`."""
    requests = max(min(requests, limits.requests), longest(limits).requests)
    return Batch(requests, max(1, limits.total(requests)))


def most_chunks(limits: Limits, requests: int) -> Batch:
    """Return the step of about `requests` prompts that costs state kernels most.

    Their transients grow with the chunks of `STATE_CHUNK` tokens, and a prompt of one
    token more than some chunks takes another for it: 126 prompts of 65 tokens have
    252 chunks, and 128 of 64 have 128. Fewer prompts keep fewer states, so each one
    that is lost has to bring four chunks: 6 MiB are the two states of a request of
    the 27B class.

    Args:
        limits: of a step.
        requests: as for `split`, whose step it is where no other has more chunks.

    """
    equal = split(limits, requests)
    each = equal.total // equal.requests
    longer = 1 + ((each - 1) // STATE_CHUNK + 1) * STATE_CHUNK
    count = equal.requests
    while count > 1 and limits.total(count) < count * longer:
        count -= 1
    if longer > limits.prompt:
        return equal
    other = Batch(count, limits.total(count))
    lost = equal.requests - other.requests
    return other if _chunks(other) - _chunks(equal) > 4 * lost else equal


def _chunks(batch: Batch) -> int:
    return sum(cdiv(length, STATE_CHUNK) for length in batch.lengths)


def chunk(limits: Limits) -> Batch | None:
    """Return the longest chunk at the end of the longest prompt, or None.

    A prompt that is hardly longer than a step gives half of itself to each side.
    """
    total = min(limits.total(1), cdiv(limits.prompt, 2))
    context = limits.prompt - total
    if not limits.context or context < 1:
        return None
    return Batch(1, total, context)


def crowded(limits: Limits, requests: int, has_states: bool) -> Batch:
    """Return the batch of about `requests` prompts that costs most."""
    return (most_chunks if has_states else split)(limits, requests)


def settle(requests: int, room_beside: Callable[[int], int]) -> int:
    """Return how many prompts share a step next to that step's own peak.

    The more prompts a step has, the higher its peak and the smaller the KV cache
    that is left for them. The result is enough for every number that has room:
    next to its peak there is none for more.

    Args:
        requests: more than will share a step, or as many.
        room_beside: a number of prompts to how many have room next to the peak of
            a step of so many. Falls as the number grows. Called twice at most.

    """
    fewest = room_beside(requests)
    return requests if fewest >= requests else min(requests, room_beside(fewest))


def batches(limits: Limits, requests: int, has_states: bool) -> list[Batch]:
    """Return the batches whose peaks bound those of all others.

    Args:
        limits: of a step.
        requests: the most prompts of a full step that have room in the KV cache.
        has_states: whether layers keep a state for each request.

    """
    few = longest(limits)
    found = [few, crowded(limits, requests, has_states)]
    if few.requests < MIDDLE < requests:
        found.append(split(limits, MIDDLE))
    if with_context := chunk(limits):
        found.append(with_context)
    return list(dict.fromkeys(found))


def most_requests(limits: Limits, blocks: int, count: Callable[[int], int]) -> int:
    """Return how many prompts of a full step have room in a KV cache.

    Args:
        limits: of a step.
        blocks: of the KV cache, its null block included.
        count: tokens of a prompt to the blocks that it holds.

    """
    least = longest(limits).requests
    for requests in range(limits.requests, least, -1):
        each, longer = divmod(split(limits, requests).total, requests)
        held = longer * count(each + 1) + (requests - longer) * count(each)
        if held <= blocks - 1:
            return requests
    return least


def _new_request(
    name: str, length: int, context: int, blocks: tuple[list[int], ...]
) -> NewRequestData:
    tokens = [i % _VOCABULARY for i in range(context + length)]
    return NewRequestData(
        req_id=name,
        prompt_token_ids=tokens,
        mm_features=[],
        sampling_params=_sampling(),
        pooling_params=None,
        block_ids=blocks,
        num_computed_tokens=context,
        lora_request=None,
        prefill_token_ids=tokens,
    )


def _sampling() -> SamplingParams:
    """Return what every sampler serves and what allocates most there."""
    return SamplingParams(
        temperature=0.9,
        top_p=0.9,
        top_k=50,
        frequency_penalty=0.5,
        presence_penalty=0.5,
        repetition_penalty=1.2,
        max_tokens=2,
        detokenize=False,
    )


@dataclass(frozen=True)
class Step:
    """A batch as steps of the scheduler: prefill, one of decode, and the end.

    `decode` is None where the requests have reached the model's length.
    """

    batch: Batch
    prefill: SchedulerOutput
    decode: SchedulerOutput | None
    end: SchedulerOutput

    @property
    def decode_name(self) -> str:
        """Such as "128 x 1 decode", with the drafts that it verifies."""
        assert self.decode is not None
        requests = len(self.decode.num_scheduled_tokens)
        each = self.decode.total_num_scheduled_tokens // requests
        return f"{requests} x {each} decode"


def steps(
    batch: Batch,
    limits: Limits,
    counts: Sequence[Callable[[int], int]],
    blocks: int,
) -> Step:
    """Return `batch` as the scheduler would send it.

    A request holds one block of each KV cache group, as often as it needs blocks,
    and shares it where there are too few: what is written there is never read for
    its value, and the throw-away cache stays small. No two groups share a block,
    since they read the same memory as different types.

    Args:
        batch: the prompts.
        limits: of a step.
        counts: for each KV cache group, tokens of a request to its blocks.
        blocks: of the KV cache, its null block included.

    Raises:
        ValueError: there are fewer blocks than groups.

    """
    each = (blocks - 1) // max(1, len(counts))
    if not each:
        raise ValueError(f"{blocks} blocks for {len(counts)} groups and a null block")
    names = [f"{_PREFIX}{i}" for i in range(batch.requests)]
    lengths = batch.lengths
    ahead = 1 + limits.drafts

    prefill = SchedulerOutput.make_empty()
    prefill.scheduled_new_reqs = [
        _new_request(
            name,
            length,
            batch.context,
            tuple(
                [1 + group * each + i % each] * count(batch.context + length + ahead)
                for group, count in enumerate(counts)
            ),
        )
        for i, (name, length) in enumerate(zip(names, lengths))
    ]
    prefill.num_scheduled_tokens = dict(zip(names, lengths))
    prefill.total_num_scheduled_tokens = batch.total
    prefill.num_spec_tokens_to_schedule = limits.drafts

    end = SchedulerOutput.make_empty()
    end.finished_req_ids = set(names)
    return Step(batch, prefill, _decode(batch, names, limits), end)


def encoder_step(
    media: Media,
    limits: Limits,
    counts: Sequence[Callable[[int], int]],
    blocks: int,
) -> Step | None:
    """Return the full step that encodes as much as one can, or None.

    The encoder runs first, and its outputs are the embeddings of the step's prompts.
    An item is encoded in the step of its first token, so a prompt that is longer than
    its share of the step is not computed to its end.

    Args:
        media: what is encoded.
        limits: of a step.
        counts: as for `steps`.
        blocks: as for `steps`.

    Returns:
        None where no step does.

    """
    batch = media.batch(limits)
    if batch is None:
        return None
    step = steps(batch, limits, counts, blocks)
    prefill, end = step.prefill, step.end
    for request, length in zip(prefill.scheduled_new_reqs, batch.lengths):
        request.mm_features = media.features(request.req_id)
        request.prompt_token_ids = media.prompt(length)
        request.prefill_token_ids = request.prompt_token_ids
        prefill.scheduled_encoder_inputs[request.req_id] = list(range(len(media.items)))
        end.free_encoder_mm_hashes += [it.identifier for it in request.mm_features]
    return replace(step, decode=None)


def _decode(batch: Batch, names: list[str], limits: Limits) -> SchedulerOutput | None:
    drafts = limits.drafts
    ahead = 1 + drafts
    batched = limits.batched or limits.tokens
    requests = min(
        batch.requests, limits.tokens // ahead, batched // (ahead + limits.draft_slots)
    )
    computed = [batch.context + length for length in batch.lengths[:requests]]
    # After prefill one token is sampled, and `ahead` after this step.
    if not requests or max(computed) + 1 + ahead > limits.model_len:
        return None
    names = names[:requests]
    cached = CachedRequestData.make_empty()
    cached.req_ids = names
    cached.num_computed_tokens = computed
    cached.num_output_tokens = [1] * requests
    cached.new_block_ids = [None] * requests
    decode = SchedulerOutput.make_empty()
    decode.scheduled_cached_reqs = cached
    decode.num_scheduled_tokens = dict.fromkeys(names, ahead)
    decode.total_num_scheduled_tokens = ahead * requests
    decode.num_spec_tokens_to_schedule = drafts
    if drafts:
        decode.scheduled_spec_decode_tokens = {name: [0] * drafts for name in names}
    return decode
