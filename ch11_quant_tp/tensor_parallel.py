"""One model on several ranks: who holds which part of each weight, and where the parts are added up again.

It knows the model's layers and torch.distributed's collectives; it knows no engine and no process.

    column parallel: qkv, gate_up      each rank has some heads, some columns of the mlp    nothing is sent
    row parallel:    out, down         each rank has a part of the sum                      all_reduce [T, hidden]
    vocabulary:      embedding         each rank knows some tokens                          all_reduce [T, hidden]
                     lm_head           each rank scores some tokens                         gather [R, V] to rank 0

Megatron-LM (arXiv:1909.08053), section 3: two sums a layer, and nothing else between the ranks.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ch11_quant_tp.quantisation import GROUP, QuantisedEmbedding
from shared.errors import SetupError
from shared.model import ModelConfig, Transformer


def share(total: int, rank: int, size: int, unit: int = 1) -> slice:
    """Rank's part of `total` things, in whole units; the first ranks get one more where it doesn't come out even."""
    units = -(-total // unit)
    first, last = (-(-units * r // size) for r in (rank, rank + 1))
    return slice(min(first * unit, total), min(last * unit, total))


@dataclass(frozen=True)
class Shard:
    """What rank `rank` of `size` holds of the model `full`. Raises SetupError if there are more ranks than KV heads.

    A query head goes with the KV head that it reads, so nothing of the cache is held twice.
    """

    full: ModelConfig
    rank: int
    size: int

    def __post_init__(self) -> None:
        if self.size > self.full.num_kv_heads:
            raise SetupError(
                f"TP={self.size}: this model has {self.full.num_kv_heads} KV heads, and each rank needs at least one. "
                f"Set TP to at most {self.full.num_kv_heads}."
            )

    @property
    def kv_heads(self) -> slice:
        return share(self.full.num_kv_heads, self.rank, self.size)

    @property
    def heads(self) -> slice:
        each = self.full.num_heads // self.full.num_kv_heads
        return slice(self.kv_heads.start * each, self.kv_heads.stop * each)

    @property
    def columns(self) -> slice:
        """Of the mlp. In whole groups, so that quantised weights are the same as those of one rank."""
        unit = GROUP if self.full.intermediate_size >= GROUP * self.size else 1
        return share(self.full.intermediate_size, self.rank, self.size, unit)

    @property
    def vocabulary(self) -> slice:
        return share(self.full.vocab_size, self.rank, self.size)

    @property
    def config(self) -> ModelConfig:
        """The model as this rank builds it."""
        return replace(
            self.full,
            num_heads=_length(self.heads),
            num_kv_heads=_length(self.kv_heads),
            intermediate_size=_length(self.columns),
            vocab_size=_length(self.vocabulary),
        )

    def take(self, source: str, tensor: Any) -> Tensor:
        """This rank's part of a checkpoint's tensor, read and nothing more of it."""
        D = self.full.head_dim
        module = source.split(".")[-2]
        rows: dict[str, slice] = {
            "q_proj": slice(self.heads.start * D, self.heads.stop * D),
            "k_proj": slice(self.kv_heads.start * D, self.kv_heads.stop * D),
            "v_proj": slice(self.kv_heads.start * D, self.kv_heads.stop * D),
            "gate_proj": self.columns,
            "up_proj": self.columns,
            "embed_tokens": self.vocabulary,
            "lm_head": self.vocabulary,
        }
        columns = {"o_proj": rows["q_proj"], "down_proj": self.columns}
        if module in rows:
            return tensor[rows[module]]
        if module not in columns:
            return tensor[:]  # norms
        if source.endswith(".bias"):  # added once, and not by every rank
            return tensor[:] if self.rank == 0 else torch.zeros_like(tensor[:])
        return tensor[:, columns[module]].contiguous()

    def connect(self, model: Transformer) -> Transformer:
        """Put the collectives where the ranks' parts belong together."""
        for layer in model.layers:
            layer.attention.out = SummedOverRanks(layer.attention.out)  # type: ignore[union-attr, assignment, arg-type]
            layer.mlp.down = SummedOverRanks(layer.mlp.down)  # type: ignore[union-attr, assignment, arg-type]
        model.embedding = ShardedEmbedding(model.embedding, self.vocabulary)  # type: ignore[assignment]
        model.lm_head = GatheredLogits(model.lm_head, self)  # type: ignore[assignment]
        return model


class SummedOverRanks(nn.Module):
    """A row parallel layer: each rank multiplies its columns, and the results are added."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        part = self.layer(x).contiguous()  # [T, hidden]
        dist.all_reduce(part)
        return part


class ShardedEmbedding(nn.Module):
    """Each rank knows the tokens [start, stop) and gives zeros for the others; the sum is the embedding."""

    def __init__(self, table: nn.Embedding | QuantisedEmbedding, vocabulary: slice) -> None:
        super().__init__()
        self.table, self.vocabulary = table, vocabulary

    def forward(self, token_ids: Tensor) -> Tensor:
        local = token_ids - self.vocabulary.start
        mine = (local >= 0) & (local < _length(self.vocabulary))  # [T]
        x = self.table(torch.where(mine, local, 0)) * mine[:, None]
        dist.all_reduce(x)
        return x


class GatheredLogits(nn.Module):
    """Each rank scores its own tokens; rank 0 gets [R, V], the others [R, 0]."""

    def __init__(self, head: nn.Module, shard: Shard) -> None:
        super().__init__()
        self.head, self.shard = head, shard

    def forward(self, hidden: Tensor) -> Tensor:
        V, size = self.shard.full.vocab_size, self.shard.size
        widths = [_length(share(V, rank, size)) for rank in range(size)]
        part = hidden.new_zeros(len(hidden), max(widths))  # of equal widths, as gather wants them
        part[:, : widths[self.shard.rank]] = self.head(hidden)
        parts = [torch.empty_like(part) for _ in widths] if self.shard.rank == 0 else None
        dist.gather(part, parts, dst=0)
        if parts is None:
            return hidden[:, :0]
        return torch.cat([each[:, :width] for each, width in zip(parts, widths, strict=True)], dim=1)


def _length(part: slice) -> int:
    return part.stop - part.start
