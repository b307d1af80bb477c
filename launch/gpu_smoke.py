"""Find out in seconds whether compcoll can use the GPU at all: the first step of `gpu_check.py`.

Tests without a GPU come first: host kernels, MPI, both compilers of CUDA code, and the presence of machine code in the
pack. Then one kernel is loaded from the pack and must give the host's bytes, and another one is compiled by CuPy.
"""

from __future__ import annotations

import numpy as np
from cupy_backends.cuda.libs import nvrtc
from mpi4py import MPI

from compcoll import ZFP
from compcoll.gpu import cubins
from compcoll.host.device import HostDevice
from compcoll.tools.cubins import programs

KERNEL = 'extern "C" __global__ void twice(float* x) { x[threadIdx.x] *= 2; }'
N = 4096


def without_a_gpu() -> None:
    """Print versions, and compile a kernel with compcoll's NVRTC and with CuPy's."""
    print(MPI.Get_library_version().splitlines()[0], "host kernels:", *HostDevice.instruction_sets(), flush=True)
    compiler = cubins.nvrtc()
    assert compiler is not None, "compcoll finds no NVRTC"
    code, _ = compiler.compile(KERNEL, ["-arch=sm_90"])
    print(f"NVRTC {compiler.version}: {len(code)} bytes; CuPy's: {nvrtc.getVersion()}", flush=True)
    program = nvrtc.createProgram(KERNEL, "twice.cu", [], [])
    nvrtc.compileProgram(program, ["-arch=sm_90"])
    lacking = [one.options for one in programs([ZFP(rate=8)], "float32") if not cubins.kept(one, "90")]
    assert not lacking, f"{cubins.folder()} lacks machine code for {lacking}"


def on_the_gpu() -> None:
    """Compare the output of a kernel from the pack with the host's, and run a kernel that CuPy compiles."""
    import cupy

    count = cupy.cuda.runtime.getDeviceCount()
    name = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    print(f"{count} GPU(s): {name}, compute capability {cupy.cuda.Device(0).compute_capability}", flush=True)
    from compcoll.gpu.device import CudaDevice

    x = np.random.default_rng(1).standard_normal(N).astype(np.float32)
    device, host = CudaDevice(0), HostDevice()
    device.runtime.launching = cupy.cuda.Stream.null
    there, here = (ZFP(rate=8).coder(where, "float32") for where in (device, host))
    wire, expected = cupy.zeros(here.wire_nbytes(N), cupy.uint8), np.zeros(here.wire_nbytes(N), np.uint8)
    there.encode(N, cupy.asarray(x), (), wire)
    here.encode(N, x, (), expected)
    np.testing.assert_array_equal(cupy.asnumpy(wire), expected)
    print("kernel from the pack: same bytes as the host", flush=True)
    doubled = cupy.asarray(x[:32])
    cupy.RawModule(code=KERNEL).get_function("twice")((1,), (32,), (doubled,))
    np.testing.assert_array_equal(cupy.asnumpy(doubled), 2 * x[:32])
    print("kernel compiled by CuPy: correct", flush=True)


if __name__ == "__main__":
    without_a_gpu()
    on_the_gpu()
