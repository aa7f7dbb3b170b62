"""An equation's parameters → plain values, as a plan has them: `parameters`."""

from __future__ import annotations

import enum
from collections.abc import Container, Iterable
from typing import Any

import numpy as np

from autopar.frontend.loops import known_trips
from autopar.frontend.pallas_grids import split_axes
from autopar.ir.graph import one_nan
from autopar.jax_compat import ClosedJaxpr, Jaxpr, JaxprEqn, Var, manual_axes, scan_counts


def parameters(eqn: JaxprEqn, read: Container[Var]) -> dict[str, Any]:
    """Those of ``eqn`` that say what it computes; ``read`` are the variables that anything reads."""
    out: dict[str, Any] = {}
    for key, value in eqn.params.items():
        if eqn.primitive.name in ("autopar_kernel", "pallas_call") and key in ("flops", "cost_estimate"):
            continue  # what it costs, not what it computes
        converted = _json(value)
        if converted is not _SKIP:
            out[key] = converted
    if eqn.primitive.name == "scan":
        num_consts, num_carry = scan_counts(eqn)
        out = {"num_consts": num_consts, "num_carry": num_carry, "length": eqn.params["length"]}
    if eqn.primitive.name == "while":
        out["trips"] = known_trips(eqn)
    if eqn.primitive.name == "pallas_call":
        out["split"] = tuple(_json(a) for a in split_axes(eqn, [v in read for v in eqn.outvars]))
    if eqn.primitive.name == "random_bits":
        out["partitionable"] = bool(eqn.ctx.threefry_partitionable)
    if eqn.primitive.name == "sharding_constraint":
        out["pin"] = _pin(eqn.params["sharding"])
    if eqn.primitive.name == "shard_map":
        specs = ((side, eqn.params[side]) for side in ("in_specs", "out_specs"))
        out = {"mesh": _axes(eqn.params["mesh"]), "manual": tuple(sorted(manual_axes(eqn)))}
        out |= {
            side: tuple(_dims(s) if not getattr(s, "unreduced", ()) else None for s in those) for side, those in specs
        }
    return out


def _pin(sharding: Any) -> Any:
    spec = getattr(sharding, "spec", None)
    if spec is None:
        return None
    mesh = getattr(sharding, "mesh", None)
    return {"dims": _dims(spec), "mesh": _axes(mesh) if mesh else ()}


def _dims(spec: Any) -> tuple[Any, ...]:
    """The mesh axes of each dimension of a PartitionSpec; None for one that is unconstrained."""
    dims: list[Any] = []
    for entry in spec:
        if entry is None:
            dims.append(())
        elif isinstance(entry, str):
            dims.append((entry,))
        elif isinstance(entry, tuple):
            dims.append(tuple(entry))
        else:
            dims.append(None)
    return tuple(dims)


def _axes(mesh: Any) -> tuple[tuple[str, int], ...]:
    return tuple((str(n), int(s)) for n, s in mesh.shape.items())


_SKIP = object()


def _json(value: Any) -> Any:
    if isinstance(value, (np.bool, np.integer, np.floating)):  # float64 is a float, and has another repr
        value = value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return one_nan(value)
    if isinstance(value, tuple) and (names := getattr(value, "_fields", None)) is not None:
        return _fields(value, names)
    if isinstance(value, (tuple, list, range)):
        items = tuple(_json(v) for v in value)
        return _SKIP if any(i is _SKIP for i in items) else items
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, np.dtype):
        return value.name
    if isinstance(value, type) and issubclass(value, np.generic):
        return np.dtype(value).name
    if isinstance(value, (ClosedJaxpr, Jaxpr)) or callable(value):
        return _SKIP
    if isinstance(value, (complex, bytes)):
        return repr(value)
    if isinstance(value, dict):
        return {str(k): v for k, v in ((k, _json(v)) for k, v in value.items()) if v is not _SKIP}
    if hasattr(value, "__dataclass_fields__"):
        return _fields(value, value.__dataclass_fields__)
    return _SKIP


def _fields(value: Any, names: Iterable[str]) -> dict[str, Any]:
    converted = ((name, _json(getattr(value, name, None))) for name in names)
    return {name: v for name, v in converted if v is not _SKIP}
