"""What stands at the head of a picture."""

from collections.abc import Mapping, Sequence
from statistics import fmean

from draftree.viewer.steps import Step


def totals(steps: Sequence[Step]) -> str:
    """τ, nodes and depth a step, and how many steps and tokens."""
    verified = [s for s in steps if s.number]
    written = sum(len(s.tokens) for s in steps)
    tokens = f"{written} token{'s' * (written > 1)}"
    if not verified:
        return f"{tokens}, no step"
    count = f"{len(verified)} step{'s' * (len(verified) > 1)}"
    return (
        f"τ {fmean(s.accepted + 1 for s in verified):.2f} · {tokens} in {count} and the prompt's forward · "
        f"{fmean(len(s.nodes) - 1 for s in verified):.1f} nodes, depth {fmean(s.depth for s in verified):.1f} a step"
    )


def made_by(about: Mapping[str, str]) -> str:
    """Everything but the prompt, in a line."""
    return " · ".join(f"{name} {what}" for name, what in about.items() if name != "prompt")
