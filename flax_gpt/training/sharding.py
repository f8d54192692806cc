"""Data-parallel training: a batch is cut by rows over a mesh of one axis, all else is whole on every device (docs/scaling.md)."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flax_gpt.config import TrainConfig
from flax_gpt.errors import is_integer, require

DATA = "data"
"""The mesh's axis."""


def data_mesh(devices: int, train_config: TrainConfig) -> Mesh | None:
    """The first `devices` devices of this process; None for one, which needs no mesh.

    Raises InputError for fewer than one, more than there are, and a number that does not divide the rows of a batch or of a part of one.
    """
    require(is_integer(devices) and devices >= 1, "devices", devices, "must be an integer of at least 1")
    if devices == 1:
        return None
    seen = jax.local_devices()
    hint = f"; JAX_NUM_CPU_DEVICES={devices} in the environment makes so many of the processor" if seen[0].platform == "cpu" else ""
    require(devices <= len(seen), "devices", devices, f"must be at most {len(seen)}, the devices that jax sees{hint}")
    rows, parts = train_config.batch_size, train_config.accumulate
    what = f"batch_size = {rows}" if parts == 1 else f"the {rows // parts} rows of each of the {parts} parts of a batch"
    require(rows // parts % devices == 0, "devices", devices, f"must divide {what}")
    return Mesh(np.array(seen[:devices]), (DATA,))


def whole(mesh: Mesh) -> NamedSharding:
    """Every device holds all of an array."""
    return NamedSharding(mesh, PartitionSpec())


def by_rows(mesh: Mesh) -> NamedSharding:
    """Every device holds its share of an array's first axis."""
    return NamedSharding(mesh, PartitionSpec(DATA))


def sum_over_rows(function: Callable[[Any, Any, Any], Any], mesh: Mesh) -> Callable[[Any, Any], Any]:
    """(shared, batch) -> the sum over the devices of `function(shared, rows, first_row)`, whole on each of them.

    `rows` are a device's share of the batch and `first_row` is the number, in the batch, of the first of them.
    """

    def on_device(shared: Any, rows: Any) -> Any:
        first_row = jax.lax.axis_index(DATA) * jax.tree.leaves(rows)[0].shape[0]
        # As each device's own, a parameter has a gradient for each device; as common to all, its gradient would be added up before it is weighted.
        own = jax.lax.pcast(shared, DATA, to="varying")
        return jax.lax.psum(function(own, rows, first_row), DATA)

    return jax.shard_map(on_device, mesh=mesh, in_specs=(PartitionSpec(), PartitionSpec(DATA)), out_specs=PartitionSpec())


def one_at_a_time(function: Callable[..., Any], mesh: Mesh) -> Callable[..., Any]:
    """`function`, a jitted program over `mesh`, that waits for its results where the devices are made of the processor.

    There, programs that queue up wait for each other for ever now and then: in jax 0.10.2, of some hundred training steps on four devices made of two
    cores one stops with three devices in a sum and the fourth never there. Accelerators have a queue each, and the host may run ahead of them.
    """
    if mesh.devices.flat[0].platform != "cpu":
        return function
    return lambda *arguments: jax.block_until_ready(function(*arguments))
