"""Reads the rotary embedding of a Hugging Face config, as a dict, into the words of `flax_mha.rope`.

Transformers 4 spreads it over the config (`rope_theta`, `rope_scaling`, `partial_rotary_factor`, ...), Transformers 5
collects it in `rope_parameters`, with one dict per kind of layer where those differ. Values that a config leaves out
are the defaults of its `model_type`, as in the configuration classes of Transformers 5.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from flax_mha.core.integers import is_int
from flax_mha.rope.scaling import check_number

LAYER_TYPES = ("full_attention", "sliding_attention")
# What a dict of parameters may hold, by type, and which keys it must hold; `_original_length` has defaults of its own.
COMMON = {"type", "rope_type", "rope_theta", "partial_rotary_factor"}
YARN = {"beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"}
LONGROPE = {"factor", "attention_factor", "short_mscale", "long_mscale"}
ORIGINAL = "original_max_position_embeddings"
KEYS: dict[str, tuple[set[str], set[str]]] = {  # optional, required
    "default": (set(), set()),
    "linear": (set(), {"factor"}),
    "llama3": ({ORIGINAL}, {"factor", "low_freq_factor", "high_freq_factor"}),
    "yarn": ({ORIGINAL, "factor", *YARN}, set()),
    "longrope": ({ORIGINAL, *LONGROPE}, {"short_factor", "long_factor"}),
}
# Keys of the config itself that begin like those of rotary embeddings and are either read here or of no concern.
TOP_LEVEL = {"rope_theta", "rope_scaling", "rope_parameters", "rope_local_base_freq", "rope_interleave"}
TOP_LEVEL |= {"rotary_dim", "rotary_pct", "rotary_emb_base"}

HEADS = ("num_attention_heads", "n_head", "decoder_num_attention_heads")
FEATURES = ("hidden_size", "n_embd")


class ModelDefaults(NamedTuple):
    """What a config of this `model_type` means where it says nothing."""

    base: float = 10_000.0
    fraction: float = 1.0
    local_base: float | None = None  # of sliding layers, if they differ
    interleaved: bool = False
    rotary_dim: int | None = None  # in features


PLAIN = "gemma gemma2 granite llama mistral olmo olmo2 phi3 qwen2 qwen2_moe qwen3 qwen3_moe starcoder2"
INTERLEAVED = "cohere2 deepseek_v2 deepseek_v3 glm4_moe_lite kimi_k2 youtu"
HALF_ROTATED = "bamba glm4_moe nemotron persimmon phi recurrent_gemma"
MODELS = {
    **{name: ModelDefaults() for name in PLAIN.split()},
    **{name: ModelDefaults(interleaved=True) for name in INTERLEAVED.split()},
    **{name: ModelDefaults(interleaved=True, rotary_dim=64) for name in ("codegen", "gptj")},
    **{name: ModelDefaults(fraction=0.5) for name in HALF_ROTATED.split()},
    **{name: ModelDefaults(fraction=0.5, interleaved=True) for name in ("glm", "glm4")},
    **{name: ModelDefaults(fraction=0.25) for name in ("gpt_neox", "qwen3_next", "stablelm")},
    **{
        name: ModelDefaults(500_000.0, interleaved=True)
        for name in ("cohere", "ernie4_5", "ernie4_5_moe", "llama4_text")
    },
    **{name: ModelDefaults(1_000_000.0, local_base=10_000.0) for name in ("gemma3_text", "gemma3n_text")},
    "helium": ModelDefaults(100_000.0, interleaved=True),
    "longcat_flash": ModelDefaults(10_000_000.0, interleaved=True),
    "mixtral": ModelDefaults(1_000_000.0),
    "modernbert": ModelDefaults(160_000.0, local_base=10_000.0),
    "moonshine": ModelDefaults(fraction=0.9, interleaved=True),
    "olmo3": ModelDefaults(500_000.0, local_base=500_000.0),  # its sliding layers differ by their lack of scaling
    "phimoe": ModelDefaults(1_000_000.0),
    "smollm3": ModelDefaults(2_000_000.0),
}


class Rotary(NamedTuple):
    """The fields of a RoPE, and those of its scaling."""

    base: float
    fraction: float
    interleaved: bool
    rope_type: str
    fields: dict[str, Any]


def read(config: Any, layer_type: str | None, max_length: int | None) -> Rotary:
    """The rotary embedding of one kind of layer; see `RoPE.from_config`."""
    if not isinstance(config, Mapping):
        raise ValueError(f"config must be a dict, but got {type(config).__name__}; use config.to_dict().")
    if layer_type is not None and layer_type not in LAYER_TYPES:
        raise ValueError(f"layer_type must be None or one of {', '.join(LAYER_TYPES)}, but got {layer_type!r}.")
    text = config.get("text_config") or config
    if not isinstance(text, Mapping):
        raise ValueError(f"text_config must be a dict, but got {text!r}.")
    config = _given(text)
    _check_numbers(config)
    if not isinstance(config.get("model_type", ""), str):
        raise ValueError(f"model_type must be a string, but got {config['model_type']!r}.")
    unknown = {key for key in config if str(key).startswith(("rope_", "rotary_"))} - TOP_LEVEL
    if unknown:
        raise ValueError(
            f"config must hold known keys, but got {', '.join(sorted(unknown))}; if it changes no rotation, remove it."
        )
    defaults = MODELS.get(config.get("model_type", ""), ModelDefaults(math.nan))
    parameters = _parameters(config, defaults, layer_type)
    rope_type = _type(parameters)
    fields = _fields(rope_type, parameters, config, max_length)
    interleaved = config.get("rope_interleave", defaults.interleaved)
    return Rotary(parameters["rope_theta"], _fraction(config, parameters, defaults), interleaved, rope_type, fields)


def _check_numbers(config: Mapping[str, Any]) -> None:
    """What is computed with must be numbers."""
    for key in ("factor", "max_position_embeddings", ORIGINAL, "partial_rotary_factor", "rotary_pct"):
        if config.get(key) is not None:
            check_number(key, config[key], above=0)


def _given(config: Mapping[str, Any]) -> dict[str, Any]:
    """Without the keys that are null: Transformers treats them as missing."""
    return {key: value for key, value in config.items() if value is not None}


def _parameters(config: dict[str, Any], defaults: ModelDefaults, layer_type: str | None) -> dict[str, Any]:
    """The dict of parameters of one kind of layer, in the form of Transformers 5."""
    found = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(found, Mapping):
        raise ValueError(f"rope_scaling and rope_parameters must be dicts, but got {found!r}.")
    local_base = config.get("rope_local_base_freq", config.get("local_rope_theta", defaults.local_base))
    nested = any(isinstance(value, Mapping) for value in found.values())
    if layer_type is None and (nested or local_base is not None):
        raise ValueError(
            f"layer_type must be one of {', '.join(LAYER_TYPES)}, because this model rotates them differently, "
            "but got None."
        )
    is_local = layer_type == "sliding_attention" and local_base is not None
    if nested:
        if layer_type not in found:
            raise ValueError(f"rope_parameters must hold {layer_type}, but got {', '.join(map(str, found))}.")
        found = found[layer_type] or {}
        if not isinstance(found, Mapping):
            raise ValueError(f"rope_parameters must hold a dict for {layer_type}, but got {found!r}.")
    elif is_local and config.get("model_type") != "modernbert":
        found = {}  # the scaling of Gemma 3 is that of its full attention
    parameters = _given(found)
    _check_numbers(parameters)
    names = ("rope_local_base_freq", "local_rope_theta") if is_local else ("rope_theta", "global_rope_theta")
    bases = [config[key] for key in (*names, *([] if is_local else ["rotary_emb_base"])) if key in config]
    parameters.setdefault("rope_theta", (bases or [local_base if is_local else defaults.base])[0])
    if parameters["rope_theta"] != parameters["rope_theta"]:
        raise ValueError(
            "config must hold rope_theta, rotary_emb_base or a known model_type, but got model_type "
            f"{config.get('model_type')!r} without; add rope_theta if the model has rotary embeddings."
        )
    return parameters


def _type(parameters: dict[str, Any]) -> str:
    """The checked type of the parameters."""
    rope_type = parameters.get("rope_type", parameters.get("type", "default"))
    rope_type = "longrope" if rope_type == "su" else rope_type
    if rope_type == "dynamic":
        raise ValueError(
            "rope_type must not depend on the current length, but got 'dynamic': its frequencies change as a sequence "
            "grows, so that cached keys would be wrong; use NTK(factor) with the factor of the longest sequence."
        )
    if not isinstance(rope_type, str) or rope_type not in KEYS:
        raise ValueError(f"rope_type must be one of {', '.join(KEYS)}, but got {rope_type!r}.")
    optional, required = KEYS[rope_type]
    unknown, missing = set(parameters) - COMMON - optional - required, required - set(parameters)
    if unknown or missing:
        raise ValueError(
            f"rope parameters of type {rope_type!r} must hold {', '.join(sorted(required)) or 'no more than the base'}"
            f"{' and may hold ' * bool(optional)}{', '.join(sorted(optional))}, but got "
            f"{', '.join(sorted(map(str, unknown))) or 'no ' + ', '.join(sorted(missing))}."
        )
    return rope_type


def _fields(rope_type: str, given: dict[str, Any], config: dict[str, Any], max_length: int | None) -> dict[str, Any]:
    """The fields of the scaling."""
    if rope_type == "default":
        return {}
    if rope_type == "linear":
        return {"factor": given["factor"]}
    longest = config.get("max_position_embeddings")
    original = config.get(ORIGINAL, given.get(ORIGINAL, longest))
    if original is None:
        raise ValueError(f"config must hold {ORIGINAL} for rope_type {rope_type!r}, but got none.")
    if rope_type == "llama3":
        return {**{key: given[key] for key in KEYS["llama3"][1]}, "original_max_position": original}
    if "factor" not in given and longest is None:
        raise ValueError(f"config must hold factor or max_position_embeddings for rope_type {rope_type!r}.")
    factor = given.get("factor") or longest / original
    if rope_type == "yarn":
        return {"factor": factor, "original_max_position": original} | {key: given[key] for key in YARN & set(given)}
    if not is_int(max_length) or max_length < 1:
        raise ValueError(
            "max_length must be the longest sequence, prompt and generated tokens together, because LongRoPE has other "
            f"factors above {original} tokens, but got {max_length!r}."
        )
    if original <= 1:
        raise ValueError(f"{ORIGINAL} must be above 1 for LongRoPE, but got {original!r}.")
    form = "long" if max_length > original else "short"
    computed = math.sqrt(1 + math.log(max(factor, 1.0)) / math.log(original))
    attention_factor = given.get(f"{form}_mscale", given.get("attention_factor", computed))
    return {"factors": given[f"{form}_factor"], "attention_factor": attention_factor}


def _fraction(config: dict[str, Any], parameters: dict[str, Any], defaults: ModelDefaults) -> float:
    """How much of a head is rotated; as in Transformers, a size that is no integer is rounded down."""
    names = ("partial_rotary_factor", "rotary_pct")
    found = [source[name] for source in (parameters, config) for name in names if name in source]
    fraction, size = found[0] if found else defaults.fraction, None if found else config.get("rotary_dim")
    size = defaults.rotary_dim if size is None and not found else size
    if size is None and not 0 < fraction < 1:
        return fraction
    head_size = _head_size(config)
    if head_size is None and size is None:
        return fraction
    if head_size is None:
        raise ValueError(
            "config must hold head_dim, or hidden_size and num_attention_heads, because rotary_dim is a size, but got "
            "neither."
        )
    if size is not None:
        check_number("rotary_dim", size, above=0)
    return (int(head_size * fraction) if size is None else size) / head_size


def _head_size(config: dict[str, Any]) -> int | None:
    """The features of a head, if the config says it."""
    sizes = {"head_dim": config.get("head_dim") or None}
    if sizes["head_dim"] is None:
        sizes = {key: config[key] for names in (HEADS, FEATURES) for key in names if config.get(key)}
    for name, value in sizes.items():
        if value is not None:
            check_number(name, value, above=0)
    if "head_dim" in sizes:
        return sizes["head_dim"]
    heads, features = (next((sizes[key] for key in names if key in sizes), None) for names in (HEADS, FEATURES))
    return features // heads if features and heads else None
