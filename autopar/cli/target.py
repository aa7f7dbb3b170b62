"""TARGET on the command line → a train step and its arguments.

``module:function`` or ``file.py:function``; the function takes keywords (``--set key=value``, values read
as Python literals, else as text) and returns ``(train_step, args)`` with ShapeDtypeStructs or arrays.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from numbers import Integral
from pathlib import Path
from types import ModuleType
from typing import Any

from autopar.ir.errors import AutoparError


class TargetError(AutoparError):
    """TARGET or --set does not lead to a train step and its arguments."""


def keywords_from_texts(texts: Sequence[str]) -> dict[str, Any]:
    """Keywords from texts: ``["layers=4", "name=gpt"]`` → ``{"layers": 4, "name": "gpt"}``. Raises TargetError for a
    text without key and value, and for a key given twice."""
    out: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.isidentifier():
            raise TargetError(f"--set {text!r}: write key=value, for example --set layers=4")
        if key in out:
            raise TargetError(f"--set gives {key!r} twice")
        try:
            out[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            out[key] = value
    return out


def load_function(target: str) -> Callable[..., Any]:
    """The function that ``target`` names, ``module:function`` or ``file.py:function``. Raises TargetError where there
    is none."""
    place, colon, name = target.rpartition(":")
    if not colon or not place or not name:
        raise TargetError(f"target {target!r}: write module:function or file.py:function")
    module = _module_from_file(target, Path(place)) if place.endswith(".py") else _module_by_name(target, place)
    function = getattr(module, name, None)
    if not callable(function):
        mine = [k for k, v in vars(module).items() if _is_public(k, v) and v.__module__ == module.__name__]
        found = f"it has {', '.join(mine)}" if mine else "it defines no public functions"
        problem = "is not a function" if hasattr(module, name) else "does not exist"
        raise TargetError(f"target {target!r}: {name!r} {problem} in {place}; {found}")
    return function


def _is_public(name: str, value: Any) -> bool:
    """True for what TARGET may name: functions and other callable objects, classes and private ones aside."""
    return callable(value) and not name.startswith("_") and not inspect.isclass(value) and hasattr(value, "__module__")


def _module_by_name(target: str, name: str) -> ModuleType:
    if "" not in sys.path and (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ImportError as fault:
        raise TargetError(_import_problem(target, name, fault)) from fault
    except (SyntaxError, TypeError) as fault:
        if isinstance(fault, TypeError) and not name.startswith("."):
            raise  # the module's own
        raise TargetError(f"target {target!r}: cannot import {name}: {fault}") from fault


def _module_from_file(target: str, path: Path) -> ModuleType:
    if not path.is_file():
        raise TargetError(f"target {target!r}: there is no file {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except ImportError as fault:
        raise TargetError(_import_problem(target, path.stem, fault)) from fault
    except SyntaxError as fault:
        raise TargetError(f"target {target!r}: cannot read {path}: {fault}") from fault
    return module


def _import_problem(target: str, name: str, fault: ImportError) -> str:
    if isinstance(fault, ModuleNotFoundError) and fault.name and (name + ".").startswith(fault.name + "."):
        return f"target {target!r}: there is no module {fault.name!r} (looked in the current folder and sys.path)"
    return f"target {target!r}: importing {name} failed: {fault}"


def step_and_args(target: str, keywords: dict[str, Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Calls the function that ``target`` names. Raises TargetError unless it takes ``keywords`` and returns
    (train_step, args); what the function itself raises passes through."""
    function = load_function(target)
    signature = inspect.signature(function)
    try:
        signature.bind(**keywords)
    except TypeError as fault:
        raise TargetError(
            f"target {target!r}: {fault}. It is {function.__name__}{signature}; give keywords by --set key=value"
        ) from None
    result = function(**keywords)
    if not (isinstance(result, tuple) and len(result) == 2 and callable(result[0])):
        raise TargetError(f"target {target!r} must return (train_step, args), got {_kind(result)}")
    step, args = result
    if not isinstance(args, tuple | list):
        raise TargetError(f"target {target!r}: args must be a tuple of the step's arguments, got {_kind(args)}")
    _check_shapes(target, args)
    return step, tuple(args)


def _check_shapes(target: str, args: Any) -> None:
    """Raises TargetError where a shape in ``args`` is none."""
    import jax  # here: a plan that is planned again needs none

    for path, leaf in jax.tree_util.tree_leaves_with_path(args):
        shape = getattr(leaf, "shape", ())
        if any(not isinstance(size, Integral) or size < 0 for size in shape):
            where = jax.tree_util.keystr(path)
            raise TargetError(f"target {target!r}: args{where} has the shape {shape}: expected whole numbers from 0 on")


def _kind(value: Any) -> str:
    if isinstance(value, tuple):
        return f"a tuple of ({', '.join(type(v).__name__ for v in value)})"
    return f"a {type(value).__name__}"
