"""Chains from suffix matches and a corpus: the native loops against Python, and what is drafted."""

from collections.abc import Sequence

import numpy as np
import pytest

from draftree.drafters.rest import index_documents
from draftree.drafters.retrieval.chain_drafting import (
    BOTH,
    CORPUS,
    FEATURES,
    INITIAL_WEIGHTS,
    NO_CANDIDATE,
    SUFFIX,
    ChainDraft,
    ChainPrices,
    IndexedCorpus,
    draft_chains,
    find_successor,
    learn_chains,
)
from draftree.drafters.retrieval.suffix_match_drafts import Limits, Outputs
from draftree.kernels.hit_acceptance import LearningRates
from draftree.native import REFERENCES, core
from draftree.tree import Ints

VOCAB = 12
LIMITS = Limits(longest=8, length=16, factor=2.0, least=0.1, places=16)
RATES = LearningRates(0.2, 4.0, 0.01, 0.05)
FREE = np.zeros(100)
"""Seconds of verification where drafts cost nothing."""


def of_corpus(*documents: Sequence[int]) -> IndexedCorpus:
    return IndexedCorpus.of(index_documents([np.array(d) for d in documents], VOCAB))


def drafted(
    *texts: Sequence[int],
    corpus: IndexedCorpus | None = None,
    memory: Outputs | None = None,
    seconds: Sequence[float] | Ints = FREE,
    longest: int = 8,
) -> list[ChainDraft]:
    rows = len(texts)
    prices = ChainPrices(np.array(seconds, np.float64), 1.0, np.full(rows, longest))
    return draft_chains(
        [np.array(text) for text in texts],
        np.zeros(rows),
        INITIAL_WEIGHTS,
        memory or Outputs.empty(),
        LIMITS,
        corpus or IndexedCorpus.none(),
        prices,
    )


@pytest.mark.skipif(core is None, reason="there are no native kernels")
@pytest.mark.parametrize("documents", [0, 1, 30])
def test_the_native_loops_return_the_bits_of_python(documents: int) -> None:
    """In ten steps of texts that repeat themselves, some of them shorter than a context."""
    random = np.random.default_rng(documents)

    def some(length: int) -> Ints:
        """Words of three tokens, some with an error."""
        words = random.integers(0, 4, length // 3 + 1)
        text = (words[:, None] * 3 + np.arange(3)).reshape(-1)[:length]
        return np.where(random.random(length) < 0.1, random.integers(0, VOCAB, length), text)

    corpus = IndexedCorpus.none()
    if documents:
        corpus = of_corpus(*(some(100) for _ in range(documents)))
    memory = Outputs.empty().remember([some(60), some(3)], LIMITS.longest, 1000)
    texts = [some(length) for length in (1, 2, 7, 60)]
    weights, information = INITIAL_WEIGHTS, np.tile(4.0 * np.eye(FEATURES), (3, 1, 1))
    recent = np.full(len(texts), 0.5)
    kinds = set()
    for _ in range(10):
        seconds = np.cumsum(random.random(1 + 20) * 0.1)
        prices = ChainPrices(seconds, 2.0, random.integers(0, 9, len(texts)))
        asked = texts, recent - 0.5, weights, memory, LIMITS, corpus, prices
        found, wanted = draft_chains(*asked), REFERENCES["draft_chains"](*asked)
        for ours, theirs in zip(found, wanted, strict=True):
            for one, other in zip(ours, theirs, strict=True):
                assert one.shape == other.shape
                assert one.tobytes() == other.tobytes()
            kinds |= set(ours[1].ravel().tolist())
        new = [some(int(random.integers(1, 5))) for _ in texts]
        for row, (chain, *_) in enumerate(found):
            if random.random() < 0.5:
                new[row] = np.append(chain, 1)
        lesson = found, new, recent, weights, information, RATES
        learnt, known = learn_chains(*lesson), REFERENCES["learn_chains"](*lesson)
        for one, other in zip(learnt, known, strict=True):
            assert one.tobytes() == other.tobytes()
        weights, information, recent = learnt
        texts = [np.append(text, more) for text, more in zip(texts, new, strict=True)]
    wanted_kinds = {NO_CANDIDATE, SUFFIX, CORPUS, BOTH} if documents else {NO_CANDIDATE, SUFFIX}
    assert kinds == wanted_kinds


def test_a_chain_goes_on_as_the_text_did() -> None:
    ((chain, kinds, tokens, _),) = drafted([1, 2, 3, 4, 5, 6, 1, 2, 3])
    assert chain.tolist()[:3] == [4, 5, 6]
    assert kinds[:3].tolist() == [[SUFFIX, NO_CANDIDATE]] * 3
    assert tokens[:3, 0].tolist() == [4, 5, 6]


def test_an_unknown_text_has_no_chain() -> None:
    assert drafted([1, 2, 3])[0][0].size == 0
    assert drafted([1])[0][0].size == 0


def test_earlier_outputs_are_read() -> None:
    memory = Outputs.empty().remember([np.array([5, 6, 7, 8, 9])], LIMITS.longest, 100)
    assert drafted([1, 5, 6], memory=memory)[0][0].tolist() == [7, 8, 9]


def test_a_corpus_is_read() -> None:
    """It continues where the text's matches end."""
    corpus = of_corpus([5, 6, 7, 8, 9, 10])
    ((chain, kinds, _, _),) = drafted([1, 5, 6], corpus=corpus)
    assert chain.tolist() == [7, 8, 9, 10]
    assert set(kinds[:4].ravel().tolist()) == {NO_CANDIDATE, CORPUS}
    chain = drafted([4, 5, 6, 2, 4], corpus=corpus, longest=4)[0][0]
    assert chain.tolist()[:3] == [5, 6, 2]  # the text's own continuation


def test_the_longest_context_of_a_corpus_counts() -> None:
    """And its most frequent successor; few occurrences are trusted less than many."""
    documents = [[9, 1, 2, 3], *[[8, 1, 2, 4]] * 3, [7, 1, 2, 5], [6, 1, 2]]
    corpus = of_corpus(*documents)
    assert find_successor(np.array([0, 1, 2]), corpus)[::2] == (4, 2)
    assert find_successor(np.array([9, 1, 2]), corpus)[::2] == (3, 3)
    assert find_successor(np.array([2]), corpus)[::2] == (4, 1)
    assert find_successor(np.array([2, 0]), corpus) == (-1, 0.0, 0)
    once, thrice = (find_successor(np.array([n, 1, 2]), corpus)[1] for n in (9, 8))
    assert once < thrice < 1


def test_lengths_are_chosen_for_the_whole_batch() -> None:
    """By the cost of each further token, whichever request it belongs to."""
    texts = [1, 2, 3, 4, 1, 2, 3], [5, 6, 5]
    whole = drafted(*texts, longest=3)
    assert [len(chain) for chain, *_ in whole] == [3, 3]
    few = drafted(*texts, longest=3, seconds=[1.0, 1.1, 1.2, 1.3, 9.0, 9.1, 9.2])
    assert sum(len(chain) for chain, *_ in few) == 3
    assert len(few[0][0]) > len(few[1][0])  # its match is longer
    none = drafted(*texts, longest=3, seconds=[1.0, 9.0, 9.1, 9.2])
    assert [len(chain) for chain, *_ in none] == [0, 0]
    assert [len(each[1]) for each in none] == [3, 3]  # candidates are still judged
    assert len(drafted(texts[0], longest=0)[0][0]) == 0


def test_candidates_are_judged_up_to_the_first_error() -> None:
    """Those that were not drafted, too; and the weights move towards what was seen."""
    drafts = drafted([1, 2, 3, 4, 5, 6, 1, 2, 3], longest=3)
    information = np.tile(4.0 * np.eye(FEATURES), (3, 1, 1))

    def learnt(*new: int) -> tuple[float, float, float]:
        weights, known, recent = learn_chains(
            drafts, [np.array(new)], np.array([0.5]), INITIAL_WEIGHTS, information, RATES
        )
        assert (weights[1:] == INITIAL_WEIGHTS[1:]).all()
        moved = float(weights[SUFFIX, 0] - INITIAL_WEIGHTS[SUFFIX, 0])
        return moved, float(known[SUFFIX, 0, 0]), float(recent[0])

    moved, once, recent = learnt(9)
    assert moved < 0
    assert recent == pytest.approx(0.4)
    moved, twice, _ = learnt(4, 9)
    assert twice > once
    moved, _, recent = learnt(4, 5, 6, 7)
    assert moved > 0
    assert recent == pytest.approx(1 - 0.5 * 0.8**3)
