"""The engine: a target, drafter, policy and acceptor that generate text together."""

import time
import warnings
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields, replace
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
from draftree.aliases import DEVICE, ENGINE, LOADING, canonical_name
from draftree.aliases.conversions import rewrite_load_arguments
from draftree.aliases.flag_hints import THREAD_WORDS
from draftree.batch import Generation, SequenceBatch
from draftree.cost_estimate import learnt_costs
from draftree.costs.cost_table import CostTable
from draftree.costs.machine_probe import start_probe
from draftree.costs.online_costs import OnlineCosts
from draftree.costs.step_costs import UNIT_COSTS, Costs, CostSource
from draftree.data.prompts import Prompt, Prompts, chats_of, ids_of, prompts_of, render_chats
from draftree.data.readers import Messages
from draftree.drafters._from_objects import LoadedModel, OpenDrafter
from draftree.drafters.base import Drafter, Method
from draftree.drafting.states import carry_state
from draftree.errors import DraftreeWarning, Hinting, UnknownAttribute, UserError, format_value
from draftree.formats.known_checkpoints import find_published, published_drafters_for
from draftree.hf.generate import (
    Hook,
    check_types,
    generate,
    is_text,
    pop_prompt_text,
    takes_hook_calls,
)
from draftree.loop import Components, State, decode
from draftree.metrics import Stats
from draftree.models.kv_cache import SlotCache
from draftree.native import check_variable, report_absence
from draftree.policies.base import Policy
from draftree.registry import KINDS, build, check_exact, names
from draftree.request import Emitted, Request, all_greedy, check_requests, override_sampling
from draftree.sampling.keyed_noise import RandomSource
from draftree.sampling.params import GREEDY, Sampling
from draftree.scheduling.handle import Handle, Update
from draftree.scheduling.options import SchedulerOptions
from draftree.scheduling.scheduler import Scheduler
from draftree.target.load_options import Loading
from draftree.target.quantization_support import count_parameters
from draftree.target.target import (
    HiddenStateSpec,
    Target,
    name_of,
    resolve_device,
    warn_of_training,
)
from draftree.target.target_names import (
    ALLOWED,
    DEMO,
    SMOLLM2,
    missing_package,
    shipped_name,
    short_target_name,
)
from draftree.text import completion
from draftree.text.calls import ECHO, STOP, after_history, asks_for, of_template, takes_prompt
from draftree.text.completion import Completion, Reading, Token, Writing, whole_text
from draftree.text.conversation import Conversation, start_conversation
from draftree.text.options import Options
from draftree.text.stop_strings import StopStrings
from draftree.tree import Draw, Ints
from draftree.utils.files import as_user_error
from draftree.utils.profiler import record_phases
from draftree.utils.progress_callback import announce
from draftree.utils.validated_dataclass import is_whole, translate_names

SCHEDULER_LOCK = Lock()
"""Lock held while an engine creates its scheduler."""
DEFAULT_PARTS = {DEMO: ("edd", "pct"), SMOLLM2: ("eagle3+suffix", "yield")}
"""Maps a target to the spec of its fastest shipped drafter and that of its fastest policy.

`load` uses them if no drafter is named. The measurements are in `docs/reference/benchmarks/`.
"""
UNTRAINED_PARTS = ("suffix", "yield")
"""Specs of the default drafter and policy for other targets; this drafter needs no training."""
PUBLISHED = "published"
"""The drafter spec that selects the published drafter known for the target."""
DEFAULT_POLICY = "yield"
"""Spec of the default policy for a named drafter that defines no policy itself."""


PART_KINDS = ("drafter", "policy", "acceptor")
LOADED_ARGUMENTS = (*(f.name for f in fields(Loading)), "target", *PART_KINDS)
"""Names of the arguments of `load` for which the names of other tools are accepted too."""


@dataclass(frozen=True)
class PrefixCache:
    """The prefix cache: the texts of the last call, and the caches that hold their tokens.

    Attributes:
        texts: [B] the token ids that the target's cache holds for each sequence.
        cache: the target's KV cache.
        drafter_state: the drafter's state after the same tokens.
    """

    texts: list[Ints]
    cache: SlotCache
    drafter_state: Any


class _Loads(type):
    """Metaclass of `Engine` that forwards construction to `load`.

    `Engine(…)` calls `load`, unless its first argument is an opened `Target`. `Engine.load` and
    `Engine.from_pretrained` are other names of `load`.
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
    """Generates text with one target, one drafter and one policy.

    Attributes:
        target: the model whose output is generated.
        drafter: proposes tokens.
        policy: builds draft trees from the proposed tokens.
        acceptor: decides which drafted tokens are accepted. None selects `greedy` at temperature 0
            and `match` otherwise.
        costs: fixed costs of the passes; None to learn the costs from the steps that run.
        held: the prefix cache that the last call left, for a next call with the same beginning.
        carried: the part of the drafter's state that is kept from one text to the next.
        calls: the number of earlier calls that the drafter may remember.
        learned: the state of policies that learn. The key holds the policy, the drafter's
            description, the sampling settings and the acceptor.
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
    held: PrefixCache | None = field(default=None, init=False, repr=False)
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
        """Check that the drafter can read the target, and fit the policy to the target's size."""
        self.target.refuse_needs(self.drafter.needs)
        self.policy = self.policy.for_target_size(count_parameters(self.target.decoder.model))

    def __repr__(self) -> str:
        """Return a text that names the target, the drafter, the policy and the acceptor."""
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
        """Run `complete`, so that an engine can be called like a pipeline of transformers."""
        if prompt and isinstance(prompt[0], torch.Tensor):
            raise UserError(
                "an Engine is called with a text: engine.target.decoder.model(ids) is the model's forward pass"
            )
        return self.complete(*prompt, **options)

    def __iter__(self) -> Iterator[Any]:
        """Yield the engine and its tokenizer, as the pair that `load` of other tools returns."""
        yield from (self, self.tokenizer)

    def __enter__(self) -> Self:
        """Return the engine itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Drop the cached texts; see `forget`."""
        self.forget()

    def __reduce__(self) -> NoReturn:
        """Raise a `UserError`, because an engine cannot be pickled or copied."""
        told = "it holds a model, its caches and a lock; load one in each process, or share one among threads"
        raise UserError(f"an Engine cannot be pickled or copied: {told}")

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the target's tokenizer."""
        return self.target.tokenizer

    @property
    def eos(self) -> frozenset[int]:
        """Return the token ids that end a text, as given by the target's generation config."""
        return self.target.eos

    def write(
        self,
        requests: Sequence[Request],
        sampling: Sampling | None = None,
        on_tokens: Callable[[list[Emitted]], None] | None = None,
        reuse: bool = True,
    ) -> Generation:
        """Generate the target's own output for each request, in fewer forward passes.

        A call may be interrupted at any point, for example with Ctrl-C. The engine can be used
        again afterwards.

        Args:
            requests: one for each sequence.
            sampling: replaces the sampling settings of all requests.
            on_tokens: called with the new tokens of every step. Its own time is not counted.
            reuse: whether to take a prefix that a prompt shares with the texts of the last call
                from the caches. The state that a drafter carries from text to text is kept in any
                case.

        Returns:
            The tokens written for each request, and the figures of all requests together.

        Raises:
            UserError: a request cannot be served, or the policy and the acceptor together are not
                exact.
        """
        check_listener(on_tokens)
        rows, steps = self.begin(requests, sampling, reuse)
        run_loop(steps, rows, on_tokens, self._lock)
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
        """Continue a text, token ids or a chat; or continue each prompt of a list.

        A text is continued as it is. A chat is a list of messages and is rendered with the chat
        template.

        Use `chat` to ask a chat model a question, because it applies the chat template. Without the
        template such a model often generates an end token at once.

        The prompts of a list run in one batch. Each text is the same as it would be alone with the
        same seed. Equal prompts in a list therefore get equal texts. (`write` takes requests that
        have numbers, and different numbers give different texts.)

        Args:
            prompt: the prompt or the list of prompts. The type of a list's elements decides its
                meaning: token ids, messages, or prompts.
            stream: whether to return an iterator of tokens, as `stream` does.
            options: the attributes of `Options`; they apply to all prompts.

        Returns:
            The completion of a prompt, or a list of n completions for `n` above 1. For a list of
            prompts, a list with one such result for each prompt.

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
        """Yield the tokens of `complete` one by one, each with the text that has become certain.

        Closing the iterator early ends the generation.

        Raises:
            UserError: as in `complete`, or several prompts are given.
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

        Steps run in worker threads, and concurrent tasks take turns. Cancelling the task ends the
        generation.
        """
        if stream:
            return self.astream(prompt, **options)
        echo = asks_for(options, ECHO)
        stop = asks_for(options, STOP)
        written = await completion.complete(self, prompt, Options.of(None, options))
        self._recommend_chat(prompt, written)
        return whole_text(written, echo, stop)

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
        """Run `stream` for asyncio."""
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

        No message is kept for the next call; use `conversation` to keep them. A model without a
        chat template continues the text of the messages.

        Args:
            messages: a question, a list of messages with a role and a content each, or a list of
                questions or chats, which runs as one batch.
            system: the system message, placed before the messages.
            stream: whether to return an iterator of tokens, as `stream` does.
            options: the attributes of `Options`.

        Returns:
            The answer; a list of answers for a list of questions or chats, and for `n` above 1.

        Raises:
            UserError: the messages are malformed or refused by the template, `system` is given
                twice, an option does not exist or is out of its range, or the prompt is too long.
        """
        system, values = of_template(system, options)
        messages = after_history(messages, options)
        return self.complete(
            render_chats(self.tokenizer, chats_of(messages, system), values),
            stream=stream,
            **options,
        )

    @takes_prompt
    async def achat(
        self, messages: Any, *, system: str | None = None, stream: bool = False, **options: Any
    ) -> Any:
        """Run `chat` for asyncio, in the same way as `acomplete` runs `complete`."""
        system, values = of_template(system, options)
        messages = after_history(messages, options)
        return await self.acomplete(
            render_chats(self.tokenizer, chats_of(messages, system), values),
            stream=stream,
            **options,
        )

    def conversation(
        self, system: str | None = None, messages: Messages | None = None, **options: Any
    ) -> Conversation:
        """Start a conversation that keeps its messages and their cache entries between turns.

        Args:
            system: the system message.
            messages: earlier messages that the conversation continues.
            options: the attributes of `Options`, for every answer.

        Raises:
            UserError: the messages are malformed, or an option does not exist or is out of its
                range.
        """
        system, _ = of_template(system, options, ())
        return start_conversation(self, system, messages, options)

    def begin(
        self,
        requests: Sequence[Request],
        sampling: Sampling | None = None,
        reuse: bool = True,
        source: Callable[[SequenceBatch], RandomSource] | None = None,
    ) -> tuple[SequenceBatch, Iterator[list[Emitted]]]:
        """Return the batch of sequences, and an iterator that runs one step at a time.

        Each item of the iterator is the list of tokens that one step wrote. `write` runs the
        iterator to its end.

        Args:
            requests: one for each sequence.
            sampling: replaces the sampling settings of all requests.
            reuse: as for `write`.
            source: returns the randomness that tokens are drawn from for a batch; None for keyed
                noise.

        Raises:
            UserError: a request cannot be served, or the policy and the acceptor together are not
                exact.
        """
        if not isinstance(reuse, bool):
            raise UserError(f"reuse is {format_value(reuse)}, allowed is true or false")
        check_requests(requests, self.target)
        requests = override_sampling(requests, sampling)
        acceptor = self.acceptor or default_acceptor(all_greedy(requests))
        check_exact(self.policy, acceptor, requests)
        with self._lock:
            held, self.held = (
                self.held,
                None,
            )  # first, so that an interrupted call leaves no half-changed cache
            if set_evaluation_mode(self.target) or not reuse:
                held = None  # frees its memory for the new caches
            cache, state = self._beginning(requests, held)
            rows = SequenceBatch(cache, source, self.calls, self._stats(acceptor, requests))
            parts = Components(self.target, self.drafter, self.policy, acceptor, self.step_costs)
            # A drafter that carries no state has seen no other call.
            self.calls += self.drafter.remembers
        return rows, self._steps(parts, rows, requests, state)

    def _steps(
        self, parts: Components, rows: SequenceBatch, requests: Sequence[Request], drafter: Any
    ) -> Iterator[list[Emitted]]:
        lesson = (
            self.policy,
            self.drafter.description,
            frozenset(r.sampling.knobs for r in requests),
            parts.acceptor,
        )
        state = State(drafter, self.learned.get(lesson))
        try:
            for events, after in decode(parts, rows, requests, state):
                state = after
                yield events
        except GeneratorExit:
            # Closed between two steps, when caches and texts agree.
            # The cache of a later call has priority.
            # A drafter that has steps to catch up with would have to run here.
            if self.held is None and not state.unread:
                self.held = make_prefix_cache(rows, state)
            raise
        self.learned[lesson] = state.policy
        self.held = make_prefix_cache(rows, state)
        self.carried = carry_state(self.drafter, state.drafter)

    def submit(
        self,
        prompt: Prompt | Request,
        *,
        number: int = 0,
        stops: StopStrings | None = None,
        **options: Any,
    ) -> Handle:
        """Queue a prompt or a request for the running batch, and return at once.

        Requests join and leave the batch between steps. Each text is the same as it would be alone.
        Greedy, sampled and constrained requests run together. `step` generates the tokens; another
        thread may call it.

        Args:
            prompt: the prompt, in any form that `complete` accepts, or a request.
            number: distinguishes several texts that have the same seed, as the numbers of the `n`
                texts of `complete` do.
            stops: the stop texts, if `prompt` is a request. With other prompts use the option
                `stop`.
            options: the attributes of `Options`; not allowed with a request.

        Returns:
            A handle from which the tokens can be read.

        Raises:
            UserError: an option does not exist or is out of its range, or the request cannot be
                served within the limits.
        """
        if isinstance(prompt, Request):
            if given := [*options, *(["number"] if number else [])]:
                raise UserError(
                    f"{given[0]} is given with a Request, allowed are options with a prompt: a Request has its own"
                )
            request, stops = prompt, stops or StopStrings()
        else:
            if stops is not None:
                raise UserError(
                    "stops are given with a prompt, allowed only with a Request: write stop=[…]"
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
        check_requests([request], self.target)
        acceptor = self.acceptor or Match()
        check_exact(self.policy, acceptor, [request])
        figures = replace(self._stats(acceptor, [request]), lossy=acceptor.lossy)
        reading = Reading(self.target.tokenizer_or_none, stops, request.prompt)
        return self.scheduler.submit(request, reading, figures)

    def step(self) -> list[Update]:
        """Run one step of all submitted requests and return the new tokens of each request.

        The list is empty if all requests have finished.
        """
        return [] if self._scheduler is None else self._scheduler.step()

    def cancel(self, handle: Handle) -> None:
        """End a submitted request; the next step frees its slot.

        The tokens that were written before can still be read.
        """
        if self._scheduler is not None:
            self._scheduler.cancel(handle)

    def set_limits(self, **options: Any) -> None:
        """Set the limits of submitted requests, which are the attributes of `SchedulerOptions`.

        Limits that are not named are reset to their defaults.

        Raises:
            UserError: a limit does not exist or is out of its range, or some requests are
                unfinished.
        """
        limits = SchedulerOptions.of(options)
        with SCHEDULER_LOCK:
            if self._scheduler is not None and self._scheduler.num_unfinished:
                raise UserError(
                    f"{self._scheduler.num_unfinished} requests are unfinished, limits can be set when there is none"
                )
            self._scheduler = Scheduler(self, self._lock, limits)

    @property
    def scheduler(self) -> Scheduler:
        """Return the scheduler of submitted requests, which knows their number and limits."""
        with SCHEDULER_LOCK:
            if self._scheduler is None:
                self._scheduler = Scheduler(self, self._lock)
            return self._scheduler

    def set_evaluation_mode(self) -> bool:
        """Put the target into evaluation mode, and return whether it was in training mode."""
        return set_evaluation_mode(self.target)

    def scheduled_parts(self) -> tuple[Components, State]:
        """Return the parts that run submitted requests, and their learnt state."""
        acceptor = self.acceptor or Match()
        parts = Components(self.target, self.drafter, self.policy, acceptor, self.step_costs)
        return parts, State(self.carried, self.learned.get(self._lesson_key(acceptor)))

    def remember(self, state: State) -> None:
        """Store the state that drafter and policy have learnt from submitted requests."""
        self.learned[self._lesson_key(self.acceptor or Match())] = state.policy
        self.carried = carry_state(self.drafter, state.drafter)

    def _lesson_key(self, acceptor: Acceptor) -> tuple[Policy, str, frozenset[Sampling], Acceptor]:
        return self.policy, self.drafter.description, frozenset(), acceptor

    def plain(
        self,
        requests: Sequence[Request],
        sampling: Sampling | None = None,
        on_tokens: Callable[[list[Emitted]], None] | None = None,
    ) -> Generation:
        """Generate one token per forward pass without drafts, as a baseline."""
        return generate_plain(self.target, requests, on_tokens, sampling, self._lock)

    def keeps_text(self, sampling: Sampling = GREEDY) -> bool:
        """Return whether each text equals that of plain decoding token by token.

        If not, texts agree with plain decoding only in distribution, or not even that if the
        acceptor is lossy.
        """
        acceptor = self.acceptor or default_acceptor(sampling.greedy)
        return acceptor.keeps_text or (sampling.greedy and not acceptor.lossy)

    def time_steps(
        self, steps: Iterator[list[Emitted]], rows: SequenceBatch
    ) -> Generator[list[Emitted], None, None]:
        """Yield the steps of a begun batch and count their seconds; see the function `time_steps`.

        Each step runs under the engine's lock, so that no other thread uses the models at the same
        time.
        """
        return time_steps(steps, rows, self._lock)

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
        """Return the same ids as the target's own `generate`, in fewer passes; see `speculate`.

        Given a text or a list of texts, as vLLM accepts them, it runs `complete`.

        Args:
            inputs: [B, n] prompt ids, padded on the left. They may also be given as the options
                `input_ids=` and `attention_mask=`.
            generation_config: the options as an object of transformers.
            seed: the seed of the draws. By default it is drawn from torch's global generator, so
                that `torch.manual_seed` repeats a call.
            streamer: receives the prompt, each token and the end; allowed for one sequence.
            tokenizer: used for stop strings; by default that of the target.
            options: the arguments of transformers' `generate`.

        Returns:
            Ids [B, n + T] with T new tokens, or a `GenerateDecoderOnlyOutput` with
            `return_dict_in_generate=True`.

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
            inputs = pop_prompt_text(options)
        if is_text(inputs):
            named = {"seed": seed, "streamer": streamer, "tokenizer": tokenizer}
            return self.complete(
                inputs,
                **{name: value for name, value in named.items() if value is not None},
                **options,
            )
        return generate(self, inputs, seed, streamer, tokenizer, options)

    def forget(self) -> None:
        """Drop the cached texts of the last call and the cached prompts of submitted requests."""
        self.held = None
        if self._scheduler is not None:
            self._scheduler.forget()

    @property
    def step_costs(self) -> CostSource:
        """Return the costs of a step: the given costs, or those learnt on this machine.

        A policy that reads no costs gets `UNIT_COSTS` unless costs are given.
        """
        if self.costs is not None or not self.policy.reads_costs:
            return self.costs or UNIT_COSTS
        if self._learnt is None:
            self._learnt = learnt_costs(self.target, self.drafter)
        return self._learnt

    def _stats(self, acceptor: Acceptor, requests: Sequence[Request]) -> Stats:
        draw = Draw.POINT if all_greedy(requests) else acceptor.draw
        return Stats(
            acceptor=type(acceptor).__name__.lower(), draw=draw.value, deepest=self.policy.deepest
        )

    def _beginning(
        self, requests: Sequence[Request], held: PrefixCache | None
    ) -> tuple[SlotCache, Any]:
        """Return the target's cache and the drafter's state for a call that begins.

        They reuse the longest prefix that each prompt shares with a text of the last call.
        """
        if held is None or len(held.texts) != len(requests) or not self.target.reuses_prefixes:
            return cache_of(self.target, requests), self.carried
        read = [r.prompt[:-1] for r in requests]  # a prompt's last token must be read again
        shared = np.array(
            [
                common_prefix_length(text, prompt)
                for text, prompt in zip(held.texts, read, strict=True)
            ],
            np.int64,
        )
        shared = held.cache.truncate(
            np.minimum(shared, held.cache.reusable)
        )  # a recurrent state may be cut back further than requested
        try:
            return held.cache, self.drafter.truncate(held.drafter_state, shared)
        except Exception:  # the prompt is read again
            return cache_of(self.target, requests), self.carried


def generate_plain(
    target: Target,
    requests: Sequence[Request],
    on_tokens: Callable[[list[Emitted]], None] | None = None,
    sampling: Sampling | None = None,
    lock: AbstractContextManager[Any] = nullcontext(),
    cache: SlotCache | None = None,
) -> Generation:
    """Generate one token per forward pass with a target alone, without a drafter.

    Args:
        target: the model.
        requests: one for each sequence.
        on_tokens: called with the new tokens of every step. Its own time is not counted.
        sampling: replaces the sampling settings of all requests.
        lock: held during each step.
        cache: a KV cache that may already hold the beginnings of the prompts; by default a new one.

    Raises:
        UserError: a request cannot be served.
    """
    check_listener(on_tokens)
    check_requests(requests, target)
    set_evaluation_mode(target)
    requests, rows = (
        override_sampling(requests, sampling),
        SequenceBatch(cache_of(target, requests) if cache is None else cache),
    )
    run_loop(
        loop.decode_plain(target, default_acceptor(all_greedy(requests)), rows, requests),
        rows,
        on_tokens,
        lock,
    )
    return Generation(rows.written, rows.stats)


def plain_stream(
    target: Target, requests: Iterable[Request | None], rows: int = 32
) -> Iterator[tuple[Request, list[int]]]:
    """Generate any number of texts with a target alone, `rows` texts at a time.

    When a text ends, the next request takes its place. New requests begin in groups of an eighth of
    `rows`, so that their prompts are read in one pass. Consecutive requests should therefore have
    prompts of similar length.

    A text equals the text of its request alone, up to rounding. The last bits of a sequence's
    logits depend on the other sequences in the pass. In half precision this can swap two tokens
    that are almost equally likely.

    Args:
        target: the model.
        requests: read when slots are free, so that a request may depend on texts that ended before
            it. None in place of a request means that no request waits at present. The iterator is
            called again as long as any text is being generated.
        rows: the number of texts that are generated at a time, at least 1.

    Yields:
        A request and the tokens generated for it, as soon as its text ends.

    Raises:
        UserError: a request cannot be served, or `rows` is not at least 1.
    """
    if not is_whole(rows, 1):
        raise UserError(f"rows is {format_value(rows)}, allowed is a whole number of at least 1")
    waiting = partial(next, iter(requests), None)
    group = max(rows // 8, 1)
    stats = Stats()
    set_evaluation_mode(target)
    table, acceptor = (
        SequenceBatch(target.new_cache(rows, 64), stats=stats),
        default_acceptor(False),
    )

    def free_ended(events: list[Emitted]) -> list[tuple[Request, list[int]]]:
        return [(table.requests[e.row], table.leave(e.row)) for e in events if e.ending is not None]

    while True:
        while len(table.free) >= group and (
            taken := [r for r in islice(iter(waiting, None), group) if r]
        ):
            check_requests(taken, target)
            yield from free_ended(
                loop.prefill(target, acceptor, HiddenStateSpec(), table, taken)[1]
            )
        if not table.live.size:
            return
        yield from free_ended(loop.plain_step(target, acceptor, table))
        stats.steps.clear()  # in a long stream they would fill the memory
        stats.work.clear()


def set_evaluation_mode(target: Target) -> bool:
    """Put a target into evaluation mode and return whether it was in training mode.

    If it was, a warning is given, and the weights may have changed since the last call.
    """
    if training := warn_of_training(target.decoder.model):
        target.decoder.model.train(False)
    return training


def make_prefix_cache(rows: SequenceBatch, state: State) -> PrefixCache | None:
    """Return the prefix cache for the next call, or None if the drafter has not read all of it."""
    return None if rows.undrafted else PrefixCache(rows.committed, rows.cache, state.drafter)


def cache_of(target: Target, requests: Sequence[Request]) -> SlotCache:
    """Return a KV cache that is large enough for the requests.

    It is not larger than the target's context requires.
    """
    longest = max(len(r.prompt) + r.max_new_tokens for r in requests)
    return target.new_cache(len(requests), min(longest, target.decoder.context) + 64)


def default_acceptor(greedy: bool) -> Acceptor:
    """Return the default acceptor, which plain decoding uses too.

    It is `Greedy` if `greedy` is true (no token is drawn), and `Match` otherwise.
    """
    return Greedy() if greedy else Match()


def check_listener(on_tokens: Any) -> None:
    """Raise a `UserError` if a listener is neither None nor callable."""
    if on_tokens is not None and not callable(on_tokens):
        raise UserError(f"on_tokens is {format_value(on_tokens)}, allowed is a callable, or None")


def common_prefix_length(a: Ints | Sequence[int], b: Ints | Sequence[int]) -> int:
    """Return the length of the longest common prefix of two token sequences."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(np.array(a[:n], np.int64) != np.array(b[:n], np.int64))
    return int(differ[0]) if differ.size else n


def run_loop(
    steps: Iterator[list[Emitted]],
    rows: SequenceBatch,
    on_tokens: Callable[[list[Emitted]], None] | None = None,
    lock: AbstractContextManager[Any] = nullcontext(),
) -> None:
    """Run a loop to its end and measure its time, without the time of the listener."""
    for events in time_steps(steps, rows, lock):
        if on_tokens is not None:
            on_tokens(events)


def time_steps(
    steps: Iterator[list[Emitted]], rows: SequenceBatch, lock: AbstractContextManager[Any]
) -> Generator[list[Emitted], None, None]:
    """Yield the steps of a loop, each run under a lock, and add up their seconds.

    The time spent waiting for the lock or in the caller between steps does not count.
    """
    while True:
        with lock, record_phases(rows.stats.phases):
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
    """Load a target and combine it with a drafter, a policy and an acceptor.

    A model that is passed already loaded is used in place. It is put into evaluation mode, because
    with dropout no two passes would agree; a warning is given if it was in training mode. Its
    weights must not change while the engine is used.

    Args:
        target: `demo`, `smollm2`, a Hugging Face folder, a GGUF file (dequantised), a hub id, a
            loaded transformers model, or a loaded target.
        drafter: a spec, the folder or hub id of a trained drafter or of a small language model, a
            method's options, a loaded language model, or an open drafter. `published` downloads the
            published drafter that is known for the target. The default is the fastest drafter that
            is shipped for the target. For other targets it is `suffix`, which needs no training,
            and a warning is given. A tokenizer in this place, `load(model, tokenizer)`, is taken as
            `tokenizer`.
        policy: a spec or a policy. Without a named drafter the default is the fastest policy of the
            default drafter. With a named drafter it is `yield`. On a GPU it is the drafter's own
            policy if it has one (`eagle2` for heads of EAGLE and EAGLE-3).
        acceptor: a spec or an acceptor; by default it is chosen by the temperature.
        costs: fixed costs of the passes; by default they are learnt from the steps that run.
        dtype: dtype of the loaded weights, or its name.
        device: device to which the weights are loaded.
        tokenizer: the target's tokenizer. By default it is read from the folder or hub id of the
            target. Without a tokenizer `write` and `generate` work with ids, and methods that read
            or return text raise an error.
        how: further options for loading the target, which are the attributes of `Loading`:
            revision, trust_remote_code, device_map, attn_implementation, adapter, quantize,
            exactness, kernels, compile. For a loaded model only `exactness` is allowed. With
            `bits`, a token's logits have the same bits in a tree pass and in a one-token pass;
            outside the engine the model computes as before. Other tools' names of these arguments
            are accepted if they mean the same (`draftree.aliases`).

    Raises:
        UserError: a part does not exist, is of the wrong type, or does not fit the others.
    """
    if isinstance(drafter, PreTrainedTokenizerBase) and tokenizer is None:
        tokenizer, drafter = drafter, None
    check_types(costs, tokenizer)
    how = translate_names(LOADING, rewrite_load_arguments(with_threads(how)), LOADED_ARGUMENTS)
    target = take_argument("target", target, how, DEMO)
    drafter, policy, acceptor = given_parts(how, drafter, policy, acceptor)
    dtype, device = how.pop("dtype", dtype), device_named(how.pop("device", device))
    published = isinstance(drafter, str) and drafter == PUBLISHED
    method, grown, rule = parts_of(
        find_published(target_name(target)) if published else drafter, policy, acceptor
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
        UserError: the value is not a whole number of at least 1.
    """
    for name in [name for name in how if name in THREAD_WORDS and how[name] is not None]:
        if not is_whole(number := how.pop(name), 1):
            raise UserError(
                f"{name} is {format_value(number)}, allowed is a whole number of at least 1"
            )
        torch.set_num_threads(number)
    return how


def device_named(device: Any) -> Any:
    """Return a device under the name that torch uses.

    `auto` becomes None, which selects the default, and -1 (used in transformers' pipelines) becomes
    `cpu`.
    """
    if isinstance(device, str):
        return None if device == "auto" else canonical_name(DEVICE, device, ["cpu", "cuda"])
    return "cpu" if device == -1 and not isinstance(device, torch.device) else device


def target_name(target: Any) -> str:
    """Return the name of a target that is given as a name, a loaded model or a `Target`."""
    if isinstance(target, Target):
        return target.name
    return name_of(target) if isinstance(target, PreTrainedModel) else str(target)


def take_argument(what: str, given: Any, named: dict[str, Any], default: Any = None) -> Any:
    """Return an argument that is given under its own name or under that of another tool.

    The other name is removed from `target_name`.

    Raises:
        UserError: the argument is given twice.
    """
    if what not in named:
        return given
    other = named.pop(what)
    if given is not default:
        raise UserError(
            f"the {what} is given twice, {format_value(given)} and {format_value(other)}, allowed is once"
        )
    return other


def given_parts(named: dict[str, Any], drafter: Any, policy: Any, acceptor: Any) -> Iterator[Any]:
    """Yield the drafter, the policy and the acceptor; see `take_argument`.

    Args:
        named: further arguments by draftree's names, which other tools' names were translated to.
            The three parts are removed from it.
        drafter: the drafter, if it was given under its own name.
        policy: the policy, if it was given under its own name.
        acceptor: the acceptor, if it was given under its own name.

    Raises:
        UserError: a part is given twice.
    """
    for what, given in (("drafter", drafter), ("policy", policy), ("acceptor", acceptor)):
        yield take_argument(what, given, named)


def parts_of(
    drafter: Any, policy: Any, acceptor: Any
) -> tuple[Method | None, Policy | None, Acceptor | None]:
    """Return drafter, policy and acceptor, which may be given as specs, folders or objects.

    A part that is None stays None.

    Raises:
        UserError: an argument does not denote such a part.
    """
    return (
        part_of("drafter", drafter, True),
        part_of("policy", policy, True),
        part_of("acceptor", acceptor, True),
    )


def part_of(kind: str, given: Any, optional: bool = False) -> Any:
    """Return the part of a kind that is given as a spec, a folder or an object.

    Args:
        kind: `drafter`, `policy` or `acceptor`.
        given: the spec, folder or object.
        optional: whether None is allowed; it is returned as None.

    Raises:
        UserError: `given` does not denote such a part.
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
    raise UserError(f"{kind} is {format_value(given)}, {told}")


def target_of(
    given: Any,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    **how: Any,
) -> Target:
    """Return the target that is given as a name, a folder, a loaded model or a `Target`.

    Raises:
        UserError: `given` is not a target, options of loading are given for a loaded model, or
            `DRAFTREE_NATIVE` does not name a variant of the native kernels.
    """
    check_variable()
    report_absence()
    if isinstance(given, str | Path):
        with (
            announce(f"loading target '{given}'", own_bar=True),
            as_user_error(f"cannot load target {format_value(str(given))}"),
        ):
            target = Target.load(short_target_name(str(given)), dtype, device, **how)
    elif isinstance(given, Target | PreTrainedModel):
        exactness = how.pop("exactness", None) if isinstance(given, PreTrainedModel) else None
        for name, value in {"dtype": dtype, "device": device, **how}.items():
            if value not in (None, False):
                raise UserError(
                    f"{name} is {format_value(value)}, allowed is None with a loaded model, which has its own"
                )
        target = (
            Target.of(given, exactness=exactness) if isinstance(given, PreTrainedModel) else given
        )
    else:
        raise UserError(
            f"target is {format_value(given)}, allowed is {ALLOWED}, a loaded transformers model, or a Target"
        )
    return (
        target
        if tokenizer is None
        else Target(target.decoder, target.name, tokenizer, target.loading)
    )


def usual_drafter(target: str) -> tuple[str, str]:
    """Return the default drafter of a target, and a warning if it is not trained for the target.

    The warning is empty if the drafter is shipped for the target.

    Raises:
        UserError: the target is the demo model, which is not installed.
    """
    if told := missing_package(target):
        if shipped_name(target) == DEMO:  # the target itself is among them
            raise UserError(told)
        return UNTRAINED_PARTS[0], f"{told}; '{UNTRAINED_PARTS[0]}' drafts, which needs no training"
    if (usual := DEFAULT_PARTS.get(shipped_name(target) or "")) is not None:
        return usual[0], ""
    untrained = f"'{UNTRAINED_PARTS[0]}' drafts, which needs no training"
    told = f"no drafter is named and none is shipped for target '{target}': {untrained}"
    if there := published_drafters_for(target):
        return (
            UNTRAINED_PARTS[0],
            f"{told}; drafter '{PUBLISHED}' downloads {there[0].drafter}, which is trained for it and faster",
        )
    return UNTRAINED_PARTS[0], f"{told}; one that is trained for the target drafts better"


def usual_policy(
    target: str, drafter: str | Path | Method | None = None, device: Any = None
) -> str:
    """Return the spec of the default policy.

    Args:
        target: the name of the target.
        drafter: the drafter that the user named. None if the target's default drafter is used,
            whose fastest policy is known.
        device: the device of the target. A drafter's own policy verifies a number of nodes that
            suits a GPU. On a CPU it takes twice the time of `yield`
            (docs/reference/benchmarks/smollm2.md).
    """
    if drafter is None:
        return DEFAULT_PARTS.get(shipped_name(target) or "", UNTRAINED_PARTS)[1]
    if resolve_device(device_named(device)).type == "cpu":
        return DEFAULT_POLICY
    method: Method = part_of("drafter", drafter)
    return method.own_policy or DEFAULT_POLICY


ENGINES = "_draftree"
"""Name of the attribute in which a model keeps its engines.

They live as long as the model does.
"""


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

    Without arguments the parentheses may be omitted: `custom_generate=draftree.speculate`.

    Left-padded prompts, `GenerationConfig`, logits processors, stopping criteria, `stop_strings`,
    `num_return_sequences`, and `return_dict_in_generate` with `output_scores` and `output_logits`
    mean the same as without the hook. An option that cannot be honoured raises an error that names
    it. Greedy ids equal those of `generate`. Sampled ids have the same distribution; with the
    default acceptor they equal those of plain decoding with the same seed, whatever the drafter.
    There are these differences:

    - `generate` takes one more argument, `seed`. By default it is drawn from torch's global
      generator, so that `torch.manual_seed` repeats a call. The text of a seed is that of
      `Engine.complete` with the same seed. The sampling of transformers draws from torch's
      generator token by token, so the same seed gives another text there.
    - `assistant_model` of `generate` becomes the drafter, like `drafter=assistant_model` here. The
      policy bounds the drafts, and `num_assistant_tokens` has no effect.
    - transformers does not pass its `tokenizer` to a hook. Give it here if `stop_strings` need
      another one than the model's own. transformers refuses stop strings in a generation config,
      because they need that tokenizer: give `stop_strings=` itself. With
      `cache_implementation="paged"` transformers does not call any hook. `Engine.generate` has none
      of these limits.
    - `scores` and `logits` of sequences that have ended are 0; `cache` (before transformers 5.24
      `past_key_values`) is None.
    - The processors and criteria of a sequence are called with a batch in which every row is that
      sequence, because the sequences do not advance in step. Sequences after the first get copies
      of processors and criteria that may have a state. Every processor is called once for each
      token, in order.
    - A text ends where the model's context ends, with a warning. A processor that forbids every
      token is an error, where transformers writes token 0. Ids that a mask hides are refused at the
      end of a prompt, and, for models with sliding windows, also in its middle. The model is in
      evaluation mode during the call. Logits that are not finite are an error, whatever
      `remove_invalid_values` is.
    - In half precision a pass over a tree rounds differently from a pass over one token. Ids may
      therefore differ where two scores are nearly equal. With `exactness="bits"` they equal those
      of the attention `draftree` (`set_attn_implementation`) bit by bit.

    The engine is stored with the model, for the next call with the same arguments.

    Args:
        drafter: the same values as in `load`: a spec, a folder or hub id, a method's options, or a
            loaded model.
        policy: a spec or a policy; by default that of `load`.
        acceptor: a spec or an acceptor; by default it is chosen by the temperature.
        costs: fixed costs of the passes; by default they are learnt from the steps that run.
        seed: the seed of the draws of every call.
        streamer: receives the prompt, the accepted tokens one by one, and the end; by default that
            of `generate`.
        tokenizer: used for stop strings; by default the model's own.
        exactness: `bits` if a token's logits must have the same bits in a tree pass and in a
            one-token pass. Outside the call nothing changes.
        **prepared: other tools' names of these arguments, and the arguments that transformers
            passes to a hook.

    Raises:
        UserError: a part does not exist or does not fit the model, or an option cannot be honoured.
    """
    # transformers calls custom_generate=speculate itself: the model comes first
    if "generation_config" in prepared:
        hook: Any = speculate(
            seed=seed, streamer=streamer, tokenizer=tokenizer, exactness=exactness
        )
        return hook(drafter, policy, **prepared)
    check_types(costs, tokenizer)  # report a mistake now, and not in the first call
    Loading(exactness=exactness)
    parts = parts_of(
        *given_parts(
            translate_names(LOADING, rewrite_load_arguments(prepared), PART_KINDS),
            drafter,
            policy,
            acceptor,
        )
    )
    return Hook(
        lambda model, assistant: get_generate_engine(model, assistant, *parts, costs, exactness),
        seed,
        streamer,
        tokenizer,
    )


def get_generate_engine(
    model: PreTrainedModel, assistant: PreTrainedModel | None, drafter: Method | None, *more: Any
) -> Engine:
    """Return the engine around a model for a call of `generate`.

    The assistant model of `generate` is the drafter if it is given.

    Raises:
        UserError: both an assistant model and a drafter are given.
    """
    if assistant is not None and drafter is not None:
        raise UserError(
            "assistant_model is given to generate and drafter to speculate, allowed is one of them"
        )
    return get_engine(model, drafter if assistant is None else LoadedModel(assistant), *more)


class Engines(dict[Any, Engine]):
    """The engines of one model. A copy of the model starts without engines."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return an empty dictionary, because engines are not copied."""
        return type(self)()

    def __reduce__(self) -> Any:
        """Make pickle restore an empty dictionary, because engines are not pickled."""
        return type(self), ()


def get_engine(
    model: PreTrainedModel,
    drafter: str | Path | Method | None,
    policy: str | Policy | None,
    acceptor: str | Acceptor | None,
    costs: Costs | CostTable | None,
    exactness: Literal["bits", "ties"] = "ties",
) -> Engine:
    """Return the engine of these parts around a model, and store it with the model.

    A later call with the same parts returns the same engine, unless the model's device or dtype has
    changed.
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
