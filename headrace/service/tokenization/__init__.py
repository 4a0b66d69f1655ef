"""Text to token ids and back: tokenizers, chat templates, incremental detokenization, requests and their outputs."""

from headrace.service.tokenization.detokenizer import Detokenizer
from headrace.service.tokenization.loading import load_tokenizer
from headrace.service.tokenization.tokenizer import LONG_TEXT, Tokenizer

__all__ = ["LONG_TEXT", "Detokenizer", "Tokenizer", "load_tokenizer"]
