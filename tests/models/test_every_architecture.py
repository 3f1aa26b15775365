"""Every causal language model of transformers writes with drafts what its own `generate` writes, or is refused by name."""

from typing import Any, cast

import pytest
import torch
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

from architectures import VOCAB
from draftree.drafters.base import Drafter
from draftree.drafters.suffix import Suffix
from draftree.engine import Engine
from draftree.errors import UserError
from draftree.models.architecture_checks import refuse_unsupported
from draftree.models.causal_lm import CausalLM
from draftree.policies.eagle2 import EAGLE2
from draftree.request import Request
from draftree.target.target import Target
from draftree.testing.fakes import Sometimes
from tiny import TYPES, tiny

PROMPT = [5, 9, 7, 5, 9, 7, 5, 9, 11, 5, 9]
NEW = 14
NOT_BUILT = {
    "blt": "transformers' own generate asks its config for num_hidden_layers, which it lacks",
    "gemma4_assistant": "its default config is refused by transformers itself",
}
"""What transformers cannot make or run by its defaults, so that there is nothing to compare with.
"""
LATE = {"mllama": "MllamaForCausalLM is not supported: its layers share or skip keys and values"}
"""What is refused once its weights are there."""
SOME = (
    "cohere2",
    "deepseek_v2",
    "deepseek_v3",
    "falcon",
    "gemma4_text",
    "gpt_oss",
    "hunyuan_v1_moe",
    "opt",
)
"""Kinds that nothing else tests: latent attention, heads of several widths, sinks, positions of
their own."""


def refusal(kind: str) -> str:
    """Why a type of model is refused; nothing where it is not."""
    config, models = CONFIG_MAPPING[kind](), cast(Any, MODEL_FOR_CAUSAL_LM_MAPPING)
    try:
        refuse_unsupported(config, models.get(type(config), None))
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    "kind", [t if t in SOME else pytest.param(t, marks=pytest.mark.long) for t in TYPES]
)
def test_every_accepted_architecture_is_exact(kind: str) -> None:
    if kind in NOT_BUILT:
        pytest.skip(NOT_BUILT[kind])
    if told := refusal(kind):
        assert f"(model_type '{CONFIG_MAPPING[kind]().model_type}') is not supported: " in told
        assert kind not in SOME
        return
    model = tiny(kind)
    ids = torch.tensor([PROMPT])
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    theirs = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[
        0, len(PROMPT) :
    ].tolist()
    target = Target(CausalLM(model), kind)
    if kind in LATE:
        with pytest.raises(UserError, match=LATE[kind]):
            target.new_cache(1, 8)
        return
    drafters: tuple[Drafter[Any], ...] = (
        Suffix().open(target),
        Sometimes([[*PROMPT, *theirs]], VOCAB),
    )
    for drafter in drafters:
        written = Engine(target, drafter, EAGLE2(nodes=12, depth=4, width=3)).write(
            [Request(PROMPT, NEW)]
        )
        assert written.tokens == [theirs]
    assert written.stats.acceptance_length > 1.5, (
        "nothing of what was drafted was accepted: the test is idle"
    )
