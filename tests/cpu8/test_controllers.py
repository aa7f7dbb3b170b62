"""Plans of one mesh under the user's own `jax.distributed`, without Ray."""

from __future__ import annotations

import pytest

from tests.checkpoints import run_processes


@pytest.mark.slow
def test_two_processes_train_with_one_plan() -> None:
    """Two devices each, gloo between them."""
    for status, out, errors in run_processes("tests.cpu8.two_controllers", 2, timeout_s=400):
        assert status == 0 and out.endswith("done\n"), errors  # gloo writes there too
