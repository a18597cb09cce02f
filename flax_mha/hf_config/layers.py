"""Which layers of a model have a window, which rotate, and which are no attention at all, by the keys of its config."""

from collections.abc import Callable
from typing import Any

Values = dict[str, Any]
LayerType = Callable[[Values, int], str]  # of a config and the number of a layer
Rotates = Callable[[Values, int, str], bool]  # and the layer's type

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
NAMES = {"attention": FULL, "hybrid": FULL, "global": FULL, "*": FULL, "local": SLIDING}  # of other configs


def entry(values: Values, key: str, layer: int) -> Any:
    """Returns what a list says of the layer."""
    found = values[key]
    if not isinstance(found, list | tuple) or layer >= len(found):
        raise ValueError(f"{key} must be a list with an entry for layer {layer}, but got {found!r}.")
    return found[layer]


def full(values: Values, layer: int) -> str:
    return FULL


def sliding(values: Values, layer: int) -> str:
    is_on = values.get("sliding_window") is not None and values.get("use_sliding_window", True)
    return SLIDING if is_on else FULL


def windowed(layer_type: LayerType) -> LayerType:
    """Makes layers with full attention slide, if there is a window."""

    def windowed_type(values: Values, layer: int) -> str:
        found = layer_type(values, layer)
        return sliding(values, layer) if found == FULL else found

    return windowed_type


def listed(otherwise: LayerType) -> LayerType:
    """Makes a type from the list `layer_types`, for layers that it does not reach from another function."""

    def layer_type(values: Values, layer: int) -> str:
        types = values.get("layer_types") or ()
        return NAMES.get(types[layer], types[layer]) if layer < len(types) else otherwise(values, layer)

    return layer_type


def last_of(number: int, key: str = "sliding_window_pattern") -> LayerType:
    """Makes layers slide, but each `number`-th, as counted by this key where it is given."""
    return listed(lambda values, layer: sliding(values, layer) if (layer + 1) % (values.get(key) or number) else FULL)


def first_of(number: int, key: str = "") -> LayerType:
    """Makes layers slide, but the first of each `number`."""
    return listed(lambda values, layer: sliding(values, layer) if layer % values.get(key, number) else FULL)


def upper(values: Values, layer: int) -> str:
    """Layers from `max_window_layers` on slide."""
    return sliding(values, layer) if layer >= values["max_window_layers"] else FULL


def lower_even(values: Values, layer: int) -> str:
    """Every second layer below `max_window_layers` slides."""
    return sliding(values, layer) if layer % 2 == 0 and layer < values["max_window_layers"] else FULL


def flint(values: Values, layer: int) -> str:
    is_full = layer < 2 or layer % 4 == 1 or layer == values.get("num_hidden_layers", 0) - 1
    return FULL if is_full else SLIDING


def cohere_moe(values: Values, layer: int) -> str:
    """Cohere 2's mixture of experts: the dense layers below have a pattern of their own."""
    dense = values.get("first_k_dense_replace") or 0
    number = values["prefix_dense_sliding_window_pattern"] if layer < dense else values["sliding_window_pattern"]
    return SLIDING if (layer + 1 if layer < dense else layer + 1 - dense) % number else FULL


def each_last(values: Values, layer: int) -> str:
    """Of each `full_attention_interval` layers the last has attention."""
    return "linear_attention" if (layer + 1) % values["full_attention_interval"] else FULL


def kimi_linear(values: Values, layer: int) -> str:
    """The lists of Kimi Linear's own config count from 1."""
    found = (values["linear_attn_config"] or {}).get("full_attn_layers")
    is_full = layer and layer % 4 == 0 if found is None else layer + 1 in found
    return FULL if is_full else "linear_attention"


def chunked(values: Values, layer: int) -> str:
    return CHUNKED if listed_rotate(values, layer, "") else FULL


def unrotated_slide(values: Values, layer: int) -> str:
    return FULL if listed_rotate(values, layer, "") else sliding(values, layer)


def indices(key: str, otherwise: LayerType) -> LayerType:
    """Makes attention of the layers whose numbers stand in the list under this key."""

    def layer_type(values: Values, layer: int) -> str:
        found = values.get(key)
        return otherwise(values, layer) if found is None else FULL if layer in found else "no attention"

    return layer_type


def unknown(values: Values, layer: int) -> str:
    raise ValueError("config must hold layer_types or layers_block_type, which tell the layers with attention.")


def none(values: Values, layer: int) -> str:
    return "no attention"


def periodic(values: Values, layer: int) -> str:
    period, offset = values["attn_layer_period"], values["attn_layer_offset"]
    return FULL if layer % period == offset else "no attention"


def cycle(key: str, *otherwise: str) -> LayerType:
    """Makes types that repeat, from the list or the text under this key."""

    def layer_type(values: Values, layer: int) -> str:
        types = values.get(key) or otherwise
        return NAMES.get(types[layer % len(types)], types[layer % len(types)])

    return layer_type


def gpt_neo(values: Values, layer: int) -> str:
    """GPT-Neo repeats lists: `[[["global", "local"], 12]]`."""
    types = [name for names, times in values["attention_types"] for name in names * times]
    types = values.get("attention_layers") or types
    return NAMES.get(types[layer], types[layer]) if layer < len(types) else FULL


def cross_listed(values: Values, layer: int) -> str:
    return "cross-attention" if layer in values["cross_attention_layers"] else FULL


def all_rotate(values: Values, layer: int, layer_type: str) -> bool:
    return True


def listed_rotate(values: Values, layer: int, layer_type: str) -> bool:
    """Layers rotate whose number in `no_rope_layers` is 1; without the list, all but each fourth."""
    if values.get("no_rope_layers"):
        return bool(entry(values, "no_rope_layers", layer))
    return bool((layer + 1) % values["no_rope_layer_interval"])


def sliding_rotate(values: Values, layer: int, layer_type: str) -> bool:
    return layer_type == SLIDING


def sliding_or_all_rotate(values: Values, layer: int, layer_type: str) -> bool:
    return layer_type == SLIDING or values.get("sliding_window") is None


def cohere_moe_rotates(values: Values, layer: int, layer_type: str) -> bool:
    is_dense = layer < (values.get("first_k_dense_replace") or 0)
    is_dense = entry(values, "mlp_layer_types", layer) == "dense" if values.get("mlp_layer_types") else is_dense
    return layer_type == SLIDING or (is_dense and values["prefix_dense_sliding_window_pattern"] == 1)


def if_key(key: str, value: Any = True) -> Rotates:
    return lambda values, layer, layer_type: values.get(key) == value


def with_theta_rotate(values: Values, layer: int, layer_type: str) -> bool:
    return values.get("layer_rope_theta") is None or bool(entry(values, "layer_rope_theta", layer))


def given_rotate(values: Values, layer: int, layer_type: str) -> bool:
    """Layers rotate whose `rope_parameters` are not null."""
    return (values.get("rope_parameters") or {}).get(layer_type) is not None


def given_theta_rotates(values: Values, layer: int, layer_type: str) -> bool:
    return (values.get("rope_parameters") or {"rope_theta": 1}).get("rope_theta") is not None
