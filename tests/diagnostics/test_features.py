"""Stein features against their definition."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from ppl_ext.diagnostics.features import SteinBasis, n_features


def multi_indices(basis: SteinBasis) -> list[tuple[int, ...]]:
    found = []
    for degrees, coordinates in basis.patterns:
        for row in coordinates:
            index = np.zeros(basis.dimension, dtype=int)
            index[row] = degrees
            found.append(tuple(int(i) for i in index))
    return found


@pytest.mark.parametrize("d", [1, 2, 3, 5])
@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_every_multi_index_occurs_once(d: int, order: int) -> None:
    found = multi_indices(SteinBasis(d, order, interactions=True))
    expected = [a for a in itertools.product(range(order + 1), repeat=d) if 1 <= sum(a) <= order]
    assert sorted(found) == sorted(expected)
    assert len(found) == n_features(d, order, True) == len(SteinBasis(d, order, True))
    powers = multi_indices(SteinBasis(d, order, interactions=False))
    assert powers == [
        tuple(degree * (i == j) for i in range(d))
        for degree in range(1, order + 1)
        for j in range(d)
    ]


@pytest.mark.parametrize("family", ["monomial", "hermite"])
def test_all_features_against_finite_differences(family: str) -> None:
    """d = 4, r = 4: Laplacian + gradient . score of each of the 69 products."""
    d = order = 4
    rng = np.random.default_rng(1)
    point, score = rng.normal(size=(2, d))
    basis = SteinBasis(d, order, True, family)  # type: ignore[arg-type]
    features = basis(point[:, None], score[:, None])[:, 0]

    def product(x: np.ndarray, index: tuple[int, ...]) -> float:
        if family == "monomial":
            return math.prod(x[j] ** k for j, k in enumerate(index))
        value = 1.0
        for j, k in enumerate(index):
            value *= np.polynomial.hermite_e.HermiteE.basis(k)(x[j]) / math.sqrt(math.factorial(k))
        return value / sum(index)

    h = 1e-3
    expected = []
    for index in multi_indices(basis):
        total = 0.0
        for j in range(d):
            step = h * np.eye(d)[j]
            at = [product(point + i * step, index) for i in (-2, -1, 0, 1, 2)]
            first = (at[0] - 8 * at[1] + 8 * at[3] - at[4]) / (12 * h)
            second = (-at[0] + 16 * at[1] - 30 * at[2] + 16 * at[3] - at[4]) / (12 * h**2)
            total += second + first * score[j]
        expected.append(total)
    np.testing.assert_allclose(features, expected, atol=1e-7)


def test_hermite_features_are_orthonormal_under_a_standard_normal_target() -> None:
    nodes, weights = np.polynomial.hermite_e.hermegauss(8)
    grid = np.array(list(itertools.product(nodes, repeat=3))).T
    weight = np.array([math.prod(w) for w in itertools.product(weights, repeat=3)])
    weight /= weight.sum()
    features = SteinBasis(3, 4, True, "hermite")(grid, -grid)
    np.testing.assert_allclose(features @ weight, 0, atol=1e-12)
    np.testing.assert_allclose((features * weight) @ features.T, np.eye(34), atol=1e-11)


def test_coordinate_sums_and_labels_name_the_factors() -> None:
    basis = SteinBasis(3, 3, True)
    labels = basis.labels(["a", "b", "c"])
    assert labels[:3] == ["a", "b", "c"]
    assert {"a^3", "a*b^2", "a^2*b", "a*b*c"} < set(labels)
    values = np.random.default_rng(0).normal(size=(2, len(basis)))
    expected = [
        [sum(v for v, label in zip(row, labels, strict=True) if name in label) for name in "abc"]
        for row in values
    ]
    np.testing.assert_allclose(basis.coordinate_sums(values), expected)


@pytest.mark.parametrize("order", [0, -1, 2.0, True])
def test_order_must_be_a_positive_integer(order: object) -> None:
    with pytest.raises(ValueError, match="order must be a positive integer"):
        SteinBasis(2, order, True)  # type: ignore[arg-type]


def test_unknown_basis_is_refused() -> None:
    with pytest.raises(ValueError, match=r"basis must be one of .*'legendre'"):
        SteinBasis(2, 2, True, "legendre")  # type: ignore[arg-type]
