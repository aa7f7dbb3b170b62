"""Dropless experts in microbatches: each sorts its own tokens by expert, and together they give the batch's step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax import lax

import autopar
from autopar.frontend.microbatch import serial
from autopar.ir.errors import MicrobatchError
from tests.dropless import EXPERTS, TOP, Sizes, bincount, by_place, experts, weights
from tests.microbatches import BATCH, TIME, WIDTH, batch, close, exact, state_of, step_of
from tests.shares import each

pytestmark = pytest.mark.usefixtures("float64")


def loss_of(**how: Any) -> Callable[..., Any]:
    def loss(p: Any, d: Any) -> Any:
        h = d["x"].reshape(-1, WIDTH)
        for _ in range(2):
            h = h + experts(p, h, **how)
        return jnp.mean(h.reshape(d["x"].shape) ** 2 * d["mask"][..., None])

    return loss


def sorted_with_its_key(key: Any) -> Any:
    return lax.sort((key, jnp.arange(key.size)), num_keys=1, is_stable=False)[1]


def one_by_one(p: Any, d: Any) -> Any:
    """A layer at a time, rematerialised, a batch of sequences in each."""

    def layer(h: Any, _: Any) -> Any:
        return h + experts(p, h.reshape(-1, WIDTH)).reshape(h.shape), None

    return jnp.mean(lax.scan(jax.checkpoint(layer), d["x"], None, length=3)[0] ** 2)


def through_rules(p: Any, d: Any) -> Any:
    """Operators with derivative rules of their own, and a loop, on rows in the order of a sort."""
    h = d["x"].reshape(-1, WIDTH)
    key = (h @ p["gate"]).argmax(-1)
    order, sizes = jnp.argsort(key), bincount(key)
    rows = squared(jax.nn.relu(lax.ragged_dot(h[order], p["up"], sizes)))
    total, stacked = lax.scan(lambda c, x: (jnp.sin(c + x), jnp.sin(c * x)), rows[:, 0], rows.T)
    rows = lax.ragged_dot(rows * (stacked.sum(0) + total)[:, None], p["down"], sizes)
    return jnp.mean(jnp.tanh(0.1 * by_place(rows, order)))


def sorted_at_once(p: Any, d: Any) -> Any:
    """Keys, the numbers of tokens and their weights in one sort; results added up by token."""
    h = d["x"].reshape(-1, WIDTH)
    gates, chosen = lax.top_k(jax.nn.softmax(h @ p["gate"]), TOP)
    key, tokens = chosen.reshape(-1), jnp.repeat(jnp.arange(len(h)), TOP)
    _, tokens, gate = lax.sort((key, tokens, gates.reshape(-1)), num_keys=1)
    rows = jnp.tanh(lax.ragged_dot(h[tokens], p["up"], bincount(key)))
    rows = lax.ragged_dot(rows, p["down"], bincount(key)) * gate[:, None]
    return jnp.mean(jnp.sin(h + jnp.zeros_like(h).at[tokens].add(rows)))


def parts_again(p: Any, d: Any) -> Any:
    """Rematerialised: what sorts, apart from the router; then what multiplies, apart from what sorts; a loop over
    parts of the experts' width inside."""

    @jax.checkpoint
    def apart(h: Any, key: Any) -> Any:
        order, sizes = jnp.argsort(key), bincount(key)

        @jax.checkpoint
        def product(rows: Any, sizes: Any, up: Any) -> Any:
            def part(total: Any, w: Any) -> Any:
                return total + jnp.sin(lax.ragged_dot(rows, w, sizes)), None

            parts = jnp.stack(jnp.split(up, 2, axis=-1))
            start = rows[:, : up.shape[-1] // 2] * 0.5
            return lax.scan(part, start, parts)[0]

        return by_place(product(h[jnp.repeat(jnp.arange(len(h)), TOP)[order]], sizes, p["up"]), order)

    h = d["x"].reshape(-1, WIDTH)
    chosen = lax.top_k(h @ p["gate"], TOP)[1].reshape(-1)
    one = apart(h, chosen)
    order, sizes = jnp.argsort(chosen), bincount(chosen)
    two = jax.checkpoint(lambda r, w, n, o: jnp.tanh(by_place(scaled(lax.ragged_dot(r, w, n), n), o)))
    return jnp.mean(one**2) + jnp.mean(two(h[order // TOP], p["up"], sizes, order))


def scaled_by_expert(p: Any, d: Any) -> Any:
    """Approximate top experts, one-hot sizes, tokens numbered by a line, and a factor of each row's expert, which sizes
    tell."""
    h = d["x"].reshape(-1, WIDTH)
    logits = h @ p["gate"]
    chosen = lax.approx_max_k(logits, TOP)[1]
    order = chosen.ravel().argsort()
    back, tokens = order.argsort(), jnp.repeat(jnp.arange(len(h)), TOP)[order]
    hot = jax.nn.one_hot(chosen, EXPERTS, dtype=jnp.int32)
    sizes = jnp.sum(hot, axis=(0, 1))
    rows = lax.ragged_dot(jnp.tanh(lax.ragged_dot(h[tokens], p["up"], sizes)), p["down"], sizes)
    scale = p["bias"].mean(1)
    rows = rows * scale[jnp.repeat(jnp.arange(EXPERTS), sizes, total_repeat_length=len(rows)), None]
    gates = (hot * jax.nn.softmax(logits)[:, None]).sum(-1)
    return jnp.mean(jnp.sin(jnp.einsum("tkd,tk->td", rows[back].reshape(-1, TOP, WIDTH), gates)))


def with_rules_for_sorting(p: Any, d: Any, *, moved: Callable[..., Any] | None = None) -> Any:
    """Rows go into order and back by an operator whose derivative goes the other way."""
    moved = moved or moving(at, by_place)
    h = d["x"].reshape(-1, WIDTH)
    key = lax.top_k(h @ p["gate"], TOP)[1].reshape(-1)
    order, sizes = jnp.argsort(key), bincount(key)
    rows = lax.ragged_dot(moved(jnp.repeat(h, TOP, axis=0), order), p["up"], sizes)
    rows = lax.ragged_dot(jnp.tanh(rows), p["down"], sizes)
    return jnp.mean(jnp.sin(moved(rows, jnp.argsort(order)).reshape(-1, TOP, WIDTH).sum(1)))


def moving(rows: Callable[[Any, Any], Any], back: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """(x, order) → ``rows`` of these, whose derivative is ``back`` of the cotangent."""
    moved = jax.custom_vjp(rows)
    moved.defvjp(lambda x, order: (rows(x, order), order), lambda order, ct: (back(ct, order), None))
    return moved


def at(x: Any, order: Any) -> Any:
    return x[order]


def at_by_size(x: Any, order: Any) -> Any:
    """At the order where there are as many rows as in the batch; with fewer every second row is another."""
    return x[jnp.where(order % 2 == 1, order + (len(x) - BATCH * TIME * TOP), order)]


def at_below_size(x: Any, order: Any) -> Any:
    """Likewise, and the first row alone with fewer."""
    return x[jnp.where(order < 2 * len(x) - BATCH * TIME * TOP, order, 0 * order)]


def mixed_sizes(p: Any, d: Any, *, product: bool) -> Any:
    """Sizes of a key that pairs rows with others, which has the values of the key where all are alike."""
    h = d["x"].reshape(-1, WIDTH)
    key = (h @ p["gate"]).argmax(-1)
    order = jnp.argsort(key)
    mixed = bincount((key + key[order]) // 2)
    rows = lax.ragged_dot(h[order], p["up"], mixed if product else bincount(key))
    scale = 1 if product else p["gate"][0][jnp.repeat(jnp.arange(EXPERTS), mixed, total_repeat_length=len(h))][:, None]
    return jnp.mean(jnp.sin(by_place(rows * scale, order)))


def by_hand(
    sizes: Any,
    rows: int,
    *,
    turn: int = 1,
    first: int = 0,
    below: int = 0,
    one: int = 1,
    begin: int = 0,
    how: Any = None,
) -> Any:
    """As `jax.numpy.repeat` of 0, 1, …."""
    starts = jnp.cumsum(jnp.concatenate([sizes[-turn:], sizes[:-turn]]).at[0].set(first))
    starts = jnp.where(starts < below, starts + rows, starts)
    return jnp.cumsum(jnp.full(rows, begin, int).at[starts].add(one, mode=how)) - 1


BY_HAND: dict[str, dict[str, Any]] = {
    "turned by two": {"turn": 2},
    "begun at one": {"first": 1},
    "wrapped at one": {"below": 1},
    "counted twice": {"one": 2},
    "counted from one": {"begin": 1},
    "clipped": {"how": "clip"},
}


def grouped(of: Callable[[Any], Any], repeated: Callable[[Any, int], Any] | None = None) -> Callable[..., Any]:
    """A factor of each row's expert, by sizes."""

    def loss(p: Any, d: Any) -> Any:
        h = d["x"].reshape(-1, WIDTH)
        key = (h @ p["gate"]).argmax(-1)
        order, sizes = jnp.argsort(key), bincount(key)
        expert_of = repeated or (lambda n, size: jnp.repeat(jnp.arange(EXPERTS), n, total_repeat_length=size))
        rows = lax.ragged_dot(h[order], p["up"], sizes) * p["gate"][0][expert_of(of(sizes), len(h))][:, None]
        return jnp.mean(jnp.sin(by_place(rows, order)))

    return loss


def turned_groups(p: Any, d: Any, *, scans: bool = True) -> Any:
    """A loop that begins with the right sizes and goes on with others."""
    h = d["x"].reshape(-1, WIDTH)
    key = (h @ p["gate"]).argmax(-1)
    order, w = jnp.argsort(key), lax.stop_gradient(p["up"][..., :WIDTH])

    def turn(carry: Any, _: Any) -> Any:
        count, rows, sizes = carry
        return (count + 1, rows + lax.ragged_dot(rows, w, sizes), sizes[::-1]), None

    start = (0, lax.stop_gradient(h[order]), bincount(key))
    if scans:
        (_, rows, _), _ = lax.scan(turn, start, length=2)
    else:
        _, rows, _ = lax.while_loop(lambda c: c[0] < 2, lambda c: turn(c, None)[0], start)
    return jnp.mean(jnp.sin(by_place(rows, order)) * h)


@jax.custom_vjp
def scaled(x: Any, sizes: Any) -> Any:
    """With a rule that multiplies by group."""
    return lax.ragged_dot(x, jnp.full((EXPERTS, x.shape[-1], x.shape[-1]), 0.1), sizes)


scaled.defvjp(
    lambda x, sizes: (scaled(x, sizes), (x.shape[-1], sizes)),
    lambda kept, ct: (lax.ragged_dot(ct, jnp.full((EXPERTS, kept[0], kept[0]), 0.1), kept[1]), None),
)


@jax.custom_vjp
def squared(x: Any) -> Any:
    return x * x


squared.defvjp(lambda x: (x * x, x), lambda x, ct: (2 * x * ct,))


def padding_last(p: Any, d: Any) -> Any:
    """Padding is sorted behind all experts, where no group has it."""
    h, kept = d["x"].reshape(-1, WIDTH), d["mask"].reshape(-1)
    chosen = jnp.where(kept, (h @ p["gate"]).argmax(-1), EXPERTS)
    order = jnp.argsort(chosen)
    out = lax.ragged_dot(h[order], p["up"], bincount(chosen))
    return jnp.mean(jnp.sin(jnp.zeros_like(out).at[order].set(out)))


class _Experts(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        p = {k: self.param(k, lambda _, v=v: v) for k, v in weights().items()}
        return experts(p, nn.LayerNorm(param_dtype=jnp.float64)(x).reshape(-1, WIDTH), sizes=SIZES["one-hot"])


def module(p: Any, d: Any) -> Any:
    out: Any = _Experts().apply({"params": p}, d["x"])
    return jnp.mean(out**2)


ORDERS = {"stable": jnp.argsort, "unstable, with its key": sorted_with_its_key}
SIZES: dict[str, Sizes] = {
    "bincount": bincount,
    "one-hot": lambda key: jax.nn.one_hot(key, EXPERTS, dtype=jnp.int32).sum(0),
    "added": lambda key: jnp.zeros(EXPERTS, jnp.int32).at[key].add(1),
    "segments": lambda key: jax.ops.segment_sum(jnp.ones_like(key), key, EXPERTS),
    "of sorted keys": lambda key: bincount(jnp.sort(key)),
    "of keys in order": lambda key: bincount(key[jnp.argsort(key)]),
    "one-hot, in order": lambda key: jax.nn.one_hot(key[jnp.argsort(key)], EXPERTS, dtype=jnp.int32).sum(0),
    "compared": lambda key: jnp.sum(jnp.arange(EXPERTS) == key[:, None], 0),
}
BACK: dict[str, Callable[[Any, Any], Any]] = {
    "by place": by_place,
    "taken": lambda out, order: jnp.take(out, jnp.argsort(order), axis=0),
    "set": lambda out, order: jnp.zeros_like(out).at[order].set(out),
    "added": lambda out, order: jnp.zeros_like(out).at[order].add(out),
    "places of a line": lambda out, order: out[jnp.arange(order.size)[jnp.argsort(order)]],
    "places set": lambda out, order: out[jnp.zeros_like(order).at[order].set(jnp.arange(order.size))],
}
TOKENS: dict[str, Callable[[int], Any]] = {
    "numbers divided": lambda n: jnp.arange(n) // TOP,
    "numbers repeated": lambda n: jnp.repeat(jnp.arange(n // TOP), TOP),
    "numbers spread": lambda n: jnp.broadcast_to(jnp.arange(n // TOP)[:, None], (n // TOP, TOP)).reshape(-1),
}
LOSSES: dict[str, Callable[..., Any]] = {
    **{f"order {k}": loss_of(order=order) for k, order in ORDERS.items()},
    **{f"sizes {k}": loss_of(sizes=sizes) for k, sizes in SIZES.items()},
    **{f"back {k}": loss_of(back=back) for k, back in BACK.items()},
    "taken": loss_of(read=lambda h, order: jnp.take(h, order // TOP, axis=0)),
    **{f"read by {k}": loss_of(read=lambda h, order, of=of: h[of(order.size)[order]]) for k, of in TOKENS.items()},
    "repeated first": loss_of(read=lambda h, order: jnp.repeat(h, TOP, axis=0)[order]),
    "layers": one_by_one,
    "padding last": padding_last,
    "rules and loops": through_rules,
    "sorted at once": sorted_at_once,
    "parts again": parts_again,
    "rules for sorting": with_rules_for_sorting,
    "scaled by expert": scaled_by_expert,
    "a factor by hand": grouped(lambda sizes: sizes, by_hand),
    "a factor by sizes": grouped(lambda sizes: sizes.astype(jnp.int32)),
}


@pytest.mark.parametrize("name", each(3, LOSSES))
def test_experts_are_exact(name: str) -> None:
    exact(LOSSES[name], weights=weights(), ns=(2 + 2 * (list(LOSSES).index(name) % 2),))


def test_one_example_per_microbatch() -> None:
    exact(loss_of(), weights=weights(), ns=(8,))


def test_flax_module() -> None:
    p = _Experts().init(jax.random.key(0), batch()["x"])["params"]
    exact(module, weights=p)


def test_results_beside_the_loss() -> None:
    def loss(p: Any, d: Any) -> Any:
        h = d["x"].reshape(-1, WIDTH)
        chosen = lax.top_k(h @ p["gate"], TOP)[1].reshape(-1)
        return jnp.mean(experts(p, h) ** 2), {"load": bincount(chosen), "order": jnp.argsort(chosen)}

    exact(loss, weights=weights(), aux=True)


def reversed_groups(key: Any) -> Any:
    return bincount(EXPERTS - 1 - key)


def of_the_next(out: Any, order: Any) -> Any:
    return out[jnp.maximum(jnp.argsort(order) - 1, 0)]


def places_of_places(out: Any, order: Any) -> Any:
    return out[jnp.argsort(jnp.argsort(order))]


def another_layers_order(p: Any, d: Any) -> Any:
    """The order of one call of a rematerialised function for the rows of another call of the same."""

    @jax.checkpoint
    def sorts(h: Any) -> Any:
        key = (h @ p["gate"]).argmax(-1)
        order = jnp.argsort(key)
        return lax.ragged_dot(h[order], p["up"], bincount(key)), order

    h = d["x"].reshape(-1, WIDTH)
    one, order = sorts(h)
    two, _ = sorts(1 - h)
    return jnp.mean(jnp.sin(by_place(one, order) * by_place(two, order)))


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "groups of the same size": (
        loss_of(sizes=lambda key: jnp.full(EXPERTS, key.size // EXPERTS)), r"ragged_dot_general \(.*\) has group sizes",
    ),
    "groups in another order": (loss_of(sizes=reversed_groups), "not known to count the keys"),
    "groups counted twice": (loss_of(sizes=lambda key: bincount(jnp.repeat(key, 2))), "not known to count"),
    "some are not counted": (loss_of(sizes=lambda key: bincount(jnp.where(key == 0, EXPERTS, key))), "not known to"),
    "another key": (
        lambda p, d: jnp.mean(experts(
            p, d["x"].reshape(-1, WIDTH), sizes=lambda key: bincount((d["x"] @ p["gate"]).argmin(-1).ravel()))),
        "not known to count",
    ),
    "sizes that a scan turns": (turned_groups, "not known to count"),
    "sizes that a loop turns": (partial(turned_groups, scans=False), "not known to count"),
    "sizes of keys with others": (partial(mixed_sizes, product=True), "with something else of the batch"),
    "groups of keys with others": (partial(mixed_sizes, product=False), "in the order of a sort"),
    "some keys counted twice": (
        loss_of(sizes=lambda key: bincount(key[jnp.argsort(key) // TOP * TOP])), "not known to count",
    ),
    "sizes too narrow to count": (
        lambda p, d: jnp.mean(experts(
            p, jnp.repeat(d["x"].reshape(-1, WIDTH), 2, 0), sizes=lambda key: bincount(key).astype(jnp.int8))),
        "not known to count",
    ),
    "groups of another order": (grouped(lambda sizes: sizes[::-1]), "not linear in a sum"),
    "groups of fewer": (grouped(lambda sizes: sizes - 1), "not linear in a sum"),
    **{f"groups, {k}": (grouped(lambda n: n, lambda n, size, how=how: by_hand(n, size, **how)), "not linear in a sum")
       for k, how in BY_HAND.items()},
    "a key of any value": (
        loss_of(order=lambda key: jnp.argsort(key * 2), sizes=lambda key: bincount(key * 2)), "not known to count",
    ),
    "rows of other examples": (loss_of(read=lambda h, order: h[jnp.maximum(order // TOP - 1, 0)]), "each example.s"),
    "places of other rows": (loss_of(back=of_the_next), r"gather \(.*\) reads other rows of the batch than"),
    "neighbours in the order": (
        loss_of(read=lambda h, order: jnp.roll(h[order // TOP], 1, 0)), r"\(.*\) .*order of a sort",
    ),
    "sums along the order": (loss_of(back=lambda out, order: by_place(jnp.cumsum(out, 0), order)), "order of a sort"),
    "rows beside rows in order": (loss_of(read=lambda h, order: h[order // TOP] + jnp.repeat(h, TOP, 0)), "something"),
    "numbers as values": (
        loss_of(read=lambda h, order: h[order // TOP] * order[:, None]), "order of a sort",
    ),
    "places set backwards": (
        loss_of(back=lambda out, order: out[jnp.zeros_like(order).at[order].set(jnp.arange(order.size)[::-1])]),
        "order of a sort",
    ),
    "tokens of places": (
        loss_of(back=lambda out, order: out[jnp.zeros_like(order).at[order].set(jnp.arange(order.size) // TOP)]),
        "each example.s own",
    ),
    "places set twice": (
        loss_of(back=lambda out, order: out[jnp.zeros_like(order).at[order // TOP].set(jnp.arange(order.size))]),
        "writes rows in the order of a sort",
    ),
    "places added": (
        loss_of(back=lambda out, order: out[jnp.ones_like(order).at[order].add(jnp.arange(order.size)) - 1]),
        "writes rows in the order of a sort",
    ),
    "numbers of other examples": (
        loss_of(read=lambda h, order: h[jnp.maximum(jnp.arange(order.size) // TOP - 1, 0)[order]]), "each example.s",
    ),
    "numbers put right afterwards": (
        loss_of(read=lambda h, order: h[(jnp.arange(order.size) // TOP - 1)[order] + 1]), "each example.s",
    ),
    "numbers by other numbers": (
        loss_of(read=lambda h, order: h[(jnp.arange(order.size) // TOP)[order // TOP]]), "each example.s",
    ),
    "places of places": (loss_of(back=places_of_places), "each example.s own"),
    "an order that leaves a body": (another_layers_order, "the sort and what puts rows back have to be inside"),
    "a rule that the size decides": (
        partial(with_rules_for_sorting, moved=moving(at_by_size, by_place)), "needs the full batch.s size",
    ),
    "a rule in which the size decides": (
        partial(with_rules_for_sorting, moved=moving(at_below_size, by_place)), "needs the full batch.s size",
    ),
    "a rule that goes the same way": (partial(with_rules_for_sorting, moved=moving(at, at)), "derivative rules"),
    "not put back": (loss_of(back=lambda out, order: out), "order of a sort"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_exact_is_refused(name: str) -> None:
    loss, match = REFUSED[name]
    with pytest.raises(MicrobatchError, match=match) as caught:
        jax.eval_shape(serial(step_of(loss), 2), state_of(weights()), batch())
    lines = ("test_microbatch_sorted.py:", "dropless.py:")
    assert any(line in str(caught.value) for line in lines), "names the source line"


@pytest.mark.parametrize("n, options", [(1, {"stages": 1, "experts": 4}), (2, {"stages": 2, "experts": 2})], ids=str)
def test_experts_are_planned_and_run_apart(n: int, options: dict[str, Any]) -> None:
    step, start, data = step_of(loss_of()), state_of(weights()), batch()
    wanted = jax.jit(step)(start, data)
    planned = autopar.parallelize(step, num_microbatches=n, **options)
    plan = planned.plan(start, data).data
    for argument in plan.inputs:
        if "up" in argument.path or "down" in argument.path:
            assert all(place.spec.dims[0] == ("experts",) for place in argument.places), argument
    close(planned(start, data), wanted, 1e-12)
