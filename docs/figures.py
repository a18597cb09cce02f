"""Compares the counts and figures in the pages' sentences with their sources: `python
docs/figures.py`.

People write the sentences, so that they are readable in Markdown. A `Figure` repeats
the words around its numbers and names where these come from. The script prints what the
pages say and what the sources say now, and fails if one differs from the other.

Tables need none of this: `write_pages.py` writes them.
"""

import functools
import json
import math
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path[:0] = [str(DOCS), str(ROOT)]

import jax  # noqa: E402
import pictures  # noqa: E402
from flax import nnx  # noqa: E402

from flax_mha import KVCache, convert, recipes  # noqa: E402
from flax_mha._src import plan  # noqa: E402
from flax_mha._src.engines.kernels.cudnn import engine as cudnn  # noqa: E402
from train_demo import compare, data, metrics, training, update  # noqa: E402
from train_demo.attention import window_of  # noqa: E402
from train_demo.model import Transformer, blueprint  # noqa: E402
from train_demo.settings import ATTENTIONS, LEARNING_RATES, Layout, Settings  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"


class Figure(NamedTuple):
    """Numbers in a sentence of one or several pages.

    Attributes:
      pages: Their paths, separated by spaces.
      words: Some words of the sentence, with `{}` in place of each number, and `{name}`
        of a name.
      source: Where the numbers come from: a file.
      now: Returns them as the page should show them.
    """

    pages: str
    words: str
    source: str
    now: Callable[[], tuple[Any, ...]]


def stated(figure: Figure, page: str) -> list[tuple[str, ...]]:
    """What a page says: the numbers in each place where it has the figure's words."""
    places = pattern(figure.words).finditer(by_hand(page))
    return [tuple(map(on_one_line, found.groups())) for found in places]


def current(figure: Figure) -> tuple[str, ...]:
    """What the page should say."""
    return tuple(str(number) for number in figure.now())


def on_one_line(text: str) -> str:
    """The words of a text with single spaces."""
    return " ".join(text.split())


def unseen(page: str) -> list[str]:
    """Lists the numbers of a page, with what stands around them, that belong to no
    figure and are not in `FIXED`.

    0, 1 and code are left out.
    """
    text = by_hand(page)
    known = [figure.words for figure in FIGURES if page in figure.pages.split()]
    for words in [*known, *FIXED[page]]:
        text = pattern(words).sub("...", text)
    text = re.sub(r"```.*?```|`[^`]*`|^ {4}.*?$|\]\(.*?\)", "", text, flags=re.S | re.M)
    numbers = re.finditer(r"(?<![\w.,#-])(?!(?:0|1)\b(?![.,]\d))\d[\d.,-]*", text)
    return [text[max(0, x.start() - 30) : x.end() + 30] for x in numbers]


def by_hand(page: str) -> str:
    """The text of a page without the parts that `write_pages.py` writes."""
    text = (ROOT / page).read_text()
    return re.sub(r"<!-- begin: .*?<!-- end -->", "", text, flags=re.DOTALL)


def pattern(words: str) -> re.Pattern[str]:
    """Finds `words`, also across line breaks; `{}` stands for any number, and `{name}`
    for a name, which may have spaces.
    """
    escaped = re.escape(words).replace(r"\ ", r"\s+")
    escaped = escaped.replace(r"\{\}", r"(\S+)").replace(r"\{name\}", r"(.{,40}?)")
    return re.compile(escaped, re.DOTALL)


# Results of benchmarks.


@functools.cache
def report(name: str) -> dict[str, Any]:
    """What a benchmark wrote."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def rows(name: str, **where: Any) -> list[dict[str, Any]]:
    """The rows with these values."""
    return [row for row in report(name)["rows"] if where.items() <= row.items()]


def row(name: str, **where: Any) -> dict[str, Any]:
    """The one row with these values."""
    [found] = rows(name, **where)
    return found


def measured_on(name: str) -> tuple[str, str, str]:
    """Number of cores, machine, and day."""
    found = report(name)
    return found["cores"], found["device"], found["date"][:10]


def between(ratios: list[float], digits: str = ".1f") -> tuple[str, str]:
    """The least and the largest."""
    return f"{min(ratios):{digits}}", f"{max(ratios):{digits}}"


def rounded(number: float) -> str:
    """With two digits, as in the tables."""
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


# The columns of the module's benchmarks.
OURS = {"implementation": "flax_mha.MultiHeadAttention"}
FLAX = {"implementation": "flax.nnx.MultiHeadAttention"}
TORCH = {"implementation": "torch.nn.MultiheadAttention"}


def curves_sizes() -> tuple[str, str]:
    """Features and heads of the measured layer."""
    text = (ROOT / "benchmarks" / "curves.py").read_text()
    return re.search(r"module\.SIZES = .*\(1, (\d+), (\d+)\)", text).groups()


def curves_compile_times() -> tuple[str, ...]:
    """Of ours from, to; of Flax's at most."""
    ours = [row["compile_s"] for row in rows("curves-cpu", **OURS)]
    flax = [row["compile_s"] for row in rows("curves-cpu", **FLAX) if "ms" in row]
    return *between(ours), f"{max(flax):.1f}"


def flax_gib(length: int) -> tuple[int, str]:
    """The length in units of 1024, and the GiB that Flax would have needed."""
    drawn = pictures.curves()
    [flax] = [x for x in drawn if x["name"] == "Flax" and x["length"] == length]
    return length // 1024, rounded(flax["needs"] / 1024)


def ratios(name: str, ours: str, peer: str, **where: Any) -> list[float]:
    """Times of `ours` as multiples of a peer's, in every case of a benchmark."""
    found = []
    for mine in rows(name, implementation=ours, **where):
        case = {key: mine[key] for key in ("shape", "mask", "pass")}
        found.append(mine["ms"] / row(name, implementation=peer, **case)["ms"])
    return found


def h200_fused() -> tuple[str, str]:
    """Times with cuDNN, as multiples of PyTorch's, from, to."""
    return between(ratios("attention-h200", "flax_mha automatic", "torch SDPA"))


def h200_plain() -> tuple[str, str]:
    """Times of "blockwise", as multiples of PyTorch's, from, to."""
    found = ratios("attention-h200", "flax_mha blockwise", "torch SDPA")
    return rounded(min(found)), rounded(max(found))


def h200_all_scores() -> tuple[str, ...]:
    """Milliseconds with all scores at once, and tile by tile."""
    call = {"shape": "8, 2048, 32, 64", "mask": "causal", "pass": "forward"}
    at_once = row("attention-dense-h200", **call, implementation="flax_mha xla")
    tiles = row("attention-h200", **call, implementation="flax_mha blockwise")
    return rounded(at_once["ms"]), rounded(tiles["ms"])


def h200_guarded() -> tuple[str]:
    """The longest time of a causal call, as a multiple of the bare kernel's."""
    name = "attention-h200"
    found = ratios(name, "flax_mha automatic", "jax.nn cudnn", mask="causal")
    return (f"{max(found):.1f}",)


def decode_sizes(name: str) -> tuple[Any, ...]:
    """Sequences, length of the cache, heads and their size."""
    [sizes] = {(row["batch"], row["cache"]) for row in report(name)["rows"]}
    return *sizes, *constants("decode", "HEADS", "SIZE")


def derivative_times() -> tuple[str, ...]:
    """Times of a jvp and of a Hessian-vector product, as multiples of the forward
    pass's.
    """
    found = []
    for name in ("`jax.jvp`", "Hessian-vector product (jvp-of-grad)"):
        cells = rows("derivatives-cpu", implementation=name, by="blockwise")
        found += between([row["to_forward"] for row in cells])
    return tuple(found)


def constants(benchmark: str, *names: str) -> tuple[str, ...]:
    """Numbers that the script of a benchmark defines."""
    script = text_of(f"benchmarks/{benchmark}.py")
    return tuple(re.search(rf"^{name} = (\d+)$", script, re.M)[1] for name in names)


def short_sizes() -> tuple[int, ...]:
    """Lengths and head sizes, from, to."""
    found = report("short-cpu")["rows"]
    lengths = [row["length"] for row in found]
    sizes = [row["head_dim"] for row in found]
    return min(lengths), max(lengths), min(sizes), max(sizes)


def short_ratios() -> tuple[str, str]:
    """Times of short calls as multiples of those of `jax.nn`, from, to."""
    found = rows("short-cpu", implementation="flax_mha automatic")
    return between([row["to_jax_nn"] for row in found], ".2f")


# The demo, and its race with PyTorch.


@functools.cache
def demo_parameters() -> tuple[str]:
    """Of a model for as many characters as the page's run found."""
    page = (DOCS / "training.md").read_text()
    characters = int(re.search(r"(\d+) of them distinct", page)[1])
    model = nnx.eval_shape(
        lambda: Transformer(characters, Settings(), Layout(), rngs=nnx.Rngs(0))
    )
    sizes = [math.prod(x.shape) for x in jax.tree.leaves(nnx.state(model, nnx.Param))]
    return (f"{sum(sizes):,}",)


def demo_kind(kind: str) -> tuple[str, ...]:
    """A line of the comparison, whose loss and milliseconds were measured once."""
    page = (DOCS / "training.md").read_text()
    characters = int(re.search(r"(\d+) of them distinct", page)[1])
    loss, ms = re.search(rf"`{kind}` \| [\d,]+ \| (\S+) \| (\S+) \|", page).groups()
    settings = Settings(attention=kind, dtype="float32")
    structure, params = blueprint(characters, settings)
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    cache = compare.cache_bytes(structure, params, compare.text_length(settings))
    return f"{size:,}", loss, ms, f"{cache:,}"


def demo_text() -> tuple[str, int]:
    """Characters of the text whose cache is counted, and their contexts."""
    return f"{compare.text_length(Settings()):,}", compare.CONTEXTS


def demo_slots() -> tuple[int, int, int]:
    """Slots of the ring of `window`; the window and the slots of `full`."""
    windows = []
    slots = []
    for kind in ("window", "full"):
        window = window_of(Settings(attention=kind))
        cache = KVCache.create(1, 2**20, 1, 2, "float32", window=window - 1)
        windows.append(window)
        slots.append(cache.length)
    return slots[0], windows[1], slots[1]


def race(name: str) -> tuple[str, ...]:
    """A line of the table in docs/training.md."""
    found = row("training-cpu", implementation=name)
    is_ours = name.startswith("ours")
    seconds = found["passed" if is_ours else "seconds"]
    return (
        f"{found['parameters']:,}",
        found["steps" if is_ours else "twin_steps"],
        f"{found['seconds']:.0f}",
        f"{found['loss']:.3f}",
        rounded(seconds),
    )


def race_conditions() -> tuple[str, ...]:
    """Machine, versions of JAX and PyTorch, day."""
    versions = report("training-cpu")["versions"]
    torch = ".".join(versions["torch"].split(".")[:2])
    cores, machine, day = measured_on("training-cpu")
    assert cores == 2  # a word on the page
    return machine, versions["jax"], torch, day


# Counts.


def text_of(path: str) -> str:
    """The text of a file of the repository."""
    return (ROOT / path).read_text()


def first_number(path: str, words: str) -> tuple[str, ...]:
    """The numbers of another file, which states them with these words."""
    return pattern(words).search(text_of(path)).groups()


def described() -> tuple[str]:
    """Families whose layers were compared with Transformers."""
    return first_number("tests/hf_families.md", "generate text, {} are described")


def decoded() -> tuple[int]:
    """Rows of the table of whole models."""
    return (len(re.findall(r"^\| `", text_of("tests/hf_decoders.md"), re.MULTILINE)),)


def ported() -> tuple[int]:
    """Programs in the list of docs/programs.md."""
    [listed] = re.findall(
        r"^## What ran\n(.*?)^(?:##|\Z)", text_of("docs/programs.md"), re.S | re.M
    )
    programs = 0
    for line in re.findall(r"^\| .* \| (.*) \|$", listed, re.MULTILINE)[1:]:
        programs += len(line.split(", "))
    return (programs,)


def scripts() -> tuple[str]:
    """Of the ports, as a word."""
    words = {6: "six", 7: "seven", 8: "eight", 9: "nine"}
    files = list((ROOT / "examples" / "ports").glob("*.py"))
    return (words[len(files) - 1],)  # without compare.py, which all use


def number_of_recipes() -> tuple[int]:
    """Without `combine` and the module of `t5_bias`."""
    return (len({*recipes.__all__} - {"combine", "RelativeBias"}),)


def in_8_bits(head_size: int) -> str:
    """Bytes of a cache in 8 bits, in percent of those in bfloat16."""

    def size(dtype: str) -> int:
        cache = jax.eval_shape(lambda: KVCache.create(1, 8, 1, head_size, dtype))
        arrays = (cache.key, cache.value, cache.scale)
        return sum(x.size * x.dtype.itemsize for x in arrays if x is not None)

    return f"{size('int8') / size('bfloat16'):.0%}"


def of_plan() -> dict[str, Any]:
    """Limits of implementations, in the units of the pages."""
    return {
        "tokens": math.isqrt(plan.MAX_SCORES_DENSE),
        "scores": f"{plan.MAX_SCORES_DENSE:,}",
        "log2": plan.MAX_SCORES_GPU.bit_length() - 1,
        "gib": 4 * plan.MAX_SCORES_GPU // 2**30,  # of float32
        "log2_bias": cudnn.MAX_BIAS.bit_length() - 1,
        "mib_bias": 2 * cudnn.MAX_BIAS // 2**20,  # of bfloat16
        "log2_lowest": int(math.log2(-cudnn.LOWEST)),
        "far": int(cudnn.FAR),
        "log2_new": cudnn.MIN_SCORES.bit_length() - 1,
    }


def limits(*names: str) -> Callable[[], tuple[Any, ...]]:
    """The limits of `of_plan` with these names, when they are needed."""
    return lambda: tuple(of_plan()[name] for name in names)


def versions() -> tuple[str, ...]:
    """From the oldest to the newest Python, JAX and Flax that tests ran with."""
    project = tomllib.loads(text_of("pyproject.toml"))["project"]
    pythons = re.findall(r":: (3\.\d+)'", str(project["classifiers"]))
    lowest = dict(x.split(">=") for x in project["dependencies"])
    newest = pattern("jax {}, flax {}, tokamax").search(text_of(CONFORMANCE))
    jax_newest = ".".join(newest[1].split(".")[:3])
    return pythons[0], pythons[-1], lowest["jax"], jax_newest, lowest["flax"], newest[2]


def version() -> str:
    """Of this package."""
    return tomllib.loads(text_of("pyproject.toml"))["project"]["version"]


def compared_versions() -> tuple[str, ...]:
    """The row of versions in docs/comparison.md, of what ran."""
    ran = "jax {}, flax {}, tokamax {}, on cpu"
    newest = pattern(ran).search(text_of(CONFORMANCE))
    [torch] = re.findall(r'"torch==(.+)"', text_of("pyproject.toml"))
    return version(), newest[2], newest[1], torch, newest[3]


CONFORMANCE = "benchmarks/results/conformance.md"
CURVES = "benchmarks/results/curves-cpu.json"
CUDNN = "flax_mha/_src/engines/kernels/cudnn/engine.py"
H200 = "benchmarks/results/attention-h200.json"
RACE = "benchmarks/results/training-cpu.json"
PLAN = "flax_mha/_src/plan.py"
SETTINGS = "train_demo/settings.py"
DESCRIBED = "tests/hf_families.md"
DECODED = "tests/hf_decoders.md"
START = "README.md docs/index.md"

FIGURES = [
    # The picture of time and memory, and one layer.
    Figure(
        START,
        "{} features, {} heads, float32",
        "benchmarks/curves.py",
        curves_sizes,
    ),
    Figure(
        "docs/performance.md",
        "with {} features and {} heads",
        "benchmarks/curves.py",
        curves_sizes,
    ),
    Figure(
        START,
        "on {} cores of an {name}, {}.",
        CURVES,
        lambda: measured_on("curves-cpu"),
    ),
    Figure(
        START + " docs/performance.md",
        "At {}k tokens, Flax",
        CURVES,
        lambda: flax_gib(16384)[:1],
    ),
    Figure(
        START + " docs/performance.md",
        "needs {} GiB.",
        CURVES,
        lambda: flax_gib(16384)[1:],
    ),
    Figure(
        "README.md",
        "compiles in {} to {} s (Flax: at most {} s)",
        CURVES,
        curves_compile_times,
    ),
    Figure(
        "README.md",
        "{} to {} times as long as those of `jax.nn` on a CPU",
        "benchmarks/results/short-cpu.json",
        short_ratios,
    ),
    Figure(
        "README.md",
        "Calls of {} to {} tokens",
        "benchmarks/results/short-cpu.json",
        lambda: short_sizes()[:2],
    ),
    # Versions.
    Figure(
        "README.md",
        "Python {} to {}, jax {} to {} and flax {} to {}.",
        f"pyproject.toml, {CONFORMANCE}",
        versions,
    ),
    Figure(
        "README.md", "Status: {}, unreleased", "pyproject.toml", lambda: (version(),)
    ),
    Figure(
        "CHANGELOG.md", "be version {}, the", "pyproject.toml", lambda: (version(),)
    ),
    Figure(
        "docs/comparison.md",
        "| version | {} | {} | {} | {} for CPUs, *2.14.1* | {} |",
        f"pyproject.toml, {CONFORMANCE}",
        compared_versions,
    ),
    # Families of models.
    Figure(START, "[{} decoder families]", DESCRIBED, described),
    Figure("docs/comparison.md", "layers of [{} families]", DESCRIBED, described),
    Figure("docs/from-pytorch.md", "the {} supported families", DESCRIBED, described),
    Figure("CHANGELOG.md", " {} families of decoders", DESCRIBED, described),
    Figure("README.md", "decodes whole models of {} families", DECODED, decoded),
    Figure("docs/index.md", "whole models of [{} families]", DECODED, decoded),
    Figure("docs/comparison.md", "whole models of {} in", DECODED, decoded),
    Figure("CHANGELOG.md", "whole models of {} Hugging", DECODED, decoded),
    Figure(
        "docs/whole-model-decoding.md",
        "the models in Transformers {}. The",
        DESCRIBED,
        lambda: first_number(DESCRIBED, "of Transformers {} that"),
    ),
    # Other counts.
    Figure("README.md", "{} public programs gave", "docs/programs.md", ported),
    Figure("README.md", "scripts to check {}]", "examples/ports", scripts),
    Figure("docs/programs.md", "compare {} of the programs", "examples/ports", scripts),
    Figure("docs/programs.md", "only for the {} above", "examples/ports", scripts),
    Figure(
        "CHANGELOG.md",
        "`recipes`: {} kinds of",
        "flax_mha/recipes.py",
        number_of_recipes,
    ),
    Figure(
        "CHANGELOG.md",
        "between Flax and {} layouts",
        "convert.LAYOUTS",
        lambda: (len(convert.LAYOUTS),),
    ),
    Figure(
        "CHANGELOG.md docs/inference.md",
        " {} of the memory of",
        "KVCache",
        lambda: (in_8_bits(64),),
    ),
    Figure(
        "docs/inference.md",
        "at head size 128, {}.",
        "KVCache",
        lambda: (in_8_bits(128),),
    ),
    # Limits of implementations.
    Figure("README.md", "above {} tokens; on GPUs", PLAN, limits("tokens")),
    Figure("README.md", "above {} GiB of scores", PLAN, limits("gib")),
    Figure(
        "docs/index.md docs/comparison.md",
        "up to {} x {} scores per head",
        PLAN,
        limits("tokens", "tokens"),
    ),
    Figure("docs/index.md docs/comparison.md", "up to {} GiB", PLAN, limits("gib")),
    Figure(
        "docs/implementations.md",
        "up to {} scores per head; on GPUs, up to 2^{} scores",
        PLAN,
        limits("scores", "log2"),
    ),
    Figure(
        "docs/implementations.md",
        "Up to {} x {} scores per head",
        PLAN,
        limits("tokens", "tokens"),
    ),
    Figure(
        "docs/implementations.md",
        "up to 2^{} scores over all heads, which is {} GiB",
        PLAN,
        limits("log2", "gib"),
    ),
    Figure(
        "docs/implementations.md",
        "at most 2^{} numbers ({} MiB)",
        CUDNN,
        limits("log2_bias", "mib_bias"),
    ),
    Figure(
        "docs/implementations.md",
        "Other entries are at least -2^{},",
        CUDNN,
        limits("log2_lowest"),
    ),
    Figure(
        "docs/implementations.md",
        "visible keys is below -{} or above {},",
        CUDNN,
        limits("far", "far"),
    ),
    Figure(
        "docs/implementations.md",
        "We chose the limit of 2^{} scores",
        PLAN,
        limits("log2"),
    ),
    Figure(
        "docs/implementations.md",
        "some kinds](#masks-on-a-gpu) only from T x S = 2^{} on",
        CUDNN,
        limits("log2_new"),
    ),
    Figure(
        "docs/implementations.md",
        "use cuDNN from T x S = 2^{} on",
        CUDNN,
        limits("log2_new"),
    ),
    Figure(
        "docs/implementations.md",
        "on an H200, plain JAX took {} to {} times as long",
        H200,
        h200_plain,
    ),
    Figure("CHANGELOG.md", "above {} GiB of scores", PLAN, limits("gib")),
    # The picture of tiles.
    Figure(
        "docs/how-it-works.md",
        "of {} tiles, {} are full, {} partial and {} empty",
        "docs/pictures.py",
        pictures.tile_counts,
    ),
    # One H200.
    Figure(
        "README.md",
        "attention took {} to {} times as long as",
        H200,
        h200_fused,
    ),
    Figure("README.md", "and {} to {} times as long in plain JAX", H200, h200_plain),
    Figure(
        "docs/implementations.md",
        'on an H200 took {} ms with `"xla"` and {} ms with `"blockwise"`',
        f"{H200}, attention-dense-h200.json",
        h200_all_scores,
    ),
    Figure(
        "docs/performance.md",
        "takes up to {} times as long as the kernel alone",
        H200,
        h200_guarded,
    ),
    Figure(
        "docs/performance.md",
        '"blockwise" takes {} to {} times as long',
        H200,
        h200_plain,
    ),
    # What benchmarks measured.
    Figure(
        "docs/performance.md",
        "for {} sequences and a cache of {} tokens with {} heads of size {}, in",
        "benchmarks/results/decode-h200.json, decode.py",
        lambda: decode_sizes("decode-h200"),
    ),
    Figure(
        "docs/performance.md",
        "without fused kernels](../benchmarks/results/compiled-h200-unfused.md) ({})",
        "benchmarks/results/compiled-h200-unfused.md",
        lambda: re.findall(
            r"^(2\d+-\d+-\d+)",
            text_of("benchmarks/results/compiled-h200-unfused.md"),
            re.M,
        ),
    ),
    Figure(
        "docs/derivatives.md",
        "a jvp took {} to {} times as long as the forward pass, and a Hessian-vector "
        "product {} to {} times as long",
        "benchmarks/results/derivatives-cpu.json",
        derivative_times,
    ),
    Figure(
        "docs/derivatives.md",
        "One causal head with {} features",
        "benchmarks/derivatives.py",
        lambda: constants("derivatives", "HEAD_DIM"),
    ),
    # The demo.
    Figure("docs/training.md", "{} parameters on 1 x", SETTINGS, demo_parameters),
    Figure(
        "docs/training.md",
        "the model generates {} characters",
        "train_demo/training.py",
        lambda: (training.SAMPLE,),
    ),
    Figure(
        "docs/training.md",
        "reaches {} times the loss",
        "train_demo/metrics.py",
        lambda: (metrics.DIVERGED,),
    ),
    Figure(
        "docs/training.md",
        "| {}: adds the embeddings",
        SETTINGS,
        lambda: (Settings.token_shift,),
    ),
    Figure(
        "docs/training.md",
        "rate rises over {} steps",
        "train_demo/update.py",
        lambda: (update.WARM_UP,),
    ),
    Figure(
        "docs/training.md",
        "The default is {} for Muon and {} for AdamW",
        SETTINGS,
        lambda: (LEARNING_RATES["muon"], LEARNING_RATES["adamw"]),
    ),
    Figure(
        "docs/training.md",
        "bytes of cache for {} characters",
        "train_demo/compare.py",
        lambda: demo_text()[:1],
    ),
    Figure(
        "docs/training.md",
        "as long as {} contexts",
        "train_demo/compare.py",
        lambda: demo_text()[1:],
    ),
    Figure(
        "docs/training.md",
        "the ring holds {}; in a layer of `full`, they attend to {} and it holds {}.",
        "train_demo/attention.py",
        demo_slots,
    ),
    *(
        Figure(
            "docs/training.md",
            f"`{kind}` | {{}} | {{}} | {{}} | {{}} |",
            "train_demo/compare.py",
            functools.partial(demo_kind, kind),
        )
        for kind in ATTENTIONS
    ),
    Figure(
        "docs/training.md",
        "more than {} parts or into a number of parts that does not divide {}.",
        "train_demo/data.py",
        lambda: (data.WINDOWS, data.WINDOWS),
    ),
    Figure(
        "docs/training.md",
        "run on two {name} cores with jax {} and torch {}, measured on {}. The text,",
        RACE,
        race_conditions,
    ),
    Figure(
        "docs/training.md",
        "used for tuning, is {} MB",
        RACE,
        lambda: (f"{report('training-cpu')['rows'][0]['bytes'] / 1e6:.1f}",),
    ),
    Figure(
        "docs/training.md",
        "PyTorch | {} | {} | {} | {} | {} s |",
        RACE,
        lambda: race("nanoGPT's recipe, PyTorch"),
    ),
    *(
        Figure(
            "docs/training.md",
            f"{words} | {{}} | {{}} | {{}} | {{}} | {{}} s |",
            RACE,
            functools.partial(race, name),
        )
        for words, name in (
            ("the demo, first run", "ours, first run"),
            ("with cached programs", "ours, again"),
            ("with Flax's attention", "ours, Flax's attention"),
        )
    ),
]

# What is no figure, by page: names, definitions, and what was seen once, with its date
# and machine on the page. These pages may have no other numbers.
FIXED: dict[str, list[str]] = {
    "README.md": [
        "Apache-2.0",
        "8-bit storage",
    ],
    "CHANGELOG.md": [
        "DeepSeek V3.2, GLM 5)",
        "(HY 4, A.X K2)",
        "(Gemma 3n, Gemma 4)",
        "Caches in 8 bits",
        "head size 64",
        "Llama 3,",
        "bias of -1e9",
    ],
    "docs/derivatives.md": ["arxiv.org/abs/2505.13447"],
    "docs/index.md": [],
    "docs/from-flax.md": ["Llama 3,", "Gemma 2,", "Gemma 3n", "Gemma 4"],
    "docs/from-pytorch.md": [
        "12 heads with 64 features",
        "8 heads with 96 features",
    ],
    "docs/implementations.md": [
        # Counted in the file that the page links there.
        "launches about 25 kernels",
        "with 2^30 scores",
        # Of cuDNN's kernels: CUDA's names of devices, and NVIDIA's sources.
        "It costs 2 bytes per score",
        "a multiple of 8) |",
        "| A100 | 8.0 | cuDNN | cuDNN, without a bias | plain JAX | up to 128 |",
        "| RTX 4090 | 8.9 | cuDNN | cuDNN, without a bias | plain JAX | up to 128 |",
        "| H100, H200 | 9.0 | cuDNN | cuDNN, without a bias | plain JAX | up to 256 |",
        "| B200 | 10.0 | cuDNN; not for one query with cuDNN 9.19 or newer | the same "
        "| plain JAX | up to 128 |",
        "| RTX 5090 | 12.0 | cuDNN 9.18.1 or newer | the same, without a bias | plain "
        "JAX | up to 128 |",
        "Before cuDNN 9.10.2,",
        "for [16 of them]",
        # What benchmarks/on_device.py does.
        "at 1024 tokens of context in bfloat16, times",
        # What ran on an H200, once.
        "(2026-11-28, jax 0.11.2, cuDNN 9.19.0)",
        "926 of the core tests",
    ],
    "docs/performance.md": [
        "a causal layer of 1024 tokens",
        "[2 x 2]",
        "[4 x 4]",
    ],
}


def problems() -> Iterator[str]:
    """Says where pages and sources differ, and which numbers belong to neither list."""
    for figure in FIGURES:
        now = current(figure)
        for page in figure.pages.split():
            found = stated(figure, page)
            if not found:
                yield f"{page} has no words {figure.words!r}"
            for numbers in found:
                if numbers != now:
                    yield f"{page} says {numbers}, but {figure.source} {now}"
    for page, fixed in FIXED.items():
        for words in fixed:
            if not pattern(words).search(by_hand(page)):
                yield f"{page} has no words {words!r}"
        for place in unseen(page):
            yield f"{page} has a number that nothing compares: {place!r}"


if __name__ == "__main__":
    for figure in FIGURES:
        for page in figure.pages.split():
            for numbers in stated(figure, page):
                print(f"{page}: {figure.words}")
                print(f"    the page: {', '.join(numbers)}")
                print(f"    {figure.source}: {', '.join(current(figure))}")
    found = list(problems())
    if found:
        sys.exit("\n".join(found))
