"""Marks core tests, which plain `pytest` runs, and chooses cases from all combinations
of options.
"""

import itertools

import pytest


def named(text):
    """Lists the names of cases in a text that separates them by semicolons."""
    return [" ".join(name.split()) for name in text.split(";")]


def core(*values):
    """Returns a case of a parametrized test, marked as a core test."""
    return pytest.param(*values, marks=pytest.mark.core)


def with_core(cases, *core):
    """Returns `cases` for `pytest.mark.parametrize`; those that are also in `core` are
    marked as core tests.
    """
    cases = list(cases)
    unknown = [case for case in core if case not in cases]
    assert not unknown, f"the core must be cases of the test, but got {unknown}"
    return [
        pytest.param(case, marks=pytest.mark.core if case in core else ())
        for case in cases
    ]


def with_core_tuples(cases, *core):
    """Does the same as `with_core` for a test with several parameters: each case is a
    tuple of them.
    """
    return [
        pytest.param(*param.values[0], marks=param.marks)
        for param in with_core(map(tuple, cases), *core)
    ]


def pairwise(*axes):
    """Chooses tuples with one value per axis, so that any two values of different axes
    occur together in a tuple.
    """
    cases = list(itertools.product(*map(range, map(len, axes))))
    pairs = {case: set(itertools.combinations(enumerate(case), 2)) for case in cases}
    unmet = set().union(*pairs.values())
    chosen = []
    while unmet:
        chosen.append(max(cases, key=lambda case: len(pairs[case] & unmet)))
        unmet -= pairs[chosen[-1]]
    return [
        tuple(axis[i] for axis, i in zip(axes, case, strict=True)) for case in chosen
    ]
