"""Settings of JAX that workers get: what tracing depends on, and the persistent compilation cache, with what came of
it (`Programs`).

A gang that starts anew after a failure, or runs the same step another day, reads its programs instead of compiling
them. JAX's keys have the program, its options, jaxlib's version and the devices, of CPUs the features that XLA compiles
for too (seen: another key under ``--xla_cpu_max_isa``), so hosts may share a folder.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import jax

from autopar.ir import files
from autopar.ir.errors import ClusterError
from autopar.jax_compat import trace_settings

_ENABLED, _FOLDER = "jax_enable_compilation_cache", "jax_compilation_cache_dir"
_LEAST_S, _LEAST_BYTES = "jax_persistent_cache_min_compile_time_secs", "jax_persistent_cache_min_entry_size_bytes"
_HANDED = (_ENABLED, _FOLDER, _LEAST_S, _LEAST_BYTES, "jax_compilation_cache_max_size")
LEAST_S = 0.1
"""What takes longer to compile is kept, where the user's JAX does not say (chosen: a gang has many small programs, for
which JAX's 1 s would keep nothing)."""


def settings(folder: str | os.PathLike[str] | bool | None) -> dict[str, Any]:
    """JAX's settings for workers: this process's, of this moment, that tracing depends on, and the cache's.

    Args:
        folder: where programs are kept; False: nowhere; True: in `default_folder`; None: as this process's JAX is set,
            or, where that says nothing, in `default_folder`.
    """
    mine = {**dict(trace_settings()), **{name: getattr(jax.config, name) for name in _HANDED}}
    if folder is None and (not mine[_ENABLED] or mine[_FOLDER]):
        return mine
    if folder is False:
        return {**mine, _ENABLED: False}
    chosen = default_folder() if folder is None or folder is True else os.fspath(folder)
    return {**mine, _ENABLED: True, _FOLDER: chosen, _LEAST_S: LEAST_S}


def default_folder() -> str:
    """The user's cache folder for programs; a ``~`` in it is that of whichever host reads it."""
    return os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache"), "autopar", "jax")


class Programs:
    """Sets this process's JAX so, which has to be before it compiles anything, and counts from then on.

    Attributes:
        read: programs that came from the cache.
        asked: those that could have.
    """

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.read = self.asked = 0
        self._folder = os.path.expanduser(given.get(_FOLDER) or "") if given.get(_ENABLED) else ""
        for name, value in given.items():
            jax.config.update(name, os.path.expanduser(value) if name == _FOLDER and value else value)
        jax.monitoring.register_event_listener(self._heard)

    def check(self) -> None:
        """Raises ClusterError where others can put programs into the folder, which would run here."""
        if self._folder and "://" not in self._folder and (why := files.open_to_others(self._folder)):
            raise ClusterError(
                f"compilation cache: {why}, and what is there is run. Give a folder of your own, or False"
            )

    def _heard(self, event: str, **_: Any) -> None:
        self.read += event == "/jax/compilation_cache/cache_hits"
        self.asked += event == "/jax/compilation_cache/compile_requests_use_cache"
