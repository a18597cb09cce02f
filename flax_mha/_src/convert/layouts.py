"""The table of layouts: how the weights of an attention are named and stacked in the
`state_dict` of PyTorch models.

PyTorch keeps a linear layer as `weight (out, in)`, Flax as `kernel (in, heads, head
size)`. Both directions of the conversion read `LAYOUTS`. Sources: the `state_dict` of
`torch.nn.MultiheadAttention`, of timm's `Attention`, and of attentions in Transformers
4 and 5.
"""

from collections.abc import Collection
from typing import Any, Literal, NamedTuple

LayoutName = (
    # torch.nn.MultiheadAttention; the second has kdim or vdim.
    Literal["torch", "torch_separate"]
    # Of tests/torch_port.py.
    | Literal["note_mha", "bert_self_attention", "d2l_mha", "masked_self_attention"]
    | Literal["hf_bert", "hf_distilbert"]  # BERT, RoBERTa, ELECTRA
    # Llama, Mistral, Qwen 3, Gemma, gpt-oss; Qwen 2 has no bias after the attention.
    | Literal["hf_llama", "hf_qwen2"]
    | Literal["hf_qwen3_next"]  # and Qwen 3.5: stacks query and gate of each head
    | Literal["hf_laguna"]  # gates; also of LFM3
    # Like Llama, with other names.
    | Literal["hf_hunyuan", "hf_lfm2", "hf_modernbert", "hf_moshi"]
    # hf_neox: also Falcon, Bloom and Persimmon.
    | Literal["hf_phi", "hf_phi3", "hf_neox"]
    | Literal["hf_codegen", "hf_mpt", "hf_ctrl"]  # hf_mpt: also DBRX
    # hf_clip: also SigLIP, OPT, BART, Wav2Vec2.
    | Literal["hf_clip", "hf_whisper", "hf_gpt_neo", "hf_gptj"]
    # Weights of Conv1D [in, out], and of Linear [out, in].
    | Literal["hf_gpt2", "nanogpt"]
    # ViT and DINO; in Transformers 5, they have Llama's names.
    | Literal["hf_vit", "timm"]
    # No biases of queries, keys and values.
    | Literal["hf_vit_unbiased", "hf_vit5_unbiased", "timm_unbiased"]
    | Literal["hf_t5"]
    # Latent attention; see convert/latent_weights.py, not LAYOUTS.
    | Literal["hf_deepseek"]
)
QKV = ("query", "key", "value")
ALL = (*QKV, "out")
KEY_VALUE = ("key", "value")
KERNELS = tuple(f"{name}/kernel" for name in ALL)
PATHS = (*KERNELS, *(f"{name}/bias" for name in ALL))
NORMS = ("query_ln/scale", "key_ln/scale")
NORM_BIASES = ("query_ln/bias", "key_ln/bias")
# The letters of each parameter's axes: N query heads and K key heads of H features, A =
# N * H, B = K * H; values of U features, C = N * U, W = K * U; input features of
# queries (Q), keys (S) and values (V); output features O.
WITH_GATES = (*PATHS, "gate/kernel", "gate/bias")
FLAX_AXES = dict(
    zip(
        WITH_GATES,
        ["QNH", "SKH", "VKU", "NUO", "NH", "KH", "KU", "O", "QNU", "NU"],
        strict=True,
    )
)
TORCH_AXES = dict(
    zip(
        WITH_GATES, ["AQ", "BS", "WV", "OC", "A", "B", "W", "O", "CQ", "C"], strict=True
    )
)
# T5's table of `recipes.RelativeBias`, with R buckets.
TABLE = "score_mod/table"
# In PyTorch, these have the same axes, except that the norm of the output has one.
OTHER_AXES = {
    NORMS[0]: "H",
    NORMS[1]: "H",
    "sinks": "N",
    NORM_BIASES[0]: "H",
    NORM_BIASES[1]: "H",
    "out_norm/scale": "NU",
    TABLE: "RN",
}
# In Flax; PyTorch has one axis, except in Cohere.
NORMS_OF_ALL_HEADS = {NORMS[0]: "NH", NORMS[1]: "KH"}
HEAD_GATE = {"gate/kernel": "QN", "gate/bias": "N"}
TORCH_HEAD_GATE = {"gate/kernel": "NQ", "gate/bias": "N"}
SIZES = {
    "Q": "query in",
    "S": "key in",
    "V": "value in",
    "A": "query out",
    "B": "key out",
    "O": "out",
    "C": "out in",
    "W": "value out",
}

# Keys of every latent attention.
LATENT: LayoutName = "hf_deepseek"
LATENT_KEYS = (
    "kv_a_proj_with_mqa.weight",
    "kv_a_layernorm.weight",
    "kv_b_proj.weight",
    "o_proj.weight",
)

# The name of kernel metadata that `describe` sets and `load_torch` reads.
MODEL_TYPE = "model_type"


class Layout(NamedTuple):
    """Describes the weights of a PyTorch attention: their keys in the state_dict, and
    what each key stacks.

    The rows of a stacked array are [groups, heads of a group, H]. A group holds some
    query heads, then key heads, then value heads. `groups=0` means one group for each
    key head or, if query and gate are stacked, for each query head.
    """

    # For each key of the state_dict, the Flax paths that it stacks, in order.
    stacks: dict[str, list[str]]
    equal: str  # letters of axes that must have the same size
    # The sets of projections with a bias that models have.
    biased: tuple[tuple[str, ...], ...]
    # Prefixes of keys that do not belong to the attention.
    ignored: tuple[str, ...] = ()
    groups: int = 1
    transposed: bool = False  # weights are [in, out]
    rotary: str = ""  # names of the models with this layout that need rotary positions
    # The factor of query . key in all models with this layout, if not 1 / sqrt(H).
    scale: float | None = None
    value_sizes: bool = False  # values may have a head size of their own
    gate_bias: bool = True  # the gate has a bias if the queries have one

    @property
    def is_stacked(self) -> bool:
        """True if one array stacks the kernels of query and key."""
        return any(
            {"query/kernel", "key/kernel"} <= {*paths} for paths in self.stacks.values()
        )

    def key_of(self, path: str) -> str:
        """Returns the key in the state_dict of the array that contains the parameter
        with this Flax path.
        """
        return next(key for key, paths in self.stacks.items() if path in paths)

    def difference(
        self, keys: Collection[str], shared: Collection[str] = ()
    ) -> tuple[list[str], list[str]]:
        """Returns which of the keys are not in the layout, and which keys of the
        layout's weights are missing; those of `shared` projections may be.
        """
        needed = {f"{name}/kernel" for name in ALL if name not in shared}
        own = {key for key in keys if not key.startswith(self.ignored)}
        weights = {key for key, paths in self.stacks.items() if paths[0] in needed}
        return sorted(own - {*self.stacks}), sorted(weights - {*keys})

    def biases(self, keys: Collection[str]) -> tuple[str, ...]:
        """Returns the names of the projections whose biases are among these keys."""
        paths = {
            path for key, paths in self.stacks.items() if key in keys for path in paths
        }
        return tuple(name for name in ALL if f"{name}/bias" in paths)


def _layout(
    keys: str,
    equal: str,
    *biased: tuple[str, ...],
    biases: str = "",
    ignored: str = "",
    others: str = "",
    gate: str = "",
    **rest: Any,
) -> Layout:
    """Makes a layout from `keys`, the keys of query, key, value and out in one string;
    `*` means "weight" or "bias".

    `biases` are the keys of the biases, if they differ; `gate` are the keys of a gate
    and of its bias; `others` are the keys of norms and sinks in the order of
    `OTHER_AXES`, "-" for none. All other arguments are fields of `Layout`.
    """
    stacks: dict[str, list[str]] = {}
    names = f"{keys} {biases or keys} {gate}".split()
    for name, path in zip(names, WITH_GATES, strict=False):
        leaf = "bias" if path.endswith("bias") else "weight"
        stacks.setdefault(name.replace("*", leaf), []).append(path)
    for name, path in zip(others.split(), OTHER_AXES, strict=False):
        if name != "-":
            stacks[name] = [path]
    return Layout(stacks, equal, biased, tuple(ignored.split()), **rest)


PACKED = "in_proj_* in_proj_* in_proj_* out_proj.*"
SQUARE = "QSVABO"
LLAMA = "q_proj.* k_proj.* v_proj.* o_proj.*"
LLAMA_OTHERS = "q_norm.weight k_norm.weight sinks - - attn_sub_norm.weight"
PHI_OTHERS = "q_layernorm.weight k_layernorm.weight - q_layernorm.bias k_layernorm.bias"
CLIP = "q_proj.* k_proj.* v_proj.* out_proj.*"
GPT_2 = "c_attn.* c_attn.* c_attn.* c_proj.*"
VIT = "attention.query.* attention.key.* attention.value.* output.dense.*"
NEOX = "query_key_value.* query_key_value.* query_key_value.* dense.*"
BUFFERS = "bias masked_bias rotary_emb."  # of older files
# Before or after the attention.
BERT_NORMS = "output.LayerNorm. LayerNorm. ln. self_attn_layer_norm."
LLAMA_KIN = (
    "Llama, Mistral, Qwen, Gemma, gpt-oss, ... (but not ViT and DINO in Transformers 5)"
)
NEOX_KIN = "GPT-NeoX and Falcon (but not Bloom, whose calls take recipes.alibi)"
LAYOUTS: dict[LayoutName, Layout] = {
    "torch": _layout(PACKED, SQUARE, ALL, ()),
    "torch_separate": _layout(
        "q_proj_* k_proj_* v_proj_* out_proj.*", "QABO", ALL, (), biases=PACKED
    ),
    "note_mha": _layout("w_q.* w_k.* w_v.* w_out.*", SQUARE, ALL),
    "bert_self_attention": _layout("query.* key.* value.* dense.*", SQUARE, ALL),
    "d2l_mha": _layout("W_q.* W_k.* W_v.* W_o.*", "ABO", ()),
    "masked_self_attention": _layout("q.* k.* v.* out_proj.*", SQUARE, ALL),
    "hf_bert": _layout(
        "self.query.* self.key.* self.value.* output.dense.*",
        SQUARE,
        ALL,
        ignored=BERT_NORMS,
    ),
    "hf_distilbert": _layout("q_lin.* k_lin.* v_lin.* out_lin.*", SQUARE, ALL),
    "hf_llama": _layout(
        LLAMA,
        "QSV",
        ALL,
        QKV,
        (),
        ignored="rotary_emb.",
        others=LLAMA_OTHERS,
        gate="gate_proj.* gate_proj.*",
        rotary=LLAMA_KIN,
        value_sizes=True,
    ),
    "hf_laguna": _layout(
        LLAMA,
        "QSV",
        ALL,
        (),
        others=LLAMA_OTHERS,
        gate="g_proj.weight",
        rotary="Laguna and LFM3",
        gate_bias=False,
    ),
    "hf_qwen3_next": _layout(
        LLAMA,
        "QSVO",
        ALL,
        (),
        ignored="rotary_emb.",
        others=LLAMA_OTHERS,
        gate="q_proj.* q_proj.*",
        groups=0,
        rotary="Qwen3-Next",
    ),
    "hf_qwen2": _layout(LLAMA, "QSVO", QKV, ignored="rotary_emb.", rotary="Qwen 2"),
    "hf_hunyuan": _layout(
        LLAMA,
        "QSVO",
        ALL,
        (),
        others="query_layernorm.weight key_layernorm.weight",
        rotary="Hunyuan",
    ),
    "hf_modernbert": _layout(
        "q_proj.* k_proj.* v_proj.* Wo.*",
        "QSVO",
        ALL,
        (),
        rotary="ModernBERT's decoder",
    ),
    "hf_moshi": _layout(
        LLAMA.replace("proj", "proj.linear"), "QSVO", (), rotary="Moshi"
    ),
    "hf_phi": _layout(
        "q_proj.* k_proj.* v_proj.* dense.*",
        "QSVO",
        ALL,
        ignored="rotary_emb.",
        others=PHI_OTHERS,
        rotary="Phi",
    ),
    "hf_phi3": _layout(
        "qkv_proj.* qkv_proj.* qkv_proj.* o_proj.*",
        "QSVO",
        (),
        ignored="rotary_emb.",
        rotary="Phi-3 and Phi-4",
    ),
    "hf_neox": _layout(
        NEOX,
        "QSVO",
        ALL,
        (),
        ignored=f"{BUFFERS} dense_bias",
        others=PHI_OTHERS,
        groups=0,
        rotary=NEOX_KIN,
    ),
    # Values before keys.
    "hf_codegen": Layout(
        {
            "qkv_proj.weight": ["query/kernel", "value/kernel", "key/kernel"],
            "out_proj.weight": ["out/kernel"],
            "qkv_proj.bias": ["query/bias", "key/bias", "value/bias"],
            "out_proj.bias": ["out/bias"],
        },
        "QSVO",
        ((),),
        groups=4,
        rotary="CodeGen",
    ),
    "hf_mpt": _layout("Wqkv.* Wqkv.* Wqkv.* out_proj.*", "QSVO", ()),
    "hf_ctrl": _layout("Wq.* Wk.* Wv.* dense.*", SQUARE, ALL),
    "hf_clip": _layout(CLIP, "QABO", ALL),
    "hf_whisper": _layout(CLIP, "QABO", ("query", "value", "out")),
    "hf_gpt_neo": _layout(
        CLIP, SQUARE, ("out",), ignored="bias masked_bias", scale=1.0
    ),
    "hf_gptj": _layout(
        CLIP, "QABO", (), ignored=BUFFERS, rotary="GPT-J (but not OPT without biases)"
    ),
    "hf_lfm2": _layout(CLIP, "QSVO", (), others=PHI_OTHERS, rotary="LFM2"),
    "hf_gpt2": _layout(GPT_2, SQUARE, ALL, ignored="bias masked_bias", transposed=True),
    "nanogpt": _layout(GPT_2, "QSVO", ALL, (), ignored="bias"),
    "hf_vit": _layout(VIT, SQUARE, ALL),
    "hf_vit_unbiased": _layout(VIT, SQUARE, ("out",)),
    "hf_vit5_unbiased": _layout(LLAMA, "QSVO", ("out",)),  # and RecurrentGemma
    "timm": _layout("qkv.* qkv.* qkv.* proj.*", "QSVO", ALL, ()),
    "timm_unbiased": _layout("qkv.* qkv.* qkv.* proj.*", "QSVO", ("out",)),
    "hf_t5": _layout(
        "q.* k.* v.* o.*",
        "QSVO",
        (),
        others="- - - - - - relative_attention_bias.weight",
        scale=1.0,
    ),
}
