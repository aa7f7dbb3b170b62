"""An analysed loss, evaluated: for one microbatch, or for the full batch where values are computed once.

Evaluation binds the microbatch trace's equations with the *full* trace's literals (a mean's divisor), so that
means and sums both simply add up over microbatches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autopar.frontend.microbatch.analysed import Body, Step
from autopar.frontend.microbatch.dropout import sliced_bits
from autopar.jax_compat import JaxprEqn, Literal, bind, eqn_context, scan_counts
from autopar.primitives.kinds import Coupled, InOrder, Rows, name, split_size
from autopar.primitives.view import LocalIndex, SliceBits

Values = list[Any]


# --- strided slices ------------------------------------------------------------------------------------------


def split_rows(value: Any, rows: Rows, n: int) -> Any:
    """(…, pre·m·post, …) → (n, …, pre·(m/n)·post, …): microbatch j holds examples j, j+n, …

    The batch is split as (m/n, n) and the minor part moved in front, so a batch sharded over devices stays local.
    """
    split, axis, shape = apart(value, rows, n)
    return jnp.moveaxis(split, axis, 0).reshape(n, *shape)


def apart(value: Any, rows: Rows, n: int) -> tuple[Any, int, tuple[int, ...]]:
    """(``value`` with the batch factor of dimension ``rows.dim`` split into (m/n, n), position of the n, shape of one
    microbatch)."""
    sizes = split_size(rows, value.shape[rows.dim], n)
    assert sizes is not None
    pre, b, post = sizes
    before, after = _beside(value.shape, rows)
    return value.reshape(*before, b, n, *after), len(before) + 1, _sized(value.shape, rows.dim, pre * b * post)


def join_rows(value: Any, rows: Rows, n: int) -> Any:
    """The inverse of `split_rows`: (n, …, pre·(m/n)·post, …) → (…, pre·m·post, …)."""
    shape = value.shape[1:]
    size = shape[rows.dim]
    before, after = _beside(shape, rows)
    split = value.reshape(n, *before, size // (rows.pre * rows.post), *after)
    return jnp.moveaxis(split, 0, len(before) + 1).reshape(_sized(shape, rows.dim, size * n))


def _beside(shape: tuple[int, ...], rows: Rows) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The sizes before and after the batch factor."""
    pre = (rows.pre,) if rows.pre > 1 else ()
    post = (rows.post,) if rows.post > 1 else ()
    return (*shape[: rows.dim], *pre), (*post, *shape[rows.dim + 1 :])


def _sized(shape: tuple[int, ...], dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :])


# --- hoisted values ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Hoist:
    """A hoisted result: of which step of which body, and how many scans (of what is stacked in front) are around."""

    path: tuple[int, ...]
    step: int
    result: int
    depth: int
    rows: Rows | None

    @property
    def key(self) -> tuple[Any, ...]:
        """Identifies it within the loss."""
        return hoist_key(self.path, self.step, self.result)


def hoist_key(path: tuple[int, ...], step: int, result: int) -> tuple[int, ...]:
    """Identifies a hoisted result within the loss, and can be compared with others (of a pytree's dict)."""
    return (*path, -1, step, result)


def hoists_of(body: Body, path: tuple[int, ...] = (), depth: int = 0) -> Iterator[Hoist]:
    """All hoisted values of ``body``, outermost first."""
    for i, step in enumerate(body.steps):
        for r in step.hoisted:
            kind = body.facts[step.full.outvars[r]].kind
            rows = kind.at(kind.dim + depth) if isinstance(kind, Rows) else None
            yield Hoist(path=path, step=i, result=r, depth=depth, rows=rows)
        if len(step.bodies) == 1 and step.bodies[0].hoists:
            yield from hoists_of(step.bodies[0], (*path, i), depth + (step.full.primitive.name == "scan"))


def run_full(body: Body, operands: Sequence[Any], path: tuple[int, ...] = ()) -> tuple[Values, dict[Any, Any]]:
    """Evaluates the full trace; returns its results and hoisted values by `Hoist.key`, those inside scans stacked in
    front, once per scan."""
    env: dict[Any, Any] = dict(zip(body.full.constvars, body.full_consts, strict=True))
    env.update(zip(body.full.invars, operands, strict=True))
    found: dict[Any, Any] = {}
    for i, step in enumerate(body.steps):
        invals = [_read(env, a) for a in step.full.invars]
        inner = step.bodies[0] if len(step.bodies) == 1 and step.bodies[0].hoists else None
        if inner is None:
            outs = bind_as(step.full, invals)
        elif step.full.primitive.name == "scan":
            outs, extra = _scan_full(step, inner, invals, (*path, i))
            found.update(extra)
        else:
            outs, extra = run_full(inner, invals, (*path, i))
            found.update(extra)
        env.update(zip(step.full.outvars, outs, strict=True))
        for r in step.hoisted:
            found[hoist_key(path, i, r)] = outs[r]
    return [_read(env, a) for a in body.full.outvars], found


def _scan_full(step: Step, inner: Body, invals: Values, path: tuple[int, ...]) -> tuple[Values, dict[Any, Any]]:
    num_consts, num_carry = scan_counts(step.full)
    keys: list[Any] = []

    def turn(carry: Values, xs: Values) -> tuple[Values, tuple[Values, Values]]:
        outs, found = run_full(inner, [*invals[:num_consts], *carry, *xs], path)
        keys[:] = list(found)
        return outs[:num_carry], (outs[num_carry:], list(found.values()))

    carry, (ys, extra) = lax.scan(
        turn, invals[num_consts : num_consts + num_carry], invals[num_consts + num_carry :], **_scan_options(step.full)
    )
    return [*carry, *ys], dict(zip(keys, extra, strict=True))


def _scan_options(eqn: JaxprEqn) -> dict[str, Any]:
    return {k: eqn.params[k] for k in ("length", "reverse", "unroll", "_split_transpose") if k in eqn.params}


def _read(env: dict[Any, Any], atom: Any) -> Any:
    return atom.val if isinstance(atom, Literal) else env[atom]


def bind_as(eqn: JaxprEqn, invals: Sequence[Any]) -> Values:
    """The results of ``eqn`` on other operands, in the context (source line, settings) in which it was traced."""
    with eqn_context(eqn):
        return bind(eqn, *invals)


# --- one microbatch ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """``index`` of ``n``: an int32 scalar. ``hoisted``: this microbatch's hoisted values by `Hoist.key`."""

    index: Any
    n: int
    hoisted: dict[Any, Any]

    def with_hoisted(self, more: dict[Any, Any]) -> Microbatch:
        """The same microbatch with the hoisted values of one turn of a scan."""
        return Microbatch(index=self.index, n=self.n, hoisted={**self.hoisted, **more})

    def mask(self, value: Any) -> Any:
        """``value`` in microbatch 0, zeros in the others."""
        return jnp.where(self.index == 0, value, jnp.zeros_like(value))


def run_micro(
    body: Body, operands: Sequence[Any], micro: Microbatch, path: tuple[int, ...] = (), taps: Sequence[Any] = ()
) -> tuple[Values, Values]:
    """Evaluates ``body`` for one microbatch; returns its results and the values of the variables ``taps``."""
    env: dict[Any, Any] = dict(zip(body.full.constvars, _micro_consts(body, micro), strict=True))
    env.update(zip(body.full.invars, operands, strict=True))
    for i, step in enumerate(body.steps):
        if step.hoisted and len(step.hoisted) == len(step.full.outvars):
            outs = [micro.hoisted[hoist_key(path, i, r)] for r in step.hoisted]
        else:
            invals = [_read(env, a) for a in step.full.invars]
            for k in step.masked:
                invals[k] = micro.mask(invals[k])
            outs = _run_step(step, invals, micro, (*path, i))
            for r in step.hoisted:
                outs[r] = micro.hoisted[hoist_key(path, i, r)]
        env.update(zip(step.full.outvars, outs, strict=True))
    results = [_read(env, a) for a in body.full.outvars]
    for k in body.out_masks:
        results[k] = micro.mask(results[k])
    return results, [env[v] for v in taps]


def _micro_consts(body: Body, micro: Microbatch) -> Values:
    """Constants of the body; those with the batch are sliced."""
    out: Values = []
    for var, value in zip(body.full.constvars, body.full_consts, strict=True):
        kind = body.facts[var].kind
        out.append(split_rows(jnp.asarray(value), kind, micro.n)[micro.index] if isinstance(kind, Rows) else value)
    return out


def _run_step(step: Step, invals: Values, micro: Microbatch, path: tuple[int, ...]) -> Values:
    if step.same:
        return bind_as(step.full, invals)
    match step.action:
        case SliceBits(rows=rows):
            params = step.full.params
            with eqn_context(step.full):
                return [sliced_bits(invals[0], params["bit_width"], params["shape"], rows, micro.index, micro.n)]
        case LocalIndex(operand=operand, component=component, unit=unit):
            index = invals[operand]
            at = index if component is None else index[..., component]
            at = at // (micro.n * unit) * unit + at % unit
            invals[operand] = at if component is None else index.at[..., component].set(at)
        case None:
            pass
    if not step.bodies or all(b.plain for b in step.bodies):
        return bind_as(step.small, invals)
    with eqn_context(step.small):
        return BODY_RUNNERS[step.full.primitive.name](step, invals, micro, path)


def _run_scan(step: Step, invals: Values, micro: Microbatch, path: tuple[int, ...]) -> Values:
    num_consts, num_carry = scan_counts(step.full)
    (body,) = step.bodies
    stacked = {k: v for k, v in micro.hoisted.items() if k[: len(path)] == path}

    def turn(carry: Values, xs: tuple[Values, Values]) -> tuple[Values, Values]:
        values = dict(zip(stacked, xs[1], strict=True))
        outs, _ = run_micro(body, [*invals[:num_consts], *carry, *xs[0]], micro.with_hoisted(values), path)
        return outs[:num_carry], outs[num_carry:]

    xs = (invals[num_consts + num_carry :], list(stacked.values()))
    carry, ys = lax.scan(turn, invals[num_consts : num_consts + num_carry], xs, **_scan_options(step.small))
    return [*carry, *ys]


def _run_while(step: Step, invals: Values, micro: Microbatch, path: tuple[int, ...]) -> Values:
    first, second = step.full.params["cond_nconsts"], step.full.params["body_nconsts"]
    test, body = step.bodies
    carry = lax.while_loop(
        lambda c: run_micro(test, [*invals[:first], *c], micro, path)[0][0],
        lambda c: run_micro(body, [*invals[first : first + second], *c], micro, path)[0],
        invals[first + second :],
    )
    return list(carry)


def _run_cond(step: Step, invals: Values, micro: Microbatch, path: tuple[int, ...]) -> Values:
    def runner(branch: Body) -> Callable[..., Values]:
        return lambda *operands: run_micro(branch, operands, micro, path)[0]

    return list(lax.switch(invals[0], [runner(b) for b in step.bodies], *invals[1:]))


def _run_remat(step: Step, invals: Values, micro: Microbatch, path: tuple[int, ...]) -> Values:
    (body,) = step.bodies
    run = jax.checkpoint(
        lambda *operands: run_micro(body, operands, micro, path)[0],
        prevent_cse=step.full.params["prevent_cse"],
        policy=step.full.params["policy"],
    )
    return list(run(*invals))


BODY_RUNNERS = {
    "scan": _run_scan,
    "while": _run_while,
    "cond": _run_cond,
    "remat2": _run_remat,
    "checkpoint": _run_remat,
}


# --- after the loop ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class After:
    """What auxiliary results need once the loop is done: ``taps`` of the loop, combined by their kinds, and the
    steps to run on them at full size."""

    taps: tuple[Any, ...]
    steps: tuple[int, ...]


def after_loop(body: Body, wanted: Sequence[Any]) -> After | Coupled:
    """What gives the full batch's ``wanted`` variables after the loop over microbatches; `Coupled` where one cannot be
    had so."""
    origin = {v: i for i, s in enumerate(body.steps) for v in s.full.outvars}
    hoisted = {s.full.outvars[r] for s in body.steps for r in s.hoisted}
    taps: list[Any] = []
    steps: set[int] = set()
    todo = [v for v in wanted if not isinstance(v, Literal)]
    seen: set[Any] = set()
    while todo:
        var = todo.pop()
        if var in seen or var in hoisted or var not in origin:
            continue
        seen.add(var)
        kind = body.facts[var].kind
        step = body.steps[origin[var]]
        mixed = isinstance(kind, (Coupled, InOrder))
        whole = step.same or mixed or (isinstance(kind, Rows) and kind.uniform and not step.bodies)
        if not whole:
            taps.append(var)
            continue
        if mixed and step.bodies and step.full.primitive.name != "custom_jvp_call":
            return kind if isinstance(kind, Coupled) else Coupled(f"it is a {name(kind)}")
        steps.add(origin[var])
        todo.extend(a for a in step.full.invars if not isinstance(a, Literal))
    return After(taps=tuple(sorted(taps, key=origin.__getitem__)), steps=tuple(sorted(steps)))


def run_after(
    body: Body, after: After, wanted: Sequence[Any], operands: Sequence[Any], known: dict[Any, Any]
) -> Values:
    """The ``wanted`` variables at full size. ``operands``: the body's; ``known``: variable → full value, of taps and
    hoisted ones."""
    env: dict[Any, Any] = dict(zip(body.full.constvars, body.full_consts, strict=True))
    env.update(zip(body.full.invars, operands, strict=True))
    env.update(known)
    for i in after.steps:
        step = body.steps[i]
        outs = bind_as(step.full, [_read(env, a) for a in step.full.invars])
        env.update({v: x for v, x in zip(step.full.outvars, outs, strict=True) if v not in known})
    return [_read(env, a) for a in wanted]
