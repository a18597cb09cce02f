"""Generates text with a Hugging Face decoder from any of `FAMILIES`, given a folder with config.json and safetensors.

    pip install -e '.[demo]' tokenizers
    python examples/any_decoder.py FOLDER "Once upon a time" "Attention is"

`convert.from_hf` makes the attention of each layer. For each family, one line of a table describes the rest.
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
    r"^(gpt_neox|transformer)\b": "model",
    r"^model\.h\b": "model.layers",
    "embed_in|word_embeddings": "embed_tokens",
    r"^model\.(final_layer_?norm|ln_f)\b": "model.norm",
    "embed_out": "lm_head",
    r"\.(self_)?attention\.": ".self_attn.",
    r"block_sparse_moe|feed_forward": "mlp",
    r"\bw1\b": "gate_proj",
    r"\bw3\b|fc1|dense_h_to_4h|c_fc": "up_proj",
    r"\bw2\b|fc2|dense_4h_to_h|(?<=mlp\.)c_proj": "down_proj",
    r"shared_experts\b": "shared_expert",
    r"mlp\.router\b": "mlp.gate",
    r"mlp\.(gate\.)?e_score_correction_bias": "mlp.choice.bias",
    r"(experts\.\w+_proj)$": r"\1.weight",
    r"_proj_bias$": "_proj.bias",
}
ACTIVATIONS = {"silu": nnx.silu, "relu": nnx.relu, "relu2": lambda x: nnx.relu(x) ** 2, "gelu_new": nnx.gelu}
ACTIVATIONS |= {"gelu_pytorch_tanh": nnx.gelu, "gelu": functools.partial(nnx.gelu, approximate=False)}
EPSILONS = ("epsilon", "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")


class Family(NamedTuple):
    """What stands around the attention of a `model_type`."""

    norms: tuple[str, ...] = ("input_layernorm", "", "post_attention_layernorm", "")  # around attention and network
    norm: str = "rms"  # or "layer"; "+ 1" adds to the weight; "unbiased"; "bare" has neither weight nor bias
    parallel: bool = False  # attention and network read the same
    gated: bool = True  # the network
    experts: str = ""  # "softmax" or "sigmoid" makes scores, "biased" for the choice alone; "shared", also "gated"
    keys: dict[str, Any] = {}  # noqa: RUF012 of configs, which not all families heed, and defaults (`...`: none); or our own


NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
AFTER, SHARED = ("", NORMS[1], "", NORMS[3]), (NORMS[0], "", NORMS[0], "")
PLAIN = Family(norm="layer", gated=False)
NEOX, GELU = PLAIN._replace(keys={"mlp_bias": True}), {"activation": "gelu"}
GEMMA = {"embed_sqrt": True, "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6}
GRANITE = {"embedding_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0}
TOP_K, GROUPS = {"norm_topk_prob": ...}, dict.fromkeys(("routed_scaling_factor", "n_group", "topk_group"), ...)
TABLE = [
    ("llama mistral ministral ministral3 qwen2 qwen3 smollm3 hunyuan_v1_dense phi3 glm cwm helium ernie4_5", Family()),
    ("arcee", PLAIN._replace(norm="rms")),
    ("glm4", Family((NORMS[0], "post_self_attn_layernorm", NORMS[1], "post_mlp_layernorm"))),
    ("olmo2 olmo3 exaone4", Family(AFTER)),
    ("olmo", Family(norm="layer bare", keys={"epsilon": 1e-5})),
    ("gemma", Family(norm="rms + 1", keys=GEMMA)),
    ("gemma2", Family(NORMS, "rms + 1", keys=GEMMA | {"final_logit_softcapping": ...})),
    ("gemma3_text", Family(NORMS, "rms + 1", keys=GEMMA | {"final_logit_softcapping": None})),
    ("granite granite_swa", Family(keys=GRANITE)),
    ("cohere cohere2", Family(SHARED, "layer unbiased", parallel=True, keys={"logit_scale": 0.0625})),
    ("phi", NEOX._replace(norms=SHARED, parallel=True, keys={"mlp_bias": True, "head_bias": True})),
    ("gpt_neox persimmon", NEOX),
    ("gpt_neox+parallel", NEOX._replace(parallel=True)),
    ("falcon+parallel", PLAIN._replace(norms=SHARED, parallel=True, keys=GELU)),
    ("falcon+new+parallel", PLAIN._replace(norms=("ln_attn", "", "ln_mlp", ""), parallel=True, keys=GELU)),
    ("starcoder2 jais2", PLAIN),
    ("nemotron", PLAIN._replace(norm="layer + 1")),
    ("stablelm", Family(norm="layer")),
    ("mixtral", Family(experts="softmax")),
    ("qwen3_moe olmoe mellum", Family(experts="softmax", keys=TOP_K)),
    ("qwen2_moe", Family(experts="softmax gated shared", keys=TOP_K)),
    ("deepseek_v3 kimi_k2 glm4_moe dots1 exaone_moe", Family(experts="sigmoid biased shared", keys=TOP_K | GROUPS)),
    ("llama4_text", Family(experts="sigmoid shared", keys={"scores_inputs": True, "norm_topk_prob": False})),
    ("gpt_oss", Family(experts="softmax", keys={"swiglu_limit": 7.0, "swiglu_alpha": 1.702})),
]
FAMILIES = {name: family for names, family in TABLE for name in names.split()}
OPTIONAL = {key for family in FAMILIES.values() for key in family.keys} - {*EPSILONS, "mlp_bias", "activation"}


def read_tensors(folder: Path, part: str, takes_turns: bool) -> dict[str, np.ndarray]:
    """Returns tensors as `RENAMES` calls them: weights of networks [in, out], gates apart, stacks of experts."""
    index, tensors = folder / "model.safetensors.index.json", {}
    files = json.loads(index.read_text())["weight_map"].values() if index.exists() else ["model.safetensors"]
    for key, x in [pair for file in sorted({*files}) for pair in load_file(folder / file).items()]:
        if key.startswith(part):
            name = functools.reduce(lambda name, old: re.sub(old, RENAMES[old], name), RENAMES, key[len(part) :])
            tensors[name] = x.T if ".mlp." in name and x.ndim == 2 and not name.endswith("bias") else x
    for name in [*tensors]:
        if ".experts.0." in name:
            rows: list[np.ndarray] = []
            while (key := name.replace(".experts.0.", f".experts.{len(rows)}.")) in tensors:
                rows.append(tensors.pop(key))
            tensors[name.replace(".experts.0.", ".experts.")] = np.stack(rows)
        elif "gate_up_proj" in name:
            x = tensors.pop(name)
            gate, up = (x[..., ::2], x[..., 1::2]) if takes_turns else np.split(x, 2, axis=-1)
            tensors |= {name.replace("gate_up", "gate"): gate, name.replace("gate_up", "up"): up}
    return tensors


class Decoder(nnx.Module):
    """Makes of tokens, padded on the right, the logits of those that follow; LongRoPE depends on `max_length`."""

    def __init__(self, folder: str | Path, dtype: Any = jnp.float32, max_length: int | None = None):
        given = json.loads((Path(folder) / "config.json").read_text())
        values = {key: x for key, x in (given | given.get("text_config", {})).items() if x is not None}
        kind = values.get("model_type", "") + "+new" * bool(values.get("new_decoder_architecture"))
        kind += "+parallel" * bool(values.get("use_parallel_residual") or values.get("parallel_attn"))
        if kind not in FAMILIES:
            raise ValueError(f"model_type must be one of FAMILIES, but got {kind!r}; add a line for this type.")
        self.family, keys = FAMILIES[kind], FAMILIES[kind].keys
        self.config = keys | {key: x for key, x in values.items() if key not in OPTIONAL or key in keys}
        self.config |= {key: self.get(key) for key in keys}
        tensors = read_tensors(Path(folder), "language_model." * ("text_config" in given), "swiglu_limit" in keys)
        self.attentions: nnx.List[Any] = nnx.List()
        for layer in range(self.get("num_hidden_layers")):
            weights = {x: tensors.pop(x) for x in [*tensors] if x.startswith(f"model.layers.{layer}.self_attn.")}
            self.attentions.append(convert.from_hf(given, weights, layer, max_length=max_length, param_dtype=dtype))
        ahead = f"model.layers.{len(self.attentions)}." if values.get("num_nextn_predict_layers") else "-"  # not used
        tensors = {name: x for name, x in tensors.items() if not name.startswith(ahead)}
        self.weights = nnx.Dict({name: nnx.Param(jnp.asarray(x, dtype)) for name, x in tensors.items()})
        self.read: set[str] = set()  # only for this first call
        jax.eval_shape(lambda: self(jnp.zeros((1, 1), int)))
        if left := sorted(tensors.keys() - self.read):
            raise ValueError(f"*.safetensors must hold only the model, but got {len(left)} others, such as {left[0]}.")
        del self.read

    def get(self, *keys: str) -> Any:
        if not (found := [self.config[key] for key in keys if self.config.get(key, ...) is not ...]):
            raise ValueError(f"config.json must hold {' or '.join(keys)}, but does not.")
        return found[0]

    def weight(self, name: str) -> Array:
        if name not in self.weights:
            raise ValueError(f"*.safetensors must hold {name} (as RENAMES has it), but there is no such tensor.")
        getattr(self, "read", {name}).add(name)
        return self.weights[name][...]

    def norm(self, name: str, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        kind, y = self.family.norm, x.astype(jnp.float32)
        y = y - y.mean(-1, keepdims=True) if "layer" in kind else y
        y *= jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + self.get(*EPSILONS))
        y = y if "bare" in kind else y * (self.weight(f"{name}.weight").astype(y.dtype) + ("+ 1" in kind))
        return (y + self.weight(f"{name}.bias") if kind in ("layer", "layer + 1") else y).astype(x.dtype)

    def network(self, prefix: str, x: Array, has_bias: bool, multiply: Any = jnp.matmul, expert: Any = ...) -> Array:
        def project(name: str, x: Array) -> Array:
            y = multiply(x, self.weight(f"{prefix}{name}.weight"))
            return y + self.weight(f"{prefix}{name}.bias")[expert] if has_bias else y

        name, limit = self.get("hidden_activation", "hidden_act", "activation"), self.config.get("swiglu_limit")
        if name not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, but got {name!r}.")
        up = project("up_proj", x)
        gate = project("gate_proj", x) if self.family.gated else up
        if limit is not None:
            gate, up = gate.clip(max=limit), up.clip(-limit, limit) + 1
            return project("down_proj", gate * nnx.sigmoid(self.config["swiglu_alpha"] * gate) * up)
        return project("down_proj", ACTIVATIONS[name](gate) * up if self.family.gated else ACTIVATIONS[name](gate))

    def mixture(self, prefix: str, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        get, kind, has_bias = self.config.get, self.family.experts, "swiglu_limit" in self.config
        logits = x @ self.weight(f"{prefix}gate.weight") + (self.weight(f"{prefix}gate.bias") if has_bias else 0)
        scores = (nnx.softmax if "softmax" in kind else nnx.sigmoid)(logits.astype(jnp.float32))
        choice = scores + (self.weight(f"{prefix}choice.bias").ravel() if "biased" in kind else 0)
        if (groups := get("n_group", 1)) > 1:  # experts of the best groups, by the best two of each
            best = jax.lax.top_k(choice.reshape(len(x), groups, -1), 2)[0].sum(-1)
            is_kept = nnx.one_hot(jax.lax.top_k(best, self.get("topk_group"))[1], groups).any(1)
            choice = jnp.where(is_kept.repeat(choice.shape[1] // groups, axis=1), choice, -jnp.inf)
        chosen = jax.lax.top_k(choice, self.get("num_experts_per_tok"))[1]
        scores = jnp.take_along_axis(scores, chosen, -1)
        scores /= scores.sum(-1, keepdims=True) + 1e-20 if get("norm_topk_prob", True) else 1
        order = chosen.ravel().argsort()  # rows by expert
        expert, token = chosen.ravel()[order], order // chosen.shape[1]
        scores = (scores.ravel()[order][:, None] * get("routed_scaling_factor", 1.0)).astype(x.dtype)
        before, after = (scores, 1) if get("scores_inputs") else (1, scores)  # of what experts read, or return
        multiply = functools.partial(jax.lax.ragged_dot, group_sizes=jnp.bincount(expert, length=logits.shape[1]))
        y = self.network(f"{prefix}experts.", x[token] * before, has_bias, multiply, expert)
        y = jnp.zeros_like(x).at[token].add(y * after)
        if "shared" in kind:
            gate = nnx.sigmoid(x @ self.weight(f"{prefix}shared_expert_gate.weight")) if "gated" in kind else 1
            y += self.network(f"{prefix}shared_expert.", x, False) * gate
        return y

    def block(self, layer: int, x: Float[Array, "B T D"], lengths: Int[Array, " B"] | None) -> Float[Array, "B T D"]:
        prefix, factor = f"model.layers.{layer}.", self.config.get("residual_multiplier", 1.0)
        norms = [functools.partial(self.norm, prefix + name) if name else lambda x: x for name in self.family.norms]
        attended = x + factor * norms[1](self.attentions[layer](norms[0](x), lengths=lengths))
        y = norms[2](x if self.family.parallel else attended)
        if self.family.experts and f"{prefix}mlp.gate.weight" in self.weights:
            y = self.mixture(f"{prefix}mlp.", y.reshape(-1, x.shape[-1])).reshape(x.shape)
        else:
            y = self.network(f"{prefix}mlp.", y, any(self.config.get(f"{key}bias") for key in ("mlp_", "use_", "")))
        return attended + factor * norms[3](y)

    def __call__(self, tokens: Int[Array, "B T"], lengths: Any = None, last: bool = False) -> Float[Array, "B T V"]:
        get, embed = self.config.get, self.weight("model.embed_tokens.weight")
        factor = get("embedding_multiplier", embed.shape[1] ** 0.5 if get("embed_sqrt") else 1.0)
        x = embed[tokens] * jnp.asarray(factor, embed.dtype)
        for layer in range(len(self.attentions)):
            x = self.block(layer, x, lengths)
        x = self.norm("model.norm", x[jnp.arange(len(x)), lengths - 1][:, None] if last else x)
        has_head = "lm_head.weight" in self.weights or get("tie_word_embeddings") is False
        x = x @ (self.weight("lm_head.weight") if has_head else embed).T
        x = (x + self.weight("lm_head.bias") if get("head_bias") else x).astype(jnp.float32)
        x, cap = x * get("logit_scale", 1.0) / get("logits_scaling", 1.0), get("final_logit_softcapping")
        return x if cap is None else cap * jnp.tanh(x / cap)


@nnx.jit(static_argnames="count")
def generate(model: Decoder, prompts: Int[Array, "B T"], lengths: Int[Array, " B"], count: int) -> Int[Array, "B L"]:
    """Continues each prompt, the first `lengths` tokens of its row, with the `count` most probable tokens."""
    model = nnx.view(model, decode=True, batch_size=len(prompts), max_length=prompts.shape[1] + count, per_row=True)
    first = model(prompts, lengths, last=True)[:, 0].argmax(-1)
    graph, cache, *params = nnx.split(model, nnx.Cache, ...)

    def step(carry: tuple[nnx.State, Array], _: None) -> tuple[tuple[nnx.State, Array], Array]:
        model = nnx.merge(graph, carry[0], *params)
        following = model(carry[1][:, None])[:, 0].argmax(-1)
        return (nnx.state(model, nnx.Cache), following), carry[1]

    return jax.lax.scan(step, (cache, first), length=count)[1].T


if __name__ == "__main__":
    from tokenizers import Tokenizer

    folder, *texts = sys.argv[1:] or [""]
    if not texts or not Path(folder, "tokenizer.json").exists():
        sys.exit("usage: any_decoder.py FOLDER PROMPT...; FOLDER holds config.json, *.safetensors and tokenizer.json")
    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    rows = [tokenizer.encode(text).ids for text in texts]
    lengths = jnp.array([len(row) for row in rows])
    prompts = jnp.array([row + [0] * (max(map(len, rows)) - len(row)) for row in rows])
    model = Decoder(folder, jnp.bfloat16, max_length=prompts.shape[1] + 64)
    for row, tokens in zip(rows, generate(model, prompts, lengths, count=64).tolist(), strict=True):
        print(tokenizer.decode(row + tokens), end="\n\n")
