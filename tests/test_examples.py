"""The examples train, and do what they are there to show."""

import importlib.util
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture(autouse=True)
def _as_a_reader_has_it():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def example(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # linen's dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def trained(module, steps, below):
    """The trained model; its last losses are lower than a model reaches that has not learned what is shown."""
    model, losses = module.train(steps)
    assert len(losses) == steps
    assert np.isfinite(losses).all()
    assert np.mean(losses[-3:]) < below < 0.9 * losses[0]
    return model


def test_vit():
    vit = example("vit")
    model = trained(vit, steps=25, below=0.9)  # a guess costs log(4) = 1.39
    assert vit.accuracy(nnx.view(model, deterministic=True), jax.random.key(10_000)) > 0.6  # a guess: 0.25


@pytest.mark.core
def test_packed_lm():
    packed_lm = example("packed_lm")
    # Tokens alone do not tell how far apart the tokens of a document are: log(15) = 2.71.
    model = nnx.jit(trained(packed_lm, steps=25, below=2.2))
    documents = [np.arange(9), 3 * np.arange(5), 2 * np.arange(40), np.arange(7) + 4]
    documents = [document % packed_lm.VOCABULARY_SIZE for document in documents]
    batch = packed_lm.pack(documents, rows=8, length=64)
    np.testing.assert_array_equal(batch.segment_ids[0], np.repeat([1, 2, 3, 4, 0], [9, 5, 40, 7, 3]))
    logits = model(batch)

    tokens = batch.tokens.at[0, 9:14].set(7)
    changed = np.any(model(batch._replace(tokens=tokens)) != logits, axis=-1)
    assert changed[0, 9:14].all()
    assert changed.sum() == 5  # the other documents and rows do not see it

    alone = model(packed_lm.pack([documents[3]], rows=8, length=64))
    np.testing.assert_allclose(alone[0, :7], logits[0, 54:61], rtol=1e-4, atol=1e-4)
    full = next(packed_lm.make_batches())
    assert (full.segment_ids > 0).mean() > 0.9


def test_meanflow():
    meanflow = example("meanflow")
    model = trained(meanflow, steps=100, below=0.59)  # a velocity of 0: 0.69
    key = jax.random.key(1)
    noise = jax.random.normal(key, (256, meanflow.POINTS, 2))
    assert meanflow.roundness_error(meanflow.sample(model, key)) < 0.95 * meanflow.roundness_error(noise)


def test_llama():
    llama = example("llama")
    model = trained(llama, steps=25, below=3.25)  # the frequencies of characters alone cost 3.42
    texts = ["def train", "class"]
    prompts, lengths = llama.encode_prompts(texts)
    written = llama.generate(model, prompts, lengths, num_tokens=11)

    run = nnx.jit(model)
    for row, text in enumerate(texts):  # without a cache and without the others: all tokens anew for each
        tokens = jnp.pad(llama.encode(text)[None], ((0, 0), (0, 20 - len(text))))
        for place in range(len(text), len(text) + 11):
            tokens = tokens.at[:, place].set(run(tokens)[:, place - 1].argmax(-1))
        np.testing.assert_array_equal(written[row], tokens[0, len(text) : len(text) + 11])
    assert llama.decode(llama.encode("def train")) == "def train"
    assert model.blocks[0].attention.cached_key is None  # what generates has caches of its own


def test_encoder_decoder():
    encoder_decoder = example("encoder_decoder")
    # Who sees the sorted numbers before the next one, but not the source, can at best reach 1.95 (simulated).
    state = trained(encoder_decoder, steps=40, below=1.75)
    source, target, lengths = encoder_decoder.make_batch(jax.random.key(1), 8)
    is_number = jnp.arange(source.shape[1]) < lengths[:, None]
    assert not is_number.all()
    np.testing.assert_array_equal(is_number, source != encoder_decoder.END)
    np.testing.assert_array_equal(is_number, target[:, 1:-1] != encoder_decoder.END)

    run = jax.jit(lambda source: state.apply_fn({"params": state.params}, source, target, lengths))
    logits = run(source)
    np.testing.assert_array_equal(run(jnp.where(is_number, source, 5)), logits)
    longer = jnp.pad(source, ((0, 0), (0, 5)), constant_values=7)
    np.testing.assert_allclose(run(longer), logits, rtol=1e-4, atol=1e-4)
    assert 0 <= encoder_decoder.share_sorted(state, jax.random.key(2)) <= 1
