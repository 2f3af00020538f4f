"""Fields of other servers' requests that Tercet does not have, and what becomes of each.

Sources: `CompletionRequest` of vLLM 0.33, tools/server of llama.cpp (0c1e570), docs/openapi.json of Text Generation
Inference 3.3.6, `GenerationConfig` and the text-generation pipeline of transformers 5, OpenAI's APIs for completions
and chat. docs/COMPATIBILITY.md is written from this table and the schemas (`python -m tests.compatibility`).
"""

from __future__ import annotations

from collections.abc import Mapping

from gateway.api.fields import OTHER_SAMPLERS
from gateway.api.tolerance import PeerField

_IMAGE = PeerField("wrong", note=": the models read text only")
_CHAT = PeerField("wrong", note=": this is not a chat API; send the text to continue as prompt")

# Values that clients send unasked: the peers' defaults that are neither null nor empty.
_SAMPLERS = (
    ["dry", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"],
    ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"],
)

PEER_FIELDS: Mapping[str, PeerField] = {
    # They change nothing: bookkeeping, caches, scheduling, presentation that Tercet has always or never.
    **dict.fromkeys(
        (
            # OpenAI
            *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
            *("prompt_cache_retention", "prompt_cache_options", "prediction", "parallel_tool_calls", "modalities"),
            *("reasoning_effort", "verbosity"),
            # vLLM
            *("priority", "request_id", "session_id", "cache_salt", "kv_transfer_params", "ec_transfer_params"),
            *("length_penalty", "early_stopping", "skip_special_tokens", "spaces_between_special_tokens"),
            *("add_special_tokens", "routed_experts_prompt_start", "mm_payload", "return_mm_kwargs"),
            *("thinking_token_budget", "stream_interval", "skip_clone"),
            # llama.cpp; of a sampler that is off, the other parameters too
            *("cache_prompt", "id_slot", "slot_id", "n_keep", "n_discard", "n_cache_reuse", "n_threads", "min_keep"),
            *("dynatemp_exponent", "dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers"),
            *("xtc_threshold", "mirostat_tau", "mirostat_eta", "adaptive_decay", "grammar_lazy", "grammar_triggers"),
            *("preserved_tokens", "backend_sampling", "sse_ping_interval", "reasoning_format", "reasoning_control"),
            *("reasoning_budget_tokens", "reasoning_budget_message", "reasoning_budget_start_tag"),
            *("reasoning_budget_end_tag", "reasoning_budget_end_tags", "penalize_nl", "chat_format"),
            *("chat_parser", "generation_prompt", "parse_tool_calls", "continue_final_message"),
            # Text Generation Inference, the Inference API and pipelines
            *("options", "use_cache", "wait_for_model", "clean_up_tokenization_spaces", "return_text", "padding"),
            *("pad_token_id", "bos_token_id", "eos_token_id", "handle_long_generation", "tokenizer", "batch_size"),
            *("num_workers", "truncation", "trust_remote_code", "torch_dtype", "device", "cache_implementation"),
            *("generation_config", "renormalize_logits", "remove_invalid_values", "diversity_penalty"),
            *("return_dict_in_generate", "task", "use_mtp", "cache_config", "max_cache_len", "token_healing"),
            *("decoder_start_token_id", "is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule"),
            *("assistant_confidence_threshold", "max_matching_ngram_size", "assistant_early_exit"),
            *("assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight", "speculation_type"),
            *("compile_config", "disable_compile", "continuous_batching_config", "low_memory", "prefill_chunk_size"),
        ),
        PeerField("none"),
    ),
    # The answer lacks something, or its text is another one.
    **dict.fromkeys(
        (
            *("prompt_logprobs", "logprob_token_ids", "return_tokens_as_token_ids", "return_token_ids"),
            *("return_weight_versions", "return_token_offsets", "return_tokens", "timings_per_token"),
            *("return_progress", "post_sampling_probs", "response_fields", "verbose", "top_logprobs"),
            *("return_tensors", "output_scores", "output_logits", "output_attentions", "output_hidden_states"),
            *("continuous_usage_stats", "use_beam_search", "stop_token_ids", "include_stop_str_in_output"),
            *("ignore_eos", "min_tokens", "bad_words", "vllm_xargs", "repetition_detection", "watermarking"),
            *("watermark", "n_indent", "t_max_predict_ms", "min_length", "min_new_tokens", "bad_words_ids"),
            *("force_words_ids", "constraints", "suppress_tokens", "begin_suppress_tokens", "sequence_bias"),
            *("guidance_scale", "assistant_model", "prompt_lookup_num_tokens", "prefix", "watermarking_config"),
            *("exponential_decay_length_penalty", "dola_layers", "forced_bos_token_id", "forced_eos_token_id"),
            *(
                "custom_params",
                "thinking",
                "logit_processor",
                "top_a",
                "smoothing_factor",
                "dynatemp_range",
                "mirostat",
            ),
            *("xtc_probability", "dry_multiplier", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"),
            *("penalty_alpha", "epsilon_cutoff", "eta_cutoff", "top_h"),
        ),
        PeerField("warned"),
    ),
    **{name: PeerField("warned", neutral, note) for name, (neutral, note) in OTHER_SAMPLERS.items()},
    "truncation_side": PeerField("warned", ("left",), "; prompts lose their beginning"),
    "samplers": PeerField("warned", _SAMPLERS, "; the order of samplers is fixed"),
    "num_beams": PeerField("warned", (1,), "; send n, best_of or num_return_sequences for several completions"),
    "num_beam_groups": PeerField("warned", (1,)),
    # The text would not be what its reader relies on.
    **dict.fromkeys(
        (
            *("grammar", "json_schema", "structured_outputs", "guided_json", "guided_regex", "guided_choice"),
            *("guided_grammar", "allowed_token_ids", "structural_tag", "regex", "ebnf", "lora", "prompt_embeds"),
        ),
        PeerField("wrong", note="; leave it out"),
    ),
    "adapter_id": PeerField("wrong", ("null",), "; leave it out"),  # Text Generation Inference publishes "null"
    "response_format": PeerField("wrong", ({"type": "text"},), "; leave it out or send the type text"),
    **dict.fromkeys(("image_data", "images", "multimodal_data", "multi_modal_data", "image", "audio"), _IMAGE),
    **dict.fromkeys(("messages", "tools", "functions"), _CHAT),
    **dict.fromkeys(("tool_choice", "function_call"), PeerField("wrong", ("none", "auto"), "; leave it out")),
}
