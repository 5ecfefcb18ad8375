"""A decoder-only transformer for Llama, Qwen2, Qwen3 and Mistral checkpoints, with one seam: attention.

It knows no cache, no request and no sampling. Tokens come packed: one row a token, no padding. What a token may attend
to is the business of `attend`, which each chapter writes anew.

    token_ids [T] -> embedding -> L x (attention through `attend`, mlp) -> hidden [T, hidden] -> logits [R, V]

Letters of the dimensions, here and in all chapters:

    B    sequences in a batch           H    query heads
    T    packed tokens of one forward   KV   key and value heads; H / KV query heads share one
    L    layers                         D    dimensions of a head (head_dim)
    V    tokens in the vocabulary       R    rows of which logits are asked

Linear layers, found by name in `named_modules()`; a later chapter replaces them with quantised or sharded ones:

    layers.0.attention.qkv   hidden -> q, k, v: [0, H*D) q, [H*D, (H+KV)*D) k, [(H+KV)*D, (H+2*KV)*D) v
    layers.0.attention.out   H*D -> hidden
    layers.0.mlp.gate_up     hidden -> gate, up: [0, intermediate) gate, [intermediate, 2*intermediate) up
    layers.0.mlp.down        intermediate -> hidden
    lm_head                  hidden -> V
"""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from shared.checkpoint import load_config
from shared.errors import SetupError
from shared.kernels import FEW_ROWS, linear, rms_norm, rotate_, silu_mul
from shared.machine import in_own_thread
from shared.rope import ROPE_SETTINGS, rope_frequencies
from shared.weights import Take, load_weights, whole

# oneDNN compiles a kernel for each number of rows that it meets, and it and torch's layer above it each keep the last
# 1,024: with prompts of all lengths some 700 MB, which look like a leak. Both read this when they are first used.
for _name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    os.environ.setdefault(_name, "64")

# (layer, q [T, H, D], k [T, KV, D], v [T, KV, D]) -> [T, H, D]; k and v are those of the T new tokens alone
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
}


def causal_attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The simplest thing behind the seam: T tokens of one sequence from its first on, nothing kept. Returns [T, H, D].

    q [T, H, D]; k, v [T, KV, D]. Attention Is All You Need (arXiv:1706.03762), section 3.2.1, with the causal mask of
    3.2.3; query heads that share a key head as in GQA (arXiv:2305.13245), section 2.2. Tests hold every cache to it.
    """
    T, H, D = q.shape
    k, v = (x.repeat_interleave(H // x.shape[1], dim=1) for x in (k, v))  # [T, H, D]
    scores = torch.einsum("ihd,jhd->hij", q, k).float() / math.sqrt(D)  # [H, T, T]
    future = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1)
    weights = scores.masked_fill(future, -math.inf).softmax(dim=-1).to(v.dtype)
    return torch.einsum("hij,jhd->ihd", weights, v)


# --- configuration ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelConfig:
    """What the model needs of config.json.

    max_model_len: tokens of context. It is the trained context, or the sliding window where the checkpoint has a
    shorter one: up to that length a window hides nothing, and `attend` carries no window that could hide more.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope: dict[str, Any]
    max_model_len: int
    tied: bool  # lm_head is the embedding
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool

    @classmethod
    def from_folder(cls, folder: Path) -> "ModelConfig":
        """Read config.json. Raises SetupError, by name, for anything that this model would compute wrongly."""
        hf = load_config(folder)
        _refuse(folder, hf)
        attention_bias = bool(getattr(hf, "attention_bias", False))
        slides = "sliding_attention" in getattr(hf, "layer_types", ["sliding_attention"])  # in Mistral all layers do
        window = getattr(hf, "sliding_window", None) if slides else None
        return cls(
            hidden_size=hf.hidden_size,
            intermediate_size=hf.intermediate_size,
            num_layers=hf.num_hidden_layers,
            num_heads=hf.num_attention_heads,
            num_kv_heads=hf.num_key_value_heads,
            head_dim=getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
            vocab_size=hf.vocab_size,
            rms_norm_eps=hf.rms_norm_eps,
            rope=dict(hf.rope_parameters),
            max_model_len=min(hf.max_position_embeddings, window or math.inf),
            tied=hf.tie_word_embeddings,
            qkv_bias=attention_bias or hf.model_type == "qwen2",
            out_bias=attention_bias,
            mlp_bias=bool(getattr(hf, "mlp_bias", False)),
            qk_norm=hf.model_type == "qwen3",
        )


def _refuse(folder: Path, hf: PretrainedConfig) -> None:
    known = ARCHITECTURES.get(hf.model_type, "")
    name = (hf.architectures or [known or hf.model_type])[0]
    rope = getattr(hf, "rope_parameters", None) or {}
    needed = ROPE_SETTINGS.get(rope.get("rope_type", ""))
    reason = None
    if name != known:
        reason = f"{name} isn't one of the architectures of this chapter ({', '.join(ARCHITECTURES.values())})"
    elif getattr(hf, "quantization_config", None):
        reason = f"{name} has quantised weights, and this chapter reads float32, bfloat16 and float16"
    elif hf.hidden_act != "silu":
        reason = f"{name} has hidden_act={hf.hidden_act}, and this chapter knows silu alone"
    elif needed is None:
        reason = f"{name} has rope_type={rope.get('rope_type')}, and this chapter knows {', '.join(ROPE_SETTINGS)}"
    elif missing := [setting for setting in needed if rope.get(setting) is None]:
        reason = f"rope_type={rope['rope_type']} needs a value of {', '.join(missing)} in config.json"
    elif rope.get("partial_rotary_factor", 1.0) != 1.0:
        reason = f"{name} has partial_rotary_factor={rope['partial_rotary_factor']}, and this chapter turns whole heads"
    if reason:
        raise SetupError(
            f"{folder}: {reason}. Choose another MODEL; chapter 1, which uses transformers, can run this one."
        )


# --- layers -----------------------------------------------------------------------------------------------------------


class Linear(nn.Linear):
    """x [T, in] -> [T, out]: every product with weights is computed here, by the path that is fastest for it.

    A decode step reads all weights for a few rows, so it can't be faster than memory. F.linear in float32 on CPU is far
    from that: one row gets half of the bandwidth, since MKL keeps it in one thread, and eight get a quarter. oneDNN
    does better once the weights lie in its own blocked order (`pack`); weights that must stay as they are, as those of
    a head that is also the embedding, have a kernel of ours.
    """

    packed: Tensor | None = None

    def pack(self) -> None:
        """Replace `weight`, None from then on, by `packed`: the same numbers in oneDNN's order, in memory once."""
        self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), FEW_ROWS)
        self.register_parameter("weight", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.packed is not None:
            return torch.ops.mkldnn._linear_pointwise.default(x, self.packed, self.bias, "none", [], "")
        return linear(x, self.weight, self.bias)


class RMSNorm(nn.Module):
    """Root mean square layer normalisation over the last dimension (arXiv:1910.07467, equation 4)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    """Project to q, k and v, turn q and k by their positions, attend, project back."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        H, KV, D = config.num_heads, config.num_kv_heads, config.head_dim
        self.layer, self.num_heads, self.num_kv_heads, self.head_dim = layer, H, KV, D
        self.qkv = Linear(config.hidden_size, (H + 2 * KV) * D, bias=config.qkv_bias)
        self.out = Linear(H * D, config.hidden_size, bias=config.out_bias)
        self.q_norm = RMSNorm(D, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(D, config.rms_norm_eps) if config.qk_norm else None

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """x [T, hidden], cos and sin [T, 1, D] -> [T, hidden]."""
        T, H, KV = x.shape[0], self.num_heads, self.num_kv_heads
        qkv = self.qkv(x).view(T, H + 2 * KV, self.head_dim)
        q, k, v = qkv.split((H, KV, KV), dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q.copy_(self.q_norm(q)), k.copy_(self.k_norm(k))
        rotate_(qkv[:, : H + KV], cos, sin)  # q and k
        return self.out(attend(self.layer, q, k, v).reshape(T, -1))


class MLP(nn.Module):
    """SwiGLU (arXiv:2002.05202, section 2): silu(gate) * up, then down."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up = Linear(config.hidden_size, 2 * config.intermediate_size, bias=config.mlp_bias)
        self.down = Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(silu_mul(self.gate_up(x)))


class Layer(nn.Module):
    """Attention, then mlp; each reads the normalised residual stream x [T, hidden] and adds to it."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = Attention(config, layer)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin, attend)
        return x + self.mlp(self.mlp_norm(x))


class Transformer(nn.Module):
    """The model. Its weights come from `load_model`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, layer) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.frequencies, self.rope_factor = torch.empty(0), 1.0  # set at load

    @property
    def max_model_len(self) -> int:
        """Tokens of context, prompt and output together."""
        return self.config.max_model_len

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """token_ids [T] at positions [T] of their sequences -> hidden [T, hidden], normalised.

        Calls `attend` once a layer, in order. But for what `attend` does, no row depends on another.
        """
        x = self.embedding(token_ids)
        angles = positions[:, None, None].float() * self.frequencies  # [T, 1, D/2]
        cos, sin = (angles.cos() * self.rope_factor).to(x.dtype), (angles.sin() * self.rope_factor).to(x.dtype)
        cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)  # [T, 1, D]
        for layer in self.layers:
            x = layer(x, cos, sin, attend)
        return self.norm(x)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [R, V] of the rows of `forward`'s result [R, hidden] that are asked for: those that are sampled."""
        return self.lm_head(hidden)


# --- loading ----------------------------------------------------------------------------------------------------------


@in_own_thread
def load_model(
    folder: Path,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    pack: bool = True,
    config: ModelConfig | None = None,
    take: Take = whole,
) -> Transformer:
    """The model of the checkpoint in `folder`, ready to run.

    pack: lay the linear layers out for decoding where that is possible (float32 on CPU). Whatever wants to see their
    weights, as quantisation does, loads without.
    config, take: of the shard that this process holds, if it isn't the whole model.

    Raises SetupError if the architecture isn't one of ARCHITECTURES or the checkpoint is broken.
    """
    config = config or ModelConfig.from_folder(folder)
    with torch.device("meta"):  # no memory yet, and no random numbers that would be overwritten
        model = Transformer(config)
    model.to(dtype=dtype).to_empty(device=device).requires_grad_(False).eval()
    if config.tied:
        model.lm_head.weight = model.embedding.weight
    frequencies, model.rope_factor = rope_frequencies(config.rope, config.head_dim)
    model.frequencies = frequencies.to(device)
    load_weights(model, folder, take)
    if pack and dtype == torch.float32 and torch.device(device).type == "cpu" and torch.backends.mkldnn.is_available():
        for module in model.modules():
            # The embedding is read by row, so a head that is tied to it stays as it is.
            if isinstance(module, Linear) and module.weight is not model.embedding.weight:
                module.pack()
    return model
