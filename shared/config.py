"""What the reader may set: environment variables, checked once at start.

`uvicorn 05_server:app` has no flags of its own, so an engine reads its settings from the environment. A chapter that
has more of them subclasses EngineConfig and adds fields; it knows nothing of how they are used.

    environment -> EngineConfig -> resolved device, dtype and context length
"""

import os
import sys
from typing import Literal

import torch
from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from shared.engine import SetupError

BUNDLED_MODEL = "SmolLM2-135M-Instruct"

# Every variable of the course and the first chapter that knows it, so that one set for a later chapter is noticed.
FIRST_CHAPTER = {
    "MAX_NUM_SEQS": "ch05",
    "MAX_NUM_BATCHED_TOKENS": "ch09",
    "MAX_WAITING": "ch09",
    "TRACE": "ch09",
    "BLOCK_SIZE": "ch10",
    "NUM_BLOCKS": "ch10",
    "PREFIX_CACHING": "ch10",
    "QUANT": "ch11",
    "KV_DTYPE": "ch11",
    "TP": "ch11",
}


class EngineConfig(BaseSettings):
    """Settings of chapter 1 and all later ones. Arguments win over the environment.

    Raises SetupError, one line, for a value that can't be used.
    """

    model_config = SettingsConfigDict(env_ignore_empty=True, extra="ignore", frozen=True)

    model: str = Field(default=BUNDLED_MODEL, description="the bundled model, a local folder, or a hub id")
    device: str = Field(default="auto", description="auto (cuda, then cpu), cpu, cuda, cuda:N or mps")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    max_model_len: int | None = Field(default=None, ge=2, description="tokens; default: the model's own")

    def __init__(self, **values: object) -> None:
        try:
            super().__init__(**values)  # type: ignore[arg-type]
        except ValidationError as error:
            first = error.errors()[0]
            if not first["loc"]:  # two settings that don't go together; what was raised names both
                raise SetupError(first["msg"].removeprefix("Value error, ")) from None
            name = "".join(str(part).upper() for part in first["loc"][:1])
            raise SetupError(
                f"{name}={first['input']}: {first['msg'][0].lower()}{first['msg'][1:]}. Change or unset {name}."
            ) from None

    def torch_device(self) -> torch.device:
        """The device to run on. Raises SetupError if this machine doesn't have it."""
        name = self.device
        if name == "auto":
            name = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            device = torch.device(name)
            torch.empty(1, device=device)
        except (RuntimeError, AssertionError, NotImplementedError):
            raise SetupError(
                f"DEVICE={name}: torch can't use this device here. Set DEVICE to cpu, cuda, cuda:N, mps or auto."
            ) from None
        return device

    def torch_dtype(self) -> torch.dtype:
        """float32 on CPU, where it is fast and every chapter gives the same tokens; bfloat16 on CUDA."""
        if self.dtype != "auto":
            return getattr(torch, self.dtype)
        return torch.bfloat16 if self.torch_device().type == "cuda" else torch.float32

    def context_length(self, model_limit: int) -> int:
        """Tokens of context, prompt and output together. Raises SetupError if the model has fewer."""
        if self.max_model_len is not None and self.max_model_len > model_limit:
            raise SetupError(
                f"MAX_MODEL_LEN={self.max_model_len}: {self.model} was trained for {model_limit} tokens. "
                f"Set MAX_MODEL_LEN to at most {model_limit} or unset it."
            )
        return self.max_model_len or model_limit

    def announce(self, max_model_len: int) -> None:
        """Say on stderr what was chosen, and which variables are set for a later chapter only."""
        chosen = {
            **self.model_dump(),
            "device": str(self.torch_device()),
            "dtype": str(self.torch_dtype()).removeprefix("torch."),
            "max_model_len": max_model_len,
            "threads": torch.get_num_threads(),
        }
        print("engine:", *(f"{name}={value}" for name, value in chosen.items()), file=sys.stderr, flush=True)
        for name, chapter in FIRST_CHAPTER.items():
            if os.environ.get(name) and name.lower() not in type(self).model_fields:
                print(f"engine: {name} has no effect here: it begins with {chapter}", file=sys.stderr, flush=True)
