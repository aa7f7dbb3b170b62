"""What the fork server imports before processes that make `layer_layouts.tables` come from it (`workers.expect`).

A terminal's Ctrl-C is for the process that asks, and is left alone meanwhile.
"""

import signal
from contextlib import suppress
from importlib import import_module

_before = signal.signal(signal.SIGINT, signal.SIG_IGN)
import_module("autopar.inter_op.layer_layouts")
with suppress(ImportError):  # numba is not installed everywhere
    import_module("autopar.intra_op.solvers.kernels")
signal.signal(signal.SIGINT, _before)
