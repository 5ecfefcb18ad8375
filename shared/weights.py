"""A checkpoint's tensors into a model's parameters: each is read once, where it belongs, and nothing is held twice.

It knows safetensors files and the names in them; it doesn't know what the model computes.

    *.safetensors, memory-mapped -> checkpoint_tensors -> take: all of it or a shard -> parameter rows
"""

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from shared.errors import SetupError, first_line

# What a parameter is called in a checkpoint; several are put below each other.
SOURCES = {
    "attention_norm": ("input_layernorm",),
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.q_norm": ("self_attn.q_norm",),
    "attention.k_norm": ("self_attn.k_norm",),
    "attention.out": ("self_attn.o_proj",),
    "mlp_norm": ("post_attention_layernorm",),
    "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down": ("mlp.down_proj",),
    "embedding": ("model.embed_tokens",),
    "norm": ("model.norm",),
    "lm_head": ("lm_head",),
}

# (name in the checkpoint, tensor not yet read) -> what this process keeps of it
Take = Callable[[str, Any], Tensor]


def whole(source: str, tensor: Any) -> Tensor:
    """Keep all of a tensor. One that holds a shard reads rows, `tensor[a:b]`, or columns, `tensor[:, a:b]`."""
    return tensor[:]


def sources(parameter: str) -> list[str]:
    """Names in the checkpoint: layers.0.mlp.down.weight -> [model.layers.0.mlp.down_proj.weight]."""
    module, kind = parameter.rsplit(".", 1)
    prefix = ""
    if module.startswith("layers."):
        _, layer, module = module.split(".", 2)
        prefix = f"model.layers.{layer}."
    return [f"{prefix}{source}.{kind}" for source in SOURCES[module]]


def checkpoint_tensors(folder: Path, parameters: Iterable[str]) -> Iterator[tuple[str, str, Any]]:
    """(parameter, name in the checkpoint, tensor not yet read) for all that `parameters` are made of, in order.

    A tensor is a slice of a memory-mapped file: `tensor.get_shape()` is free, `tensor[a:b]` reads those rows. The file
    is opened anew for each, in half a millisecond, so that pages already copied are unmapped and take no memory.

    Raises SetupError if a file or a weight is missing or broken, or the checkpoint has a weight that nothing would use.
    """
    files = _files(folder)
    wanted = {source: parameter for parameter in parameters for source in sources(parameter)}
    for source in files.keys() - wanted.keys():
        if source != "lm_head.weight" and not source.endswith("rotary_emb.inv_freq"):  # a tied head; computed here
            raise SetupError(f"{folder}: config.json leaves no place for the weight {source}. Download both again.")
    for source, parameter in wanted.items():
        if source not in files:
            raise SetupError(f"{folder}: the weight {source} is missing. Download the checkpoint again.")
        with _open(folder / files[source]) as tensors:
            yield parameter, source, tensors.get_slice(source)


def _files(folder: Path) -> dict[str, str]:
    """{weight: file}, from the index of a sharded checkpoint or from the single file."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return json.loads(index.read_text())["weight_map"]
    with _open(folder / "model.safetensors") as tensors:
        return dict.fromkeys(tensors.keys(), "model.safetensors")


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (OSError, SafetensorError) as error:
        raise SetupError(
            f"{file}: can't be read as safetensors ({first_line(error)}). Download the checkpoint again."
        ) from None


def load_weights(model: nn.Module, folder: Path, take: Take = whole) -> None:
    """Copy a checkpoint into the model's parameters, each tensor once, to their device and dtype.

    Raises SetupError as `checkpoint_tensors` does, or if a weight doesn't have the parameter's shape.
    """
    parameters = dict(model.named_parameters())
    filled = dict.fromkeys(parameters, 0)  # rows
    for name, source, tensor in checkpoint_tensors(folder, parameters):
        part = take(source, tensor)
        start = filled[name]
        filled[name] += part.shape[0]
        place = parameters[name].data[start : filled[name]]
        complete = filled[name] == parameters[name].shape[0] or source != sources(name)[-1]
        if place.shape != part.shape or not complete:
            raise SetupError(f"{folder}: {source} has shape {list(part.shape)}, which doesn't fit config.json.")
        place.copy_(part)
