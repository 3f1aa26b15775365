"""Request bodies of OpenAI's API, with draftree's own fields (pydantic models).

A field that is not known is refused, so that nobody believes in an option that has no effect.
Fields of OpenAI's API that have no meaning for a local model (`user`, `metadata`, …) are accepted;
`IGNORED` names them.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Ids = Annotated[list[Annotated[int, Field(ge=0, le=2**31)]], Field(min_length=1)]
Texts = str | list[str]
Metrics = Literal["none", "summary", "detailed", "trees"]
"""The amount of drafting metrics in an answer: none, sums, each step, or also each step's tree."""


class Body(BaseModel):
    """Base of all bodies: types are not converted, and unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(Body):
    """Options of a streamed answer.

    Attributes:
        include_usage: whether the last piece has the numbers of tokens.
        continuous_usage_stats: whether every piece has them, as in vLLM.
        include_obfuscation: accepted, and without effect.
    """

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool | None = None


class Speculation(Body):
    """Drafting options of one request, within what the operator of the server allows.

    Attributes:
        drafter: a spec; the server's own by default.
        policy: a spec; the server's own by default.
        nodes: the number of drafted tokens of a tree, for policies that have this option.
    """

    drafter: str | None = None
    policy: str | None = None
    nodes: int | None = Field(None, ge=1, le=512)


class Ignored(Body):
    """Fields of OpenAI's API that are accepted and have no effect here."""

    metadata: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    prompt_cache_key: str | None = None
    reasoning_effort: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    store: bool | None = None
    user: str | None = None
    verbosity: str | None = None


IGNORED = tuple(Ignored.model_fields)


class Sampled(Ignored):
    """The fields that chats and completions share.

    Attributes:
        temperature: 1 by default, as in OpenAI's API.
        top_k: 0 or −1 keeps all tokens.
        seed: a random one by default.
        speculative: false writes without drafts.
        metrics: what the answer says about drafting.
    """

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1)
    stop: Texts | None = None
    seed: int | None = Field(None, ge=-(2**63), le=2**64 - 1)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    logit_bias: dict[str, float] | None = None
    max_tokens: int | None = Field(None, ge=1)
    min_tokens: int | None = Field(None, ge=0)
    ignore_eos: bool | None = None
    speculative: bool | Speculation | None = None
    metrics: Metrics | None = None


class ContentPart(Body):
    """A part of a message; the model reads text alone."""

    type: Literal["text", "input_text", "output_text", "refusal"]
    text: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class CalledFunction(Body):
    """The function of a tool call, its arguments as JSON text."""

    name: str
    arguments: str


class ToolCall(Body):
    """A tool call in a message of the assistant."""

    id: str
    type: Literal["function"] = "function"
    index: int | None = None
    function: CalledFunction


class Message(Body):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None


class FunctionTool(Body):
    """A function that the model may call; its parameters are a JSON schema."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: FunctionTool


class NamedFunction(Body):
    """The name of a function that has to be called."""

    name: str


class NamedTool(Body):
    """The tool that has to be called."""

    type: Literal["function"] = "function"
    function: NamedFunction


class JsonSchema(Body):
    """The schema of an answer in JSON."""

    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """The form of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ChatBody(Sampled):
    """The body of `/v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    modalities: list[Literal["text"]] | None = None


class CompletionBody(Sampled):
    """The body of `/v1/completions`."""

    prompt: str | Ids | list[str] | list[Ids]
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None
    logprobs: int | None = Field(None, ge=0, le=20)


class TextFormat(Body):
    """The form of an answer of `/v1/responses`."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(Body):
    """The text of an answer of `/v1/responses`."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ResponseTool(Body):
    """A function that the model may call, in the flat form of `/v1/responses`."""

    type: Literal["function"]
    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class InputItem(Body):
    """A message, a tool call or the output of a tool in the input of `/v1/responses`."""

    type: Literal["message", "function_call", "function_call_output"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[ContentPart] | None = None
    id: str | None = None
    status: str | None = None
    phase: str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | None = None


class ChosenTool(Body):
    """The tool that has to be called, in the flat form of `/v1/responses`."""

    type: Literal["function"]
    name: str


class ResponsesBody(Ignored):
    """The body of `/v1/responses`; nothing is stored between two requests."""

    model: str | None = None
    input: str | list[InputItem]
    instructions: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    max_output_tokens: int | None = Field(None, ge=1)
    text: TextOptions | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    truncation: Literal["disabled"] | None = None
    previous_response_id: None = None
    include: list[str] | None = None
    background: Literal[False] | None = None
    reasoning: dict[str, Any] | None = None
    speculative: bool | Speculation | None = None
    metrics: Metrics | None = None


class TokenizeBody(Body):
    """The body of `/tokenize`: a text, or a chat that goes through the template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False


class DetokenizeBody(Body):
    """The body of `/detokenize`."""

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0, le=2**31)]]
