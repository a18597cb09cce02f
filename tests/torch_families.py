"""The attention layers of many models, from the definitions of their families, on plain
dicts of PyTorch tensors.

A layer takes its weights under their real names and x [batch, length, features], and
keeps all scores.
"""

import functools
import math

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch_rope import (
    angles,
    default_frequencies,
    partially,
    rotate_every_two,
    rotate_halves,
    yarn_frequencies,
)

Weights = dict[str, Tensor]


def linear(w: Weights, name: str, x: Tensor) -> Tensor:
    return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))


def conv1d(w: Weights, name: str, x: Tensor) -> Tensor:
    return x @ w[f"{name}.weight"] + w[f"{name}.bias"]


def core(
    q, k, v, *, scale=None, visible=None, cap=None, sinks=None, bias=None
) -> Tensor:
    """q [batch, length, heads, size]; k and v of fewer heads; the result [batch,
    length, heads * size].
    """
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.transpose(-2, -1) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    if bias is not None:
        scores = scores + bias
    if visible is not None:
        scores = scores.masked_fill(~visible, -math.inf)
    if sinks is not None:
        scores = torch.cat(
            [scores, sinks[None, :, None, None].expand(*scores.shape[:-1], 1)], dim=-1
        )
    weights = torch.softmax(scores, dim=-1)[..., : k.shape[2]]
    return (weights @ v).transpose(1, 2).flatten(2)


def causal(length: int, window: int | None = None) -> Tensor:
    """Which keys a query attends to: of a window its own and window - 1 before it."""
    distance = torch.arange(length)[:, None] - torch.arange(length)
    return (distance >= 0) & (distance < (length if window is None else window))


def decoder(
    q,
    k,
    v,
    *,
    window: int | None = None,
    rotate=None,
    visible: Tensor | None = None,
    **options,
) -> Tensor:
    """Rotates, and hides the keys that follow."""
    q, k = (q, k) if rotate is None else (rotate(q), rotate(k))
    visible = causal(q.shape[1], window) if visible is None else visible
    return core(q, k, v, visible=visible, **options)


def rotary(
    x: Tensor,
    base: float,
    size: int | None = None,
    pairing=rotate_halves,
    divisor: float = 1.0,
):
    """Rotates so many features of each head, or all."""
    places = torch.arange(x.shape[1]).expand(len(x), -1)

    def rotate(y: Tensor) -> Tensor:
        return partially(
            pairing,
            y,
            angles(places, default_frequencies(base, size or y.shape[-1]) / divisor),
        )

    return rotate


def yarn(
    x: Tensor,
    *arguments,
    pairing=rotate_halves,
    factor: float = 1.0,
    truncate: bool = True,
):
    """As `rotary`, by YaRN; cos and sin grow by the factor."""
    angle = angles(
        torch.arange(x.shape[1]).expand(len(x), -1),
        yarn_frequencies(*arguments, truncate=truncate),
    )
    return lambda y: pairing(y, angle) * factor


def heads(x: Tensor, number: int) -> Tensor:
    return x.unflatten(-1, (number, -1))


def projected(
    w: Weights,
    x: Tensor,
    number: int,
    kv_number: int,
    names: str = "q_proj k_proj v_proj",
) -> list[Tensor]:
    return [
        heads(linear(w, name, x), n)
        for name, n in zip(names.split(), (number, kv_number, kv_number), strict=True)
    ]


def rms_norm(x: Tensor, weight: Tensor | float = 1.0, epsilon: float = 1e-6) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * weight


def normed(
    w: Weights,
    q: Tensor,
    k: Tensor,
    epsilon: float,
    norm: str = "norm",
    plus: float = 0.0,
) -> list[Tensor]:
    return [
        rms_norm(y, plus + w[f"{name}_{norm}.weight"], epsilon)
        for name, y in (("q", q), ("k", k))
    ]


def layer_norm(w: Weights, name: str, x: Tensor) -> Tensor:
    """Of each head, whose weights may be its own."""
    normalized = F.layer_norm(x, x.shape[-1:]) * w[f"{name}.weight"]
    return normalized + w.get(f"{name}.bias", torch.zeros(()))


def llama(w, x, number, kv_number, base, window=None, scale=None) -> Tensor:
    """Llama, Mistral, Qwen 2 and Gemma; Granite with its scale; SmolLM 3, of which some
    layers do not rotate.
    """
    rotate = None if base is None else rotary(x, base)
    qkv = projected(w, x, number, kv_number)
    return linear(w, "o_proj", decoder(*qkv, rotate=rotate, scale=scale, window=window))


def gemma_2(w, x, number, kv_number, scalar, window) -> Tensor:
    qkv = projected(w, x, number, kv_number)
    return linear(
        w,
        "o_proj",
        decoder(
            *qkv, rotate=rotary(x, 1e4), scale=scalar**-0.5, cap=50.0, window=window
        ),
    )


def qwen_3(w, x, number, kv_number, epsilon, out="o_proj", norm="norm") -> Tensor:
    """LFM 2 has other names."""
    q, k, v = projected(w, x, number, kv_number)
    return linear(
        w, out, decoder(*normed(w, q, k, epsilon, norm), v, rotate=rotary(x, 1e6))
    )


def qwen_3_next(w, x, number, kv_number) -> Tensor:
    """In each head query and gate are side by side; a quarter rotates; norms multiply
    by 1 + weight.
    """
    q, gate = heads(linear(w, "q_proj", x), number).chunk(2, dim=-1)
    k, v = (heads(linear(w, name, x), kv_number) for name in ("k_proj", "v_proj"))
    out = decoder(
        *normed(w, q, k, 1e-6, plus=1.0), v, rotate=rotary(x, 1e4, q.shape[-1] // 4)
    )
    return linear(w, "o_proj", out * torch.sigmoid(gate.flatten(2)))


def afmoe(w, x, number, kv_number, window) -> Tensor:
    q, k, v = projected(w, x, number, kv_number)
    rotate = None if window is None else rotary(x, 1e4)
    out = decoder(*normed(w, q, k, 1e-5), v, rotate=rotate, window=window)
    return linear(w, "o_proj", out * torch.sigmoid(linear(w, "gate_proj", x)))


def bitnet(w, x, number, kv_number) -> Tensor:
    out = decoder(*projected(w, x, number, kv_number), rotate=rotary(x, 5e5))
    return linear(w, "o_proj", rms_norm(out, w["attn_sub_norm.weight"], 1e-5))


def laguna(w, x, number, kv_number) -> Tensor:
    """Half of each head rotates; the gate is one number a head."""
    q, k, v = projected(w, x, number, kv_number)
    out = decoder(*normed(w, q, k, 1e-6), v, rotate=rotary(x, 5e5, q.shape[-1] // 2))
    gate = F.softplus(linear(w, "g_proj", x))
    return linear(w, "o_proj", (heads(out, number) * gate[..., None]).flatten(2))


def mimo(w, x, number, kv_number, factor, size, window) -> Tensor:
    """Values are smaller than keys, and multiplied by a factor."""
    q, k, v = projected(w, x, number, kv_number)
    return linear(
        w,
        "o_proj",
        decoder(
            q,
            k,
            v * factor,
            rotate=rotary(x, 1e4, size),
            sinks=w["sinks"],
            window=window,
        ),
    )


def latent(
    w,
    x,
    number,
    sizes: tuple[int, int, int],
    rotate,
    scale=1.0,
    visible=None,
    gate=1.0,
    q=None,
) -> Tensor:
    """The sizes of the latent, of a head without its rotary part, and of this part,
    which all keys share.
    """
    size, content, rotary = sizes
    if q is None:
        compressed = compressed_query(w, x) if "q_a_proj.weight" in w else x
        q = heads(
            linear(w, "q_b_proj" if "q_a_proj.weight" in w else "q_proj", compressed),
            number,
        )
    c, r = linear(w, "kv_a_proj_with_mqa", x).split([size, rotary], dim=-1)
    kv = heads(linear(w, "kv_b_proj", rms_norm(c, w["kv_a_layernorm.weight"])), number)
    q = torch.cat([q[..., :content], rotate(q[..., content:])], dim=-1)
    k = torch.cat(
        [kv[..., :content], rotate(r[:, :, None]).expand(-1, -1, number, -1)], dim=-1
    )
    options = {
        "scale": scale * (content + rotary) ** -0.5,
        "visible": visible,
        "sinks": w.get("sinks"),
    }
    out = heads(decoder(q, k, kv[..., content:], **options), number) * gate
    return linear(w, "o_proj", out.flatten(2))


def compressed_query(w, x) -> Tensor:
    return rms_norm(linear(w, "q_a_proj", x), w["q_a_layernorm.weight"])


def hy_4(w, x, number, sizes) -> Tensor:
    """Its indexer rotates the last features."""
    visible = indexed(w, x, sizes[2], rotary(x, 1e4), 3, last=True, epsilon=1e-2)
    gate = heads(torch.sigmoid(linear(w, "gate_proj", x)), number)
    return latent(w, x, number, sizes, rotary(x, 1e4), 1.0, visible, gate)


def axk_2(w, x, number, sizes) -> Tensor:
    """Queries and gates of each head side by side, from compressed queries after and
    before their norm.
    """
    both = torch.cat([compressed_query(w, x), linear(w, "q_a_proj", x)], dim=-1)
    both = heads(linear(w, "q_gate_proj", both), number)
    size = sizes[1] + sizes[2]
    visible = indexed(w, x, sizes[2], rotary(x, 1e4), 3)
    pairs = rotary(x, 1e4, pairing=rotate_every_two)
    return latent(
        w,
        x,
        number,
        sizes,
        pairs,
        1.0,
        visible,
        torch.sigmoid(both[..., size:]),
        both[..., :size],
    )


def deepseek_v3(w, x, number, sizes, index=None) -> Tensor:
    """With YaRN's factors of 0.7 for the rotary part and 1.3 for all features, both for
    queries and keys.

    `index` is the pairing and the number of keys of an indexer, if there is one
    (DeepSeek V3.2, GLM 5).
    """
    part, whole = (0.1 * m * math.log(4.0) + 1 for m in (0.7, 1.3))
    rotate = functools.partial(yarn, x, 1e4, sizes[2], 4.0, 4096, factor=part / whole)
    if index is None:
        visible = None
    else:
        visible = indexed(w, x, sizes[2], rotate(pairing=index[0]), index[1])
    return latent(
        w, x, number, sizes, rotate(pairing=rotate_every_two), whole**2, visible
    )


def indexed(
    w, x, size, rotate, top: int, last: bool = False, epsilon: float = 1e-6
) -> Tensor:
    """The keys up to the query with the largest index scores; of equal ones the first."""
    number = len(w["indexer.weights_proj.weight"])
    norm = w["indexer.k_norm.weight"], w["indexer.k_norm.bias"]
    k = F.layer_norm(linear(w, "indexer.wk", x), norm[0].shape, *norm, eps=epsilon)[
        :, :, None
    ]
    q = heads(linear(w, "indexer.wq_b", compressed_query(w, x)), number)
    if last:
        q, k = (
            torch.cat([y[..., :-size], rotate(y[..., -size:])], dim=-1) for y in (q, k)
        )
    else:
        q, k = (
            torch.cat([rotate(y[..., :size]), y[..., size:]], dim=-1) for y in (q, k)
        )
    products = torch.relu(torch.einsum("bthd,bsgd->bths", q, k) * q.shape[-1] ** -0.5)
    scores = torch.einsum(
        "bths,bth->bts", products, linear(w, "indexer.weights_proj", x) * number**-0.5
    )
    scores = scores.masked_fill(~causal(x.shape[1]), -math.inf)
    chosen = scores.argsort(dim=-1, descending=True, stable=True)[..., :top]
    return (
        torch.zeros_like(scores, dtype=torch.bool).scatter(-1, chosen, True)
        & causal(x.shape[1])
    )[:, None]


def longcat(w, x, number, sizes) -> Tensor:
    """Latents grow by sqrt(features / rank) after their norms."""
    norms = {
        key: y * (x.shape[-1] / len(y)) ** 0.5
        for key, y in w.items()
        if "layernorm" in key
    }
    return latent(w | norms, x, number, sizes, rotary(x, 1e7, pairing=rotate_every_two))


def bailing(w, x, number, sizes) -> Tensor:
    gate = torch.sigmoid(linear(w, "g_proj", x))[..., None]
    return latent(
        w, x, number, sizes, rotary(x, 6e6, pairing=rotate_every_two), gate=gate
    )


def minicpm_3(w, x, number, sizes) -> Tensor:
    return latent(w, x, number, sizes, rotary(x, 1e4))


def olmo_2(w, x, number, kv_number) -> Tensor:
    """Norms come before the heads."""
    q, k = normed(w, linear(w, "q_proj", x), linear(w, "k_proj", x), 1e-5)
    q = heads(q, number)
    k = heads(k, kv_number)
    v = heads(linear(w, "v_proj", x), kv_number)
    return linear(w, "o_proj", decoder(q, k, v, rotate=rotary(x, 5e5)))


def gemma_3(w, x, number, kv_number, scalar, window) -> Tensor:
    """Layers with a window rotate faster; the others divide their angles by 8. Norms
    multiply by 1 + weight.
    """
    q, k, v = projected(w, x, number, kv_number)
    rotate = rotary(x, 1e6, divisor=8.0) if window is None else rotary(x, 1e4)
    qk = normed(w, q, k, 1e-6, plus=1.0)
    return linear(
        w, "o_proj", decoder(*qk, v, rotate=rotate, scale=scalar**-0.5, window=window)
    )


def gpt_oss(w, x, number, kv_number, window) -> Tensor:
    q, k, v = projected(w, x, number, kv_number)
    rotate = yarn(
        x,
        150_000.0,
        q.shape[-1],
        32.0,
        4096,
        truncate=False,
        factor=0.1 * math.log(32.0) + 1,
    )
    return linear(
        w, "o_proj", decoder(q, k, v, rotate=rotate, sinks=w["sinks"], window=window)
    )


def phi(w, x, number) -> Tensor:
    q, k, v = projected(w, x, number, number)
    return linear(w, "dense", decoder(q, k, v, rotate=rotary(x, 1e4, q.shape[-1] // 2)))


def phi_3(w, x, number, kv_number, size, window) -> Tensor:
    q, k, v = linear(w, "qkv_proj", x).split(
        [number * size, kv_number * size, kv_number * size], dim=-1
    )
    qkv = heads(q, number), heads(k, kv_number), heads(v, kv_number)
    return linear(w, "o_proj", decoder(*qkv, rotate=rotary(x, 1e4), window=window))


def gptj(w, x, number, size) -> Tensor:
    qkv = projected(w, x, number, number)
    return linear(
        w, "out_proj", decoder(*qkv, rotate=rotary(x, 1e4, size, rotate_every_two))
    )


def gpt_neox(w, x, number) -> Tensor:
    """In each head query, key and value are side by side."""
    q, k, v = heads(linear(w, "query_key_value", x), number).chunk(3, dim=-1)
    return linear(w, "dense", decoder(q, k, v, rotate=rotary(x, 1e4, q.shape[-1] // 4)))


def hunyuan(w, x, number, kv_number) -> Tensor:
    """Norms come after the rotation."""
    (q, k, v), rotate = projected(w, x, number, kv_number), rotary(x, 1e4)
    q, k = (
        rms_norm(rotate(y), w[f"{n}_layernorm.weight"], 1e-5)
        for n, y in (("query", q), ("key", k))
    )
    return linear(w, "o_proj", decoder(q, k, v))


def nanochat(w, x, number, kv_number) -> Tensor:
    """Rotates the other way; norms have no weights."""
    q, k, v = projected(w, x, number, kv_number)
    rotate = rotary(x, 1e4, divisor=-1.0)
    return linear(w, "o_proj", decoder(q, k, v, rotate=lambda y: rms_norm(rotate(y))))


def llama_4(w, x, number, kv_number, chunk) -> Tensor:
    """Layers that rotate attend to their chunk, and normalize; the queries of the
    others grow by their position.
    """
    q, k, v = projected(w, x, number, kv_number)
    place = torch.arange(x.shape[1])
    rotate = rotary(x, 500_000.0, pairing=rotate_every_two)
    if chunk is None:
        growth = torch.log1p(torch.floor((place + 1.0) / 3)) * 0.5 + 1.0
        return linear(w, "o_proj", decoder(q * growth[:, None, None], k, v))
    visible = causal(x.shape[1]) & (place[:, None] // chunk == place // chunk)
    return linear(
        w,
        "o_proj",
        decoder(q, k, v, rotate=lambda y: rms_norm(rotate(y)), visible=visible),
    )


def ministral_3(w, x, number, kv_number) -> Tensor:
    q, k, v = projected(w, x, number, kv_number)
    growth = 1 + 0.5 * torch.log(1 + torch.floor(torch.arange(x.shape[1]) / 3.0))
    return linear(
        w, "o_proj", decoder(q * growth[:, None, None], k, v, rotate=rotary(x, 1e6))
    )


def cohere(w, x, number, kv_number) -> Tensor:
    q, k, v = projected(w, x, number, kv_number)
    q = layer_norm(w, "q_norm", q)
    k = layer_norm(w, "k_norm", k)
    return linear(
        w, "o_proj", decoder(q, k, v, rotate=rotary(x, 5e5, pairing=rotate_every_two))
    )


def persimmon(w, x, number) -> Tensor:
    """As GPT-NeoX, with norms that have biases."""
    q, k, v = linear(w, "query_key_value", x).unflatten(-1, (number, 3, -1)).unbind(-2)
    q = layer_norm(w, "q_layernorm", q)
    k = layer_norm(w, "k_layernorm", k)
    return linear(w, "dense", decoder(q, k, v, rotate=rotary(x, 1e4, q.shape[-1] // 2)))


def olmoe(w, x, number, kv_number, limit) -> Tensor:
    """Norms come before the heads, and then clipping."""
    qk = normed(w, linear(w, "q_proj", x), linear(w, "k_proj", x), 1e-5)
    q, k, v = (y.clamp(-limit, limit) for y in (*qk, linear(w, "v_proj", x)))
    q = heads(q, number)
    k = heads(k, kv_number)
    v = heads(v, kv_number)
    return linear(w, "o_proj", decoder(q, k, v, rotate=rotary(x, 1e4)))


def olmo(w, x, number, kv_number, limit) -> Tensor:
    qkv = (y.clamp(-limit, limit) for y in projected(w, x, number, kv_number))
    return linear(w, "o_proj", decoder(*qkv, rotate=rotary(x, 1e4)))


def alibi(number: int, distance: Tensor) -> Tensor:
    return (
        torch.tensor([2.0 ** (-8 * (i + 1) / number) for i in range(number)])[
            :, None, None
        ]
        * distance
    )


def mpt(w, x, number, limit) -> Tensor:
    qkv = (
        heads(y, number)
        for y in linear(w, "Wqkv", x).clamp(-limit, limit).chunk(3, dim=-1)
    )
    return linear(
        w,
        "out_proj",
        decoder(*qkv, bias=alibi(number, torch.arange(1 - x.shape[1], 1))),
    )


def bloom(w, x, number) -> Tensor:
    qkv = linear(w, "query_key_value", x).unflatten(-1, (number, 3, -1)).unbind(-2)
    return linear(
        w, "dense", decoder(*qkv, bias=alibi(number, torch.arange(x.shape[1])))
    )


def codegen(w, x, number, size) -> Tensor:
    """Four blocks of rows, each with queries, values and keys, in this order."""
    q, v, k = linear(w, "qkv_proj", x).unflatten(-1, (4, -1)).chunk(3, dim=-1)
    qkv = (heads(y.flatten(-2), number) for y in (q, k, v))
    return linear(
        w, "out_proj", decoder(*qkv, rotate=rotary(x, 1e4, size, rotate_every_two))
    )


def falcon(w, x, number, kv_number) -> Tensor:
    """Each key head follows its query heads, and its values follow it."""
    fused = linear(w, "query_key_value", x).unflatten(
        -1, (kv_number, number // kv_number + 2, -1)
    )
    q = fused[..., :-2, :].flatten(2, 3)
    k = fused[..., -2, :]
    v = fused[..., -1, :]
    return linear(w, "dense", decoder(q, k, v, rotate=rotary(x, 1e4)))


def gpt_2(w, x, number, layer=0) -> Tensor:
    """With `scale_attn_by_inverse_layer_idx`, deeper layers divide by more."""
    q, k, v = (heads(y, number) for y in conv1d(w, "c_attn", x).chunk(3, dim=-1))
    return conv1d(
        w, "c_proj", decoder(q, k, v, scale=q.shape[-1] ** -0.5 / (layer + 1))
    )


def nanogpt(w, x, number) -> Tensor:
    qkv = (heads(y, number) for y in linear(w, "c_attn", x).chunk(3, dim=-1))
    return linear(w, "c_proj", decoder(*qkv))


def t5_buckets(length: int, buckets: int) -> Tensor:
    """Of the decoder: half of the buckets hold one distance each, the others grow up to
    128.
    """
    distance = (torch.arange(length)[:, None] - torch.arange(length)).clamp(min=0)
    exact = buckets // 2
    far = (
        torch.log(distance.clamp(min=1).double() / exact)
        / math.log(128 / exact)
        * (buckets - exact)
    )
    return torch.where(
        distance < exact, distance, (exact + far.floor().long()).clamp(max=buckets - 1)
    )


def t5(w, x, number, table) -> Tensor:
    bias = table[t5_buckets(x.shape[1], len(table))].permute(2, 0, 1)
    return linear(
        w, "o", decoder(*projected(w, x, number, number, "q k v"), scale=1.0, bias=bias)
    )


def plain(w, x, number, names, out, is_causal=False, scale=None) -> Tensor:
    """BERT, ViT, CLIP, Whisper and their like."""
    visible = causal(x.shape[1]) if is_causal else None
    return linear(
        w,
        out,
        core(*projected(w, x, number, number, names), visible=visible, scale=scale),
    )


def timm(w, x, number) -> Tensor:
    return linear(
        w, "proj", core(*linear(w, "qkv", x).unflatten(-1, (3, number, -1)).unbind(2))
    )


def gemma_4(w, x, number, kv_number, rotate, window, kv=None):
    """Gemma 3n, too: values are normalized, or are keys; scores are not scaled; `kv`
    are another layer's.

    Returns the output, and keys and values for later layers.
    """
    q = rotate(rms_norm(heads(linear(w, "q_proj", x), number), w["q_norm.weight"]))
    if kv is None:
        k = heads(linear(w, "k_proj", x), kv_number)
        v = heads(linear(w, "v_proj", x), kv_number) if "v_proj.weight" in w else k
        kv = rotate(rms_norm(k, w["k_norm.weight"])), rms_norm(v)
    return linear(
        w, "o_proj", core(q, *kv, visible=causal(x.shape[1], window), scale=1.0)
    ), kv
