"""`run_elastic`: a train loop that outlives its workers.

Each start plans for the devices that are there, compiles, and restores the last complete checkpoint, or makes the
state where there is none. Then the loop goes on from the checkpoint's step until all steps are done. A worker that
dies, fails or does not answer within its deadline (`WorkerError`) ends the start; nothing of it is used again but what
was saved.

A checkpoint's number is how many steps its state has seen, and the batch of step i is asked for by i. So the steps
after a restart are those that an undisturbed run would have done, up to rounding where another plan runs them.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import jax

from autopar.checkpoint import Save, latest, own, restore, save
from autopar.checkpoint.restoring import agreed_step
from autopar.elastic.start import Shapes, Starter
from autopar.ir.cluster import ClusterSpec
from autopar.ir.errors import CheckpointError, DataError, NoRoomError, OptionError, WorkerError
from autopar.processes import processes
from autopar.runtime.on_ray.ray_cluster import Cluster
from autopar.step.step import Step

log = logging.getLogger("autopar")


def run_elastic(
    train_step: Callable[..., Any],
    init_fn: Callable[[], Any],
    batch_at: Callable[[int], Any],
    *,
    steps: int,
    path: str | os.PathLike[str],
    save_every: int = 100,
    keep: int | None = 3,
    max_restarts: int = 3,
    on_step: Callable[[int, Any], None] | None = None,
    cluster: ClusterSpec | Cluster | str | None = None,
    plan_for: Callable[[], ClusterSpec] | None = None,
    deadline_s: float | None = None,
    draw_on_hosts: bool = False,
    take_over: bool = False,
    **options: Any,
) -> Any:
    """Trains for ``steps`` steps, from the last checkpoint under ``path`` where there is one, and starts again from the
    last one whenever a worker fails.

    Args:
        train_step: ``train_step(state, batch) -> (state, metrics)``, as it runs on one device.
        init_fn: makes the state, without arguments, as the step wants it; it is traced by JAX.
        batch_at: the batch of step i, from 0; the same whenever it is asked for the same i.
        steps: how many, counted from the run's first start.
        path: root of the checkpoints (`autopar.save`), whose pytree is the state. All hosts have to see it.
        save_every: a checkpoint is begun after so many steps, and written beside the next ones; the last step's is
            always written.
        keep: how many checkpoints stay; None: all.
        max_restarts: so many in a row without a new checkpoint; the next failure is raised.
        on_step: called with i and the step's metrics after step i; again for steps that are done again.
        cluster: as `autopar.parallelize` takes it: what `autopar.init` returned, or ``"ray"``, for workers on that
            cluster, of which hosts that it has lost since the first start are left out; or what to plan for on devices
            of this process.
        plan_for: asked at each start what to plan for, where ``cluster`` does not say it.
        deadline_s: on Ray, seconds for one step; later it counts as failed.
        draw_on_hosts: on Ray, workers ask ``batch_at`` themselves, ahead of the step, for what they read; it is sent to
            them by cloudpickle (`Step.loader`).
        take_over: True: a driver of another host that saved under ``path`` and left without a word (a lost machine, a
            job that was killed) is known to be gone. One that lives is refused whatever this says.
        options: `autopar.parallelize`'s; of those, ``donate_argnums`` is 0 unless it is given.

    Returns:
        The state after the last step. On Ray it lies on the workers, which live as long as any of it.

    Raises:
        WorkerError: the last failure, after ``max_restarts``.
        NoRoomError: the cluster has no room at first, or still none after ``max_restarts``.
        CheckpointError: a checkpoint could not be written, is damaged, or is not one of this state (names the leaf), is
            newer than ``steps``, or another driver owns ``path``.
        DataError: ``batch_at`` came to its end before ``steps``; the state until then is saved, where one process runs.
        OptionError: ``train_step`` is parallelized already, a number is none, or an option is none.
        AutoparError: what else `parallelize` and `Step.plan` raise.
    """
    if isinstance(train_step, Step):
        raise OptionError("train_step: give the plain function, and parallelize's options beside it")
    for name, value, least in (("steps", steps, 0), ("save_every", save_every, 1), ("max_restarts", max_restarts, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise OptionError(f"{name}: {value!r}; expected a number of {least} or more")
    options.setdefault("donate_argnums", 0)
    shapes = Shapes(train_step, jax.eval_shape(init_fn), jax.tree.map(_shape, batch_at(0)))
    starter = Starter(shapes, cluster, plan_for, deadline_s, options)
    if draw_on_hosts and not starter.on_ray:
        raise OptionError(
            "draw_on_hosts: only steps on a Ray have other hosts; give cluster= what autopar.init returned"
        )
    loop = _Loop(init_fn, batch_at, steps, Path(path), save_every, keep, on_step, draw_on_hosts, take_over)
    restarts, failed_s, known = 0, None, latest(path)
    while True:
        running: Step[..., Any] | None = None
        try:
            running = starter.start()
            return loop.run(running, failed_s)
        except (WorkerError, NoRoomError) as error:
            if isinstance(error, NoRoomError) and failed_s is None:
                raise  # there never was
            failed_s = time.monotonic()
            if running is not None:
                running.close()
            loop.settle()
            now = latest(path)
            if now != known:
                restarts, known = 0, now
            restarts += 1
            if restarts > max_restarts:
                error.add_note(f"{restarts} failures without a new checkpoint (max_restarts={max_restarts})")
                raise
            where = "the start" if now is None else f"step {now}"
            log.warning("autopar: %s; restart %d of %d, from %s", error, restarts, max_restarts, where)
        except BaseException as error:
            try:
                if isinstance(error, Exception):  # an interrupt does not wait for a save
                    loop.settle()
            finally:
                if running is not None:
                    running.close()
            raise


class _Loop:
    """What the starts have in common."""

    def __init__(
        self, init_fn: Callable[[], Any], batch_at: Callable[[int], Any], steps: int, path: Path, save_every: int,
        keep: int | None, on_step: Callable[[int, Any], None] | None, draw_on_hosts: bool, take_over: bool,
    ) -> None:  # fmt: skip
        self.init_fn, self.batch_at, self.steps, self.path = init_fn, batch_at, steps, path
        self.save_every, self.keep, self.on_step, self.draw_on_hosts = save_every, keep, on_step, draw_on_hosts
        self.take_over = take_over
        self.last: Save | None = None

    def run(self, running: Step[..., Any], failed_s: float | None) -> Any:
        """Trains from the last checkpoint to the end. ``failed_s``: when the start before failed, of
        `time.monotonic`."""
        at = agreed_step(self.path, self._first)
        if at is None:
            at, state = 0, running.init(self.init_fn)
        else:
            state = restore(self.path, running.abstract(self.init_fn), step=at)
        if failed_s is not None:
            log.warning("autopar: goes on from step %d after %.1f s", at, time.monotonic() - failed_s)
        source = partial(_batches, self.batch_at, self.steps)
        with running.loader(source, start=at) if self.draw_on_hosts else nullcontext(source(at)) as batches:
            for i in range(at, self.steps):
                try:
                    batch = next(batches)
                except (DataError, StopIteration) as error:
                    if processes().count == 1 and i > at and i % self.save_every:
                        save(self.path, state, step=i, keep=self.keep).wait()
                    if isinstance(error, DataError):
                        raise
                    raise DataError(f"batch {i}: there is none, {self.steps} steps are asked for") from None
                state, metrics = running(state, batch)
                if self.on_step is not None:
                    self.on_step(i, metrics)
                if (i + 1) % self.save_every == 0 or i + 1 == self.steps:
                    self.last = save(self.path, state, step=i + 1, keep=self.keep)
        if self.last is not None:
            self.last.wait()
        return state

    def _first(self) -> int | None:
        """The step to go on from, of a root that is this driver's. Raises CheckpointError where it is another's, or is
        further than this run is to go."""
        own(self.path, take_over=self.take_over)
        found = latest(self.path)
        if found is not None and found > self.steps:
            raise CheckpointError(
                f"{self.path}: has a checkpoint of step {found}, and steps={self.steps} ends before it. Give another "
                f"path or more steps, or remove it: autopar.checkpoint.delete(path, {found})"
            )
        return found

    def settle(self) -> None:
        """Waits for a save that was under way when a worker failed: it may have been complete, or fails now."""
        if self.last is not None:
            try:
                self.last.wait()
            except Exception as error:  # noqa: BLE001 - the worker's failure is what is raised
                log.warning("autopar: the save that was under way failed: %s", error)


def _batches(batch_at: Callable[[int], Any], stop: int, start: int) -> Iterator[Any]:
    """Raises DataError where ``batch_at`` ends before ``stop``: an iterator in it would end the loop without a word."""
    for i in range(start, stop):
        try:
            batch = batch_at(i)
        except StopIteration:
            raise DataError(f"batch {i}: batch_at raised StopIteration, and {stop} steps are asked for") from None
        yield batch


def _shape(x: Any) -> jax.ShapeDtypeStruct:
    x = x if hasattr(x, "dtype") else jax.numpy.asarray(x)
    return jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype, allow_extended_dtype=True))
