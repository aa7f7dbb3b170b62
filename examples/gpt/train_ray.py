"""Train the GPT as a pipeline on a Ray cluster: plan for its hosts, print the plan, run it there.

    python -m examples.gpt.train_ray [--steps 60] [--stages 2] [--microbatches 4] [--cluster SPEC.json] …
    autopar run --hosts HOSTS -- -m examples.gpt.train_ray --cluster SPEC.json

By itself it starts Ray on this machine, with two workers of four CPU devices each; under `autopar run` it joins the
cluster that runs. Out: on stdout the plan, losses in nats per byte, the held-out loss.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import autopar
from autopar.ir.errors import AutoparError
from autopar.ir.presets import cluster_from_text
from examples.gpt.data import load_corpus, sample_batch
from examples.gpt.model import GPTConfig, init_state, loss_fn, make_train_step
from examples.gpt.train import VALIDATION_BATCHES

LOG_EVERY = 10  # steps between lines of log


def parse_flags(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Flags of the program; the defaults are those of `make gpt-ray`."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.gpt.train_ray", description=(__doc__ or "").split("\n")[0]
    )
    for name, default in (
        ("layers", 4), ("hidden", 128), ("heads", 4), ("seq", 64), ("steps", 60), ("batch", 32), ("microbatches", 4),
        ("seed", 0),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default, help="default %(default)s")
    parser.add_argument("--stages", type=int, help="default 2; 0: the planner chooses", default=2)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--text", type=Path, help="folder whose *.py are the text (default: the standard library)")
    parser.add_argument("--cluster", help="preset or ClusterSpec file (default: two hosts with four CPU devices each)")
    parser.add_argument("--plan-out", type=Path, default=Path("gpt_ray_plan.json"))
    return parser.parse_args(argv)


def two_hosts() -> autopar.ClusterSpec:
    """Two hosts of four CPU devices, with the preset's figures."""
    cluster = cluster_from_text("cpu:4")
    (group,) = cluster.groups
    return dataclasses.replace(cluster, name="2 x cpu:4", groups=(dataclasses.replace(group, hosts=2),))


def train(flags: argparse.Namespace) -> float:
    """Plans, trains, evaluates; returns the held-out loss in nats per byte."""
    config = GPTConfig(
        layers=flags.layers, hidden=flags.hidden, heads=flags.heads, seq=flags.seq, learning_rate=flags.learning_rate,
        warmup_steps=flags.steps // 10, total_steps=flags.steps,
    )  # fmt: skip
    corpus = load_corpus(flags.text)
    key = jax.random.key(flags.seed)
    create = lambda key: init_state(key, config)

    def next_batch(step: int) -> Any:
        return sample_batch(corpus.train, batch=flags.batch, seq=config.seq, seed=flags.seed, step=step)

    spec = two_hosts() if flags.cluster is None else cluster_from_text(flags.cluster)
    with autopar.init(spec=spec) as cluster:
        train_step = autopar.parallelize(
            make_train_step(config), cluster=cluster, stages=flags.stages or (1, None),
            num_microbatches=flags.microbatches, donate_argnums=0,
        )  # fmt: skip
        plan = train_step.plan(jax.eval_shape(create, key), next_batch(0))
        print(plan)
        plan.save(flags.plan_out)
        print(f"\nplan saved to {flags.plan_out}; read it with: autopar inspect {flags.plan_out}", flush=True)
        start_s = time.perf_counter()
        state = train_step.init(create, key)
        for step, batch in enumerate(train_step.loader(lambda start: map(next_batch, range(start, flags.steps)))):
            state, loss = train_step(state, batch)
            if step == 0:
                print(f"workers started, compiled and first step done in {time.perf_counter() - start_s:.1f} s")
                start_s = time.perf_counter()
            if step == 0 or (step + 1) % LOG_EVERY == 0:
                rate = step * flags.batch * config.seq / (time.perf_counter() - start_s)
                speed = f"  {rate:,.0f} tokens/s" if step else ""
                print(f"step {step + 1:5d}  loss {float(loss):.3f}{speed}", flush=True)
        params = jax.tree.map(np.asarray, state.params, is_leaf=lambda x: hasattr(x, "fetch"))
    evaluate = jax.jit(lambda params, batch: loss_fn(params, batch, config))
    losses: list[float] = []
    for i in range(VALIDATION_BATCHES):
        windows = sample_batch(corpus.held_out, batch=flags.batch, seq=config.seq, seed=flags.seed, step=i)
        losses.append(float(evaluate(params, windows)))
    return sum(losses) / len(losses)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. What the user can mend ends in one message and status 1; all else in a traceback."""
    flags = parse_flags(argv)
    try:
        held_out = train(flags)
    except (AutoparError, FileNotFoundError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"held-out loss {held_out:.3f} nats per byte")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
