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
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int
from safetensors.numpy import load_file

from flax_mha import convert

RENAMES = {  # parts of the names of tensors, and what they are called here
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
ALIASES = {  # keys of configs, and what they are called here
    **dict.fromkeys(("num_layers", "n_layer", "n_layers"), "num_hidden_layers"),
    **dict.fromkeys(("moe_topk", "moe_k"), "num_experts_per_tok"),
    **dict.fromkeys(("router_scaling_factor", "route_scale"), "routed_scaling_factor"),
    **dict.fromkeys(("activation", "activation_function"), "hidden_act"),
    "mup_enabled": "embed_sqrt",
}
ACTIVATIONS = {
    "silu": nnx.silu,
    "relu": nnx.relu,
    "relu2": lambda x: nnx.relu(x) ** 2,
    "gelu_new": nnx.gelu,
}
ACTIVATIONS |= {
    "gelu_pytorch_tanh": nnx.gelu,
    "gelu": functools.partial(nnx.gelu, approximate=False),
}
EPSILONS = (
    "epsilon",
    "rms_norm_eps",
    "layer_norm_eps",
    "layer_norm_epsilon",
    "norm_epsilon",
    "norm_eps",
)


class Family(NamedTuple):
    """Describes the rest of the layers of a `model_type`: norms, networks and factors."""

    # Around attention and network.
    norms: tuple[str, ...] = ("input_layernorm", "", "post_attention_layernorm", "")
    # Or "layer"; "+ 1" adds to the weight; "unbiased"; "bare" has neither weight nor
    # bias.
    norm: str = "rms"
    parallel: bool = False  # attention and network read the same
    gated: bool = True  # the network
    # "softmax" or "sigmoid" makes scores; they, or "logits", choose, also with a bias
    # ("biased"); "shared" adds an expert, which may be "gated"; "normed" has a norm
    # after the sum
    experts: str = ""
    keys: dict[str, Any] = {}  # noqa: RUF012 of configs, which not all families heed, and defaults (`...`: none); or our own


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
TABLE = [
    (
        "llama mistral ministral ministral3 qwen2 qwen3 smollm3 hunyuan_v1_dense phi3 "
        "glm cwm helium ernie4_5",
        Family(),
    ),
    ("seed_oss iquestcoder internlm3 youtu", Family()),
    ("arcee", PLAIN._replace(norm="rms")),
    (
        "apertus",
        PLAIN._replace(
            norms=("attention_layernorm", "", "feedforward_layernorm", ""), norm="rms"
        ),
    ),
    (
        "nanochat",
        PLAIN._replace(
            norm="rms bare",
            keys={"first_norm": "bare", "final_logit_softcapping": 15.0},
        ),
    ),
    ("bloom", NEOX._replace(keys=GPT | {"first_norm": "model.embed_tokens_layernorm"})),
    (
        "mpt",
        PLAIN._replace(
            norms=("norm_1", "", "norm_2", ""), norm="layer unbiased", keys=GELU
        ),
    ),
    ("gpt2", GPT_2._replace(keys=GPT_2.keys | {"is_turned": True})),
    ("gpt_bigcode gpt_neo", GPT_2),
    ("glm4", Family(GLM)),
    ("olmo2 olmo3 exaone4", Family(AFTER)),
    ("olmo", Family(norm="layer bare", keys={"epsilon": 1e-5})),
    ("gemma", Family(norm="rms + 1", keys=GEMMA)),
    ("gemma2", Family(NORMS, "rms + 1", keys=GEMMA | CAP)),
    ("vaultgemma", Family((NORMS[0], "", NORMS[2], ""), "rms + 1", keys=GEMMA | CAP)),
    (
        "gemma3_text",
        Family(NORMS, "rms + 1", keys=GEMMA | {"final_logit_softcapping": None}),
    ),
    ("gemma4_text gemma4_unified_text", Family(NORMS, keys=GEMMA | GEMMA_4)),
    ("granite granite_swa", Family(keys=GRANITE)),
    ("granitemoe", Family(experts="softmax", keys=GRANITE)),
    ("granitemoeshared", Family(experts="softmax shared", keys=GRANITE)),
    (
        "hyperclovax",
        Family(
            (NORMS[0], "post_norm1", NORMS[1], "post_norm2"),
            keys=GRANITE | {"logits_times": True},
        ),
    ),
    (
        "cohere cohere2",
        Family(SHARED, "layer unbiased", parallel=True, keys={"logit_scale": 0.0625}),
    ),
    ("phi", BIASED._replace(norms=SHARED)),
    ("gptj codegen", BIASED._replace(norms=("ln_1", "", "ln_1", ""))),
    ("gpt_neox persimmon", NEOX),
    ("gpt_neox+parallel", NEOX._replace(parallel=True)),
    ("falcon+parallel", PLAIN._replace(norms=SHARED, parallel=True, keys=GELU)),
    (
        "falcon+new+parallel",
        PLAIN._replace(norms=("ln_attn", "", "ln_mlp", ""), parallel=True, keys=GELU),
    ),
    ("starcoder2 jais2", PLAIN),
    ("nemotron", PLAIN._replace(norm="layer + 1")),
    ("stablelm", Family(norm="layer")),
    ("mixtral", Family(experts="softmax")),
    ("minimax_m2", Family(experts="sigmoid biased")),
    ("qwen3_moe olmoe mellum", Family(experts="softmax", keys=TOP_K)),
    ("flex_olmo", Family(AFTER, experts="softmax", keys=TOP_K)),
    ("hunyuan_v1_moe", Family(experts="softmax shared")),
    ("ernie4_5_moe", Family(experts="softmax biased shared")),
    ("qwen2_moe", Family(experts="softmax gated shared", keys=TOP_K)),
    ("deepseek_v2", Family(experts="softmax shared", keys=TOP_K | SCALED | GREEDY)),
    (
        "deepseek_v3 deepseek_v32 kimi_k2 sarvam_mla dots1 exaone_moe",
        Family(experts=SIGMOID, keys=GROUPS),
    ),
    ("glm4_moe glm4_moe_lite solar_open", Family(experts=SIGMOID, keys=GROUPS)),
    ("axk1", Family(experts=f"{SIGMOID} normed", keys=GROUPS)),
    ("hy_v3", Family(experts=SIGMOID, keys=SCALED)),
    ("afmoe", Family(AFMOE, experts=SIGMOID, keys=SCALED | {"embed_sqrt": False})),
    ("flint", Family(experts="sigmoid shared", keys=TOP_K)),
    ("kolibri1", Family(GLM, experts="sigmoid biased logits shared", keys=TOP_K)),
    (
        "llama4_text",
        Family(
            experts="sigmoid shared",
            keys={"scores_inputs": True, "norm_topk_prob": False},
        ),
    ),
    (
        "gpt_oss",
        Family(experts="softmax", keys={"swiglu_limit": 7.0, "swiglu_alpha": 1.702}),
    ),
]
FAMILIES = {name: family for names, family in TABLE for name in names.split()}
OPTIONAL = {key for family in FAMILIES.values() for key in family.keys} - {
    *EPSILONS,
    "mlp_bias",
    "hidden_act",
}


def read_tensors(
    folder: Path, is_text_part: bool, keys: dict[str, Any]
) -> dict[str, np.ndarray]:
    """Returns tensors as `RENAMES` calls them: weights of networks [in, out], gates
    apart, stacks of experts.
    """
    index = folder / "model.safetensors.index.json"
    tensors = {}
    if index.exists():
        files = json.loads(index.read_text())["weight_map"].values()
    else:
        files = ["model.safetensors"]
    for key, x in [
        pair for file in sorted({*files}) for pair in load_file(folder / file).items()
    ]:
        # Of models that read images, too.
        if not is_text_part or re.search(r"\b(language_model|lm_head)\.", key):
            name = functools.reduce(
                lambda name, old: re.sub(old, RENAMES[old], name), RENAMES, key
            )
            is_out_in = (
                ".mlp." in name
                and x.ndim > 1
                and key.endswith("weight")
                and "is_turned" not in keys
            )
            tensors[name] = np.swapaxes(x, -1, -2) if is_out_in else x
    for name in [*tensors]:
        if ".experts.0." in name:
            rows: list[np.ndarray] = []
            while (
                key := name.replace(".experts.0.", f".experts.{len(rows)}.")
            ) in tensors:
                rows.append(tensors.pop(key))
            tensors[name.replace(".experts.0.", ".experts.")] = np.stack(rows)
        elif "gate_up_proj" in name:
            x = tensors.pop(name)
            gate, up = (
                (x[..., ::2], x[..., 1::2])
                if "swiglu_limit" in keys
                else np.split(x, 2, axis=-1)
            )
            tensors |= {
                name.replace("gate_up", "gate"): gate,
                name.replace("gate_up", "up"): up,
            }
    return tensors


class Decoder(nnx.Module):
    """Makes of tokens, padded on the right, the logits of those that follow; LongRoPE
    depends on `max_length`.
    """

    def __init__(
        self,
        folder: str | Path,
        dtype: Any = jnp.float32,
        max_length: int | None = None,
    ):
        given = json.loads((Path(folder) / "config.json").read_text())
        named = {
            ALIASES.get(key, key): x
            for key, x in (given | given.get("text_config", {})).items()
        }
        values = {key: x for key, x in named.items() if x is not None}
        kind = values.get("model_type", "") + "+new" * bool(
            values.get("new_decoder_architecture")
        )
        kind += "+parallel" * bool(
            values.get("use_parallel_residual") or values.get("parallel_attn")
        )
        kind += "+normed" * bool(values.get("apply_residual_connection_post_layernorm"))
        if kind not in FAMILIES:
            raise ValueError(
                f"model_type must be one of FAMILIES, but got {kind!r}; add a line for "
                "this type."
            )
        self.family = FAMILIES[kind]
        keys = FAMILIES[kind].keys
        self.config = keys | {
            key: x for key, x in values.items() if key not in OPTIONAL or key in keys
        }
        self.config |= {key: self.get(key) for key in keys}
        tensors = read_tensors(Path(folder), "text_config" in given, keys)
        self.attentions: nnx.List[Any] = nnx.List()
        for layer in range(self.get("num_hidden_layers")):
            weights = {
                x: tensors.pop(x)
                for x in [*tensors]
                if x.startswith(f"model.layers.{layer}.self_attn.")
            }
            self.attentions.append(
                convert.from_hf(
                    given, weights, layer, max_length=max_length, param_dtype=dtype
                )
            )
        # Not used.
        if values.get("num_nextn_predict_layers"):
            ahead = f"model.layers.{len(self.attentions)}."
        else:
            ahead = "-"
        tensors = {name: x for name, x in tensors.items() if not name.startswith(ahead)}
        self.weights = nnx.Dict(
            {name: nnx.Param(jnp.asarray(x, dtype)) for name, x in tensors.items()}
        )
        self.read: set[str] = set()  # only for this first call
        jax.eval_shape(lambda: self(jnp.zeros((1, 1), int)))
        if left := sorted(tensors.keys() - self.read):
            raise ValueError(
                f"*.safetensors must hold only the model, but got {len(left)} others, "
                f"such as {left[0]}."
            )
        del self.read

    def get(self, *keys: str) -> Any:
        if not (
            found := [
                self.config[key] for key in keys if self.config.get(key, ...) is not ...
            ]
        ):
            raise ValueError(
                f"config.json must hold {' or '.join(keys)}, but does not."
            )
        return found[0]

    def weight(self, name: str) -> Array:
        if name not in self.weights:
            raise ValueError(
                f"*.safetensors must hold {name} (as RENAMES has it), but there is no "
                "such tensor."
            )
        getattr(self, "read", {name}).add(name)
        return self.weights[name][...]

    def norm(self, name: str, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        kind = self.family.norm
        y = x.astype(jnp.float32)
        y = y - y.mean(-1, keepdims=True) if "layer" in kind else y
        y *= jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + self.get(*EPSILONS))
        if "bare" in kind:
            y = y
        else:
            y = y * (self.weight(f"{name}.weight").astype(y.dtype) + ("+ 1" in kind))
        return (
            y + self.weight(f"{name}.bias") if kind in ("layer", "layer + 1") else y
        ).astype(x.dtype)

    def network(
        self,
        prefix: str,
        x: Array,
        has_bias: bool,
        multiply: Any = jnp.matmul,
        expert: Any = ...,
    ) -> Array:
        def project(name: str, x: Array) -> Array:
            y = multiply(x, self.weight(f"{prefix}{name}.weight"))
            if has_bias:
                return y + self.weight(f"{prefix}{name}.bias")[expert]
            return y

        limit = self.config.get("swiglu_limit")
        up = project("up_proj", x)
        gate = project("gate_proj", x) if self.family.gated else up
        if limit is not None:
            gate = gate.clip(max=limit)
            up = up.clip(-limit, limit) + 1
            return project(
                "down_proj", gate * nnx.sigmoid(self.config["swiglu_alpha"] * gate) * up
            )
        gate = self.activate(prefix, gate)
        return project("down_proj", gate * up if self.family.gated else gate)

    def activate(self, prefix: str, x: Array) -> Array:
        name = self.get("hidden_activation", "hidden_act")
        if name in ACTIVATIONS:
            return ACTIVATIONS[name](x)
        if name != "xielu":
            raise ValueError(
                f"activation must be one of {', '.join(ACTIVATIONS)} or xielu, but got "
                f"{name!r}."
            )
        p, n, beta, eps = (
            self.weight(f"{prefix}act_fn.{name}")
            for name in ("alpha_p", "alpha_n", "beta", "eps")
        )
        below = (jnp.expm1(jnp.minimum(x, eps)) - x) * (beta + nnx.softplus(n))
        return jnp.where(x > 0, nnx.softplus(p) * x * x, below) + beta * x

    def mixture(self, prefix: str, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        get = self.config.get
        kind = self.family.experts
        has_bias = "swiglu_limit" in self.config
        logits = x @ self.weight(f"{prefix}gate.weight") + (
            self.weight(f"{prefix}gate.bias") if has_bias else 0
        )
        logits = logits.astype(jnp.float32)
        scores = (nnx.softmax if "softmax" in kind else nnx.sigmoid)(logits)
        choice = logits if "logits" in kind else scores
        choice += self.weight(f"{prefix}choice.bias").ravel() if "biased" in kind else 0
        # Experts of the best groups.
        if (groups := get("n_group", 1)) > 1 and get("topk_method") != "greedy":
            best = jax.lax.top_k(
                choice.reshape(len(x), groups, -1), get("group_best", 2)
            )[0].sum(-1)
            is_kept = nnx.one_hot(
                jax.lax.top_k(best, self.get("topk_group"))[1], groups
            ).any(1)
            choice = jnp.where(
                is_kept.repeat(choice.shape[1] // groups, axis=1), choice, -jnp.inf
            )
        chosen = jax.lax.top_k(
            choice, np.unique(self.get("num_experts_per_tok")).item()
        )[1]
        scores = jnp.take_along_axis(scores, chosen, -1)
        scores /= (
            scores.sum(-1, keepdims=True) + 1e-20 if get("norm_topk_prob", True) else 1
        )
        order = chosen.ravel().argsort()  # rows by expert
        expert = chosen.ravel()[order]
        token = order // chosen.shape[1]
        scores = (
            scores.ravel()[order][:, None] * get("routed_scaling_factor", 1.0)
        ).astype(x.dtype)
        # Of what experts read, or return.
        before, after = (scores, 1) if get("scores_inputs") else (1, scores)
        multiply = functools.partial(
            jax.lax.ragged_dot, group_sizes=jnp.bincount(expert, length=logits.shape[1])
        )
        y = self.network(
            f"{prefix}experts.", x[token] * before, has_bias, multiply, expert
        )
        y = jnp.zeros_like(x).at[token].add(y * after)
        if "shared" in kind:
            if "gated" in kind:
                gate = nnx.sigmoid(
                    x @ self.weight(f"{prefix}shared_expert_gate.weight")
                )
            else:
                gate = 1
            y += self.network(f"{prefix}shared_expert.", x, False) * gate
        if "normed" in kind:
            return self.norm(prefix.replace("mlp.", "post_mlp_layernorm"), y)
        return y

    def attend(
        self, layer: int, x: Float[Array, "B T D"], lengths: Any, kvs: dict[Any, Any]
    ) -> Float[Array, "B T D"]:
        """Returns what a layer attends to; `kvs` are keys and values for later layers
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
        prefix = f"model.layers.{layer}."
        factor = self.config.get("residual_multiplier", 1.0)
        norms = [
            functools.partial(self.norm, prefix + name) if name else lambda x: x
            for name in self.family.norms
        ]
        attended = x + factor * norms[1](self.attend(layer, norms[0](x), lengths, kvs))
        y = norms[2](x if self.family.parallel else attended)
        if self.family.experts and f"{prefix}mlp.gate.weight" in self.weights:
            y = self.mixture(f"{prefix}mlp.", y.reshape(-1, x.shape[-1])).reshape(
                x.shape
            )
        else:
            y = self.network(
                f"{prefix}mlp.",
                y,
                any(self.config.get(f"{key}bias") for key in ("mlp_", "use_", "")),
            )
        return attended + factor * norms[3](y)

    def inputs_of_layers(
        self, tokens: Int[Array, "B T"], x: Float[Array, "B T D"]
    ) -> Float[Array, "B T L P"]:
        """Returns what Gemma 4 adds in each layer, of each token itself and of its
        embedding.
        """
        size = self.config["hidden_size_per_layer_input"]
        own = self.weight("model.embed_tokens_per_layer.weight")[tokens] * size**0.5
        other = (
            x
            @ self.weight("model.per_layer_model_projection.weight").T
            * x.shape[-1] ** -0.5
        )
        own, other = (y.reshape(*tokens.shape, -1, size) for y in (own, other))
        return (own + self.norm("model.per_layer_projection_norm", other)) * 0.5**0.5

    def add_input(
        self, prefix: str, x: Float[Array, "B T D"], added: Float[Array, "B T P"]
    ) -> Float[Array, "B T D"]:
        gate = self.activate(
            prefix, x @ self.weight(f"{prefix}per_layer_input_gate.weight").T
        )
        y = (gate * added) @ self.weight(f"{prefix}per_layer_projection.weight").T
        return x + self.norm(f"{prefix}post_per_layer_input_norm", y)

    def __call__(
        self, tokens: Int[Array, "B T"], lengths: Any = None, last: bool = False
    ) -> Float[Array, "B T V"]:
        get = self.config.get
        embed = self.weight("model.embed_tokens.weight")
        factor = get(
            "embedding_multiplier", embed.shape[1] ** 0.5 if get("embed_sqrt") else 1.0
        )
        x = embed[tokens] * jnp.asarray(factor, embed.dtype)
        x = self.norm(get("first_norm", ""), x) if "first_norm" in self.config else x
        if get("has_positions"):
            if (index := self.attentions[0].cache_index) is None:
                start = 0
            else:
                start = index[...]
            x += self.weight("model.embed_positions.weight")[
                jnp.expand_dims(start, -1) + jnp.arange(x.shape[1])
            ]
        kvs: dict[Any, Any] = {}
        if get("hidden_size_per_layer_input"):
            added = self.inputs_of_layers(tokens, x)
        else:
            added = None
        for layer in range(len(self.attentions)):
            x = self.block(layer, x, lengths, kvs)
            if added is None:
                x = x
            else:
                x = self.add_input(f"model.layers.{layer}.", x, added[:, :, layer])
            x *= (
                self.weight(f"model.layers.{layer}.layer_scalar")
                if get("has_scalars")
                else 1
            )
        x = self.norm(
            "model.norm", x[jnp.arange(len(x)), lengths - 1][:, None] if last else x
        )
        has_head = (
            "lm_head.weight" in self.weights or get("tie_word_embeddings") is False
        )
        x = x @ (self.weight("lm_head.weight") if has_head else embed).T
        x = (x + self.weight("lm_head.bias") if get("head_bias") else x).astype(
            jnp.float32
        )
        scale = get("logits_scaling", 1.0)
        cap = get("final_logit_softcapping")
        x *= get("logit_scale", 1.0) * (scale if get("logits_times") else 1 / scale)
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
    model = nnx.view(
        model,
        decode=True,
        batch_size=len(prompts),
        max_length=prompts.shape[1] + count,
        per_row=True,
    )
    first = model(prompts, lengths, last=True)[:, 0].argmax(-1)
    graph, cache, *params = nnx.split(model, nnx.Cache, ...)

    def step(
        carry: tuple[nnx.State, Array], _: None
    ) -> tuple[tuple[nnx.State, Array], Array]:
        model = nnx.merge(graph, carry[0], *params)
        following = model(carry[1][:, None])[:, 0].argmax(-1)
        return (nnx.state(model, nnx.Cache), following), carry[1]

    return jax.lax.scan(step, (cache, first), length=count)[1].T


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
    lengths = jnp.array([len(row) for row in rows])
    prompts = jnp.array([row + [0] * (max(map(len, rows)) - len(row)) for row in rows])
    model = Decoder(folder, jnp.bfloat16, max_length=prompts.shape[1] + 64)
    for row, tokens in zip(
        rows, generate(model, prompts, lengths, count=64).tolist(), strict=True
    ):
        print(tokenizer.decode(row + tokens), end="\n\n")
