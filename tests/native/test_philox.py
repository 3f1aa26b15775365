"""Counter-based random words and their Gumbel noise: the published words, and the same bits on every device."""

import mpmath
import numpy as np
import pytest
import torch

from draftree.kernels.log_exp import LN2, MANTISSA, exp, log
from draftree.kernels.philox import WORD, gumbel, gumbel_of, gumbel_on_device, philox

PUBLISHED = [  # Random123's known answers of philox4x32-10: counter, key, words
    (
        "00000000 00000000 00000000 00000000",
        "00000000 00000000",
        "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    ),
    (
        "ffffffff ffffffff ffffffff ffffffff",
        "ffffffff ffffffff",
        "408f276d 41c83b0e a20bc7c6 6d5451fd",
    ),
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "wanted"), PUBLISHED)
def test_the_words_are_the_published_ones(counter: str, key: str, wanted: str) -> None:
    """Of integers, of NumPy's arrays and of PyTorch's."""
    given = words(counter), words(key)
    assert list(philox(*map(tuple, given))) == words(wanted)
    arrays = [tuple(np.array([word], np.uint64) for word in each) for each in given]
    assert [int(word[0]) for word in philox(*arrays)] == words(wanted)
    tensors = [tuple(torch.tensor([word]) for word in each) for each in given]
    assert [int(word[0]) for word in philox(*tensors)] == words(wanted)


def errors(x: np.ndarray) -> np.ndarray:
    """The errors of the logarithm in units in the last place."""
    with mpmath.workprec(200):
        exact = [mpmath.log(mpmath.mpf(float(each))) for each in x]
        units = np.spacing(np.abs(np.array([float(each) for each in exact])))
        return np.array(
            [
                abs(float((mpmath.mpf(float(a)) - b) / u))
                for a, b, u in zip(log(x), exact, units, strict=True)
            ]
        )


def test_the_logarithm_is_accurate_to_two_units_in_the_last_place() -> None:
    draw, root = np.random.default_rng(0), np.sqrt(0.5)
    edges = [root * 2.0**k for k in range(-53, 7)]
    edges += [np.nextafter(x, to) for x in edges for to in (0, np.inf)]
    near_one = 1 - 2.0 ** -draw.uniform(1, MANTISSA, 1000)
    x = np.concatenate(
        [
            draw.random(2000),
            2.0 ** draw.uniform(-53, 6, 2000),
            near_one,
            2 - near_one[near_one > 0.5],
            edges,
        ]
    )
    assert errors(x).max() < 2
    assert log(np.ones(1)) == 0


def test_the_exponential_is_accurate() -> None:
    """And zero is one."""
    x = np.concatenate(
        [
            np.random.default_rng(0).uniform(-40, 0, 2000),
            [0.0, -40.0, -LN2 / 2, LN2 / 2, 3.0, 700.0, -700.0],
        ]
    )
    with mpmath.workprec(200):
        off = [
            abs(float(mpmath.mpf(float(a)) / mpmath.exp(mpmath.mpf(float(b))) - 1))
            for a, b in zip(exp(x), x, strict=True)
        ]
    assert (np.array(off) < np.abs(x) / LN2 * 1e-16 + 1e-15).all()
    assert exp(np.zeros(1)) == 1


def test_elementary_functions_have_the_same_bits_in_both_libraries() -> None:
    x = np.random.default_rng(1).uniform(1e-9, 40, 5000)
    assert log(torch.from_numpy(x)).numpy().tobytes() == log(x).tobytes()
    assert exp(torch.from_numpy(-x)).numpy().tobytes() == exp(-x).tobytes()


def test_noise_at_the_ends_is_finite() -> None:
    low, high = (np.array(each) for each in ([0, WORD], [0, WORD]))
    ends = gumbel_of(low, high)
    assert ends == pytest.approx([-np.log(53 * np.log(2)), 53 * np.log(2)], rel=1e-15)
    assert (
        gumbel_of(torch.from_numpy(low), torch.from_numpy(high)).numpy().tobytes() == ends.tobytes()
    )


@pytest.mark.parametrize("count", [1, 2, 3, 63, 64, 65, 1001])
def test_the_noise_has_the_same_bits_on_a_device(count: int) -> None:
    """The host's, in C++ where it was built, and that of PyTorch's operations, for one place and for several."""
    places = np.random.default_rng(count).integers(0, 2**32, (2, 3, 5))
    places[0, 0], places[0, 1], places[1, 0, 2] = 0, WORD, WORD
    there = gumbel_on_device(torch.from_numpy(places), count).numpy()
    assert there.shape == (2, 3, count)
    for place, found in zip(places.reshape(-1, 5), there.reshape(-1, count), strict=True):
        assert gumbel(place.astype(np.uint32), count).tobytes() == found.tobytes()
        assert gumbel_on_device(torch.from_numpy(place), count).numpy().tobytes() == found.tobytes()


def test_the_noise_is_gumbels() -> None:
    """The largest distance of its distribution function from exp(−exp(−x)) is one that chance makes in 999 of 1000 trials."""
    n = 200_000
    found = np.sort(gumbel(np.array([1, 2, 3, 4, 5], np.uint32), n))
    apart = np.abs(np.exp(-np.exp(-found)) - (np.arange(n) + 0.5) / n).max()
    assert apart < 1.95 / np.sqrt(n)
