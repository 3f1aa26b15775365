"""`draftree chat`: a conversation in the terminal."""

import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from draftree.cli.console import remark
from draftree.cli.options import (
    AcceptorSpec,
    CostsFile,
    DrafterSpec,
    LoadingOptions,
    PolicySpec,
    TargetName,
    dataclass_command,
)
from draftree.errors import DraftreeError, UserError
from draftree.text.option_fields import Parameters
from draftree.utils.validated_dataclass import knob

if TYPE_CHECKING:
    from draftree.engine import Engine
    from draftree.text.conversation import Conversation

CHAT_COMMANDS = {
    "/help": "list the commands",
    "/reset": "forget the conversation",
    "/system TEXT": "set the system message, and begin anew; without a text, show it",
    "/seed N": "set the seed of the next answers",
    "/save FILE": "write the messages to a new JSON file",
    "/quit": "leave (Ctrl-D does, too)",
}
INPUT_HINT = "Ctrl-C stops an answer; a line that ends with \\ goes on in the next one."


@dataclass(frozen=True)
class ChatCommand:
    """Store the options of `draftree chat`."""

    target: TargetName = "demo"
    drafter: DrafterSpec = None
    policy: PolicySpec = None
    acceptor: AcceptorSpec = None
    completion: Annotated[Mapping[str, Any], Parameters] = knob(None)
    costs: CostsFile = None
    loading: LoadingOptions = knob(None)


@dataclass_command
def chat(ctx: typer.Context, asked: ChatCommand) -> None:
    """Talk with a model; what was drafted is coloured.

    /help lists the commands. Input that does not come from a terminal is read line by line, each a
    message.
    """
    from draftree.cli import arguments, terminal
    from draftree.engine import load

    options = arguments.options(asked.completion)
    costs = arguments.fixed_costs(asked.costs)
    drafter = arguments.drafter(asked.drafter, asked.target) if asked.drafter is not None else None
    arguments.quiet()
    with terminal.busy("loading"):
        engine = load(asked.target, drafter, asked.policy, asked.acceptor, costs, **asked.loading)
    if not getattr(engine.tokenizer, "chat_template", None):
        remark(f"{asked.target} has no chat template: it continues the text of the messages")
    given = {name: getattr(options, name) for name in options.__dataclass_fields__}
    with interruptible_answer():
        Session(engine, asked.loading["system"], given, message_reader()).run()


@contextmanager
def interruptible_answer() -> Iterator[None]:
    """Return a context in which Ctrl-C raises `KeyboardInterrupt` and does not end the program."""
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def message_reader() -> Callable[[], str]:
    """Return a function that reads a line of a message.

    On a terminal, the function offers an editor with a history. Otherwise it reads standard input.
    """
    if not sys.stdin.isatty():
        return read_line
    try:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.history import FileHistory
    except ImportError:
        return lambda: input(">>> ")
    from draftree.utils.files import cache_folder

    session: Any = PromptSession(history=FileHistory(str(cache_folder() / "chat-history")))
    return lambda: str(session.prompt(">>> "))


def read_line() -> str:
    """Return the next line of standard input.

    Raises:
        EOFError: there are no more lines.
        UserError: the line is not text in the encoding of standard input.
    """
    try:
        line = sys.stdin.readline()
    except UnicodeError as error:
        raise UserError(f"the message is not valid {sys.stdin.encoding}: {error}") from error
    if not line:
        raise EOFError
    return line.rstrip("\n")


class Session:
    """Run a conversation on the terminal, with commands such as `/help`.

    Args:
        engine: engine that generates the answers.
        system: system message.
        options: generation options for all answers.
        read: function that returns the next line, and raises `EOFError` at the end.
    """

    def __init__(
        self, engine: "Engine", system: str | None, options: dict[str, Any], read: Callable[[], str]
    ) -> None:
        from draftree.cli import terminal

        self._engine = engine
        self._system = system
        self._options = options
        self._read = read
        self._console = terminal.output()
        self._conversation = self._new()

    def _new(self) -> "Conversation":
        return self._engine.conversation(self._system, **self._options)

    def run(self) -> None:
        """Read messages and commands, and answer the messages, until the input ends."""
        if sys.stdin.isatty():
            self._console.print(
                f"{self._engine.target.name} · /help lists the commands", style="dim", markup=False
            )
        while True:
            try:
                text = self._message()
            except EOFError:
                return
            except KeyboardInterrupt:
                remark("/quit or Ctrl-D leaves")
                continue
            if text.strip() in ("/quit", "/exit", "/bye", "/q"):
                return
            if text.startswith("/"):
                self._command(text)
            elif text.strip():
                self._answer(text)

    def _message(self) -> str:
        """Read and return a message; a backslash at the end of a line continues the message."""
        parts = [self._read()]
        while parts[-1].endswith("\\"):
            parts[-1] = parts[-1][:-1]
            parts.append(self._read())
        return "\n".join(parts)

    def _answer(self, text: str) -> None:
        """Print the answer to a message while it is generated."""
        from draftree.cli import terminal

        coloured = terminal.colours(self._console)
        try:
            with closing(self._conversation.stream(text)) as stream:
                for token in stream:
                    if coloured:
                        terminal.show_tokens(self._console, [token])
                    else:
                        print(token.text, end="", flush=True)
        except KeyboardInterrupt:
            print(" …", end="")
        except DraftreeError as error:
            remark(str(error))
        print(flush=True)

    def _command(self, line: str) -> None:
        """Run a command; an error is printed, and the conversation continues."""
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        try:
            if name in ("/help", "/?"):
                for command, what in CHAT_COMMANDS.items():
                    print(f"{command:14}{what}")
                print(INPUT_HINT)
            elif name in ("/reset", "/clear"):
                self._conversation = self._new()
                remark("the conversation starts again")
            elif name == "/system":
                self._set_system(rest)
            elif name == "/seed":
                self._set_seed(rest)
            elif name == "/save":
                self._save(rest)
            else:
                remark(f"unknown command '{name}'; /help lists the commands")
        except (DraftreeError, OSError) as error:
            remark(str(error))

    def _set_system(self, text: str) -> None:
        if not text:
            print(self._system or "(no system message)")
            return
        self._system = text
        self._conversation = self._new()
        remark("the conversation starts again")

    def _set_seed(self, text: str) -> None:
        from draftree.text.options import Options

        if not text.isdecimal():
            remark(f"/seed is '{text}', allowed is a whole number of at least 0")
            return
        Options.of(None, {"seed": int(text)})
        self._options["seed"] = int(text)
        kept = self._conversation.messages
        self._conversation = self._engine.conversation(messages=kept, **self._options)

    def _save(self, name: str) -> None:
        import json

        from draftree.utils.files import write_text

        path = Path(os.path.expanduser(name))
        if not name or path.exists():
            remark(
                f"'{path}' exists already; /save takes the name of a new file"
                if name
                else "/save takes a file's name"
            )
            return
        write_text(
            path,
            json.dumps({"messages": self._conversation.messages}, ensure_ascii=False, indent=1)
            + "\n",
        )
        remark(f"the messages are in '{path}'")
