"""Weights of 8 or 4 bits in groups of 32, and the layers that compute with them.

It knows tensors and the kernel; it knows no checkpoint, no model and no engine.

    weight [out, in] -> quantise -> whole numbers, scales (, minima) -> tiles -> x [T, in] -> [T, out]

A group is 32 columns of one row. With 8 bits it is symmetric: weight = scale * q, q from -63 to 63. With 4 bits it is
not: weight = scale * q + minimum, q from 0 to 15, as the bundled model's weights were published (Q4_1). Activations are
quantised on the way, each row in groups of 32 too, to -127 to 127. Small groups: ZeroQuant (arXiv:2206.01861), section
4.1; products in whole numbers with the scales outside: arXiv:1712.05877, section 2.
"""

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared import native

GROUP, TILE, OFFSET, SMALLEST = 32, 16, 64, 1e-30  # as in quantised_linear.cpp
LARGEST = {"int8": 63, "int4": 15}  # 7 of 8 bits: the pairs of products that AVX2 adds must fit 16 bits

Quant = Literal["int8", "int4"]


class Weights(ctypes.Structure):
    """What the kernel gets of a layer: where its numbers lie, and how many there are."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("data", "scales", "minima", "bias")),
        *((name, ctypes.c_int64) for name in ("size", "outputs")),
    ]


def _library() -> ctypes.PyDLL | None:
    library = native.load(Path(__file__).with_name("quantised_linear.cpp"))
    if library is not None:
        P, N = ctypes.c_void_p, ctypes.c_int64
        library.quantised_linear.argtypes = [ctypes.POINTER(Weights), P, N, P, N, ctypes.c_int]
    return library


LIBRARY = _library()


@dataclass
class Quantised:
    """A weight matrix [out, in] in groups of 32 columns, the last of them filled up with zeros: G groups a row.

    values [out, G, 32]: int8 of -63 to 63, with scales [out, G] in float32 and no minima, or uint8 of 0 to 15, with
    scales and minima [out, G] in float16.
    """

    values: Tensor
    scales: Tensor
    minima: Tensor | None
    columns: int

    def dequantise(self) -> Tensor:
        """The weights [out, in] in float32 that these numbers stand for."""
        weights = self.values.float() * self.scales.float()[..., None]
        if self.minima is not None:
            weights += self.minima.float()[..., None]
        return weights.flatten(1)[:, : self.columns]


def quantise(weight: Tensor, quant: Quant) -> Quantised:
    """Round a weight matrix [out, in] to the nearest numbers of `quant`, each group by its own scale."""
    groups = in_groups(weight.float())  # [out, G, 32]
    largest = LARGEST[quant]
    if quant == "int8":
        scales, minima = groups.abs().amax(dim=-1) / largest, None
        values = (groups / above_zero(scales)[..., None]).round().to(torch.int8)
    else:
        low, high = groups.aminmax(dim=-1)
        minima, scales = low.half(), ((high - low) / largest).half()
        values = (groups - minima.float()[..., None]) / above_zero(scales.float())[..., None]
        values = values.round().clamp(0, largest)
        values = values.to(torch.uint8)
    return Quantised(values, scales, minima, weight.shape[1])


def quantise_activations(x: Tensor) -> Tensor:
    """What the kernel makes of x [T, in]: each row's groups rounded to -127 to 127, and scaled back. [T, in]"""
    groups = in_groups(x.float())
    largest = groups.abs().amax(dim=-1, keepdim=True)
    # 127 / 0 is infinite, and so is 127 / 1e-38 in float32: so small a group counts as zeros. Of `127 / largest` torch
    # would make `largest.reciprocal() * 127`, which rounds twice, and not as the kernel does.
    inverse = torch.where(largest > SMALLEST, torch.full_like(largest, 127) / largest, 0)
    values = (groups * inverse).round()
    return (values * (largest / 127)).flatten(1)[:, : x.shape[1]].to(x.dtype)


def in_groups(x: Tensor) -> Tensor:
    """[rows, columns] -> [rows, G, 32], filled up with zeros."""
    return F.pad(x, (0, -x.shape[1] % GROUP)).unflatten(1, (-1, GROUP))


def above_zero(scales: Tensor) -> Tensor:
    """A group of zeros has the scale 0, by which nothing can be divided."""
    return scales.clamp(min=torch.finfo(torch.float32).tiny)


class QuantisedLinear(nn.Module):
    """x [T, in] -> [T, out] with quantised weights, in tiles as quantised_linear.cpp wants them.

    data: uint8, [tiles, G, 8, 2, 8, 4] for 8 bits, [tiles, G, 8, 8, 4] for 4; scales and minima [tiles, G, 16].
    Where the kernel can't run, plain torch does with the same numbers: it is the oracle, and slow.
    """

    data: Tensor
    scales: Tensor
    minima: Tensor | None
    bias: Tensor | None

    def __init__(self, weight: Quantised, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = len(weight.values), weight.columns
        self.quant: Quant = "int8" if weight.minima is None else "int4"
        values = _in_tiles(weight.values).unflatten(3, (8, 4)).unflatten(1, (2, 8))  # [tiles, half, 8, G, k, 4]
        values = values.permute(0, 3, 4, 1, 2, 5)  # [tiles, G, k, half, 8, 4]
        if self.quant == "int8":
            data = values.view(torch.uint8) + OFFSET  # modulo 256, so a negative number comes out right
        else:
            data = values[:, :, :, 0] | values[:, :, :, 1] << 4
        self.register_buffer("data", data.contiguous())
        self.register_buffer("scales", _in_tiles(weight.scales).transpose(1, 2).contiguous())
        minima = None if weight.minima is None else _in_tiles(weight.minima).transpose(1, 2).contiguous()
        self.register_buffer("minima", minima)
        self.register_buffer("bias", bias)
        self._lay_open()

    def _lay_open(self) -> None:
        """Note where the numbers are, once: to look four tensors up in each call takes a quarter of a decode step."""
        self._held = tuple(self._buffers.values())  # so that the places stay good whatever happens to the buffers
        places = [None if tensor is None else tensor.data_ptr() for tensor in self._held]
        self._weights = Weights(*places, self.in_features, self.out_features)
        dtype = torch.float32 if self.minima is None else torch.float16
        bias = torch.empty(0) if self.bias is None else self.bias
        # model.half() would change them
        self._fit_kernel = self.data.is_cpu and self.scales.dtype == dtype and native.fits(bias)

    def _apply(self, *args: Any, **kwargs: Any) -> "QuantisedLinear":
        """What `to(device)` calls: the numbers move."""
        super()._apply(*args, **kwargs)
        self._lay_open()
        return self

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers())

    def rows(self, outputs: Tensor | None = None) -> Tensor:
        """The weights [R, in] of these outputs [R], or of all of them, in float32."""
        if outputs is None:
            outputs = torch.arange(self.out_features, device=self.data.device)
        tile, place = outputs // TILE, outputs % TILE  # [R]
        if self.quant == "int8":
            values = self.data[tile, :, :, place // 8, place % 8].float() - OFFSET  # [R, G, k, 4]
        else:
            both = self.data[tile, :, :, place % 8]
            values = torch.where((place < 8)[:, None, None, None], both & 15, both >> 4).float()
        weights = values.flatten(2) * self.scales[tile, :, place].float()[..., None]  # [R, G, 32]
        if self.minima is not None:
            weights += self.minima[tile, :, place].float()[..., None]
        return weights.flatten(1)[:, : self.in_features]

    def forward(self, x: Tensor) -> Tensor:
        """x [T, in] -> [T, out] in x's dtype. Raises ValueError for another shape: the kernel would read beyond it."""
        if x.dim() != 2 or x.shape[1] != self.in_features:
            raise ValueError(f"this layer takes [T, {self.in_features}], not {list(x.shape)}")
        if LIBRARY is None or not self._fit_kernel or not native.fits(x):
            bias = None if self.bias is None else self.bias.to(x.dtype)
            return F.linear(quantise_activations(x), self.rows().to(x.dtype), bias)
        T, out = len(x), torch.empty(len(x), self.out_features)
        LIBRARY.quantised_linear(self._weights, x.data_ptr(), x.stride(0), out.data_ptr(), T, torch.get_num_threads())
        return out


class QuantisedEmbedding(nn.Module):
    """token_ids [T] -> [T, hidden] from a quantised matrix [V, hidden], which may be the output layer's as well."""

    def __init__(self, table: QuantisedLinear) -> None:
        super().__init__()
        self.table = table

    def forward(self, token_ids: Tensor) -> Tensor:
        return self.table.rows(token_ids)


def _in_tiles(x: Tensor) -> Tensor:
    """[out, ...] -> [tiles, 16, ...], filled up with zeros."""
    x = torch.cat((x, x.new_zeros(-len(x) % TILE, *x.shape[1:])))
    return x.unflatten(0, (-1, TILE))
