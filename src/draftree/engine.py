"""The engine: a target, drafter, policy and acceptor that generate text together."""

import time
import warnings
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import islice
from pathlib import Path
from threading import Lock, RLock
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn, Self, overload

import numpy as np
import torch
from transformers import BatchEncoding, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from draftree import loop
from draftree.acceptors.base import Acceptor
from draftree.acceptors.greedy import Greedy
from draftree.acceptors.match import Match
from draftree.aliases import DEVICE, ENGINE, LOADING, accepted
from draftree.aliases.conversions import rewritten_loading
from draftree.aliases.flag_hints import THREAD_WORDS
from draftree.batch import Generation, Rows
from draftree.cost_estimate import learnt_costs
from draftree.costs.curves import UNIT, Costs, CostSource, CostTable
from draftree.costs.online import OnlineCosts
from draftree.costs.probe import start_probe
from draftree.data.prompts import Prompt, Prompts, chats_of, ids_of, prompts_of, rendered
from draftree.data.readers import Messages
from draftree.drafters._from_objects import LoadedModel, OpenDrafter
from draftree.drafters.base import Drafter, Method
from draftree.drafting.states import carried
from draftree.errors import DraftreeWarning, Hinting, UnknownAttribute, UserError, shown
from draftree.formats.known_checkpoints import best_for, published_for
from draftree.hf.generate import Hook, check_types, generate, is_text, taken_text, takes_hook_calls
from draftree.loop import Parts, State, decode
from draftree.metrics import Stats
from draftree.models.kv_cache import SlotCache
from draftree.models.load_options import Loading
from draftree.models.quantization_support import count_parameters
from draftree.native import check_variable, report_absence
from draftree.policies.base import Policy
from draftree.registry import KINDS, build, check_exact, names
from draftree.request import Emitted, Request, all_greedy, check, under
from draftree.sampling.keyed_noise import Chance
from draftree.sampling.params import GREEDY, Sampling
from draftree.scheduling.handle import Handle, Update
from draftree.scheduling.options import SchedulerOptions
from draftree.scheduling.scheduler import Scheduler
from draftree.target.names import ALLOWED, DEMO, SMOLLM2, known, known_as, without_weights
from draftree.target.target import Needs, Target, name_of, usable, warn_of_training
from draftree.text import completion
from draftree.text.calls import ECHO, STOP, after_history, asks_for, of_template, takes_prompt
from draftree.text.completion import Completion, Reading, Token, Writing, whole_text
from draftree.text.conversation import Conversation, started
from draftree.text.options import Options
from draftree.text.stop_strings import Stops
from draftree.tree import Draw, Ints
from draftree.utils.files import understood
from draftree.utils.profiler import recorded
from draftree.utils.progress import announced
from draftree.utils.validated_dataclass import translated, whole

SETTING = Lock()
"""Guards the creation of schedulers."""
USUAL = {DEMO: ("edd", "pct"), SMOLLM2: ("eagle3+suffix", "yield")}
"""The fastest shipped drafter and policy of a target, used if no drafter is named.

Measurements are in `docs/reference/benchmarks/`.
"""
UNTRAINED = ("suffix", "yield")
"""Drafter and policy for other targets: they need no training."""
PUBLISHED = "published"
"""Name of the drafter spec for the published drafter that is known for the target."""
NAMED = "pct"
"""The policy of a named drafter that does not define its own."""


PARTS = ("drafter", "policy", "acceptor")
LOADED = (*(f.name for f in fields(Loading)), "target", *PARTS)
"""The arguments that are also accepted under other tools' names."""


@dataclass(frozen=True)
class Held:
    """The prefix cache: texts, and the caches of target and drafter that hold them."""

    texts: list[Ints]
    cache: SlotCache
    drafter_state: Any


class _Loads(type):
    """Metaclass of `Engine` that forwards to `load`.

    `Engine(…)` with anything other than an opened `Target` calls `load`. `Engine.load` and
    `Engine.from_pretrained` are `load` as well.
    """

    if not TYPE_CHECKING:

        def __getattr__(cls, name: str) -> Any:
            if name in ("from_pretrained", "load"):
                return load
            raise UnknownAttribute(ENGINE, name, cls)

    def __call__(cls, *parts: Any, **named: Any) -> Any:
        opened = isinstance(parts[0] if parts else named.get("target"), Target)
        return super().__call__(*parts, **named) if opened else load(*parts, **named)


@dataclass(repr=False)
class Engine(Hinting, metaclass=_Loads):
    """Writes with one target, one drafter and one policy.

    Attributes:
        target: the model whose output is wanted.
        drafter: proposes tokens.
        policy: grows them into trees.
        acceptor: keeps what the target would have produced; by default `greedy` at temperature 0,
            else `match`.
        costs: fixed ones; by default they are learnt from the steps that run.
        held: what the last call left in the caches, for the next one with the same beginning.
        carried: what the drafter keeps from text to text.
        calls: how many the drafter may remember.
        learned: what policies that learn have learnt, by policy, drafter, how tokens are chosen,
            and acceptor.
    """

    kind_of_name: ClassVar[str] = ENGINE
    no_items: ClassVar[str] = (
        "an Engine has no items by number: engine = draftree.load(…); engine.tokenizer"
    )

    target: Target
    drafter: Drafter[Any]
    policy: Policy
    acceptor: Acceptor | None = None
    costs: Costs | CostTable | None = None
    held: Held | None = field(default=None, init=False, repr=False)
    carried: Any = field(default=None, repr=False)
    calls: int = field(default=0, repr=False)
    learned: dict[tuple[Policy, str, frozenset[Sampling], Acceptor], Any] = field(
        default_factory=dict, repr=False
    )
    _learnt: OnlineCosts | None = field(default=None, init=False, repr=False)
    _recommended: bool = field(default=False, init=False, repr=False, compare=False)
    _scheduler: Scheduler | None = field(default=None, init=False, repr=False, compare=False)
    _lock: AbstractContextManager[Any] = field(
        default_factory=RLock, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        """Refuse a target that the drafter cannot read, and size the policy by the target."""
        self.target.refuse_needs(self.drafter.needs)
        self.policy = self.policy.sized(count_parameters(self.target.decoder.model))

    def __repr__(self) -> str:
        """Return its parts."""
        rule = "" if self.acceptor is None else f", acceptor={self.acceptor!r}"
        return f"Engine(target={self.target.name!r}, drafter={self.drafter!r}, policy={self.policy!r}{rule})"

    def _parts(self) -> dict[str, Any]:
        if (target := vars(self).get("target")) is None:
            return {}
        return {
            "engine.target.decoder.model": target.decoder.model,
            "engine.tokenizer": target.tokenizer_or_none,
        }

    @takes_hook_calls
    def __call__(self, *prompt: Any, **options: Any) -> Any:
        """Run `complete`, as a pipeline of transformers is called."""
        if prompt and isinstance(prompt[0], torch.Tensor):
            raise UserError(
                "an Engine is called with a text: engine.target.decoder.model(ids) is the model's forward pass"
            )
        return self.complete(*prompt, **options)

    def __iter__(self) -> Iterator[Any]:
        """Yield the engine and its tokenizer: `load` of other tools returns both."""
        yield from (self, self.tokenizer)

    def __enter__(self) -> Self:
        """Return the engine itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Forget the texts that were written."""
        self.forget()

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled or copied."""
        told = "it holds a model, its caches and a lock; load one in each process, or share one among threads"
        raise UserError(f"an Engine cannot be pickled or copied: {told}")

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The target's tokenizer."""
        return self.target.tokenizer

    @property
    def eos(self) -> frozenset[int]:
        """The ids that end a text, by the target's generation config."""
        return self.target.eos

    def write(
        self,
        requests: Sequence[Request],
        sampling: Sampling | None = None,
        on_tokens: Callable[[list[Emitted]], None] | None = None,
        reuse: bool = True,
    ) -> Generation:
        """Write what the target would write, in fewer passes.

        A call that is interrupted (Ctrl-C), at whatever point, leaves an engine that can be used
        again.

        Args:
            requests: one for each row.
            sampling: of all requests, instead of their own.
            on_tokens: told the new tokens of every step; its own time is not counted.
            reuse: whether a prefix shared with the last call's texts is taken from the caches. What
                a drafter carries from text to text it keeps in any case.

        Raises:
            UserError: a request cannot be served, or the pairing of policy and acceptor is not
                exact.
        """
        check_listener(on_tokens)
        rows, steps = self.begin(requests, sampling, reuse)
        run(steps, rows, on_tokens, self._lock)
        return Generation(rows.written, rows.stats)

    @overload
    def complete(
        self, prompt: Prompt, *, stream: Literal[False] = False, **options: Any
    ) -> Completion: ...
    @overload
    def complete(
        self, prompt: Prompts, *, stream: Literal[False] = False, **options: Any
    ) -> list[Completion]: ...
    @overload
    def complete(
        self, prompt: Prompt, *, stream: Literal[True], **options: Any
    ) -> Iterator[Token]: ...
    @overload
    def complete(self, prompt: Any, *, stream: bool, **options: Any) -> Any: ...
    @takes_prompt
    def complete(self, prompt: Prompt | Prompts, *, stream: bool = False, **options: Any) -> Any:
        """Continue a text, token ids or a chat, or each prompt of a list.

        A text is continued as it is. A chat is a list of messages and goes through the chat
        template.

        A question to a chat model goes to `chat`, which applies the chat template: without it such
        a model often ends at once.

        The texts of a list are written in one batch. Each is the text that it would be alone, of
        the same seed too: one seed, one text, so a prompt that stands there twice gets it twice.
        (`write` takes requests with numbers of their own.)

        Args:
            prompt: what to continue or to answer. What its elements are says what a list is: ids,
                messages, or prompts.
            stream: return an iterator of tokens, as `stream` does.
            options: the attributes of `Options`, of all prompts.

        Returns:
            The completion; for `n` above 1 a list of n, and for a list of prompts a list of what
            each of them has.

        Raises:
            UserError: an option does not exist or is out of its range, or the prompt cannot be
                served.
        """
        if stream:
            return self.stream(prompt, **options)
        streamer = options.pop("streamer", None)
        echo = asks_for(options, ECHO)
        stop = asks_for(options, STOP)
        written = Writing(
            self, prompt, Options.of(None, options), alone=streamer is not None
        ).finish(streamer)
        self._recommend_chat(prompt, written)
        return whole_text(written, echo, stop)

    @takes_prompt
    def stream(self, prompt: Any, **options: Any) -> Iterator[Token]:
        """Yield the tokens of `complete`, each with the text that has become certain.

        Closing the iterator early ends the generation.

        Raises:
            UserError: as `complete`, or there are several prompts.
        """
        return Writing(self, prompt, Options.of(None, options), alone=True).tokens()

    @overload
    async def acomplete(
        self, prompt: Prompt, *, stream: Literal[False] = False, **options: Any
    ) -> Completion: ...
    @overload
    async def acomplete(
        self, prompt: Prompts, *, stream: Literal[False] = False, **options: Any
    ) -> list[Completion]: ...
    @overload
    async def acomplete(
        self, prompt: Prompt, *, stream: Literal[True], **options: Any
    ) -> AsyncIterator[Token]: ...
    @overload
    async def acomplete(self, prompt: Any, *, stream: bool, **options: Any) -> Any: ...
    @takes_prompt
    async def acomplete(
        self, prompt: Prompt | Prompts, *, stream: bool = False, **options: Any
    ) -> Any:
        """Run `complete` for asyncio.

        Steps run in worker threads, and tasks take turns. Cancelling the task ends the generation.
        """
        if stream:
            return self.astream(prompt, **options)
        written = await completion.complete(self, prompt, Options.of(None, options))
        self._recommend_chat(prompt, written)
        return written

    def _recommend_chat(self, prompt: Any, written: Any) -> None:
        """Warn once if a text looks like a question to a chat model without its chat template."""
        if (
            not isinstance(prompt, str)
            or self._recommended
            or not getattr(self.tokenizer, "chat_template", None)
        ):
            return
        first = written[0] if isinstance(written, list) else written
        if (asks := prompt.rstrip().endswith("?")) or not first.text.strip():
            self._recommended = True
            why = "the prompt looks like a question" if asks else "the completion is empty"
            told = f"{why}, and complete() continues a text as it is; chat() puts it into the model's chat template"
            warnings.warn(told, DraftreeWarning, stacklevel=3)

    @takes_prompt
    def astream(self, prompt: Any, **options: Any) -> AsyncIterator[Token]:
        """`stream` for asyncio."""
        return completion.stream(self, prompt, Options.of(None, options))

    @overload
    def chat(
        self,
        messages: str | Messages,
        *,
        system: str | None = None,
        stream: Literal[False] = False,
        **options: Any,
    ) -> Completion: ...
    @overload
    def chat(
        self,
        messages: list[str] | list[Messages],
        *,
        system: str | None = None,
        stream: Literal[False] = False,
        **options: Any,
    ) -> list[Completion]: ...
    @overload
    def chat(
        self,
        messages: str | Messages,
        *,
        system: str | None = None,
        stream: Literal[True],
        **options: Any,
    ) -> Iterator[Token]: ...
    @takes_prompt
    def chat(
        self, messages: Any, *, system: str | None = None, stream: bool = False, **options: Any
    ) -> Any:
        """Answer a question, or the messages of a chat, through the target's chat template.

        Nothing is kept for the next call: `conversation` keeps its messages. A model without a chat
        template continues the text of the messages.

        Args:
            messages: a question; messages, each with a role and a content; or a list of either,
                which is one batch.
            system: the system message, placed before the messages.
            stream: return an iterator of tokens, as `stream` does.
            options: the attributes of `Options`.

        Returns:
            The answer; a list of answers for a list of strings or a list of chats, and for `n`
            above 1.

        Raises:
            UserError: the messages are malformed or refused by the template, `system` is given
                twice, an option does not exist or is out of its range, or the prompt is too long.
        """
        system, values = of_template(system, options)
        messages = after_history(messages, options)
        return self.complete(
            rendered(self.tokenizer, chats_of(messages, system), values), stream=stream, **options
        )

    @takes_prompt
    async def achat(
        self, messages: Any, *, system: str | None = None, stream: bool = False, **options: Any
    ) -> Any:
        """Run `chat` for asyncio, as `acomplete` runs `complete`."""
        system, values = of_template(system, options)
        messages = after_history(messages, options)
        return await self.acomplete(
            rendered(self.tokenizer, chats_of(messages, system), values), stream=stream, **options
        )

    def conversation(
        self, system: str | None = None, messages: Messages | None = None, **options: Any
    ) -> Conversation:
        """Start a conversation that keeps its messages and their part of the caches between turns.

        Args:
            system: the system message.
            messages: earlier messages that the conversation continues.
            options: the attributes of `Options`, for every answer.

        Raises:
            UserError: the messages are malformed, or an option does not exist or is out of its
                range.
        """
        system, _ = of_template(system, options, ())
        return started(self, system, messages, options)

    def begin(
        self,
        requests: Sequence[Request],
        sampling: Sampling | None = None,
        reuse: bool = True,
        source: Callable[[Rows], Chance] | None = None,
    ) -> tuple[Rows, Iterator[list[Emitted]]]:
        """Return the sequences to generate, and an iterator that runs one step at a time.

        Each step yields the tokens it wrote.

        `write` runs it to the end.

        Args:
            requests: one for each row.
            sampling: of all requests, instead of their own.
            reuse: as for `write`.
            source: of the rows, what tokens are drawn from instead of the keyed noise.

        Raises:
            UserError: a request cannot be served, or the pairing of policy and acceptor is not
                exact.
        """
        if not isinstance(reuse, bool):
            raise UserError(f"reuse is {shown(reuse)}, allowed is true or false")
        check(requests, self.target)
        requests = under(requests, sampling)
        acceptor = self.acceptor or usual(all_greedy(requests))
        check_exact(self.policy, acceptor, requests)
        with self._lock:
            held, self.held = (
                self.held,
                None,
            )  # first of all: a call that is interrupted leaves no cache half changed
            if rest(self.target) or not reuse:
                held = None  # its memory is free for the new caches, of which passes may be recorded already
            cache, state = self._beginning(requests, held)
            rows = Rows(cache, source, self.calls, self._stats(acceptor, requests))
            parts = Parts(self.target, self.drafter, self.policy, acceptor, self.step_costs)
            self.calls += self.drafter.remembers  # one that carries nothing knows of no other call
        return rows, self._steps(parts, rows, requests, state)

    def _steps(
        self, parts: Parts, rows: Rows, requests: Sequence[Request], drafter: Any
    ) -> Iterator[list[Emitted]]:
        lesson = (
            self.policy,
            self.drafter.described,
            frozenset(r.sampling.knobs for r in requests),
            parts.acceptor,
        )
        state = State(drafter, self.learned.get(lesson))
        try:
            for events, after in decode(parts, rows, requests, state):
                state = after
                yield events
        except (
            GeneratorExit
        ):  # closed between two steps, where caches and texts agree; a later call's are worth more
            if self.held is None:
                self.held = held_of(rows, state)
            raise
        self.learned[lesson] = state.policy
        self.held = held_of(rows, state)
        self.carried = carried(self.drafter, state.drafter)

    def submit(
        self,
        prompt: Prompt | Request,
        *,
        number: int = 0,
        stops: Stops | None = None,
        **options: Any,
    ) -> Handle:
        """Let a prompt, or a request, wait for its turn in the running batch, and return at once.

        Requests join and leave the batch at any step; each text is the one that it is alone.
        Greedy, sampled and constrained requests run together. `step` writes; it may run in another
        thread.

        Args:
            prompt: what to continue or to answer, as for `complete`, or a request.
            number: tells apart several texts of one seed, as `n` of `complete` counts them.
            stops: the stop texts of a request; with a prompt, `stop` among the options names them.
            options: the attributes of `Options`; none with a request.

        Raises:
            UserError: an option does not exist or is out of its range, or the request cannot be
                served within the limits.
        """
        if isinstance(prompt, Request):
            if given := [*options, *(["number"] if number else [])]:
                raise UserError(
                    f"{given[0]} is given with a Request, allowed are options with a prompt: a Request has its own"
                )
            request, stops = prompt, stops or Stops()
        else:
            if stops is not None:
                raise UserError(
                    "stops are given with a prompt, allowed are they with a Request: write stop=[…]"
                )
            asked = Options.of(None, options)
            if (several := prompts_of(prompt)) is not None:
                raise UserError(
                    f"there is a list of {len(several)} prompts, allowed is one: submit each of them"
                )
            if asked.n > 1:
                raise UserError(
                    f"n is {asked.n}, allowed is 1 here: submit the prompt {asked.n} times with number 0, 1, …"
                )
            request = asked.request(self.target, ids_of(self.tokenizer, prompt), number)
            stops = asked.stops(self.tokenizer)
        check([request], self.target)
        check_exact(self.policy, self.acceptor or Match(), [request])
        return self.scheduler.submit(request, Reading(self.target.tokenizer_or_none, stops))

    def step(self) -> list[Update]:
        """Run one step of all submitted requests and return the new tokens of each.

        The list is empty if no request is unfinished.
        """
        return [] if self._scheduler is None else self._scheduler.step()

    def cancel(self, handle: Handle) -> None:
        """End a submitted request; the next step frees its slot.

        The tokens written so far stay readable.
        """
        if self._scheduler is not None:
            self._scheduler.cancel(handle)

    def set_limits(self, **options: Any) -> None:
        """Set the limits of submitted requests: the attributes of `SchedulerOptions`.

        Limits that are not named get their defaults.

        Raises:
            UserError: a limit does not exist or is out of its range, or requests are unfinished.
        """
        limits = SchedulerOptions.of(options)
        with SETTING:
            if self._scheduler is not None and self._scheduler.unfinished:
                raise UserError(
                    f"{self._scheduler.unfinished} requests are unfinished, limits are set while there are none"
                )
            self._scheduler = Scheduler(self, self._lock, limits)

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler of submitted requests: its limits, and how many wait and run."""
        with SETTING:
            if self._scheduler is None:
                self._scheduler = Scheduler(self, self._lock)
            return self._scheduler

    def scheduled_parts(self) -> tuple[Parts, State]:
        """Return the parts that run submitted requests, and their learnt state."""
        rest(self.target)
        acceptor = self.acceptor or Match()
        parts = Parts(self.target, self.drafter, self.policy, acceptor, self.step_costs)
        return parts, State(self.carried, self.learned.get(self._mixed_lesson(acceptor)))

    def remember(self, state: State) -> None:
        """Keep what drafter and policy have learnt from submitted requests."""
        self.learned[self._mixed_lesson(self.acceptor or Match())] = state.policy
        self.carried = carried(self.drafter, state.drafter)

    def _mixed_lesson(
        self, acceptor: Acceptor
    ) -> tuple[Policy, str, frozenset[Sampling], Acceptor]:
        return self.policy, self.drafter.described, frozenset(), acceptor

    def plain(
        self,
        requests: Sequence[Request],
        sampling: Sampling | None = None,
        on_tokens: Callable[[list[Emitted]], None] | None = None,
    ) -> Generation:
        """Write one token a pass: the baseline, and what `generate` must equal."""
        return plain(self.target, requests, on_tokens, sampling, self._lock)

    def keeps_text(self, sampling: Sampling = GREEDY) -> bool:
        """Return whether texts equal those of plain decoding, not only in distribution."""
        acceptor = self.acceptor or usual(sampling.greedy)
        return acceptor.keeps_text or (sampling.greedy and not acceptor.lossy)

    def timed(
        self, steps: Iterator[list[Emitted]], rows: Rows
    ) -> Generator[list[Emitted], None, None]:
        """Step that were begun, timed, and each of them alone with the models."""
        return timed(steps, rows, self._lock)

    @takes_hook_calls
    def generate(
        self,
        inputs: Any = None,
        generation_config: GenerationConfig | None = None,
        *,
        seed: int | None = None,
        streamer: Any = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        **options: Any,
    ) -> Any:
        """Return what the target's own `generate` returns, in fewer passes; see `speculate`.

        Given a text, or a list of texts, as in vLLM, it is `complete`.

        Args:
            inputs: [B, n] prompt ids, padded on the left; or `input_ids=` and `attention_mask=`
                among the options.
            generation_config: options in transformers' own form.
            seed: of the draws; by default from torch's global generator, so that
                `torch.manual_seed` repeats a call.
            streamer: told the prompt, each token and the end; for one row.
            tokenizer: for stop strings; the target's own by default.
            options: what transformers' `generate` takes.

        Returns:
            Ids [B, n + T], or a `GenerateDecoderOnlyOutput` with `return_dict_in_generate=True`.

        Raises:
            UserError: an option cannot be honoured.
        """
        if generation_config is not None:
            options["generation_config"] = generation_config
        if isinstance(inputs, BatchEncoding | dict) and "input_ids" in inputs:
            return self.generate(
                seed=seed, streamer=streamer, tokenizer=tokenizer, **inputs, **options
            )
        if inputs is None:
            inputs = taken_text(options)
        if is_text(inputs):
            named = {"seed": seed, "streamer": streamer, "tokenizer": tokenizer}
            return self.complete(
                inputs,
                **{name: value for name, value in named.items() if value is not None},
                **options,
            )
        return generate(self, inputs, seed, streamer, tokenizer, options)

    def forget(self) -> None:
        """Drop what the last call and the prompts of submitted requests left in the caches."""
        self.held = None
        if self._scheduler is not None:
            self._scheduler.forget()

    @property
    def step_costs(self) -> CostSource:
        """Return the costs of a step: the given ones, or those learnt on this machine.

        A policy that reads no costs gets `UNIT` unless costs are given.
        """
        if self.costs is not None or not self.policy.reads_costs:
            return self.costs or UNIT
        if self._learnt is None:
            self._learnt = learnt_costs(self.target, self.drafter)
        return self._learnt

    def _stats(self, acceptor: Acceptor, requests: Sequence[Request]) -> Stats:
        draw = Draw.POINT if all_greedy(requests) else acceptor.draw
        return Stats(
            acceptor=type(acceptor).__name__.lower(), draw=draw.value, deepest=self.policy.deepest
        )

    def _beginning(self, requests: Sequence[Request], held: Held | None) -> tuple[SlotCache, Any]:
        """Return the target's cache and the drafter's state that a call begins with.

        As much of the last call's is used as can be.
        """
        if held is None or len(held.texts) != len(requests) or not self.target.reuses_prefixes:
            return cache_of(self.target, requests), self.carried
        read = [r.prompt[:-1] for r in requests]  # a prompt's last token must be read again
        shared = np.array(
            [common(text, prompt) for text, prompt in zip(held.texts, read, strict=True)], np.int64
        )
        shared = held.cache.truncate(
            np.minimum(shared, held.cache.reusable)
        )  # a state may go back further than asked
        try:
            return held.cache, self.drafter.truncate(held.drafter_state, shared)
        except Exception:  # the prompt is read again
            return cache_of(self.target, requests), self.carried


def plain(
    target: Target,
    requests: Sequence[Request],
    on_tokens: Callable[[list[Emitted]], None] | None = None,
    sampling: Sampling | None = None,
    lock: AbstractContextManager[Any] = nullcontext(),
    cache: SlotCache | None = None,
) -> Generation:
    """Write one token a pass with a target alone, as no drafter is needed for it.

    Args:
        target: the model that writes.
        requests: one for each row.
        on_tokens: told the new tokens of every step; its own time is not counted.
        sampling: of all requests, instead of their own.
        lock: held during each step.
        cache: holds what is committed of the prompts' beginnings; a new one by default.

    Raises:
        UserError: a request cannot be served.
    """
    check_listener(on_tokens)
    check(requests, target)
    rest(target)
    requests, rows = (
        under(requests, sampling),
        Rows(cache_of(target, requests) if cache is None else cache),
    )
    run(loop.plain(target, usual(all_greedy(requests)), rows, requests), rows, on_tokens, lock)
    return Generation(rows.written, rows.stats)


def plain_stream(
    target: Target, requests: Iterable[Request | None], rows: int = 32
) -> Iterator[tuple[Request, list[int]]]:
    """Write any number of texts with a target alone, `rows` of them at a time.

    When a text ends, the next request takes its place.

    Requests begin an eighth of the rows at a time, so that their prompts are read in one pass:
    those that follow one another should be of like length. A text is the one that its request gets
    alone, up to rounding: the last bits of a row's logits depend on the rows beside it, and in half
    precision that can turn two tokens that are as good as equally likely.

    Args:
        target: the model that writes.
        requests: read when rows are free, so that one may depend on texts that came before it. None
            says that none waits now; they are asked again while any text is written.
        rows: the number of texts that are written at a time, at least 1.

    Yields:
        A request and the tokens written for it, as soon as they end.

    Raises:
        UserError: a request cannot be served, or there are no rows.
    """
    if not whole(rows, 1):
        raise UserError(f"rows is {shown(rows)}, allowed is a whole number of at least 1")
    waiting = partial(next, iter(requests), None)
    group = max(rows // 8, 1)
    stats = Stats()
    rest(target)
    table, acceptor = Rows(target.new_cache(rows, 64), stats=stats), usual(False)

    def ended(events: list[Emitted]) -> list[tuple[Request, list[int]]]:
        return [(table.requests[e.row], table.leave(e.row)) for e in events if e.ending is not None]

    while True:
        while len(table.free) >= group and (
            taken := [r for r in islice(iter(waiting, None), group) if r]
        ):
            check(taken, target)
            yield from ended(loop.prefill(target, acceptor, Needs(), table, taken)[1])
        if not table.live.size:
            return
        yield from ended(loop.plain_step(target, acceptor, table))
        stats.steps.clear()  # of a long stream they would fill the memory
        stats.work.clear()


def rest(target: Target) -> bool:
    """Put a target into evaluation mode and return whether it was in training mode.

    In that case it warns, and the weights may have changed since the last call.
    """
    if training := warn_of_training(target.decoder.model):
        target.decoder.model.train(False)
    return training


def held_of(rows: Rows, state: State) -> Held | None:
    """Return the prefix cache for the next call, or None if the drafter has not read all of it."""
    return None if rows.undrafted else Held(rows.committed, rows.cache, state.drafter)


def cache_of(target: Target, requests: Sequence[Request]) -> SlotCache:
    """Return a cache with room for requests, as far as the target's context reaches."""
    longest = max(len(r.prompt) + r.max_new_tokens for r in requests)
    return target.new_cache(len(requests), min(longest, target.decoder.context) + 64)


def usual(greedy: bool) -> Acceptor:
    """Return the default acceptor, which is also that of plain decoding.

    It is `Greedy` if `greedy` (no token is drawn), and `Match` otherwise.
    """
    return Greedy() if greedy else Match()


def check_listener(on_tokens: Any) -> None:
    """Raise a `UserError` for a listener that cannot be told anything."""
    if on_tokens is not None and not callable(on_tokens):
        raise UserError(f"on_tokens is {shown(on_tokens)}, allowed is what can be called, or None")


def common(a: Ints | Sequence[int], b: Ints | Sequence[int]) -> int:
    """Return the number of first tokens that two texts share."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(np.array(a[:n], np.int64) != np.array(b[:n], np.int64))
    return int(differ[0]) if differ.size else n


def run(
    steps: Iterator[list[Emitted]],
    rows: Rows,
    on_tokens: Callable[[list[Emitted]], None] | None = None,
    lock: AbstractContextManager[Any] = nullcontext(),
) -> None:
    """Drives a loop to its end and times it; the listener's time is not the loop's."""
    for events in timed(steps, rows, lock):
        if on_tokens is not None:
            on_tokens(events)


def timed(
    steps: Iterator[list[Emitted]], rows: Rows, lock: AbstractContextManager[Any]
) -> Generator[list[Emitted], None, None]:
    """Yield the steps of a loop, each run under a lock, and add up their seconds.

    Neither waiting for the lock nor the time of the reader counts.
    """
    while True:
        with lock, recorded(rows.stats.phases):
            start = time.perf_counter()
            events = next(steps, None)
            rows.stats.seconds += time.perf_counter() - start
        if events is None:
            return
        yield events


def load(
    target: str | Path | PreTrainedModel | Target = "demo",
    drafter: str | Path | Method | PreTrainedModel | Target | Drafter[Any] | None = None,
    policy: str | Policy | None = None,
    acceptor: str | Acceptor | None = None,
    costs: Costs | CostTable | None = None,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    **how: Any,
) -> Engine:
    """Load a target, and put it together with the parts that are named.

    A model that was loaded before is used as it is and where it is. It is put into evaluation mode,
    with a warning where it was not, as with dropout no two passes would agree; and its weights must
    stay what they are while the engine is used.

    Args:
        target: `demo`, `smollm2`, a Hugging Face folder, a GGUF file (dequantised), a hub id, a
            loaded transformers model, or a loaded target.
        drafter: a spec, the folder or hub id of a trained drafter or of a small language model, a
            method's options, a loaded language model, or an open drafter. `published` downloads the
            published drafter that is known for the target. By default the fastest that is shipped
            for the target, or `suffix`, which needs no training, with a warning. A tokenizer here,
            `load(model, tokenizer)`, is the target's.
        policy: a spec or a policy; by default the fastest with that drafter, with one that is named
            `pct`, or on a GPU `eagle2` with heads of EAGLE and EAGLE-3.
        acceptor: a spec or an acceptor; chosen by the temperature where it is not given.
        costs: fixed costs, instead of those that are learnt from the steps that run.
        dtype: of the weights that are loaded, or its name.
        device: to load them to.
        tokenizer: the target's; by default the one in the folder or under the hub id that the
            target was loaded from. Without one `write` and `generate` work, and what takes or gives
            text says what it lacks.
        how: the other options of loading a target, the attributes of `Loading`: revision,
            trust_remote_code, device_map, attn_implementation, adapter, quantize, exactness,
            kernels, compile. A loaded model takes exactness alone: `bits` where a token's logits
            shall have the same bits in a tree as in a step; outside the engine it computes as
            before. The names that other tools have for arguments are accepted where they mean the
            same (`draftree.aliases`).

    Raises:
        UserError: something does not exist, is of the wrong type, or does not fit.
    """
    if isinstance(drafter, PreTrainedTokenizerBase) and tokenizer is None:
        tokenizer, drafter = drafter, None
    check_types(costs, tokenizer)
    how = translated(LOADING, rewritten_loading(with_threads(how)), LOADED)
    target = given_once("target", target, how, DEMO)
    drafter, policy, acceptor = given_parts(how, drafter, policy, acceptor)
    dtype, device = how.pop("dtype", dtype), device_named(how.pop("device", device))
    published = isinstance(drafter, str) and drafter == PUBLISHED
    method, grown, rule = parts_of(
        best_for(named(target)) if published else drafter, policy, acceptor
    )
    if isinstance(target, str | Path):
        start_probe(device, dtype if isinstance(dtype, torch.dtype) else None)
    elif isinstance(target, PreTrainedModel):
        start_probe(target.device, target.dtype)
    model = target_of(target, dtype, device, tokenizer, **how)
    grown = grown or build("policy", usual_policy(model.name, method, model.decoder.device))
    if method is None:
        name, told = usual_drafter(model.name)
        if told:
            warnings.warn(told, DraftreeWarning, stacklevel=2)
        method = build("drafter", name)
    return Engine(model, method.open(model), grown, rule, costs)


def with_threads(how: dict[str, Any]) -> dict[str, Any]:
    """Set torch's number of threads if an argument names it, and return the other arguments.

    Native kernels use the same number.

    Raises:
        UserError: it is no number.
    """
    for name in [name for name in how if name in THREAD_WORDS and how[name] is not None]:
        if not whole(number := how.pop(name), 1):
            raise UserError(f"{name} is {shown(number)}, allowed is a whole number of at least 1")
        torch.set_num_threads(number)
    return how


def device_named(device: Any) -> Any:
    """Return a device by torch's name.

    `auto` becomes None, the default, and -1 (as in transformers' pipelines) becomes `cpu`.
    """
    if isinstance(device, str):
        return None if device == "auto" else accepted(DEVICE, device, ["cpu", "cuda"])
    return "cpu" if device == -1 and not isinstance(device, torch.device) else device


def named(target: Any) -> str:
    """Return the name of a target that is given as a name, a model or a target."""
    if isinstance(target, Target):
        return target.name
    return name_of(target) if isinstance(target, PreTrainedModel) else str(target)


def given_once(what: str, given: Any, named: dict[str, Any], default: Any = None) -> Any:
    """Return an argument given under its own name or another tool's, and remove it from `named`.

    Raises:
        UserError: it is given twice.
    """
    if what not in named:
        return given
    other = named.pop(what)
    if given is not default:
        raise UserError(
            f"the {what} is given twice, {shown(given)} and {shown(other)}, allowed is once"
        )
    return other


def given_parts(named: dict[str, Any], drafter: Any, policy: Any, acceptor: Any) -> Iterator[Any]:
    """Yield drafter, policy and acceptor, each given under its own name or another tool's."""
    for what, given in (("drafter", drafter), ("policy", policy), ("acceptor", acceptor)):
        yield given_once(what, given, named)


def parts_of(
    drafter: Any, policy: Any, acceptor: Any
) -> tuple[Method | None, Policy | None, Acceptor | None]:
    """Return the parts that specs, folders or the parts themselves stand for; None for none.

    Raises:
        UserError: one stands for none.
    """
    return (
        part_of("drafter", drafter, True),
        part_of("policy", policy, True),
        part_of("acceptor", acceptor, True),
    )


def part_of(kind: str, given: Any, optional: bool = False) -> Any:
    """Return the part that a spec, a folder or the part itself stands for.

    Return None for none where that is allowed.

    Raises:
        UserError: it stands for none.
    """
    base = KINDS[kind][1]
    if isinstance(given, base) or (given is None and optional):
        return given
    if kind == "drafter" and isinstance(given, Engine | Target | PreTrainedModel):
        return LoadedModel(given.target if isinstance(given, Engine) else given)
    if kind == "drafter" and isinstance(given, Drafter):
        return OpenDrafter(given)
    if isinstance(given, str | Path):
        return build(kind, str(given))
    told = f"allowed is a spec ({', '.join(names(kind))}) or an instance of {base.__name__}{', or None' * optional}"
    if isinstance(given, type) and issubclass(given, base):
        told += f"; did you mean {given.__name__}()?"
    raise UserError(f"{kind} is {shown(given)}, {told}")


def target_of(
    given: Any,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    **how: Any,
) -> Target:
    """Return the target that a name, a folder, a loaded model or the target itself stands for.

    Raises:
        UserError: it stands for none, or it is loaded and yet is said how to load it; or
            `DRAFTREE_NATIVE` names no variant.
    """
    check_variable()
    report_absence()
    if isinstance(given, str | Path):
        with (
            announced(f"loading target '{given}'", own_bar=True),
            understood(f"cannot load target {shown(str(given))}"),
        ):
            target = Target.load(known_as(str(given)), dtype, device, **how)
    elif isinstance(given, Target | PreTrainedModel):
        exactness = how.pop("exactness", None) if isinstance(given, PreTrainedModel) else None
        for name, value in {"dtype": dtype, "device": device, **how}.items():
            if value not in (None, False):
                raise UserError(
                    f"{name} is {shown(value)}, allowed is None beside a loaded model, which has its own"
                )
        target = (
            Target.of(given, exactness=exactness) if isinstance(given, PreTrainedModel) else given
        )
    else:
        raise UserError(
            f"target is {shown(given)}, allowed is {ALLOWED}, a loaded transformers model, or a Target"
        )
    return (
        target
        if tokenizer is None
        else Target(target.decoder, target.name, tokenizer, target.loading)
    )


def usual_drafter(target: str) -> tuple[str, str]:
    """Return the default drafter of a target, and a warning if it is not trained for the target.

    The warning is empty for a drafter that is shipped for the target.

    Raises:
        UserError: the target is the demo, which is not installed.
    """
    if told := without_weights(target):
        if known(target) == DEMO:  # the target itself is among them
            raise UserError(told)
        return UNTRAINED[0], f"{told}; '{UNTRAINED[0]}' drafts, which needs no training"
    if (usual := USUAL.get(known(target) or "")) is not None:
        return usual[0], ""
    told = f"no drafter is named and none is shipped for target '{target}': '{UNTRAINED[0]}' drafts, which needs no training"
    if there := published_for(target):
        return (
            UNTRAINED[0],
            f"{told}; drafter '{PUBLISHED}' downloads {there[0].drafter}, which is trained for it and faster",
        )
    return UNTRAINED[0], f"{told}; one that is trained for the target drafts better"


def usual_policy(
    target: str, drafter: str | Path | Method | None = None, device: Any = None
) -> str:
    """Return the spec of the policy where none is named.

    Args:
        target: its name.
        drafter: that is named; None where the target's usual one drafts, whose fastest policy is
            known.
        device: of the target. A drafter's own policy verifies as many nodes as a GPU's pass has
            room for; on a CPU it takes twice the time of `pct`
            (docs/reference/benchmarks/smollm2.md).
    """
    if drafter is None:
        return USUAL.get(known(target) or "", UNTRAINED)[1]
    if usable(device_named(device)).type == "cpu":
        return NAMED
    method: Method = part_of("drafter", drafter)
    return method.own_policy or NAMED


ENGINES = "_draftree"
"""The attribute of a model that keeps its engines, so that they live as long as it does."""


def speculate(
    drafter: str | Path | Method | PreTrainedModel | Target | Drafter[Any] | None = None,
    policy: str | Policy | None = None,
    acceptor: str | Acceptor | None = None,
    costs: Costs | CostTable | None = None,
    seed: int | None = None,
    streamer: BaseStreamer | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    exactness: Literal["bits", "ties"] = "ties",
    **prepared: Any,
) -> Any:
    """Make `generate` speculate: `model.generate(**inputs, custom_generate=draftree.speculate(…))`.

    Without arguments the parentheses may be left out: `custom_generate=draftree.speculate`.

    Prompts with padding on the left and hidden ids, `GenerationConfig`, logits processors, stopping
    criteria, `stop_strings`, `num_return_sequences`, `return_dict_in_generate` with `output_scores`
    and `output_logits` mean what they mean without it; what cannot be honoured is refused by name.
    Greedy ids are those of `generate`; sampled ones are of the same distribution, and with the
    default acceptor those of plain decoding with the same seed, whatever the drafter. Beyond that:

    - `generate` takes one more argument, `seed`. Without one it is drawn from torch's global
      generator, so that `torch.manual_seed` repeats a call. The seed's text is that of
      `Engine.complete` with it: transformers' own sampling draws from torch's generator token by
      token, so the same seed gives another text there.
    - `assistant_model` of `generate` drafts, as `drafter=assistant_model` does here; the policy
      bounds the drafts, and not `num_assistant_tokens`.
    - transformers does not give a hook its `tokenizer`, which is an argument here where the model's
      own is not to be used for `stop_strings`. Stop strings in a generation config need that
      tokenizer, so transformers refuses them: give `stop_strings=` itself. With
      `cache_implementation="paged"` transformers goes another way before it asks any hook.
      `Engine.generate` has none of these limits.
    - `scores` and `logits` of rows that have ended are 0; `cache` (before transformers 5.24
      `past_key_values`) is None.
    - A row's processors and criteria see a batch whose rows all are that row, because rows are not
      written in step; rows after the first get copies of those that may remember something. Every
      processor is called once for each token, in order.
    - A text ends with the model's context, with a warning. A processor that forbids every token is
      an error, where transformers writes token 0. Ids that a mask hides are refused inside a row
      for models with windows, and at the end of a row. The model is in evaluation mode during the
      call. Logits that are not numbers are an error, whatever `remove_invalid_values` says.
    - In half precision a pass over a tree rounds otherwise than one over a token, so that ids may
      part where two scores are as good as equal. With `exactness="bits"` they are those of the
      attention `draftree` (`set_attn_implementation`), to the last bit.

    The engine is kept with the model, for the next call with the same arguments.

    Args:
        drafter: what `load` takes: a spec, a folder or hub id, a method's options, or a loaded
            model.
        policy: a spec or a policy; by default that of `load`.
        acceptor: a spec or an acceptor; chosen by the temperature where it is not given.
        costs: fixed costs, instead of those that are learnt from the steps that run.
        seed: of the draws, for every call.
        streamer: given the prompt, the tokens of each accepted run one by one, and the end; by
            default that of `generate`.
        tokenizer: for stop strings; the model's own by default.
        exactness: `bits` where logits shall have the same bits in a tree as in a step; outside the
            call nothing changes.
        **prepared: other tools' names of these arguments, and what transformers passes to a hook.

    Raises:
        UserError: a part does not exist or does not fit the model, or an option cannot be honoured.
    """
    if (
        "generation_config" in prepared
    ):  # transformers calls custom_generate=speculate itself: the model comes first
        hook: Any = speculate(
            seed=seed, streamer=streamer, tokenizer=tokenizer, exactness=exactness
        )
        return hook(drafter, policy, **prepared)
    check_types(costs, tokenizer)  # a mistake is told here, and not by the first call
    Loading(exactness=exactness)
    parts = parts_of(
        *given_parts(
            translated(LOADING, rewritten_loading(prepared), PARTS), drafter, policy, acceptor
        )
    )
    return Hook(
        lambda model, assistant: hooked(model, assistant, *parts, costs, exactness),
        seed,
        streamer,
        tokenizer,
    )


def hooked(
    model: PreTrainedModel, assistant: PreTrainedModel | None, drafter: Method | None, *more: Any
) -> Engine:
    """Return the engine around a model, with the assistant model of `generate` as drafter if given.

    Raises:
        UserError: there is a drafter, too.
    """
    if assistant is not None and drafter is not None:
        raise UserError(
            "assistant_model is given to generate and drafter to speculate, allowed is one of them"
        )
    return opened(model, drafter if assistant is None else LoadedModel(assistant), *more)


class Engines(dict[Any, Engine]):
    """The engines of one model; a copy of the model begins without any."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return an empty one: engines are not copied."""
        return type(self)()

    def __reduce__(self) -> Any:
        """Return how to make an empty one: engines are not pickled."""
        return type(self), ()


def opened(
    model: PreTrainedModel,
    drafter: str | Path | Method | None,
    policy: str | Policy | None,
    acceptor: str | Acceptor | None,
    costs: Costs | CostTable | None,
    exactness: Literal["bits", "ties"] = "ties",
) -> Engine:
    """Return the engine of these parts around a model, and keep it with the model.

    A new engine is made when the model has moved to another device or changed its dtype.
    """
    kept: Engines = vars(model).setdefault(ENGINES, Engines())
    # A shallow copy of a model shares the dict, and costs need not be hashable; the engine keeps
    # both alive.
    key = (
        id(model),
        drafter,
        policy,
        acceptor,
        None if costs is None else id(costs),
        model.device,
        model.dtype,
        exactness,
    )
    if key not in kept:
        kept[key] = load(model, drafter, policy, acceptor, costs, exactness=exactness)
    return kept[key]
