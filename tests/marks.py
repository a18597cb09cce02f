"""Marks core tests, which plain `pytest` runs, and chooses cases from all combinations
of options.
"""

import functools
import itertools

import pytest


class Refusals(list):
    """A table of messages and of calls that raise errors with them; `add` takes what
    `cases.refused` takes.
    """

    def add(self, message, call, *arguments, **keywords):
        self.append((message, functools.partial(call, *arguments, **keywords)))


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
    marked = []
    for case in cases:
        marks = [pytest.mark.core] if case in core else []
        marked.append(pytest.param(case, marks=marks))
    return marked


def with_core_tuples(cases, *core):
    """Does the same as `with_core` for a test with several parameters: each case is a
    tuple of them.
    """
    marked = with_core(map(tuple, cases), *core)
    return [pytest.param(*case.values[0], marks=case.marks) for case in marked]


def pairwise(*axes):
    """Chooses tuples with one value per axis, so that any two values of different axes
    occur together in a tuple.
    """
    indices = [range(len(axis)) for axis in axes]
    cases = list(itertools.product(*indices))
    pairs = {case: set(itertools.combinations(enumerate(case), 2)) for case in cases}
    unmet = set().union(*pairs.values())
    chosen = []
    # Greedily: always the case that adds the most pairs.
    while unmet:
        best = max(cases, key=lambda case: len(unmet & pairs[case]))
        chosen.append(best)
        unmet -= pairs[best]
    values = []
    for case in chosen:
        values.append(tuple(axis[i] for axis, i in zip(axes, case, strict=True)))
    return values
