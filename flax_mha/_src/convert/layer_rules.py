"""Rules that read single layers from a Hugging Face config: the type of a layer's
attention, and whether it has RoPE.

Layers of one model may differ, so the table of families contains two rules. A
`LayerType` returns the type of a layer: `FULL`, `SLIDING` (the layer "slides": it has a
window) or `CHUNKED` attention, or another string if the layer has no self-attention. A
`Rotates` returns True if the layer has RoPE. Both take the values of the config, by
key, and the number of the layer, from 0; `Rotates` also takes the type of the layer.
"""

from collections.abc import Callable, Mapping
from typing import Any

Values = dict[str, Any]
LayerType = Callable[[Values, int], str]
Rotates = Callable[[Values, int, str], bool]

FULL = "full_attention"
SLIDING = "sliding_attention"
CHUNKED = "chunked_attention"
# What some configs call these types.
LAYER_TYPES = {
    "attention": FULL,
    "hybrid": FULL,
    "global": FULL,
    "*": FULL,
    "local": SLIDING,
}


def named(layer_type: str) -> str:
    return LAYER_TYPES.get(layer_type, layer_type)


def entry(values: Values, key: str, layer: int) -> Any:
    """Returns entry `layer` of the list `values[key]`; raises a ValueError if there is
    none.
    """
    found = values[key] or ()
    if layer >= len(found):
        raise ValueError(
            f"{key} must be a list with an entry for layer {layer}, but got "
            f"{values[key]!r}."
        )
    return found[layer]


def full(values: Values, layer: int) -> str:
    return FULL


def sliding(values: Values, layer: int) -> str:
    """Returns `SLIDING` if the config has a window and uses it, else `FULL`."""
    if values.get("sliding_window") is None or not values.get(
        "use_sliding_window", True
    ):
        return FULL
    return SLIDING


def windowed(layer_type: LayerType) -> LayerType:
    """Returns the rule `layer_type`, except that `FULL` layers become `SLIDING` if the
    config has a window.
    """

    def windowed_type(values: Values, layer: int) -> str:
        found = layer_type(values, layer)
        if found == FULL:
            return sliding(values, layer)
        return found

    return windowed_type


def listed(otherwise: LayerType) -> LayerType:
    """Returns a rule that reads the config's list `layer_types`; for layers not in it,
    the rule `otherwise` decides.
    """

    def layer_type(values: Values, layer: int) -> str:
        types = values.get("layer_types") or ()
        if layer < len(types):
            return named(types[layer])
        return otherwise(values, layer)

    return layer_type


def period(values: Values, otherwise: int) -> int:
    """Returns n, for every n-th layer: the config's `sliding_window_pattern`, or
    `otherwise` if it has none; rejects a string (EXAONE).
    """
    found = values.get("sliding_window_pattern") or otherwise
    if not isinstance(found, int):
        raise ValueError(
            "sliding_window_pattern must be an integer for layers not listed in "
            f"layer_types, but got {found!r}."
        )
    return found


def full_every(number: int, place: int = -1) -> LayerType:
    """Returns a rule: of every n layers, the one at `place` is `FULL`, the others are
    `SLIDING`, unless a config has `layer_types`; `period` chooses n.
    """

    @listed
    def layer_type(values: Values, layer: int) -> str:
        if (layer - place) % period(values, number) == 0:
            return FULL
        return sliding(values, layer)

    return layer_type


def last_full(otherwise: LayerType) -> LayerType:
    """Returns a rule: the last layer is `FULL`; the rule `otherwise` decides for the
    others.
    """

    def layer_type(values: Values, layer: int) -> str:
        if layer == values["num_hidden_layers"] - 1:
            return FULL
        return otherwise(values, layer)

    return layer_type


def of_layer(values: Values, layer: int, layer_type: str) -> Values:
    """Returns the values for one layer: the heads of Gemma 4, Laguna and MiMo-V2 differ
    between layers.
    """
    if values.get("num_attention_heads_per_layer") is not None:
        # Laguna.
        heads = entry(values, "num_attention_heads_per_layer", layer)
        kv_heads = values["num_key_value_heads"] or 1
        if heads % kv_heads:
            raise ValueError(
                "num_attention_heads_per_layer must contain multiples of "
                f"num_key_value_heads ({kv_heads}), but got {heads} for layer {layer}."
            )
        return values | {"num_attention_heads": heads}
    if "attention_value_scale" in values and layer_type == SLIDING:
        # MiMo-V2.
        heads = values["num_key_value_heads"] or values.get("num_attention_heads")
        if not heads:
            return values
        return values | {"num_key_value_heads": 2 * heads}
    if "per_layer_config" not in values:
        return values
    # Gemma 4: Transformers 5 saves what differs in each layer, earlier files have keys
    # for all full layers.
    changed: object = {}
    if values["per_layer_config"] is not None:
        for number, of_number in values["per_layer_config"].items():
            # A key such as 2 or "02".
            if str(number).lstrip("0") == str(layer or ""):
                changed = of_number
                break
    elif layer_type == FULL:
        changed = {"head_dim": values["global_head_dim"]}
        if values["attention_k_eq_v"]:
            changed["num_key_value_heads"] = values["num_global_key_value_heads"]
    if not isinstance(changed, Mapping):
        raise ValueError(
            f"per_layer_config must contain a dict for each layer, but got {changed!r} "
            f"for layer {layer}."
        )
    return values | {key: value for key, value in changed.items() if value is not None}


def reuses_keys(values: Values, layer: int, layer_type: LayerType) -> bool:
    """Returns True for the last `num_kv_shared_layers`, which use keys and values of an
    earlier layer of their type.

    Raises a ValueError if there is no such layer before all of them.
    """
    number = values["num_hidden_layers"]
    shared = values["num_kv_shared_layers"]
    first = max(number - shared, 0)
    earlier = {layer_type(values, i) for i in range(first)}
    if layer >= first and layer_type(values, layer) not in earlier:
        raise ValueError(
            "num_kv_shared_layers must leave an earlier layer of the same type as "
            f"layer {layer}, which uses its keys and values, but got {shared} with "
            f"num_hidden_layers={number}; for Gemma 4's assistant, whose layers use "
            "those of another model, pass the whole config."
        )
    return layer >= first


@listed
def upper_slide(values: Values, layer: int) -> str:
    """Returns `SLIDING` for layers from `max_window_layers` on, if the config has a
    window, else `FULL`.
    """
    if layer < values["max_window_layers"]:
        return FULL
    return sliding(values, layer)


@listed
def lower_even_slide(values: Values, layer: int) -> str:
    """Returns `SLIDING` for layers 0, 2, 4, ... below `max_window_layers`, if the
    config has a window, else `FULL`.
    """
    if layer % 2 or layer >= values["max_window_layers"]:
        return FULL
    return sliding(values, layer)


@listed
def flint(values: Values, layer: int) -> str:
    is_last = layer == values.get("num_hidden_layers", 0) - 1
    if layer < 2 or layer % 4 == 1 or is_last:
        return FULL
    return SLIDING


@listed
def mimo(values: Values, layer: int) -> str:
    if layer == 0 or (layer + 1) % 6 == 0:
        return FULL
    return SLIDING


@listed
def lfm3(values: Values, layer: int) -> str:
    if layer % 4 == 2:
        return FULL
    if layer and layer % 4 == 0:
        return SLIDING
    return "conv"


def blt_decoder(values: Values, layer: int) -> str:
    if values["sliding_window"] == "":
        raise ValueError(
            "config must set sliding_window to the local_attention_window_len of the "
            "whole model's config, or null if it has none, because a decoder_config "
            "lacks the decoder's window."
        )
    return sliding(values, layer)


@listed
def cohere_moe(values: Values, layer: int) -> str:
    """Returns `FULL` for every n-th layer, else `SLIDING`.

    n is `prefix_dense_sliding_window_pattern` for the dense layers at the start,
    `sliding_window_pattern` for the layers after them, which are counted from the first
    that is not dense.
    """
    dense = values.get("first_k_dense_replace") or 0
    if layer < dense:
        count = layer + 1
        number = values["prefix_dense_sliding_window_pattern"]
    else:
        count = layer + 1 - dense
        number = period(values, 4)
    if count % number == 0:
        return FULL
    return SLIDING


@listed
def rest_linear(values: Values, layer: int) -> str:
    """Returns `FULL` for the last of each `full_attention_interval` layers,
    "linear_attention" for the others.
    """
    if (layer + 1) % values["full_attention_interval"] == 0:
        return FULL
    return "linear_attention"


@listed
def kimi_linear(values: Values, layer: int) -> str:
    """Returns `FULL` for layers in Kimi's list `full_attn_layers`, which counts from 1,
    else "linear_attention".
    """
    found = (values["linear_attn_config"] or {}).get("full_attn_layers")
    is_full = layer > 0 and layer % 4 == 0
    if found is not None:
        is_full = layer + 1 in found
    return FULL if is_full else "linear_attention"


def own_indexer(values: Values, layer: int) -> str:
    """Returns `FULL` for layers with their own indexer (GLM 5); other layers use the
    choice of an earlier layer.
    """
    first = values["index_skip_topk_offset"] - 1
    has_own = max(layer - first, 0) % values["index_topk_freq"] == 0
    for key in ("index_topk_pattern", "indexer_types"):
        if values.get(key):
            has_own = entry(values, key, layer) in ("full", "F")
    return FULL if has_own else "shared indexer"


@listed
def rotated_chunked(values: Values, layer: int) -> str:
    """Returns `CHUNKED` for layers with RoPE, `FULL` for the others."""
    if listed_rotate(values, layer, ""):
        return CHUNKED
    return FULL


@listed
def unrotated_slide(values: Values, layer: int) -> str:
    """Returns `FULL` for layers with RoPE; the others are `SLIDING` if the config has a
    window.
    """
    if listed_rotate(values, layer, ""):
        return FULL
    return sliding(values, layer)


def indices(key: str) -> LayerType:
    """Returns a rule: `FULL` for layers listed under `key`, else "no attention";
    without the list, always `FULL`.
    """

    def layer_type(values: Values, layer: int) -> str:
        if values.get(key) is None or layer in values[key]:
            return FULL
        return "no attention"

    return layer_type


@listed
def refuse_unlisted(values: Values, layer: int) -> str:
    raise ValueError(
        "config must contain layer_types or layers_block_type, which list the layers "
        "with attention."
    )


@listed
def zamba(values: Values, layer: int) -> str:
    """Returns `FULL` for layer 2, and for one of every `attn_layer_period` layers after
    it.
    """
    if layer == 2 or (layer > 2 and periodic(values, layer - 3) == FULL):
        return FULL
    return "linear_attention"


@listed
def no_attention(values: Values, layer: int) -> str:
    return "no attention"


def periodic(values: Values, layer: int) -> str:
    if layer % values["attn_layer_period"] == values["attn_layer_offset"]:
        return FULL
    return "no attention"


def cycle(key: str, *otherwise: str) -> LayerType:
    """Returns a rule that repeats a pattern of layer types over the layers.

    The config's `key` holds the pattern, a list or a string of letters; `otherwise` is
    the pattern if it does not.
    """

    def layer_type(values: Values, layer: int) -> str:
        types = values.get(key) or otherwise
        if not types:
            raise ValueError(
                f"{key} must list the layer types, but got {values.get(key)!r}."
            )
        return named(types[layer % len(types)])

    return layer_type


def nemotron_h(values: Values, layer: int) -> str:
    """Returns the type from a list or a string of letters, which has all layers;
    without both, of four layers.
    """
    for key in ("layer_types", "hybrid_override_pattern"):
        types = values.get(key)
        if types and layer >= len(types):
            raise ValueError(
                f"layer must be an integer >= 0 and < {len(types)}, the length of "
                f"{key}, but got {layer}."
            )
        if types:
            return named(types[layer])
    if layer % 4 == 2:
        return FULL
    return "linear_attention"


def gpt_neo(values: Values, layer: int) -> str:
    """Returns the type from `attention_types`, pairs of a list and its repetitions:
    `[[["global", "local"], 12]]`.
    """
    types = values.get("attention_layers")
    if not types:
        types = []
        for names, times in values["attention_types"]:
            types += names * times
    if layer < len(types):
        return named(types[layer])
    return FULL


def cross_listed(values: Values, layer: int) -> str:
    if layer in values["cross_attention_layers"]:
        return "cross-attention"
    return FULL


def all_rotate(values: Values, layer: int, layer_type: str) -> bool:
    return True


def listed_rotate(values: Values, layer: int, layer_type: str) -> bool:
    """Returns True for a 1 in the list `no_rope_layers`; without it, except for every
    `no_rope_layer_interval`-th.
    """
    if values.get("no_rope_layers"):
        return bool(entry(values, "no_rope_layers", layer))
    return bool((layer + 1) % values["no_rope_layer_interval"])


def sliding_rotate(values: Values, layer: int, layer_type: str) -> bool:
    return layer_type == SLIDING


def sliding_or_all_rotate(values: Values, layer: int, layer_type: str) -> bool:
    """Returns True for layers with a window, and for all layers of a model without
    windows.
    """
    return layer_type == SLIDING or values.get("sliding_window") is None


def cohere_moe_rotates(values: Values, layer: int, layer_type: str) -> bool:
    """Returns True for layers with a window, and for all dense layers if no dense layer
    has a window.
    """
    is_dense = layer < (values.get("first_k_dense_replace") or 0)
    if values.get("mlp_layer_types"):
        is_dense = entry(values, "mlp_layer_types", layer) == "dense"
    return layer_type == SLIDING or (
        is_dense and values["prefix_dense_sliding_window_pattern"] == 1
    )


def if_key(key: str, value: object = True) -> Rotates:
    """Returns a rule by which all layers rotate if the config has this value under
    `key`, else none.
    """
    return lambda values, layer, layer_type: values.get(key) == value


def with_theta_rotate(values: Values, layer: int, layer_type: str) -> bool:
    """Returns True if the layer's entry in `layer_rope_theta` is not 0; without the
    list, for all layers.
    """
    return values.get("layer_rope_theta") is None or bool(
        entry(values, "layer_rope_theta", layer)
    )


def given_rotate(values: Values, layer: int, layer_type: str) -> bool:
    """Returns whether the layer rotates: whether `rope_parameters` has an entry other
    than null for its type.
    """
    return (values.get("rope_parameters") or {}).get(layer_type) is not None


def given_theta_rotates(values: Values, layer: int, layer_type: str) -> bool:
    """Returns True, for all layers, unless the config has `rope_parameters` without a
    `rope_theta`.
    """
    return (values.get("rope_parameters") or {"rope_theta": 1}).get(
        "rope_theta"
    ) is not None
