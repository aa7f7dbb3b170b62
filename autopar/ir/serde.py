"""The JSON codec of `ir`: frozen dataclasses in, text out, and back.

A value is written and read by its declared type, never by what happens to be there: dataclasses are objects
with exactly their fields, tuples are arrays, Literals and numbers are checked. An unknown key, a missing key
(but of fields that say `cluster.MAY_LACK`, for files that people wrote before there were these) or a value of
another type is an error that names its place (``$.sharding.mesh.axes[0].size``).
In a union of several dataclasses each object carries its class name under ``type``. Numbers are finite:
JSON has no infinity. An int where a float is declared is written as a float; a bool is never a number.
Graphs are written in a form of their own, with what occurs often once (`stored_graph`).

`save_plan` replaces its file in one step, so that a failed write leaves the old one; `load_plan` checks
what it read, also for agreement between its parts (`Plan.verify`). `digest` leaves out wall times.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeGuard, TypeVar, Union, cast

from autopar.ir import files
from autopar.ir.cluster import MAY_LACK
from autopar.ir.errors import ClusterError, PlanFormatError, VerifyError
from autopar.ir.graph import Graph
from autopar.ir.layers import LayeredGraph
from autopar.ir.plan import SCHEMA_VERSION, OneProgram, Plan
from autopar.ir.stored_graph import StoredLayers, StoredWhole, graph_of, layers_of, stored, stored_layers

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")
Scalar = TypeVar("Scalar", bound="None | bool | int | str")
A = TypeVar("A")
B = TypeVar("B")
JsonData: TypeAlias = "None | bool | int | float | str | list[JsonData] | dict[str, JsonData]"
"""JSON's types, as the json module reads them."""


@dataclasses.dataclass(frozen=True, slots=True)
class Codec:
    """How values of one declared type are written and read. Both functions raise `_Misfit` for what is not of it."""

    encode: Callable[[object], JsonData]
    decode: Callable[[JsonData], object]


class _Misfit(Exception):
    """A value of the wrong type; ``path`` grows from the inside outwards."""

    def __init__(self, expected: str, got: object, *path: str):
        super().__init__(expected)
        self.expected, self.path = expected, list(path)
        self.got = _cut(json.dumps(got) if isinstance(got, str | int | float | bool | None) else type(got).__name__)

    def at(self, segment: str) -> _Misfit:
        """The same, one level further out."""
        self.path.append(segment)
        return self

    def __str__(self) -> str:
        return f"${''.join(map(_cut, reversed(self.path)))}: expected {self.expected}, got {self.got}"


def _cut(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."


class _Contradiction(_Misfit):
    """No value of a wrong type: one that contradicts itself, or that is missing, as ``fault`` says."""

    def __init__(self, fault: VerifyError):
        super().__init__("", None)
        self.fault = fault

    def __str__(self) -> str:
        return f"${''.join(reversed(self.path))}: {self.fault}"


def to_json(value: DataclassInstance) -> str:
    """``value`` (a dataclass of `ir`) as compact JSON, fields in declared order. Raises VerifyError where a
    field's value is not of its declared type or a number is not finite."""
    return json.dumps(encode(value), separators=(",", ":"), allow_nan=False)


def from_json(cls: type[T], text: str) -> T:
    """The ``cls`` that `to_json` wrote. Raises PlanFormatError, which names the place of the first fault."""
    return decode(cls, parse(text))


def encode(value: DataclassInstance) -> dict[str, JsonData]:
    """``value`` (a dataclass of `ir`) as JSON's types. Raises VerifyError as `to_json` does."""
    try:
        return _object(_codec(value.__class__).encode(value))
    except _Misfit as fault:
        raise VerifyError(f"{value.__class__.__name__} cannot be written: {fault}") from None


def decode(cls: type[T], data: JsonData) -> T:
    """The ``cls`` that `encode` gave. Raises PlanFormatError, which names the place of the first fault, and where it is
    nested too deeply."""
    try:
        return cast(T, _codec(cls).decode(data))
    except _Misfit as fault:
        raise PlanFormatError(str(fault)) from None
    except RecursionError:
        raise PlanFormatError("nested too deeply") from None


def parse(text: str) -> JsonData:
    """JSON text as JSON's types. Raises PlanFormatError where it is damaged, holds an infinity or NaN, or is nested too
    deeply."""

    try:
        return cast(JsonData, files.parsed(text))
    except files.DamagedError as fault:
        raise PlanFormatError(str(fault)) from None


# One codec per type form ------------------------------------------------------------------------------


@cache
def _codec(tp: object) -> Codec:
    origin, args = typing.get_origin(tp), typing.get_args(tp)
    if tp is Graph:
        return _stored_codec(StoredWhole, stored, graph_of)
    if tp is LayeredGraph:
        return _stored_codec(StoredLayers, stored_layers, layers_of)
    if _is_dataclass(tp):
        return _dataclass_codec(tp)
    if tp in _SCALARS:
        return _SCALARS[tp]
    if tp is Any:
        return Codec(_plain_encode, _plain_decode)
    if origin is tuple:
        return _array_codec(args[0]) if args[1:] == (Ellipsis,) else _record_codec(args)
    if origin is dict and args[0] is str:
        return _dict_codec(args[1])
    if origin is Literal:
        return _literal_codec(args)
    if origin in (Union, types.UnionType):
        return _union_codec(args)
    raise TypeError(f"serde has no codec for {tp!r}")


def _is_dataclass(tp: object) -> TypeGuard[type[DataclassInstance]]:
    return isinstance(tp, type) and dataclasses.is_dataclass(tp)


def _scalar(cls: type[Scalar], expected: str) -> Codec:
    def check(value: object) -> Scalar:
        if type(value) is not cls:
            raise _Misfit(expected, value)
        return value

    return Codec(check, check)


def _float(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _Misfit("a number", value)
    try:
        number = float(value)
    except OverflowError:  # an integer beyond all floats
        number = math.inf
    if not math.isfinite(number):
        raise _Misfit("a finite number", value)
    return number


_SCALARS: dict[object, Codec] = {
    bool: _scalar(bool, "true or false"),
    int: _scalar(int, "an integer"),
    str: _scalar(str, "a string"),
    type(None): _scalar(type(None), "null"),
    float: Codec(_float, _float),
}


def _plain_encode(value: object) -> JsonData:
    """Plain JSON (`Node.params`): tuples become arrays."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return _float(value)
        case tuple():
            return [_plain_encode(v) for v in cast("tuple[object, ...]", value)]
        case dict():
            items = cast("dict[object, object]", value)
            if not all(isinstance(k, str) for k in items):
                raise _Misfit("keys that are strings", items)
            return {cast(str, k): _plain_encode(v) for k, v in items.items()}
        case _:
            raise _Misfit("plain JSON (null, bool, number, string, tuple, dict)", value)


def _plain_decode(value: JsonData) -> object:
    match value:
        case list():
            return tuple(_plain_decode(v) for v in value)
        case dict():
            return {k: _plain_decode(v) for k, v in value.items()}
        case float():
            return _float(value)
        case _:
            return value


def _tuple(value: object, expected: str = "an array") -> tuple[object, ...]:
    if type(value) is not tuple:
        raise _Misfit(expected, value)
    return cast("tuple[object, ...]", value)


def _list(value: JsonData, expected: str = "an array") -> list[JsonData]:
    if type(value) is not list:
        raise _Misfit(expected, value)
    return value


def _object(value: JsonData, expected: str = "an object") -> dict[str, JsonData]:
    if type(value) is not dict:
        raise _Misfit(expected, value)
    return value


def _elements(convert: Callable[[A], B], values: Iterable[A]) -> list[B]:
    """Each of ``values``, converted."""
    out: list[B] = []
    try:
        for value in values:
            out.append(convert(value))
    except _Misfit as fault:
        raise fault.at(f"[{len(out)}]") from None
    return out


def _named(converters: Iterable[tuple[str, Callable[[A], B]]], get: Callable[[str], A]) -> dict[str, B]:
    """Name → value, converted; ``get`` gives the value of a name."""
    out: dict[str, B] = {}
    name = ""
    try:
        for name, convert in converters:
            out[name] = convert(get(name))
    except _Misfit as fault:
        raise fault.at(f".{name}") from None
    return out


def _array_codec(item: object) -> Codec:
    if item is int or item is str:  # the long flat ones: one pass in C
        only = {item}

        def flat(values: Sequence[A]) -> Sequence[A]:
            if values and not set(map(type, values)) <= only:
                at = next(i for i, v in enumerate(values) if type(v) is not item)
                raise _Misfit("an integer" if item is int else "a string", values[at], f"[{at}]")
            return values

        return Codec(lambda v: cast("list[JsonData]", list(flat(_tuple(v)))), lambda v: tuple(flat(_list(v))))
    of = _codec(item)
    return Codec(lambda v: _elements(of.encode, _tuple(v)), lambda v: tuple(_elements(of.decode, _list(v))))


def _record_codec(items: tuple[object, ...]) -> Codec:
    of = [_codec(item) for item in items]
    expected = f"an array of {len(items)}"

    def sized(values: Sequence[A]) -> Iterable[tuple[Codec, A]]:
        if len(values) != len(of):
            raise _Misfit(expected, values)
        return zip(of, values)

    return Codec(
        lambda v: _elements(lambda pair: pair[0].encode(pair[1]), sized(_tuple(v, expected))),
        lambda v: tuple(_elements(lambda pair: pair[0].decode(pair[1]), sized(_list(v, expected)))),
    )


def _dict_codec(item: object) -> Codec:
    of = _codec(item)

    def encode(value: object) -> dict[str, JsonData]:
        if type(value) is not dict:
            raise _Misfit("an object", value)
        for key in cast("dict[object, object]", value):
            if type(key) is not str:
                raise _Misfit("keys that are strings", key)
        entries = cast("dict[str, object]", value)
        return _named([(key, of.encode) for key in entries], entries.__getitem__)

    return Codec(encode, lambda v: _named([(key, of.decode) for key in _object(v)], _object(v).__getitem__))


def _literal_codec(choices: tuple[JsonData, ...]) -> Codec:
    def check(value: object) -> JsonData:
        for choice in choices:
            if type(value) is type(choice) and value == choice:
                return choice
        raise _Misfit("one of " + ", ".join(json.dumps(c) for c in choices), value)

    return Codec(check, check)


def _json_kind(tp: object) -> type:
    """The Python type that ``json.loads`` gives for a value of type ``tp``."""
    origin = typing.get_origin(tp)
    if _is_dataclass(tp) or origin is dict:
        return dict
    if origin is tuple:
        return list
    if origin is Literal:
        return typing.get_args(tp)[0].__class__
    assert isinstance(tp, type)
    return tp


def _union_codec(members: tuple[object, ...]) -> Codec:
    classes = {tp.__name__: tp for tp in members if _is_dataclass(tp)}
    tagged = len(classes) > 1
    plain = [tp for tp in members if not (tagged and _is_dataclass(tp))]
    kinds = [_json_kind(tp) for tp in plain]
    if len(set(kinds)) != len(kinds):
        raise TypeError(f"serde cannot tell the members of {members} apart in JSON")
    expected = " or ".join([getattr(tp, "__name__", str(tp)).replace("NoneType", "null") for tp in members])

    def encode(value: object) -> JsonData:
        name = value.__class__.__name__
        if tagged and classes.get(name) is type(value):
            return {"type": name, **_object(_codec(classes[name]).encode(value))}
        for tp, kind in zip(plain, kinds, strict=True):
            holder = tp if _is_dataclass(tp) else tuple if kind is list else kind
            if type(value) is holder or (kind is float and type(value) is int and int not in kinds):
                return _codec(tp).encode(value)
        raise _Misfit(expected, value)

    def decode(value: JsonData) -> object:
        if tagged and type(value) is dict:
            fields = dict(value)
            name = fields.pop("type", None)
            if not isinstance(name, str) or name not in classes:
                raise _Misfit("one of " + ", ".join(classes), name, ".type")
            return _codec(classes[name]).decode(fields)
        for tp, kind in zip(plain, kinds, strict=True):
            if type(value) is kind or (kind is float and type(value) is int and int not in kinds):
                return _codec(tp).decode(value)
        raise _Misfit(expected, value)

    return Codec(encode, decode)


def _dataclass_codec(cls: type[DataclassInstance]) -> Codec:
    names = [f.name for f in dataclasses.fields(cls)]
    known = frozenset(names)
    may_lack = {f.name: f.default for f in dataclasses.fields(cls) if MAY_LACK in f.metadata}
    make: Callable[..., object] = cls

    @cache  # at first use, not now: a dataclass may hold itself
    def converters() -> tuple[
        list[tuple[str, Callable[[object], JsonData]]], list[tuple[str, Callable[[JsonData], object]]]
    ]:
        hints = typing.get_type_hints(cls)
        codecs = [(name, _codec(hints[name])) for name in names]
        return [(name, of.encode) for name, of in codecs], [(name, of.decode) for name, of in codecs]

    def encode(value: object) -> dict[str, JsonData]:
        if type(value) is not cls:
            raise _Misfit(cls.__name__, value)
        return _named(converters()[0], partial(getattr, value))

    def decode(value: JsonData) -> object:
        fields = _object(value, f"an object ({cls.__name__})")
        if fields.keys() != known:
            fields = {**{name: cast(JsonData, value) for name, value in may_lack.items()}, **fields}
            for name in names:
                if name not in fields:
                    raise _Contradiction(VerifyError(f"a field of {cls.__name__} that is missing")).at(f".{name}")
            unknown = next((k for k in fields if k not in known), None)
            if unknown is None:
                return make(**_named(converters()[1], fields.__getitem__))
            raise _Misfit(f"only the fields of {cls.__name__} ({', '.join(names)})", unknown, f".{unknown}")
        return make(**_named(converters()[1], fields.__getitem__))

    return Codec(encode, decode)


def _stored_codec(form: type[T], store: Callable[[A], T], restore: Callable[[T], A]) -> Codec:
    """Values that are written as a ``form``, which ``store`` makes of them."""
    of = _dataclass_codec(form)

    def decode(value: JsonData) -> object:
        found = cast(T, of.decode(value))
        try:
            return restore(found)
        except VerifyError as fault:
            raise _Contradiction(fault) from None

    return Codec(lambda value: of.encode(store(cast(A, value))), decode)


# Plans in files ---------------------------------------------------------------------------------------


SAID = 400
"""Characters of what a plan contradicts itself in, at most: the names in a file may be of any length."""


def digest(plan: Plan) -> str:
    """SHA-256 (hex) of the plan's canonical JSON without what two makings of it may differ in, its wall times and the
    number of planning processes: equal inputs give equal digests. For the graph its fingerprint stands, which does not
    depend on where the step's lines are."""
    data = encode(dataclasses.replace(plan, step=None))
    del data["provenance"]
    if isinstance(plan.body, OneProgram):
        del _object(_object(_object(data["body"])["sharding"])["report"])["seconds"]
    if plan.config.stages is not None:
        del _object(_object(data["config"])["stages"])["workers"]
    return hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def save_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Writes ``plan`` to ``path``, replacing a file there in one step. Raises PlanFormatError where the file
    cannot be written; what was there before then stays."""
    replace_file(path, file_text(encode(plan)))


def replace_file(path: str | os.PathLike[str], text: str) -> None:
    """Writes ``text`` to ``path`` in one step. Raises PlanFormatError where that fails; the old file then stays."""
    try:
        files.replace(path, text)
    except OSError as fault:
        raise PlanFormatError(f"cannot write {os.fspath(path)}: {fault.strerror or fault}") from fault


def load_plan(path: str | os.PathLike[str], *, graph: bool = True) -> Plan:
    """The plan in ``path``; ``graph``: False to leave out the graph that it is of, which is most of a large file.

    Raises PlanFormatError where the file cannot be read, is damaged, is of another schema version, or contradicts
    itself; the message names the file and the place."""
    try:
        data = parse(read_text(path))
        if not graph and isinstance(data, dict) and "step" in data:
            data["step"] = None
        return plan_from_data(data)
    except PlanFormatError as fault:
        raise PlanFormatError(f"{os.fspath(path)}: {fault}") from None


def read_text(path: str | os.PathLike[str]) -> str:
    """A plan file's text. Raises PlanFormatError where it cannot be read, is far too large, or is not UTF-8; the
    message does not name the file."""
    try:
        return files.read_text(path)
    except OSError as fault:
        raise PlanFormatError(f"cannot be read: {fault.strerror or fault}") from fault
    except files.DamagedError as fault:
        raise PlanFormatError(f"is not a plan file: {fault}") from None


def plan_from_data(data: JsonData) -> Plan:
    """A plan from its JSON. Raises PlanFormatError where it is of another schema version, not of the declared types, or
    contradicts itself (`Plan.verify`)."""
    if type(data) is not dict or "schema_version" not in data:
        if type(data) is dict and "groups" in data:
            raise PlanFormatError("is a ClusterSpec, and no plan: give it by --cluster")
        raise PlanFormatError("is not a plan file: no schema_version at its top level")
    version = data["schema_version"]
    if type(version) is not int:
        raise PlanFormatError(f"$.schema_version: expected an integer, got {json.dumps(version)[:60]}")
    if version != SCHEMA_VERSION:
        other, do = ("a newer", "upgrade autopar") if version > SCHEMA_VERSION else ("an older", "plan again")
        raise PlanFormatError(
            f"was written by {other} autopar (schema {version}; this one reads {SCHEMA_VERSION}): {do}"
        )
    plan = decode(Plan, data)
    try:
        plan.verify()
    except (VerifyError, ClusterError) as fault:
        said = str(fault) if len(str(fault)) <= SAID else f"{str(fault)[:SAID]} …"
        raise PlanFormatError(f"contradicts itself: {said}. Was it edited by hand? Plan again") from None
    except RecursionError:
        raise PlanFormatError("nested too deeply") from None
    return plan


def file_text(data: Mapping[str, JsonData]) -> str:
    """A plan's JSON as it is saved: top-level fields, and the items of top-level arrays of objects, on lines of their
    own, so that plans can be compared line by line; the rest compact."""

    def compact(value: JsonData) -> str:
        return json.dumps(value, separators=(",", ":"), allow_nan=False)

    def field(value: JsonData) -> str:
        if isinstance(value, list) and value and isinstance(value[0], dict):
            return "[\n  " + ",\n  ".join(compact(v) for v in value) + "\n ]"
        if isinstance(value, dict):
            return "{\n  " + ",\n  ".join(f"{compact(k)}: {compact(v)}" for k, v in value.items()) + "\n }"
        return compact(value)

    return "{\n " + ",\n ".join(f"{compact(k)}: {field(v)}" for k, v in data.items()) + "\n}\n"
