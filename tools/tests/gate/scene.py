# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the tests of a served model know about it."""

from dataclasses import dataclass

from benchmarks.needle import task
from tools.gate.__main__ import CHECKPOINTS

CHECKPOINT = CHECKPOINTS / "dense-nvfp4"
MAX_TOKENS = 2048
MAX_REQUESTS = 16
LENGTHS = (300, 700, 1100, 1900)
"""Tokens: one to five pages of 384."""
BLOCKS = 40
"""Of the KV cache. A request of 1,900 tokens takes about a dozen, so sixteen
requests at a time preempt one another."""


@dataclass(frozen=True)
class Question:
    """A question that the server answers right when it has nothing else to do."""

    text: task.Sample
    turn: int

    @property
    def value(self) -> str:
        """The right answer."""
        return self.text.turns[self.turn][1]
