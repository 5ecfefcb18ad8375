"""The requests of the OpenAI API as this server takes them: fields, ranges, and what is refused by name.

It knows the contract's parameter types and turns a request into SamplingParams; it knows nothing of HTTP or engines.

    JSON -> ChatRequest | CompletionRequest -> check_supported, sampling_params -> SamplingParams
"""

from abc import ABC, abstractmethod
from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, StrictInt, model_validator
from pydantic_core import PydanticCustomError

from shared.engine import ContextLengthError, Message, SamplingParams, UnsupportedParameterError
from shared.sampling_params import (
    Choices,
    Penalty,
    Probability,
    RepetitionPenalty,
    StopStrings,
    Temperature,
    TopK,
    TopLogprobs,
)

AtLeastOne = Annotated[int, Field(ge=1)]
AtLeastZero = Annotated[int, Field(ge=0)]
# Lists fail fast: an error for each of a million items would take seconds to make and megabytes to send.
TokenIdList = Annotated[list[StrictInt], Field(fail_fast=True)]


def contradiction(param: str, message: str) -> PydanticCustomError:
    """The error of a validator that looks at several fields; `param` is the one to mend."""
    return PydanticCustomError("contradiction", "{message}", {"param": param, "message": message})


def _off_if_false(value: Any) -> Any:
    """Chat has logprobs as a bool: a client that sends false here too doesn't mean 0."""
    return None if value is False else value


class _Object(BaseModel):
    """A JSON object in which null means absent and unknown keys are ignored."""

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        return {key: value for key, value in data.items() if value is not None} if isinstance(data, dict) else data


class StreamOptions(_Object):
    include_usage: bool = False


class ResponseFormat(_Object):
    type: Literal["text", "json_object", "json_schema"] = "text"


class _GenerationRequest(_Object, ABC):
    """What both endpoints take."""

    model: str = "default"
    temperature: Temperature = 0.0
    top_p: Probability = 1.0
    top_k: TopK = 0
    min_p: Probability = 0.0
    n: Choices = 1
    seed: int | None = None
    stop: StopStrings = ()
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    ignore_eos: bool = False
    min_tokens: AtLeastZero = 0
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    logit_bias: dict[str, Any] = {}  # refused unless empty, so its values don't matter

    @property
    def include_usage(self) -> bool:
        return self.stream and self.stream_options.include_usage

    @abstractmethod
    def limit(self) -> int:
        """Tokens to generate at most, if the context is long enough."""

    @abstractmethod
    def limit_is_explicit(self) -> bool: ...

    @abstractmethod
    def report_logprobs(self) -> dict[str, int | None]:
        """Which log-probabilities the engine must report."""

    @model_validator(mode="after")
    def _check_min_tokens(self) -> "_GenerationRequest":
        if self.min_tokens > self.limit():
            raise contradiction("min_tokens", f"min_tokens ({self.min_tokens}) is over max_tokens ({self.limit()})")
        return self

    def check_supported(self) -> None:
        """Raise UnsupportedParameterError for a parameter that would have to be ignored."""
        if self.logit_bias:
            raise _unsupported("logit_bias")

    def sampling_params(self, prompt_tokens: int, max_model_len: int) -> SamplingParams:
        """The parameters for a prompt of this length.

        An explicit limit that doesn't fit the context raises ContextLengthError; the default is cut to what is left.
        """
        limit = self.limit()
        if prompt_tokens + limit > max_model_len:
            if self.limit_is_explicit():
                raise ContextLengthError(max_model_len, prompt_tokens, limit)
            limit = max(1, max_model_len - prompt_tokens)
        same = {f.name: getattr(self, f.name) for f in fields(SamplingParams) if f.name in type(self).model_fields}
        same |= {"max_tokens": limit, "min_tokens": min(self.min_tokens, limit)}
        return SamplingParams(**same | self.report_logprobs())


class ChatRequest(_GenerationRequest):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_tokens: AtLeastOne = 100
    max_completion_tokens: AtLeastOne | None = None
    logprobs: bool = False
    top_logprobs: TopLogprobs = 0
    response_format: ResponseFormat = ResponseFormat()
    tool_choice: Literal["auto", "none", "required"] | dict[str, Any] = "auto"
    function_call: Literal["auto", "none"] | dict[str, Any] = "auto"
    modalities: list[str] = ["text"]
    audio: Any = None
    web_search_options: Any = None
    reasoning_effort: str | None = None

    @model_validator(mode="after")
    def _check_top_logprobs(self) -> "ChatRequest":
        if self.top_logprobs and not self.logprobs:
            raise contradiction("top_logprobs", "top_logprobs needs logprobs to be true")
        return self

    def limit(self) -> int:
        return self.max_completion_tokens or self.max_tokens

    def limit_is_explicit(self) -> bool:
        return bool(self.model_fields_set & {"max_tokens", "max_completion_tokens"})

    def report_logprobs(self) -> dict[str, int | None]:
        return {"logprobs": self.top_logprobs if self.logprobs else None}

    def check_supported(self) -> None:
        super().check_supported()
        if self.response_format.type != "text":
            raise _unsupported("response_format", f"of type '{self.response_format.type}' ")
        if self.tool_choice not in ("auto", "none"):
            raise _unsupported("tool_choice", "that forces a tool ")
        if self.function_call not in ("auto", "none"):
            raise _unsupported("function_call", "that forces a function ")
        if self.modalities != ["text"]:
            raise _unsupported("modalities", "other than text ")
        for name in ("audio", "web_search_options", "reasoning_effort"):
            if getattr(self, name) is not None:
                raise _unsupported(name)


class CompletionRequest(_GenerationRequest):
    """POST /v1/completions."""

    prompt: (
        str
        | Annotated[list[str], Field(fail_fast=True)]
        | TokenIdList
        | Annotated[list[TokenIdList], Field(fail_fast=True)]
    )
    max_tokens: AtLeastZero = 16
    echo: bool = False
    logprobs: Annotated[int | None, Field(ge=0, le=5), BeforeValidator(_off_if_false)] = None
    suffix: str | None = None
    best_of: AtLeastOne = 1

    @model_validator(mode="after")
    def _check_max_tokens(self) -> "CompletionRequest":
        if self.max_tokens == 0 and not self.echo:
            raise contradiction("max_tokens", "max_tokens must be at least 1 unless echo is true")
        return self

    def prompts(self) -> list[str | list[int]]:
        """The prompts one by one, each as text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt or isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return list(self.prompt)  # type: ignore[arg-type]

    def limit(self) -> int:
        return self.max_tokens

    def limit_is_explicit(self) -> bool:
        return "max_tokens" in self.model_fields_set

    def report_logprobs(self) -> dict[str, int | None]:
        return {"logprobs": self.logprobs, "prompt_logprobs": self.logprobs if self.echo else None}

    def check_supported(self) -> None:
        super().check_supported()
        if self.suffix:
            raise _unsupported("suffix")
        if self.best_of > 1:
            raise _unsupported("best_of", "greater than 1 ")


def _unsupported(name: str, which: str = "") -> UnsupportedParameterError:
    return UnsupportedParameterError(f"'{name}' {which}is not supported with this model", param=name)
