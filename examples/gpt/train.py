"""Train the GPT on this Python's own source files: plan, print the plan, run it, save it.

    python -m examples.gpt.train [--steps 500] [--mesh 2x4] [--microbatches 4] [--layers 4] …

In: flags. Out: on stdout the plan, losses in nats per byte, tokens per second and a sampled continuation;
`gpt_plan.json`, which `autopar inspect` reads. Without an accelerator it runs on 8 virtual devices of this host's
CPU: they show that a plan is right, and nothing about speed.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import autopar
from autopar.ir.errors import AutoparError
from examples.gpt.data import load_corpus, sample_batch
from examples.gpt.model import GPTConfig, TrainState, forward, init_state, loss_fn, make_train_step

VALIDATION_BATCHES = 8
LOG_EVERY = 50  # steps between lines of log
TEMPERATURE = 0.7  # of the sampled continuation; guessed


def parse_flags(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Flags of the program; the defaults are those of `make gpt`."""
    parser = argparse.ArgumentParser(prog="python -m examples.gpt.train", description=(__doc__ or "").split("\n")[0])
    model = parser.add_argument_group("model")
    model.add_argument("--layers", type=int, default=2)
    model.add_argument("--hidden", type=int, default=128)
    model.add_argument("--heads", type=int, default=4)
    model.add_argument("--seq", type=int, default=64, help="context in bytes (default %(default)s)")
    model.add_argument("--dtype", default="float32", help="of activations: float32 or bfloat16")
    model.add_argument("--scan", action="store_true", help="scan over stacked layers instead of unrolling them")
    model.add_argument("--remat", action="store_true", help="recompute each block in the backward pass")
    model.add_argument("--dropout", type=float, default=0.0)
    training = parser.add_argument_group("training")
    training.add_argument("--steps", type=int, default=500)
    training.add_argument("--batch", type=int, default=32)
    training.add_argument("--learning-rate", type=float, default=3e-3)
    training.add_argument("--seed", type=int, default=0)
    training.add_argument("--text", type=Path, help="folder whose *.py are the text (default: the standard library)")
    planning = parser.add_argument_group("plan")
    planning.add_argument("--mesh", type=parse_mesh, help="logical mesh, as in 2x4 (default: the planner chooses)")
    planning.add_argument("--microbatches", type=int, default=1)
    planning.add_argument("--memory-gb", type=float, help="limit per device in 1e9 bytes")
    planning.add_argument("--method", default="auto", help="auto, data_parallel, zero2, zero3 or tensor_parallel")
    planning.add_argument("--plan-out", type=Path, default=Path("gpt_plan.json"))
    planning.add_argument("--host-devices", type=int, default=8, help="virtual CPU devices (default %(default)s)")
    flags = parser.parse_args(argv)
    for name in ("steps", "batch", "microbatches", "host_devices"):
        if getattr(flags, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(flags, name)}; it must be at least 1")
    return flags


def parse_mesh(text: str) -> tuple[int, ...]:
    """``"2x4"`` → ``(2, 4)``."""
    sizes = text.lower().split("x")
    if not all(size.isdecimal() and int(size) > 0 for size in sizes):
        raise argparse.ArgumentTypeError(f"{text!r} is no mesh; try 8, 2x4 or 2x2x2")
    return tuple(int(size) for size in sizes)


def use_host_devices(count: int) -> None:
    """Gives the CPU backend ``count`` devices, unless the environment says how many. Accelerators go first."""
    if "JAX_NUM_CPU_DEVICES" in os.environ or "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return
    jax.config.update("jax_num_cpu_devices", count)


def validation_loss(state: TrainState, text: Any, config: GPTConfig, *, batch: int, seed: int) -> float:
    """Mean loss over a fixed draw of held-out windows, by a plan of its own on the training plan's mesh."""
    evaluate = autopar.parallelize(lambda params, batch: loss_fn(params, batch, config), mesh=state.step.sharding.mesh)
    losses: list[float] = []
    for i in range(VALIDATION_BATCHES):
        windows = sample_batch(text, batch=batch, seq=config.seq, seed=seed, step=i)
        losses.append(float(evaluate(state.params, windows)))
    return sum(losses) / len(losses)


def sample_text(state: TrainState, config: GPTConfig, prompt: str, *, length: int, seed: int) -> str:
    """``prompt`` and ``length`` bytes that the model puts after it, with ``·`` for what no terminal should be sent.
    Runs on one device: one sequence is too little to split."""
    params = jax.device_put(jax.device_get(state.params), jax.local_devices()[0])
    logits_at = jax.jit(lambda params, window, last: forward(params, window, config)[0, last])
    random = np.random.default_rng(seed)
    text = list(prompt.encode())
    for _ in range(length):
        recent = text[-config.seq :]
        window = np.zeros((1, config.seq), np.int32)
        window[0, : len(recent)] = recent
        logits = np.asarray(logits_at(params, window, np.int32(len(recent) - 1)), np.float64) / TEMPERATURE
        chances = np.exp(logits - logits.max())
        text.append(int(random.choice(config.vocab, p=chances / chances.sum())))
    shown = bytes(text).decode(errors="replace")
    return "".join(c if c.isprintable() or c in "\n\t" else "·" for c in shown)


def config_of(flags: argparse.Namespace) -> GPTConfig:
    """The model that the flags describe; raises ValueError where its sizes do not fit together."""
    return GPTConfig(
        layers=flags.layers,
        hidden=flags.hidden,
        heads=flags.heads,
        seq=flags.seq,
        dtype=flags.dtype,
        scan=flags.scan,
        remat=flags.remat,
        dropout=flags.dropout,
        learning_rate=flags.learning_rate,
        warmup_steps=flags.steps // 10,
        total_steps=flags.steps,
    )


def train(flags: argparse.Namespace, config: GPTConfig) -> float:
    """Plans, trains, evaluates, samples; returns the held-out loss in nats per byte."""
    corpus = load_corpus(flags.text)
    key = jax.random.key(flags.seed)
    step_args = (jax.random.key(flags.seed + 1),) if config.dropout else ()

    def next_batch(step: int) -> Any:
        return sample_batch(corpus.train, batch=flags.batch, seq=config.seq, seed=flags.seed, step=step)

    train_step = autopar.parallelize(
        make_train_step(config),
        mesh=flags.mesh,
        memory_bytes=None if flags.memory_gb is None else int(flags.memory_gb * 1e9),
        num_microbatches=flags.microbatches,
        method=flags.method,
        donate_argnums=(0,),
    )
    shapes = jax.eval_shape(lambda key: init_state(key, config), key)
    plan = train_step.plan(shapes, next_batch(0), *step_args)
    print(plan)
    plan.save(flags.plan_out)
    print(f"\nplan saved to {flags.plan_out}; read it with: autopar inspect {flags.plan_out}")

    state = train_step.init(lambda key: init_state(key, config), key)
    count = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    print(
        f"\n{count:,} parameters, {corpus.train.size:,} bytes of text, {jax.device_count()} "
        f"{jax.devices()[0].platform} devices; {flags.steps} steps of {flags.batch} x {config.seq} bytes"
    )

    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}  {task.fields[rate]:,.0f} tokens/s"),
        TimeRemainingColumn(),
    )
    tokens_per_step = flags.batch * config.seq
    rate = 0.0
    with Progress(*columns) as progress:
        task = progress.add_task("training", total=flags.steps, loss=math.nan, rate=0.0)
        start_s = time.perf_counter()
        for step in range(flags.steps):
            state, loss = train_step(state, next_batch(step), *step_args)
            loss = float(loss)
            if not math.isfinite(loss):
                raise SystemExit(f"step {step}: loss is {loss}; try a smaller --learning-rate")
            if step == 0:
                progress.console.print(f"compiled and first step done in {time.perf_counter() - start_s:.1f} s")
                start_s = time.perf_counter()
            else:
                rate = step * tokens_per_step / (time.perf_counter() - start_s)
            progress.update(task, advance=1, loss=loss, rate=rate)
            if step == 0 or (step + 1) % LOG_EVERY == 0:
                line = f"step {step + 1:5d}  loss {loss:.3f}" + (f"  {rate:,.0f} tokens/s" if rate else "")
                progress.console.print(line, highlight=False)

    held_out = validation_loss(state, corpus.held_out, config, batch=flags.batch, seed=flags.seed)
    print(f"\nheld-out loss {held_out:.3f} nats per byte ({held_out / math.log(2):.2f} bits)")
    print(f"sample:\n{sample_text(state, config, 'def ', length=160, seed=flags.seed)}")
    return held_out


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. What the user can mend ends in one message and status 1; all else in a traceback."""
    flags = parse_flags(argv)
    try:
        config = config_of(flags)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    use_host_devices(flags.host_devices)
    try:
        train(flags, config)
    except (AutoparError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
