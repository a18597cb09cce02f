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
    groups = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(groups, dim=1)
    v = v.repeat_interleave(groups, dim=1)
    if scale is None:
        scale = q.shape[-1] ** -0.5
    scores = q @ k.transpose(-2, -1) * scale
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    if bias is not None:
        scores = scores + bias
    if visible is not None:
        scores = scores.masked_fill(~visible, -math.inf)
    if sinks is not None:
        # A sink is the score of one more key, whose value is 0.
        of_sinks = sinks[None, :, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, of_sinks], dim=-1)
    # softmax(q k^T scale + bias) v
    weights = torch.softmax(scores, dim=-1)[..., : k.shape[2]]
    return (weights @ v).transpose(1, 2).flatten(2)


def causal(length: int, window: int | None = None) -> Tensor:
    """Which keys a query attends to: of a window its own and window - 1 before it."""
    distance = torch.arange(length)[:, None] - torch.arange(length)
    if window is None:
        return distance >= 0
    return (distance >= 0) & (distance < window)


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
    if rotate is not None:
        q = rotate(q)
        k = rotate(k)
    if visible is None:
        visible = causal(q.shape[1], window)
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
        frequencies = default_frequencies(base, size or y.shape[-1]) / divisor
        return partially(pairing, y, angles(places, frequencies))

    return rotate


def yarn(
    x: Tensor,
    *arguments,
    pairing=rotate_halves,
    factor: float = 1.0,
    truncate: bool = True,
):
    """As `rotary`, by YaRN; cos and sin grow by the factor."""
    places = torch.arange(x.shape[1]).expand(len(x), -1)
    angle = angles(places, yarn_frequencies(*arguments, truncate=truncate))
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
    query, key, value = names.split()
    q = heads(linear(w, query, x), number)
    k = heads(linear(w, key, x), kv_number)
    v = heads(linear(w, value, x), kv_number)
    return [q, k, v]


def rms_norm(x: Tensor, weight: Tensor | float = 1.0, epsilon: float = 1e-6) -> Tensor:
    # x / sqrt(mean(x^2) + epsilon)
    mean = x.square().mean(-1, keepdim=True)
    return x * torch.rsqrt(mean + epsilon) * weight


def normed(
    w: Weights,
    q: Tensor,
    k: Tensor,
    epsilon: float,
    norm: str = "norm",
    plus: float = 0.0,
) -> list[Tensor]:
    q = rms_norm(q, plus + w[f"q_{norm}.weight"], epsilon)
    k = rms_norm(k, plus + w[f"k_{norm}.weight"], epsilon)
    return [q, k]


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
    out = decoder(*qkv, rotate=rotate, scale=scale, window=window)
    return linear(w, "o_proj", out)


def gemma_2(w, x, number, kv_number, scalar, window) -> Tensor:
    qkv = projected(w, x, number, kv_number)
    out = decoder(
        *qkv, rotate=rotary(x, 1e4), scale=scalar**-0.5, cap=50.0, window=window
    )
    return linear(w, "o_proj", out)


def qwen_3(w, x, number, kv_number, epsilon, out="o_proj", norm="norm") -> Tensor:
    """LFM 2 has other names."""
    q, k, v = projected(w, x, number, kv_number)
    q, k = normed(w, q, k, epsilon, norm)
    y = decoder(q, k, v, rotate=rotary(x, 1e6))
    return linear(w, out, y)


def qwen_3_next(w, x, number, kv_number) -> Tensor:
    """In each head query and gate are side by side; a quarter rotates; norms multiply
    by 1 + weight.
    """
    q, gate = heads(linear(w, "q_proj", x), number).chunk(2, dim=-1)
    k = heads(linear(w, "k_proj", x), kv_number)
    v = heads(linear(w, "v_proj", x), kv_number)
    q, k = normed(w, q, k, 1e-6, plus=1.0)
    out = decoder(q, k, v, rotate=rotary(x, 1e4, q.shape[-1] // 4))
    return linear(w, "o_proj", out * torch.sigmoid(gate.flatten(2)))


def afmoe(w, x, number, kv_number, window) -> Tensor:
    q, k, v = projected(w, x, number, kv_number)
    q, k = normed(w, q, k, 1e-5)
    # Layers without a window do not rotate.
    rotate = None if window is None else rotary(x, 1e4)
    out = decoder(q, k, v, rotate=rotate, window=window)
    gate = torch.sigmoid(linear(w, "gate_proj", x))
    return linear(w, "o_proj", out * gate)


def bitnet(w, x, number, kv_number) -> Tensor:
    q, k, v = projected(w, x, number, kv_number)
    out = decoder(q, k, v, rotate=rotary(x, 5e5))
    out = rms_norm(out, w["attn_sub_norm.weight"], 1e-5)
    return linear(w, "o_proj", out)


def laguna(w, x, number, kv_number) -> Tensor:
    """Half of each head rotates; the gate is one number a head."""
    q, k, v = projected(w, x, number, kv_number)
    q, k = normed(w, q, k, 1e-6)
    out = decoder(q, k, v, rotate=rotary(x, 5e5, q.shape[-1] // 2))
    # [batch, length, heads]
    gate = F.softplus(linear(w, "g_proj", x))
    out = heads(out, number) * gate[..., None]
    return linear(w, "o_proj", out.flatten(2))


def mimo(w, x, number, kv_number, factor, size, window) -> Tensor:
    """Values are smaller than keys, and multiplied by a factor."""
    q, k, v = projected(w, x, number, kv_number)
    out = decoder(
        q,
        k,
        v * factor,
        rotate=rotary(x, 1e4, size),
        sinks=w["sinks"],
        window=window,
    )
    return linear(w, "o_proj", out)


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
        if "q_a_proj.weight" in w:
            q = linear(w, "q_b_proj", compressed_query(w, x))
        else:
            q = linear(w, "q_proj", x)
        q = heads(q, number)
    c, r = linear(w, "kv_a_proj_with_mqa", x).split([size, rotary], dim=-1)
    # c is the latent, and r the part that rotates.
    c = rms_norm(c, w["kv_a_layernorm.weight"])
    kv = heads(linear(w, "kv_b_proj", c), number)
    k = kv[..., :content]
    v = kv[..., content:]
    # Features without positions first, then those that rotate.
    r = rotate(r[:, :, None]).expand(-1, -1, number, -1)
    q = torch.cat([q[..., :content], rotate(q[..., content:])], dim=-1)
    k = torch.cat([k, r], dim=-1)
    scale = scale * (content + rotary) ** -0.5
    out = decoder(q, k, v, scale=scale, visible=visible, sinks=w.get("sinks"))
    out = heads(out, number) * gate
    return linear(w, "o_proj", out.flatten(2))


def compressed_query(w, x) -> Tensor:
    return rms_norm(linear(w, "q_a_proj", x), w["q_a_layernorm.weight"])


def hy_4(w, x, number, sizes) -> Tensor:
    """Its indexer rotates the last features."""
    rotate = rotary(x, 1e4)
    visible = indexed(w, x, sizes[2], rotate, 3, last=True, epsilon=1e-2)
    gate = heads(torch.sigmoid(linear(w, "gate_proj", x)), number)
    return latent(w, x, number, sizes, rotate, visible=visible, gate=gate)


def axk_2(w, x, number, sizes) -> Tensor:
    """Queries and gates of each head side by side, from compressed queries after and
    before their norm.
    """
    both = torch.cat([compressed_query(w, x), linear(w, "q_a_proj", x)], dim=-1)
    both = heads(linear(w, "q_gate_proj", both), number)
    size = sizes[1] + sizes[2]
    return latent(
        w,
        x,
        number,
        sizes,
        rotary(x, 1e4, pairing=rotate_every_two),
        visible=indexed(w, x, sizes[2], rotary(x, 1e4), 3),
        gate=torch.sigmoid(both[..., size:]),
        q=both[..., :size],
    )


def deepseek_v3(w, x, number, sizes, index=None) -> Tensor:
    """With YaRN's factors of 0.7 for the rotary part and 1.3 for all features, both for
    queries and keys.

    `index` is the pairing and the number of keys of an indexer, if there is one
    (DeepSeek V3.2, GLM 5).
    """
    part = 0.1 * 0.7 * math.log(4.0) + 1
    whole = 0.1 * 1.3 * math.log(4.0) + 1
    rotary = functools.partial(yarn, x, 1e4, sizes[2], 4.0, 4096, factor=part / whole)
    visible = None
    if index is not None:
        pairing, top = index
        visible = indexed(w, x, sizes[2], rotary(pairing=pairing), top)
    rotate = rotary(pairing=rotate_every_two)
    return latent(w, x, number, sizes, rotate, whole**2, visible)


def indexed(
    w, x, size, rotate, top: int, last: bool = False, epsilon: float = 1e-6
) -> Tensor:
    """The keys up to the query with the largest index scores; of equal ones the first.

    A score is the sum over heads of weight * relu(q . k / sqrt(size)) / sqrt(heads).
    """
    number = len(w["indexer.weights_proj.weight"])
    norm = w["indexer.k_norm.weight"], w["indexer.k_norm.bias"]
    k = linear(w, "indexer.wk", x)
    k = F.layer_norm(k, norm[0].shape, *norm, eps=epsilon)[:, :, None]
    q = heads(linear(w, "indexer.wq_b", compressed_query(w, x)), number)

    def rotated(y: Tensor) -> Tensor:
        if last:
            return torch.cat([y[..., :-size], rotate(y[..., -size:])], dim=-1)
        return torch.cat([rotate(y[..., :size]), y[..., size:]], dim=-1)

    products = torch.einsum("bthd,bsgd->bths", rotated(q), rotated(k))
    products = torch.relu(products * q.shape[-1] ** -0.5)
    weights = linear(w, "indexer.weights_proj", x) * number**-0.5
    scores = torch.einsum("bths,bth->bts", products, weights)

    visible = causal(x.shape[1])
    scores = scores.masked_fill(~visible, -math.inf)
    chosen = scores.argsort(dim=-1, descending=True, stable=True)[..., :top]
    none = torch.zeros_like(scores, dtype=torch.bool)
    # The first queries have fewer keys than they may choose.
    return (none.scatter(-1, chosen, True) & visible)[:, None]


def longcat(w, x, number, sizes) -> Tensor:
    """Latents grow by sqrt(features / rank) after their norms."""
    grown = dict(w)
    for key, y in w.items():
        if "layernorm" in key:
            grown[key] = y * (x.shape[-1] / len(y)) ** 0.5
    rotate = rotary(x, 1e7, pairing=rotate_every_two)
    return latent(grown, x, number, sizes, rotate)


def bailing(w, x, number, sizes) -> Tensor:
    gate = torch.sigmoid(linear(w, "g_proj", x))[..., None]
    rotate = rotary(x, 6e6, pairing=rotate_every_two)
    return latent(w, x, number, sizes, rotate, gate=gate)


def minicpm_3(w, x, number, sizes) -> Tensor:
    return latent(w, x, number, sizes, rotary(x, 1e4))


def olmo_2(w, x, number, kv_number) -> Tensor:
    """Norms come before the heads."""
    q, k = normed(w, linear(w, "q_proj", x), linear(w, "k_proj", x), 1e-5)
    q = heads(q, number)
    k = heads(k, kv_number)
    v = heads(linear(w, "v_proj", x), kv_number)
    out = decoder(q, k, v, rotate=rotary(x, 5e5))
    return linear(w, "o_proj", out)


def gemma_3(w, x, number, kv_number, scalar, window) -> Tensor:
    """Layers with a window rotate faster; the others divide their angles by 8. Norms
    multiply by 1 + weight.
    """
    q, k, v = projected(w, x, number, kv_number)
    q, k = normed(w, q, k, 1e-6, plus=1.0)
    rotate = rotary(x, 1e4)
    if window is None:
        rotate = rotary(x, 1e6, divisor=8.0)
    out = decoder(q, k, v, rotate=rotate, scale=scalar**-0.5, window=window)
    return linear(w, "o_proj", out)


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
    out = decoder(q, k, v, rotate=rotate, sinks=w["sinks"], window=window)
    return linear(w, "o_proj", out)


def phi(w, x, number) -> Tensor:
    q, k, v = projected(w, x, number, number)
    out = decoder(q, k, v, rotate=rotary(x, 1e4, q.shape[-1] // 2))
    return linear(w, "dense", out)


def phi_3(w, x, number, kv_number, size, window) -> Tensor:
    sizes = [number * size, kv_number * size, kv_number * size]
    q, k, v = linear(w, "qkv_proj", x).split(sizes, dim=-1)
    q = heads(q, number)
    k = heads(k, kv_number)
    v = heads(v, kv_number)
    out = decoder(q, k, v, rotate=rotary(x, 1e4), window=window)
    return linear(w, "o_proj", out)


def gptj(w, x, number, size) -> Tensor:
    qkv = projected(w, x, number, number)
    out = decoder(*qkv, rotate=rotary(x, 1e4, size, rotate_every_two))
    return linear(w, "out_proj", out)


def gpt_neox(w, x, number) -> Tensor:
    """In each head query, key and value are side by side."""
    q, k, v = heads(linear(w, "query_key_value", x), number).chunk(3, dim=-1)
    out = decoder(q, k, v, rotate=rotary(x, 1e4, q.shape[-1] // 4))
    return linear(w, "dense", out)


def hunyuan(w, x, number, kv_number) -> Tensor:
    """Norms come after the rotation."""
    q, k, v = projected(w, x, number, kv_number)
    rotate = rotary(x, 1e4)
    q = rms_norm(rotate(q), w["query_layernorm.weight"], 1e-5)
    k = rms_norm(rotate(k), w["key_layernorm.weight"], 1e-5)
    out = decoder(q, k, v)
    return linear(w, "o_proj", out)


def nanochat(w, x, number, kv_number) -> Tensor:
    """Rotates the other way; norms have no weights."""
    q, k, v = projected(w, x, number, kv_number)
    rotate = rotary(x, 1e4, divisor=-1.0)
    out = decoder(q, k, v, rotate=lambda y: rms_norm(rotate(y)))
    return linear(w, "o_proj", out)


def llama_4(w, x, number, kv_number, chunk) -> Tensor:
    """Layers that rotate attend to their chunk, and normalize; the queries of the
    others grow by their position.
    """
    q, k, v = projected(w, x, number, kv_number)
    place = torch.arange(x.shape[1])
    if chunk is None:
        # 1 + 0.5 log(1 + floor((place + 1) / 3))
        growth = torch.log1p(torch.floor((place + 1.0) / 3)) * 0.5 + 1.0
        out = decoder(q * growth[:, None, None], k, v)
        return linear(w, "o_proj", out)
    rotate = rotary(x, 500_000.0, pairing=rotate_every_two)
    visible = causal(x.shape[1]) & (place[:, None] // chunk == place // chunk)
    out = decoder(q, k, v, rotate=lambda y: rms_norm(rotate(y)), visible=visible)
    return linear(w, "o_proj", out)


def ministral_3(w, x, number, kv_number) -> Tensor:
    q, k, v = projected(w, x, number, kv_number)
    block = torch.floor(torch.arange(x.shape[1]) / 3.0)
    growth = 1 + 0.5 * torch.log(1 + block)
    out = decoder(q * growth[:, None, None], k, v, rotate=rotary(x, 1e6))
    return linear(w, "o_proj", out)


def cohere(w, x, number, kv_number) -> Tensor:
    q, k, v = projected(w, x, number, kv_number)
    q = layer_norm(w, "q_norm", q)
    k = layer_norm(w, "k_norm", k)
    out = decoder(q, k, v, rotate=rotary(x, 5e5, pairing=rotate_every_two))
    return linear(w, "o_proj", out)


def persimmon(w, x, number) -> Tensor:
    """As GPT-NeoX, with norms that have biases."""
    fused = linear(w, "query_key_value", x).unflatten(-1, (number, 3, -1))
    q, k, v = fused.unbind(-2)
    q = layer_norm(w, "q_layernorm", q)
    k = layer_norm(w, "k_layernorm", k)
    out = decoder(q, k, v, rotate=rotary(x, 1e4, q.shape[-1] // 2))
    return linear(w, "dense", out)


def olmoe(w, x, number, kv_number, limit) -> Tensor:
    """Norms come before the heads, and then clipping."""
    q, k = normed(w, linear(w, "q_proj", x), linear(w, "k_proj", x), 1e-5)
    v = linear(w, "v_proj", x)
    q = heads(q.clamp(-limit, limit), number)
    k = heads(k.clamp(-limit, limit), kv_number)
    v = heads(v.clamp(-limit, limit), kv_number)
    out = decoder(q, k, v, rotate=rotary(x, 1e4))
    return linear(w, "o_proj", out)


def olmo(w, x, number, kv_number, limit) -> Tensor:
    qkv = (y.clamp(-limit, limit) for y in projected(w, x, number, kv_number))
    out = decoder(*qkv, rotate=rotary(x, 1e4))
    return linear(w, "o_proj", out)


def alibi(number: int, distance: Tensor) -> Tensor:
    # Head i of n, from 1 on, has the slope 2^(-8 i / n).
    slopes = torch.tensor([2.0 ** (-8 * (i + 1) / number) for i in range(number)])
    return slopes[:, None, None] * distance


def mpt(w, x, number, limit) -> Tensor:
    fused = linear(w, "Wqkv", x).clamp(-limit, limit)
    qkv = (heads(y, number) for y in fused.chunk(3, dim=-1))
    bias = alibi(number, torch.arange(1 - x.shape[1], 1))
    out = decoder(*qkv, bias=bias)
    return linear(w, "out_proj", out)


def bloom(w, x, number) -> Tensor:
    fused = linear(w, "query_key_value", x).unflatten(-1, (number, 3, -1))
    q, k, v = fused.unbind(-2)
    bias = alibi(number, torch.arange(x.shape[1]))
    out = decoder(q, k, v, bias=bias)
    return linear(w, "dense", out)


def codegen(w, x, number, size) -> Tensor:
    """Four blocks of rows, each with queries, values and keys, in this order."""
    fused = linear(w, "qkv_proj", x).unflatten(-1, (4, -1))
    q, v, k = fused.chunk(3, dim=-1)
    qkv = (heads(y.flatten(-2), number) for y in (q, k, v))
    out = decoder(*qkv, rotate=rotary(x, 1e4, size, rotate_every_two))
    return linear(w, "out_proj", out)


def falcon(w, x, number, kv_number) -> Tensor:
    """Each key head follows its query heads, and its values follow it."""
    of_group = number // kv_number + 2
    # [batch, length, key heads, query heads of each + 2, size]
    fused = linear(w, "query_key_value", x).unflatten(-1, (kv_number, of_group, -1))
    q = fused[..., :-2, :].flatten(2, 3)
    k = fused[..., -2, :]
    v = fused[..., -1, :]
    out = decoder(q, k, v, rotate=rotary(x, 1e4))
    return linear(w, "dense", out)


def gpt_2(w, x, number, layer=0) -> Tensor:
    """With `scale_attn_by_inverse_layer_idx`, deeper layers divide by more."""
    q, k, v = (heads(y, number) for y in conv1d(w, "c_attn", x).chunk(3, dim=-1))
    out = decoder(q, k, v, scale=q.shape[-1] ** -0.5 / (layer + 1))
    return conv1d(w, "c_proj", out)


def nanogpt(w, x, number) -> Tensor:
    qkv = (heads(y, number) for y in linear(w, "c_attn", x).chunk(3, dim=-1))
    out = decoder(*qkv)
    return linear(w, "c_proj", out)


def t5_buckets(length: int, buckets: int) -> Tensor:
    """Of the decoder: half of the buckets hold one distance each, the others grow up to
    128.
    """
    distance = (torch.arange(length)[:, None] - torch.arange(length)).clamp(min=0)
    exact = buckets // 2
    far = torch.log(distance.clamp(min=1).double() / exact) / math.log(128 / exact)
    bucket = exact + (far * (buckets - exact)).floor().long()
    return torch.where(distance < exact, distance, bucket.clamp(max=buckets - 1))


def t5(w, x, number, table) -> Tensor:
    bias = table[t5_buckets(x.shape[1], len(table))].permute(2, 0, 1)
    q, k, v = projected(w, x, number, number, "q k v")
    out = decoder(q, k, v, scale=1.0, bias=bias)
    return linear(w, "o", out)


def plain(w, x, number, names, out, is_causal=False, scale=None) -> Tensor:
    """BERT, ViT, CLIP, Whisper and their like."""
    visible = causal(x.shape[1]) if is_causal else None
    q, k, v = projected(w, x, number, number, names)
    y = core(q, k, v, visible=visible, scale=scale)
    return linear(w, out, y)


def timm(w, x, number) -> Tensor:
    fused = linear(w, "qkv", x).unflatten(-1, (3, number, -1))
    out = core(*fused.unbind(2))
    return linear(w, "proj", out)


def gemma_4(w, x, number, kv_number, rotate, window, kv=None):
    """Gemma 3n, too: values are normalized, or are keys; scores are not scaled; `kv`
    are another layer's.

    Returns the output, and keys and values for later layers.
    """
    q = rotate(rms_norm(heads(linear(w, "q_proj", x), number), w["q_norm.weight"]))
    if kv is None:
        k = heads(linear(w, "k_proj", x), kv_number)
        v = k
        if "v_proj.weight" in w:
            v = heads(linear(w, "v_proj", x), kv_number)
        kv = rotate(rms_norm(k, w["k_norm.weight"])), rms_norm(v)
    visible = causal(x.shape[1], window)
    out = core(q, *kv, visible=visible, scale=1.0)
    return linear(w, "o_proj", out), kv
