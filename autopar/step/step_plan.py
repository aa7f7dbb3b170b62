"""`StepPlan`: a plan together with the step's argument and result trees.

`ir.plan.Plan` is plain data that needs no jax. In a program that traced the step, the trees are known too, and
the plan can give its shardings as pytrees of PartitionSpec, to use with plain ``jax.jit``.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from autopar.ir.errors import ClusterError, PlanMismatchError
from autopar.ir.graph import Graph
from autopar.ir.plan import OneProgram, Plan, Predictions, Provenance
from autopar.ir.plan_text import plan_text
from autopar.ir.serde import digest, save_plan
from autopar.ir.serde import load_plan as load_data
from autopar.ir.sharding_plan import ShardingPlan
from autopar.runtime.partition_specs import named_shardings, partition_spec


@dataclass(frozen=True)
class StepPlan:
    """``data`` is the plan as saved; ``in_tree`` and ``out_tree`` are None for one loaded from a file and not yet
    used with its step. ``num_consts`` leading inputs of ``data`` are arrays the step closed over."""

    data: Plan
    in_tree: Any = None
    out_tree: Any = None

    @property
    def sharding(self) -> ShardingPlan:
        """Decisions, chains and collectives."""
        return self.data.sharding

    @property
    def predictions(self) -> Predictions:
        """Seconds, bytes and FLOPs per device and step."""
        return self.data.predictions

    @property
    def provenance(self) -> Provenance:
        """Versions and planning times."""
        return self.data.provenance

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of the plan without its wall times."""
        return digest(self.data)

    @property
    def num_consts(self) -> int:
        """Number of inputs that are closed-over arrays."""
        return sum(a.path.startswith("const[") for a in self.data.inputs)

    @property
    def in_specs(self) -> Any:
        """The arguments' PartitionSpecs: a tuple over (dynamic) positional arguments, each a pytree.

        Raises:
            PlanMismatchError: the plan was loaded from a file and no step has used it yet.
        """
        specs = [partition_spec(a.spec) for a in self.data.inputs[self.num_consts :]]
        args, kwargs = jax.tree_util.tree_unflatten(self._tree(self.in_tree), specs)
        return (args, kwargs) if kwargs else args

    @property
    def out_specs(self) -> Any:
        """The results' PartitionSpecs, as the step's result tree. Raises as `in_specs` does."""
        return jax.tree_util.tree_unflatten(
            self._tree(self.out_tree), [partition_spec(a.spec) for a in self.data.outputs]
        )

    def _tree(self, tree: Any) -> Any:
        if tree is None:
            raise PlanMismatchError(
                f"plan of {self.data.name!r} was loaded from a file, which holds paths but no pytrees: give it to its "
                "step first, autopar.parallelize(step, plan=plan).plan(*args).in_specs"
            )
        return tree

    def jax_mesh(self, devices: Any = None) -> Mesh:
        """The plan's mesh over ``devices`` (default: all of this process's backend).

        Raises:
            ClusterError: fewer devices than the plan's mesh has.
        """
        logical = self.data.sharding.mesh
        devices = jax.devices() if devices is None else list(devices)
        if len(devices) <= max(logical.device_ids):
            raise ClusterError(
                f"the plan's mesh {logical} needs {logical.num_devices} devices; this process sees {len(devices)} "
                f"({devices[0].platform}). Plan for the devices that are there, or, to try it on a CPU, set "
                f"JAX_NUM_CPU_DEVICES={logical.num_devices}"
            )
        array = np.array([devices[i] for i in logical.device_ids]).reshape(logical.shape)
        return Mesh(array, logical.axis_names)

    def shardings(self, mesh: Mesh) -> tuple[list[NamedSharding], list[NamedSharding]]:
        """(inputs, outputs) as flat lists of NamedSharding, closed-over arrays first."""
        ins, outs = ([a.spec for a in side] for side in (self.data.inputs, self.data.outputs))
        return named_shardings(ins, mesh), named_shardings(outs, mesh)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as JSON, atomically. Raises PlanFormatError where the file cannot be written."""
        save_plan(self.data, path)

    def __str__(self) -> str:
        return plan_text(self.data)


def load_plan(path: str | os.PathLike[str]) -> StepPlan:
    """Reads a saved plan. Raises PlanFormatError for damaged files and other schema versions."""
    return StepPlan(load_data(path))


def check_same(plan: Plan, graph: Graph, name: str) -> None:
    """Raises PlanMismatchError, naming the first argument or operator that differs, unless ``plan`` is of ``graph``."""
    if plan.fingerprint == graph.fingerprint:
        return
    for i, (have, path) in enumerate(zip(plan.inputs, graph.arg_paths, strict=False)):
        t = graph.values[graph.inputs[i]]
        if have.path != path or have.type != t:
            raise PlanMismatchError(
                f"the plan was made for other arguments: plan has {have.path}: {have.type}, {name} got {path}: {t}. "
                "Plan again for these shapes"
            )
    if not isinstance(plan.body, OneProgram):
        raise PlanMismatchError(f"the plan of {plan.name!r} is a pipeline's: parallelize(step, pipeline=True, plan=…)")
    hashes = plan.body.node_hashes
    if len(plan.inputs) != len(graph.inputs):
        raise PlanMismatchError(
            f"the plan was made for {len(plan.inputs)} argument leaves; {name} got {len(graph.inputs)}. Plan again"
        )
    for node, wanted in zip(graph.nodes, hashes, strict=False):
        if node.digest != wanted:
            raise PlanMismatchError(
                f"the plan was made for another function (planned {plan.name!r}, given {name!r}): the first operator "
                f"that differs is {node}. Plan again, or load the plan of this function"
            )
    raise PlanMismatchError(
        f"the plan was made for another function: it has {len(hashes)} operators, {name} has "
        f"{len(graph.nodes)}. "
        "Plan again, or load the plan of this function"
    )
