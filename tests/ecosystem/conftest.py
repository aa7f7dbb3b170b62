"""Collects nothing where the packages are not installed (`pip install -e '.[ecosystem]'`)."""

from __future__ import annotations

import importlib.util
import os

os.environ["KERAS_BACKEND"] = "jax"

collect_ignore_glob = [] if importlib.util.find_spec("diffrax") else ["test_*.py"]
