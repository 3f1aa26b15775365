"""State shared by all requests: the model, the worker and the options."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

from draftree.data.prompts import encode
from draftree.engine import Engine
from draftree.registry import build
from draftree.request import Request
from draftree.serving.answer_text import AnswerText
from draftree.serving.errors import ApiError
from draftree.serving.metrics import Metrics
from draftree.serving.options import ServeOptions
from draftree.serving.prompts import chat_ids
from draftree.serving.reasoning import END_OF_REASONING, opens_reasoning, splitter
from draftree.serving.request_models import (
    ChatBody,
    CompletionBody,
    FunctionTool,
    Sampled,
    Speculation,
)
from draftree.serving.request_options import chat_options, completion_options, forced_tools
from draftree.serving.tool_calls import ForcedCall
from draftree.serving.worker import Speculative, Work, Worker
from draftree.target.target import Target
from draftree.text.options import Options
from draftree.viewer.token_text import Spellings

PLAIN_PARTS = ("pld", "pct:max_depth=0")
"""Specs of a drafter and a policy that draft nothing, for plain decoding."""


@dataclass
class Prepared:
    """Store a request that has been checked and can be passed to the worker.

    Attributes:
        work: description of the texts for the worker.
        texts: objects that build the texts of the answer, one for each.
        prompt_tokens: number of tokens over all prompts.
        prompts: number of prompts in the request.
        echoed: text of each prompt if `echo` was requested; empty otherwise.
    """

    work: Work
    texts: list[AnswerText]
    prompt_tokens: int
    prompts: int = 1
    echoed: list[str] = field(default_factory=list)


class ServerState:
    """Store the model, the worker and the options that all requests share.

    Args:
        engine: the server's default engine. Requests with other speculative options get other
            engines over the same target.
        drafter: spec of the default engine's drafter.
        policy: spec of the default engine's policy.
        options: options of the server.
    """

    def __init__(self, engine: Engine, drafter: str, policy: str, options: ServeOptions) -> None:
        self.engine = engine
        self.drafter = drafter
        self.policy = policy
        self.options = options
        self._opened = {drafter: engine.drafter}  # by spec; their states belong to the engines
        self.metrics = Metrics()
        self.worker = Worker(engine.target, self._engine_for, self.metrics, options.limits.waiting)
        self.started = int(time.time())
        self.warm = False

    @property
    def target(self) -> Target:
        """Return the model that answers all requests."""
        return self.engine.target

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the target's tokenizer."""
        return self.engine.tokenizer

    @cached_property
    def spellings(self) -> Spellings:
        """Return the table of the bytes that each token id stands for."""
        return Spellings(self.tokenizer)

    @property
    def drafters(self) -> tuple[str, ...]:
        """Return the specs of the drafters that a request may name, the default drafter first."""
        return tuple(dict.fromkeys((self.drafter, *self.options.allowed_drafters)))

    @property
    def policies(self) -> tuple[str, ...]:
        """Return the specs of the policies that a request may name, the default policy first."""
        return tuple(dict.fromkeys((self.policy, *self.options.allowed_policies)))

    def check_model(self, name: str | None) -> None:
        """Raise an `ApiError` if a request names another model than the server's."""
        if name not in (None, self.options.model_name):
            told = f"the model {name[:200]!r} does not exist here; this server has {self.options.model_name!r}"
            raise ApiError(404, told, "model", "model_not_found")

    def warm_up(self) -> None:
        """Generate a few tokens, so that the first request does not wait for set-up work."""
        self.engine.complete("1 2 3 4 1 2 3 4 1 2 3", max_new_tokens=4)
        self.engine.forget()
        self.warm = True

    def begin(self) -> None:
        """Warm up, and then start the worker; requests that come before wait for it."""
        try:
            self.warm_up()
        finally:
            self.worker.start()

    def prepare_chat(self, body: ChatBody, owner: str) -> Prepared:
        """Check a chat request, and return it in the form for the worker.

        Raises:
            ApiError, UserError: the request cannot be served.
        """
        self.check_model(body.model)
        tools = [] if body.tool_choice == "none" else [tool.function for tool in body.tools or []]
        shown = body.tools or [] if tools else []
        ids = chat_ids(self.tokenizer, body.messages, shown)
        options = chat_options(body, self.options.limits, self._room(ids))
        forced = forced_tools(body, self.options.limits)
        prompt_end = str(self.tokenizer.decode(ids[-8:]))
        if options.grammar is not None and opens_reasoning(prompt_end):
            # The grammar holds from the first token on, so the reasoning ends before it.
            ids = [*ids, *self.tokenizer.encode(END_OF_REASONING, add_special_tokens=False)]
            prompt_end = END_OF_REASONING
        prepared = self._prepare([ids], options, body, owner)
        prepared.texts = [self._chat_text(prompt_end, tools, bool(forced)) for _ in prepared.texts]
        return prepared

    def _chat_text(
        self, prompt_end: str, tools: Sequence[FunctionTool], forced: bool
    ) -> AnswerText:
        call = ForcedCall() if forced else None
        return AnswerText(
            splitter(str(self.tokenizer.chat_template or ""), prompt_end), tools, call
        )

    def prepare_completion(self, body: CompletionBody, owner: str) -> Prepared:
        """Check a completion request, and return it in the form for the worker.

        Raises:
            ApiError, UserError: the request cannot be served.
        """
        self.check_model(body.model)
        prompts = self._prompts(body.prompt)
        room = max(map(self._room, prompts))
        options = completion_options(body, self.options.limits, room)
        prepared = self._prepare(prompts, options, body, owner)
        if body.echo:
            prepared.echoed = [
                str(self.tokenizer.decode(ids, skip_special_tokens=True)) for ids in prompts
            ]
        return prepared

    def _prompts(self, prompt: Any) -> list[list[int]]:
        """Return the token ids of one or several prompts, each given as text or as token ids.

        Raises:
            ApiError: there is no prompt, or there are too many.
        """
        one = isinstance(prompt, str) or (bool(prompt) and isinstance(prompt[0], int))
        several = [prompt] if one else list(prompt)
        most = self.options.limits.choices
        if not 0 < len(several) <= most:
            raise ApiError(
                400, f"prompt has {len(several)} prompts, allowed are 1 … {most}", "prompt"
            )
        return [encode(self.tokenizer, p) if isinstance(p, str) else list(p) for p in several]

    def _room(self, ids: Sequence[int]) -> int:
        """Return the number of tokens that fit after a prompt into the context and the cache.

        Raises:
            ApiError: the prompt leaves no space for a new token.
        """
        context = self.target.decoder.context
        cache = self.options.batching.cache_tokens(context)
        if len(ids) >= min(context, cache):
            what = "model's context" if context <= cache else "server's cache"
            most = min(context, cache)
            allowed = f"allowed are at most {most - 1} of this {what} of {most}"
            told = f"the prompt has {len(ids)} tokens, {allowed}"
            raise ApiError(400, told, code="context_length_exceeded")
        return min(context, cache) - len(ids)

    def _prepare(
        self, prompts: Sequence[list[int]], options: Options, body: Sampled, owner: str
    ) -> Prepared:
        """Return prompts and options in the form for the worker."""
        requests = []
        for ids in prompts:
            most = min(options.max_new_tokens, self._room(ids))
            fitting = replace(options, max_new_tokens=most)
            requests += [fitting.request(self.target, ids, n) for n in range(options.n)]
        self._check_ids(requests)
        speculative = self.speculative(body.speculative, owner)
        work = Work(
            requests,
            options.stops(self.tokenizer),
            speculative,
            trees=body.metrics == "trees",
            continues=isinstance(body, CompletionBody),
        )
        texts = [AnswerText(splitter(None, "")) for _ in requests]
        return Prepared(work, texts, sum(map(len, prompts)), len(prompts))

    def _check_ids(self, requests: Sequence[Request]) -> None:
        vocabulary = self.target.decoder.vocab
        for request in requests:
            if not request.prompt:
                raise ApiError(
                    400, "the prompt is empty: it has 0 tokens, at least 1 is needed", "prompt"
                )
            if max(request.prompt) >= vocabulary:
                told = f"the prompt has token id {max(request.prompt)}, allowed are 0 … {vocabulary - 1}"
                raise ApiError(400, told, "prompt")

    def speculative(self, asked: bool | Speculation | None, owner: str) -> Speculative:
        """Return the drafter and policy for a request, given its field `speculative`.

        Raises:
            ApiError: the request names a drafter or policy that the operator does not allow, or
                sets a number of nodes for a policy without this option.
        """
        if asked is False:
            return Speculative(owner, self.drafter, self.policy, plain=True)
        if asked is None or asked is True:
            return Speculative(owner, self.drafter, self.policy)
        drafter, policy = asked.drafter or self.drafter, asked.policy
        self._check_allowed("drafter", drafter, self.drafters)
        if policy is None:
            policy = self.policy
        self._check_allowed("policy", policy, self.policies)
        if asked.nodes is not None:
            policy = with_nodes(policy, asked.nodes)
        return Speculative(owner, drafter, policy)

    def _check_allowed(self, what: str, spec: str, allowed: Sequence[str]) -> None:
        if spec not in allowed:
            told = f"speculative.{what} is {spec[:200]!r}, this server allows {', '.join(allowed)}"
            raise ApiError(400, told, f"speculative.{what}")

    def _engine_for(self, key: Speculative) -> Engine:
        """Return a new engine over the server's target for the given speculative options."""
        drafter, policy = PLAIN_PARTS if key.plain else (key.drafter, key.policy)
        if drafter not in self._opened:
            self._opened[drafter] = build("drafter", drafter).open(self.target)
        opened, rule = self._opened[drafter], self.engine.acceptor
        engine = Engine(self.target, opened, build("policy", policy), rule, self.engine.costs)
        engine.set_limits(**vars(self.options.batching))
        return engine


def with_nodes(policy: str, nodes: int) -> str:
    """Return the spec of a policy with another number of drafted nodes.

    Raises:
        ApiError: the policy has no option for the number of nodes.
    """
    kind = type(build("policy", policy))
    option = next((f.name for f in fields(kind) if f.name in ("nodes", "max_nodes")), None)
    if option is None:
        told = f"speculative.nodes is {nodes}, but the policy {policy!r} chooses the number of nodes itself"
        raise ApiError(400, told, "speculative.nodes")
    return f"{policy}{',' if ':' in policy else ':'}{option}={nodes}"
