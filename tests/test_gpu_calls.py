"""The implementations that a GPU chooses for calls of Flax programs, explained on a
machine without one.
"""

import jax
import pytest
from cases import REMEDY
from gpu_calls import CALLS
from marks import with_core

from flax_mha import explain_implementation


def explained(name):
    call = CALLS[name]
    explanations = []

    def explain(inputs, arrays):
        explanation = explain_implementation(
            *inputs, **arrays, **call.static, platform="cuda"
        )
        explanations.append(explanation)

    jax.eval_shape(explain, call.inputs, call.arrays)
    return explanations[0]


CORE = (
    "BERT: padding mask [B, 1, 1, S]",
    "packed documents, causal",
    "gpt-oss: sinks, causal, window of 128",
    "Swin: windows of 49 tokens, relative bias",
)


@pytest.mark.parametrize("name", with_core(CALLS, *CORE))
def test_the_implementation_of_a_call_on_a_gpu(name):
    explanation = explained(name)
    assert explanation.chosen == CALLS[name].chosen
    assert all(map(REMEDY.search, explanation.refusals["cudnn"]))
    # What was fused before needs no trial.
    is_new = CALLS[name].chosen != CALLS[name].before
    assert is_new == ("if its trial on the device succeeds" in str(explanation))


def test_an_explanation_says_how_large_the_bias_is():
    text = str(explained("BERT: padding mask [B, 1, 1, S]"))
    assert "chosen, with the mask as a bias of 16 MiB, if its trial" in text


@pytest.mark.parametrize(
    ("name", "scores"),
    [
        ("BERT at 512 tokens: padding mask", "262,144"),
        ("Swin: windows of 49 tokens, relative bias", "2,401"),
    ],
)
def test_short_calls_say_why_plain_jax_computes_them(name, scores):
    [doubt] = explained(name).doubts["cudnn"]
    assert doubt.startswith(
        "with a mask as a bias, it is chosen from T x S = 1,048,576"
    )
    assert f"but this call has {scores}" in doubt


@pytest.mark.core
def test_dropout_of_weights_is_the_first_reason_against_a_kernel():
    refusals = explained("BERT training: dropout of weights").refusals
    assert refusals["cudnn"][0].startswith("dropout_rate must be 0")
