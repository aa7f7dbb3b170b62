"""`StepPlan`: a plan together with the step's argument and result trees.

`ir.plan.Plan` is plain data that needs no jax. In a program that traced the step, the trees are known too, and
the plan can give its shardings as pytrees of PartitionSpec, to use with plain ``jax.jit``.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh

from autopar.frontend.arguments import argument_spans
from autopar.frontend.to_graph import tensor_type
from autopar.inter_op.crossing import cut_resharding
from autopar.inter_op.program.emit import emit
from autopar.inter_op.program.simulate import simulate
from autopar.inter_op.program.timeline import Timeline
from autopar.inter_op.state_placement import place_leaves
from autopar.ir.errors import PlanMismatchError
from autopar.ir.glance import glance
from autopar.ir.pipeline import PipelinePlan
from autopar.ir.plan import Plan, Predictions, Provenance
from autopar.ir.plan_text import explain_text
from autopar.ir.program import Program
from autopar.ir.serde import digest, replace_file, save_plan
from autopar.ir.serde import load_plan as load_data
from autopar.ir.sharding_plan import ShardingPlan
from autopar.jax_compat import Device
from autopar.report.export import exported
from autopar.report.page import first_screen, page
from autopar.runtime.meshes import mesh_of
from autopar.runtime.partition_specs import partition_spec

_ARGUMENT = re.compile(r"(args\[\d+\]|kwargs\['[^']*'\])(.*)", re.DOTALL)
"""An argument, and a path below it."""


@dataclass(frozen=True)
class StepPlan:
    """``data`` is the plan as saved; ``in_tree`` and ``out_tree`` are None for one loaded from a file and not yet
    used with its step. ``num_consts`` leading inputs of ``data`` are arrays the step closed over."""

    data: Plan
    in_tree: Any = None
    out_tree: Any = None

    @property
    def sharding(self) -> ShardingPlan:
        """Decisions, chains and collectives of a plan of one program; TypeError for one of stages."""
        return self.data.sharding

    @property
    def stages(self) -> PipelinePlan:
        """Stages, what crosses between them, and the schedule; TypeError for a plan of one program."""
        return self.data.pipelined.plan

    @property
    def predictions(self) -> Predictions:
        """Seconds, bytes and FLOPs of a step."""
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
        """The arguments' PartitionSpecs on the only mesh: a tuple over (dynamic) positional arguments, each a pytree.

        Raises:
            PlanMismatchError: the plan was loaded from a file and no step has used it yet, or has stages, of which each
                has a mesh of its own (`place` says where values lie).
        """
        specs = [partition_spec(a.spec) for a in self._of_one_mesh(self.data.inputs)[self.num_consts :]]
        args, kwargs = jax.tree_util.tree_unflatten(self._tree(self.in_tree), specs)
        return (args, kwargs) if kwargs else args

    @property
    def out_specs(self) -> Any:
        """The results' PartitionSpecs, as the step's result tree. Raises as `in_specs` does."""
        specs = [partition_spec(a.spec) for a in self._of_one_mesh(self.data.outputs)]
        return jax.tree_util.tree_unflatten(self._tree(self.out_tree), specs)

    def _of_one_mesh(self, arguments: Any) -> Any:
        if len(self.data.meshes) != 1:
            raise PlanMismatchError(
                f"the plan of {self.data.name!r} has {len(self.data.meshes)} stages, on meshes of their own: no one "
                "PartitionSpec says where a value lies. plan.place(tree) does"
            )
        return arguments

    def _tree(self, tree: Any) -> Any:
        if tree is None:
            raise PlanMismatchError(
                f"plan of {self.data.name!r} was loaded from a file, which holds paths but no pytrees: give it to its "
                "step first, autopar.parallelize(step, plan=plan).plan(*args).in_specs"
            )
        return tree

    def jax_mesh(self, devices: list[Device] | None = None) -> Mesh:
        """The mesh of a plan of one program over ``devices`` (default: all of this process's backend).

        Raises:
            ClusterError: fewer devices than the plan's mesh has.
        """
        return mesh_of(self.data.sharding.mesh, self.data.cluster, devices)

    @property
    def program(self) -> Program:
        """The instructions of every worker of a plan of stages; TypeError for one of one program."""
        pipelined = self.data.pipelined
        return emit(
            pipelined.plan, exchange=pipelined.exchange, transfers_of=partial(cut_resharding, cluster=self.data.cluster)
        )

    def simulate(self, *, blocking: bool = False) -> Timeline:
        """The step of a plan of stages by discrete events; ``blocking``: True: no transfer runs beside compute. Raises
        ProgramError where workers then wait for ever."""
        return simulate(self.program, blocking=blocking)

    def place(self, state: Any, argument: str | None = None) -> Any:
        """Where a state lies that the step takes, so that it can be created, or loaded, there.

        Args:
            state: the tree of one of the step's arguments, arrays or shapes (``jax.eval_shape(create_state, key)``).
            argument: which, ``args[0]``; default: the first whose leaves these are.

        Returns:
            The tree with a tuple of `Place`s for each leaf: the stages that hold it, or rows of it, and their
            shardings on these stages' meshes. An empty one where no stage reads it.

        Raises:
            PlanMismatchError: no argument has these leaves.
        """
        found, tree = jax.tree_util.tree_flatten_with_path(state)
        leaves = [(jax.tree_util.keystr(path), tensor_type(jax.typeof(leaf))) for path, leaf in found]
        return jax.tree_util.tree_unflatten(tree, place_leaves(self.data, leaves, argument))

    def argument_like(self, state: Any) -> tuple[int, ...] | None:
        """Numbers of the flat arguments, closed-over constants counted, that are one argument of the step with the
        leaves of ``state`` (arrays, or their shapes), by paths and types, and by its tree where that is known; None
        where no argument is."""
        found, tree = jax.tree_util.tree_flatten_with_path(state)
        wanted = [(jax.tree_util.keystr(path), tensor_type(leaf)) for path, leaf in found]
        consts = self.num_consts
        if self.in_tree is not None:
            spans = [(start, stop) for its, start, stop in argument_spans(self.in_tree) if its == tree]
        else:
            spans = [(start, start + len(wanted)) for start in range(len(self.data.inputs) - consts - len(wanted) + 1)]
        for start, stop in spans:
            mine = [_ARGUMENT.fullmatch(a.path) for a in self.data.inputs[consts + start : consts + stop]]
            types = [a.type for a in self.data.inputs[consts + start : consts + stop]]
            below = [(m[2], t) for m, t in zip(mine, types, strict=True) if m is not None]
            if below == wanted and len({m[1] for m in mine if m is not None}) <= 1:
                return tuple(range(consts + start, consts + stop))
        return None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as JSON, atomically. Raises PlanFormatError where the file cannot be written."""
        save_plan(self.data, path)

    def explain(self) -> str:
        """Why this plan: what it was chosen from, what its time goes into and what bounds it."""
        return explain_text(self.data)

    def report(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as a page to look at, one HTML file that needs no network. Raises PlanFormatError where the
        file cannot be written."""
        replace_file(path, page(self.data))

    def export(self, style: str = "jit") -> str:
        """The plan's shardings as a Python module that needs no autopar: for plain ``jax.jit`` (``jit``), with logical
        axes and rules (``flax``), or for ``filter_jit`` (``equinox``). How operators run between is XLA's choice then.
        Raises OptionError for another style, and for a plan of stages."""
        return exported(self.data, style)

    def __str__(self) -> str:
        return glance(self.data)

    def _repr_html_(self) -> str:
        """What notebooks show."""
        return first_screen(self.data)

    def __repr__(self) -> str:
        p, meshes = self.data.predictions, " + ".join(str(mesh) for mesh in self.data.meshes)
        return f"<plan of {self.data.name} for {self.data.cluster.name}: {meshes}, {p.step_s:.4g} s a step>"


def load_plan(path: str | os.PathLike[str]) -> StepPlan:
    """Reads a saved plan. Raises PlanFormatError for damaged files and other schema versions."""
    return StepPlan(load_data(path))
