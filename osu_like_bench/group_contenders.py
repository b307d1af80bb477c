"""All_reduce over a process group, by compcoll and as others do it with fewer bits. Needs torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

import compcoll.torch

_ROW = 512
_LARGEST = float(torch.finfo(torch.float8_e4m3fn).max)


def _zfp(x: Tensor) -> None:
    compcoll.torch.all_reduce(x, codec="zfp", rate=8)


def _zfp_direct(x: Tensor) -> None:
    compcoll.torch.all_reduce(x, codec="zfp", rate=8, algorithm="direct")


def _half(x: Tensor) -> None:
    """PyTorch's fp16_compress_hook: a sum of halves."""
    halves = x.half()
    dist.all_reduce(halves)
    x.copy_(halves)


def _quantized(values: Tensor) -> Tensor:
    """Rows of float8 behind their scales, as bytes."""
    rows = values.view(-1, _ROW)
    scales = rows.abs().amax(1, keepdim=True).clamp_min(1e-12) / _LARGEST
    numbers = (rows / scales).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.cat([scales.view(torch.uint8), numbers], 1)


def _dequantized(rows: Tensor) -> Tensor:
    scales = rows[:, :4].contiguous().view(torch.float32)
    return (rows[:, 4:].contiguous().view(torch.float8_e4m3fn).float() * scales).view(-1)


def _float8(x: Tensor) -> None:
    """All_reduce of rows in float8 with a scale for each: quantise, all_to_all, add in float32, quantise the sum,
    all_gather. The steps of torchft's allreduce_quantized, whose kernels are for GPUs, by PyTorch's operations.
    """
    size = dist.get_world_size()
    padded = torch.nn.functional.pad(x, (0, -x.numel() % (_ROW * size)))
    wire = _quantized(padded)
    arrived = torch.empty_like(wire)
    dist.all_to_all_single(arrived, wire)
    own = torch.stack([_dequantized(part) for part in arrived.chunk(size)]).sum(0)
    summed = _quantized(own)
    every = torch.empty(size * summed.shape[0], summed.shape[1], dtype=torch.uint8)
    dist.all_gather_into_tensor(every, summed)
    x.copy_(_dequantized(every)[: x.numel()])


def ran() -> str:
    """What compcoll's all_reduce before took: algorithm and codec; nothing if there was none."""
    stats = compcoll.torch.stats()
    return "" if stats is None else stats.algorithm + (f", {stats.codec}" if stats.codec else "")


CONTENDERS: Mapping[str, Callable[[Tensor], None]] = {
    "group": _zfp,
    "group_direct": _zfp_direct,
    "fp16": _half,
    "fp8": _float8,
}
"""Each adds up a tensor in place, not exactly, over the default process group."""
