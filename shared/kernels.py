"""Products of few rows, norm, rope and the mlp's gate: a C++ kernel where float32 on CPU allows it, else plain torch.

It knows tensors only. `shared/model.py` calls these and doesn't know which of the two runs; torch is the oracle.

    x -> fits the kernel? -> kernels.cpp, else torch -> x
"""

import ctypes
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from shared import native

FEW_ROWS = 16  # up to here a product with weights waits for memory: a decode step, not a prompt


def _library() -> ctypes.PyDLL | None:
    library = native.load(Path(__file__).with_name("kernels.cpp"))
    if library is not None:
        P, N = ctypes.c_void_p, ctypes.c_int64
        library.linear.argtypes = [P, N, P, P, N, N, N, ctypes.c_int]
        library.rms_norm.argtypes = [P, N, P, P, N, N, N, ctypes.c_float, ctypes.c_int]
        library.rotate.argtypes = [P, N, P, P, N, N, N, ctypes.c_int]
        library.silu_mul.argtypes = [P, P, N, N, ctypes.c_int]
    return library


LIBRARY = _library()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, in] times weight [out, in], transposed, plus bias [out]: [T, out]. The kernel is made for few rows."""
    if LIBRARY is None or len(x) > FEW_ROWS or not native.fits(x, weight) or not weight.is_contiguous():
        return F.linear(x, weight, bias)
    T, size = x.shape
    out = torch.empty(T, len(weight))
    threads = torch.get_num_threads()
    LIBRARY.linear(x.data_ptr(), x.stride(0), weight.data_ptr(), out.data_ptr(), T, size, len(weight), threads)
    return out if bias is None else out.add_(bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square layer normalisation of x [..., size] over its last dimension (arXiv:1910.07467, equation 4)."""
    if LIBRARY is None or x.dim() != 2 or not native.fits(x, weight):
        return F.rms_norm(x, weight.shape, weight, eps)
    T, size = x.shape
    out = torch.empty(T, size)
    LIBRARY.rms_norm(
        x.data_ptr(), x.stride(0), weight.data_ptr(), out.data_ptr(), size, T, size, eps, torch.get_num_threads()
    )
    return out


def rotate_(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn dimensions d and d + D/2 of each head of x [T, heads, D] together by the token's angle, in place.

    cos, sin [T, 1, D], the first half of sin negative. RoFormer (arXiv:2104.09864), equation 34. Returns x.
    """
    if LIBRARY is None or not native.fits(x, cos, sin) or x.stride(1) != x.shape[2]:
        # The negative half of sin lets two kernels and a roll do what takes six by the book.
        return x.copy_(torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin))
    T, heads, D = x.shape
    LIBRARY.rotate(x.data_ptr(), x.stride(0), cos.data_ptr(), sin.data_ptr(), T, heads, D, torch.get_num_threads())
    return x


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, [T, size] each, of gate_up [T, 2 * size] (SwiGLU, arXiv:2002.05202, section 2)."""
    T, size = gate_up.shape[0], gate_up.shape[1] // 2
    if LIBRARY is None or not native.fits(gate_up) or not gate_up.is_contiguous():
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up
    out = torch.empty(T, size)
    LIBRARY.silu_mul(gate_up.data_ptr(), out.data_ptr(), T, size, torch.get_num_threads())
    return out
