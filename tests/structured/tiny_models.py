"""A model folder with a tokenizer trained on the spot, for outputs that follow grammars."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers


def write_tiny_model(folder: Path, config: dict[str, Any]) -> None:
    """A model of ``config`` and a tokenizer of 300 tokens, all bytes among them."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<pad>", "<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(['{"a": "x", "b": [true, false, null]}, abc def'] * 20, trainer)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(config))
