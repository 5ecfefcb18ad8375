"""The sampling parameters of a request: names, types, ranges, defaults. Validates itself.

It knows what may be asked for; the sampler knows what it means.
"""

from dataclasses import replace
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator
from pydantic.dataclasses import dataclass

# Each parameter's type and range, in one place: SamplingParams and the HTTP requests are both made of these.
Temperature = Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)]
Probability = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
RepetitionPenalty = Annotated[float, Field(gt=0, allow_inf_nan=False)]
TopK = Annotated[int, Field(ge=-1)]
Choices = Annotated[int, Field(ge=1, le=8)]
TopLogprobs = Annotated[int, Field(ge=0, le=20)]


def _stop_strings(value: Any) -> Any:
    """None -> [], "a" -> ["a"], and without empty strings, which would stop every request at once."""
    strings = [] if value is None else [value] if isinstance(value, str) else value
    return [s for s in strings if s != ""] if isinstance(strings, list | tuple) else strings


StopStrings = Annotated[
    tuple[str, ...],
    Field(max_length=64, fail_fast=True),
    BeforeValidator(_stop_strings, json_schema_input_type=str | list[str] | None),
]


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen and when to stop. Raises pydantic.ValidationError (a ValueError) if out of range.

    temperature          0 is greedy: the most likely token, whatever else is set
    top_p                nucleus: the smallest set of tokens whose probability sums to top_p; 0 is greedy too
    max_tokens           tokens to generate at most; 0 only scores the prompt
    top_k                the k most likely tokens; 0 and -1 mean all
    min_p                tokens at least min_p times as likely as the most likely one
    seed                 the same seed gives the same text; any int, its low 64 bits count
    stop                 generation ends before the first of these strings
    n                    choices for the prompt; choice k uses seed + k
    presence_penalty     taken once from the logit of each token generated so far
    frequency_penalty    taken as often as the token was generated
    repetition_penalty   divides the logits of all tokens seen, prompt included (CTRL paper, section 4.1)
    logprobs             None, or how many of the most likely tokens are reported beside each chosen one
    prompt_logprobs      the same for the tokens of the prompt
    ignore_eos           treat end-of-sequence tokens as any other
    min_tokens           no end-of-sequence token and no stop string before this many tokens
    """

    temperature: Temperature = 0.0
    top_p: Probability = 1.0
    max_tokens: Annotated[int, Field(ge=0)] = 100
    top_k: TopK = 0
    min_p: Probability = 0.0
    seed: int | None = None
    stop: StopStrings = ()
    n: Choices = 1
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    logprobs: TopLogprobs | None = None
    prompt_logprobs: TopLogprobs | None = None
    ignore_eos: bool = False
    min_tokens: Annotated[int, Field(ge=0)] = 0

    @model_validator(mode="after")
    def _check_min_tokens(self) -> "SamplingParams":
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens ({self.min_tokens}) must not be greater than max_tokens ({self.max_tokens})")
        return self

    @property
    def greedy(self) -> bool:
        # Below 1e-5 the division by the temperature would overflow float32, and the draw is all but certain.
        return self.temperature < 1e-5 or self.top_p == 0

    def for_choice(self, k: int) -> "SamplingParams":
        """The parameters of choice `k` of `n` alone."""
        return replace(self, n=1, seed=None if self.seed is None else self.seed + k)
