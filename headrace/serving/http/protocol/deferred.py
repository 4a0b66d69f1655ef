"""Fields that other servers know and this one does not serve yet: refused by name with what to do instead."""

from __future__ import annotations

TOOLS = "use tools and tool_choice, and the role 'tool' for results"
STRUCTURE = "the server chooses the grammar library and allows blanks where JSON does"
MEDIA = "only text is served so far"
REASONING = (
    "use reasoning_effort, enable_thinking, separate_reasoning, stream_reasoning, include_reasoning or "
    "chat_template_kwargs"
)
ADAPTERS = "adapters are not served yet"
INTERNALS = "model internals are not returned"
PLACEMENT = "requests cannot be placed by hand"

DEFERRED: dict[str, str] = {
    **dict.fromkeys(("functions", "function_call"), TOOLS),
    **dict.fromkeys((
        "guided_decoding_backend", "guided_whitespace_pattern",
    ), STRUCTURE),
    **dict.fromkeys((
        "audio", "modalities", "image_data", "video_data", "audio_data", "mm_processor_kwargs", "media_io_kwargs",
        "mm_hashes",
        "video_config", "use_audio_in_video",
    ), MEDIA),
    **dict.fromkeys(("reasoning", "require_reasoning"), REASONING),
    **dict.fromkeys(("lora_path", "lora_id", "lora_request"), ADAPTERS),
    **dict.fromkeys((
        "return_hidden_states", "return_routed_experts", "return_indexer_topk", "return_entropy", "return_meta_info",
        "return_sampling_mask",
        "token_ids_logprob", "logprob_token_ids", "return_tokens_as_token_ids",
    ), INTERNALS),
    **dict.fromkeys((
        "bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key", "routed_dp_rank",
        "data_parallel_rank", "routing_key",
        "disagg_prefill_dp_rank", "decode_tp_size", "kv_transfer_params", "kv_hints",
    ), PLACEMENT),
    **dict.fromkeys(("input_embeds", "prompt_embeds"), "embeddings as input are not served; send text or token ids"),
    **dict.fromkeys(
        ("session_id", "session_params", "conversation_id"),
        "sessions are not served; the prefix cache makes them unnecessary"
    ),
    **dict.fromkeys(("use_beam_search", "length_penalty", "early_stopping"), "beam search is not served"),
    **dict.fromkeys(
        ("chat_template", "chat_template_content_format"), "the chat template is chosen when the server is started"
    ),
    **dict.fromkeys(
        ("custom_logit_processor", "logits_processors", "custom_params", "vllm_xargs"),
        "code and parameters of other servers are not run"
    ),
    "stop_regex": "stopping at a pattern is not served; use stop, or regex for the whole output",
    "suffix": "text after the gap (fill in the middle) is not served",
    "documents": "retrieval templates are not served yet; put the documents into a message",
    "prediction": "predicted output is not served yet",
    "web_search_options": "the server cannot search the web",
    "repetition_detection": "repetition detection is not served; use repetition_penalty or stop",
    "typical_p": "typical sampling is not served; use top_p or min_p",
    "stream_interval": "chunks are sent as they come",
    **dict.fromkeys(("mcp_servers", "container"), "the server runs no tools; run them in the client"),
    "context_management": "conversations are never shortened; leave out what the model need not see",
    "conversation": "conversations are not stored as such; use previous_response_id, or send the items so far as input",
    "max_tool_calls": "the server runs no tools; use parallel_tool_calls",
    **dict.fromkeys(
        ("raw", "template", "context"),
        "prompts are made by the model's own chat template; use /v1/completions for others"
    ),
    "images": MEDIA,
    "background": "requests cannot outlive their connection",
}

RESTRICTED = frozenset({"modalities", "suffix", "context_management"})
"""Those that some route takes, as long as they ask for nothing that is not served."""

ASK_WHEN_EMPTY = frozenset({"web_search_options"})
"""Those that an empty object asks for as it is."""
