"""Values that request nothing: clients send fields of other routes and servers with the default of their library. Such
a field is accepted on every route; with another value it is refused where it has no effect."""

from __future__ import annotations

from typing import Any

from msgspec.structs import fields

from headrace.serving.http.protocol.fields import DEFERRED, MEANINGFUL_WHEN_EMPTY
from headrace.serving.http.protocol.messages import MessagesRequest
from headrace.serving.http.protocol.native import GenerateRequest, NativeSampling, TokenizeRequest
from headrace.serving.http.protocol.ollama import OllamaChatRequest, OllamaGenerateRequest, OllamaOptions
from headrace.serving.http.protocol.openai import ChatRequest, CompletionRequest
from headrace.serving.http.protocol.pooling import EmbeddingRequest, RerankRequest, ScoreRequest
from headrace.serving.http.protocol.responses import ResponsesRequest

_RECORDS = (
    ChatRequest, CompletionRequest, ResponsesRequest, MessagesRequest, GenerateRequest, NativeSampling, TokenizeRequest,
    OllamaChatRequest, OllamaGenerateRequest, OllamaOptions, EmbeddingRequest, RerankRequest, ScoreRequest,
)
_IS_ON = (True,)
_VALUES: dict[str, tuple[Any, ...]] = {
    # Where the default is true or a number, only that value is neutral, beside null.
    **dict.fromkeys(
        (
            "add_generation_prompt", "add_special_tokens", "include_reasoning", "parallel_tool_calls",
            "separate_reasoning", "skip_special_tokens", "spaces_between_special_tokens", "stream_reasoning",
            "detokenize", "use_activation", "cache_prompt", "parse_tool_calls",
        ), _IS_ON
    ),
    **dict.fromkeys(("enable_thinking", "think"), ()),
    # vLLM's defaults of embeddings, and of structured_outputs
    "embed_dtype": ("float32",), "endianness": ("native", "little"),
    **dict.fromkeys(("disable_any_whitespace", "disable_additional_properties"), (False,)),
    **dict.fromkeys(("n", "best_of", "beam_width", "num_beams", "num_return_sequences"), (1,)),
    **dict.fromkeys(("top_p", "typical_p", "tfs_z", "length_penalty", "repetition_penalty", "repeat_penalty"), (1,)),
    **dict.fromkeys(("min_p", "top_a", "presence_penalty", "frequency_penalty", "mirostat"), (0,)),
    **dict.fromkeys(("min_tokens", "min_new_tokens", "priority", "top_logprobs", "top_logprobs_num"), (0, False)),
    **dict.fromkeys(("dry_multiplier", "xtc_probability", "no_repeat_ngram_size"), (0,)),
    # llama.cpp's defaults
    **dict.fromkeys(("n_probs", "min_keep", "n_keep", "n_discard", "dynatemp_range", "t_max_predict_ms"), (0,)),
    **dict.fromkeys(("timings_per_token", "post_sampling_probs", "return_progress", "penalize_nl"), (False,)),
    "id_slot": (-1,), "dynatemp_exponent": (1,), "reasoning_format": ("auto",), "grammar": ("",), "lora": ([],),
    # Ollama's defaults of options that go with others, and llama.cpp's name of the whole context
    "mirostat_eta": (0.1,), "mirostat_tau": (5,), "repeat_last_n": (-1,),
    "top_k": (0, -1), "logprob_start_len": (-1,), "stream_interval": (1,), "temperature": (1,),
    "tool_choice": ("auto", "none"), "truncation": ("disabled",), "encoding_format": ("float",),
    "response_format": ({"type": "text"},), "modalities": (["text"],), "service_tier": ("auto", "default"),
    "verbosity": ("medium",), "guided_decoding_backend": ("auto",), "chat_template_content_format": ("auto",),
    "truncation_side": ("left", "right"), "max_tool_calls": (), "function_call": ("none", "auto"),
    "speed": ("standard",),
}
_EMPTY: tuple[Any, ...] = (False, "", [], {})
KNOWN = frozenset(_VALUES) | frozenset(DEFERRED) | {
    field.encode_name for record in _RECORDS for field in fields(record) if not field.required
}
"""Optional fields of any route, and those of other servers."""


def is_neutral(name: str, value: Any) -> bool:
    """Whether a field requests nothing with this value: null, whatever its name, as serializers write fields that are
    not set; or a neutral value of a known field."""
    if value is None:
        return True
    if name not in KNOWN or name in MEANINGFUL_WHEN_EMPTY:
        return False
    # ``False == 0`` in Python: the types are compared, too, but for numbers.
    return any(
        value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
        for neutral in _VALUES.get(name, _EMPTY)
    )
