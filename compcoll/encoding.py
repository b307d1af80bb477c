"""Encode and decode arrays without MPI, to try codecs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from . import config
from .codecs.base import Codec, Coder
from .codecs.registry import needed_codec, without_reference
from .codecs.sparse import Sparsifier
from .dtypes import DTYPES
from .errors import InvalidBuffer, UnsupportedDType
from .gpu.discovery import cuda_device
from .host.cores import usable_cores
from .host.device import HostDevice
from .host.foreign import as_numpy, gpu_memory, is_foreign, like

_TORCH = "torch."


def encode(x: Any, codec: str | Codec = "zfp", **codec_options: Any) -> Any:
    """Encode an array.

    Parameters
    ----------
    x : array
        An array that `compcoll.allreduce` takes, of float16, bfloat16, float32 or float64.
    codec : str or Codec
        A codec, or its name, with or without options: ``"minmax:bits=4"``.
    **codec_options
        Options of a codec given by name.

    Returns
    -------
    array of uint8
        The wire: the bytes that a collective would send, as an array of ``x``'s kind. On a GPU, work that the caller
        launches later on the current stream can use it.

    Examples
    --------
    >>> x = np.linspace(-1, 1, 1024, dtype=np.float32)
    >>> wire = compcoll.encode(x, codec="zfp", rate=8)
    >>> wire.nbytes, x.nbytes
    (1024, 4096)
    """
    chosen = without_reference(needed_codec(codec, codec_options), "encode")
    if gpu_memory(x):
        return _encode_there(x, chosen)
    if is_foreign(x):
        return like(encode(as_numpy(x, "x"), chosen), x)
    device = _host()
    device.check_readable(x, "x")
    name = _compressible(device.dtype_name(x))
    return _encoded(device, chosen.coder(device, name), device.flat(x, name))


def decode(
    wire: Any, shape: int | tuple[int, ...], dtype: Any, /, codec: str | Codec = "zfp", **codec_options: Any
) -> Any:
    """Decode a wire that `encode` returned, given the array's shape and element type and the same codec.

    The result is on the wire's device. On the CPU it is an array of the wire's kind; on a GPU it is a ``torch.Tensor``
    if the wire is one, else a ``cupy.ndarray``.

    Raises
    ------
    InvalidBuffer
        If the wire's length does not match these arguments.

    Examples
    --------
    >>> x = np.linspace(-1, 1, 1024, dtype=np.float32)
    >>> wire = compcoll.encode(x, codec="minmax", bits=8)
    >>> y = compcoll.decode(wire, x.shape, x.dtype, codec="minmax", bits=8)
    >>> bool(np.abs(x - y).max() <= 2 / 255)
    True
    """
    chosen = without_reference(needed_codec(codec, codec_options), "decode")
    name = _compressible(str(dtype)[len(_TORCH) :] if str(dtype).startswith(_TORCH) else np.dtype(dtype).name)
    lengths = tuple(shape) if isinstance(shape, Sequence) else (shape,)
    if gpu_memory(wire):
        return _decode_there(wire, lengths, name, chosen)
    if is_foreign(wire):
        return like(decode(as_numpy(wire, "wire"), lengths, name, chosen), wire)
    device = _host()
    device.check_readable(wire, "wire")
    out = np.empty(lengths, DTYPES[name].numpy)
    coder = chosen.coder(device, name)
    _check_length(wire.dtype.name, wire.nbytes, chosen, coder, out.size, name)
    coder.decode(out.size, None, (wire.reshape(-1),), device.flat(out, name))
    return out


def _encode_there(x: Any, codec: Codec) -> Any:
    device: Any = cuda_device(x, shared=True)
    caller = device.caller(x, None)
    with device.current_stream(caller):
        name, flat = device.view(x, "x")
    coder = _kernels(device, codec, _compressible(name))
    if coder is None:  # the codec has no kernels on the GPU, so encode on the host
        host = _host()
        content = _encoded(host, codec.coder(host, name), device.to_host(flat, caller))
        wire = device.empty_like(x, content.shape, caller, "uint8")
        device.from_host(content, device.view(wire, "wire")[1], caller)
        return wire
    wire = device.empty_like(x, (coder.wire_nbytes(flat.size),), caller, "uint8")
    with device.launching_on(caller):
        length = coder.encode(flat.size, flat, (), device.view(wire, "wire")[1])
    return wire[:length]


def _decode_there(wire: Any, shape: tuple[int, ...], name: str, codec: Codec) -> Any:
    device: Any = cuda_device(wire, shared=True)
    caller = device.caller(wire, None)
    with device.current_stream(caller):
        kind, flat = device.view(wire, "wire")
    coder, host = _kernels(device, codec, name), _host()
    n = math.prod(shape)
    _check_length(kind, flat.nbytes, codec, codec.coder(host, name), n, name)
    out = device.empty_like(wire, shape, caller, name)
    memory = device.view(out, "out")[1]
    if coder is None:
        values = np.empty(n, memory.dtype)
        codec.coder(host, name).decode(n, None, (device.to_host(flat, caller),), values)
        device.from_host(values, memory, caller)
    else:
        with device.launching_on(caller):
            coder.decode(n, None, (flat,), memory)
    return out


def _host() -> HostDevice:
    return HostDevice(config.threads(usable_cores()))


def _kernels(device: Any, codec: Codec, dtype: str) -> Coder | None:
    """Bind the codec to a GPU; return None if it has no kernels there."""
    coder = None if isinstance(codec, Sparsifier) else codec.coder(device, dtype)
    return coder if device.owns(coder) else None


def _encoded(device: HostDevice, coder: Coder, flat: Any) -> Any:
    wire = device.empty_bytes(coder.wire_nbytes(flat.size))
    return wire[: coder.encode(flat.size, flat, (), wire)]


def _check_length(kind: str, nbytes: int, codec: Codec, coder: Coder, n: int, dtype: str) -> None:
    expected = coder.wire_nbytes(n)
    if kind != "uint8" or nbytes > expected or (codec.fixed_size and nbytes != expected):
        raise InvalidBuffer(
            f"wire has {nbytes} bytes of {kind}, but {codec!r} writes "
            f"{'' if codec.fixed_size else 'at most '}{expected} bytes of uint8 for {n} values of {dtype}"
        )


def _compressible(dtype: str) -> str:
    if dtype not in DTYPES:
        raise UnsupportedDType(f"{dtype} elements cannot be encoded: {', '.join(DTYPES)} can")
    return dtype
