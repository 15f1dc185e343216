"""Which results of a group are computed together, in which order, and where the rows of a norm lie among them."""

import pytest

from tests.gpu.group_cases import Builder, modulated, packed_rotation
from tir_kernels.errors import UnsupportedError
from tir_kernels.fusion.group.domains import domains_of, norm_indices
from tir_kernels.fusion.group.symbols import Symbols


def of(problem):
    return [(domain.results, domain.order, domain.norm) for domain in domains_of(problem)]


def test_results_of_one_shape_share_a_domain():
    b = Builder(((2, 3, 16), "float16"))
    one, two, other = b.add("relu", 0), b.add("negative", 0), b.permute(0, 0, 2, 1)
    (first, second) = domains_of(b.problem(one, other, two))
    assert (first.results, first.shape, first.m, first.n) == ((one, two), (2, 3, 16), 6, 16)
    assert (second.results, second.shape, second.m, second.n) == ((other,), (2, 16, 3), 32, 3)


def test_a_result_that_is_asked_for_twice_is_computed_once():
    b = Builder(((4, 8), "float16"))
    one = b.add("relu", 0)
    assert of(b.problem(one, one)) == [((one,), (0, 1), None)]


def test_a_sum_is_computed_beside_the_norm_that_reads_it():
    problem = modulated(40, m=3)
    (domain,) = domains_of(problem)
    assert set(domain.results) == set(problem.results) and problem.value(domain.norm).operator == "layer_norm"
    assert (domain.m, domain.n) == (6, 40)


def test_a_result_that_the_norm_does_not_read_is_computed_apart():
    b = Builder(((3, 16), "float16"), ((3, 16), "float16"))
    normed, other = b.norm("rms_norm", 0), b.add("relu", 1)
    assert of(b.problem(normed, other)) == [((normed,), (0, 1), normed), ((other,), (0, 1), None)]


def test_results_that_read_other_rows_of_a_norm_are_computed_apart():
    """Elements of a domain share a row's statistics; what the norm reads is beside the rows that it reads."""
    b = Builder(((4, 16), "float16"))
    x = b.add("relu", 0)
    normed = b.norm("rms_norm", x)
    rolled, same = b.add("roll", normed, shape=(4, 16), numbers=(0, 1)), b.add("negative", normed)
    found = [((normed, same, x), (0, 1), normed), ((rolled,), (0, 1), normed)]
    assert of(b.problem(normed, rolled, same, x)) == found


def test_rows_of_a_norm_that_are_permuted():
    """A head is a row wherever it goes; heads of a row that is normalised whole are walked within a token."""
    heads, _ = domains_of(packed_rotation(norms="head"))
    assert heads.order == (0, 1, 2, 3) and heads.row_axes == 1 and (heads.m, heads.n) == (2 * 4 * 37, 64)
    rows, _ = domains_of(packed_rotation(norms="row"))
    assert rows.order == (0, 2, 1, 3) and rows.row_axes == 2 and (rows.m, rows.n) == (2 * 37, 256)


@pytest.mark.parametrize("axes, order", [((1, 0, 2), (0, 1, 2)), ((0, 1, 2), (0, 1, 2))])
def test_rows_that_change_places_stay_rows(axes, order):
    b = Builder(((3, 5, 16), "float16"))
    normed = b.norm("rms_norm", 0)
    permuted = b.permute(normed, *axes)
    assert of(b.problem(permuted)) == [((permuted,), order, normed)]


def test_the_row_that_a_result_reads():
    b = Builder(((3, 5, 16), "float16"))
    (domain,) = domains_of(b.problem(b.permute(b.norm("rms_norm", 0), 1, 0, 2)))
    symbols = Symbols()
    rows, indices = domain.places(symbols, symbols.new("vector", 2))
    (first, _), (second, _) = rows
    found = norm_indices(b.problem(len(b.sources) + 1), domain, symbols, indices)
    assert [x.same_as(y) for x, y in zip(found, (second, first), strict=True)] == [True, True]


def test_the_row_that_a_filling_reads_is_made_one_that_exists():
    b = Builder(((3, 16), "float16"))
    problem = b.problem(b.pad(b.norm("rms_norm", 0), 0.0, (2, 1), (0, 0)))
    (domain,) = domains_of(problem)
    symbols = Symbols()
    _, indices = domain.places(symbols, symbols.new("vector", 2))
    (outside,) = norm_indices(problem, domain, symbols, indices)
    assert not symbols.is_known(outside >= 0)
    row = symbols.inside(outside, 3)
    assert symbols.is_known(row >= 0) and symbols.is_known(row < 3)


def refusal(b, *results) -> str:
    with pytest.raises(UnsupportedError) as error:
        domains_of(b.problem(*results))
    return str(error.value)


def test_norms_that_fit_no_domain():
    b = Builder(((16, 16), "float16"))
    normed, other = b.norm("rms_norm", 0), b.norm("layer_norm", 0)
    assert refusal(b, b.add("add", normed, other)) == "a result of several norms"
    assert "rms_norm are no rows of a result (16, 16)" in refusal(b, b.permute(normed, 1, 0))
    assert "rms_norm are no rows of a result (32, 16)" in refusal(b, b.concat(0, normed, normed))
    assert "rms_norm are no rows of a result (16, 8)" in refusal(b, b.cut(normed, -1, 0, 8))
    # Each result has one norm: two domains.
    assert [domain.norm for domain in domains_of(b.problem(normed, other))] == [normed, other]
