"""The table of layouts: how each PyTorch attention names, stacks and sizes its weights.

PyTorch keeps a linear layer as `weight (out, in)`, Flax as `kernel (in, heads, head size)`. One table, `LAYOUTS`,
drives both directions; a new layout is one entry of it, and one in the table of tests/test_torch_families.py. Sources:
the `state_dict` of `torch.nn.MultiheadAttention`, of timm's `Attention`, and of attentions in Transformers 4 and 5.
"""

from collections.abc import Collection
from typing import Any, Literal, NamedTuple

LayoutName = (
    Literal["torch", "torch_separate"]  # torch.nn.MultiheadAttention, the second with kdim or vdim
    | Literal["note_mha", "bert_self_attention", "d2l_mha", "masked_self_attention"]  # those of tests/torch_port.py
    | Literal["hf_bert", "hf_distilbert"]  # BERT, RoBERTa, ELECTRA
    | Literal["hf_llama", "hf_qwen2"]  # Llama, Mistral, Qwen 3, Gemma, gpt-oss; Qwen 2 has no bias after the attention
    | Literal["hf_phi", "hf_phi3", "hf_neox"]  # the last also of Falcon and Bloom
    | Literal["hf_clip", "hf_whisper", "hf_gpt_neo", "hf_gptj"]  # CLIP, SigLIP, OPT, BART, Wav2Vec2; three others
    | Literal["hf_gpt2", "nanogpt"]  # one with the weights [in, out] of Conv1D, the other with those of Linear
    | Literal["hf_vit", "timm"]  # ViT and DINO; Transformers 5 names their weights as Llama's
    | Literal["hf_vit_unbiased", "hf_vit5_unbiased", "timm_unbiased"]  # no biases of queries, keys and values
    | Literal["hf_t5"]
)
ALL = ("query", "key", "value", "out")
QKV = ALL[:3]
KERNELS = tuple(f"{name}/kernel" for name in ALL)
PATHS = (*KERNELS, *(f"{name}/bias" for name in ALL))
NORMS = ("query_ln/scale", "key_ln/scale")
# N query heads and K key and value heads of H features; SIZES says the rest, where A = N * H and B = K * H.
FLAX_SHAPES = dict(zip(PATHS, ("QNH", "SKH", "VKH", "NHO", "NH", "KH", "KH", "O"), strict=True))
TORCH_SHAPES = dict(zip(PATHS, ("AQ", "BS", "BV", "OA", "A", "B", "B", "O"), strict=True))
OTHER_SHAPES = {NORMS[0]: "H", NORMS[1]: "H", "sinks": "N"}  # the same on both sides
ALL_HEADS = {NORMS[0]: "NH", NORMS[1]: "KH"}  # norms over all heads together, in Flax; one axis of both in PyTorch
SIZES = {"Q": "query in", "S": "key in", "V": "value in", "A": "query out", "B": "key out", "O": "out"}

MODEL_TYPE = "model_type"  # the metadata of a module's kernels by which `describe` says what model it is of
ONE_PLUS_WEIGHT = ("gemma3_text",)  # models whose norms of queries and keys multiply by 1 + weight


class Layout(NamedTuple):
    """How one PyTorch module names, stacks and sizes its weights."""

    stacks: dict[str, list[str]]  # for each key of the state_dict the Flax paths that it stacks, row upon row
    equal: str  # the letters that are one and the same size
    biased: tuple[tuple[str, ...], ...]  # the choices of projections with a bias
    ignored: tuple[str, ...] = ()  # what keys start with that are no part of the attention
    by_group: bool = (
        False  # stacked rows: each key head with its query heads, [K, N / K + 2, H]; else all queries first
    )
    transposed: bool = False  # weights are [in, out]
    optional: tuple[str, ...] = ()  # keys of `stacks` that are no projections and may be missing
    rotary: str = ""  # which models with these keys need rotary positions
    scale: float | None = None  # what every model with these keys multiplies query . key by, if not 1 / sqrt(H)

    def difference(self, keys: Collection[str]) -> tuple[list[str], list[str]]:
        """Names the keys that are too many and the weights that are missing."""
        extra = {key for key in keys if not key.startswith(self.ignored)} - {*self.stacks}
        missing = {key for key, paths in self.stacks.items() if paths[0] in KERNELS} - {*keys}
        return sorted(extra), sorted(missing)

    def biases(self, keys: Collection[str]) -> tuple[str, ...]:
        """The projections that have a bias among these keys."""
        paths = {path for key, paths in self.stacks.items() if key in keys for path in paths}
        return tuple(name for name in ALL if f"{name}/bias" in paths)


def _layout(
    keys: str,
    equal: str,
    *biased: tuple[str, ...],
    biases: str = "",
    ignored: str = "",
    others: str = "",
    **options: Any,
) -> Layout:
    """Makes an entry of the table from the keys of query, key, value and out; `*` is `weight` or `bias`.

    `others` are the keys of `OTHER_SHAPES`.
    """
    names = f"{keys.replace('*', 'weight')} {(biases or keys).replace('*', 'bias')}".split()
    stacks = {name: [path for path, other in zip(PATHS, names, strict=True) if other == name] for name in names}
    stacks |= {name: [path] for name, path in zip(others.split(), OTHER_SHAPES, strict=False)}
    return Layout(stacks, equal, biased, tuple(ignored.split()), optional=tuple(others.split()), **options)


PACKED = "in_proj_* in_proj_* in_proj_* out_proj.*"
SQUARE = "QSVABO"
LLAMA = "q_proj.* k_proj.* v_proj.* o_proj.*"
LLAMA_OTHERS = "q_norm.weight k_norm.weight sinks"
CLIP = "q_proj.* k_proj.* v_proj.* out_proj.*"
GPT_2 = "c_attn.* c_attn.* c_attn.* c_proj.*"
VIT = "attention.query.* attention.key.* attention.value.* output.dense.*"
BUFFERS = "bias masked_bias rotary_emb."  # of older files
LAYOUTS: dict[LayoutName, Layout] = {
    "torch": _layout(PACKED, SQUARE, ALL, ()),
    "torch_separate": _layout("q_proj_* k_proj_* v_proj_* out_proj.*", "QABO", ALL, (), biases=PACKED),
    "note_mha": _layout("w_q.* w_k.* w_v.* w_out.*", SQUARE, ALL),
    "bert_self_attention": _layout("query.* key.* value.* dense.*", SQUARE, ALL),
    "d2l_mha": _layout("W_q.* W_k.* W_v.* W_o.*", "ABO", ()),
    "masked_self_attention": _layout("q.* k.* v.* out_proj.*", SQUARE, ALL),
    "hf_bert": _layout("self.query.* self.key.* self.value.* output.dense.*", SQUARE, ALL, ignored="output.LayerNorm."),
    "hf_distilbert": _layout("q_lin.* k_lin.* v_lin.* out_lin.*", SQUARE, ALL),
    "hf_llama": _layout(
        LLAMA,
        "QSVO",
        ALL,
        QKV,
        (),
        ignored="rotary_emb.",
        others=LLAMA_OTHERS,
        rotary="Llama, Mistral, Qwen, Gemma, gpt-oss, ... (not those of ViT and DINO in Transformers 5)",
    ),
    "hf_qwen2": _layout(LLAMA, "QSVO", QKV, ignored="rotary_emb.", rotary="Qwen 2"),
    "hf_phi": _layout("q_proj.* k_proj.* v_proj.* dense.*", "QSVO", ALL, ignored="rotary_emb.", rotary="Phi"),
    "hf_phi3": _layout(
        "qkv_proj.* qkv_proj.* qkv_proj.* o_proj.*", "QSVO", (), ignored="rotary_emb.", rotary="Phi-3 and Phi-4"
    ),
    "hf_neox": _layout(
        "query_key_value.* query_key_value.* query_key_value.* dense.*",
        "QSVO",
        ALL,
        (),
        ignored=BUFFERS,
        by_group=True,
        rotary="GPT-NeoX and Falcon (not those of Bloom, whose calls take recipes.alibi)",
    ),
    "hf_clip": _layout(CLIP, "QABO", ALL),
    "hf_whisper": _layout(CLIP, "QABO", ("query", "value", "out")),
    "hf_gpt_neo": _layout(CLIP, SQUARE, ("out",), ignored="bias masked_bias", scale=1.0),
    "hf_gptj": _layout(CLIP, "QABO", (), ignored=BUFFERS, rotary="GPT-J (not those of OPT without biases)"),
    "hf_gpt2": _layout(GPT_2, SQUARE, ALL, ignored="bias masked_bias", transposed=True),
    "nanogpt": _layout(GPT_2, "QSVO", ALL, (), ignored="bias"),
    "hf_vit": _layout(VIT, SQUARE, ALL),
    "hf_vit_unbiased": _layout(VIT, SQUARE, ("out",)),
    "hf_vit5_unbiased": _layout(LLAMA, SQUARE, ("out",)),
    "timm": _layout("qkv.* qkv.* qkv.* proj.*", "QSVO", ALL, ()),
    "timm_unbiased": _layout("qkv.* qkv.* qkv.* proj.*", "QSVO", ("out",)),
    "hf_t5": _layout("q.* k.* v.* o.*", "QSVO", (), scale=1.0),
}
