"""A pipeline on this process's devices, to be called as its step: what `PlannedPipeline.compile` gives."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from autopar.arrays import Array, Piece
from autopar.ir.errors import PlanMismatchError
from autopar.ir.pipeline_file import PipelineFile
from autopar.layering.layers import Layered
from autopar.runtime.in_process import InProcess
from autopar.step_plan import partition_spec
from autopar.trace import tensor_type


class CompiledPipeline:
    """A step, compiled: call it with the step's arguments, static ones left out.

    Leaves may be arrays of any kind. Those that come out are `jax.Array`s on the mesh of the stage that made them, or
    `autopar.Array`s where several stages have the value; either goes back in without moving.
    """

    def __init__(
        self, layered: Layered, file: PipelineFile, devices: Sequence[jax.Device], user_rules: Mapping[str, str],
        options: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.file, self._layered = file, layered
        self._runtime = InProcess(layered, file, devices, user_rules, options)
        self._num_consts = len(layered.consts)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The step. Raises PlanMismatchError for arguments of another tree or other types than the plan's."""
        call, graph = self._layered.call, self._layered.graph
        leaves, tree = jax.tree_util.tree_flatten((args, kwargs))
        wanted = graph.argument_types[self._num_consts :]
        if tree != call.in_tree or len(leaves) != len(wanted):
            raise PlanMismatchError(
                f"{graph.name}: the plan is for arguments {call.in_tree}; got {tree}. Plan again for these"
            )
        for path, leaf, t in zip(call.arg_paths, leaves, wanted, strict=True):
            shape = getattr(leaf, "shape", ())
            if tuple(shape) != t.shape:
                raise PlanMismatchError(
                    f"{graph.name}: {path} has shape {list(shape)}; the plan is for {t}. Plan again for these shapes"
                )
        return jax.tree_util.tree_unflatten(call.out_tree, self._runtime(leaves))

    def init(self, init_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``init_fn(*args, **kwargs)``, every part of it made on the devices that the step wants it on: no device ever
        holds the whole state.

        Raises:
            PlanMismatchError: no argument of the step has the tree, shapes and dtypes of what it returns.
        """
        leaves, tree = jax.tree_util.tree_flatten(jax.eval_shape(init_fn, *args, **kwargs))
        numbers = self._argument(leaves, tree)
        pieces: dict[int, list[Piece]] = {}
        for stage in self._runtime.stages:
            mine = {w: x for w, x in stage.lowering.arguments.items() if w[0] in numbers}
            shardings = [NamedSharding(stage.lowering.mesh, partition_spec(x.spec)) for x in mine.values()]

            def part(mine: Any = tuple(mine)) -> list[Any]:
                made = jax.tree_util.tree_leaves(init_fn(*args, **kwargs))
                rows = [(made[numbers.index(a)], start, stop) for a, start, stop in mine]
                return [x[start:stop] if stop else x for x, start, stop in rows]

            for (a, start, stop), x in zip(mine, jax.jit(part, out_shardings=shardings)(), strict=True):
                pieces.setdefault(a, []).append(Piece(stage.number, start, stop, x))
        out: list[Any] = []

        def one(i: int) -> Any:
            return jax.tree_util.tree_leaves(init_fn(*args, **kwargs))[i]

        for a, leaf in zip(numbers, leaves, strict=True):
            found = pieces.get(a)
            if found is None:  # no stage reads it
                out.append(jax.jit(functools.partial(one, len(out)))())
            elif len(found) == 1 and found[0].stop == 0:
                out.append(found[0].array)
            else:
                out.append(Array(leaf.shape, leaf.dtype, tuple(found)))
        return jax.tree_util.tree_unflatten(tree, out)

    def _argument(self, leaves: Sequence[Any], tree: Any) -> list[int]:
        """Numbers of the flat arguments that are one argument of the step with these leaves."""
        graph = self._layered.graph
        count = len(graph.argument_types)
        numbered = jax.tree_util.tree_unflatten(self._layered.call.in_tree, range(self._num_consts, count))
        for argument in (*numbered[0], *numbered[1].values()):
            found, its_tree = jax.tree_util.tree_flatten(argument)
            types = [graph.argument_types[a] for a in found]
            if its_tree == tree and types == [tensor_type(leaf) for leaf in leaves]:
                return found
        raise PlanMismatchError(
            f"{graph.name}: no argument has the tree, shapes and dtypes of this state: {tree}. Plan with the shapes of "
            f"this state"
        )
