"""Marks of the core, the tests that plain `pytest` runs, and cases that are fewer than all combinations."""

import itertools

import pytest


def named(text):
    """Names of cases, between semicolons."""
    return [" ".join(name.split()) for name in text.split(";")]


def core(*values):
    """A case in the core."""
    return pytest.param(*values, marks=pytest.mark.core)


def with_core(cases, *core):
    """Cases as the parameters of a test, and the same cases again that are in the core."""
    cases = list(cases)
    unknown = [case for case in core if case not in cases]
    assert not unknown, f"the core must be cases of the test, but got {unknown}"
    return [pytest.param(case, marks=pytest.mark.core if case in core else ()) for case in cases]


def with_core_tuples(cases, *core):
    """`with_core` for a test of several parameters, whose cases are tuples."""
    return [pytest.param(*param.values[0], marks=param.marks) for param in with_core(map(tuple, cases), *core)]


def pairwise(*axes):
    """A few tuples of one value of each axis that contain every pair of values of two axes."""
    cases = list(itertools.product(*map(range, map(len, axes))))
    pairs = {case: set(itertools.combinations(enumerate(case), 2)) for case in cases}
    unmet, chosen = set().union(*pairs.values()), []
    while unmet:
        chosen.append(max(cases, key=lambda case: len(pairs[case] & unmet)))
        unmet -= pairs[chosen[-1]]
    return [tuple(axis[i] for axis, i in zip(axes, case, strict=True)) for case in chosen]
