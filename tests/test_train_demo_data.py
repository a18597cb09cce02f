"""The demo's data: folders, tokenizers, packed documents, texts larger than memory."""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from train_demo import data, documents, packing, run_folder, token_files, vocabulary
from train_demo.errors import UserError
from train_demo.layout import Layout
from train_demo.model import blueprint
from train_demo.settings import Settings
from train_demo.update import State, make_optimizer, make_update, make_validate
from train_demo.vocabulary import Bytes, Characters, Subwords, Writer

ROOT = Path(__file__).parent.parent
TEXTS = {f"{name}.txt": f"{name} says: " + word * 30 for name, word in zip("abcdefghijk", "äbcdefghijk", strict=True)}


@pytest.fixture
def folder(tmp_path):
    """Eleven texts in two folders, and files that are none."""
    for number, (name, text) in enumerate(TEXTS.items()):
        path = tmp_path / "data" / ("sub" if number % 2 else "") / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "data" / "picture.bin").write_bytes(b"\x89PNG\xff\xfe")
    (tmp_path / "data" / "nul.txt").write_bytes(b"a\0b")
    (tmp_path / "data" / "empty.txt").write_bytes(b"")
    (tmp_path / "data" / ".hidden").mkdir()
    (tmp_path / "data" / ".hidden" / "x.txt").write_text("never")
    return tmp_path / "data"


@pytest.fixture(scope="module")
def subwords():
    """A byte-level tokenizer, as GPT-2 has one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXTS.values(), trainer)
    tokenizer.enable_truncation(3)  # a setting of the file that may not cut texts
    return Subwords(tokenizer.to_str().encode())


def texts_of(part, tokens):
    """The documents of a part, from the marks."""
    numbers = part.stretch(0, len(part))
    pieces = np.split(numbers, np.flatnonzero(numbers >= packing.FIRST))
    return [tokens.decode((piece % packing.FIRST).tolist()) for piece in pieces if len(piece)]


# Folders


def test_a_folder_is_its_texts_and_some_of_them_validate(folder):
    text = data.load(str(folder), 8)
    training, validation = texts_of(text.training, text.vocabulary), texts_of(text.validation, text.vocabulary)
    assert sorted(training + validation) == sorted(TEXTS.values())
    assert len(validation) == 1  # a tenth of eleven
    paths = sorted(path for path in folder.rglob("?.txt") if path.read_text() in training)
    assert training == [path.read_text() for path in paths]
    assert (text.documents, text.skipped) == (11, 3)
    assert text.packed


def test_what_validates_depends_on_the_texts_alone(folder):
    before = data.load(str(folder), 8)
    (folder / "sub" / "b.txt").rename(folder / "z.txt")
    after = data.load(str(folder), 8)
    assert texts_of(after.validation, after.vocabulary) == texts_of(before.validation, before.vocabulary)
    assert after.sha256 != before.sha256  # the order is another


def test_equal_documents_stay_on_one_side(folder):
    for name in list(TEXTS)[:5]:
        for copy in range(3):
            path = next(folder.rglob(name))
            (folder / f"{copy}-{name}").write_text(path.read_text())
    text = data.load(str(folder), 8)
    sides = [set(texts_of(part, text.vocabulary)) for part in (text.training, text.validation)]
    assert not sides[0] & sides[1]


@pytest.mark.parametrize(
    ("sizes", "held"), [([100, 900], [100]), ([10, 20, 30], [10]), ([5] * 20, [5, 5]), ([1, 1, 98], [1, 1])]
)
def test_about_a_tenth_is_held_out(sizes, held):
    surveys = [
        documents.Survey(documents.Document(None, ""), size, f"{number:02}", np.zeros(0))
        for number, size in enumerate(sizes)
    ]
    chosen = documents.held_out(surveys)
    assert [each.size for each in surveys if each.sha256 in chosen] == held


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, ["holds no UTF-8 text in its 0 files"]),
        ({"a": b"\xff" * 100}, ["holds no UTF-8 text in its 1 files"]),
        ({"a": b"short", "b": b"too short"}, ["to validate", "at least 9 of each", "--context-length 8"]),
        ({"a": b"same" * 99, "b": b"same" * 99}, ["holds 0 characters to train on"]),
    ],
)
def test_bad_folders(tmp_path, files, words):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as refused:
        data.load(str(tmp_path), 8)
    assert all(word in refused.value.for_command for word in [str(tmp_path), *words]), refused.value


def test_a_folder_with_one_text_is_that_text(tmp_path):
    text = "The quick brown fox jumps over the lazy dog. " * 9
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.txt").write_text(text)
    (tmp_path / "b.txt").write_text(text)
    one, other = (data.load(str(tmp_path / name), 8) for name in ("folder", "b.txt"))
    assert one.sha256 == other.sha256
    assert not one.packed
    np.testing.assert_array_equal(one.training.numbers, other.training.numbers)


# Tokenizers


def test_every_tokenizer_gives_the_text_back(subwords):
    text = "a says: äää √2 “x”\r\n\t😀"
    for tokens in (Characters("".join(sorted(set(text)))), Bytes(), subwords):
        numbers = tokens.encode(text)
        assert numbers.dtype == np.int32
        assert 0 <= numbers.min() <= numbers.max() < len(tokens)
        assert tokens.decode(numbers.tolist()) == text
    assert len(subwords.encode(TEXTS["b.txt"])) < len(TEXTS["b.txt"])


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_a_text_is_shown_as_it_is_written(subwords, size):
    text = "äöü√√“x” 😀😀 says: äää"
    for tokens in (Characters("".join(sorted(set(text)))), Bytes(), subwords):
        numbers = tokens.encode(text).tolist()
        parts = [numbers[start : start + size] for start in range(0, len(numbers), size)]
        writer = Writer(tokens)
        shown = [writer(part, number == len(parts) - 1) for number, part in enumerate(parts)]
        assert "".join(shown) == text
    broken = [226, 97, 226, 136]
    assert Writer(Bytes())(broken, last=True) == Bytes().decode(broken) == "�a�"


def test_bytes_that_are_no_text_are_shown_at_last():
    writer = Writer(Bytes())
    shown = [writer([255] * 32) for _ in range(4)]
    assert sum(map(len, shown)) == 96
    assert writer([97]) == "�" * 32 + "a"


def test_a_missing_package_is_named(monkeypatch, subwords, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(subwords.content)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UserError, match="pip install tokenizers"):
        vocabulary.chosen(str(tmp_path / "tokenizer.json"))


def test_a_configuration_remembers_its_tokenizer(folder, subwords, tmp_path):
    (tmp_path / "my.json").write_bytes(subwords.content)
    out = tmp_path / "run"
    out.mkdir()
    for tokenizer, tokens in (("bytes", Bytes()), (str(tmp_path / "my.json"), subwords)):
        config, _ = run_folder.prepare(out, str(folder), {"context_length": 4}, resume=False, tokenizer=tokenizer)
        run_folder.write_config(out, config)
        assert run_folder.read_config(out).vocabulary == config.vocabulary == tokens
        again, text = run_folder.prepare(out, None, {}, resume=True)
        assert (again, text.vocabulary) == (config, tokens)
        with pytest.raises(UserError, match=r"tokenizer .* there, characters here"):
            run_folder.prepare(out, None, {}, resume=True, tokenizer="characters")
        (out / run_folder.CONFIG).unlink()
    config, _ = run_folder.prepare(out, str(folder), {"context_length": 4}, False, str(tmp_path / "my.json"))
    run_folder.write_config(out, config)
    (out / vocabulary.FILE).write_bytes(subwords.content.replace(b"says", b"sayz"))
    with pytest.raises(UserError, match="damaged"):
        run_folder.read_config(out)


def test_a_folder_that_changed_is_refused(folder, tmp_path):
    out = tmp_path / "run"
    out.mkdir()
    run_folder.write_config(out, run_folder.prepare(out, str(folder), {"context_length": 8}, resume=False)[0])
    (folder / "a.txt").write_text("a says: something else")
    with pytest.raises(UserError, match="data with the sha256"):
        run_folder.prepare(out, None, {}, resume=True)


def test_a_sentence_in_every_tokenizer(folder, subwords):
    for tokens, limit in itertools.product((None, Bytes(), subwords), (1, 2, 5, 64)):
        text = data.load(str(folder), 1, tokens)
        sentence = text.sentence(limit)
        assert sentence
        assert len(sentence) == 1 or len(text.vocabulary.encode(sentence)) <= limit


# Texts larger than memory


@pytest.fixture
def large(monkeypatch, tmp_path):
    """Everything is large, and read in pieces of a few characters."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(documents, "LARGE", 10)
    monkeypatch.setattr(documents, "PIECE", 7)
    return tmp_path / "cache" / "flax_mha" / "tokens"


@pytest.mark.parametrize("tokens", [None, Bytes()])
def test_tokens_in_a_file_are_those_in_memory(monkeypatch, folder, large, tokens):
    (folder / "crlf.txt").write_bytes("\ufeffline\r\nanother\r\n".encode() * 9)
    with monkeypatch.context() as patch:
        patch.setattr(documents, "LARGE", 2**20)
        expected = data.load(str(folder), 8, tokens)
    assert not large.exists()
    for _ in range(2):  # made, then found
        found = data.load(str(folder), 8, tokens)
        for name in ("training", "validation"):
            part, other = getattr(found, name), getattr(expected, name)
            assert isinstance(part.numbers, np.memmap)
            assert part.numbers.dtype == other.numbers.dtype == np.uint8
            np.testing.assert_array_equal(part.numbers, other.numbers)
            np.testing.assert_array_equal(part.starts, other.starts)
        assert (found.sha256, found.vocabulary) == (expected.sha256, expected.vocabulary)
    assert len(list(large.glob("*.uint8"))) == 1
    assert not list(large.glob("*.tmp"))


@pytest.mark.parametrize("harm", ["truncated", "changed", "no seal", "bad seal", "other seal"])
def test_a_damaged_file_of_tokens_is_made_again(folder, large, harm):
    expected = np.array(data.load(str(folder), 8).training.numbers)
    (path,) = large.glob("*.uint8")
    seal = path.with_name(path.name + ".json")
    content = path.read_bytes()
    if harm in ("truncated", "changed"):
        path.unlink()  # the memory map keeps the old one
        path.write_bytes(content[:-9] + (b"" if harm == "truncated" else bytes(9)))
    elif harm == "no seal":
        seal.unlink()
    else:
        seal.write_text("[" if harm == "bad seal" else json.dumps({**json.loads(seal.read_bytes()), "sizes": [1]}))
    np.testing.assert_array_equal(data.load(str(folder), 8).training.numbers, expected)
    assert path.read_bytes() == content


KILLED = """
import os, signal, sys
from train_demo import data, documents

documents.LARGE = 10

def strike(event, details):
    if event == "os.rename" and str(details[1]).endswith(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(strike)
data.load(sys.argv[1], 8)
"""


@pytest.mark.parametrize("moment", [".uint8", ".uint8.json"])
def test_a_killed_preparation_leaves_nothing_half_done(folder, large, moment):
    done = subprocess.run([sys.executable, "-c", KILLED, str(folder), moment], cwd=ROOT, env=dict(os.environ))
    assert done.returncode == -signal.SIGKILL
    assert not list(large.glob("*.uint8.json"))
    text = data.load(str(folder), 8)
    assert sorted(texts_of(text.training, text.vocabulary) + texts_of(text.validation, text.vocabulary)) == sorted(
        TEXTS.values()
    )
    assert not list(large.glob("*.tmp"))


def test_tokens_on_a_full_disk(monkeypatch, folder, large):
    def full(*_):
        raise OSError(28, os.strerror(28))

    with monkeypatch.context() as patch:
        patch.setattr(token_files.os, "fsync", full)
        with pytest.raises(UserError, match=r"No space left.*XDG_CACHE_HOME"):
            data.load(str(folder), 8)
    assert [path.suffix for path in large.iterdir()] == [".lock"]
    assert data.load(str(folder), 8).documents == 11


def test_a_text_that_changes_while_it_is_read(monkeypatch, folder, large):
    def survey(document, count, first=documents.survey):
        found = first(document, count)
        return found._replace(sha256="0" * 64) if document.path.name == "c.txt" else found

    monkeypatch.setattr(documents, "survey", survey)
    with pytest.raises(UserError, match=r"c\.txt changed while it was read"):
        data.load(str(folder), 8)
    assert not list(large.glob("*.uint8*[!k]"))


def test_large_data_says_how_far_it_is(monkeypatch, folder, large):
    monkeypatch.setattr(data, "SILENT_SECONDS", -(10**6))
    said = []
    data.load(str(folder), 8, say=said.append)
    total = sum(map(len, TEXTS.values())) + 3  # with the text that is none
    assert said[-1] == f"made tokens of {total - 3:,} characters"
    assert any(re.fullmatch(r"looked through \d+ characters", line) for line in said)


def test_shards_take_turns(monkeypatch):
    monkeypatch.setattr(data, "SHARD", 100)
    size, every = 730, 5
    seen = [data.shard_of_step(step, size, seed=3, eval_every=every) for step in range(1, 16 * every + 1)]
    turns = seen[::every]
    assert seen == [shard for shard in turns for _ in range(every)]
    assert set(turns[:8]) == set(turns[8:])
    assert len(set(turns[:8])) == 8
    assert turns[:8] != turns[8:] != sorted(turns[8:])
    covered = {place for start, length in turns[:8] for place in range(start, start + length)}
    assert covered == set(range(size))
    assert data.shard_of_step(9, 100, 3, every) == (0, 100)


def test_a_part_marks_the_starts_of_its_documents():
    part = data.Part(np.arange(20, dtype=np.uint8), np.array([0, 7, 8, 19]))
    for start, size in itertools.product(range(20), range(1, 21)):
        stretch = part.stretch(start, size)
        np.testing.assert_array_equal(stretch % packing.FIRST, np.arange(20)[start : start + size])
        marked = np.flatnonzero(stretch >= packing.FIRST) + start
        assert set(marked) == {0, 7, 8, 19} & set(range(start, start + size))


# Packing

SETTINGS = Settings(batch_size=4, context_length=12, layers=2, heads=2, features=16, steps=9, learning_rate=0.1)


@pytest.fixture(scope="module")
def model():
    """Weights of which none is zero, so that whatever reaches across documents shows."""
    structure, shapes = blueprint(11, SETTINGS)
    draws = np.random.default_rng(0)
    return structure, jax.tree.map(lambda leaf: draws.normal(1.0, 0.5, leaf.shape).astype(leaf.dtype) / 4, shapes)


@pytest.fixture(scope="module")
def windows():
    """Four windows of up to three documents, which start at different places."""
    numbers = np.random.default_rng(0).integers(0, 11, (4, 13)).astype(np.int32)
    for row, place in ((0, 0), (0, 5), (1, 1), (1, 12), (2, 6), (2, 7)):
        numbers[row, place] |= packing.FIRST
    return numbers


def test_the_loss_of_packed_documents_is_that_of_each_alone(model, windows):
    structure, params = model
    losses = []
    for window in windows:
        for document in np.split(window, np.flatnonzero(window >= packing.FIRST)):
            numbers = document % packing.FIRST
            if len(numbers) > 1:
                logits = jax.jit(lambda params, x: nnx.merge(structure, params)(x))(params, numbers[None, :-1])[0]
                losses += [-jax.nn.log_softmax(row)[n] for row, n in zip(logits, numbers[1:].tolist(), strict=True)]
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        together = make_validate(structure, packed=True)(params, windows[None])
    np.testing.assert_allclose(together, np.mean(losses), rtol=1e-5)
    assert len(losses) == 4 * 12 - 5


@pytest.mark.parametrize("layout", [Layout(), Layout(accumulate=4, remat=True)])
def test_an_update_predicts_no_first_token(model, windows, layout):
    """Its gradients are those of the validation loss, however the batch is computed."""
    structure, params = model
    optimizer = make_optimizer(SETTINGS)
    text = np.concatenate(list(windows))

    def loss_of(params):
        step_key = jax.random.fold_in(jax.random.key(SETTINGS.seed), 1)
        starts = jax.random.randint(jax.random.split(step_key)[0], (4, 1), 0, len(text) - 12)
        return make_validate(structure, packed=True)(params, jnp.asarray(text)[starts + jnp.arange(13)[None]][None])

    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        expected, gradients = jax.value_and_grad(loss_of)(params)
        _, optimizer_state = optimizer.update(gradients, optimizer.init(params), params)
        update = make_update(structure, SETTINGS, layout=layout, packed=True)
        state, loss = update(State(jax.tree.map(jnp.copy, params), optimizer.init(params)), 1, text)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    # The optimizer's moments hold the gradients before their sizes are divided away.
    for got, want in zip(jax.tree.leaves(state.optimizer), jax.tree.leaves(optimizer_state), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)
