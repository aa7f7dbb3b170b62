"""Eight CPU devices for every test, programs that compile fast, properties that nobody times, and the option that
rewrites golden files.

On a machine with an accelerator, AUTOPAR_TEST_PLATFORM=cuda has tests use that; of few is it known that they can
(``tests/cpu8/test_transports.py -k jax_transfer``).
"""

from __future__ import annotations

import os
from importlib.metadata import version

import pytest

try:
    from hypothesis import HealthCheck, settings
except ModuleNotFoundError:  # tests/ecosystem needs none
    pass
else:  # no test is timed: a busy machine takes its time
    settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("untimed")

os.environ["JAX_PLATFORMS"] = os.environ.get("AUTOPAR_TEST_PLATFORM", "cpu")
os.environ["JAX_NUM_CPU_DEVICES"] = "8"
FLAGS = [
    # XLA aborts the process when a device waits long for the others in a collective. On a busy machine that is no
    # deadlock; what is one, pytest's timeout ends.
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=600",
    "--xla_cpu_collective_call_terminate_timeout_seconds=1200",
    "--xla_cpu_collective_timeout_seconds=1200",
    # Programs run a few times: the same partitioning and collectives, machine code in less than half the time.
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
]
if version("jax").startswith("0.10."):
    FLAGS.append("--xla_cpu_use_fusion_emitters=false")
os.environ["XLA_FLAGS"] = " ".join((*FLAGS, os.environ.get("XLA_FLAGS", "")))  # the user's are read last, and win


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--regen-goldens", action="store_true", help="rewrite tests/golden/* (review the difference)")


@pytest.fixture
def regen_goldens(request: pytest.FixtureRequest) -> bool:
    """True where golden files are to be rewritten."""
    return bool(request.config.getoption("--regen-goldens"))
