"""The pairings of acceptor, policy and temperature that the lossless check runs."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from draftree.acceptors.base import Acceptor
from draftree.errors import UserError
from draftree.policies.base import Policy
from draftree.registry import build, check_exact, parts
from draftree.sampling.params import Sampling

CHAINS, TREES = "chain", "vct:width=2,depth=2"
"""Policies for acceptors that are not exact with the given policies: a chain, and a tree whose
shape does not depend on drawn tokens."""


@dataclass(frozen=True)
class Case:
    """Describe one case to test: an acceptor with a policy at a temperature.

    Attributes:
        acceptor: spec of the acceptor.
        policy: spec of the policy.
        temperature: sampling temperature; 0 for greedy decoding.
        rule: the acceptor as an object.
        grown: the policy as an object.
        instead: reason for a policy that was not requested; empty for a requested one.
    """

    acceptor: str
    policy: str
    temperature: float
    rule: Acceptor = field(repr=False)
    grown: Policy = field(repr=False)
    instead: str = ""

    @property
    def name(self) -> str:
        """Return the name of the case: acceptor, policy and temperature."""
        return f"{self.acceptor}, {self.policy}, T = {self.temperature:g}"

    @property
    def keeps_text(self) -> bool:
        """Return whether the texts must equal plain decoding's, and not only in distribution."""
        return self.rule.keeps_text or self.temperature == 0


def cases(
    policies: Sequence[str], acceptors: Sequence[str], temperatures: Sequence[float]
) -> list[Case]:
    """Return the cases for all valid combinations of acceptor, policy and temperature.

    An acceptor that is not exact with any of the policies gets another policy with which it is.

    Args:
        policies: specs of policies.
        acceptors: specs of acceptors; empty for all exact acceptors.
        temperatures: sampling temperatures; 0 for greedy decoding.

    Raises:
        UserError: a part does not exist, or an acceptor supports none of the temperatures.
    """
    grown = {p: build("policy", p) for p in policies}
    kinds: dict[str, type[Acceptor]] = parts("acceptor")
    rules: dict[str, Acceptor] = {
        a: build("acceptor", a) for a in acceptors or (a for a in kinds if not kinds[a].lossy)
    }
    found: list[Case] = []
    for temperature in dict.fromkeys(temperatures):
        greedy = Sampling(temperature).greedy
        for name, rule in rules.items():
            serves = rule.greedy if greedy else rule.sampling
            if serves and (
                acceptors or not greedy or name == "greedy"
            ):  # at 0 match is greedy by another name
                found += _with_policies(name, rule, temperature, grown)
    for name in acceptors:
        if all(c.acceptor != name for c in found):
            given = ", ".join(f"{t:g}" for t in temperatures)
            allowed = "0" if rules[name].greedy else "above 0"
            raise UserError(
                f"acceptor '{name}' serves none of the temperatures {given}; allowed: {allowed}"
            )
    return found


def _with_policies(
    name: str, rule: Acceptor, temperature: float, grown: dict[str, Policy]
) -> list[Case]:
    found, reasons = [], []
    for spec, policy in grown.items():
        try:
            check_exact(policy, rule)
            found.append(Case(name, spec, temperature, rule, policy))
        except UserError:
            reasons.append(spec)
    if not found:
        spec = CHAINS if rule.chains else TREES
        instead = f"with {' or '.join(reasons)}, which prune{'s' * (len(reasons) == 1)} on what was drawn, it is refused"
        found.append(Case(name, spec, temperature, rule, build("policy", spec), instead))
    return found
