"""Type checkers find a misspelt or ill-typed argument of every public function, and
nothing in right uses.
"""

import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import hatchling.build
import pytest

RIGHT = """
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import flax_mha
import train_demo
from flax_mha import CausalMask, Mask, SegmentMask, convert, linen, plot, recipes

x = jnp.ones((1, 8, 2, 4))
mask: Mask = CausalMask() & flax_mha.LocalMask(3, 0) | ~SegmentMask(
    jnp.ones(8, int), jnp.ones(8, int)
)
output: jax.Array = flax_mha.dot_product_attention(
    x, x, x, mask=mask, is_causal=True, query_offset=jnp.array([3])
)
both: tuple[jax.Array, jax.Array] = flax_mha.dot_product_attention(
    x, x, x, return_residual=True, key_value_offset=1
)
most: tuple[jax.Array, ...] = flax_mha.dot_product_attention(
    x, x, x, return_max_score=True, scale=0.5
)
chosen: str = flax_mha.explain_implementation(
    x, x, x, local_window_size=(3, None)
).chosen
other: jax.Array = flax_mha.attention_fn(x, x, x, scale=0.5, implementation="xla")
attention = flax_mha.MultiHeadAttention(
    2,
    8,
    implementation="blockwise",
    scale=0.3,
    normalize_qk=flax_mha.Norm("rms", epsilon=1e-3),
    rngs=nnx.Rngs(0),
)
out: jax.Array = attention(x, mask=mask, lengths=jnp.array([3]), segment_ids=None)
layer = linen.MultiHeadAttention(
    num_heads=2, num_kv_heads=1, implementation="xla", scale=0.3
)
same: jax.Array = layer(x, lengths=jnp.array([3]))
rotary = flax_mha.MultiHeadAttention(
    2, 8, rope=flax_mha.rope.RoPE(base=1e6), decode=True, rngs=nnx.Rngs(0)
)
rotary.init_cache((1, 9, 8), per_row=True)
rotated: jax.Array = rotary(x, positions=jnp.arange(8), lengths=jnp.array([3]))
crossed: jax.Array = linen.MultiHeadAttention(num_heads=2, decode=True, per_row=True)(
    x, x, store_keys=True
)
cache = flax_mha.cache.KVCache.create(
    1, 9, num_kv_heads=2, head_size=4, window=None, per_row=True
)
decoded: jax.Array
decoded, cache = flax_mha.cache.cached_attention(
    x, x, x, cache.truncate(0), lengths=jnp.array([3])
)
decoded, cache, largest = flax_mha.cache.cached_attention(
    x, x, x, cache, scale=0.5, return_max_score=True
)
convert.from_torch({}, num_heads=2, prefix="layers.0.")
convert.load_torch(attention, {}, "layers.0.", check_options=False)
convert.load_torch(
    flax_mha.MultiHeadAttention(**convert.describe({}, layer=3), rngs=nnx.Rngs(0)), {}
)
arrays: dict[str, np.ndarray] = convert.to_torch({}, "hf_llama", qk_norm_offset=1.0)
recipes.alibi(num_heads=2)
rope: flax_mha.RoPE = flax_mha.RoPE(base=1e6)
empty: flax_mha.KVCache = flax_mha.KVCache.create(1, 9, num_kv_heads=2, head_size=4)
back: jax.Array = flax_mha.from_zigzag(flax_mha.to_zigzag(x, 4), 4, axis=1)
flax_mha.combine(recipes.alibi(num_heads=2), recipes.causal())
there: str = flax_mha.explain_implementation(x, x, x, platform="cuda").chosen
asked: str = (
    attention.explain(x, mask=mask, platform="tpu").chosen
    + layer.explain(x, platform=None).chosen
)
plot.plot_mask(mask, 3, 4)
version: str = flax_mha.__version__
run: train_demo.Run = train_demo.train(
    "text", steps=3, resume=True, layout=train_demo.Layout(fsdp=2)
)
text: str = train_demo.load(run.out).sample("a", 9, temperature=0)
"""

# One mistake per line.
WRONG = """
from typing import Any
import jax.numpy as jnp
from flax import nnx
import flax_mha
import train_demo
from flax_mha import linen
x = jnp.ones((1, 8, 2, 4))
a1 = flax_mha.dot_product_attention(x, x, x, is_casual=True)
a2 = flax_mha.dot_product_attention(x, x, x, local_window_size="9")
a3 = flax_mha.dot_product_attention(x, x, x, implementation="flash")
a4 = flax_mha.dot_product_attention(x, x, x, return_residual=True, logit_soft_cap=1.0)
a6 = flax_mha.dot_product_attention(x, x, x, return_max_scores=True)
a7: str = flax_mha.dot_product_attention(x, x, x, return_max_score=True)
a5: str = flax_mha.dot_product_attention(x, x, x)
b1 = flax_mha.explain_implementation(x, x, x, query_offst=3)
b2 = flax_mha.explain_implementation(x, x, x, mask=flax_mha.CausalMask)
c1 = flax_mha.attention_fn(x, x, x, scal=1.0)
c2 = flax_mha.attention_fn(x, x, x, implementation="flash")
d1 = flax_mha.MultiHeadAttention(2, 8, rngs=nnx.Rngs(0), num_kv_head=1)
d2 = flax_mha.MultiHeadAttention(2, 8, rngs=nnx.Rngs(0), implementation="flash")
d3 = flax_mha.MultiHeadAttention(2.0, 8, rngs=nnx.Rngs(0))
attention = flax_mha.MultiHeadAttention(2, 8, rngs=nnx.Rngs(0))
e1 = attention(x, maks=None)
e2 = attention(x, is_causal="yes")
e3 = attention(x, score_mod=3)
f1 = linen.MultiHeadDotProductAttention(num_heads=2, num_kv_head=1)
f2 = linen.MultiHeadAttention(num_heads="2")
layer = linen.MultiHeadAttention(num_heads=2)
g1 = layer(x, length=None)
g2 = layer(x, segment_ids="a")
g3 = layer(x, position=jnp.arange(8))
h0 = attention.explain(x, maks=None)
h4 = attention.explain(x, platform="rocm")
h5 = layer.explain(x, maks=None)
b3 = flax_mha.explain_implementation(x, x, x, platform="rocm")
i10 = flax_mha.RoPE(theta=1e6)
i1 = flax_mha.MultiHeadAttention(2, 8, rngs=nnx.Rngs(0), rope=10000.0)
i2 = attention(x, store_key=True)
i3 = flax_mha.rope.RoPE(theta=10000.0)
i4 = flax_mha.cache.KVCache.create(1, 9, 2, 4, per_rows=True)
i5 = flax_mha.cache.cached_attention(x, x, x, x)
i0 = flax_mha.cache.cached_attention(x, x, x, cache, is_causal="yes")
i6 = attention.init_cache((1, 9, 8), per_row="yes")
i7 = train_demo.train(steps=[3])
i8 = train_demo.train(layout=3)
i9 = train_demo.load("run").sample(promt="a")
h1 = flax_mha.CausalMask() & x
h2 = flax_mha.LocalMask(1)
h3 = flax_mha.linnen
"""


# Our annotations need none of these, which would take half of the time.
CONFIG = """
[mypy]
[mypy-jaxlib.*,jax.experimental.*,jax._src.pallas.*,jax._src.mosaic.*,jax._src.tpu.*,jax._src.scipy.*,matplotlib.*,rich.*]
follow_imports = skip
[mypy-IPython.*,prompt_toolkit.*,orbax.*,jax.scipy.*,jax.extend.*,jax._src.interpreters.*,jax._src.lax.*,jax._src.state.*]
follow_imports = skip
"""


def installed(folder):
    """The interpreter of a new environment with an editable install of the package and
    all packages of this one.
    """
    environment = folder / "environment"
    venv.create(environment, with_pip=False, symlinks=True)
    site = Path(
        sysconfig.get_path(
            "purelib", "venv", {"base": environment, "platbase": environment}
        )
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(Path(__file__).parent.parent)
        with zipfile.ZipFile(
            folder / hatchling.build.build_editable(str(folder))
        ) as archive:
            archive.extractall(site)
    (site / "zzz_after_the_package.pth").write_text(sysconfig.get_path("purelib"))
    return environment / "bin" / "python"


@pytest.mark.core
def test_only_the_mistakes_are_reported(tmp_path):
    """In one test, because mypy takes seconds."""
    (tmp_path / "right.py").write_text(RIGHT)
    (tmp_path / "wrong.py").write_text(WRONG)
    (tmp_path / "mypy.ini").write_text(CONFIG)
    options = "--strict --config-file=mypy.ini --no-error-summary"
    options += " --follow-imports=silent --cache-dir=/dev/null"
    options += (
        " --disable-error-code=name-defined --ignore-missing-imports right.py wrong.py"
    )
    command = [
        sys.executable,
        "-m",
        "mypy",
        *options.split(),
        f"--python-executable={installed(tmp_path)}",
    ]
    environment = {
        name: text
        for name, text in os.environ.items()
        if name not in ("PYTHONPATH", "MYPYPATH")
    }
    run = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=environment,
    )
    assert run.returncode in (0, 1), run.stderr
    errors = [line for line in run.stdout.splitlines() if ": error: " in line]
    assert [line for line in errors if line.startswith("right")] == []
    mistakes = {
        n for n, line in enumerate(WRONG.splitlines(), 1) if re.match(r"[a-i]\d", line)
    }
    assert len(mistakes) == 40
    assert {
        int(line.split(":")[1]) for line in errors if line.startswith("wrong")
    } == mistakes
