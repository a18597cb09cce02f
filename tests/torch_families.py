"""The attention layers of many models, from the definitions of their families, on plain dicts of PyTorch tensors.

A layer takes its weights under their real names and x [batch, length, features], and keeps all scores.
"""

import functools
import math

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch_rope import angles, default_frequencies, partially, rotate_every_two, rotate_halves, yarn_frequencies

Weights = dict[str, Tensor]


def linear(w: Weights, name: str, x: Tensor) -> Tensor:
    return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))


def layer_norm(w: Weights, name: str, x: Tensor, epsilon: float = 1e-5) -> Tensor:
    """Of each head, whose weights may be its own."""
    normalized = F.layer_norm(x, x.shape[-1:], eps=epsilon) * w[f"{name}.weight"]
    return normalized + w.get(f"{name}.bias", torch.zeros(()))


def conv1d(w: Weights, name: str, x: Tensor) -> Tensor:
    return x @ w[f"{name}.weight"] + w[f"{name}.bias"]


def core(q, k, v, *, scale=None, visible=None, cap=None, sinks=None, bias=None) -> Tensor:
    """q [batch, length, heads, size]; k and v of fewer heads; the answer [batch, length, heads * size]."""
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
        scores = torch.cat([scores, sinks[None, :, None, None].expand(*scores.shape[:-1], 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : k.shape[2]]
    return (weights @ v).transpose(1, 2).flatten(2)


def causal(length: int, window: int | None = None) -> Tensor:
    """Which keys a query sees: of a window its own and window - 1 before it."""
    distance = torch.arange(length)[:, None] - torch.arange(length)
    return (distance >= 0) & (distance < (length if window is None else window))


def heads(x: Tensor, number: int) -> Tensor:
    return x.unflatten(-1, (number, -1))


def positions(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1]).expand(len(x), -1)


def rotated(x: Tensor, base: float, divisor: float = 1.0) -> Tensor:
    return rotate_halves(x, angles(positions(x), default_frequencies(base, x.shape[-1]) / divisor))


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * weight


def projected(w: Weights, x: Tensor, number: int, kv_number: int, names: str) -> list[Tensor]:
    q, k, v = names.split()
    return [heads(linear(w, q, x), number), heads(linear(w, k, x), kv_number), heads(linear(w, v, x), kv_number)]


def llama(
    w: Weights, x: Tensor, number: int, kv_number: int, base: float | None, window: int | None = None, scale=None
) -> Tensor:
    """Llama, Mistral, Qwen 2 and Gemma; Granite with its scale; SmolLM 3, of which some layers do not rotate."""
    q, k, v = projected(w, x, number, kv_number, "q_proj k_proj v_proj")
    q, k = (q, k) if base is None else (rotated(q, base), rotated(k, base))
    return linear(w, "o_proj", core(q, k, v, scale=scale, visible=causal(x.shape[1], window)))


def gemma_2(w: Weights, x: Tensor, number: int, kv_number: int, scalar: int, window: int | None) -> Tensor:
    q, k, v = projected(w, x, number, kv_number, "q_proj k_proj v_proj")
    q, k = rotated(q, 10_000.0), rotated(k, 10_000.0)
    out = core(q, k, v, scale=scalar**-0.5, cap=50.0, visible=causal(x.shape[1], window))
    return linear(w, "o_proj", out)


def qwen_3(
    w: Weights, x: Tensor, number: int, kv_number: int, epsilon: float, out: str = "o_proj", norm: str = "norm"
) -> Tensor:
    """LFM 2 has other names."""
    q, k, v = projected(w, x, number, kv_number, "q_proj k_proj v_proj")
    q, k = rms_norm(q, w[f"q_{norm}.weight"], epsilon), rms_norm(k, w[f"k_{norm}.weight"], epsilon)
    return linear(w, out, core(rotated(q, 1e6), rotated(k, 1e6), v, visible=causal(x.shape[1])))


def qwen_3_next(w: Weights, x: Tensor, number: int, kv_number: int) -> Tensor:
    """In each head query and gate stand side by side; a quarter rotates; norms multiply by 1 + weight."""
    q, gate = heads(linear(w, "q_proj", x), number).chunk(2, dim=-1)
    k, v = (heads(linear(w, name, x), kv_number) for name in ("k_proj", "v_proj"))
    angle = angles(positions(x), default_frequencies(10_000.0, q.shape[-1] // 4))
    q, k = (
        partially(rotate_halves, rms_norm(y, 1 + w[f"{name}_norm.weight"], 1e-6), angle)
        for name, y in (("q", q), ("k", k))
    )
    return linear(w, "o_proj", core(q, k, v, visible=causal(x.shape[1])) * torch.sigmoid(gate.flatten(2)))


def afmoe(w: Weights, x: Tensor, number: int, kv_number: int, window: int | None) -> Tensor:
    q, k, v = projected(w, x, number, kv_number, "q_proj k_proj v_proj")
    q, k = rms_norm(q, w["q_norm.weight"], 1e-5), rms_norm(k, w["k_norm.weight"], 1e-5)
    q, k = (q, k) if window is None else (rotated(q, 10_000.0), rotated(k, 10_000.0))
    out = core(q, k, v, visible=causal(x.shape[1], window))
    return linear(w, "o_proj", out * torch.sigmoid(linear(w, "gate_proj", x)))


def latent(w: Weights, x: Tensor, number: int, sizes: tuple[int, int, int], rotate, scale: float = 1.0) -> Tensor:
    """`sizes` are those of the latent, of a head without its rotary part, and of that part, which all keys share."""
    size, content, rotary = sizes
    compressed = rms_norm(linear(w, "q_a_proj", x), w["q_a_layernorm.weight"], 1e-6) if "q_a_proj.weight" in w else x
    q = heads(linear(w, "q_b_proj" if "q_a_proj.weight" in w else "q_proj", compressed), number)
    c, r = linear(w, "kv_a_proj_with_mqa", x).split([size, rotary], dim=-1)
    kv = heads(linear(w, "kv_b_proj", rms_norm(c, w["kv_a_layernorm.weight"], 1e-6)), number)
    q = torch.cat([q[..., :content], rotate(q[..., content:])], dim=-1)
    k = torch.cat([kv[..., :content], rotate(r[:, :, None]).expand(-1, -1, number, -1)], dim=-1)
    scale = scale * (content + rotary) ** -0.5
    return linear(w, "o_proj", core(q, k, kv[..., content:], scale=scale, visible=causal(x.shape[1])))


def deepseek_v3(w: Weights, x: Tensor, number: int, sizes: tuple[int, int, int]) -> Tensor:
    """With YaRN's factors of 0.7 for the rotary part and 1.3 for all features, which queries and keys have alike."""
    angle = angles(positions(x), yarn_frequencies(10_000.0, sizes[2], 4.0, 4096, truncate=True))
    part, whole = (0.1 * m * math.log(4.0) + 1 for m in (0.7, 1.3))
    return latent(w, x, number, sizes, lambda y: rotate_every_two(y, angle) * (part / whole), whole**2)


def minicpm_3(w: Weights, x: Tensor, number: int, sizes: tuple[int, int, int]) -> Tensor:
    return latent(w, x, number, sizes, functools.partial(rotated, base=10_000.0))


def olmo_2(w: Weights, x: Tensor, number: int, kv_number: int) -> Tensor:
    """Norms come before the heads."""
    q, k = (
        rms_norm(linear(w, "q_proj", x), w["q_norm.weight"], 1e-5),
        rms_norm(linear(w, "k_proj", x), w["k_norm.weight"], 1e-5),
    )
    q, k, v = heads(q, number), heads(k, kv_number), heads(linear(w, "v_proj", x), kv_number)
    return linear(w, "o_proj", core(rotated(q, 5e5), rotated(k, 5e5), v, visible=causal(x.shape[1])))


def gemma_3(w: Weights, x: Tensor, number: int, kv_number: int, scalar: int, window: int | None) -> Tensor:
    """Layers with a window rotate faster; the others divide their angles by 8. Norms multiply by 1 + weight."""
    q, k, v = projected(w, x, number, kv_number, "q_proj k_proj v_proj")
    q, k = rms_norm(q, 1 + w["q_norm.weight"], 1e-6), rms_norm(k, 1 + w["k_norm.weight"], 1e-6)
    base, divisor = (1e6, 8.0) if window is None else (1e4, 1.0)
    q, k = rotated(q, base, divisor), rotated(k, base, divisor)
    return linear(w, "o_proj", core(q, k, v, scale=scalar**-0.5, visible=causal(x.shape[1], window)))


def gpt_oss(w: Weights, x: Tensor, number: int, kv_number: int, window: int | None) -> Tensor:
    q, k, v = projected(w, x, number, kv_number, "q_proj k_proj v_proj")
    angle = angles(positions(x), yarn_frequencies(150_000.0, q.shape[-1], 32.0, 4096, truncate=False))
    q, k = (rotate_halves(y, angle, 0.1 * math.log(32.0) + 1) for y in (q, k))
    return linear(w, "o_proj", core(q, k, v, sinks=w["sinks"], visible=causal(x.shape[1], window)))


def phi(w: Weights, x: Tensor, number: int) -> Tensor:
    q, k, v = projected(w, x, number, number, "q_proj k_proj v_proj")
    angle = angles(positions(x), default_frequencies(10_000.0, q.shape[-1] // 2))
    q, k = (partially(rotate_halves, y, angle) for y in (q, k))
    return linear(w, "dense", core(q, k, v, visible=causal(x.shape[1])))


def phi_3(w: Weights, x: Tensor, number: int, kv_number: int, size: int, window: int) -> Tensor:
    q, k, v = linear(w, "qkv_proj", x).split([number * size, kv_number * size, kv_number * size], dim=-1)
    q, k = rotated(heads(q, number), 10_000.0), rotated(heads(k, kv_number), 10_000.0)
    return linear(w, "o_proj", core(q, k, heads(v, kv_number), visible=causal(x.shape[1], window)))


def gptj(w: Weights, x: Tensor, number: int, size: int) -> Tensor:
    q, k, v = projected(w, x, number, number, "q_proj k_proj v_proj")
    angle = angles(positions(x), default_frequencies(10_000.0, size))
    q, k = (partially(rotate_every_two, y, angle) for y in (q, k))
    return linear(w, "out_proj", core(q, k, v, visible=causal(x.shape[1])))


def gpt_neox(w: Weights, x: Tensor, number: int) -> Tensor:
    """In each head query, key and value stand side by side."""
    q, k, v = heads(linear(w, "query_key_value", x), number).chunk(3, dim=-1)
    angle = angles(positions(x), default_frequencies(10_000.0, q.shape[-1] // 4))
    q, k = (partially(rotate_halves, y, angle) for y in (q, k))
    return linear(w, "dense", core(q, k, v, visible=causal(x.shape[1])))


def hunyuan(w: Weights, x: Tensor, number: int, kv_number: int) -> Tensor:
    """Norms come after the rotation."""
    q, k, v = projected(w, x, number, kv_number, "q_proj k_proj v_proj")
    q = rms_norm(rotated(q, 10_000.0), w["query_layernorm.weight"], 1e-5)
    k = rms_norm(rotated(k, 10_000.0), w["key_layernorm.weight"], 1e-5)
    return linear(w, "o_proj", core(q, k, v, visible=causal(x.shape[1])))


def nanochat(w: Weights, x: Tensor, number: int, kv_number: int) -> Tensor:
    """Rotates the other way; norms have no weights."""
    q, k, v = projected(w, x, number, kv_number, "q_proj k_proj v_proj")
    angle = angles(-positions(x), default_frequencies(10_000.0, q.shape[-1]))
    q, k = (rms_norm(rotate_halves(y, angle), torch.ones(()), 1e-6) for y in (q, k))
    return linear(w, "o_proj", core(q, k, v, visible=causal(x.shape[1])))


def llama_4(w: Weights, x: Tensor, number: int, kv_number: int, chunk: int | None) -> Tensor:
    """Layers that rotate see their chunk, and normalize; the queries of the others grow by their position."""
    q, k, v = projected(w, x, number, kv_number, "q_proj k_proj v_proj")
    place = torch.arange(x.shape[1])
    if chunk is None:
        q = q * (torch.log1p(torch.floor((place + 1.0) / 3)) * 0.5 + 1.0)[:, None, None]
        return linear(w, "o_proj", core(q, k, v, visible=causal(x.shape[1])))
    angle = angles(positions(x), default_frequencies(500_000.0, q.shape[-1]))
    q, k = (rms_norm(rotate_every_two(y, angle), torch.ones(()), 1e-6) for y in (q, k))
    visible = causal(x.shape[1]) & (place[:, None] // chunk == place // chunk)
    return linear(w, "o_proj", core(q, k, v, visible=visible))


def ministral_3(w: Weights, x: Tensor, number: int, kv_number: int) -> Tensor:
    q, k, v = projected(w, x, number, kv_number, "q_proj k_proj v_proj")
    q = rotated(q, 1e6) * (1 + 0.5 * torch.log(1 + torch.floor(positions(x) / 3.0)))[..., None, None]
    return linear(w, "o_proj", core(q, rotated(k, 1e6), v, visible=causal(x.shape[1])))


def cohere(w: Weights, x: Tensor, number: int, kv_number: int) -> Tensor:
    q, k, v = projected(w, x, number, kv_number, "q_proj k_proj v_proj")
    angle = angles(positions(x), default_frequencies(500_000.0, q.shape[-1]))
    q, k = rotate_every_two(layer_norm(w, "q_norm", q), angle), rotate_every_two(layer_norm(w, "k_norm", k), angle)
    return linear(w, "o_proj", core(q, k, v, visible=causal(x.shape[1])))


def persimmon(w: Weights, x: Tensor, number: int) -> Tensor:
    """As GPT-NeoX, with norms that have biases."""
    q, k, v = linear(w, "query_key_value", x).unflatten(-1, (number, 3, -1)).unbind(-2)
    angle = angles(positions(x), default_frequencies(10_000.0, q.shape[-1] // 2))
    q, k = layer_norm(w, "q_layernorm", q), layer_norm(w, "k_layernorm", k)
    q, k = (partially(rotate_halves, y, angle) for y in (q, k))
    return linear(w, "dense", core(q, k, v, visible=causal(x.shape[1])))


def olmo(w: Weights, x: Tensor, number: int, kv_number: int, limit: float) -> Tensor:
    q, k, v = (y.clamp(-limit, limit) for y in projected(w, x, number, kv_number, "q_proj k_proj v_proj"))
    return linear(w, "o_proj", core(rotated(q, 10_000.0), rotated(k, 10_000.0), v, visible=causal(x.shape[1])))


def mpt(w: Weights, x: Tensor, number: int, limit: float) -> Tensor:
    q, k, v = (heads(y, number) for y in linear(w, "Wqkv", x).clamp(-limit, limit).chunk(3, dim=-1))
    slopes = torch.tensor([2.0 ** (-8 * (i + 1) / number) for i in range(number)])
    bias = slopes[:, None, None] * torch.arange(1 - x.shape[1], 1)
    return linear(w, "out_proj", core(q, k, v, bias=bias, visible=causal(x.shape[1])))


def codegen(w: Weights, x: Tensor, number: int, size: int) -> Tensor:
    """Four blocks of rows, each with queries, values and keys, in this order."""
    q, v, k = linear(w, "qkv_proj", x).unflatten(-1, (4, -1)).chunk(3, dim=-1)
    q, k, v = (y.flatten(-2).unflatten(-1, (number, -1)) for y in (q, k, v))
    angle = angles(positions(x), default_frequencies(10_000.0, size))
    q, k = (partially(rotate_every_two, y, angle) for y in (q, k))
    return linear(w, "out_proj", core(q, k, v, visible=causal(x.shape[1])))


def bloom(w: Weights, x: Tensor, number: int) -> Tensor:
    fused = linear(w, "query_key_value", x).unflatten(-1, (number, 3, -1))
    slopes = torch.tensor([2.0 ** (-8 * (i + 1) / number) for i in range(number)])
    bias = slopes[:, None, None] * torch.arange(x.shape[1])
    return linear(w, "dense", core(*fused.unbind(-2), bias=bias, visible=causal(x.shape[1])))


def falcon(w: Weights, x: Tensor, number: int, kv_number: int) -> Tensor:
    """Each key head stands after its query heads, and before its values."""
    fused = linear(w, "query_key_value", x).unflatten(-1, (kv_number, number // kv_number + 2, -1))
    q, k, v = fused[..., :-2, :].flatten(2, 3), fused[..., -2, :], fused[..., -1, :]
    q, k = rotated(q, 10_000.0), rotated(k, 10_000.0)
    return linear(w, "dense", core(q, k, v, visible=causal(x.shape[1])))


def gpt_2(w: Weights, x: Tensor, number: int, layer: int = 0) -> Tensor:
    """With `scale_attn_by_inverse_layer_idx`, deeper layers divide by more."""
    q, k, v = (heads(y, number) for y in conv1d(w, "c_attn", x).chunk(3, dim=-1))
    out = core(q, k, v, scale=q.shape[-1] ** -0.5 / (layer + 1), visible=causal(x.shape[1]))
    return conv1d(w, "c_proj", out)


def nanogpt(w: Weights, x: Tensor, number: int) -> Tensor:
    q, k, v = (heads(y, number) for y in linear(w, "c_attn", x).chunk(3, dim=-1))
    return linear(w, "c_proj", core(q, k, v, visible=causal(x.shape[1])))


def t5_buckets(length: int, buckets: int) -> Tensor:
    """Of the decoder: half of the buckets hold one distance each, the others grow up to 128."""
    distance = (torch.arange(length)[:, None] - torch.arange(length)).clamp(min=0)
    exact = buckets // 2
    far = torch.log(distance.clamp(min=1).double() / exact) / math.log(128 / exact) * (buckets - exact)
    return torch.where(distance < exact, distance, (exact + far.floor().long()).clamp(max=buckets - 1))


def t5(w: Weights, x: Tensor, number: int, table: Tensor) -> Tensor:
    q, k, v = projected(w, x, number, number, "q k v")
    bias = table[t5_buckets(x.shape[1], len(table))].permute(2, 0, 1)
    return linear(w, "o", core(q, k, v, scale=1.0, bias=bias, visible=causal(x.shape[1])))


def plain(w: Weights, x: Tensor, number: int, names: str, out: str, is_causal: bool = False) -> Tensor:
    """BERT, ViT, CLIP, Whisper and their like."""
    visible = causal(x.shape[1]) if is_causal else None
    return linear(w, out, core(*projected(w, x, number, number, names), visible=visible))


def timm(w: Weights, x: Tensor, number: int) -> Tensor:
    q, k, v = linear(w, "qkv", x).unflatten(-1, (3, number, -1)).unbind(2)
    return linear(w, "proj", core(q, k, v))
