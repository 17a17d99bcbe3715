"""What of a `config.json` is not acted on: keys nobody here knows, and values that another one overrides.

In: a parsed config that has a geometry. Out: sentences naming the keys, for the audit to show as warnings.
A key that is ignored without a word is how a changed model runs as an unchanged one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

MOST_NAMED = 8
GENERIC = frozenset(
    # what transformers writes for any model, and what says nothing about the forward pass
    "_attn_implementation _attn_implementation_autoset _name_or_path add_cross_attention architectures "
    "attention_dropout bad_words_ids begin_suppress_tokens cache_implementation chunk_size_feed_forward "
    "cross_attention_hidden_size decoder_start_token_id diversity_penalty do_sample dtype early_stopping "
    "encoder_no_repeat_ngram_size exponential_decay_length_penalty finetuning_task forced_bos_token_id "
    "forced_eos_token_id id2label initializer_range is_decoder is_encoder_decoder label2id "
    "length_penalty max_length min_length model_type no_repeat_ngram_size num_beam_groups num_beams "
    "num_return_sequences output_attentions output_hidden_states output_scores prefix problem_type "
    "pruned_heads remove_invalid_values repetition_penalty return_dict return_dict_in_generate "
    "sep_token_id suppress_tokens task_specific_params temperature tf_legacy_loss tie_encoder_decoder "
    "tie_word_embeddings tokenizer_class top_k top_p torch_dtype torchscript transformers_version "
    "typical_p use_bfloat16 use_cache unsloth_fixed unsloth_version".split()
)
REFUSED_ELSEWHERE = frozenset(
    {"auto_map", "compression_config", "quantization", "quantization_config"}
)
SHARED = frozenset(
    "attention_bias final_logit_softcapping head_dim hidden_activation hidden_size intermediate_size "
    "layer_types max_position_embeddings num_attention_heads num_hidden_layers num_key_value_heads "
    "rms_norm_eps rope_parameters sliding_window sliding_window_pattern _sliding_window_pattern "
    "use_bidirectional_attention vocab_size".split()
)
OF_FAMILY = {
    "gemma3": SHARED
    | set(
        "attn_logit_softcapping query_pre_attn_scalar rope_local_base_freq rope_scaling "
        "rope_theta".split()
    ),
    "gemma4": SHARED
    | set(
        "attention_k_eq_v enable_moe_block global_head_dim hidden_size_per_layer_input "
        "moe_intermediate_size num_experts num_global_key_value_heads num_kv_shared_layers "
        "per_layer_config top_k_experts use_double_wide_mlp vocab_size_per_layer_input".split()
    ),
}
OUTER = frozenset(
    "audio_config mm_tokens_per_image text_config vision_config vision_soft_tokens_per_image".split()
)
ID_ENDINGS = ("_token_id", "_token_ids", "_token_index")


def config_notes(config: dict[str, Any], family: str) -> tuple[str, ...]:
    """Sentences about what is ignored. `family`: key of the registry."""
    nested = config.get("text_config")
    text: dict[str, Any] = nested if isinstance(nested, dict) else config
    notes = list(_overridden(config, text))
    foreign = set(_foreign(text, OF_FAMILY[family] | OUTER))
    if text is not config:
        # The text part's own keys at the top are compared with it by ConfigReader.
        foreign |= set(_foreign(config, OUTER | OF_FAMILY[family]))
    if foreign:
        named = sorted(foreign)
        more = f" and {len(named) - MOST_NAMED} more" if len(named) > MOST_NAMED else ""
        notes.append(
            f"config.json has keys that this toolkit does not know and does not act on: "
            f"{', '.join(name[:60] for name in named[:MOST_NAMED])}{more}."
        )
    return tuple(notes)


def _foreign(part: dict[str, Any], known: Iterable[str]) -> Iterator[str]:
    allowed = GENERIC | REFUSED_ELSEWHERE | set(known)
    for key, value in part.items():
        # null says nothing, whatever the key means
        if value is not None and key not in allowed and not key.endswith(ID_ENDINGS):
            yield key


def _overridden(whole: dict[str, Any], text: dict[str, Any]) -> Iterator[str]:
    heads = text.get("num_global_key_value_heads")
    if heads is not None and not text.get("attention_k_eq_v"):
        yield (
            f"config.json: num_global_key_value_heads {heads} counts only with attention_k_eq_v, which is not "
            "set; as in transformers, global layers have as many KV heads as sliding ones."
        )
    inner, outer = text.get("tie_word_embeddings"), whole.get("tie_word_embeddings", True)
    if inner is not None and inner != outer:
        said = "leaves it out" if "tie_word_embeddings" not in whole else f"says {outer}"
        yield (
            f"config.json: text_config says tie_word_embeddings {inner}, the top {said}; as in transformers, "
            f"{outer} is taken."
        )
    pattern, types = text.get("sliding_window_pattern"), text.get("layer_types")
    if isinstance(pattern, int) and pattern > 0 and isinstance(types, list):
        by_pattern = ["full_attention" if not (i + 1) % pattern else "" for i in range(len(types))]
        if any((a == "full_attention") != bool(b) for a, b in zip(types, by_pattern, strict=True)):
            yield (
                f"config.json: sliding_window_pattern {pattern} does not give its layer_types; as in "
                "transformers, layer_types are taken."
            )
