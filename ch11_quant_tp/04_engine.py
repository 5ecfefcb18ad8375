"""Chapter 11's engine, the full one: chapter 10's with quantised weights, a quantised cache, and several ranks.

It replaces how the model is made, what the blocks hold, and who takes part in a pass. Each of the three can be off, and
then the engine is chapter 10's.

    plan, plain data -> every rank: its shard of the weights, its heads of the cache -> sums -> logits at rank 0
"""

from dataclasses import asdict
from pathlib import Path
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from ch09_async_scheduling.plan import Plan, StillWanted, run
from ch10_paged_cache.engine import PagedCache, PagedConfig, PagedEngine, PagedPlan
from ch10_paged_cache.paged_attention import paged_attention, store
from ch11_quant_tp.loading import load_quantised
from ch11_quant_tp.ranks import Ranks, launched_by_torchrun
from ch11_quant_tp.tensor_parallel import Shard
from shared.checkpoint import checkpoint_folder
from shared.errors import SetupError
from shared.machine import zeros
from shared.model import ModelConfig, Transformer, load_model


class FullConfig(PagedConfig):
    quant: Literal["none", "int8", "int4"] = Field(default="none", description="bits of the weights")
    kv_dtype: Literal["auto", "int8"] = Field(default="auto", description="what the cache holds; auto: as DTYPE")
    tp: int = Field(default=1, ge=1, description="ranks that share the model")


def rank_device(config: FullConfig, rank: int) -> torch.device:
    """Rank r runs on GPU r, unless DEVICE names one."""
    device = config.torch_device()
    return torch.device("cuda", rank) if device.type == "cuda" and config.tp > 1 and device.index is None else device


def make_model(config: FullConfig, rank: int = 0) -> Transformer:
    """The model, or the shard of it that `rank` holds, loaded and nothing more. Raises SetupError."""
    folder, device, dtype = checkpoint_folder(config.model), rank_device(config, rank), config.torch_dtype()
    if config.quant != "none" and dtype != torch.float32:
        raise SetupError(f"QUANT={config.quant} computes in float32. Set DTYPE=float32, or QUANT=none.")
    shard = Shard(ModelConfig.from_folder(folder), rank, config.tp)
    if config.quant != "none":
        model = load_quantised(folder, config.quant, device, shard.config, shard.take)
    else:
        model = load_model(folder, dtype, device, config=shard.config, take=shard.take)
    return shard.connect(model) if config.tp > 1 else model


def make_cache(config: FullConfig, model: ModelConfig, num_blocks: int, device: torch.device) -> PagedCache:
    """The pool for the KV heads of this rank."""
    kind = Int8Cache if config.kv_dtype == "int8" else PagedCache
    return kind(model, num_blocks, config.block_size, config.torch_dtype(), device)


class Int8Cache(PagedCache):
    """Blocks of 8-bit numbers, with a scale for each token and head: [L, N, KV, block_size].

    A scale for each row of D numbers is what values want; keys have outlying channels and lose more by it (KIVI,
    arXiv:2402.02750, section 3).
    """

    def __init__(
        self, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(config, num_blocks, block_size, torch.int8, device)
        shape = self.keys.shape[:-1]
        self.key_scales, self.value_scales = zeros(shape, torch.float32, device), zeros(shape, torch.float32, device)

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        super().copy(pairs)
        for source, target in pairs:
            self.key_scales[:, target], self.value_scales[:, target] = (
                self.key_scales[:, source],
                self.value_scales[:, source],
            )

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cache = self.keys[layer], self.values[layer]
        scales = self.key_scales[layer], self.value_scales[layer]
        store(*cache, k, v, self._batch, scales)
        return paged_attention(q, *cache, self._batch, scales)


class Engine(PagedEngine):
    """The full engine: chapter 10's, in fewer bits and on several ranks. Raises SetupError for what can't be used."""

    config_class = FullConfig
    config: FullConfig
    ranks: Ranks | None = None

    def make_model(self, folder: Path) -> Transformer:
        config = self.config
        if launched_by_torchrun() and config.tp == 1:
            raise SetupError("torchrun has started several ranks: set TP to their number, or start the server alone.")
        self.device = rank_device(config, 0)
        model = make_model(config)
        if config.tp > 1:
            settings = config.model_dump(mode="json") | {"trace": None}
            self.ranks = Ranks(config.tp, settings, lambda why: self._inbox.put(("fail", why)))
        return model

    def make_cache(self, num_blocks: int) -> PagedCache:
        return make_cache(self.config, self.model.config, num_blocks, self.device)

    def bytes_per_block(self) -> int:
        """Of all ranks together, for they may share the memory."""
        shard = self.model.config
        full = ModelConfig.from_folder(checkpoint_folder(self.config.model)) if self.config.tp > 1 else shard
        rows = 2 * full.num_layers * full.num_kv_heads * self.config.block_size
        if self.config.kv_dtype == "int8":
            return rows * (full.head_dim + 4)
        return rows * full.head_dim * self.config.torch_dtype().itemsize

    def before_loop(self) -> None:
        if self.ranks:
            self.ranks.start()
            self.ranks.send({"num_blocks": self.blocks.num_blocks})

    def after_loop(self) -> None:
        if self.ranks:
            self.ranks.close()

    def forward(self, plan: Plan, still_wanted: StillWanted) -> Tensor:
        if self.ranks is None:
            return super().forward(plan, still_wanted)
        assert isinstance(plan, PagedPlan)
        self.ranks.send(asdict(plan))
        self.cache.begin(plan)
        return run(self.model, plan, self.cache.attend)  # to its end: the others can't be called back
