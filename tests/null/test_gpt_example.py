"""The GPT example as far as it needs no device: shapes, dtypes, data, flags. Its numbers are tested on 8 devices."""

import argparse
import math
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from examples.gpt import data, train
from examples.gpt.model import Batch, GPTConfig, init_params, loss_fn, make_train_step, plan_target, train_step_args

SMALL = {"layers": 3, "hidden": 16, "heads": 2, "seq": 8, "vocab": 32}


def _params(**changes):
    config = GPTConfig(**(SMALL | changes))
    return jax.eval_shape(lambda: init_params(jax.random.key(0), config))


def _num_parameters(params):
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


def _primitives(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name
        for sub in jaxprs_in_params(eqn.params):
            yield from _primitives(sub)


def _loss_primitives(**changes):
    config = GPTConfig(**(SMALL | changes))
    state, batch, *key = train_step_args(config, 4)
    traced = jax.make_jaxpr(lambda params, batch, key: loss_fn(params, batch, config, key))(
        state.params, batch, key[0] if key else None
    )
    return list(_primitives(traced.jaxpr))


def test_number_of_parameters_is_that_of_the_formula():
    d, layers, vocab, seq = SMALL["hidden"], SMALL["layers"], SMALL["vocab"], SMALL["seq"]
    block = 4 * d * d + 2 * 4 * d * d + 4 * d + d + 2 * 2 * d
    expected = vocab * d + seq * d + 2 * d + layers * block
    assert _num_parameters(_params()) == expected
    assert _num_parameters(_params(scan=True)) == expected
    assert _num_parameters(_params(tied=False)) == expected + vocab * d


def test_scan_stacks_what_unrolled_lists():
    unrolled, stacked = _params()["blocks"], _params(scan=True)["blocks"]
    assert len(unrolled) == SMALL["layers"]
    assert jax.tree.map(lambda leaf: (SMALL["layers"], *leaf.shape), unrolled[0]) == jax.tree.map(
        lambda leaf: leaf.shape, stacked
    )


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_program_has_the_parts_that_the_flags_ask_for(scan, remat, dropout):
    names = _loss_primitives(scan=scan, remat=remat, dropout=dropout)
    assert names.count("scan") == scan
    assert names.count("remat2") + names.count("checkpoint") == remat * (1 if scan else SMALL["layers"])
    draws = names.count("random_bits")
    assert draws == (dropout > 0) * (1 + 2 * (1 if scan else SMALL["layers"]))


@pytest.mark.parametrize("changes", [{}, {"scan": True}, {"remat": True}, {"dropout": 0.1}, {"tied": False}])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_step_returns_a_state_like_the_one_it_took(changes, dtype):
    config = GPTConfig(**SMALL, dtype=dtype, total_steps=10, **changes)
    args = train_step_args(config, 4)
    state, loss = jax.eval_shape(make_train_step(config), *args)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), args[0]
    )
    assert (loss.shape, loss.dtype) == ((), jnp.float32)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(state.params))


def test_matrix_products_take_the_compute_dtype():
    config = GPTConfig(**SMALL, dtype="bfloat16")
    state, batch = train_step_args(config, 4)
    jaxpr = jax.make_jaxpr(lambda params, batch: loss_fn(params, batch, config))(state.params, batch).jaxpr

    def products(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "dot_general":
                yield {v.aval.dtype for v in eqn.invars}
            for sub in jaxprs_in_params(eqn.params):
                yield from products(sub)

    found = list(products(jaxpr))
    assert len(found) == 8 * SMALL["layers"] + 1
    assert all(dtypes == {jnp.dtype("bfloat16")} for dtypes in found)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"hidden": 128, "heads": 3}, "hidden is 128, which 3 heads do not divide; try hidden=126"),
        ({"dropout": 1.0}, r"dropout is 1.0; it must be in \[0, 1\)"),
        ({"layers": 0}, "layers is 0; it must be an int of at least 1"),
        ({"scan": "false"}, "scan is 'false'; it must be True or False"),
        ({"warmup_steps": 5, "total_steps": 5}, r"warmup_steps is 5; it must be in \[0, total_steps=5\)"),
    ],
)
def test_config_refuses_what_does_not_fit(changes, text):
    with pytest.raises(ValueError, match=text):
        GPTConfig(**changes)


def test_dropout_without_a_key_is_refused():
    config = GPTConfig(**SMALL, dropout=0.1)
    state, batch, _ = train_step_args(config, 4)
    with pytest.raises(ValueError, match=r"train_step got no key, and GPTConfig.dropout is 0.1"):
        jax.eval_shape(make_train_step(config), state, batch)


@pytest.mark.slow
def test_plan_target_gives_shapes_and_starts_no_backend():
    step, args = plan_target(layers=2, hidden=32, heads=4, seq=16, vocab=64, batch=8, dropout=0.1)
    assert callable(step)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(args))
    assert isinstance(args[1], Batch)
    assert args[1].inputs.shape == (8, 16)
    program = (
        "import jax, jax._src.xla_bridge as bridge\n"
        "from examples.gpt.model import plan_target\n"
        "step, args = plan_target(layers=2, dropout=0.1)\n"
        "jax.jit(step.__wrapped__).trace(*args)\n"
        "raise SystemExit(bridge.backends_are_initialized())\n"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[2]).returncode == 0


@pytest.fixture
def folder(tmp_path):
    for i in range(20):
        (tmp_path / f"m{i:02}.py").write_bytes(bytes([i]) * 20_000)
    (tmp_path / "not_python.txt").write_bytes(b"\xff" * 50)
    return tmp_path


def test_corpus_holds_out_whole_files(folder):
    corpus = data.load_corpus(folder)
    assert set(np.unique(corpus.held_out)) == {15}
    assert set(np.unique(corpus.train)) == set(range(20)) - {15}
    assert corpus.train.size + corpus.held_out.size == 20 * 20_000


def test_corpus_of_few_files_holds_out_the_last(tmp_path):
    for i in range(3):
        (tmp_path / f"{i}.py").write_bytes(bytes([i]) * 100_000)
    corpus = data.load_corpus(tmp_path)
    assert set(np.unique(corpus.held_out)) == {2}
    assert set(np.unique(corpus.train)) == {0, 1}


def test_corpus_too_small_is_refused(tmp_path):
    (tmp_path / "a.py").write_text("x = 1\n")
    with pytest.raises(FileNotFoundError, match=r"holds 1 files \*.py of 6 bytes together, expected at least two"):
        data.load_corpus(tmp_path)


def test_standard_library_is_enough_text():
    corpus = data.load_corpus()
    assert corpus.train.size > 1_000_000
    assert corpus.held_out.size > 50_000


def test_batches_are_windows_and_depend_on_seed_and_step():
    text = (np.arange(5_000) % 251).astype(np.uint8)
    batch = data.sample_batch(text, batch=6, seq=16, seed=1, step=2)
    assert (batch.inputs.shape, batch.inputs.dtype) == ((6, 16), np.int32)
    np.testing.assert_array_equal(batch.inputs[:, 1:], batch.targets[:, :-1])
    np.testing.assert_array_equal((batch.inputs + 1) % 251, batch.targets)
    again = data.sample_batch(text, batch=6, seq=16, seed=1, step=2)
    np.testing.assert_array_equal(batch.inputs, again.inputs)
    for seed, step in ((1, 3), (2, 2)):
        other = data.sample_batch(text, batch=6, seq=16, seed=seed, step=step)
        assert not np.array_equal(batch.inputs, other.inputs)


def test_flags_of_make_gpt_fit_together():
    flags = train.parse_flags([])
    config = train.config_of(flags)
    assert flags.mesh is None
    assert flags.plan_out == Path("gpt_plan.json")
    assert config.warmup_steps < config.total_steps == flags.steps


def test_mesh_flag():
    assert train.parse_flags(["--mesh", "2x4"]).mesh == (2, 4)
    assert train.parse_mesh("8") == (8,)
    for text in ("2xx3", "0x4", "", "2x-4"):
        with pytest.raises(argparse.ArgumentTypeError, match="is no mesh; try 8, 2x4 or 2x2x2"):
            train.parse_mesh(text)


def test_bad_flags_end_in_one_message(capsys):
    assert train.main(["--heads", "3"]) == 1
    assert capsys.readouterr().err == ("error: GPTConfig.hidden is 128, which 3 heads do not divide; try hidden=126\n")
    with pytest.raises(SystemExit):
        train.parse_flags(["--steps", "0"])
    assert "--steps is 0; it must be at least 1" in capsys.readouterr().err
