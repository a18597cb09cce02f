"""The examples train, and show what they promise."""

import functools
import importlib.util
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture(autouse=True)
def _as_a_reader_has_it():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def example(name, one_layer=""):
    """The module of an example; the model `one_layer` gets one layer, not two, which
    compiles in half the time.
    """
    file = EXAMPLES / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"example_{name}", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # linen's dataclasses look their module up
    spec.loader.exec_module(module)
    if one_layer:
        model = functools.partial(getattr(module, one_layer), num_layers=1)
        setattr(module, one_layer, model)
    return module


def trained(module, steps, below):
    """The trained model; its last losses are lower than without the pattern in the
    data.
    """
    model, losses = module.train(steps)
    assert len(losses) == steps
    assert np.isfinite(losses).all()
    assert np.mean(losses[-3:]) < below < 0.9 * losses[0]
    return model


def assert_greedy(run, prompts, lengths, written):
    """Without a cache, and without the other prompts, each token is the most probable
    one after those before it.
    """
    for prompt, length, continued in zip(prompts, lengths, written, strict=True):
        # Of one length, for one program.
        padding = jnp.zeros(max(lengths) - length, int)
        text = jnp.concatenate([prompt[:length], continued, padding])
        chosen = run(text[None])[0].argmax(-1)
        np.testing.assert_array_equal(chosen[length - 1 :][: len(continued)], continued)


def test_vit_classifies_better_than_a_guess():
    vit = example("vit", one_layer="ViT")
    model = trained(vit, steps=25, below=0.9)  # a guess costs log(4) = 1.39
    model = nnx.view(model, deterministic=True)
    # A guess: 0.25.
    assert vit.accuracy(model, jax.random.key(10_000)) > 0.6


@pytest.mark.core
def test_packed_lm_learns_and_keeps_documents_apart():
    packed_lm = example("packed_lm", one_layer="LanguageModel")
    # Without the distance between the tokens of a document: log(15) = 2.71.
    model = nnx.jit(trained(packed_lm, steps=25, below=2.2))
    documents = [np.arange(9), 3 * np.arange(5), 2 * np.arange(40), np.arange(7) + 4]
    documents = [document % packed_lm.VOCABULARY_SIZE for document in documents]
    batch = packed_lm.pack(documents, rows=8, length=64)
    ids = np.repeat([1, 2, 3, 4, 0], [9, 5, 40, 7, 3])
    np.testing.assert_array_equal(batch.segment_ids[0], ids)
    logits = model(batch)

    tokens = batch.tokens.at[0, 9:14].set(7)
    changed = np.any(model(batch._replace(tokens=tokens)) != logits, axis=-1)
    assert changed[0, 9:14].all()
    assert changed.sum() == 5  # no other document and row depends on it

    alone = model(packed_lm.pack([documents[3]], rows=8, length=64))
    np.testing.assert_allclose(alone[0, :7], logits[0, 54:61], rtol=1e-4, atol=1e-4)
    full = next(packed_lm.make_batches())
    assert (full.segment_ids > 0).mean() > 0.9


def test_meanflow_samples_rounder_shapes_than_noise():
    meanflow = example("meanflow", one_layer="MeanVelocity")
    meanflow.POINTS = 8  # a quarter of the time
    # A velocity of 0, as in the first step: 0.68.
    model = trained(meanflow, steps=100, below=0.59)
    key = jax.random.key(1)
    noise = jax.random.normal(key, (256, meanflow.POINTS, 2))
    of_noise = meanflow.roundness_error(noise)
    assert meanflow.roundness_error(meanflow.sample(model, key)) < 0.95 * of_noise


def test_llama_learns_and_continues_prompts_greedily():
    llama = example("llama")
    # With only the frequencies of characters: 3.42.
    model = trained(llama, steps=25, below=3.25)
    texts = ["def train", "class"]
    prompts, lengths = llama.encode_prompts(texts)
    written = llama.generate(model, prompts, lengths, num_tokens=11)

    assert_greedy(nnx.jit(model), prompts, lengths, written)
    assert llama.decode(llama.encode("def train")) == "def train"
    assert model.blocks[0].attention.cached_key is None  # generating uses other caches


GLM: dict[str, object] = {
    "model_type": "glm4_moe",
    "vocab_size": 29,
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "partial_rotary_factor": 0.5,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}


def glm_tensors():
    """A layer with one network, and one with six experts and a shared one."""
    shapes = {
        "model.embed_tokens.weight": (29, 12),
        "model.norm.weight": (12,),
        "lm_head.weight": (29, 12),
    }
    for layer in "01":
        prefix = f"model.layers.{layer}"
        shapes[f"{prefix}.input_layernorm.weight"] = (12,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (12,)
        shapes[f"{prefix}.self_attn.q_proj.weight"] = (16, 12)
        shapes[f"{prefix}.self_attn.k_proj.weight"] = (8, 12)
        shapes[f"{prefix}.self_attn.v_proj.weight"] = (8, 12)
        shapes[f"{prefix}.self_attn.o_proj.weight"] = (12, 16)
    networks = ["0.mlp", "1.mlp.shared_experts"]
    networks += [f"1.mlp.experts.{i}" for i in range(6)]
    for network in networks:
        prefix = f"model.layers.{network}"
        shapes[f"{prefix}.gate_proj.weight"] = (10, 12)
        shapes[f"{prefix}.up_proj.weight"] = (10, 12)
        shapes[f"{prefix}.down_proj.weight"] = (12, 10)
    shapes["model.layers.1.mlp.gate.weight"] = (6, 12)
    shapes["model.layers.1.mlp.gate.e_score_correction_bias"] = (6,)
    rng = np.random.default_rng(0)
    tensors = {}
    for name, shape in shapes.items():
        tensors[name] = rng.normal(size=shape).astype(np.float32)
    return tensors


def save(folder, config, tensors):
    """Two files and their index."""
    (folder / "config.json").write_text(json.dumps(config))
    weight_map = {}
    for first, file in enumerate(("a.safetensors", "b.safetensors")):
        names = sorted(tensors)[first::2]
        save_file({name: tensors[name] for name in names}, folder / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_any_decoder_stacks_experts_and_continues_prompts_greedily(tmp_path):
    any_decoder = example("any_decoder")
    tensors = glm_tensors()
    model = any_decoder.Decoder(save(tmp_path, GLM, tensors))
    experts = model.weights["model.layers.1.mlp.experts.up_proj.weight"]
    fourth = tensors["model.layers.1.mlp.experts.4.up_proj.weight"]
    np.testing.assert_array_equal(experts[4], fourth.T)
    # Stacks of 6; modules hold the weights of attention.
    others = [name for name in tensors if "self_attn" not in name]
    assert len(model.weights) == len(others) - 5 * 3

    prompts = jnp.array([[7, 3, 9, 1, 4], [5, 2, 0, 0, 0]])
    lengths = jnp.array([5, 2])
    written = any_decoder.generate(model, prompts, lengths, count=6)
    run = nnx.jit(lambda model, tokens: model(tokens))
    assert_greedy(functools.partial(run, model), prompts, lengths, written)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"model.layers.1.mlp.gate.e_score_correction_bias": None},
            "must hold model.layers.1.mlp.choice.bias",
        ),
        ({"lm_head.weight": None}, "must hold lm_head.weight"),
        (
            {"model.layers.0.mlp.up_proj.bias": np.ones(10, np.float32)},
            "got 1 others, such as .*.mlp.up_proj.bias",
        ),
        ({"rms_norm_eps": None}, "config.json must hold epsilon or rms_norm_eps"),
        ({"n_group": None}, "config.json must hold n_group, but does not"),
        ({"hidden_act": "tanh"}, "activation must be one of .* got 'tanh'"),
        (
            {"model_type": "mamba"},
            "model_type must be one of FAMILIES, but got 'mamba'",
        ),
    ],
)
def test_any_decoder_refuses_unknown_configs_and_tensors(tmp_path, changed, message):
    config = dict(GLM)
    tensors = glm_tensors()
    for name, value in changed.items():
        values = tensors if "." in name else config
        if value is None:
            del values[name]
        else:
            values[name] = value
    folder = save(tmp_path, config, tensors)

    with pytest.raises(ValueError, match=message):
        example("any_decoder").Decoder(folder)


def test_encoder_decoder_sorts_and_ignores_padding():
    encoder_decoder = example("encoder_decoder")
    # Without the source, from the sorted numbers so far, at best 1.95 can be reached
    # (simulated).
    state = trained(encoder_decoder, steps=40, below=1.75)
    source, target, lengths = encoder_decoder.make_batch(jax.random.key(1), 8)
    is_number = jnp.arange(source.shape[1]) < lengths[:, None]
    assert not is_number.all()
    np.testing.assert_array_equal(is_number, source != encoder_decoder.END)
    np.testing.assert_array_equal(is_number, target[:, 1:-1] != encoder_decoder.END)

    @jax.jit
    def run(source):
        return state.apply_fn({"params": state.params}, source, target, lengths)

    other_padding = jnp.where(is_number, source, 5)
    np.testing.assert_array_equal(run(other_padding), run(source))
    assert 0 <= encoder_decoder.share_sorted(state, jax.random.key(2)) <= 1
