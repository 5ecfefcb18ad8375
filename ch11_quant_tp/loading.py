"""A checkpoint into a quantised model: each weight is quantised as it is read, so the float32 model never exists.

It knows checkpoints, the model's layers and how to quantise; it knows no engine.

    *.safetensors -> a layer's tensor -> take: all of it or a shard -> quantise -> QuantisedLinear in the layer's place
"""

from collections import defaultdict
from pathlib import Path

import torch
from torch import Tensor, nn

from ch11_quant_tp.quantisation import Quant, Quantised, QuantisedEmbedding, QuantisedLinear, quantise
from shared.machine import in_own_thread
from shared.model import Linear, ModelConfig, Transformer
from shared.rope import rope_frequencies
from shared.weights import Take, checkpoint_tensors, sources, whole


@in_own_thread
def load_quantised(
    folder: Path,
    quant: Quant,
    device: torch.device | str = "cpu",
    config: ModelConfig | None = None,
    take: Take = whole,
) -> Transformer:
    """The model of `folder` with all linear layers and the embedding quantised; norms and biases stay float32.

    config, take: of the shard that this process holds, if it isn't the whole model.
    Raises SetupError if the architecture isn't known or the checkpoint is broken.
    """
    config = config or ModelConfig.from_folder(folder)
    with torch.device("meta"):
        model = Transformer(config)
    frequencies, model.rope_factor = rope_frequencies(config.rope, config.head_dim)
    model.frequencies = frequencies.to(device)
    names = [name for name, _ in model.named_parameters() if not (config.tied and name == "lm_head.weight")]
    names.sort(key=lambda name: not name.endswith(".bias"))  # a layer is made when its weight is there: biases first
    parts: dict[str, list[Quantised | Tensor]] = defaultdict(list)
    for name, source, tensor in checkpoint_tensors(folder, names):
        part = take(source, tensor).float()
        parts[name].append(quantise(part, bits_of(name, quant)) if part.dim() == 2 else part)
        if source == sources(name)[-1] and not name.endswith(".bias"):
            _put(model, name.removesuffix(".weight"), parts, device)
    if config.tied:
        model.lm_head = model.embedding.table  # type: ignore[assignment, union-attr]
    return model.requires_grad_(False).eval()


def bits_of(parameter: str, quant: Quant) -> Quant:
    """8 bits for the output layer and the embedding in any case: errors in a token's own logits weigh the most."""
    return "int8" if parameter in ("lm_head.weight", "embedding.weight") else quant


def _put(model: nn.Module, name: str, parts: dict[str, list[Quantised | Tensor]], device: torch.device | str) -> None:
    """Put a finished layer where the model had an empty one."""
    parent_name, _, child = name.rpartition(".")
    parent = model.get_submodule(parent_name)
    weight = parts.pop(f"{name}.weight")
    if isinstance(weight[0], Tensor):  # a norm
        getattr(parent, child).weight = nn.Parameter(weight[0].to(device))
        return
    joined = _below_each_other([part for part in weight if isinstance(part, Quantised)])
    bias = parts.pop(f"{name}.bias", None)
    layer = QuantisedLinear(joined, None if bias is None else torch.cat(bias)).to(device)  # type: ignore[arg-type]
    setattr(parent, child, QuantisedEmbedding(layer) if isinstance(getattr(parent, child), nn.Embedding) else layer)


def _below_each_other(parts: list[Quantised]) -> Quantised:
    """q, k and v, or gate and up, as one matrix. Groups lie within a row, so nothing changes."""
    minima = [part.minima for part in parts if part.minima is not None]
    return Quantised(
        torch.cat([part.values for part in parts]),
        torch.cat([part.scales for part in parts]),
        torch.cat(minima) if minima else None,
        parts[0].columns,
    )


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all weights in memory, each counted once."""
    tensors = {t.data_ptr(): t for t in [*model.parameters(), *model.buffers()]}
    for module in model.modules():
        if isinstance(module, Linear) and module.packed is not None:
            tensors[id(module.packed)] = module.packed
    return sum(tensor.nbytes if tensor.layout == torch.strided else 4 * tensor.numel() for tensor in tensors.values())
