"""The demo's data: folders, characters, packed documents."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from demo_runs import TEXT, assert_refused
from flax import nnx

from train_demo import data
from train_demo.data import Vocabulary
from train_demo.errors import UserError
from train_demo.model import blueprint
from train_demo.settings import Layout, Settings
from train_demo.update import State, make_optimizer, make_update, make_validate

TEXTS = {
    f"{name}.txt": f"{name} says: " + word * 30
    for name, word in zip("abcdefghijk", "äbcdefghijk", strict=True)
}


@pytest.fixture
def folder(tmp_path):
    """Eleven texts in two folders, and other files."""
    for number, (name, text) in enumerate(TEXTS.items()):
        path = tmp_path / "data" / ("sub" if number % 2 else "") / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "data" / ".hidden").mkdir()
    others = {
        "picture.bin": b"\x89PNG\xff\xfe",
        "nul.txt": b"a\0b",
        "empty.txt": b"",
        ".hidden/x.txt": b"never",
    }
    for name, content in others.items():
        (tmp_path / "data" / name).write_bytes(content)
    return tmp_path / "data"


def texts_of(part, tokens):
    """The documents of a part, from the marks."""
    pieces = np.split(part, np.flatnonzero(part >= data.FIRST))
    return [
        tokens.decode((piece % data.FIRST).tolist()) for piece in pieces if len(piece)
    ]


@pytest.mark.core
def test_a_folder_is_split_into_texts_for_training_and_validation(folder):
    text = data.load(str(folder), 8)
    training = texts_of(text.training, text.vocabulary)
    validation = texts_of(text.validation, text.vocabulary)
    assert sorted(training + validation) == sorted(TEXTS.values())
    assert len(validation) == 1  # a tenth of eleven
    paths = sorted(
        path for path in folder.rglob("?.txt") if path.read_text() in training
    )
    assert training == [path.read_text() for path in paths]
    assert (text.documents, text.skipped) == (11, 3)
    assert text.packed


def test_the_validation_texts_depend_only_on_the_texts(folder):
    before = data.load(str(folder), 8)
    (folder / "sub" / "b.txt").rename(folder / "z.txt")
    after = data.load(str(folder), 8)
    assert texts_of(after.validation, after.vocabulary) == texts_of(
        before.validation, before.vocabulary
    )
    assert after.sha256 != before.sha256  # another order


def test_equal_texts_are_all_for_training_or_all_for_validation(folder):
    for name, text in TEXTS.items():
        (folder / f"copy-{name}").write_text(text)
    text = data.load(str(folder), 8)
    training = texts_of(text.training, text.vocabulary)
    validation = texts_of(text.validation, text.vocabulary)
    assert not set(training) & set(validation)


@pytest.mark.parametrize(
    ("sizes", "held"),
    [([100, 900], [100]), ([100, 200, 300], [100]), ([50] * 20, [50, 50])],
)
def test_at_most_a_tenth_or_one_document_is_held_out(tmp_path, sizes, held):
    for number, size in enumerate(sizes):
        (tmp_path / str(number)).write_text(chr(97 + number) * size)
    text = data.load(str(tmp_path), 8)
    assert [*map(len, texts_of(text.validation, text.vocabulary))] == held


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"a": b"\xff" * 100}, ["contains no UTF-8 text (1 files)"]),
        (
            {"a": b"short", "b": b"too short"},
            ["for validation", "at least 10 and 9", "--context-length 8"],
        ),
        ({"a": b"same" * 99, "b": b"same" * 99}, ["has 0 characters for training"]),
    ],
)
def test_folders_without_enough_text_are_refused(tmp_path, files, words):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    assert_refused([str(tmp_path), *words], data.load, str(tmp_path), 8)


def test_a_folder_with_one_text_equals_that_text(tmp_path):
    (tmp_path / "folder").mkdir()
    for name in ("folder/a.txt", "b.txt"):
        (tmp_path / name).write_text(TEXT)
    one, other = (data.load(str(tmp_path / name), 8) for name in ("folder", "b.txt"))
    assert one.sha256 == other.sha256
    assert not one.packed
    np.testing.assert_array_equal(one.training, other.training)


def test_characters_survive_encoding_and_others_are_refused():
    text = "a says: äää √2 “x”\r\n\t😀"
    tokens = Vocabulary("".join(sorted(set(text))))
    numbers = tokens.encode(text)
    assert numbers.dtype == np.int32
    assert 0 <= numbers.min() <= numbers.max() < len(tokens)
    assert tokens.decode(numbers.tolist()) == text
    with pytest.raises(UserError, match=r"does not contain 'b' '\\udcff': remove"):
        tokens.encode("ab\udcff")


@pytest.mark.parametrize("limit", [1, 2, 5, 64])
def test_a_sentence_fits_into_a_window(folder, limit):
    assert 1 <= len(data.load(str(folder), 1).sentence(limit)) <= limit


def test_the_validation_windows_predict_every_character():
    windows = data.validation_windows(np.arange(1003), 8)
    assert windows.shape == (4, data.WINDOWS, 9)
    assert set(windows[..., 1:].ravel()) == set(range(1, 1003))
    assert (np.diff(windows) == 1).all()


@pytest.mark.core
def test_the_last_tenth_of_a_text_is_for_validation(tmp_path):
    (tmp_path / "text").write_text(TEXT)
    loaded = data.load(str(tmp_path / "text"), 8)
    training = loaded.vocabulary.decode(loaded.training)
    validation = loaded.vocabulary.decode(loaded.validation)
    assert training + validation == TEXT
    assert len(validation) == len(TEXT) // 10


def test_the_python_documentation_is_the_default():
    loaded = data.load(None, 64)
    assert len(loaded.training) + len(loaded.validation) > 400_000
    assert len(loaded.sentence(64)) > 20


pytest_plugins = ["demo_fixtures"]
SETTINGS = Settings(
    batch_size=4,
    context_length=12,
    layers=1,
    heads=2,
    features=16,
    steps=9,
    learning_rate=0.1,
)


@pytest.fixture(scope="module")
def model():
    """Weights that are not zero, so that attention across documents would show."""
    structure, shapes = blueprint(11, SETTINGS)
    draws = np.random.default_rng(0)
    return structure, jax.tree.map(
        lambda leaf: draws.normal(1.0, 0.5, leaf.shape).astype(leaf.dtype) / 4, shapes
    )


@pytest.fixture(scope="module")
def windows():
    """Four windows of up to three documents that start at different places."""
    numbers = np.random.default_rng(0).integers(0, 11, (4, 13)).astype(np.int32)
    for row, place in ((0, 0), (0, 5), (1, 1), (1, 12), (2, 6), (2, 7)):
        numbers[row, place] |= data.FIRST
    return numbers


@pytest.mark.usefixtures("rules_of_users")
def test_packed_documents_have_the_losses_of_separate_ones(model, windows):
    structure, params = model
    losses = []
    run = jax.jit(lambda params, x: jax.nn.log_softmax(nnx.merge(structure, params)(x)))
    for window in windows:
        for document in np.split(window, np.flatnonzero(window >= data.FIRST)):
            numbers = document % data.FIRST
            # The model is causal, so all can be repeated to one length and share a
            # program.
            logits = run(params, np.resize(numbers, (1, 12)))[0]
            # Nothing precedes the first token of a document, so none predicts it.
            targets = numbers[1:].tolist()
            losses += [-row[n] for row, n in zip(logits, targets, strict=False)]
    together = make_validate(structure, packed=True)(params, windows[None])
    np.testing.assert_allclose(together, np.mean(losses), rtol=1e-5)
    # Five documents begin within a window.
    assert len(losses) == 4 * 12 - 5


@pytest.mark.usefixtures("rules_of_users")
def test_an_update_predicts_no_first_token(model, windows):
    """Its gradients equal those of the validation loss with any layout."""
    structure, params = model
    optimizer = make_optimizer(SETTINGS)
    text = np.concatenate(list(windows))

    @jax.jit
    def update_by_validation(params, start):
        step_key = jax.random.fold_in(jax.random.key(SETTINGS.seed), 1)
        # The windows that the update draws for its first step.
        key_of_windows, _ = jax.random.split(step_key)
        starts = jax.random.randint(key_of_windows, (4, 1), 0, len(text) - 12)
        drawn = jnp.asarray(text)[starts + jnp.arange(13)[None]][None]
        validate = make_validate(structure, packed=True)
        loss, gradients = jax.value_and_grad(validate)(params, drawn)
        _, state = optimizer.update(gradients, start, params)
        return loss, state

    start = jax.jit(optimizer.init)(params)
    expected, optimizer_state = update_by_validation(params, start)
    for layout in (Layout(), Layout(accumulate=4, remat=True)):
        update = jax.jit(make_update(structure, SETTINGS, layout=layout, packed=True))
        state, loss = update(State(params, start), 1, text)
        np.testing.assert_allclose(loss, expected, rtol=1e-5)
        # The optimizer's moments hold the gradients before their sizes are divided
        # away.
        near = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
        jax.tree.map(near, state.optimizer, optimizer_state)
