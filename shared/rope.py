"""Rotary positions: how far each pair of dimensions of a head turns at each position.

It knows config.json's rope settings and nothing else of the model.

    rope settings -> rope_frequencies [D/2] -> angles of positions -> cos, sin -> kernels.rotate_
"""

import math
from typing import Any

import torch
from torch import Tensor

# Kinds of rope scaling and the settings without which each means nothing.
# "dynamic" is the default up to the trained context, where max_model_len ends.
ROPE_SETTINGS: dict[str, tuple[str, ...]] = {
    "default": (),
    "dynamic": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}


def rope_frequencies(rope: dict[str, Any], D: int) -> tuple[Tensor, float]:
    """Radians a position of each pair of dimensions [D/2], and the factor on cosine and sine (1 but for yarn).

    rope: config.json's rope_parameters. D: dimensions of a head.

    default: RoFormer (arXiv:2104.09864), section 3.2.2; linear: position interpolation (arXiv:2306.15595), section 3.2;
    llama3: as in the code released with Llama 3.1; yarn: arXiv:2309.00071.
    """
    kind = rope["rope_type"]
    frequencies = 1.0 / rope["rope_theta"] ** (torch.arange(0, D, 2, dtype=torch.float32) / D)  # [D/2]
    if kind == "linear":
        return frequencies / rope["factor"], 1.0
    if kind == "llama3":
        # Turns in the trained context: few are interpolated, many are left alone, in between it is a ramp.
        turns = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        return frequencies * (keep + (1 - keep) / rope["factor"]), 1.0
    if kind == "yarn":
        return _yarn(frequencies, rope, D)
    return frequencies, 1.0


def _yarn(frequencies: Tensor, rope: dict[str, Any], D: int) -> tuple[Tensor, float]:
    """YaRN (arXiv:2309.00071): section 3.2 for the ramp over the dimensions, 3.3 for the factor on q and k."""
    trained, factor = rope["original_max_position_embeddings"], rope["factor"]

    def dimension(turns: float) -> float:  # that turns so often in the trained context; it is a fraction
        return D * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(rope["rope_theta"]))

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    low, high = dimension(rope.get("beta_fast") or 32), dimension(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, D - 1)
    ramp = (torch.arange(D // 2) - low) / max(high - low, 0.001)
    interpolate = ramp.clamp(0, 1)
    frequencies = frequencies * (1 - interpolate) + frequencies / factor * interpolate
    attention_factor = rope.get("attention_factor")
    if attention_factor is None:
        attention_factor = mscale(1.0)
        if rope.get("mscale") and rope.get("mscale_all_dim"):
            attention_factor = mscale(rope["mscale"]) / mscale(rope["mscale_all_dim"])
    return frequencies, attention_factor
