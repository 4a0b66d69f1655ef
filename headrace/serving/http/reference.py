"""What the OpenAPI document says beside types and bounds: groups of routes, fields of requests, example bodies."""

from __future__ import annotations

from typing import Any

TAGS = {
    "openai": ("OpenAI", "Chat completions, completions, responses and models, for OpenAI's clients."),
    "anthropic": ("Anthropic", "Messages, for Anthropic's clients."),
    "ollama": ("Ollama", "Chat, generation and embeddings, for Ollama's clients. Streams are lines of JSON."),
    "native": ("SGLang", "Generation and embeddings in SGLang's form."),
    "pooling": ("Embeddings and scores", "For embedding models, cross-encoders and classifiers."),
    "tokens": ("Tokens", "Text to token ids and back."),
    "control": ("Control", "The state of the server, and aborting requests."),
    "health": ("Health", "Probes and metrics for operators."),
    "admin": ("Administration", "Open to the admin key; without one, to requests from this machine."),
}
"""Title and description of each tag, in the order in which they are shown."""

_MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
_CHAT: dict[str, Any] = {"messages": _MESSAGES, "max_tokens": 64}
_TOKENIZE, _DETOKENIZE = {"prompt": "The mill wheel turns."}, {"tokens": [504, 2817]}
_RERANK = {"query": "What turns a mill?", "documents": ["Water turns the wheel.", "Bread is baked."], "top_n": 1}
_SCORE = {"text_1": "What turns a mill?", "text_2": ["Water turns the wheel.", "Bread is baked."]}
_INPUT = {"input": ["The mill wheel turns."]}
_ADAPTER_NAME = {"lora_name": "sql"}
_ADAPTER = {"lora_name": "sql", "lora_path": "sql-lora"}
_ADAPTER_TENSORS = {"lora_name": "sql", "tensors": "", "config_dict": {"r": 8, "lora_alpha": 16}}
EXAMPLES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": _CHAT,
    "/v1/completions": {"prompt": "The capital of France is", "max_tokens": 16},
    "/v1/responses": {"input": "What is the capital of France?", "max_output_tokens": 64},
    "/v1/responses/input_tokens": {"input": "What is the capital of France?"},
    "/v1/messages": {"max_tokens": 64, "messages": _MESSAGES},
    "/v1/messages/count_tokens": {"messages": _MESSAGES},
    "/v1/audio/transcriptions": {"file": ""}, "/v1/audio/translations": {"file": ""},
    "/v1/embeddings": _INPUT,
    "/v1/rerank": _RERANK, "/v2/rerank": _RERANK, "/rerank": _RERANK,
    "/v1/score": _SCORE, "/score": _SCORE,
    "/v1/classify": _INPUT, "/classify": _INPUT,
    "/generate": {"text": "The capital of France is", "sampling_params": {"max_new_tokens": 16}},
    "/encode": {"text": "The mill wheel turns."},
    "/api/chat": {"model": "default", "messages": _MESSAGES, "stream": False},
    "/api/generate": {"model": "default", "prompt": "What is the capital of France?", "stream": False},
    "/api/show": {"model": "default"},
    "/api/embed": {"model": "default", **_INPUT},
    "/api/embeddings": {"model": "default", "prompt": "The mill wheel turns."},
    "/tokenize": _TOKENIZE, "/v1/tokenize": _TOKENIZE,
    "/detokenize": _DETOKENIZE, "/v1/detokenize": _DETOKENIZE,
    "/apply-template": {"messages": _MESSAGES},
    "/abort_request": {"abort_all": True},
    "/v1/load_lora_adapter": _ADAPTER, "/load_lora_adapter": _ADAPTER,
    "/v1/load_lora_adapter_from_tensors": _ADAPTER_TENSORS, "/load_lora_adapter_from_tensors": _ADAPTER_TENSORS,
    "/v1/unload_lora_adapter": _ADAPTER_NAME, "/unload_lora_adapter": _ADAPTER_NAME,
}
"""A small body of each route that takes one, by path."""

_WITHOUT_EFFECT = (
    "disable_fallback defer_loading allowed_callers output_schema lora_int_id include_obfuscation user metadata "
    "service_tier safety_identifier prompt_cache_key log_metrics prompt_cache_retention prompt_cache_options "
    "client_metadata generate_summary ReasoningOptions.context no_logs verbosity keep_alive verbose cache_control "
    "abort_message summary keep eager_input_streaming input_examples caller media_type InputAudio.format num_keep "
    "num_batch num_gpu main_gpu num_thread numa use_mmap use_mlock low_vram"
)
_FROM_EARLIER = (
    "refusal annotations audio function_call status phase encrypted_content citations signature InputPart.logprobs"
)
FIELDS = {
    # sampling
    "temperature": "0 always takes the most likely token; higher values sample more evenly.",
    "top_p": "Sample among the most likely tokens whose probabilities add up to this.",
    "top_k": "Sample among so many of the most likely tokens; 0 or -1: among all.",
    "min_p": "Leave out tokens with less than this share of the best token's probability.",
    "repetition_penalty": "Above 1 makes tokens of prompt and output less likely.",
    "presence_penalty": "Subtracted once from the logits of tokens in the output.",
    "frequency_penalty": "Subtracted from a token's logit for each time it is in the output.",
    "seed": "Makes sampling repeatable; -1: none.",
    "n": "Number of choices for each prompt.",
    "logit_bias": "Added to logits, by token id.",
    "bad_words": "Texts that must not be written.",
    "allowed_token_ids": "Only these tokens may be sampled.",
    "dry_multiplier": "Strength of DRY, which makes continuing a repeated sequence less likely; 0: off.",
    "dry_base": "How fast DRY's penalty grows with the length of the sequence.",
    "dry_allowed_length": "Sequences shorter than this may be repeated.",
    "dry_penalty_last_n": "How many tokens back DRY looks; -1: the whole context.",
    "dry_range": "Another name of `dry_penalty_last_n`, in which 0 is the whole context.",
    "dry_sequence_breakers": "No repeated sequence goes past a token that holds one of these.",
    "xtc_probability": "How often XTC excludes the most likely tokens; 0: off.",
    "xtc_threshold": "XTC excludes tokens of at least this probability, except for the least likely of them.",
    # form of the output
    "json_schema": "The output follows this JSON schema.",
    "regex": "The output matches this regular expression.",
    "ebnf": "The output follows this grammar.",
    "grammar": "The output follows this grammar.",
    "json": "The output follows this JSON schema.",
    "json_object": "The output is a JSON object.",
    "choice": "The output is one of these texts.",
    "structural_tag": "Free text with structured parts.",
    "structures": "The structured parts: `begin`, `schema`, `end` of each.",
    "triggers": "Texts that start a structured part.",
    "response_format": "The output's form: text, a JSON object, a JSON schema or structural tags.",
    "structured_outputs": "The output's form, as vLLM's clients give it.",
    "schema": "The JSON schema.",
    "format": "The output's form: JSON, or a JSON schema.",
    "strict": "Enforce the JSON schema.",
    "namespace": "The namespace of the function.",
    # stopping
    "max_tokens": "The longest output, in tokens.",
    "max_output_tokens": "The longest output, in tokens; reasoning counts.",
    "max_new_tokens": "The longest output, in tokens.",
    "min_tokens": "The output does not end before so many tokens.",
    "min_new_tokens": "The output does not end before so many tokens.",
    "stop": "Texts that end the output; they are not part of it.",
    "stop_sequences": "Texts that end the output; they are not part of it.",
    "stop_regex": "Patterns that end the output.",
    "stop_token_ids": "Tokens that end the output.",
    "ignore_eos": "Do not end at the model's end token.",
    "include_stop_str_in_output": "Keep the stop text in the output.",
    "skip_special_tokens": "Leave special tokens out of the text; true by default.",
    "spaces_between_special_tokens": "Put blanks between special tokens.",
    "deadline_s": "Seconds from arrival after which the request fails with 504.",
    # identity and scheduling
    "model": "The served model's name, or that of an adapter, also as `base:adapter`; may be left out.",
    "lora_path": "The name of the LoRA adapter to use; elsewhere it is given as the model.",
    "LoadAdapterRequest.lora_path": "Folder or GGUF file of the adapter, inside `--lora-folders`.",
    "lora_name": "The adapter's name, by which requests choose it as their model.",
    "load_inplace": "Replace a loaded adapter of this name; running requests end with the old one.",
    "pinned": "Keep the adapter on the device.",
    "LoadTensorsRequest.tensors": "Content of adapter_model.safetensors, in base64.",
    "config_dict": "Content of adapter_config.json.",
    "stream": "Send the response as it is made.",
    "stream_options": "What streams tell besides.",
    "include_usage": "Send token counts in a last chunk.",
    "continuous_usage_stats": "Send token counts in every chunk.",
    "store": "Keep the response for later requests, at `/v1/responses`; elsewhere without effect.",
    "request_id": "The request's id, for logs and `/abort_request`.",
    "rid": "The request's id, for logs and `/abort_request`.",
    "priority": "Higher values are served first, where the server schedules by priority.",
    "cache_salt": "Requests with different salts share no cached prefix.",
    "bootstrap_host": "Set by routers: the host of the prefill server's transfer agent.",
    "bootstrap_port": "Set by routers: the port of the prefill server's transfer agent; 8998 by default.",
    "bootstrap_room": "Set by routers: a number that names the exchange of KV pages on both servers.",
    "kv_transfer_params": "Set by routers: the exchange of KV pages, in vLLM's form.",
    "do_remote_decode": "Compute the prompt here; another server fetches its pages.",
    "do_remote_prefill": "Fetch the pages of the prompt from another server.",
    "remote_request_id": "As in the prefill server's response.",
    "remote_host": "As in the prefill server's response.",
    "remote_port": "As in the prefill server's response.",
    "abort_all": "Abort all running requests.",
    # what the response shows
    "logprobs": "Show log probabilities of the output's tokens.",
    "top_logprobs": "Show so many of the most likely tokens at each position.",
    "top_logprobs_num": "Show so many of the most likely tokens at each position.",
    "prompt_logprobs": "Show log probabilities of the prompt's tokens, with so many candidates.",
    "logprob_token_ids": "Show the log probabilities of these tokens at each position.",
    "token_ids_logprob": "Show the log probabilities of these tokens at each position.",
    "logprob_start_len": "The prompt position from which log probabilities are shown; -1: of the output only.",
    "return_logprob": "Show log probabilities.",
    "return_text_in_logprobs": "Show the tokens' texts beside their log probabilities.",
    "return_token_ids": "Show the token ids of prompt and output.",
    "return_tokens_as_token_ids": "Write the tokens of log probabilities as `token_id:7`.",
    "return_prompt_token_ids": "Show the token ids of the prompt.",
    "return_timings": "Show how long the request waited, prefilled and decoded.",
    "return_token_strs": "Show the tokens' texts beside their ids.",
    "echo": "Put the prompt before the output.",
    "include": "What the response shows besides.",
    # prompts
    "messages": "The conversation.",
    "prompt": "The text to continue, or its token ids.",
    "text": "The text.",
    "file": "The clip: WAV, MP3, FLAC, Ogg, M4A or WebM.",
    "language": "The clip's language, as ISO 639-1 names it (`en`); found in the sound where it is left out.",
    "timestamp_granularities": "`segment`, `word` or both, with `verbose_json`.",
    "chunking_strategy": "`auto`, which has no effect: clips are always divided into windows.",
    **{
        f"{record}.{name}": about
        for record in ("TranscriptionRequest", "TranslationRequest")
        for name, about in {
            "prompt": "Text that might come before the clip: its style and spelling are continued.",
            "response_format": "JSON, with segments (`verbose_json`), plain text, or subtitles.",
            "temperature": "0: the most likely text, and where that is repetitive or improbable higher temperatures.",
        }.items()
    },
    "input": "The input: text, a list of texts, or token ids.",
    "ResponsesRequest.input": "The conversation: text, or a list of items.",
    "ResponsesRequest.text": "The output's form.",
    "input_ids": "Token ids instead of text; one list, or one for each prompt.",
    "system": "The system prompt.",
    "instructions": "The system prompt.",
    "background": "Answer at once, and go on without the client; the response is stored and can be cancelled.",
    "previous_response_id": "Continue this stored response.",
    "sampling_params": "How to sample: one object, or one for each prompt.",
    "suffix": "The text after the gap that the output fills, where the model can.",
    "best_of": "Must equal `n`.",
    "modalities": "Text only.",
    "add_special_tokens": "Put the tokenizer's begin and end tokens around the text.",
    "truncate_prompt_tokens": "Keep only the last so many tokens; -1: as many as leave room for the output.",
    "truncation_side": "Which end of a prompt that is too long is cut.",
    "truncation": "A conversation that is too long is refused, with `auto`, too.",
    "add_generation_prompt": "Begin the assistant's answer; true by default.",
    "continue_final_message": "Continue the last message instead of beginning a new one.",
    "chat_template": "Jinja text instead of the model's chat template, if the server allows it.",
    "chat_template_kwargs": "Variables for the chat template.",
    "tokens": "Token ids.",
    # reasoning
    "reasoning_effort": "How long to reason.",
    "enable_thinking": "Reason before the answer.",
    "thinking": "Switches reasoning on or off, and limits it.",
    "think": "Reason before the answer, or how long.",
    "reasoning": "How long to reason.",
    "effort": "How long to reason.",
    "separate_reasoning": "Return reasoning apart from the answer; true by default.",
    "stream_reasoning": "Stream reasoning as it is written; false: when it is over.",
    "include_reasoning": "Return the reasoning.",
    "thinking_budget": "The longest reasoning, in tokens.",
    "budget_tokens": "The longest reasoning, in tokens.",
    "display": "`omitted` leaves the reasoning out of the response.",
    "output_config": "How long to reason, and the output's form.",
    "context_management": "Edits of the conversation; only clearing of reasoning is supported.",
    "edits": "Edits of the conversation.",
    "thread": "Refused, so that clients send the whole conversation.",
    # tools
    "tools": "Functions that the model may call.",
    "tool_choice": "Whether a tool must be called, and which.",
    "parallel_tool_calls": "Allow several calls in one answer.",
    "disable_parallel_tool_use": "Allow one call only.",
    "allowed_tools": "The tools that may be called.",
    "mode": "`required`: one of them must be called.",
    "function": "The function.",
    "custom": "The custom tool.",
    "CustomCall.input": "The input: text.", "InputItem.input": "The input of a custom tool: text.",
    "CustomDetails.format": "What the input may be: any text, or text that a grammar allows.",
    "ResponseCustomTool.format": "What the input may be: any text, or text that a grammar allows.",
    "GrammarInput.grammar": "The grammar.",
    "syntax": "A regular expression, or a grammar in Lark.",
    "definition": "The regular expression or grammar.",
    "parameters": "JSON schema of the arguments.",
    "input_schema": "JSON schema of the arguments.",
    "description": "What it does, for the model.",
    "arguments": "The arguments, as JSON.",
    "tool_calls": "Calls that the assistant made.",
    "tool_call_id": "The call that this message is the result of.",
    "tool_use_id": "The call that this is the result of.",
    "tool_name": "The tool that this message is the result of.",
    "call_id": "The call's id.",
    "is_error": "The tool failed.",
    # messages
    "role": "Who wrote it.",
    "content": "What was written: text, or parts.",
    "name": "The name.",
    "type": "The kind.",
    "id": "The id.",
    "reasoning_content": "The assistant's reasoning.",
    "ChatMessage.reasoning": "Another name of `reasoning_content`.",
    "OllamaMessage.thinking": "The assistant's reasoning.",
    "ThinkingBlock.thinking": "The reasoning.",
    "ToolUseBlock.input": "The arguments.",
    "InputItem.summary": "The reasoning's summary, used where there is no `content`.",
    "output": "The call's result.",
    "RefusalPart.refusal": "The refusal, taken as text.",
    "ChatMessage.refusal": "The refusal, taken as text where there is no `content`.",
    "images": "Images as base64.",
    "image_data": "Images at the prompt's placeholders: an address or base64, a list, or an entry for each prompt.",
    "audio_data": "Audio, in the form of `image_data`.",
    "video_data": "Video, in the form of `image_data`.",
    "image_url": "An image: http, https, a data URI, or a file that the server may read.",
    "audio_url": "A clip of audio, as `image_url`.",
    "video_url": "A video, as `image_url`.",
    "input_audio": "A clip of audio.",
    "url": "http, https, a data URI, or a file that the server may read.",
    "detail": "`low` shrinks the image to 512 pixels first; other values have no effect.",
    "source": "Where the image comes from.",
    "data": "The content, as base64.", "RedactedBlock.data": "Reasoning that another server has encrypted; left out.",
    "file_id": "Refused: files are not stored.",
    # embeddings and scores
    "dimensions": "Keep the first so many values of each embedding, at unit length.",
    "encoding_format": "Numbers as a list, or as base64 of 32-bit floats.",
    "use_activation": "False returns raw logits.",
    "activation": "Older name of `use_activation`.",
    "query": "What the documents or items are compared with.",
    "documents": "The texts to compare with the query.",
    "items": "Texts that follow the query, each scored by itself.",
    "text_1": "The first text of each pair.",
    "text_2": "The second text of each pair.",
    "top_n": "Return only the best so many.",
    "return_documents": "Return the documents' texts.",
    "instruct": "The instruction, for models that score by a prompt.",
    "label_token_ids": "Tokens whose probabilities are the scores.",
    "apply_softmax": "Normalise over the labels.",
    "item_first": "Put the item before the query.",
    "truncate": "Cut texts that are too long; true by default.",
    # Ollama
    "options": "How to sample.",
    "num_predict": "The longest output, in tokens; 0 or less: no limit.",
    "num_ctx": "Must fit the server's context.",
    "repeat_penalty": "Above 1 makes tokens of prompt and output less likely.",
    **dict.fromkeys(_WITHOUT_EFFECT.split(), "Accepted without effect."),
    **dict.fromkeys(_FROM_EARLIER.split(), "Of a message that a server returned; accepted without effect."),
    **{name: f"Another name of `{other}`." for name, other in {
        "guided_json": "json_schema", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "ebnf",
        "max_completion_tokens": "max_tokens", "no_stop_trim": "include_stop_str_in_output",
        "sampling_seed": "seed", "extra_key": "cache_salt", "thinking_token_budget": "thinking_budget",
        "max_thinking_tokens": "thinking_budget", "queries": "text_1",
    }.items()},
}
"""What a field of a request does, as Markdown: by its name, or by ``Record.name`` where it means another thing."""


def describe_fields(components: dict[str, Any], bodies: list[Any]) -> None:
    """Add descriptions to the properties of the records that the schemas of request bodies refer to."""
    pending, found = list(bodies), set()
    while pending:
        part = pending.pop()
        if isinstance(part, list):
            pending += part
        elif isinstance(part, dict):
            pending += part.values()
            record = part["$ref"].rpartition("/")[2] if isinstance(part.get("$ref"), str) else None
            if record is not None and record not in found:
                found.add(record)
                pending.append(components[record])
    for record in found:
        for name, field in components[record].get("properties", {}).items():
            note = FIELDS.get(f"{record}.{name}", FIELDS.get(name))
            if note is not None:
                field.setdefault("description", note)
