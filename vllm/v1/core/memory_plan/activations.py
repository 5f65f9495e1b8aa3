# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The activation peak of a batch, from a model's sizes: pure arithmetic.

A step's peak is that of its widest part: one layer's attention, state or MLP, or
the sampler. Each part is a list of lines, and a line is a buffer that is alive at
the part's peak, in bytes for each token, sequence or chunk of a state kernel.
Where it depends on the sizes which moment of a layer is its peak, each is a part:

    peak(T, n) = max over parts of
        tokens * T + sequences * n + chunks * sum of ceil(length / chunk) + tiles(T)
        + the lines that are alive through the whole step

for ``n`` prompts of ``T`` tokens together. What lives through the step is the
residual stream (with the copies that the model's loop holds) and the target's
hidden states that a draft reads.

The lines of the gated delta net are what one H200 measured with upstream's code
for the 27B geometry, FP16, eager, T = 8192, less the 304 MiB that are let go of
since: 1,630 MiB as 1 x 8192 and 1,720 as 16 x 512, and 2,392 as 128 x 64 on a cut
of eight layers: 6 MiB for each sequence, the state that its kernel starts from and
the one it returns. Nothing was measured on a V100, and parts without such a figure
are counted from the code alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

from vllm.model_executor.kernels.linear.sm70.tiling import plan_tiles
from vllm.utils.math_utils import cdiv, next_power_of_2
from vllm.v1.worker.profile_batches import STATE_CHUNK

MIB = 2**20

SAMPLER_BYTES = 4
SAMPLER_BYTES_V1 = 26
"""For each logit, beside the model's own: the second runner's FP32 copy, and the
first runner's logits, probabilities, noise, and their order for top-k and top-p.
With these an H200's 183 and 840 MiB for 126 requests of 248,320 logits are 184 and
840, and 1,147 MiB for 98 requests with seven drafts each are 1,146."""

VERIFIED_BYTES = 2**30
"""Of the FP32 copy when drafts are verified: the second runner does it in parts."""

SAMPLER_PROGRAMS = 128
"""About the multiprocessors of a card: 80 of a V100, 132 of an H200."""


@dataclass(frozen=True)
class Line:
    """One buffer, or several of one kind, in bytes."""

    name: str
    token: int = 0
    sequence: int = 0
    chunk: int = 0


@dataclass(frozen=True)
class Tiled:
    """A weight that prefill takes in tiles (``sm70/tiling.py``), per rank."""

    columns: int
    depth: int
    gated: bool
    width: int | None = None


@dataclass(frozen=True)
class Workspace:
    """Scratch that experts keep for the longest step.

    Attributes:
        token: bytes for each token that is run at once.
        chunk: the most tokens that are; 0 for all of a step.
        budget: the most bytes, where the experts keep to one; 0 where they do not.

    """

    token: int
    chunk: int = 0
    budget: int = 0

    def bytes_for(self, tokens: int) -> int:
        """Bytes for a step of ``tokens``."""
        size = self.token * (min(tokens, self.chunk) if self.chunk else tokens)
        return min(size, self.budget) if self.budget else size


@dataclass(frozen=True)
class Part:
    """What is alive together at one place of a step."""

    name: str
    lines: tuple[Line, ...]
    tiled: tuple[Tiled, ...] = ()


@dataclass(frozen=True)
class Sizes:
    """What the formulae take from a model. Sizes are of one rank.

    Attributes:
        itemsize: bytes of an activation.
        stream: lines that live through the step.
        parts: the parts of the step; equal ones once.
        logits: elements of one row of logits, the whole vocabulary.
        rows_per_sequence: rows of logits for a sequence that decodes: 1, and one
            for each draft token.
        second_runner: whether the second model runner samples.
        workspaces: of the experts; they share one.
        resident_token: bytes for each token of the longest step of buffers that
            stay: a draft's hidden states, embeddings.
        resident: bytes that stay whatever the step: weights that a draft merges.
        attention: names of attention layers, and the bytes that their backend keeps
            for each KV cache group that has such a layer.
        decoder_layers: layers of the target, for the graphs.
        notes: what the formulae leave out for this model.

    """

    itemsize: int
    stream: tuple[Line, ...] = ()
    parts: tuple[Part, ...] = ()
    logits: int = 0
    rows_per_sequence: int = 1
    second_runner: bool = True
    workspaces: tuple[Workspace, ...] = ()
    resident_token: int = 0
    resident: int = 0
    attention: tuple[tuple[str, int], ...] = ()
    decoder_layers: int = 0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Shape:
    """A batch: its name, and the tokens of each of its prompts in the step."""

    name: str
    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        if min(self.lengths, default=0) < 1:
            raise ValueError(
                f"a batch of {len(self.lengths)} sequences and {sum(self.lengths)} "
                "tokens: expected at least one sequence, and a token for each"
            )

    @property
    def sequences(self) -> int:
        return len(self.lengths)

    @cached_property
    def tokens(self) -> int:
        return sum(self.lengths)

    @cached_property
    def chunks(self) -> int:
        return sum(cdiv(length, STATE_CHUNK) for length in self.lengths)


@dataclass(frozen=True)
class Peak:
    """The highest of all batch shapes, and where it comes from."""

    bytes: int
    shape: str
    part: str
    lines: tuple[tuple[str, int], ...]
    shapes: tuple[tuple[str, int], ...] = field(default=(), repr=False)


def peak_of(sizes: Sizes, shapes: Iterable[Shape]) -> Peak:
    """The highest peak of any part and shape.

    Raises:
        ValueError: there is no shape.

    """
    peaks = [max(_parts(sizes, shape), key=lambda peak: peak.bytes) for shape in shapes]
    if not peaks:
        raise ValueError("no batch shape to plan for")
    highest = max(peaks, key=lambda peak: peak.bytes)
    return Peak(
        highest.bytes,
        highest.shape,
        highest.part,
        highest.lines,
        tuple((peak.shape, peak.bytes) for peak in peaks),
    )


def resident_bytes(sizes: Sizes, tokens: int) -> int:
    """Bytes that stay behind: the tiles' scratch, workspaces, buffers of a step."""
    scratch = [
        _plan(t, tokens, sizes.itemsize)[0] for p in sizes.parts for t in p.tiled
    ]
    experts = [workspace.bytes_for(tokens) for workspace in sizes.workspaces]
    kept = sizes.resident + sizes.resident_token * tokens
    return max(scratch, default=0) + max(experts, default=0) + kept


def sampler_bytes(sizes: Sizes, sequences: int, requests: int) -> int:
    """Bytes that sampling keeps on a GPU: the buffer of top-k and top-p for a power
    of two of rows of logits, one for each program that runs at once. With the second
    runner also, for penalties, each request's counts of tokens and a bit for each
    token of its prompt; and the mask of structured outputs, a bit for each logit.

    Args:
        sizes: of the model.
        sequences: ``max_num_seqs``.
        requests: of these, how many have room in the KV cache.

    """
    rows = sizes.rows_per_sequence
    programs = min(next_power_of_2(requests * rows), SAMPLER_PROGRAMS)
    buffer = 4 * sizes.logits * programs
    if not sizes.second_runner:
        return buffer
    bits = 4 * cdiv(sizes.logits, 32) * sequences * (1 + rows)
    return buffer + 4 * sizes.logits * sequences + bits


def attention_bytes(
    sizes: Sizes, groups: Iterable[Iterable[str]], *, shared: bool
) -> int:
    """Bytes that attention backends keep on a GPU.

    Args:
        sizes: of the model.
        groups: names of the layers of each KV cache group.
        shared: whether groups with as much take turns on one scratch (see
            `decode_scratch`); otherwise each has its own.

    """
    kept = dict(sizes.attention)
    each = [max((kept.get(name, 0) for name in names), default=0) for names in groups]
    return sum(set(each) if shared else each)


def _parts(sizes: Sizes, shape: Shape) -> Iterator[Peak]:
    always = [(line.name, _bytes(line, shape)) for line in sizes.stream]
    for part in sizes.parts:
        lines = [(line.name, _bytes(line, shape)) for line in part.lines]
        tiles = [_plan(t, shape.tokens, sizes.itemsize)[1] for t in part.tiled]
        if max(tiles, default=0):
            lines.append(("tiles of the gate and up product", max(tiles)))
        yield _peak(shape, part.name, always + lines)
    yield _peak(shape, "sampler", always + _sampler(sizes, shape.sequences))
    if sizes.rows_per_sequence > 1:
        # The next step: a token and its drafts for each, and as many rows.
        rows = shape.sequences * sizes.rows_per_sequence
        decode = Shape(shape.name, (sizes.rows_per_sequence,) * shape.sequences)
        stream = [(line.name, _bytes(line, decode)) for line in sizes.stream]
        yield _peak(shape, "verified drafts", stream + _sampler(sizes, rows))


def _sampler(sizes: Sizes, rows: int) -> list[tuple[str, int]]:
    copies = (
        rows
        * sizes.logits
        * (SAMPLER_BYTES if sizes.second_runner else SAMPLER_BYTES_V1)
    )
    if sizes.rows_per_sequence > 1 and sizes.second_runner:
        copies = min(copies, VERIFIED_BYTES)
    return [
        ("logits", rows * sizes.logits * sizes.itemsize),
        ("FP32 logits and what is made of them", copies),
    ]


def _peak(shape: Shape, part: str, lines: list[tuple[str, int]]) -> Peak:
    return Peak(sum(size for _, size in lines), shape.name, part, tuple(lines))


def _bytes(line: Line, shape: Shape) -> int:
    return (
        line.token * shape.tokens
        + line.sequence * shape.sequences
        + line.chunk * shape.chunks
    )


def _plan(tiled: Tiled, rows: int, itemsize: int) -> tuple[int, int]:
    """(bytes that stay, bytes while the operator runs) of one tiled product."""
    plan = plan_tiles(
        tiled.columns,
        tiled.depth,
        rows,
        itemsize,
        gated=tiled.gated,
        width=tiled.width,
    )
    products = plan.lanes * plan.product_bytes
    if plan.whole:
        # The untiled control allocates the dense weight for each call.
        return 0, plan.scratch_bytes + products
    return plan.scratch_bytes, products


# ---------------------------------------------------------------------------
# The lines of each kind of layer
# ---------------------------------------------------------------------------


def residual_lines(hidden: int, itemsize: int, copies: int) -> tuple[Line, ...]:
    """The hidden and the residual stream, ``copies`` tensors [T, hidden]."""
    return (Line("hidden and residual states", token=copies * hidden * itemsize),)


def mlp_part(
    hidden: int,
    intermediate: int,
    product: int,
    itemsize: int,
    tiled: tuple[Tiled, ...] = (),
    gated_at_once: bool = False,
) -> Part:
    """An MLP at its second projection; the first one's product is still held.

    Args:
        hidden: elements of the output.
        intermediate: elements of the activation, this rank's.
        product: elements of the first projection: twice that with gate and up.
        itemsize: bytes of an activation.
        tiled: the tiled weights.
        gated_at_once: the product never exists in full.

    """
    lines = [
        Line("activation", token=intermediate * itemsize),
        Line("MLP output", token=hidden * itemsize),
    ]
    if not gated_at_once:
        lines.insert(0, Line("gate and up product", token=product * itemsize))
    return Part("MLP", tuple(lines), tiled)


def attention_parts(
    hidden: int,
    projected: int,
    query: int,
    key: int,
    itemsize: int,
    *,
    output_gate: bool = False,
    normed: bool = False,
    lets_go: bool = False,
    quantized: tuple[Line, ...] = (),
    tiled: tuple[Tiled, ...] = (),
) -> tuple[Part, ...]:
    """Full or sliding attention: its kernel, its gate, and its output projection.

    Args:
        hidden: elements of the output.
        projected: elements of query, key, value (and gate) together.
        query: elements of the queries.
        key: elements of the keys.
        itemsize: bytes of an activation.
        output_gate: the output is multiplied by a gate.
        normed: queries and keys are normed first, into tensors of their own.
        lets_go: of queries, keys and values, after the kernel.
        quantized: what the output projection makes of its input.
        tiled: the tiled weights.

    """
    queries = query * itemsize
    held = [Line("query, key and value projection", token=projected * itemsize)]
    if normed:
        held.append(Line("normed query and key", token=(query + key) * itemsize))
    gate = [Line("gate", token=queries)] if output_gate else []
    output = Line("attention output", token=queries)
    moments = [[*held, *gate, output]]
    if lets_go:
        held = []
    if output_gate:
        product = Line("sigmoid of the gate, and the gated output", token=2 * queries)
        moments.append([*held, *gate, output, product])
    projection = Line("output projection", token=hidden * itemsize)
    moments.append([*held, *gate, output, projection, *quantized])
    return tuple(Part("attention", tuple(lines), tiled) for lines in moments)


def gdn_parts(
    key_heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
    itemsize: int,
    state_itemsize: int,
    *,
    lets_go: bool = True,
    tiled: tuple[Tiled, ...] = (),
) -> tuple[Part, ...]:
    """The chunked gated delta rule: splitting what the convolution made, inverting
    each chunk's matrix, w and u, and the chunks' states, which are the peak with
    heads of 64 and more. The kernel after that has an output in place of w and u.

    Args:
        key_heads: this rank's; for queries, too.
        value_heads: this rank's. A state is [value heads, value dim, key dim].
        key_dim: elements of a query's or key's head.
        value_dim: elements of a value's head.
        itemsize: bytes of an activation.
        state_itemsize: bytes of an element of a state in the KV cache.
        lets_go: of the convolution's output, once it is split.
        tiled: the tiled weights.

    """
    keys, values = key_heads * key_dim, value_heads * value_dim
    state = value_heads * key_dim * value_dim
    chunked = value_heads * STATE_CHUNK
    always: tuple[Line, ...] = (
        Line(
            "projections (q, k, v, z, twice a and b)",
            token=(2 * keys + 2 * values + 4 * value_heads) * itemsize,
        ),
        Line("output", token=values * itemsize),
        Line(
            "q, k, v, decay and its sums, beta",
            token=(2 * keys + values) * itemsize + 3 * 4 * value_heads,
        ),
    )
    convolved = Line("after the convolution", token=(2 * keys + values) * itemsize)
    matrix = Line("matrix of each chunk", token=chunked * 4)
    inverse = Line("inverse of each chunk", token=chunked * itemsize)
    w_and_u = Line("w and u", token=value_heads * (key_dim + value_dim) * itemsize)
    initial = Line("states in", sequence=state * state_itemsize)
    if not lets_go:
        always += (convolved,)
    moments: tuple[tuple[Line, ...], ...] = (
        (convolved,) if lets_go else (),
        (matrix, inverse, initial),
        (inverse, w_and_u, initial),
        (
            w_and_u,
            Line("new values", token=values * itemsize),
            Line("state of each chunk", chunk=state * itemsize),
            Line("states in and out", sequence=state * (state_itemsize + 4)),
        ),
    )
    return tuple(Part("gated delta net", always + lines, tiled) for lines in moments)


def state_part(projected: int, inner: int, state_bytes: int, itemsize: int) -> Part:
    """Another state-space layer: projections, four tensors of its inner width, and
    the states in and out. Counted, not measured."""
    return Part(
        "state-space layer",
        (
            Line("projections", token=projected * itemsize),
            Line("scan buffers", token=4 * inner * itemsize),
            Line("states in and out", sequence=2 * state_bytes),
        ),
    )


def moe_workspace_token(
    hidden: int, intermediate: int, top_k: int, itemsize: int
) -> int:
    """Bytes of the modular experts' two workspaces for one token: a row for each
    of its experts, of the wider of product and hidden, then of the wider of
    activation and hidden."""
    row = max(2 * intermediate, hidden) + max(intermediate, hidden)
    return top_k * row * itemsize


def sm70_moe_workspace_token(
    hidden: int, intermediate: int, top_k: int, itemsize: int
) -> int:
    """Bytes of the `sm70` experts' two workspaces for one token, without a budget:
    its activated rows, or an output where that is wider, and whole rows of the
    second product for all but its first expert."""
    first = max(top_k * intermediate, hidden)
    return (first + (top_k - 1) * hidden) * itemsize


def moe_part(hidden: int, experts: int, itemsize: int) -> Part:
    """Routed experts beside their workspaces: router logits, routed and shared
    output."""
    return Part(
        "experts",
        (
            Line("router logits", token=experts * (itemsize + 4)),
            Line("routed and shared output", token=2 * hidden * itemsize),
        ),
    )
