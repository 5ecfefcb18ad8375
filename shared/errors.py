"""What an engine says when it can't do what it is asked. The server gives each kind its HTTP status.

SetupError                      the engine can't start
RequestError                    this request can never be run      400
  UnsupportedParameterError     ... because of one parameter       400
  ContextLengthError            ... because it is too long         400
QueueFullError                  not now                            429
RequestFailedError              it was run and failed              500
EngineDeadError                 the engine isn't running           503
"""


def first_line(error: Exception) -> str:
    """The first line of an error's message, or its kind if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


class SetupError(SystemExit):
    """The engine can't start: one line that names the thing and the mend.

    A SystemExit, so that a script or `uvicorn 05_server:app` that doesn't catch it prints the line, without a
    traceback, and exits with status 1.
    """


class EngineError(Exception):
    """Anything an engine says about one request or about itself."""


class RequestError(EngineError, ValueError):
    """The request can never be run. `param` names the parameter at fault, `code` the kind of fault."""

    code: str | None = None

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class UnsupportedParameterError(RequestError):
    """The request asks for something that this engine can't do."""

    code = "unsupported_parameter"


class ContextLengthError(RequestError):
    """The prompt, or the prompt and the tokens asked for, are longer than the model's context."""

    code = "context_length_exceeded"

    def __init__(self, max_model_len: int, prompt_tokens: int, completion_tokens: int) -> None:
        # Clients find out that a prompt was too long by matching on these words: keep them.
        super().__init__(
            f"This model's maximum context length is {max_model_len} tokens. However, you requested "
            f"{prompt_tokens + completion_tokens} tokens ({prompt_tokens} in the messages, {completion_tokens} in the "
            "completion): prompt is too long or max_tokens too large (context_length_exceeded)."
        )


class QueueFullError(EngineError):
    """There is no room in the waiting queue now. The same request may be accepted later."""


class RequestFailedError(EngineError):
    """The engine took the request and failed inside it. Other requests go on."""


class EngineDeadError(EngineError):
    """The engine isn't running: not started yet, stopping, or its loop has died."""
