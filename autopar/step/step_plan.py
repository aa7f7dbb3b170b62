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
from jax.tree_util import keystr

from autopar.frontend.arguments import argument_spans
from autopar.frontend.to_graph import tensor_type
from autopar.inter_op.crossing import cut_resharding
from autopar.inter_op.program.emit import emit
from autopar.inter_op.program.simulate import simulate
from autopar.inter_op.program.timeline import Timeline
from autopar.inter_op.state_placement import place_leaves
from autopar.ir.errors import PlanMismatchError
from autopar.ir.glance import glance
from autopar.ir.graph import TensorType
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
from autopar.runtime.batches import paths_differ
from autopar.runtime.meshes import mesh_of
from autopar.runtime.partition_specs import partition_spec

_ARGUMENT = re.compile(r"(args\[\d+\]|kwargs\['[^']*'\])(.*)", re.DOTALL)
"""An argument, and a path below it."""


@dataclass(frozen=True)
class StepPlan:
    """What `Step.plan` returns: a plan with the step's argument and result trees. ``print`` shows it at a glance.

    Attributes:
        data: the plan as saved, plain data that needs no jax.
        in_tree: the tree of the step's arguments; None for a plan loaded from a file and not yet used with its step.
        out_tree: that of its results; None likewise.
    """

    data: Plan
    in_tree: Any = None
    out_tree: Any = None

    @property
    def sharding(self) -> ShardingPlan:
        """Decisions, chains and collectives of a plan of one program. Raises PlanMismatchError for a plan of stages."""
        return self.data.sharding

    @property
    def stages(self) -> PipelinePlan:
        """Stages, what crosses between them, and the schedule. Raises PlanMismatchError for a plan of one program."""
        return self.data.pipelined.plan

    @property
    def predictions(self) -> Predictions:
        """Seconds, bytes and FLOPs of a step, as predicted."""
        return self.data.predictions

    @property
    def provenance(self) -> Provenance:
        """Versions, planning times, what the plan was chosen from, and notes; no part of the digest."""
        return self.data.provenance

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of the plan without its wall times. Equal inputs give equal digests."""
        return digest(self.data)

    @property
    def num_consts(self) -> int:
        """Number of inputs that are closed-over arrays."""
        return sum(a.path.startswith("const[") for a in self.data.inputs)

    @property
    def in_specs(self) -> Any:
        """PartitionSpecs of the arguments on the only mesh.

        Returns:
            A tuple over (dynamic) positional arguments, each a pytree of `jax.sharding.PartitionSpec`; where the call
            had keywords, that tuple and a dictionary of theirs.

        Raises:
            PlanMismatchError: the plan was loaded from a file and no step has used it yet, or has stages, of which each
                has a mesh of its own (`place` says where values lie).
        """
        specs = [partition_spec(a.spec) for a in self._of_one_mesh(self.data.inputs)[self.num_consts :]]
        args, kwargs = jax.tree_util.tree_unflatten(self._tree(self.in_tree), specs)
        return (args, kwargs) if kwargs else args

    @property
    def out_specs(self) -> Any:
        """PartitionSpecs of the results on the only mesh, as the step's result tree. Raises PlanMismatchError as
        `in_specs` does."""
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
        """The mesh of a plan of one program.

        Args:
            devices: those that it is made of; default: all of this process's backend.

        Returns:
            A `jax.sharding.Mesh` with the plan's axis names.

        Raises:
            ClusterError: there are fewer devices than the plan's mesh has.
            PlanMismatchError: the plan has stages.
        """
        return mesh_of(self.data.sharding.mesh, self.data.cluster, devices)

    @property
    def program(self) -> Program:
        """The instructions of every worker of a plan of stages. Raises PlanMismatchError for a plan of one program."""
        pipelined = self.data.pipelined
        return emit(
            pipelined.plan, exchange=pipelined.exchange, transfers_of=partial(cut_resharding, cluster=self.data.cluster)
        )

    def simulate(self, *, blocking: bool = False) -> Timeline:
        """Runs the step of a plan of stages by discrete events.

        Args:
            blocking: True: no transfer runs beside compute.

        Returns:
            Its `Timeline`, in seconds from the step's beginning.

        Raises:
            ProgramError: workers then wait for ever.
            PlanMismatchError: the plan is of one program.
        """
        return simulate(self.program, blocking=blocking)

    def place(self, state: Any, argument: str | None = None) -> Any:
        """Where a state lies that the step takes, so that it can be created, or loaded, there.

        Args:
            state: the tree of one of the step's arguments, arrays or shapes (``jax.eval_shape(create_state, key)``).
            argument: which, ``args[0]``; default: the first whose leaves these are.

        Returns:
            The tree with a tuple for each leaf, of one `Place` for each stage that holds it, or rows of it, with its
            sharding on that stage's mesh. An empty one where no stage reads it.

        Raises:
            PlanMismatchError: no argument has these leaves.
        """
        found, tree = jax.tree_util.tree_flatten_with_path(state)
        leaves = [(keystr(path), tensor_type(jax.typeof(leaf))) for path, leaf in found]
        return jax.tree_util.tree_unflatten(tree, place_leaves(self.data, leaves, argument))

    def argument_like(self, state: Any) -> tuple[int, ...] | None:
        """Which argument of the step a state is, by the paths and types of its leaves, and by its tree where that is
        known.

        Args:
            state: a pytree of arrays, or of their shapes.

        Returns:
            Numbers of the flat arguments that are it, closed-over constants counted; None where no argument is.
        """
        found, tree = jax.tree_util.tree_flatten_with_path(state)
        wanted = [(keystr(path), tensor_type(leaf)) for path, leaf in found]
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

    def unlike(self, state: Any) -> str:
        """How a state differs from the argument that it has most paths in common with, in words.

        Args:
            state: a pytree of arrays, or of their shapes.
        """
        found = {keystr(path): tensor_type(leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]}
        arguments: dict[str, dict[str, TensorType]] = {}
        for argument in self.data.inputs:
            if (path := _ARGUMENT.fullmatch(argument.path)) is not None:
                arguments.setdefault(path[1], {})[path[2]] = argument.type
        if not arguments:
            return "it has none"
        name, wanted = max(arguments.items(), key=lambda item: len(item[1].keys() & found.keys()))
        for path, t in wanted.items():
            if path in found and found[path] != t:
                return f"{name}{path} is {t} in the plan, and {found[path]} here"
        differs = paths_differ(wanted, found)
        return f"beside {name} of the plan {differs}" if differs else f"{name} of the plan has other containers"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as JSON, in one step: a failure leaves the file that was there.

        Args:
            path: of the file.

        Raises:
            PlanFormatError: the file cannot be written.
        """
        save_plan(self.data, path)

    def explain(self) -> str:
        """Why this plan: what it was chosen from, what its time goes into and what bounds it."""
        return explain_text(self.data)

    def report(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as a page to look at, one HTML file that needs no network.

        Args:
            path: of the file.

        Raises:
            PlanFormatError: the file cannot be written.
        """
        replace_file(path, page(self.data))

    def export(self, style: str = "jit") -> str:
        """The plan's shardings as a Python module that needs no autopar. How operators run between is XLA's choice
        then.

        Args:
            style: ``jit``, for plain `jax.jit`; ``flax``, with logical axes and rules; or ``equinox``, for
                ``filter_jit``.

        Returns:
            The module's text.

        Raises:
            OptionError: another style, or a plan of stages.
        """
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
    """Reads a saved plan.

    Args:
        path: of a file that `StepPlan.save` or ``autopar plan --out`` wrote.

    Returns:
        The plan, without trees until a step uses it (``plan=``).

    Raises:
        PlanFormatError: the file cannot be read, is damaged, contradicts itself, or is of another schema version.
    """
    return StepPlan(load_data(path))
