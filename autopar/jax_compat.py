"""Every use of JAX's semi-public parts, and every branch on JAX's version.

Supported: jax 0.10 to 0.12. What is imported here is re-exported under one name each.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import jax
import jaxlib
import numpy as np

from autopar.versions import check_version

check_version("jax", jax.__version__)
check_version("jaxlib", jaxlib.__version__)

from jax._src import api_util, config, core, dispatch, source_info_util
from jax._src.ad_checkpoint import remat_p
from jax._src.interpreters import ad, mlir
from jax._src.lax.lax import _convert_element_type
from jax._src.lib import xla_client
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun, primitives
from jax.extend.random import threefry2x32_p
from jax.interpreters import partial_eval
from jax.sharding import AbstractMesh, AxisType

if TYPE_CHECKING:
    # JAX says of a variable's type that it is an AbstractValue, which has neither shape nor dtype: all here have.
    class Var(core.Var):
        """A variable; its type has shape and dtype."""

        aval: core.ShapedArray  # pyright: ignore[reportIncompatibleVariableOverride]

    class Literal:
        """A constant operand: ``val`` of type ``aval``."""

        val: Any
        aval: core.ShapedArray

        def __init__(self, val: Any, aval: core.ShapedArray) -> None: ...

    class JaxprEqn(core.JaxprEqn):
        """An equation: operands are variables or literals, results variables."""

        invars: list[Var | Literal]  # pyright: ignore[reportIncompatibleVariableOverride]
        outvars: list[Var]  # pyright: ignore[reportIncompatibleVariableOverride]

        def replace(  # pyright: ignore[reportIncompatibleMethodOverride]
            self, invars: Sequence[Var | Literal] = ..., outvars: Sequence[Var] = ..., *, primitive: Primitive = ...,
            params: dict[str, Any] = ..., effects: core.Effects = ..., source_info: source_info_util.SourceInfo = ...,
            ctx: core.JaxprEqnContext = ...,
        ) -> JaxprEqn: ...  # fmt: skip

    class Jaxpr(core.Jaxpr):
        """A program: inputs and constants are variables, results variables or literals."""

        constvars: list[Var]  # pyright: ignore[reportIncompatibleMethodOverride]
        invars: list[Var]  # pyright: ignore[reportIncompatibleMethodOverride]
        outvars: list[Var | Literal]  # pyright: ignore[reportIncompatibleMethodOverride]
        eqns: list[JaxprEqn]  # pyright: ignore[reportIncompatibleMethodOverride]

        def replace(self, **changes: Any) -> Jaxpr: ...

    def new_jaxpr_eqn(*args: Any, **kwargs: Any) -> JaxprEqn: ...
    def dce_jaxpr(jaxpr: Jaxpr, used: Sequence[bool], instantiate: bool) -> tuple[Jaxpr, list[bool]]: ...
    def jaxprs_in_params(params: dict[str, Any]) -> Iterator[Jaxpr]: ...
    def subjaxprs(jaxpr: Jaxpr) -> Iterator[Jaxpr]: ...

    # jaxlib declares no types of its devices.
    class Device(Protocol):
        """A device, of this process or of another."""

        id: int
        process_index: int
        platform: str
        device_kind: str
        client: Any

        def memory_stats(self) -> dict[str, int] | None:
            """Figures of its memory by name (``bytes_limit``, …); None where it has none, as CPUs."""
            ...

else:
    from jax import Device
    from jax._src.core import jaxprs_in_params, subjaxprs
    from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var, new_jaxpr_eqn
    from jax.interpreters.partial_eval import dce_jaxpr

__all__ = [
    "ClosedJaxpr",
    "Device",
    "Jaxpr",
    "JaxprEqn",
    "Literal",
    "Primitive",
    "Var",
    "abstract_mesh",
    "at_top_level",
    "backend_started",
    "bind",
    "bodies_of",
    "compiler_platform",
    "compiles",
    "copy",
    "dce",
    "differentiable",
    "embedded",
    "eqn_context",
    "fresh_var",
    "has_x64",
    "implementation",
    "is_described",
    "is_staged",
    "manual_axes",
    "jax_version",
    "jaxpr_as_fun",
    "name_stack",
    "open_constants",
    "primitives",
    "remat_is_undone",
    "rematerialised",
    "scalar_literal",
    "scan_counts",
    "scopes",
    "smaller_kernel",
    "source_line",
    "threefry2x32_p",
    "threefry_is_partitionable",
    "trace_settings",
    "unnamed",
    "weakly_typed",
    "within_call",
    "with_scan_consts",
    "with_constants",
    "zeros",
]

_PACKAGE = f"{Path(__file__).parent}/"


def bind(eqn: JaxprEqn, *operands: Any, **param_overrides: Any) -> list[Any]:
    """Binds ``eqn``'s primitive on ``operands`` with its parameters, some of them replaced.

    ``get_bind_params`` returns a dictionary since jax 0.10 and (subfuns, dictionary) before.
    """
    bound = eqn.primitive.get_bind_params({**eqn.params, **param_overrides})
    if isinstance(bound, tuple):
        subfuns, params = bound
        out = eqn.primitive.bind(*subfuns, *operands, **params)
    else:
        out = eqn.primitive.bind(*operands, **bound)
    return list(out) if eqn.primitive.multiple_results else [out]


def bodies_of(eqn: JaxprEqn) -> list[Jaxpr]:
    """The jaxprs among an equation's parameters."""
    return list(jaxprs_in_params(eqn.params))


def implementation(primitive: Primitive) -> Callable[..., Any] | None:
    """What ``primitive`` runs outside of jit, in Python; None where that is to compile the primitive itself. Of jax
    0.12's high-level primitives (`jnp.searchsorted` is one), what JAX replaces them by when it compiles."""
    if primitive.name == "call_hi_primitive":
        return primitive.to_lojax
    run = vars(primitive).get("impl")
    compiles = isinstance(run, functools.partial) and run.func is dispatch.apply_primitive
    return None if compiles else run


def differentiable(primitive: Primitive) -> bool:
    """True where JAX has a derivative of ``primitive`` itself."""
    return primitive in ad.primitive_jvps


def compiler_platform(platform: str) -> str:
    """What JAX's compiler calls ``platform``: NVIDIA's GPUs are ``cuda``."""
    return "cuda" if platform == "gpu" else platform


def abstract_mesh(shape: Sequence[int], names: Sequence[str]) -> AbstractMesh:
    """A mesh without devices, along whose axes shardings are no part of values' types (jax 0.12's own default)."""
    return AbstractMesh(tuple(shape), tuple(names), axis_types=(AxisType.Auto,) * len(names))


def is_described(device: Any) -> bool:
    """True for a device of `jax.experimental.topologies`: programs can be compiled for it, and nothing runs there."""
    return isinstance(device.client, xla_client._xla.CompileOnlyPyClient)


def compiles(eqn: JaxprEqn, platform: str) -> bool:
    """True where JAX knows how to compile ``eqn`` for ``platform``, its bodies apart."""
    if eqn.primitive.name == "pallas_call" and platform == "cpu":
        return bool(eqn.params["interpret"])
    general, special = mlir._lowerings, mlir._platform_specific_lowerings[compiler_platform(platform)]
    return eqn.primitive in general or eqn.primitive in special


def dce(jaxpr: Jaxpr) -> Jaxpr:
    """``jaxpr`` without equations whose results nothing uses (those with effects stay); inputs stay."""
    out, _ = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)
    return out


def scalar_literal(value: Any, aval: Any) -> Literal:
    """A rank-0 literal of ``value`` (a numpy scalar or array), as weakly typed as ``aval``."""
    return Literal(value, core.ShapedArray((), value.dtype, weak_type=getattr(aval, "weak_type", False)))


def weakly_typed(x: Any, dtype: Any) -> Any:
    """``x`` as a weakly typed array of ``dtype``, as Python's numbers make them."""
    return _convert_element_type(x, dtype, weak_type=True)


def zeros(aval: Any) -> jax.Array:
    """An array of ``aval``'s type, keys included, of zeros."""
    if not jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return jax.numpy.zeros(aval.shape, aval.dtype)
    impl = aval.dtype._impl
    return jax.random.wrap_key_data(jax.numpy.zeros((*aval.shape, *impl.key_shape), "uint32"), impl=impl.name)


def embedded(value: Any) -> Callable[[], Any]:
    """``value``, keys included, as a function that writes it into the program that is being traced."""
    if not jax.dtypes.issubdtype(jax.typeof(value).dtype, jax.dtypes.extended):
        held = np.asarray(value)
        return lambda: jax.numpy.asarray(held)
    data, impl = np.asarray(jax.random.key_data(value)), str(jax.random.key_impl(value))
    return lambda: jax.random.wrap_key_data(data, impl=impl)  # pyright: ignore[reportArgumentType] - numpy's too


def fresh_var(like: Var) -> Var:
    """A new variable of the same type."""
    return Var(like.aval)


def copy(operand: Var, result: Var, like: JaxprEqn) -> JaxprEqn:
    """An equation  result = copy(operand), from the source line of ``like``."""
    return new_jaxpr_eqn([operand], [result], primitives.copy_p, {}, set(), source_info=like.source_info, ctx=like.ctx)


@contextmanager
def eqn_context(eqn: JaxprEqn) -> Iterator[None]:
    """The context in which ``eqn`` was traced: its name stack and source, and its settings, except for the mesh, which
    stays the current one (that of the shard_map it is evaluated in, say)."""
    stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    with source_info_util.user_context(eqn.source_info.traceback, name_stack=stack):
        ctx = eqn.ctx
        if (
            ctx.compute_type is None
            and not ctx.xla_metadata
            and ctx.threefry_partitionable == config.threefry_partitionable.value
        ):
            yield
            return
        mesh = config.abstract_mesh_context_manager.get_local()
        with ctx.manager:
            previous = config.abstract_mesh_context_manager.swap_local(mesh)
            try:
                yield
            finally:
                config.abstract_mesh_context_manager.set_local(previous)


def source_line(eqn: JaxprEqn) -> str:
    """``file.py:line`` of the code that made ``eqn``, jax's and autopar's own left out, or an empty string."""
    for frame in source_info_util.user_frames(eqn.source_info.traceback):
        if not frame.file_name.startswith(_PACKAGE):
            return f"{frame.file_name.rsplit('/', 1)[-1]}:{frame.start_line}"
    return ""


def name_stack(eqn: JaxprEqn) -> str:
    """The equation's name stack, in which ``transpose(jvp(…))`` marks the backward pass."""
    return str(eqn.source_info.name_stack)


def within_call(eqn: JaxprEqn, call: JaxprEqn) -> JaxprEqn:
    """``eqn`` of the body of ``call`` as it is once it is inlined: its name stack behind that of the call, and the
    call's source line where it has none (jax.numpy's own)."""
    info, outer = eqn.source_info, call.source_info.name_stack
    stack = outer + info.name_stack if outer.stack else info.name_stack
    if not source_line(eqn):
        return eqn.replace(source_info=call.source_info.replace(name_stack=stack))
    return eqn.replace(source_info=info.replace(name_stack=stack)) if outer.stack else eqn


def scopes(eqn: JaxprEqn) -> tuple[str, ...]:
    """The user's names around an equation (jax.named_scope, modules), outermost first; transformations left out."""
    return tuple(e.name for e in eqn.source_info.name_stack.stack if isinstance(e, source_info_util.Scope))


COMPILER_OPTIONS = {
    "cpu": {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"},
    "tpu": {"xla_disable_hlo_passes": "while-loop-all-reduce-code-motion"},
}
"""Platform → options of a step's compilation. XLA's default on CPU orders a program breadth first: every gather of a
parameter and every copy of a kernel runs at the start of the step and stays until its last reader. On TPU it moves
reductions out of loops that add them up; where the sum is a gradient's over microbatches, that pass ends in a RET_CHECK
(libtpu 0.0.42: ``user->opcode() == HloOpcode::kAdd``), and the plan says by itself which reductions wait."""


def backend_started() -> bool:
    """True once JAX has initialised any backend in this process."""
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()


def lacks_mesh(error: RuntimeError) -> bool:
    """True where JAX refuses a PartitionSpec, there being no mesh in context."""
    return "requires a non-empty mesh" in str(error)


def at_top_level() -> bool:
    """False inside jax.jit, jax.grad, jax.vmap and whatever else traces."""
    return core.trace_state_clean()


def is_staged(value: Any) -> bool:
    """True for a tracer of jax.jit (or of another transformation that only records), not of grad or vmap."""
    return isinstance(value, partial_eval.DynamicJaxprTracer)


def has_x64() -> bool:
    """True under ``jax_enable_x64``, of this moment and thread."""
    return config.enable_x64.value


def threefry_is_partitionable() -> bool:
    """True under ``jax_threefry_partitionable``, of this moment and thread."""
    return config.threefry_partitionable.value


def trace_settings() -> tuple[tuple[str, Any], ...]:
    """The settings, of this moment and thread, that what a function is traced to depends on: (name, value), as
    `jax.config.update` takes them."""
    return (
        ("jax_enable_x64", config.enable_x64.value),
        ("jax_numpy_dtype_promotion", config.numpy_dtype_promotion.value),
        ("jax_default_matmul_precision", config.default_matmul_precision.value),
        ("jax_default_prng_impl", config.default_prng_impl.value),
        ("jax_threefry_partitionable", config.threefry_partitionable.value),
        ("jax_debug_nans", config.debug_nans.value),
        ("jax_debug_infs", config.debug_infs.value),
    )


FoundSpecial = api_util.InternalFloatingPointError
"""What a compiled program raises under jax_debug_nans or jax_debug_infs."""


def looks_for_specials() -> bool:
    """True under jax_debug_nans or jax_debug_infs: arguments are then needed again, and not donated."""
    return bool(config.debug_nans.value or config.debug_infs.value)


def jax_version() -> str:
    """jax's version."""
    return jax.__version__


def scan_counts(eqn: JaxprEqn) -> tuple[int, int]:
    """(number of constants, number of carried values) of a scan equation.

    jax 0.10 holds them as parameters; 0.12 as the lengths of ``ft_in``'s three parts.
    """
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = (len(list(part)) for part in eqn.params["ft_in"].unpack())
    return consts, carry


def manual_axes(eqn: JaxprEqn) -> frozenset[str]:
    """The mesh axes over which a shard_map equation's body runs on local shapes."""
    params = eqn.params
    return frozenset(params["newly_manual_axes"] if "newly_manual_axes" in params else params["manual_axes"])


def smaller_kernel(
    eqn: JaxprEqn,
    grid: Sequence[int],
    inputs: Sequence[tuple[int, ...]],
    outputs: Sequence[tuple[int, ...]],
    parts: int,
) -> dict[str, Any]:
    """The parameters of one of ``parts`` parts of a ``pallas_call``: over ``grid``, on operands and results of these
    shapes, blocks as they are."""
    mapping, cost = eqn.params["grid_mapping"], eqn.params.get("cost_estimate")
    shapes = [*inputs[len(inputs) - mapping.num_inputs :], *outputs]
    blocks = tuple(
        block.replace(array_aval=block.array_aval.update(shape=shape))
        for block, shape in zip(mapping.block_mappings, shapes, strict=True)
    )
    params: dict[str, Any] = {
        "grid_mapping": mapping.replace(grid=tuple(grid), block_mappings=blocks),
        "out_avals": tuple(a.update(shape=s) for a, s in zip(eqn.params["out_avals"], outputs, strict=True)),
    }
    if cost is not None:
        counts = {f.name: getattr(cost, f.name) for f in dataclasses.fields(cost)}
        params["cost_estimate"] = type(cost)(**{name: -(-n // parts) for name, n in counts.items()})
    return params


def unnamed(jaxpr: Jaxpr) -> Jaxpr:
    """``jaxpr`` without names of its arguments and results, whose numbers may then change."""
    return jaxpr.replace(debug_info=jaxpr.debug_info._replace(arg_names=None, result_paths=None))


def open_constants(jaxpr: Jaxpr) -> Jaxpr:
    """``jaxpr`` with its constants as leading inputs."""
    names = jaxpr.debug_info
    if names.arg_names is not None:
        names = names._replace(arg_names=("",) * len(jaxpr.constvars) + tuple(names.arg_names))
    return jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars], debug_info=names)


def with_constants(jaxpr: Jaxpr, constvars: Sequence[Var], values: Sequence[Any], **changes: Any) -> Jaxpr:
    """``jaxpr`` with other constants. Since jax 0.12 a jaxpr holds their values, and what has none is an input."""
    if hasattr(jaxpr, "consts"):
        changes["consts"] = list(values)
    return jaxpr.replace(constvars=list(constvars), **changes)


def remat_is_undone() -> bool:
    """True where XLA's CPU compiler merges a rematerialised computation with the first one again (before jax 0.12:
    optimisation barriers are dropped before common-subexpression elimination)."""
    return tuple(int(n) for n in jax.__version__.split(".")[:2]) < (0, 12)


def rematerialised(jaxpr: Jaxpr, eqns: Sequence[JaxprEqn], inner: Sequence[Var], made: Sequence[Var],
                   operands: Sequence[Var], results: Sequence[Var]) -> JaxprEqn:  # fmt: skip
    """An equation  results = remat2(operands)  behind an optimisation barrier, its body ``eqns`` of ``jaxpr``, which
    read ``inner`` and make ``made``."""
    names = jaxpr.debug_info._replace(arg_names=None, result_paths=None)
    body = jaxpr.replace(constvars=[], invars=list(inner), outvars=list(made), eqns=list(eqns), debug_info=names)
    params = {"jaxpr": body, "prevent_cse": True, "differentiated": True, "policy": None}
    first = eqns[-1]
    return new_jaxpr_eqn(
        list(operands), list(results), remat_p, params, body.effects, source_info=first.source_info, ctx=first.ctx
    )


def with_scan_consts(params: dict[str, Any], extra: int) -> dict[str, Any]:
    """A scan's parameters with ``extra`` more constants (after those that it has)."""
    if "num_consts" in params:
        return {**params, "num_consts": params["num_consts"] + extra}
    from jax._src import flattree  # pyright: ignore[reportAttributeAccessIssue] - since jax 0.12

    consts, carry, xs = params["ft_in"].unpack()
    return {**params, "ft_in": flattree.pack((flattree.nones(len(list(consts)) + extra), carry, xs))}


def coordination_client() -> Any | None:
    """The client of the service that `jax.distributed.initialize` connected this process to, or None."""
    from jax._src import distributed

    return distributed.global_state.client


_CALLBACKS = frozenset(("pure_callback", "io_callback", "debug_callback", "debug_print"))


def calls_host(jaxpr: Jaxpr) -> bool:
    """True where ``jaxpr``, bodies included, calls a function of Python: JAX then runs a CPU program in the thread that
    dispatches it."""
    return any(eqn.primitive.name in _CALLBACKS for eqn in jaxpr.eqns) or any(map(calls_host, subjaxprs(jaxpr)))


class Copies:
    """Copies arrays to other devices of this process, each of which gets the shard that a device of the array has, in
    their order: the call in which `jax.device_put` ends where nothing is to be cut (measured: 4 of its 64 us an array).
    Only dispatched; what lies there already is no copy.

    Args:
        shardings: where each array is to lie.
        extended: some arrays have extended dtypes (keys).
    """

    def __init__(self, shardings: Sequence[Any], extended: bool = False) -> None:
        self._shardings, self._extended = list(shardings), extended
        self._devices = [sharding._internal_device_list.addressable_device_list for sharding in shardings]
        self._how = [xla_client.ArrayCopySemantics.REUSE_INPUT] * len(self._devices)

    def __call__(self, xs: Sequence[jax.Array]) -> list[jax.Array]:
        if self._extended:
            return jax.device_put(list(xs), self._shardings)
        return xla_client.batched_copy_array_to_devices_with_sharding(xs, self._devices, self._shardings, self._how)


class FromHost:
    """Makes arrays of ``shape`` and ``dtype`` from tiles in host memory, for each of this process's ``devices`` of the
    sharding one: the call in which `jax.device_put` ends (measured: 10 of its 60 us). Dtypes stay what they are."""

    def __init__(self, shape: tuple[int, ...], dtype: Any, sharding: Any, devices: Sequence[Device]) -> None:
        self._aval = core.ShapedArray(shape, dtype)
        self._sharding, self._devices = sharding, list(devices)

    def __call__(self, tiles: list[Any]) -> jax.Array:
        return xla_client.batched_device_put(self._aval, self._sharding, tiles, self._devices, True, enable_x64=True)
