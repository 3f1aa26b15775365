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
"""Amount of drafting metrics in an answer: none, sums over all steps, figures of each step, or also
the draft tree of each step."""


class Body(BaseModel):
    """Serve as base of all request bodies: unknown fields and wrong types are refused."""

    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(Body):
    """Options of a streamed answer.

    Attributes:
        include_usage: whether the last piece contains the numbers of tokens.
        continuous_usage_stats: whether every piece contains the numbers of tokens, as in vLLM.
        include_obfuscation: accepted, but without effect.
    """

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool | None = None


class Speculation(Body):
    """Drafting options of one request, within what the operator of the server allows.

    Attributes:
        drafter: spec of a drafter; by default the server's drafter.
        policy: spec of a policy; by default the server's policy.
        nodes: number of drafted nodes in a tree, for policies that have this option.
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
        temperature: sampling temperature; 1 by default, as in OpenAI's API.
        top_k: number of likeliest tokens to sample from; 0 and −1 stand for all tokens.
        seed: seed of the sampling; random by default.
        speculative: options of drafting; false generates texts without drafts.
        metrics: amount of drafting metrics in the answer.
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
    """A part of a message; only text is supported."""

    type: Literal["text", "input_text", "output_text", "refusal"]
    text: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class CalledFunction(Body):
    """The function of a tool call, with its arguments as JSON text."""

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
    """The name of a function that the model must call."""

    name: str


class NamedTool(Body):
    """The tool that the model must call."""

    type: Literal["function"] = "function"
    function: NamedFunction


class JsonSchema(Body):
    """The JSON schema that an answer has to follow."""

    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """The format of an answer: text, any JSON object, or JSON by a schema."""

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
    """The format of an answer of `/v1/responses`: text, any JSON object, or JSON by a schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(Body):
    """Options for the text of an answer of `/v1/responses`."""

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
    """The tool that the model must call, as `/v1/responses` names it."""

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
    """The body of `/tokenize`: a text, or messages to which the chat template is applied."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False


class DetokenizeBody(Body):
    """The body of `/detokenize`."""

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0, le=2**31)]]
