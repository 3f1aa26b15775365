"""A conversation that keeps its messages from turn to turn."""

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, final

from draftree.aliases import CONVERSATION
from draftree.batch import EngineMethods
from draftree.data.prompts import add_system_message, is_chat
from draftree.data.readers import Messages
from draftree.errors import Hinting, UserError, format_value
from draftree.text.calls import takes_prompt
from draftree.text.completion import Completion, Token, Writing, complete
from draftree.text.options import Options
from draftree.utils.validated_dataclass import unicode


@final
@dataclass(repr=False)
class Conversation(Hinting):
    """Hold a conversation with the target.

    The chat template renders the whole conversation again for every turn. The part that is in the
    caches already is not computed again.

    Attributes:
        engine: generates the answers.
        messages: the messages so far, each with its role and content.
        options: the options of every answer, unless a turn overrides them.
    """

    kind_of_name: ClassVar[str] = CONVERSATION
    no_items: ClassVar[str] = (
        "a Conversation has no items of its own: conversation.messages is the list of its messages"
    )

    engine: EngineMethods
    messages: Messages = field(default_factory=list)
    options: Options = field(default_factory=Options)

    def __repr__(self) -> str:
        """Return the number of messages, and the last one in short form."""
        last = (
            f", the last {format_value(self.messages[-1].get('content'))}" if self.messages else ""
        )
        return f"Conversation({len(self.messages)} messages{last})"

    @takes_prompt
    def say(self, text: str, **options: Any) -> Completion:
        """Send a message of the user and return the answer; both are added to `messages`.

        Raises:
            UserError: the message is not a text, an option is unknown or out of range, or the chat
                is too long; `messages` then stay unchanged.
        """
        answer: Completion = self._answer(text, options).finish()
        self._keep(text, answer)
        return answer

    @takes_prompt
    def stream(self, text: str, **options: Any) -> Generator[Token, None, None]:
        """Yield the answer token by token.

        If the generator is closed or interrupted early, `messages` gets the text generated until
        then.
        """
        writing = self._answer(text, options)

        def stream_tokens() -> Generator[Token, None, None]:
            try:
                yield from writing.tokens()
            except (GeneratorExit, KeyboardInterrupt):
                self._keep(text, writing.result)
                raise
            self._keep(text, writing.result)

        return stream_tokens()

    @takes_prompt
    async def asay(self, text: str, **options: Any) -> Completion:
        """Send a message like `say`, for asyncio; a cancelled turn is not added to `messages`."""
        answer: Completion = await complete(
            self.engine, self._with_question(text), Options.of(self.options, options), alone=True
        )
        self._keep(text, answer)
        return answer

    def _with_question(self, text: str) -> Messages:
        if not unicode(text):
            raise UserError(f"the text is {format_value(text)}, allowed is a text")
        return [*self.messages, {"role": "user", "content": text}]

    def _answer(self, text: str, options: Mapping[str, Any]) -> Writing:
        return Writing(
            self.engine, self._with_question(text), Options.of(self.options, options), alone=True
        )

    def _keep(self, text: str, answer: Any) -> None:
        self.messages = [*self._with_question(text), {"role": "assistant", "content": answer.text}]


def start_conversation(
    engine: EngineMethods, system: str | None, messages: Messages | None, options: Mapping[str, Any]
) -> Conversation:
    """Return a conversation that continues messages, after an optional system message.

    Raises:
        UserError: the messages are malformed, or an option is unknown or out of range.
    """
    if messages is not None and not is_chat(messages):
        raise UserError(
            f"messages is {format_value(messages)}, allowed is a list of messages that each have a role and a content"
        )
    return Conversation(
        engine, add_system_message(system, messages or []), Options.of(None, options)
    )
