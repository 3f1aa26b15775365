"""Check on given prompts that drafts change neither a target's texts nor its distribution.

An acceptor that keeps the text must write plain decoding's tokens, one that keeps the distribution
must follow the target's probabilities. How far passes of different width round differently is
measured with the stock model, which no mask of ours reaches.

Shapes: n tokens of a text, V vocabulary.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from draftree.acceptors.base import Acceptor
from draftree.costs.cost_table import CostTable
from draftree.doctor.finding import HALF, PROBABILITY_NOISE, Finding, Said
from draftree.drafters.base import Drafter
from draftree.engine import Engine, common_prefix_length, generate_plain
from draftree.policies.base import Policy
from draftree.registry import build, check_exact, is_exact, parts
from draftree.request import Emitted, Request
from draftree.sampling.params import Sampling
from draftree.target.target import Target
from draftree.testing.conformance import preference
from draftree.utils.progress_callback import Tell, ignore_progress

ERROR_LEVEL, MISS_LEVEL = 1e-3, 1e-2
"""Probability that any frequency test fails by chance, and that one misses the stated error."""
NOISE_FACTOR, COMPARED_LOGITS = 4, 64
"""Factor of the measured noise that still counts as noise, and number of compared logits."""
SEEDS, TEXTS_PER_BATCH, MAX_CERTAINTY = 2, 32, 0.9
"""Number of texts of each prompt at temperatures above 0. Of frequency tests: number of texts in a
batch, and largest probability of a token where the drawn token counts."""
Figures = dict[str, Any]
"""Figures by their key in the report's JSON form."""
Output = tuple[list[int], Tensor]
"""Tokens of a text, and the target's logits [n, V] from which each was chosen."""


class Case(NamedTuple):
    """Describe one test: an acceptor and a policy at a temperature.

    If texts need not be those of plain decoding, the frequencies of tokens are tested.
    """

    name: str
    temperature: float
    rule: Acceptor
    grown: Policy
    keeps_text: bool


def cases(
    policies: Sequence[str], acceptors: Sequence[str], temperatures: Sequence[float]
) -> list[Case]:
    """Return all valid combinations of specs; without acceptors, those of all exact ones.

    An acceptor that is exact with none of the policies gets a chain, or a tree of fixed shape.

    Raises:
        UserError: a part does not exist, or an acceptor supports none of the temperatures.
    """
    rules: dict[str, Acceptor] = {a: build("acceptor", a) for a in acceptors or parts("acceptor")}
    grown: dict[str, Policy] = {p: build("policy", p) for p in policies}
    found: list[Case] = []
    for t, (a, rule) in itertools.product(dict.fromkeys(temperatures), rules.items()):
        if not acceptors and (rule.lossy or (t == 0) != (a == "greedy")):
            continue  # at temperature 0, every acceptor does the same
        asked = [Request([0], sampling=Sampling(t))]
        other = "chain" if rule.chains else "vct:width=2,depth=2"
        pool = {p: g for p, g in grown.items() if is_exact(g, rule, asked)}
        for p, g in (pool or {other: build("policy", other)}).items():
            if is_exact(g, rule, asked):
                keeps = rule.keeps_text or t == 0
                found.append(Case(f"{a}, {p}, T = {t:g}", t, rule, g, keeps))
        if a in acceptors and t == temperatures[-1] and all(c.rule is not rule for c in found):
            check_exact(build("policy", other), rule, asked)  # raises the error
    return found


def generate_one(generate: Callable[..., Any], request: Request, sampling: Sampling) -> Output:
    """Generate a text by plain decoding or by an engine."""
    events: list[Emitted] = []
    tokens = generate([request], sampling=sampling, on_tokens=events.extend).tokens[0]
    return tokens, torch.stack([s.raw for e in events for s in e.scores])


@torch.inference_mode()
def stock_logits(target: Target, prompt: Sequence[int], tokens: Sequence[int]) -> Tensor:
    """Return [m, V] the stock model's logits for the first m of n tokens after a prompt.

    If rotary frequencies change with the length of the text, such a pass differs from decoding by
    design, and m is the number of tokens before the change. Otherwise m is n.
    """
    count, boundary = len(tokens), target.decoder.rope_boundary
    if boundary is not None and (boundary[0] == "dynamic" or len(prompt) <= boundary[1]):
        count = max(min(count, boundary[1] - len(prompt) + 1), 0)
    ids = [*prompt, *tokens][: len(prompt) + max(count, 1) - 1]
    given = {"input_ids": torch.tensor([ids], device=target.decoder.device), "use_cache": False}
    logits: Tensor = target.decoder.model(**given, logits_to_keep=max(count, 1)).logits
    return logits[0, :count]


def measure_noise(narrow: Tensor, wide: Tensor) -> Figures:
    """Return the largest differences between two sets of logits [n, V] after the same tokens.

    `logits` compares the `COMPARED_LOGITS` likeliest tokens, relative to the likeliest one. `p` is
    a probability's difference, `tv` the total variation distance, and `scale` the largest logit.
    """
    n = min(len(narrow), len(wide))
    a, b = (x[:n].cpu().double() for x in (narrow, wide))
    best = a.topk(min(COMPARED_LOGITS, a.shape[-1])).indices
    moved = b.gather(-1, best) - a.gather(-1, best)
    shift = (moved - moved[:, :1]).abs().nan_to_num(0, math.inf)  # NaN for tokens at −∞ in both
    apart = (a.softmax(-1) - b.softmax(-1)).abs()
    found = {"logits": shift, "p": apart, "tv": apart.sum(-1) / 2, "scale": a.amax(-1).abs()}
    return {key: float(x.max()) if n else 0.0 for key, x in found.items()}


def draw_ranks(engine: Engine, requests: list[Request], temperature: float) -> list[float]:
    """Draw tokens, and return ranks that are uniform on [0, 1] if they follow the target's p.

    A rank is p(likelier tokens) + u · p(equally likely tokens) with a random u (Rosenblatt 1952).
    A text's first token, for which nothing is drafted, is left out, and so are certain ones.
    """
    ranks, written = list[float](), engine.write(requests, Sampling(temperature), reuse=False)
    for request, tokens in zip(requests, written.tokens, strict=True):
        logits = stock_logits(engine.target, request.prompt, tokens)[1:].cpu().double()
        p = (logits / temperature).softmax(-1)
        chosen = p.gather(-1, torch.tensor(tokens)[1 : 1 + len(p), None])
        likelier, equal = ((p * which).sum(-1).numpy() for which in (p > chosen, p == chosen))
        found = likelier + np.random.default_rng(request.number).random(len(p)) * equal
        ranks += found[p.amax(-1).numpy() <= MAX_CERTAINTY].tolist()
    return ranks


def compare(
    target: Target, request: Request, sampling: Sampling, base: Output, ours: Output
) -> Figures:
    """Return where a text first differs from plain decoding's, and how far logits up to there do.

    `margin` is by how much plain decoding prefers its token; ∞ at the end of a text.
    """
    at, margin = common_prefix_length(base[0], ours[0]), math.inf
    plain, other = (tokens[at] if at < len(tokens) else None for tokens, _ in (base, ours))
    if plain is not None and other is not None:
        margin = preference(target, request, sampling, base[0][: at + 1], other)
    shift = measure_noise(base[1][: at + 1], ours[1][: at + 1])["logits"]
    found = {"text": request.number, "seed": sampling.seed, "token": at, "plain": plain}
    return {**found, "ours": other, "margin": margin, "shift": shift, "tokens": len(base[0])}


def judge_ranks(case: Case, found: list[float], level: float, tv: float) -> tuple[Figures, Finding]:
    """Test whether ranks are uniform by their Kolmogorov–Smirnov distance; return the verdict too.

    The p-value is the bound of Massart (1990). Distances of up to `tv` beyond chance are noise.
    """
    n, r, exact = max(len(found), 1), np.sort(found or [0.5]), not case.rule.lossy
    far = float(np.maximum(np.arange(1, n + 1) / n - r, r - np.arange(n) / n).max())
    chance, p_value = 0.8687 / math.sqrt(n), min(1.0, 2 * math.exp(-2 * n * far**2))
    reach = sum(math.sqrt(math.log(2 / x) / (2 * n)) for x in (level, MISS_LEVEL))
    failed = exact and p_value < level
    said: Said = "ok" if exact and not failed and reach < 1 else "warn"
    text = (
        f"{len(found):,} tokens; ranks are {far:.2f} from plain sampling's, {chance:.2f} by chance"
    )
    if failed and far - chance > tv:
        said, text = "bad", f"{text}: the acceptor is wrong with this policy or drafter; use match"
    elif not failed:
        text += f"; an error of {reach:.2f} would be found" if exact else "; lossy by design"
    figures = {"case": case.name, "trials": len(found), "p_value": p_value, "distance": far}
    figures |= {"chance": chance, "detectable": min(reach, 1.0), "exact": exact}
    return figures, Finding(case.name, p_value if exact else far, said, text)


def judge_texts(case: Case, texts: list[Figures], allowed: float) -> tuple[Figures, Finding]:
    """Return figures and the verdict of compared texts; logits up to `allowed` apart are noise."""
    parted = [t for t in texts if t["plain"] != t["ours"]]
    shift, tokens = max(t["shift"] for t in texts), sum(t["tokens"] for t in texts)
    told = f"{tokens} tokens; logits differ from plain decoding's by up to {shift:.1g}"
    worst = max(parted, key=lambda t: t["margin"], default=None)
    if worst is not None:
        told = "text {text}, seed {seed}, token {token} is {ours}, plain decoding prefers {plain} "
        told = (told + "by {margin:.2g}").format(**worst)
    said: Said = "warn" if parted else "ok"
    if not shift <= allowed:
        said, told = "bad", f"{told}; logits of a verification are {shift:.2g} off, which no noise "
        told += "explains: a mask, a position or a kernel is wrong"
    elif worst is not None and not worst["margin"] <= allowed:
        said, told = "bad", f"{told}, which no noise explains: the acceptor is wrong, logits agree"
    figures = {"case": case.name, "texts": len(texts), "tokens": tokens, "parted": parted}
    same = f"{len(texts) - len(parted)}/{len(texts)}"
    return figures | {"shift": shift}, Finding(case.name, same, said, told)


def conclude(
    dtype: torch.dtype, noises: list[Figures], results: list[tuple[Case, list[Any]]]
) -> Figures:
    """Judge plain decoding, each case by its compared texts or its ranks, and all together."""
    noise = {key: max(n[key] for n in noises) for key in noises[0]}
    allowed = NOISE_FACTOR * max(noise["logits"], torch.finfo(dtype).eps * noise["scale"])
    level = ERROR_LEVEL / max(sum(not c.keeps_text and not c.rule.lossy for c, _ in results), 1)
    limit, half = PROBABILITY_NOISE.get(dtype, HALF), dtype not in PROBABILITY_NOISE
    said: Said = "ok" if noise["p"] <= limit else "warn" if half else "bad"
    text = f"probabilities differ from the stock model's by up to {noise['p']:.1g}, noise is below "
    text += f"{limit:.0e}; logits that differ by up to {allowed:.1g} count as noise"
    judged = [
        judge_texts(c, f, allowed) if c.keeps_text else judge_ranks(c, f, level, noise["tv"])
        for c, f in results
    ]
    findings = [Finding("plain decoding", noise["p"], said, text), *(f for _, f in judged)]
    compared = [figures for figures, _ in judged if "texts" in figures]
    tested = [figures for figures, _ in judged if "trials" in figures]
    tests = sum(t["exact"] and t["trials"] > 0 for t in tested)
    faults = [f.name for f in findings if f.verdict == "bad"]
    faults += [] if compared or tests else ["nothing that was asked for promises it"]
    count, parted = sum(t["texts"] for t in compared), sum(len(t["parted"]) for t in compared)
    told = [f"{count - parted} of {count} texts the same as plain decoding's"] if count else []
    told += [f"{parted} parted where the margin is within the numerical noise"] if parted else []
    told += [f"{tests} of {tests} frequency tests passed"] if tests else []
    line = f"NOT lossless: {'; '.join(faults)}" if faults else f"lossless: {', '.join(told)}"
    lossy = [c.name for c, _ in results if c.rule.lossy]
    line += "".join(f"; {name} is lossy by design" for name in lossy)
    report = {"noise": noise, "allowed": allowed, "level": level, "findings": findings}
    report |= {"compared": compared, "frequencies": tested, "lossy": lossy}
    return report | {"lossless": not faults, "summary": line}


def examine(
    target: Target,
    drafter: Drafter[Any],
    prompts: Sequence[Sequence[int]],
    chosen: Sequence[Case],
    costs: CostTable | None = None,
    tell: Tell = ignore_progress,
    max_new_tokens: int = 48,
    trials: int = 2000,
) -> Figures:
    """Compare the output with drafts with the target's own; return the report's JSON form.

    `findings` are of type `Finding`. A prompt that cannot be served raises a `UserError`.
    """
    work = [(c, Engine(target, drafter, c.grown, c.rule, costs), list[Any]()) for c in chosen]
    drawn = [each for each in work if not each[0].keeps_text]
    warm = dict.fromkeys(c.temperature for c in chosen if c.keeps_text) or [0.0]
    runs = [Sampling(t, seed=seed) for t in warm for seed in range(SEEDS if t else 1)]
    count = math.ceil(trials / max_new_tokens)
    firsts = range(0, count, TEXTS_PER_BATCH)
    steps, total = itertools.count(), len(prompts) * len(runs) + len(firsts) * len(drawn)
    noises, ask = list[Figures](), partial(Request, max_new_tokens=max_new_tokens, eos=target.eos)
    for (number, prompt), sampling in itertools.product(enumerate(prompts), runs):
        tell(next(steps), f"text {number}, T = {sampling.temperature:g}", total)
        request = ask(list(prompt), number=number, keep_scores=True)
        base = generate_one(partial(generate_plain, target), request, sampling)
        noises.append(measure_noise(base[1], stock_logits(target, prompt, base[0])))
        for case, engine, found in work:
            if case.keeps_text and case.temperature == sampling.temperature:
                ours = generate_one(partial(engine.write, reuse=False), request, sampling)
                found.append(compare(target, request, sampling, base, ours))
    for (case, engine, found), first in itertools.product(drawn, firsts):
        tell(next(steps), case.name, total)
        numbers = range(first, min(first + TEXTS_PER_BATCH, count))
        requests = [ask(list(prompts[n % len(prompts)]), number=n) for n in numbers]
        found += draw_ranks(engine, requests, case.temperature)
    report = {"target": target.name, "drafter": drafter.description, "texts": len(prompts)}
    return report | conclude(target.decoder.dtype, noises, [(c, f) for c, _, f in work])
