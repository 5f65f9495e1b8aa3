# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Retrieval questions over long synthetic texts, the same ones from a seed.

A text is filler with needles in it, ``k7x2 = 839201.``, and the question is
``What is k7x2?``. The answer is the value, all of it and nothing else, and then
the end token. A conversation may ask several questions.

Between a key and its value are three tokens in the text (`` = ``) and three in
the conversation (``?<|im_end|><|im_start|>``), so that the bytes before a value
are at the same distances in both. A short convolution sees them; the model has
to match them, at any distance, and not to know the answer.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from tools.demo.checkpoint import IM_END_ID, IM_START_ID

CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.content }}<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>
{%- endif -%}
"""
"""The question's turn and the answer's, told apart by their order alone."""

_WORDS = (
    "the of and to in that it was for on are with as his they be at one have this "
    "from or had by hot but some what there we can out other were all your when up "
    "use word how said an each she which do their time if will way about many then "
    "them would write like so these her long make thing see him two has look more "
    "day could go come did my sound no most number who over know water than call "
    "first people may down side been now find any new work part take get place made "
    "live where after back little only round man year came show every good me give "
    "our under name very through just form much great think say help low line before "
    "turn cause same mean differ move right boy old too does tell sentence set three "
    "want air well also play small end put home read hand port large spell add even "
    "land here must big high such follow act why ask men change went light kind off"
)
WORDS = _WORDS.split()

MIN_DIGITS, MAX_DIGITS = 4, 6


@dataclass(frozen=True)
class Sample:
    """One conversation.

    Attributes:
        text: the filler with its needles.
        turns: pairs of a question and its exact answer. The first question
            follows the text in the same message.

    """

    text: str
    turns: tuple[tuple[str, str], ...]

    def messages(self, turn: int = 0) -> list[dict[str, str]]:
        """Return the chat request that asks only the question of this index."""
        return [{"role": "user", "content": f"{self.text}\n{self.turns[turn][0]}"}]

    def tokens(self) -> tuple[list[int], list[bool]]:
        """Return the token ids, and for each whether it is part of an answer.

        As the chat template and the tokenizer give them. An answer's end token
        belongs to it. ASCII only: a character is a token.
        """
        ids: list[int] = []
        answer: list[bool] = []
        for i, (question, value) in enumerate(self.turns):
            content = f"{self.text}\n{question}" if i == 0 else question
            asked = [IM_START_ID, *content.encode(), IM_END_ID, IM_START_ID]
            told = [*value.encode(), IM_END_ID]
            ids += asked + told
            answer += [False] * len(asked) + [True] * len(told)
        return ids, answer


def question(key: str) -> str:
    """Return the text that asks for a key's value."""
    return f"What is {key}?"


def _key(rng: random.Random) -> str:
    letters = rng.choices("abcdefghijklmnopqrstuvwxyz", k=2)
    digits = rng.choices("0123456789", k=2)
    return "".join(letter + digit for letter, digit in zip(letters, digits))


def _value(rng: random.Random) -> str:
    return "".join(rng.choices("0123456789", k=rng.randint(MIN_DIGITS, MAX_DIGITS)))


def sample(
    rng: random.Random, length: int, needles: int = 8, questions: int = 1
) -> Sample:
    """Return a conversation of exactly ``length`` tokens, answers included.

    Args:
        rng: where every choice comes from.
        length: tokens.
        needles: keys with a value in the text, all different.
        questions: how many of them are asked for, each once.

    Raises:
        ValueError: the needles and questions alone are longer than ``length``.

    """
    if not 1 <= questions <= needles:
        raise ValueError(
            f"questions={questions}: expected 1 to needles={needles}; ask less or "
            "hide more"
        )
    values: dict[str, str] = {}
    while len(values) < needles:
        values[_key(rng)] = _value(rng)
    hidden = [f"{key} = {value}." for key, value in values.items()]
    asked = rng.sample(sorted(values), questions)
    turns = tuple((question(key), values[key]) for key in asked)
    # Four special tokens a turn, and the line feed after the text.
    fixed = sum(len(q) + len(a) + 4 for q, a in turns) + 1
    fixed += sum(len(text) + 1 for text in hidden)
    room = length - fixed
    if room < 0:
        raise ValueError(
            f"length={length}: expected at least {fixed} tokens for {needles} "
            f"needles and {questions} questions; ask for a longer text or less in it"
        )
    words = rng.choices(WORDS, k=room // 2 + 1)
    words[::7] = [f"{word.capitalize()}" for word in words[::7]]
    filler = " ".join(words)[:room].split(" ")
    # Where a needle goes, in any order, is before the word of this index.
    places = sorted(rng.choices(range(len(filler) + 1), k=needles), reverse=True)
    for place, text in zip(places, hidden):
        filler.insert(place, text)
    return Sample(" ".join(filler), turns)


def samples(
    split: str, seed: int, length: int, needles: int = 8, questions: int = 1
) -> Iterator[Sample]:
    """Yield conversations without end, fixed by the arguments.

    Args:
        split: ``train`` or ``test``: seeds of different splits never meet.
        seed: any number.
        length: tokens, answers included.
        needles: keys in the text.
        questions: how many of them are asked for.

    """
    index = 0
    while True:
        rng = random.Random(f"needle {split} {seed} {length} {needles} {index}")
        yield sample(rng, length, needles, questions)
        index += 1
