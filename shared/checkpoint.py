"""Find a checkpoint and load it with transformers.

A checkpoint is a folder with config.json, safetensors and tokenizer files. It knows where the bundled model lies and
how to ask the hub; it knows no engine.

    MODEL -> checkpoint_folder -> folder -> load_transformers -> model
"""

from pathlib import Path

import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from shared.config import BUNDLED_MODEL, EngineConfig
from shared.errors import SetupError, first_line
from shared.machine import in_own_thread

MODELS = Path(__file__).resolve().parent.parent / "models"


def checkpoint_folder(model: str) -> Path:
    """The folder of the bundled model, of a local folder, or of a hub id, which is downloaded if need be.

    Raises SetupError if there is none.
    """
    if model == BUNDLED_MODEL:
        if not (MODELS / model / "config.json").is_file():
            raise SetupError(f"The bundled model {model} isn't set up yet: run `make model` in {MODELS.parent}.")
        return MODELS / model
    folder = Path(model).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise SetupError(f"MODEL={model}: the folder has no config.json, so it isn't a checkpoint.")
        return folder.resolve()
    if folder.is_absolute() or model.startswith((".", "~")) or model.count("/") != 1:
        raise SetupError(
            f"MODEL={model}: no such folder, and a hub id has the form owner/name. Unset MODEL for the bundled one."
        )
    return _download(model)


def _download(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download  # takes a second to import, and few runs need it

    try:
        wanted = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]
        return Path(snapshot_download(hub_id, allow_patterns=wanted))
    except Exception as error:  # the hub's client raises a dozen kinds: offline, not found, gated, disk full, ...
        raise SetupError(
            f"MODEL={hub_id}: there is no such folder, and the hub gave none ({first_line(error)}). "
            "Check the name and the network, or give a local folder."
        ) from error


def model_id(model: str) -> str:
    """The name under which a model is served: a folder's own name, else what MODEL says."""
    folder = Path(model).expanduser()
    return folder.resolve().name if folder.is_dir() else model


def load_config(folder: Path) -> PretrainedConfig:
    """The checkpoint's config.json. Raises SetupError if transformers doesn't know the architecture."""
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise SetupError(f"{folder}: config.json can't be used: {first_line(error)}") from error


def model_context_length(folder: Path) -> int:
    """The context in tokens that the checkpoint was trained for."""
    text_config = load_config(folder).get_text_config()
    return int(getattr(text_config, "max_position_embeddings", 0) or 2048)


def weight_count(folder: Path) -> int:
    """Number of weights in the checkpoint's safetensors files, read from their headers."""
    total = 0
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (safe_open is no dict)
                shape = tensors.get_slice(name).get_shape()
                total += torch.Size(shape).numel()
    return total


@in_own_thread
def load_transformers(config: EngineConfig) -> PreTrainedModel:
    """The model as transformers runs it: the reference of every chapter. Raises SetupError if it can't be loaded."""
    folder = checkpoint_folder(config.model)
    transformers_logging.disable_progress_bar()  # loading takes a second, and a server's log is no place for bars
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=config.torch_dtype(), local_files_only=True)
        return model.to(config.torch_device()).eval()  # type: ignore[arg-type]
    except Exception as error:  # a foreign checkpoint can be broken in as many ways as there are libraries below
        raise SetupError(f"MODEL={config.model}: transformers can't load it: {first_line(error)}") from error
