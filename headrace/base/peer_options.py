"""Options under the names of vLLM, SGLang and llama.cpp: what does the same here. They are explained, not accepted,
since their units and defaults differ."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

from headrace.base.option import suggest

# In braces: an option of ours; {no_x} switches x off.
_SAME: dict[str, str] = {
    "{model}": "model_path hf_repo",
    "{tokenizer}": "tokenizer_path",
    "{skip_tokenizer}": "skip_tokenizer_init",
    "{max_model_len}": "context_length max_model_length max_seq_len ctx_size n_ctx",
    "{config_overrides}": "hf_overrides json_model_override_args",
    "{override_generation_config}": "preferred_sampling_params",
    "{served_model_name}": "alias",
    "{memory_fraction}": "gpu_memory_utilization mem_fraction_static",
    "{max_running_requests}": "max_num_seqs parallel n_parallel",
    "{max_step_tokens}": "max_num_batched_tokens chunked_prefill_size max_prefill_tokens batch_size ubatch_size",
    "{max_queued}": "max_queued_requests",
    "{policy}": "scheduling_policy schedule_policy",
    "{page_size}": "block_size",
    "{host_cache_gb}": "swap_space hicache_size hicache_ratio enable_hierarchical_cache kv_offloading_backend",
    "{seed}": "random_seed",
    "{tensor_parallel_size}": "tp tp_size",
    "{pipeline_parallel_size}": "pp pp_size",
    "{data_parallel_size}": "dp dp_size",
    "{enable_expert_parallel}": "ep ep_size expert_parallel_size",
    "{all2all_backend}": "moe_a2a_backend",
    "{moe_experts}": "moe_runner_backend moe_backend",
    "{executor}": "distributed_executor_backend",
    "{master_addr} and {master_port}": "dist_init_addr",
    "{speculative_config}": (
        "speculative_algorithm speculative_algo speculative_model speculative_draft_model_path speculative_num_steps "
        "speculative_eagle_topk speculative_num_draft_tokens num_speculative_tokens model_draft"
    ),
    "{lora_modules}": "lora_paths lora",
    "{max_loras}": "max_loras_per_batch",
    "{tool_parser}": "tool_call_parser",
    "{cors_origins}": "allowed_origins",
    "{log_level}": "uvicorn_log_level log_level_http",
    "{log_requests}": "enable_log_requests",
    "{otlp_endpoint}": "otlp_traces_endpoint",
    "{stall_timeout_s}": "watchdog_timeout",
    "{profile_folder}": "profiler_config",
    "{threads}": "n_threads",
    "{kv_dtype}": "cache_type_k cache_type_v",
}
_OTHERWISE: dict[str, str] = {
    "use {kv_pages}, in pages of {page_size} tokens": "num_gpu_blocks_override max_total_tokens",
    "set {graphs} to off": "enforce_eager disable_cuda_graph",
    "set {overlap_depth} to 1": "disable_overlap_schedule no_async_scheduling",
    "set {overlap_depth} to 2, the default on a GPU": "async_scheduling",
    "set {task} to embed": "is_embedding embedding",
    "use {task}": "runner convert",
    "use {no_prefix_cache}": "disable_radix_cache no_enable_prefix_caching",
    "use {graphs}": "compilation_config cuda_graph_max_bs cudagraph_capture_sizes max_seq_len_to_capture",
    "prefixes are cached unless {no_prefix_cache} is set; leave it out": "enable_prefix_caching",
    "it is always on; leave it out": (
        "enable_chunked_prefill enable_auto_tool_choice enable_metrics enable_reasoning enable_sleep_mode jinja "
        "metrics cont_batching enable_memory_saver enable_cache_report enable_prompt_tokens_details"
    ),
    "no code of a checkpoint is ever run; leave it out": "trust_remote_code",
    "no request is logged unless {log_requests} is set; leave it out": (
        "disable_log_requests disable_log_stats disable_uvicorn_access_log no_enable_log_requests"
    ),
    "the server chooses the grammar library; leave it out": (
        "guided_decoding_backend grammar_backend structured_outputs_config"
    ),
    "the whole model is on the device; leave it out": "n_gpu_layers gpu_layers cpu_offload_gb",
    "models are downloaded to the folder HF_HOME in the environment": "download_dir",
    "TLS ends in a proxy before the server": "ssl_keyfile ssl_certfile",
}
ANSWERS: dict[str, str] = {
    **{name: f"here it is {option}" for option, names in _SAME.items() for name in names.split()},
    **{name: answer for answer, names in _OTHERWISE.items() for name in names.split()},
}
_OPTION = re.compile(r"\{(\w+)\}")


def explain_unknown(name: str, known: Collection[str], spell: Callable[[str], str]) -> str:
    """What to do instead of an option ``name`` (with underscores) that is none of ``known``: ``"; here it is …"`` for
    one of another server, ``"; did you mean …?"`` for a misspelled one, or nothing. ``spell`` writes an option as the
    user would, such as ``--page-size``."""
    answer = ANSWERS.get(name)
    if answer and all(option in known or option.removeprefix("no_") in known for option in _OPTION.findall(answer)):
        return "; " + _OPTION.sub(lambda found: spell(found[1]), answer)
    return suggest(name, known, spell=spell)


def spell_keyword(option: str) -> str:
    """``page_size``; ``prefix_cache=False`` for ``no_prefix_cache``."""
    return f"{option.removeprefix('no_')}=False" if option.startswith("no_") else option
