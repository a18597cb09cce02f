"""`rope_arguments`: the rotary embedding of a Hugging Face config, as arguments of
`RoPE`.

Transformers 4 spreads it over the config (`rope_theta`, `rope_scaling`,
`partial_rotary_factor`, ...). Transformers 5 collects it in `rope_parameters`, with one
dict for each type of layer if the types differ.
"""

import math
from collections.abc import Mapping
from typing import Any

from flax_mha._src.convert.layer_rules import FULL, SLIDING, Values, sliding_rotate
from flax_mha._src.convert.read_config import Config
from flax_mha._src.core.validation import is_int
from flax_mha._src.rope.scaling import (
    NTK,
    Linear,
    Llama3,
    LongRoPE,
    Proportional,
    Reversed,
    Scaling,
    YaRN,
)

LAYER_TYPES = (FULL, SLIDING)
# Keys of rope parameters: COMMON for every rope_type; KEYS: the optional and the
# required ones of each rope_type.
COMMON = {
    "type",
    "rope_type",
    "rope_theta",
    "partial_rotary_factor",
    # Ministral 3, which scales queries by position.
    "llama_4_scaling_beta",
    "max_position_embeddings",
}
ORIGINAL = "original_max_position_embeddings"
YARN = {
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "truncate",
}
LONGROPE = {"factor", "attention_factor", "short_mscale", "long_mscale"}
KEYS: dict[str, tuple[set[str], set[str]]] = {
    "default": (set(), set()),
    "linear": (set(), {"factor"}),
    "proportional": ({"factor"}, set()),
    "llama3": ({ORIGINAL}, {"factor", "low_freq_factor", "high_freq_factor"}),
    "yarn": ({ORIGINAL, "factor", *YARN}, set()),
    "ntk_alpha": ({"factor", *YARN}, {"alpha"}),
    "longrope": ({ORIGINAL, *LONGROPE}, {"short_factor", "long_factor"}),
}
IGNORED = {"finetuned"}  # tells only how a YaRN model was trained
# The last two are synonyms; Qwen3-Omni uses the last.
MROPE = {"mrope_section", "mrope_interleaved", "interleaved"}
# Prefixes of model types that order sections as RoPE cannot.
OTHER_MROPE = ("ernie4_5_vl", "hunyuan_vl")
# Vision encoders with axial positions: model type, without a final `_vision`, to
# section_layout and interleaved.
QWEN_VISION = (
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "qwen3_5",
    "qwen3_5_moe",
    "glm4v",
    "glm4v_moe",
)
VISION: dict[str, tuple[str, bool]] = dict.fromkeys(QWEN_VISION, ("axial", False)) | {
    "llama4_vision_model": ("axial", True),
    "pixtral": ("axial_strided", False),
}
KNOWN = {
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "rope_local_base_freq",
    "rope_interleave",
    "rotary_dim",
    "rotary_pct",
    "rotary_emb_base",
    "rotary_value",
}
# Keys of other libraries and of models' own code, which Transformers does not read.
FOREIGN = {
    "rope_interleaved",
    "rope_traditional",
    "rope_ratio",
    "rope_type",
    "rope_dim",
    "rotary_percent",
}


def rope_arguments(
    config: Config, layer_type: str | None, max_length: int | None
) -> dict[str, Any]:
    """Returns the constructor arguments of the `RoPE` for one type of layer; see
    `RoPE.from_config`.
    """
    if layer_type is not None and layer_type not in LAYER_TYPES:
        raise ValueError(
            f"layer_type must be None or one of {', '.join(LAYER_TYPES)}, but got "
            f"{layer_type!r}."
        )
    family, given, values = config
    rotary = {key for key in given if str(key).startswith(("rope_", "rotary_"))}
    unknown = rotary - KNOWN - FOREIGN
    if unknown:
        raise ValueError(
            "config must contain only known keys, but got "
            f"{', '.join(sorted(unknown))}; remove any that do not affect the rotation."
        )
    if layer_type == FULL and family.rotates is sliding_rotate:
        raise ValueError(
            f"layer_type must be {SLIDING}, but got {FULL}; {config.model_type} "
            f"applies RoPE only to {SLIDING} layers, so pass rope=None for the other "
            "layers."
        )
    if "patch_size" in values and "rope_theta" not in family.keys:
        arguments = _vision_arguments(values)
        _check_foreign(given, "default", arguments, values)
        return arguments

    parameters = {key: values[key] for key in MROPE & {*family.keys}} | _parameters(
        values, layer_type
    )
    rope_type = _rope_type(parameters)
    is_proportional = rope_type == "proportional"
    has_fraction = (
        not family.keys or family.refused or "partial_rotary_factor" in family.keys
    )
    if not has_fraction and not is_proportional:
        # Transformers does not read it for this family.
        parameters.pop("partial_rotary_factor", None)
    if family.unscaled_fraction and rope_type != "default":
        parameters.setdefault("partial_rotary_factor", 1.0)
    scaling = _scaling(rope_type, parameters, values, max_length)
    if "rope_reversed" in family.keys:
        scaling = Reversed(scaling or Scaling())
    arguments = {
        "scaling": scaling,
        "base": parameters["rope_theta"],
        "fraction": 1.0,
        "interleaved": values.get("rope_interleave", values.get("rope_pairs", False)),
    }
    if not is_proportional:
        arguments["fraction"] = _fraction(parameters, given, family.keys)
    if "mrope_section" in parameters:
        # Positions have several coordinates.
        if str(config.model_type).startswith(OTHER_MROPE):
            raise ValueError(
                f"model_type {config.model_type!r} is not supported, because RoPE does "
                "not support the order of its sections."
            )
        arguments["sections"] = parameters["mrope_section"]
        arguments["section_layout"] = "contiguous"
        if parameters.get("mrope_interleaved", parameters.get("interleaved")):
            arguments["section_layout"] = "interleaved"
    _check_foreign(given, rope_type, arguments, values)
    return arguments


def _check_foreign(
    given: Values, rope_type: str, arguments: Values, values: Values
) -> None:
    """Raises a ValueError if a key in `FOREIGN` describes a rotation other than that
    of the arguments, which is what Transformers computes.
    """
    found = sorted(FOREIGN & {*given})
    if not found:
        return
    fraction = arguments.get("fraction", 1.0)
    expected = {
        "rope_interleaved": arguments["interleaved"],
        "rope_traditional": arguments["interleaved"],
        "rope_ratio": 1,
        "rope_type": rope_type,
        "rotary_percent": fraction,
    }
    size = values.get("qk_rope_head_dim") or head_size_of(values)
    if size is not None:
        expected["rope_dim"] = round(fraction * size)
    for key in found:
        if key not in expected or given[key] != expected[key]:
            raise ValueError(
                f"{key} must be {expected.get(key)!r} or left out, because "
                f"Transformers does not read it, but got {given[key]!r}."
            )


def _vision_arguments(values: Values) -> dict[str, Any]:
    """Returns the arguments of a vision encoder's `RoPE`: row and column of a patch
    rotate half of the pairs each.
    """
    name = values.get("model_type", "")
    family = name.removesuffix("_vision")
    if family not in VISION:
        raise ValueError(
            f"model_type must be one of {', '.join(VISION)} with a patch_size, but got "
            f"{name!r}."
        )
    layout, interleaved = VISION[family]
    parameters = _parameters({"rope_theta": 1e4} | values, None)
    rope_type = parameters.get("rope_type", "default")
    if rope_type not in ("default", "axial"):
        raise ValueError(
            f"rope_type must be default or axial for {name}, but got {rope_type!r}."
        )
    features = values.get("embed_dim", values.get("hidden_size"))
    head_size = head_size_of(values | {"hidden_size": features})
    if head_size is None:
        raise ValueError(
            "config must contain head_dim, or hidden_size and num_attention_heads, but "
            "has neither."
        )
    return {
        "base": parameters["rope_theta"],
        "interleaved": interleaved,
        "sections": (head_size // 4, head_size // 4),
        "section_layout": layout,
    }


def rotary_parameters(values: Values) -> Values:
    return values.get("rope_scaling") or values.get("rope_parameters") or {}


def _parameters(values: Values, layer_type: str | None) -> Values:
    """Returns the rope parameters of one type of layer as one dict with a `rope_theta`,
    as in Transformers 5.
    """
    found = rotary_parameters(values)
    local_base = values.get("rope_local_base_freq")
    is_nested = any(isinstance(value, Mapping) for value in found.values())
    if layer_type is None and (is_nested or local_base is not None):
        raise ValueError(
            f"layer_type must be one of {', '.join(LAYER_TYPES)}, because this model "
            "rotates the two types differently, but got None."
        )
    is_local = layer_type == SLIDING and local_base is not None
    if is_nested:
        if layer_type not in found:
            raise ValueError(
                f"rope_parameters must contain {layer_type}, but got "
                f"{', '.join(map(str, found))}."
            )
        found = found[layer_type] or {}
        if not isinstance(found, Mapping):
            raise ValueError(
                f"rope_parameters[{layer_type!r}] must be a dict, but got {found!r}."
            )
    elif is_local and values.get("model_type") != "modernbert":
        # Gemma 3 scales its full attention only.
        found = {}
    parameters = {
        key: value
        for key, value in found.items()
        if value is not None and key not in IGNORED
    }
    if parameters.get("attn_factor") == 1:
        # A factor of 1 changes nothing.
        del parameters["attn_factor"]
    base = local_base if is_local else values.get("rope_theta")
    if base is not None:
        parameters.setdefault("rope_theta", base)
    if "rope_theta" not in parameters:
        raise ValueError(
            "config must contain rope_theta, rotary_emb_base or a known model_type, "
            f"but has model_type {values.get('model_type')!r} and neither key; add "
            "rope_theta if the model has rotary embeddings."
        )
    return parameters


def _rope_type(parameters: Values) -> str:
    """Returns the key in `KEYS` that the parameters are of; raises a ValueError for
    keys that do not belong to it.
    """
    rope_type = parameters.get("rope_type", parameters.get("type", "default"))
    has_sections = "mrope_section" in parameters
    if rope_type == "su":
        rope_type = "longrope"
    elif rope_type == "deepseek_yarn":
        rope_type = "yarn"
    elif rope_type == "mrope" and has_sections:
        rope_type = "default"
    elif rope_type == "dynamic" and parameters.get("alpha"):
        # Hunyuan: does not depend on the length.
        rope_type = "ntk_alpha"
    if rope_type == "dynamic":
        raise ValueError(
            "rope_type 'dynamic' is not supported: its frequencies change as a "
            "sequence grows, which invalidates cached keys; use NTK(factor) with the "
            "factor for the longest sequence."
        )
    if not isinstance(rope_type, str) or rope_type not in KEYS:
        raise ValueError(
            f"rope_type must be one of {', '.join(KEYS)}, but got {rope_type!r}."
        )
    optional, required = KEYS[rope_type]
    if has_sections:
        optional = optional | MROPE
    if "llama_4_scaling_beta" in parameters:
        # Its temperature has this length, whichever type the frequencies have.
        optional = optional | {ORIGINAL}
    unknown = {*parameters} - COMMON - optional - required
    missing = required - {*parameters}
    if "attn_factor" in unknown:
        raise ValueError(
            "rope parameters must not contain attn_factor, but got "
            f"{parameters['attn_factor']!r}; remove it to compute what Transformers "
            "does, which ignores it."
        )
    if not unknown and not missing:
        return rope_type
    expected = f"must contain {', '.join(sorted(required)) or 'only the base'}"
    if optional:
        expected += f" and may contain {', '.join(sorted(optional))}"
    got = f"no {', '.join(sorted(missing))}"
    if unknown:
        got = (
            f"{', '.join(sorted(map(str, unknown)))}; remove what Transformers ignores"
        )
    raise ValueError(
        f"rope parameters of type {rope_type!r} {expected}, but got {got}."
    )


def _scaling(
    rope_type: str, given: Values, values: Values, max_length: object
) -> Scaling | None:
    """Returns the scaling of the frequencies; `given` are the rope parameters, `values`
    the rest of the config.
    """
    if rope_type == "default":
        return None
    if rope_type == "proportional":
        fraction: Any = given.get(
            "partial_rotary_factor", values.get("partial_rotary_factor", 1.0)
        )
        return Proportional(fraction, given.get("factor", 1.0))
    if rope_type == "linear":
        return Linear(given["factor"])
    if rope_type == "ntk_alpha":
        return NTK(given["alpha"])
    longest = values.get("max_position_embeddings")
    original = values.get(ORIGINAL, given.get(ORIGINAL, longest))
    if original is None:
        raise ValueError(f"config must contain {ORIGINAL} for rope_type {rope_type!r}.")
    if rope_type == "llama3":
        return Llama3(
            given["factor"],
            given["low_freq_factor"],
            given["high_freq_factor"],
            original,
        )
    if "factor" not in given and longest is None:
        raise ValueError(
            "config must contain factor or max_position_embeddings for rope_type "
            f"{rope_type!r}."
        )
    factor = given.get("factor") or longest / original
    if rope_type == "yarn":
        return YaRN(factor, original, **{key: given[key] for key in YARN & {*given}})
    if not is_int(max_length) or max_length < 1:
        raise ValueError(
            "max_length must be the length of the longest sequence (prompt plus "
            "generated tokens), because LongRoPE uses different factors above "
            f"{original} tokens, but got {max_length!r}."
        )
    if original <= 1:
        raise ValueError(
            f"{ORIGINAL} must be greater than 1 for LongRoPE, but got {original!r}."
        )
    form = "long" if max_length > original else "short"
    computed = math.sqrt(1 + math.log(max(factor, 1.0)) / math.log(original))
    attention_factor: Any = given.get(
        f"{form}_mscale", given.get("attention_factor", computed)
    )
    return LongRoPE(given[f"{form}_factor"], attention_factor)


def _fraction(*sources: Values) -> float:
    """Returns the rotated fraction of a head, rounded to whole features.

    The sources are rope parameters, the values of the config, and the defaults of the
    family; the first that has a fraction or a number of features counts. If none has,
    all features rotate.
    """
    keys = {"partial_rotary_factor", "rotary_dim"}
    source = next(
        (source for source in sources if keys & {*source}),
        {"partial_rotary_factor": 1.0},
    )
    fraction = source.get("partial_rotary_factor")
    if fraction is not None and not 0 < fraction < 1:
        return fraction
    head_size = head_size_of(sources[-1] | sources[-2])
    if fraction is not None:
        if head_size is None:
            return fraction
        if head_size * fraction < 1:
            raise ValueError(
                "partial_rotary_factor must rotate at least one of each head's "
                f"{head_size} features (head_dim), but got {fraction!r}."
            )
        return int(head_size * fraction) / head_size
    if head_size is None:
        raise ValueError(
            "config must contain head_dim, or hidden_size and num_attention_heads, "
            "because rotary_dim is a size, but has neither."
        )
    return source["rotary_dim"] / head_size


def head_size_of(values: Values) -> int | None:
    """Returns the number of features of a head; None if the config does not say it."""
    if values.get("head_dim"):
        return values["head_dim"]
    hidden = values.get("hidden_size")
    heads = values.get("num_attention_heads")
    if not hidden or not heads:
        return None
    if hidden < heads:
        raise ValueError(
            f"hidden_size must be at least num_attention_heads ({heads}) if head_dim "
            f"is not given, but got {hidden}."
        )
    return hidden // heads
