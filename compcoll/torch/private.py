"""The private names of PyTorch that this package needs, since PyTorch has no public ones for them.

No other module uses a private name of PyTorch, so a new release of PyTorch needs to be compared with this file only.
All attributes of FSDP2's parameter groups and their parameters are private, also those without an underscore.
``import torch`` loads it, so it loads no other part of PyTorch by itself.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

GATHER_SINGLE, REDUCE_SCATTER_SINGLE = "_allgather_base", "_reduce_scatter_base"
"""Names of the methods by which a backend gathers to, and reduces and scatters from, a single tensor."""

COMPILED = "_orig_mod"
"""Name of the attribute in which the module that `torch.compile` returns has the original one."""

WRAPPERS = (f"{COMPILED}.", "_checkpoint_wrapped_module.")
"""What `torch.compile` and activation checkpointing add to parameter names."""

SUPPORTS_SCALING = "_step_supports_amp_scaling"
"""Name of the attribute that stops `torch.amp.GradScaler` from skipping an optimizer's step on one rank alone.

If it is set, the scaler sets ``found_inf`` and ``grad_scale`` on the optimizer while ``step()`` runs, and deletes them
afterwards.
"""

_LATER = {
    "AllGather": "torch.distributed.fsdp._fully_shard._fsdp_api",
    "ReduceScatter": "torch.distributed.fsdp._fully_shard._fsdp_api",
    "DefaultAllocMixin": "torch.distributed.fsdp._fully_shard._fsdp_collectives",
    "_get_gradient_divide_factors": "torch.distributed.fsdp._fully_shard._fsdp_collectives",
    "HSDPMeshInfo": "torch.distributed.fsdp._fully_shard._fsdp_common",
    "ReplicateModule": "torch.distributed._composable.replicate_with_fsdp",
}
"""Classes and functions by the private module that has them, which is loaded on first use."""


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(_LATER[name])
    if not hasattr(module, name):
        raise ImportError(f"{module.__name__} has no {name}", name=module.__name__)
    return getattr(module, name)


# Process groups and backends


def backend_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """Return the backend that runs a group's collectives on a device."""
    return group._get_backend(device)


def device_types(group: dist.ProcessGroup) -> list[str]:
    """Return the types of the devices for which a group has backends."""
    return [device.type for device in group._device_types]


def register_backend(group: dist.ProcessGroup, device_type: str, kind: Any, backend: Any) -> None:
    """Make a backend that of a group's collectives on a type of device."""
    group._register_backend(torch.device(device_type), kind, backend)


def set_default_backend(group: dist.ProcessGroup, kind: Any) -> None:
    """Choose the backend of operations without a tensor."""
    group._set_default_backend(kind)


def set_names(group: dist.ProcessGroup, name: str | None, description: str | None) -> None:
    """Set the name and the description of a group that `new_group` did not make."""
    if name is not None:
        group._set_group_name(name)
    if description is not None:
        group._set_group_desc(description)


def name_of_new_group(ranks: list[int]) -> str:
    """Return the name that `new_group` with local synchronization would give a group: it depends on earlier groups."""
    return dist.distributed_c10d._hash_ranks_to_str(ranks)


@contextmanager
def uncounted() -> Iterator[None]:
    """Leave PyTorch's count of groups as it is, while some ranks make a group alone.

    PyTorch 2.14 names groups by this count, and the other ranks do not count the group: later groups of all ranks would
    have different names, and wait until a time-out.
    """
    world = dist.distributed_c10d._world
    count = world.group_count
    try:
        yield
    finally:
        world.group_count = count


def group_named(name: str) -> dist.ProcessGroup:
    """Return the group of a name."""
    return dist.distributed_c10d._resolve_process_group(name)


def group_entry(group: dist.ProcessGroup) -> tuple[str, dist.Store] | None:
    """Return the backend's name and the store of a group; None for a group that `new_group` did not make."""
    return dist.distributed_c10d._world.pg_map.get(group)


def enter_as(group: dist.ProcessGroup, known: dist.ProcessGroup) -> None:
    """Enter a group in PyTorch's tables as another one, since PyTorch looks up a group whose exception it logs."""
    world = dist.distributed_c10d._world
    for table in (world.pg_map, world.pg_group_ranks):
        table[group] = table[known]


def timeout_of(backend: Any) -> timedelta | None:
    """Return the time-out of a backend; None if it reports none."""
    return getattr(getattr(backend, "options", None), "_timeout", None)


def nccl_options(limit: timedelta) -> Any:
    """Return options of an NCCL backend with a time-out."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = limit
    return options


def fake_backend(rank: int, size: int) -> Any:
    """Return a backend whose collectives are errors."""
    fake = import_module("torch._C._distributed_c10d").FakeProcessGroup
    options = fake.Options()
    options.error_on_collective = True
    return fake._create_internal(rank, size, options)


def factor_of(op: dist.ReduceOp) -> float | Tensor:
    """Return the factor of a premultiplied sum; a tensor is on the CPU. PyTorch 2.12 has no attribute for it."""
    factor = op.__getstate__()[1]
    return factor.cpu() if isinstance(factor, Tensor) else factor


def source_rank(work: dist.Work) -> int:
    """Return the rank from which a message came."""
    return work._source_rank()


def rendezvous_handlers() -> dict[str, Callable[..., Any]]:
    """Return the table of rendezvous methods, in which a method can be replaced."""
    return import_module("torch.distributed.rendezvous")._rendezvous_handlers


# Back-propagation


def backward_pass() -> int:
    """Return the number of the current backward pass; -1 outside of one."""
    return torch._C._current_graph_task_id()


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call a function at the end of the current backward pass, which raises the function's exceptions."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def gradient_hooks(parameter: Tensor) -> list[Any]:
    """Return the hooks that run after a parameter's gradient was accumulated."""
    return list((getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values())


def sparse_values(gradient: Tensor) -> Tensor:
    """Return the values of a sparse tensor, which need not be coalesced, as a view."""
    return gradient._values()


def communication_hooks(model: nn.Module) -> list[Any]:
    """Return the communication hooks of a DistributedDataParallel model."""
    return [hook for hook, _ in model._comm_hooks]


# torch.amp.GradScaler


def has_scaled(scaler: torch.amp.GradScaler) -> bool:
    """Return whether a scaler has scaled a loss."""
    return scaler._scale is not None


def scaler_states(scaler: torch.amp.GradScaler) -> Mapping[int, Any]:
    """Return a scaler's records of the optimizers that it steps, by the optimizers' ids; ``update()`` replaces them."""
    return scaler._per_optimizer_states


# torch.compile


def uses_python_reducer(model: nn.Module) -> bool:
    """Return whether torch.compile replaces the reducer of a DistributedDataParallel model."""
    return bool(getattr(model, "_use_python_reducer", False))


def compiles_backward() -> bool:
    """Return whether compiled autograd is on."""
    return bool(torch._dynamo.config.compiled_autograd)


def exclude_from_tracing(function: Any, reason: str | None) -> None:
    """Exclude a function and its callees from torch.compile; torch._dynamo.disable would cost 10 µs a call."""
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    function._torchdynamo_disable = True
    function._torchdynamo_disable_msg = reason


def mark_constant(function: Any) -> None:
    """Let torch.compile call a function when it traces; PyTorch's own decorator for this loads torch._dynamo."""
    function._dynamo_marked_constant = True


# FSDP2


def parameter_groups(module: nn.Module) -> list[Any]:
    """Return the groups of a module's parameters that FSDP2 communicates together: one for each mesh."""
    return module._get_fsdp_state()._fsdp_param_groups


def reduce_scatter_of(group: Any) -> Any:
    """Return the callable that reduces and scatters the gradients of a parameter group."""
    return group._reduce_scatter_comm


def set_collectives(module: nn.Module, group: Any, all_gather: Any, reduce_scatter: Any) -> None:
    """Replace the collectives of a parameter group. The public methods refuse modules with several groups."""
    if len(parameter_groups(module)) == 1:
        module.set_custom_all_gather(all_gather)
        module.set_custom_reduce_scatter(reduce_scatter)
    else:
        group._all_gather_comm, group._reduce_scatter_comm = all_gather, reduce_scatter


def reduction_groups(group: Any) -> tuple[dist.ProcessGroup, dist.ProcessGroup | None]:
    """Return the ranks that shard a parameter group, and those that hold replicas of this rank's shards, if any."""
    mesh: Any = group.mesh_info
    replicated = isinstance(mesh, __getattr__("HSDPMeshInfo")) and mesh.replicate_mesh_size > 1
    return group._reduce_scatter_process_group, mesh.replicate_process_group if replicated else None


def divisors(group: Any, dtype: torch.dtype, device_type: str) -> tuple[float | None, Any]:
    """Return the number by which FSDP2 divides gradients after its sums, and the operation between replicas."""
    shards, replicas = reduction_groups(group)
    _, after, _, between = __getattr__("_get_gradient_divide_factors")(
        *(shards, replicas, dtype, device_type, group.gradient_divide_factor, group.force_sum_reduction_for_comms)
    )
    return after, between


def replace_replicas(group: Any, replicas: dist.ProcessGroup) -> None:
    """Let a parameter group average its shards' gradients over other replicas."""
    group.mesh_info = copy.copy(group.mesh_info)  # modules share the original
    group.mesh_info.replicate_process_group = replicas


def before_reductions(group: Any, call: Callable[[], None]) -> None:
    """Let a parameter group call a function before it copies gradients into the buffer of its reduce-scatter."""
    post_backward = group.post_backward

    def called(*unused: Any) -> Any:
        call()
        return post_backward(*unused)

    group.post_backward = called


def device_of(group: Any) -> torch.device:
    """Return the device of a parameter group's collectives."""
    return group.device


def parameters_of(group: Any) -> list[Any]:
    """Return FSDP2's objects for the parameters of a group, in the order of its buffers."""
    return group.fsdp_params


def parameters_with_gradients(group: Any) -> list[Any]:
    """Return those parameters of a group that the next reduce-scatter will reduce."""
    return [each for each in parameters_of(group) if _has_gradient(each, group)]


def _has_gradient(parameter: Any, group: Any) -> bool:
    if not hasattr(parameter, "_unsharded_param"):  # not gathered yet
        return False
    whole = parameter.unsharded_param
    found = parameter.unsharded_accumulated_grad is not None or whole.grad is not None
    # PyTorch 2.12 has no such option.
    return found or (whole.requires_grad and getattr(group, "reduce_scatter_unused_params", False))


def shard_of(parameter: Any) -> nn.Parameter:
    """Return the model's parameter of an FSDP2 parameter: a DTensor with this rank's shard."""
    return parameter.sharded_param


def padded_size(parameter: Any) -> torch.Size:
    """Return the shape of a rank's shard of an FSDP2 parameter, with padding."""
    return parameter.padded_sharded_param_size


def sharded_dim(parameter: Any) -> int:
    """Return the dimension along which an FSDP2 parameter is sharded."""
    return parameter.fsdp_placement.dim


def unsharded_size(parameter: Any) -> torch.Size:
    """Return the shape of an FSDP2 parameter; of a DTensor, that of its local tensor."""
    return parameter._orig_size
