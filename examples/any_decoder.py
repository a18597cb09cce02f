"""Generates text with a Hugging Face decoder from any of `FAMILIES`, given a folder
with config.json and safetensors.

    pip install -e '.[demo]' tokenizers
    python examples/any_decoder.py FOLDER "Once upon a time" "Attention is"

`convert.from_hf` makes the attention of each layer. For each family, one line of a
table describes the rest.
"""

import functools
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int
from safetensors.numpy import load_file

from flax_mha import convert

# Parts of the names of tensors, as regular expressions, and what they are called here.
RENAMES = {
    r"^language_model\.(?=model|lm_head)|(?<=^model\.)language_model\.": "",
    r"^(gpt_neox|transformer)\.|^(?=(h|wte|wpe|ln_f|word_embeddings\w*)\.)": "model.",
    r"^model\.(h|blocks)\b": "model.layers",
    "embed_in|word_embeddings|wte": "embed_tokens",
    "wpe": "embed_positions",
    r"^model\.(final_layer_?norm|ln_f|norm_f)\b": "model.norm",
    "embed_out": "lm_head",
    r"\.(attn\.|self_)?attention\.|\.attn\.": ".self_attn.",
    "softmax_offset": "sinks",
    r"post_attn_norm": "post_self_attn_layernorm",
    r"post_ffn_norm": "post_mlp_layernorm",
    r"block_sparse_moe\.(?=\w+put_linear)": "mlp.experts.",
    r"block_sparse_moe|feed_forward|\b(moe|ffn)\b": "mlp",
    r"(mlp\.)?shared_mlp": "mlp.shared_expert",
    "input_linear": "gate_up_proj",
    r"\bw1\b": "gate_proj",
    r"\bw3\b|fc1|fc_in|dense_h_to_4h|c_fc": "up_proj",
    r"\bw2\b|fc2|fc_out|output_linear|dense_4h_to_h|(?<=mlp\.)c_proj": "down_proj",
    r"shared_experts\b": "shared_expert",
    r"mlp\.(router(\.gate|\.layer)?|gate\.wg)\b": "mlp.gate",
    r"mlp\.(gate\.|moe_statics\.)*(e_score_correction|expert)_bias": "mlp.choice.bias",
    r"(experts\.\w+_proj)$": r"\1.weight",
    r"_proj_bias$": "_proj.bias",
}
# Keys of configs, and what they are called here.
ALIASES = {
    **dict.fromkeys(("num_layers", "n_layer", "n_layers"), "num_hidden_layers"),
    **dict.fromkeys(("moe_topk", "moe_k"), "num_experts_per_tok"),
    **dict.fromkeys(("router_scaling_factor", "route_scale"), "routed_scaling_factor"),
    **dict.fromkeys(("activation", "activation_function"), "hidden_act"),
    "mup_enabled": "embed_sqrt",
}
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": nnx.silu,
    "relu": nnx.relu,
    "relu2": lambda x: nnx.relu(x) ** 2,
    "gelu_new": nnx.gelu,
    "gelu_pytorch_tanh": nnx.gelu,
    "gelu": functools.partial(nnx.gelu, approximate=False),
}
# The keys of what a norm adds to the variance.
EPSILONS = (
    "epsilon",
    "rms_norm_eps",
    "layer_norm_eps",
    "layer_norm_epsilon",
    "norm_epsilon",
    "norm_eps",
)


class Family(NamedTuple):
    """What a `model_type` has around its attention: norms, networks and factors."""

    # The norms before and after the attention, then before and after the network; "" is
    # none.
    norms: tuple[str, ...] = ("input_layernorm", "", "post_attention_layernorm", "")
    # "rms" or "layer". With "+ 1", 1 is added to the weight; "unbiased" has no bias,
    # and "bare" has neither weight nor bias.
    norm: str = "rms"
    parallel: bool = False  # whether attention and network read the same
    gated: bool = True  # whether the network has a gate
    # Words that describe the experts; "" if there are none. "softmax" or "sigmoid"
    # makes scores of logits. The largest scores choose the experts, or with "logits"
    # the largest logits, after a bias is added if "biased". "shared" adds an expert for
    # all tokens, which may be "gated"; "normed" has a norm after the sum.
    experts: str = ""
    # Keys of configs that only some families heed, with their defaults (`...` if the
    # config must hold them), and keys of our own.
    keys: dict[str, Any] = {}  # noqa: RUF012


NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
AFTER = ("", NORMS[1], "", NORMS[3])
SHARED = (NORMS[0], "", NORMS[0], "")
GLM = (NORMS[0], "post_self_attn_layernorm", NORMS[1], "post_mlp_layernorm")
AFMOE = (*NORMS[:2], "pre_mlp_layernorm", "post_mlp_layernorm")
PLAIN = Family(norm="layer", gated=False)
NEOX = PLAIN._replace(keys={"mlp_bias": True})
GELU = {"hidden_act": "gelu"}
GPT = {"mlp_bias": True, "hidden_act": "gelu_new"}
GPT_2 = NEOX._replace(
    norms=("ln_1", "", "ln_2", ""), keys=GPT | {"has_positions": True}
)
BIASED = NEOX._replace(parallel=True, keys={"mlp_bias": True, "head_bias": True})
CAP = {"final_logit_softcapping": ...}
GEMMA = {
    "embed_sqrt": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
}
GEMMA_4 = {
    "final_logit_softcapping": None,
    "has_scalars": True,
    "hidden_size_per_layer_input": 0,
}
GRANITE = {
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
}
GREEDY = {"topk_method": "greedy", "n_group": 1, "topk_group": 1, "group_best": 1}
TOP_K = {"norm_topk_prob": ...}
SCALED = {"routed_scaling_factor": ...}
GROUPS = TOP_K | SCALED | {"n_group": ..., "topk_group": ...}
SIGMOID = "sigmoid biased shared"
TABLE = {
    "llama mistral ministral ministral3 qwen2 qwen3 smollm3 phi3 glm cwm": Family(),
    "hunyuan_v1_dense helium ernie4_5 seed_oss iquestcoder internlm3 youtu": Family(),
    "arcee": PLAIN._replace(norm="rms"),
    "apertus": PLAIN._replace(
        norms=("attention_layernorm", "", "feedforward_layernorm", ""), norm="rms"
    ),
    "nanochat": PLAIN._replace(
        norm="rms bare",
        keys={"first_norm": "bare", "final_logit_softcapping": 15.0},
    ),
    "bloom": NEOX._replace(keys=GPT | {"first_norm": "model.embed_tokens_layernorm"}),
    "mpt": PLAIN._replace(
        norms=("norm_1", "", "norm_2", ""), norm="layer unbiased", keys=GELU
    ),
    "gpt2": GPT_2._replace(keys=GPT_2.keys | {"is_turned": True}),
    "gpt_bigcode gpt_neo": GPT_2,
    "glm4": Family(GLM),
    "olmo2 olmo3 exaone4": Family(AFTER),
    "olmo": Family(norm="layer bare", keys={"epsilon": 1e-5}),
    "gemma": Family(norm="rms + 1", keys=GEMMA),
    "gemma2": Family(NORMS, "rms + 1", keys=GEMMA | CAP),
    "vaultgemma": Family((NORMS[0], "", NORMS[2], ""), "rms + 1", keys=GEMMA | CAP),
    "gemma3_text": Family(
        NORMS, "rms + 1", keys=GEMMA | {"final_logit_softcapping": None}
    ),
    "gemma4_text gemma4_unified_text": Family(NORMS, keys=GEMMA | GEMMA_4),
    "granite granite_swa": Family(keys=GRANITE),
    "granitemoe": Family(experts="softmax", keys=GRANITE),
    "granitemoeshared": Family(experts="softmax shared", keys=GRANITE),
    "hyperclovax": Family(
        (NORMS[0], "post_norm1", NORMS[1], "post_norm2"),
        keys=GRANITE | {"logits_times": True},
    ),
    "cohere cohere2": Family(
        SHARED, "layer unbiased", parallel=True, keys={"logit_scale": 0.0625}
    ),
    "phi": BIASED._replace(norms=SHARED),
    "gptj codegen": BIASED._replace(norms=("ln_1", "", "ln_1", "")),
    "gpt_neox persimmon": NEOX,
    "gpt_neox+parallel": NEOX._replace(parallel=True),
    "falcon+parallel": PLAIN._replace(norms=SHARED, parallel=True, keys=GELU),
    "falcon+new+parallel": PLAIN._replace(
        norms=("ln_attn", "", "ln_mlp", ""), parallel=True, keys=GELU
    ),
    "starcoder2 jais2": PLAIN,
    "nemotron": PLAIN._replace(norm="layer + 1"),
    "stablelm": Family(norm="layer"),
    "mixtral": Family(experts="softmax"),
    "minimax_m2": Family(experts="sigmoid biased"),
    "qwen3_moe olmoe mellum": Family(experts="softmax", keys=TOP_K),
    "flex_olmo": Family(AFTER, experts="softmax", keys=TOP_K),
    "hunyuan_v1_moe": Family(experts="softmax shared"),
    "ernie4_5_moe": Family(experts="softmax biased shared"),
    "qwen2_moe": Family(experts="softmax gated shared", keys=TOP_K),
    "deepseek_v2": Family(experts="softmax shared", keys=TOP_K | SCALED | GREEDY),
    "deepseek_v3 deepseek_v32 kimi_k2 sarvam_mla dots1 exaone_moe": Family(
        experts=SIGMOID, keys=GROUPS
    ),
    "glm4_moe glm4_moe_lite solar_open": Family(experts=SIGMOID, keys=GROUPS),
    "axk1": Family(experts=f"{SIGMOID} normed", keys=GROUPS),
    "hy_v3": Family(experts=SIGMOID, keys=SCALED),
    "afmoe": Family(AFMOE, experts=SIGMOID, keys=SCALED | {"embed_sqrt": False}),
    "flint": Family(experts="sigmoid shared", keys=TOP_K),
    "kolibri1": Family(GLM, experts="sigmoid biased logits shared", keys=TOP_K),
    "llama4_text": Family(
        experts="sigmoid shared",
        keys={"scores_inputs": True, "norm_topk_prob": False},
    ),
    "gpt_oss": Family(
        experts="softmax", keys={"swiglu_limit": 7.0, "swiglu_alpha": 1.702}
    ),
}
FAMILIES: dict[str, Family] = {}
for names, family in TABLE.items():
    FAMILIES |= dict.fromkeys(names.split(), family)
# A config may hold these although its family does not heed them.
OPTIONAL: set[str] = set()
for family in FAMILIES.values():
    OPTIONAL |= family.keys.keys()
OPTIONAL -= {*EPSILONS, "mlp_bias", "hidden_act"}


def rename(name: str) -> str:
    """Returns the name of a tensor in this file."""
    for old, new in RENAMES.items():
        name = re.sub(old, new, name)
    return name


def read_tensors(
    folder: Path, is_text_part: bool, keys: dict[str, Any]
) -> dict[str, np.ndarray]:
    """Reads the tensors of a model, by the names that `RENAMES` gives them.

    Weights of networks become [in, out], gates get tensors of their own, and experts
    are stacked.
    """
    index = folder / "model.safetensors.index.json"
    files = {"model.safetensors"}
    if index.exists():
        files = set(json.loads(index.read_text())["weight_map"].values())
    tensors: dict[str, np.ndarray] = {}
    for file in sorted(files):
        for key, x in load_file(folder / file).items():
            # A model that also reads images has tensors of other parts.
            if is_text_part and not re.search(r"\b(language_model|lm_head)\.", key):
                continue
            name = rename(key)
            is_matrix = x.ndim > 1 and key.endswith("weight")
            # PyTorch's linear layers hold [out, in], GPT-2's layers [in, out].
            if ".mlp." in name and is_matrix and "is_turned" not in keys:
                x = np.swapaxes(x, -1, -2)
            tensors[name] = x

    for name in list(tensors):
        if ".experts.0." in name:
            experts = []
            one = name
            while one in tensors:
                experts.append(tensors.pop(one))
                one = name.replace(".experts.0.", f".experts.{len(experts)}.")
            tensors[name.replace(".experts.0.", ".experts.")] = np.stack(experts)
        elif "gate_up_proj" in name:
            x = tensors.pop(name)
            # GPT-OSS alternates columns of gate and up projection.
            if "swiglu_limit" in keys:
                gate = x[..., ::2]
                up = x[..., 1::2]
            else:
                gate, up = np.split(x, 2, axis=-1)
            tensors[name.replace("gate_up", "gate")] = gate
            tensors[name.replace("gate_up", "up")] = up
    return tensors


class Decoder(nnx.Module):
    """Maps tokens, padded on the right, to logits of the tokens that follow.

    Of LongRoPE's two sets of frequencies, `max_length` chooses one.
    """

    def __init__(
        self,
        folder: str | Path,
        dtype: Any = jnp.float32,
        max_length: int | None = None,
    ):
        # Find the family. A config may give keys other names, or None for no value.
        given = json.loads((Path(folder) / "config.json").read_text())
        of_text = given | given.get("text_config", {})
        named = {ALIASES.get(key, key): x for key, x in of_text.items()}
        values = {key: x for key, x in named.items() if x is not None}
        kind = values.get("model_type", "")
        if values.get("new_decoder_architecture"):
            kind += "+new"
        if values.get("use_parallel_residual") or values.get("parallel_attn"):
            kind += "+parallel"
        if values.get("apply_residual_connection_post_layernorm"):
            kind += "+normed"
        if kind not in FAMILIES:
            raise ValueError(
                f"model_type must be one of FAMILIES, but got {kind!r}; add a line for "
                "this type."
            )
        self.family = FAMILIES[kind]
        keys = self.family.keys

        # Keep what the family uses, and check that keys without a default are there.
        used = {x: values[x] for x in values if x in keys or x not in OPTIONAL}
        self.config = keys | used
        for key in keys:
            self.get(key)

        # Make the attention of each layer; the other weights are used as they are.
        tensors = read_tensors(Path(folder), "text_config" in given, keys)
        self.attentions: nnx.List[Any] = nnx.List()
        for layer in range(self.get("num_hidden_layers")):
            prefix = f"model.layers.{layer}.self_attn."
            names = [name for name in tensors if name.startswith(prefix)]
            weights = {name: tensors.pop(name) for name in names}
            attention = convert.from_hf(
                given, weights, layer, max_length=max_length, param_dtype=dtype
            )
            self.attentions.append(attention)
        # A further layer predicts tokens after the next one, which nothing here needs.
        if values.get("num_nextn_predict_layers"):
            further = f"model.layers.{len(self.attentions)}."
            names = [name for name in tensors if not name.startswith(further)]
            tensors = {name: tensors[name] for name in names}
        self.weights: Any = nnx.Dict()
        for name, x in tensors.items():
            self.weights[name] = nnx.Param(jnp.asarray(x, dtype))

        # Call the model once, without computing: a tensor that is not read belongs to
        # something that this file does not know.
        self.read: set[str] = set()
        jax.eval_shape(lambda: self(jnp.zeros((1, 1), int)))
        left = sorted(tensors.keys() - self.read)
        if left:
            raise ValueError(
                f"*.safetensors must hold only the model, but got {len(left)} others, "
                f"such as {left[0]}."
            )
        del self.read

    def get(self, *keys: str) -> Any:
        """Returns the value of the first of `keys` that the config holds."""
        for key in keys:
            value = self.config.get(key, ...)
            if value is not ...:
                return value
        raise ValueError(f"config.json must hold {' or '.join(keys)}, but does not.")

    def weight(self, name: str) -> Array:
        if name not in self.weights:
            raise ValueError(
                f"*.safetensors must hold {name} (as RENAMES has it), but there is no "
                "such tensor."
            )
        if hasattr(self, "read"):
            self.read.add(name)
        return self.weights[name][...]

    def norm(self, name: str, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        kind = self.family.norm
        y = x.astype(jnp.float32)
        if "layer" in kind:
            y -= y.mean(-1, keepdims=True)
        variance = jnp.square(y).mean(-1, keepdims=True)
        y *= jax.lax.rsqrt(variance + self.get(*EPSILONS))
        if "bare" not in kind:
            weight = self.weight(f"{name}.weight").astype(y.dtype)
            y *= weight + 1 if "+ 1" in kind else weight
        if kind in ("layer", "layer + 1"):
            y += self.weight(f"{name}.bias")
        return y.astype(x.dtype)

    def network(
        self,
        prefix: str,
        x: Array,
        has_bias: bool,
        multiply: Any = jnp.matmul,
        expert: Any = ...,
    ) -> Array:
        """Computes a network of two layers, or three with a gate.

        With experts, `multiply` takes the weights of all of them, and `expert` is the
        expert of each row.
        """

        def project(name: str, x: Array) -> Array:
            y = multiply(x, self.weight(f"{prefix}{name}.weight"))
            if has_bias:
                y += self.weight(f"{prefix}{name}.bias")[expert]
            return y

        up = project("up_proj", x)
        if not self.family.gated:
            return project("down_proj", self.activate(prefix, up))
        gate = project("gate_proj", x)
        limit = self.config.get("swiglu_limit")
        if limit is None:
            gate = self.activate(prefix, gate)
        else:
            gate = gate.clip(max=limit)
            gate *= nnx.sigmoid(self.config["swiglu_alpha"] * gate)
            up = up.clip(-limit, limit) + 1
        return project("down_proj", gate * up)

    def activate(self, prefix: str, x: Array) -> Array:
        name = self.get("hidden_activation", "hidden_act")
        if name in ACTIVATIONS:
            return ACTIVATIONS[name](x)
        if name != "xielu":
            raise ValueError(
                f"activation must be one of {', '.join(ACTIVATIONS)} or xielu, but got "
                f"{name!r}."
            )
        # Huang and Schlag, arXiv:2411.13010, with learned factors:
        # a_p x^2 + b x for x > 0, otherwise a_n (exp(x) - 1 - x) + b x.
        b = self.weight(f"{prefix}act_fn.beta")
        a_p = nnx.softplus(self.weight(f"{prefix}act_fn.alpha_p"))
        a_n = b + nnx.softplus(self.weight(f"{prefix}act_fn.alpha_n"))
        eps = self.weight(f"{prefix}act_fn.eps")
        below = (jnp.expm1(jnp.minimum(x, eps)) - x) * a_n
        return jnp.where(x > 0, a_p * x * x, below) + b * x

    def mixture(self, prefix: str, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        """Computes a mixture of experts: each token is read by a few of many networks,
        whose results are added up.
        """
        get = self.config.get
        kind = self.family.experts
        has_bias = "swiglu_limit" in self.config

        # Choose experts for each token.
        logits = x @ self.weight(f"{prefix}gate.weight")
        if has_bias:
            logits += self.weight(f"{prefix}gate.bias")
        logits = logits.astype(jnp.float32)
        scores = nnx.softmax(logits) if "softmax" in kind else nnx.sigmoid(logits)
        choice = logits if "logits" in kind else scores
        if "biased" in kind:
            choice += self.weight(f"{prefix}choice.bias").ravel()
        groups = get("n_group", 1)
        if groups > 1 and get("topk_method") != "greedy":
            # Only the groups whose best experts are best take part.
            by_group = choice.reshape(len(x), groups, -1)
            best, _ = jax.lax.top_k(by_group, get("group_best", 2))
            _, kept = jax.lax.top_k(best.sum(-1), self.get("topk_group"))
            is_kept = nnx.one_hot(kept, groups).any(1)
            is_kept = is_kept.repeat(choice.shape[1] // groups, axis=1)
            choice = jnp.where(is_kept, choice, -jnp.inf)
        # The config holds a number, or a list that repeats it for each layer.
        number = np.unique(self.get("num_experts_per_tok")).item()
        _, chosen = jax.lax.top_k(choice, number)
        scores = jnp.take_along_axis(scores, chosen, -1)
        if get("norm_topk_prob", True):
            scores /= scores.sum(-1, keepdims=True) + 1e-20
        scores *= get("routed_scaling_factor", 1.0)

        # Compute one row for each token and expert. Rows are sorted by expert, so that
        # `ragged_dot` multiplies all rows of an expert together.
        order = chosen.ravel().argsort()
        expert = chosen.ravel()[order]
        token = order // number
        weights = scores.ravel()[order][:, None].astype(x.dtype)
        sizes = jnp.bincount(expert, length=logits.shape[1])
        multiply = functools.partial(jax.lax.ragged_dot, group_sizes=sizes)
        rows = x[token]
        # Llama 4 weights what experts read, the others what they return.
        if get("scores_inputs"):
            rows *= weights
        rows = self.network(f"{prefix}experts.", rows, has_bias, multiply, expert)
        if not get("scores_inputs"):
            rows *= weights
        y = jnp.zeros_like(x).at[token].add(rows)

        if "shared" in kind:
            shared = self.network(f"{prefix}shared_expert.", x, has_bias=False)
            if "gated" in kind:
                gate = x @ self.weight(f"{prefix}shared_expert_gate.weight")
                shared *= nnx.sigmoid(gate)
            y += shared
        if "normed" in kind:
            y = self.norm(prefix.replace("mlp.", "post_mlp_layernorm"), y)
        return y

    def attend(
        self, layer: int, x: Float[Array, "B T D"], lengths: Any, kvs: dict[Any, Any]
    ) -> Float[Array, "B T D"]:
        """Computes a layer's attention; `kvs` holds keys and values for later layers
        with the same window.
        """
        module = self.attentions[layer]
        if not any(attention.reuse_kv for attention in self.attentions):
            return module(x, lengths=lengths)
        window = module.local_window_size
        kv = kvs[window] if module.reuse_kv else None
        x, kvs[window] = module(x, lengths=lengths, kv=kv, return_kv=True)
        return x

    def block(
        self, layer: int, x: Float[Array, "B T D"], lengths: Any, kvs: dict[Any, Any]
    ) -> Float[Array, "B T D"]:
        """Computes a layer: attention, then a network, each with norms before and after
        it and a residual connection around it.
        """
        prefix = f"model.layers.{layer}."
        factor = self.config.get("residual_multiplier", 1.0)
        before, after, before_network, after_network = self.family.norms

        def norm(name: str, x: Array) -> Array:
            return self.norm(prefix + name, x) if name else x

        y = self.attend(layer, norm(before, x), lengths, kvs)
        attended = x + factor * norm(after, y)
        y = norm(before_network, x if self.family.parallel else attended)
        # In some families with experts, the first layers have a plain network.
        if self.family.experts and f"{prefix}mlp.gate.weight" in self.weights:
            tokens = y.reshape(-1, x.shape[-1])
            y = self.mixture(f"{prefix}mlp.", tokens).reshape(x.shape)
        else:
            has_bias = any(
                self.config.get(f"{key}bias") for key in ("mlp_", "use_", "")
            )
            y = self.network(f"{prefix}mlp.", y, has_bias)
        return attended + factor * norm(after_network, y)

    def inputs_of_layers(
        self, tokens: Int[Array, "B T"], x: Float[Array, "B T D"]
    ) -> Float[Array, "B T L P"]:
        """Returns what Gemma 4 adds in each layer: an embedding of the token for this
        layer plus a projection of its first embedding, divided by sqrt(2).
        """
        size = self.config["hidden_size_per_layer_input"]
        shape = (*tokens.shape, -1, size)
        own = self.weight("model.embed_tokens_per_layer.weight")[tokens] * size**0.5
        projection = self.weight("model.per_layer_model_projection.weight")
        other = x @ projection.T * x.shape[-1] ** -0.5
        other = self.norm("model.per_layer_projection_norm", other.reshape(shape))
        return (own.reshape(shape) + other) * 0.5**0.5

    def add_input(
        self, prefix: str, x: Float[Array, "B T D"], added: Float[Array, "B T P"]
    ) -> Float[Array, "B T D"]:
        """Adds one layer's part of `inputs_of_layers`, which `x` gates."""
        gate = x @ self.weight(f"{prefix}per_layer_input_gate.weight").T
        gated = self.activate(prefix, gate) * added
        y = gated @ self.weight(f"{prefix}per_layer_projection.weight").T
        return x + self.norm(f"{prefix}post_per_layer_input_norm", y)

    def __call__(
        self, tokens: Int[Array, "B T"], lengths: Any = None, last: bool = False
    ) -> Float[Array, "B T V"]:
        """Computes the logits for each token or, with `last`, only for the last one of
        each row.
        """
        get = self.config.get
        embed = self.weight("model.embed_tokens.weight")
        factor = embed.shape[1] ** 0.5 if get("embed_sqrt") else 1.0
        factor = get("embedding_multiplier", factor)
        x = embed[tokens] * jnp.asarray(factor, embed.dtype)
        if "first_norm" in self.config:
            x = self.norm(self.get("first_norm"), x)
        if get("has_positions"):
            # Positions continue those in the cache.
            index = self.attentions[0].cache_index
            start = 0 if index is None else index[...]
            positions = jnp.expand_dims(start, -1) + jnp.arange(x.shape[1])
            x += self.weight("model.embed_positions.weight")[positions]

        has_inputs = bool(get("hidden_size_per_layer_input"))
        if has_inputs:
            added = self.inputs_of_layers(tokens, x)
        kvs: dict[Any, Any] = {}
        for layer in range(len(self.attentions)):
            prefix = f"model.layers.{layer}."
            x = self.block(layer, x, lengths, kvs)
            if has_inputs:
                x = self.add_input(prefix, x, added[:, :, layer])
            if get("has_scalars"):
                x *= self.weight(f"{prefix}layer_scalar")

        if last:
            x = x[jnp.arange(len(x)), lengths - 1][:, None]
        x = self.norm("model.norm", x)
        # Without a head of its own, a model compares with the embeddings of all tokens.
        head = embed
        if "lm_head.weight" in self.weights or get("tie_word_embeddings") is False:
            head = self.weight("lm_head.weight")
        x = x @ head.T
        if get("head_bias"):
            x += self.weight("lm_head.bias")
        x = x.astype(jnp.float32)
        scale = get("logits_scaling", 1.0)
        if not get("logits_times"):
            scale = 1 / scale
        x *= get("logit_scale", 1.0) * scale
        cap = get("final_logit_softcapping")
        if cap is None:
            return x
        return cap * jnp.tanh(x / cap)


@nnx.jit(static_argnames="count")
def generate(
    model: Decoder, prompts: Int[Array, "B T"], lengths: Int[Array, " B"], count: int
) -> Int[Array, "B L"]:
    """Continues each prompt, the first `lengths` tokens of its row, with the `count`
    most probable tokens.
    """
    # The same weights, with a cache in which rows may have different lengths.
    model = nnx.view(
        model,
        decode=True,
        batch_size=len(prompts),
        max_length=prompts.shape[1] + count,
        per_row=True,
    )
    first = model(prompts, lengths, last=True)[:, 0].argmax(-1)
    # The loop carries only the cache: the weights stay as they are.
    graph, cache, *params = nnx.split(model, nnx.Cache, ...)

    def step(
        carry: tuple[nnx.State, Array], _: None
    ) -> tuple[tuple[nnx.State, Array], Array]:
        cache, token = carry
        model = nnx.merge(graph, cache, *params)
        following = model(token[:, None])[:, 0].argmax(-1)
        return (nnx.state(model, nnx.Cache), following), token

    _, tokens = jax.lax.scan(step, (cache, first), length=count)
    return tokens.T


if __name__ == "__main__":
    from tokenizers import Tokenizer

    folder, *texts = sys.argv[1:] or [""]
    if not texts or not Path(folder, "tokenizer.json").exists():
        sys.exit(
            "usage: any_decoder.py FOLDER PROMPT...; FOLDER holds config.json, "
            "*.safetensors and tokenizer.json"
        )
    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    rows = [tokenizer.encode(text).ids for text in texts]
    longest = max(len(row) for row in rows)
    prompts = jnp.array([row + [0] * (longest - len(row)) for row in rows])
    lengths = jnp.array([len(row) for row in rows])
    model = Decoder(folder, jnp.bfloat16, max_length=longest + 64)
    written = generate(model, prompts, lengths, count=64)
    for row, tokens in zip(rows, written.tolist(), strict=True):
        print(tokenizer.decode(row + tokens), end="\n\n")
