"""The checks of saved states: one error, ValueError, whatever is wrong, and it names the entry."""

import math

import numpy as np
import pytest
import torch

from adambs import _check

GOOD = {
    "x": 2.5,
    "k": 3,
    "flag": True,
    "inner": {"y": 1},
    "floats": torch.tensor([0.0, 1.5]),
    "weights": torch.tensor([0.0, 1.5], dtype=torch.float64),
    "order": torch.tensor([1, 0], dtype=torch.int32),
    "low": torch.tensor([True, False]),
}


def test_good_entries_are_returned():
    assert _check.number(GOOD, "x") == 2.5
    assert _check.number(GOOD, "k", 3, 3) == 3.0
    assert _check.number({"x": -math.inf}, "x", -math.inf) == -math.inf
    assert _check.number({"x": 5e-324}, "x") == 5e-324
    assert _check.number({"x": 0.0}, "x", normal=True) == 0.0
    assert _check.count(GOOD, "k", 3, 3) == 3
    assert _check.flag(GOOD, "flag") is True
    assert _check.number(_check.mapping(GOOD, "inner"), "y") == 1.0
    np.testing.assert_array_equal(_check.array(GOOD, "weights", (2,)), [0.0, 1.5])
    np.testing.assert_array_equal(_check.array(GOOD, "order", (2,), "int32", 0, 1), [1, 0])
    assert _check.array(GOOD, "low", (2,), "bool").dtype == np.bool_
    matrix = torch.arange(6, dtype=torch.float64).reshape(2, 3)
    found = _check.array({"m": matrix.T}, "m", (3, 2))
    assert found.flags.c_contiguous
    np.testing.assert_array_equal(found, matrix.T)
    needs_grad = {"g": torch.ones(2, dtype=torch.float64, requires_grad=True)}
    assert _check.array(needs_grad, "g", (2,)).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("value", [None, "2", True, [2.5], torch.tensor(2.5), 1j, math.nan, math.inf, -1.0])
def test_bad_numbers(value):
    with pytest.raises(ValueError, match=r"state\['x'\]"):
        _check.number({"x": value}, "x")


def test_numbers_out_of_bounds():
    with pytest.raises(ValueError, match=r"state\['x'\] must be a number from 0 to 1, not 2"):
        _check.number({"x": 2}, "x", 0.0, 1.0)
    with pytest.raises(ValueError, match="not subnormal, not 5e-324"):
        _check.number({"x": 5e-324}, "x", normal=True)
    with pytest.raises(ValueError, match=r"rule\['x'\].*not inf"):
        _check.number({"x": 10**400}, "x", path="rule")


@pytest.mark.parametrize("value", [None, "2", True, 2.0, -1, 11, torch.tensor(2)])
def test_bad_counts(value):
    with pytest.raises(ValueError, match=r"state\['k'\] must be a whole number from 0 to 10"):
        _check.count({"k": value}, "k", 0, 10)


@pytest.mark.parametrize("value", [None, 1, "True", torch.tensor(True)])
def test_bad_flags(value):
    with pytest.raises(ValueError, match=r"state\['f'\] must be True or False"):
        _check.flag({"f": value}, "f")


@pytest.mark.parametrize(
    "value",
    [
        None,
        "weights",
        [0.0, 1.0],
        np.ones(2),
        torch.ones(2),
        torch.ones(3, dtype=torch.float64),
        torch.ones(1, 2, dtype=torch.float64),
        torch.ones(2, dtype=torch.float64, device="meta"),
        torch.ones(2, dtype=torch.float64).to_sparse(),
        torch.ones(2, dtype=torch.complex128),
        torch.tensor([1.0, math.nan], dtype=torch.float64),
        torch.tensor([1.0, math.inf], dtype=torch.float64),
        torch.tensor([1.0, -1.0], dtype=torch.float64),
        torch.tensor([1.0, 5e-324], dtype=torch.float64),
    ],
    ids=repr,
)
def test_bad_arrays(value):
    with pytest.raises(ValueError, match=r"state\['weights'\]"):
        _check.array({"weights": value}, "weights", (2,), normal=True)


def test_whole_numbers_out_of_bounds():
    with pytest.raises(ValueError, match=r"state\['order'\] must hold numbers from 1 to 2, not 0 to 1"):
        _check.array(GOOD, "order", (2,), "int32", 1, 2)


@pytest.mark.parametrize("check", [_check.number, _check.count, _check.flag, _check.mapping, _check.entry])
def test_missing_entries_and_states_that_are_none(check):
    with pytest.raises(ValueError, match="state has no 'missing'"):
        check(GOOD, "missing")
    for state in (None, [1], "state"):
        with pytest.raises(ValueError, match="state must be a dict"):
            check(state, "x")
    with pytest.raises(ValueError, match=r"state\['x'\] must be a dict, not float"):
        _check.mapping(GOOD, "x")
