"""Processors that transformers lacks, against hand arithmetic."""

import pytest
import torch
from transformers import LogitsProcessor

from draftree.sampling.logits_processors import ForcedBeginning, FrequencyPenalty, PresencePenalty

SCORES = [1.0, -2.0, 0.5, float("-inf"), 3.0]
TEXT = [4, 4, 1, 0, 1, 1, 3]
"""Behind a start of 3, token 0 stands once, 1 twice, 3 once, and 2 and 4 never: they do in the
prompt."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (FrequencyPenalty(0.5, 3), [1 - 0.5, -2 - 2 * 0.5, 0.5, float("-inf"), 3.0]),
        (FrequencyPenalty(-2.0, 3), [1 + 2.0, -2 + 2 * 2.0, 0.5, float("-inf"), 3.0]),
        (FrequencyPenalty(0.5, 0), [1 - 0.5, -2 - 3 * 0.5, 0.5, float("-inf"), 3 - 2 * 0.5]),
        (PresencePenalty(0.25, 3), [1 - 0.25, -2 - 0.25, 0.5, float("-inf"), 3.0]),
        (PresencePenalty(0.25, 7), SCORES),
        (PresencePenalty(0.25, 9), SCORES),
        (ForcedBeginning([2, 0, 2, 0, 3], 3), [float("-inf")] * 3 + [0.0, float("-inf")]),
        (ForcedBeginning([2, 0, 2, 0], 3), SCORES),
        (ForcedBeginning([2], 8), SCORES),
    ],
    ids=lambda value: type(value).__name__,
)
def test_scores_are_those_of_hand_arithmetic(
    step: LogitsProcessor, expected: list[float], dtype: torch.dtype
) -> None:
    ids, scores = torch.tensor([TEXT]), torch.tensor([SCORES], dtype=dtype)
    given = ids.clone(), scores.clone()
    found = step(ids, scores)
    assert found.dtype is dtype
    assert found.tolist() == [expected]
    assert step(ids, scores).tolist() == [expected], "a second call says the same"
    assert torch.equal(ids, given[0])
    assert torch.equal(scores, given[1])


def test_each_text_of_a_batch_is_counted_by_itself() -> None:
    ids, scores = torch.tensor([[0, 1, 1], [0, 2, 1]]), torch.zeros(2, 3)
    assert FrequencyPenalty(1.0, 1)(ids, scores).tolist() == [[0, -2, 0], [0, -1, -1]]
    assert PresencePenalty(1.0, 1)(ids, scores).tolist() == [[0, -1, 0], [0, -1, -1]]


def test_a_beginning_is_forced_token_by_token() -> None:
    step = ForcedBeginning([7, 8], 2)
    assert [step.forced_token([1] * n) for n in range(6)] == [None, None, 7, 8, None, None]
