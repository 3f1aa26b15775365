"""transformers' `generate` with draftree's decoding loop, as it is loaded from a hub repository."""

import draftree


def generate(model, *, drafter=None, policy=None, acceptor=None, tokenizer=None, **given):
    """Generate with draft trees; the options of `draftree.speculate` may be among the arguments of `generate`."""
    chosen = {"drafter": drafter, "policy": policy, "acceptor": acceptor, "tokenizer": tokenizer}
    hook = draftree.speculate(
        **{name: value for name, value in chosen.items() if value is not None}
    )
    return model.generate(custom_generate=hook, **given)
