"""Lowering for an H200 where there is none."""

from collections.abc import Callable

import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

H200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")


def lower_for_cuda(function: Callable, *args: object) -> str:
    """The program's text; raises what a kernel's lowering raises. Registers, PTX and speed need the device."""
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("d",), (AxisType.Explicit,), abstract_device=H200)):
        return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def count_kernels(text: str) -> int:
    """Triton kernels that the program launches."""
    return text.count("__gpu$xla.gpu.triton")
