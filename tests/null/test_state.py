"""State goes out as it comes in: which result is the new value of which argument, and that plans shard both alike."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import autopar
from autopar.frontend.layering.layers import layered
from autopar.frontend.trace import trace
from autopar.ir.errors import AutoparWarning, ShardingError, VerifyError
from autopar.ir.graph import Graph, TensorType
from autopar.ir.plan_text import plan_text, section_text
from examples.gpt.model import GPTConfig, make_train_step, train_step_args

MATRIX = {"b": jax.ShapeDtypeStruct((4,), "float32"), "w": jax.ShapeDtypeStruct((4, 4), "float32")}
ARRAY = jax.ShapeDtypeStruct((4, 4), "float32")
BATCH = jax.ShapeDtypeStruct((8, 4), "float32")
SCALAR = jax.ShapeDtypeStruct((), "float32")
COUNT = jax.ShapeDtypeStruct((), "int32")
ADAM = optax.adam(1e-2)
MOMENTS = jax.eval_shape(ADAM.init, MATRIX)


def moved(tree: Any) -> Any:
    """Another tree of the same kind."""
    return jax.tree.map(lambda x: 0.9 * x, tree)


def adam(params: Any, moments: Any, x: Any) -> Any:
    """New parameters, new moments, gradients."""
    grads = jax.tree.map(lambda p: p * x.sum(), params)
    updates, moments = ADAM.update(grads, moments, params)
    return optax.apply_updates(params, updates), moments, grads


def found(step: Callable[..., Any], *args: Any, **options: Any) -> dict[str, str]:
    """Argument → its new value, both as they are called; arrays of one tree together."""
    graph = trace(step, *args, **options).graph
    graph.verify()
    pairs = {graph.arg_paths[i]: graph.out_paths[j] for i, j in graph.state}
    for path in [path for path in pairs if path.endswith("['b']") and path[:-5] + "['w']" in pairs]:
        b, w = pairs.pop(path), pairs.pop(path[:-5] + "['w']")
        assert (b[-5:], w[-5:], b[:-5]) == ("['b']", "['w']", w[:-5])
        pairs[path[:-5]] = b[:-5]
    return pairs


def notes(step: Callable[..., Any], *args: Any, **options: Any) -> tuple[str, ...]:
    return trace(step, *args, **options).notes


OLD_ADAM = {"args[1][0].count", "args[1][0].mu", "args[1][0].nu"}


@pytest.mark.parametrize(
    ("step", "args", "pairs"),
    [
        pytest.param(lambda p, x: (moved(p), x.sum()), (MATRIX, BATCH), {"args[0]": "out[0]"}, id="state and loss"),
        pytest.param(lambda p, x: (x.sum(), moved(p)), (MATRIX, BATCH), {"args[0]": "out[1]"}, id="loss and state"),
        pytest.param(lambda w, x: w * x.sum(), (ARRAY, BATCH), {"args[0]": "out"}, id="an array and nothing else"),
        pytest.param(
            lambda s, x: (moved(s["params"]), x.sum()),
            ({"params": MATRIX, "rate": SCALAR}, BATCH),
            {"args[0]['params']": "out[0]"},
            id="a part of an argument",
        ),
        pytest.param(
            lambda s, x: {"ema": moved(s["ema"]), "loss": x.sum(), "params": s["params"]},
            ({"params": MATRIX, "ema": MATRIX, "rate": SCALAR}, BATCH),
            {"args[0]['params']": "out['params']", "args[0]['ema']": "out['ema']"},
            id="by their names",
        ),
        pytest.param(
            lambda s, x: {"params": {"w": s["params"]["w"] * x.sum(), "more": x.sum()}},
            ({"params": MATRIX}, BATCH),
            {"args[0]['params']['w']": "out['params']['w']"},
            id="an array by its name",
        ),
        pytest.param(
            lambda s, x: {"v": s["w"] * x.sum(), "more": x.sum()}, ({"w": ARRAY, "b": SCALAR}, BATCH), {},
            id="an array of another name",
        ),
        pytest.param(lambda p, x, rate: (moved(p), rate * x.sum()), (MATRIX, BATCH, SCALAR), {"args[0]": "out[0]"},
                     id="a loss beside a learning rate"),
        pytest.param(
            lambda w, x: (0.9 * w, x @ w), (ARRAY, BATCH), {"args[0]": "out[0]"}, id="predictions beside a batch",
        ),
        pytest.param(
            lambda w, x: (x.sum(), jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w)), (ARRAY, BATCH), {},
            id="the gradient of an array",
        ),
        pytest.param(
            lambda w, x: jax.lax.scan(lambda w, row: (w * row, row.sum()), w, x), (ARRAY, BATCH), {"args[0]": "out[0]"},
            id="an array that goes through a loop",
        ),
        pytest.param(
            lambda w, m, x: (m * x.sum(), w - m), (ARRAY, ARRAY, BATCH), {"args[0]": "out[1]", "args[1]": "out[0]"},
            id="two arrays in another order",
        ),
        pytest.param(
            lambda w, m, x: (w - m, m * x.sum()), (ARRAY, ARRAY, BATCH), {"args[0]": "out[0]", "args[1]": "out[1]"},
            id="two arrays",
        ),
    ],
)  # fmt: skip
def test_results_are_new_values(step: Callable[..., Any], args: tuple[Any, ...], pairs: dict[str, str]) -> None:
    assert found(step, *args) == pairs


@pytest.mark.parametrize(
    "step",
    [
        lambda p, m, x: adam(p, m, x)[:2],
        lambda p, m, x: adam(p, m, x)[1::-1],
        lambda p, m, x: (adam(p, m, x)[:2], {"loss": x.sum()}),
        lambda p, m, x: ({"more": x.sum(), "state": adam(p, m, x)[:2]},),
    ],
)
def test_moments_are_no_parameters(step: Callable[..., Any]) -> None:
    """They have the parameters' tree, but are given back with the optimizer's state, which goes as a whole."""
    pairs = found(step, MATRIX, MOMENTS, BATCH)
    assert set(pairs) == {"args[0]"} | OLD_ADAM
    assert all(pairs[path].endswith(path[len("args[1]") :]) for path in OLD_ADAM)
    assert notes(step, MATRIX, MOMENTS, BATCH) == ()


def test_state_of_several_trees_by_keyword() -> None:
    pairs = found(lambda x, *, state: (x.sum(), adam(*state, x)[:2]), BATCH, state=(MATRIX, MOMENTS))
    assert pairs["kwargs['state'][0]"] == "out[1][0]"
    assert pairs["kwargs['state'][1][0].nu"] == "out[1][1][0].nu"


def test_positions_leave_out_static_arguments() -> None:
    assert found(lambda n, p, x: (x.sum(), moved(p)), 3, MATRIX, BATCH, static_argnums=(0,)) == {"args[1]": "out[1]"}


class State(NamedTuple):
    """With a name for each part."""

    params: Any
    step: Any


def test_fields_are_names() -> None:
    pairs = found(
        lambda s, x: {"params": moved(s.params), "step": s.step + 1, "loss": x.sum()}, State(MATRIX, COUNT), BATCH
    )
    assert pairs == {"args[0].params": "out['params']", "args[0].step": "out['step']"}


class Compared:
    """Metadata that cannot be compared."""

    def __eq__(self, other: object) -> bool:
        raise ValueError("the truth value of an array is ambiguous")

    __hash__ = None  # type: ignore[assignment]


@jax.tree_util.register_pytree_node_class
class Wrapped:
    """One array, with metadata."""

    def __init__(self, inside: Any) -> None:
        self.inside = inside

    def tree_flatten(self) -> tuple[tuple[Any, ...], Any]:
        return (self.inside,), Compared()

    @classmethod
    def tree_unflatten(cls, metadata: Any, children: Any) -> Wrapped:
        return cls(*children)


def test_trees_that_cannot_be_compared() -> None:
    assert found(lambda s, x: (Wrapped(moved(s["w"])), x.sum()), {"w": ARRAY, "b": SCALAR}, BATCH) == {}


# --- what could be otherwise -----------------------------------------------------------------------------------


def test_two_of_one_tree_go_by_position_and_the_plan_says_so() -> None:
    def step(params: Any, ema: Any, x: Any) -> Any:
        return moved(params), moved(ema), x.sum()

    assert found(step, MATRIX, MATRIX, BATCH) == {"args[0]": "out[0]", "args[1]": "out[1]"}
    plan = autopar.parallelize(step, cluster="cpu:8", mesh=(8,), batch_argnums=2).plan(MATRIX, MATRIX, BATCH)
    note = (
        "state: out[0] for the new args[0], out[1] for the new args[1] (donated arguments first, then by position); "
        "args[0], args[1] and out[0], out[1] have one tree, shapes and dtypes"
    )
    assert plan.provenance.notes[0] == note
    assert f"notes\n  - {note}" in plan_text(plan.data)


def test_what_is_donated_goes_first_where_there_are_fewer_results() -> None:
    def step(teacher: Any, student: Any, x: Any) -> Any:
        return moved(student), x.sum()

    assert found(step, MATRIX, MATRIX, BATCH) == {"args[0]": "out[0]"}
    assert found(step, MATRIX, MATRIX, BATCH, donate_argnums=(1,)) == {"args[1]": "out[0]"}
    assert notes(step, MATRIX, MATRIX, BATCH, donate_argnums=(1,)) == (
        "state: out[0] for the new args[1] (donated arguments first, then by position); args[0], args[1] and out[0] "
        "have one tree, shapes and dtypes",
    )


def test_gradients_beside_parameters() -> None:
    """They have the parameters' tree. By position they are none where parameters come before, and that is said."""
    assert (
        found(lambda p, m, x: (adam(p, m, x)[:2], adam(p, m, x)[2]), MATRIX, MOMENTS, BATCH)["args[0]"] == "out[0][0]"
    )

    def first(params: Any, x: Any) -> Any:
        return moved(params), x.sum(), jax.tree.map(lambda p: p + 1, params)

    assert found(first, MATRIX, BATCH) == {"args[0]": "out[0]"}
    assert "args[0] and out[0], out[2] have one tree" in notes(first, MATRIX, BATCH)[0]


def test_many_that_are_alike_are_not_all_listed() -> None:
    several = [MATRIX] * 6
    [note] = notes(lambda those, x: (*map(moved, those), x.sum()), several, BATCH)
    assert "out[3] for the new args[0][3] and 2 more (donated" in note


# --- donation ----------------------------------------------------------------------------------------------------


def test_donated_arrays_without_a_new_value_get_a_result_of_their_type() -> None:
    graph = trace(lambda w, x, n: (2 * w.T, x.sum(), n + 1), ARRAY, BATCH, COUNT, donate_argnums=(0, 1, 2)).graph
    assert graph.state == ((0, 0), (2, 2))
    assert graph.donated == (0, 2)
    kept = trace(lambda w, x, n: (2 * w.T, x.sum(), n + 1), ARRAY, BATCH, COUNT).graph
    assert kept.state == kept.donated == ()


@pytest.mark.parametrize(
    ("pairs", "donated", "message"),
    [
        (((0, 3),), (), r"state: \(\(0, 3\),\) pairs what is not there, or twice"),
        (((0, 0), (1, 0)), (), "pairs what is not there, or twice"),
        (((0, 0),), (1,), r"inputs \(1,\) are donated, and not all have an output that takes their buffer"),
    ],
)
def test_pairs_that_cannot_be(pairs: Any, donated: Any, message: str) -> None:
    array = TensorType(shape=(4,), dtype="float32")
    with pytest.raises(VerifyError, match=message):
        Graph(values=(array, array), nodes=(), inputs=(0, 1), outputs=(0, 1), state=pairs, donated=donated).verify()


# --- plans -------------------------------------------------------------------------------------------------------


def mlp(params: Any, x: Any) -> tuple[Any, Any]:
    """A train step whose new weights are best left as the gradients' sums are, split."""

    def loss(params: Any) -> Any:
        h = x
        for layer in params:
            h = jnp.tanh(h @ layer["w"] + layer["b"])
        return jnp.mean(h**2)

    value, grads = autopar.value_and_grad(loss)(params)
    return jax.tree.map(lambda g, p: -0.1 * g + p, grads, params), value


def layers(*sizes: int) -> Any:
    return [
        {"w": jax.ShapeDtypeStruct((i, o), "float32"), "b": jax.ShapeDtypeStruct((o,), "float32")}
        for i, o in itertools.pairwise(sizes)
    ]


SMALL = layers(64, 64, 64)
ROWS = jax.ShapeDtypeStruct((512, 64), "float32")


def with_adam() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    def step(params: Any, moments: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(lambda p: mlp(p, x)[1])(params)
        updates, moments = ADAM.update(grads, moments, params)
        return (jax.tree.map(jnp.add, updates, params), moments), {"loss": value}

    return step, (SMALL, jax.eval_shape(ADAM.init, SMALL), ROWS)


def with_gpt() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    config = GPTConfig(layers=2, hidden=128, heads=4, seq=64)
    return make_train_step(config), train_step_args(config, 32)


def with_train_state() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    from flax.training.train_state import TrainState

    def step(state: TrainState, x: Any) -> Any:
        value, grads = jax.value_and_grad(lambda p: state.apply_fn(p, x))(state.params)
        return state.apply_gradients(grads=grads), value

    create = lambda p: TrainState.create(apply_fn=lambda p, x: mlp(p, x)[1], params=p, tx=ADAM)
    return step, (jax.eval_shape(create, SMALL), ROWS)


def with_partition() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    import equinox as eqx

    model = eqx.filter_eval_shape(lambda: eqx.nn.MLP(64, 64, 64, 1, key=jax.random.key(0)))
    arrays, static = eqx.partition(model, lambda x: isinstance(x, jax.ShapeDtypeStruct))

    def step(arrays: Any, moments: Any, x: Any) -> Any:
        def loss(arrays: Any) -> Any:
            return jnp.mean(jax.vmap(eqx.combine(arrays, static))(x) ** 2)

        value, grads = jax.value_and_grad(loss)(arrays)
        updates, moments = ADAM.update(grads, moments, arrays)
        return jax.tree.map(jnp.add, updates, arrays), moments, value

    return step, (arrays, jax.eval_shape(ADAM.init, arrays), ROWS)


STEPS: dict[str, Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]] = {
    "mlp": lambda: (mlp, (SMALL, ROWS)),
    "adam": with_adam,
    "gpt": with_gpt,
    "flax": with_train_state,
    "equinox": with_partition,
}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(8,), (2, 4)], ids=str)
@pytest.mark.parametrize("name", STEPS)
def test_no_leaf_of_the_state_changes_its_sharding(name: str, mesh: tuple[int, ...]) -> None:
    step, args = STEPS[name]()
    state = tuple(range(len(args) - 1))
    seconds: list[float] = []
    for donated in ((), state):
        parallel = autopar.parallelize(
            step,
            cluster="cpu:8",
            mesh=mesh,
            donate_argnums=donated,
            batch_argnums=len(args) - 1,
            batch_axis="x",
            num_microbatches=1,
        )
        plan = parallel.plan(*args).data
        for a in plan.inputs:
            if not a.path.startswith(f"args[{len(args) - 1}]"):
                assert a.becomes >= 0
                assert a.spec == plan.outputs[a.becomes].spec, a.path
                assert a.donated_to == (a.becomes if donated else -1)
        assert plan.provenance.notes == ()
        seconds.append(plan.predictions.step_s)
    assert seconds[0] == pytest.approx(seconds[1], rel=1e-3), "the way back is free"


def test_what_the_way_back_takes_is_predicted() -> None:
    """Weights that are pinned apart go out as other products want them; tied, that has to be undone."""
    kept = autopar.parallelize(mlp, cluster="cpu:8", mesh=(8,), constraints={"args[0]*['w']": P("x")})
    free = autopar.parallelize(
        mlp, cluster="cpu:8", mesh=(8,), constraints={"args[0]*['w']": P("x"), "out[0]*['w']": P(None, "x")}
    )
    assert kept.plan(SMALL, ROWS).predictions.step_s != free.plan(SMALL, ROWS).predictions.step_s


@pytest.mark.parametrize("donated", [(), (0,)], ids=["kept", "donated"])
@pytest.mark.parametrize("side", ["args[0]", "out[0]"])
def test_a_pin_of_one_side_holds_for_both(side: str, donated: tuple[int, ...]) -> None:
    for pin in (P("x", None), P(None, "x"), P(None, None)):
        plan = autopar.parallelize(
            mlp, cluster="cpu:8", mesh=(8,), donate_argnums=donated, constraints={f"{side}[*]['w']": pin}
        ).plan(SMALL, ROWS)
        for specs in (plan.in_specs[0], plan.out_specs[0]):
            assert [layer["w"] for layer in specs] == [pin, pin]


def test_pins_that_differ_part_a_pair_that_is_not_donated() -> None:
    pins = {"args[0][0]['w']": P("x"), "out[0][0]['w']": P(None, "x")}
    plan = autopar.parallelize(mlp, cluster="cpu:8", mesh=(8,), constraints=pins, num_microbatches=1).plan(SMALL, ROWS)
    assert plan.in_specs[0][0]["w"] == P("x", None)
    assert plan.out_specs[0][0]["w"] == P(None, "x")
    assert plan.in_specs[0][1] == plan.out_specs[0][1]
    assert plan.provenance.notes == (
        "state: pinned apart from its new value, which is moved back unpredicted: args[0][0]['w']",
    )
    with pytest.raises(ShardingError, match="is donated to"):
        autopar.parallelize(mlp, cluster="cpu:8", mesh=(8,), donate_argnums=0, constraints=pins).plan(SMALL, ROWS)


def test_baselines_know_state_that_is_not_donated() -> None:
    """ZeRO-2 splits moments, donated or not."""
    step, args = with_adam()
    plans = [
        autopar.parallelize(
            step, cluster="cpu:8", mesh=(8,), donate_argnums=donated, batch_argnums=2, method="zero2"
        ).plan(*args)
        for donated in ((), (0, 1))
    ]
    assert plans[0].in_specs == plans[1].in_specs
    assert plans[0].in_specs[1][0].mu[0]["w"] == P("x", None)


def test_plans_show_state() -> None:
    plan = autopar.parallelize(mlp, cluster="cpu:8", mesh=(8,)).plan(SMALL, ROWS)
    rows = [line for line in section_text(plan.data, "args").splitlines() if "  args[" in line]
    assert all(line.endswith("state") for line in rows if "args[0]" in line)
    assert not any(line.endswith(("state", "donated")) for line in rows if "args[1]" in line)


# --- pipelines ---------------------------------------------------------------------------------------------------


def test_stages_have_pairs_of_what_is_not_donated() -> None:
    graph = layered(mlp, (SMALL, ROWS), layers=2).graph
    assert [(graph.arg_paths[a], graph.update.out_paths[j]) for a, j in graph.state] == [
        (f"args[0][{i}]['{name}']", f"out[0][{i}]['{name}']") for i in range(2) for name in ("b", "w")
    ]
    assert graph.donated == frozenset()
    donating = layered(mlp, (SMALL, ROWS), layers=2, donate_argnums=(0,)).graph
    assert (donating.state, donating.fingerprint) == (graph.state, graph.fingerprint)
    assert donating.donated == {a for a, _ in graph.state}


def test_pipelines_say_what_is_ambiguous() -> None:
    def step(params: Any, ema: Any, x: Any) -> Any:
        new, value = mlp(params, x)
        return new, jax.tree.map(lambda e, p: 0.9 * e + 0.1 * p, ema, new), value

    plan = autopar.parallelize(
        step, cluster="cpu:2", stages=2, submeshes=["1x1"], layers=2, workers=1, num_microbatches=2,
        batch_argnums=(2,), recompute="none",
    ).plan(SMALL, SMALL, ROWS)  # fmt: skip
    assert plan.data.provenance.notes[0].startswith("state: out[0] for the new args[0], out[1] for the new args[1]")
    assert "notes\n  - state: out[0]" in plan_text(plan.data)


def test_numpy_shapes_are_shapes() -> None:
    """A trace is of shapes, whatever arrays are given."""
    state = {"b": np.zeros(4, np.float32), "w": np.zeros((4, 4), np.float32)}
    assert found(lambda p, x: (moved(p), x.sum()), state, np.zeros((8, 4), np.float32)) == {"args[0]": "out[0]"}


# --- state that is changed in place ----------------------------------------------------------------------------------


class Counted(nnx.Module):
    """A product, the mean of what it is given, and how often it is called."""

    def __init__(self) -> None:
        self.product = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
        self.norm = nnx.BatchNorm(4, rngs=nnx.Rngs(0))

    def __call__(self, x: Any) -> Any:
        return self.norm(self.product(x))


def test_what_a_step_changes_in_a_module_and_does_not_return_is_warned_of() -> None:
    def lossy(model: Any, x: Any) -> Any:
        return model(x).sum()

    def partly(x: Any, *, model: Any) -> Any:
        return model(x).sum(), model.norm.mean

    def whole(model: Any, x: Any) -> Any:
        return model(x).sum(), nnx.state(model)

    def batch(batch: Any) -> Any:  # a dict is the step's own copy, which steps often fill in
        batch["x"] = batch["x"] / 2
        return batch["x"].sum()

    model, x = Counted(), jnp.ones((8, 4))
    with pytest.warns(
        AutoparWarning, match=r"lossy changes .* lost.*: args\[0\].norm.mean.value, .*norm.var.value\."
    ) as w:
        trace(lossy, model, x)
    assert w[0].filename == __file__
    with pytest.warns(AutoparWarning, match=r"lost, as under jax.jit: kwargs\['model'\].norm.var.value\. Return"):
        trace(partly, x, model=model)
    for step, args in ((whole, (model, x)), (batch, ({"x": x},))):
        trace(step, *args)  # a warning is an error
