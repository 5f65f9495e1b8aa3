# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The fork's features as the gate sees them: a switch and what is promised.

To gate another feature, add a row to ``FEATURES``. A feature whose switch the
installed vLLM does not know has not landed; the gate says so and goes on.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

ON_CUDA = ("cuda",)
EVERYWHERE = ("cpu", "cuda")

SM70_LINEAR = ("--linear-backend=sm70",)
SM70_EXPERTS = (
    "--kernel-config",
    '{"linear_backend":"sm70","moe_backend":"sm70"}',
)
"""The fork's kernels where others would be taken."""

TWO_KV_WIDTHS = (
    "--kv-cache-dtype=fp8",
    "--kv-cache-dtype-skip-layers",
    "7",
)
"""FP8 KV in one of the two layers of full attention: without that, every page
has one size and there is nothing to plan."""


@dataclass(frozen=True)
class Feature:
    """A row of the gate: one switch, on and off.

    Attributes:
        name: in the table.
        switch: the variable of vllm/envs.py that is there once it has landed.
        off: the environment that is upstream's behaviour, the control.
        on: the environment that makes the feature act on a model this small;
            empty where its default does.
        checkpoint: folder below benchmarks/needle/checkpoints.
        options: of both servers.
        cuda_options: of both servers, on a GPU only.
        platforms: where there is something to compare.
        identical: whether every token is promised to be the same.
        fast: where no ratio may be worse than the gate's limit.
        why: what the promises rest on.

    """

    name: str
    switch: str
    off: Mapping[str, str]
    checkpoint: str
    identical: bool
    why: str
    on: Mapping[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    cuda_options: tuple[str, ...] = ()
    platforms: tuple[str, ...] = EVERYWHERE
    fast: tuple[str, ...] = ON_CUDA

    def arguments(self, platform: str) -> tuple[str, ...]:
        """Return the server's options on ``cpu`` or ``cuda``."""
        return self.options + (self.cuda_options if platform == "cuda" else ())


FEATURES = (
    Feature(
        name="page plan",
        switch="VLLM_KV_PAGE_PLAN",
        off={"VLLM_KV_PAGE_PLAN": "0"},
        checkpoint="dense-nvfp4",
        options=(*TWO_KV_WIDTHS, "--no-enable-prefix-caching"),
        cuda_options=SM70_LINEAR,
        identical=True,
        why="blocks hold the same tokens in other places; nothing cuts a prefill",
    ),
    Feature(
        name="page plan (prefix hits)",
        switch="VLLM_KV_PAGE_PLAN",
        off={"VLLM_KV_PAGE_PLAN": "0"},
        checkpoint="dense-nvfp4",
        options=(*TWO_KV_WIDTHS, "--enable-prefix-caching"),
        cuda_options=SM70_LINEAR,
        identical=False,
        fast=(),
        why="prefills are cut at other blocks, so sums are rounded in other orders, "
        "and states are kept at other tokens, which costs time when they are reached",
    ),
    Feature(
        name="tiled prefill",
        switch="VLLM_SM70_TILE_WIDTH",
        on={"VLLM_SM70_TILE_WIDTH": "128"},
        off={"VLLM_SM70_TILE_WIDTH": "0"},
        checkpoint="dense-nvfp4",
        cuda_options=SM70_LINEAR,
        identical=True,
        fast=(),
        why="tiles change no bit. By default a layer this small is one tile; many "
        "narrow ones cost time, which benchmark_sm70_tiled_prefill.py measures at "
        "real sizes",
    ),
    Feature(
        name="small-batch kernel",
        switch="VLLM_SM70_SMALL_BATCH",
        off={"VLLM_SM70_SMALL_BATCH": "0"},
        checkpoint="dense-nvfp4",
        cuda_options=SM70_LINEAR,
        identical=False,
        why="another kernel sums in another order",
    ),
    Feature(
        name="MoE bounds",
        switch="VLLM_MOE_CHUNK_TOKENS",
        on={"VLLM_MOE_CHUNK_TOKENS": "128"},
        off={"VLLM_MOE_CHUNK_TOKENS": "0"},
        checkpoint="moe-fp8",
        options=SM70_EXPERTS,
        identical=True,
        fast=(),
        why="chunks change no bit. By default a model this small is never cut; short "
        "chunks cost time",
    ),
    Feature(
        name="truthful profile",
        switch="VLLM_TRUTHFUL_PROFILE",
        off={"VLLM_TRUTHFUL_PROFILE": "0"},
        checkpoint="dense-nvfp4",
        cuda_options=SM70_LINEAR,
        platforms=ON_CUDA,
        identical=True,
        why="it measures at start-up and changes no request; the CPU has no profile",
    ),
)
