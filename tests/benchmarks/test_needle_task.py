# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The retrieval texts: exact lengths, exact tokens, one right answer."""

import itertools
import json
import random
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from benchmarks.needle import model, task


@given(
    seed=st.integers(),
    length=st.integers(400, 3000),
    needles=st.integers(1, 8),
    data=st.data(),
)
def test_a_sample_keeps_its_promises(seed, length, needles, data):
    questions = data.draw(st.integers(1, needles))
    made = task.sample(random.Random(seed), length, needles, questions)
    ids, answer = made.tokens()
    assert len(ids) == len(answer) == length
    hidden = dict(re.findall(r"(\S{4}) = (\d+)\.", made.text))
    assert len(hidden) == needles
    assert len({q for q, _ in made.turns}) == len(made.turns) == questions
    for turn, (question, value) in enumerate(made.turns):
        (key,) = re.findall(r"^What is (\S{4})\?$", question)
        assert hidden[key] == value
        assert made.messages(turn)[0]["content"] == f"{made.text}\n{question}"


def test_a_seed_is_a_text():
    """Exact: another text is another accuracy table."""
    made = next(task.samples("test", 0, 120, needles=2))
    assert made == next(task.samples("test", 0, 120, needles=2))
    assert made.text == (
        "Well how back year off can end May come time set then l0c4 = 6739. "
        "every but x9m0 = 68489. Down we"
    )
    assert made.turns == (("What is l0c4?", "6739"),)
    others = [("train", 0, 120, 2), ("test", 1, 120, 2), ("test", 0, 120, 1)]
    assert all(next(task.samples(*other)) != made for other in others)


def test_the_samples_differ():
    texts = {s.text for s in itertools.islice(task.samples("test", 0, 300), 50)}
    assert len(texts) == 50


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((40, 2, 1), r"length=40: expected at least \d+ tokens"),
        ((400, 2, 3), "questions=3: expected 1 to needles=2"),
        ((400, 2, 0), "questions=0: expected 1 to needles=2"),
    ],
)
def test_what_does_not_fit_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        task.sample(random.Random(0), *arguments)


def test_tokens_are_the_tokenizers(tmp_path: Path):
    """The template and the tokenizer of a checkpoint give the same ids."""
    config = model.model_config(model.ARCHITECTURES["tiny"])
    model.write(tmp_path, config, {}, "")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    made = task.sample(random.Random(1), 500, needles=4, questions=3)
    messages = []
    for i, (question, value) in enumerate(made.turns):
        content = f"{made.text}\n{question}" if i == 0 else question
        messages.append({"role": "user", "content": content})
        messages.append({"role": "assistant", "content": value})
    ids, answer = made.tokens()
    whole = tokenizer.apply_chat_template(messages, return_dict=False)
    assert whole == ids
    asked = tokenizer.apply_chat_template(
        made.messages(), add_generation_prompt=True, return_dict=False
    )
    assert asked == ids[: answer.index(True)]
    assert json.loads((tmp_path / "config.json").read_text()) == config
