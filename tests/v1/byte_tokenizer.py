# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A tokenizer for models that the tests make: a byte is a token."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers


def write_tokenizer(folder: Path, media: Mapping[str, str] | None = None) -> None:
    """Write tokenizer files: 256 bytes, the end (256), a mask (257), then `media`.

    Args:
        folder: exists already.
        media: special tokens for multimodal items, by the name of their setting.

    """
    media = dict(media or {})
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*alphabet, "<|endoftext|>", "<|mask|>", *media.values()]
    vocab = {name: i for i, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.add_special_tokens(list(media.values()))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = dict(
        tokenizer_class="PreTrainedTokenizerFast",
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
    )
    if media:
        settings |= media | dict(extra_special_tokens=media)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
