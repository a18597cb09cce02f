"""`read_config`: reads a Hugging Face config, once; the table `KINDS` checks its
values.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from flax_mha._src.convert.families import FAMILIES, Family
from flax_mha._src.convert.layer_rules import Values
from flax_mha._src.convert.process_heads import MAX_FACTOR
from flax_mha._src.core.validation import INT32_MAX, is_finite, is_int

# Other names of keys. If a config has several of them, the first in this order counts.
ALIASES: dict[str, tuple[str, ...]] = {
    "num_attention_heads": (
        "n_head",
        "num_heads",
        "n_heads",
        "attention_heads",
        "encoder_attention_heads",
        "decoder_attention_heads",
        "decoder_num_attention_heads",
    ),
    "num_key_value_heads": ("kv_n_heads",),
    "hidden_size": ("d_model", "n_embd", "n_embed", "dim", "emb_dim"),
    "head_dim": ("d_kv", "attention_head_dim"),
    "rope_theta": ("global_rope_theta", "rotary_emb_base"),
    "rope_local_base_freq": ("local_rope_theta",),
    "partial_rotary_factor": ("rotary_pct",),
    "sliding_window": ("attention_window_size", "window_size"),
    "sliding_window_pattern": ("global_attn_every_n_layers",),
    "layer_types": ("layers_block_type",),
    "rms_norm_eps": ("norm_eps", "layer_norm_eps"),
    "full_attention_interval": ("layer_group_size",),
}
COMMON = {
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_size",
    "head_dim",
    "rms_norm_eps",
    "rope_theta",
    "rope_parameters",
    "rope_scaling",
    "layer_types",
    "position_embedding_type",
    "num_hidden_layers",
    "original_max_position_embeddings",
}
# Keys whose null has a meaning; a null under any other key means that it is left out.
NULL_COUNTS: tuple[str, ...] = (
    "sliding_window",
    "attn_logit_softcapping",
    "num_key_value_heads",
    "local_attention",
    "q_lora_rank",
    "head_dim",
    "global_head_dim",
    "attention_value_scale",
)
# The model types of text models, by those of the multimodal models whose `text_config`
# may lack one.
NAMED_TEXT = (
    "qwen2_vl qwen2_5_vl qwen3_vl qwen3_vl_moe glm4v llama4 gemma3 gemma3n gemma4 "
    "gemma4_unified"
)
PARTS = {
    "emu3": "emu3_text_model",
    "mllama": "mllama_text_model",
    **{name: f"{name}_text" for name in NAMED_TEXT.split()},
    **{name: name for name in ("gemma4_assistant", "gemma4_unified_assistant")},
}
# Keys that only some families read.
OPTIONAL = set().union(*(family.keys for family in FAMILIES.values())) - COMMON
UNKNOWN = Family(refused="it is not known")


class Config(NamedTuple):
    """A Hugging Face config that was read: what `describe`, `from_hf` and
    `RoPE.from_config` need of it.
    """

    family: Family  # `UNKNOWN` if `FAMILIES` lacks its model type
    given: Values  # what the config says, by the main names of keys
    values: Values  # the same, with the defaults of the family

    @property
    def model_type(self) -> Any:
        """The model type of the part that has the attention; None if the config has
        none.
        """
        return self.given.get("model_type")


class ValueKind(NamedTuple):
    """The type and range of a config value: in words, for errors, and as a function
    that checks a value.
    """

    expected: str
    fits: Callable[[Any], bool]


def _integer(least: int) -> ValueKind:
    return ValueKind(
        f"an integer >= {least}", lambda x: is_int(x) and least <= x <= INT32_MAX
    )


def _list(entries: str, fits: Callable[[Any], bool]) -> ValueKind:
    return ValueKind(
        f"a list of {entries}",
        lambda x: isinstance(x, list | tuple) and all(map(fits, x)),
    )


def _each(keys: str, kind: ValueKind) -> dict[str, ValueKind]:
    return dict.fromkeys(keys.split(), kind)


SIZE = _integer(1)
COUNT = _integer(0)
WIDTH = _integer(2)
FLAG = ValueKind("True or False", lambda x: isinstance(x, bool | np.bool_))
TEXT = ValueKind("a string", lambda x: isinstance(x, str))
TEXTS = _list("strings", TEXT.fits)
TEXT_OR_TEXTS = ValueKind(
    "a string or a list of strings", lambda x: TEXT.fits(x) or TEXTS.fits(x)
)
INDICES = _list("integers", is_int)
INTEGERS = _list("positive integers", SIZE.fits)
MAPPING = ValueKind("a dict", lambda x: isinstance(x, Mapping))
POSITIVE = ValueKind("a finite number > 0", lambda x: is_finite(x) and x > 0)
NUMBER = ValueKind("a finite number >= 0", lambda x: is_finite(x) and x >= 0)
FACTOR = ValueKind(
    f"a number in (0, {MAX_FACTOR:g}]",
    lambda x: is_finite(x) and 0 < x <= MAX_FACTOR,
)
FRACTION = ValueKind("a number in (0, 1]", lambda x: is_finite(x) and 0 < x <= 1)

# Of `use_bidirectional_attention`: which tokens attend to later ones.
WAYS = ("all", "vision")
# Keys of the number of layers.
LAYERS: tuple[str, ...] = (
    "num_hidden_layers",
    "n_layer",
    "num_layers",
    "n_layers",
    "encoder_layers",
    "decoder_layers",
    "num_layers_per_stack",
)
NESTED = ("rope_scaling", "rope_parameters")
# Keys of the size of a head, or of features that heads share.
HEAD_SIZES = ("head_dim", "num_attention_heads", "hidden_size", "embed_dim")
# Parameters of rotary embeddings, in the config itself or nested in `NESTED`.
ROTARY: dict[str, ValueKind] = {
    **_each("rope_type type", TEXT),
    **_each("truncate mrope_interleaved interleaved rope_interleave", FLAG),
    **_each(
        "rope_theta rope_local_base_freq factor alpha low_freq_factor "
        "high_freq_factor rotary_dim max_position_embeddings "
        "original_max_position_embeddings beta_fast beta_slow attention_factor "
        "short_mscale long_mscale",
        POSITIVE,
    ),
    **_each("mscale mscale_all_dim llama_4_scaling_beta", NUMBER),
    **_each("partial_rotary_factor rotary_pct", FRACTION),
    **_each("short_factor long_factor", _list("finite numbers > 0", POSITIVE.fits)),
    "mrope_section": ValueKind(
        "a list of positive integers", lambda x: INTEGERS.fits(x) and len(x) > 0
    ),
}
KINDS: dict[str, ValueKind] = {
    **ROTARY,
    **dict.fromkeys(NESTED, MAPPING),
    **dict.fromkeys(LAYERS, COUNT),
    **dict.fromkeys(HEAD_SIZES, SIZE),
    **_each(
        "encoder_attention_heads decoder_attention_heads num_key_value_heads "
        "num_kv_heads n_embed "
        "attention_hidden_size attention_chunk_size kv_lora_rank q_lora_rank "
        "qk_nope_head_dim qk_rope_head_dim qk_head_dim v_head_dim index_n_heads "
        "index_head_dim index_topk index_topk_freq global_head_dim "
        "num_global_key_value_heads sliding_window_size "
        "relative_attention_max_distance full_attention_interval "
        "no_rope_layer_interval attn_layer_period prefix_dense_sliding_window_pattern",
        SIZE,
    ),
    **_each("num_attention_heads_per_layer", INTEGERS),
    **_each(
        "max_window_layers first_k_dense_replace attn_layer_offset "
        "index_skip_topk_offset num_kv_shared_layers",
        COUNT,
    ),
    **_each("local_attention", WIDTH),
    **_each(
        "attention_bias attention_out_bias use_bias bias qkv_bias use_qkv_bias "
        "enable_bias rope_pairs rope_reversed new_decoder_architecture multi_query "
        "alibi use_sliding_window attention_k_eq_v use_qk_norm qk_layernorm causal "
        "attn_temperature_tuning is_decoder is_causal scale_attn_weights "
        "scale_attn_by_inverse_layer_idx use_mem_rope use_shared_attention_adapter "
        "rotary_value indexer_rope_interleave indexer_rope_last use_attention_gate",
        FLAG,
    ),
    **_each(
        "query_pre_attn_scalar attention_multiplier softmax_scale key_multiplier "
        "rms_norm_eps attn_logit_softcapping floor_scale",
        POSITIVE,
    ),
    **_each("clip_qkv attention_value_scale", FACTOR),
    **_each("attn_scale", NUMBER),
    **_each("position_embedding_type attention_type", TEXT),
    **_each(
        "layer_types mlp_layer_types attention_layers block_types indexer_types", TEXTS
    ),
    **_each("hybrid_override_pattern index_topk_pattern", TEXT_OR_TEXTS),
    **_each(
        "full_attn_idxs attn_layer_indices cross_attention_layers full_attn_layers",
        INDICES,
    ),
    **_each("linear_attn_config per_layer_config", MAPPING),
    "gating": ValueKind(
        "True, 'per-head' or 'per-element'",
        lambda x: x is True or x in ("per-head", "per-element"),
    ),
    # Configs without windows may have any.
    "sliding_window": ValueKind("an integer", is_int),
    # Text: EXAONE.
    "sliding_window_pattern": ValueKind(
        "an integer >= 0", lambda x: COUNT.fits(x) or TEXT.fits(x)
    ),
    "use_bidirectional_attention": ValueKind(
        "True, False, 'all' or 'vision'", lambda x: FLAG.fits(x) or x in WAYS
    ),
    "no_rope_layers": _list("0 and 1", lambda x: isinstance(x, int) and x in (0, 1)),
    "layer_rope_theta": _list("finite numbers >= 0", NUMBER.fits),
    "attention_types": _list(
        "pairs [layer types, repetitions]",
        lambda x: (
            isinstance(x, list | tuple)
            and len(x) == 2
            and TEXTS.fits(x[0])
            and COUNT.fits(x[1])
        ),
    ),
}


def read_config(config: object) -> Config:
    """Reads a config; raises a ValueError for a value of the wrong type.

    Aliases also get their main name in `ALIASES`. Nulls are left out, except for the
    keys in `NULL_COUNTS`. Keys that only other families read are left out, unless the
    family is refused: as in Transformers, a `sliding_window` in the config of a Llama
    has no effect.
    """
    if not isinstance(config, Mapping):
        raise ValueError(
            f"config must be a dict, but got {type(config).__name__}; use "
            "config.to_dict()."
        )
    given = _text_values(config)
    names = _add_main_names(given)
    family = FAMILIES.get(given.get("model_type", ""), UNKNOWN)
    if "n_embed" in family.keys and "n_embed" in given:
        # As in Transformers, the old key of BLOOM and Falcon counts before the new one.
        given["hidden_size"] = given["n_embed"]
        names["hidden_size"] = "n_embed"
    if family.refused:
        # Only its rotary positions are read, whose number depends on sizes.
        check_types(given, (*ROTARY, *NESTED, *HEAD_SIZES), names)
        return Config(family, given, family.keys | given)
    given = {
        key: value
        for key, value in given.items()
        if key not in OPTIONAL or key in family.keys
    }
    check_types(given, KINDS, names)
    # Some configs count layers, or the tokens of a window, in another way than others.
    if family.attentions > 1 and "num_layers" in given:
        given["num_hidden_layers"] = family.attentions * given["num_layers"]
    if "num_layers_per_stack" in given:
        given.pop("num_hidden_layers", None)
    if given.get("sliding_window_size"):
        # It does not count the token itself.
        given["sliding_window"] = given["sliding_window_size"] + 1
    values = family.keys | given
    if "local_attention" in values and values["sliding_window"] is None:
        # ModernBERT counts both sides.
        values["sliding_window"] = (values["local_attention"] or 0) // 2
    return Config(family, given, values)


def _text_values(config: Mapping[str, Any]) -> Values:
    """Returns the values of the text model in a config, including its model type."""
    model_type = config.get("model_type")
    if (
        model_type in ("clip", "siglip")
        and "text_config" in config
        and "vision_config" in config
    ):
        raise ValueError(
            "config must describe one part of the model, but has text_config and "
            'vision_config; pass config["text_config"] or config["vision_config"].'
        )
    text = config.get("text_config")
    if not text and "musicgen" in str(model_type):
        text = config.get("decoder")
    if not text:
        text = config
    if not isinstance(text, Mapping):
        raise ValueError(f"text_config must be a dict, but got {text!r}.")
    values = {
        key: value
        for key, value in text.items()
        if value is not None or key in NULL_COUNTS
    }
    of_attention = values.get("attn_config")
    if isinstance(of_attention, Mapping):
        # MPT and DBRX have keys of the attention in it.
        values = dict(of_attention) | {
            key: x for key, x in values.items() if key not in OPTIONAL
        }
    if isinstance(model_type, str):
        if model_type in PARTS and "patch_size" not in text:  # not a vision encoder
            values["model_type"] = PARTS[model_type]
        if model_type in FAMILIES and FAMILIES[model_type].refused:
            values["model_type"] = model_type
    if not isinstance(values.get("model_type", ""), str):
        raise ValueError(
            f"model_type must be a string, but got {values['model_type']!r}."
        )
    return values


def _add_main_names(values: Values) -> dict[str, str]:
    """Adds the main name of each key that has an alias; returns the key that gave the
    value, by main name.
    """
    names: dict[str, str] = {}
    for name, others in ALIASES.items():
        found = [key for key in (name, *others) if key in values]
        if found:
            # An alias with a value counts before a null.
            found.sort(key=lambda key: values[key] is None)
            names[name] = found[0]
            values[name] = values[found[0]]
    return names


def of_part(config: Config, is_decoder: bool) -> Config:
    """Returns the config of the decoder, or of the encoder, if the config has the
    number of heads of both.
    """
    encoder = "encoder_attention_heads"
    decoder = "decoder_attention_heads"
    own = decoder if is_decoder else encoder
    other = encoder if is_decoder else decoder
    if own not in config.given:
        return config
    given = {key: value for key, value in config.given.items() if key != other}
    given["num_attention_heads"] = given[own]
    return Config(config.family, given, config.family.keys | given)


def check_types(
    values: Mapping[str, Any], keys: Iterable[str], names: Mapping[str, str]
) -> None:
    """Raises a ValueError for the value of a key that has the wrong type or is out of
    range; null always fits.

    For errors, `names` maps keys that the config has under another name to that name.
    """
    for key in keys:
        if key not in KINDS or values.get(key) is None:
            continue
        value = values[key]
        kind = KINDS[key]
        if not kind.fits(value):
            raise ValueError(
                f"{names.get(key, key)} must be {kind.expected}, but got {value!r}."
            )
        if kind is MAPPING:
            # Rotary parameters, and values of single layers, may be nested once more:
            # by type or number of layers.
            inner_kinds = ROTARY if key in NESTED else KINDS
            check_types(value, inner_kinds, {})
            for inner in value.values():
                if isinstance(inner, Mapping):
                    check_types(inner, inner_kinds, {})
