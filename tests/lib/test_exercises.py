"""The exercise checker must tell right from nearly right from wrong."""

import pytest
import torch
from opsbyte.exercises import check


def verdict(capsys, *args, **kwargs):
    right = check("Exercise", *args, **kwargs)
    return right, capsys.readouterr().out.strip()


@pytest.mark.parametrize("untouched", [..., None])
def test_untouched_value(capsys, untouched):
    assert verdict(capsys, untouched, 3.0) == (False, "Exercise: not attempted yet")


def test_untouched_functions(capsys):
    def stub(x): ...

    def refuses(x):
        raise NotImplementedError

    for attempt in (stub, refuses):
        right, text = verdict(capsys, attempt, lambda x: x, [(1,), (2,)])
        assert not right and "not attempted" in text


def test_right_within_tolerance(capsys):
    assert verdict(capsys, 295.2, 295.22, rtol=1e-3) == (True, "Exercise: correct")
    assert verdict(capsys, 295.2, 295.22, rtol=1e-6)[0] is False


def test_factor_is_named(capsys):
    right, text = verdict(capsys, 2.0, 1.0)
    assert not right and "2 times" in text


def test_function_wrong_in_a_later_case(capsys):
    right, text = verdict(capsys, lambda x: 4, lambda x: x * x, [(2,), (3,)])
    assert not right and "case 2 of 2" in text


def test_near_miss_gets_its_hint(capsys):
    near = {"You counted a multiply-add as one.": lambda m, n: m * n}
    right, text = verdict(capsys, lambda m, n: n * m, lambda m, n: 2 * m * n,
                          [(2, 3), (4, 5)], near=near)
    assert not right and text.endswith("You counted a multiply-add as one.")


def test_near_miss_that_equals_the_reference_is_refused():
    with pytest.raises(ValueError, match="equals the reference"):
        check("Exercise", 1, 1, near={"no difference": 1})


def test_no_cases_is_refused():
    with pytest.raises(ValueError, match="cases is empty"):
        check("Exercise", abs, abs, [])


def test_errors_of_the_reader_are_shown_not_raised(capsys):
    right, text = verdict(capsys, lambda x: 1 / 0, abs, [(1,)])
    assert not right and "ZeroDivisionError" in text


def test_tensors_shapes_and_nan(capsys):
    want = torch.ones(2, 3)
    assert verdict(capsys, want.bfloat16(), want)[0]
    assert "shape is (3,)" in verdict(capsys, torch.ones(3), want)[1]
    assert "not finite" in verdict(capsys, want / 0, want)[1]
    assert "largest error is 1" in verdict(capsys, want * 2, want)[1]


def test_structures_and_strings(capsys):
    assert verdict(capsys, ("memory", 1.0), ("memory", 1.0))[0]
    assert not verdict(capsys, ("memory",), ("memory", 1.0))[0]
    assert not verdict(capsys, "compute", "memory")[0]
    assert not verdict(capsys, "memory", 1.0)[0]
