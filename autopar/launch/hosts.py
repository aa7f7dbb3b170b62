"""The hosts file: a line for each host, the first being the head.

    # name (what ssh or srun is given)   options
    node1   address=10.0.0.1  devices=8
    node2   address=10.0.0.2  devices=8

``address`` (default: the name) is what the other hosts reach it at; a name is resolved on the head. ``devices`` are
those of the host for a ClusterSpec (default: as in its preset). ``python`` is the interpreter there, where it is
another path than here.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any

from autopar.ir.cluster import ClusterSpec
from autopar.ir.errors import ClusterError

_NAME = re.compile(r"[A-Za-z0-9_@][A-Za-z0-9_@.:-]*")
"""No leading dash (an option of ssh's), nothing that a shell reads."""
SAFE = re.compile(r"[A-Za-z0-9_@%+=:,./-]+")
"""Words that are the same with and without a shell between: ssh runs what it is given in one, srun does not."""
LONGEST = 1000
"""Characters of a line (chosen)."""
_KEYS = ("address", "devices", "python")


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A host. ``devices`` 0: not said."""

    name: str
    address: str
    devices: int = 0
    python: str | None = None


def hosts_from_text(text: str, where: str = "hosts file") -> tuple[Host, ...]:
    """The hosts that a file lists. Raises ClusterError naming the line."""
    out: list[Host] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        place = f"{where}, line {number}"
        if len(line) > LONGEST:
            raise ClusterError(f"{place}: {len(line)} characters; a host takes {LONGEST} at most")
        name, *options = words
        if not _NAME.fullmatch(name):
            raise ClusterError(f"{place}: {name!r} is not a host's name")
        given: dict[str, Any] = {}
        for option in options:
            key, equals, value = option.partition("=")
            if not equals or not value or key not in _KEYS:
                near = difflib.get_close_matches(key, _KEYS, n=1)
                hint = f" (did you mean {near[0]}=?)" if near else ""
                raise ClusterError(f"{place}: {option!r} is not an option{hint}; known are {', '.join(_KEYS)}")
            if key in given:
                raise ClusterError(f"{place}: {key} is given twice")
            if key == "devices" and not re.fullmatch(r"[1-9][0-9]{0,4}", value):
                raise ClusterError(f"{place}: devices={value}: expected a whole number above 0")
            if key == "python" and (value.startswith("-") or not SAFE.fullmatch(value)):
                raise ClusterError(f"{place}: python={value}: expected a path, without what shells read")
            if key == "address" and not _NAME.fullmatch(value):
                raise ClusterError(f"{place}: address={value}: expected an address or a name")
            given[key] = int(value) if key == "devices" else value
        out.append(Host(**{"name": name, "address": name.rpartition("@")[2], **given}))
    for what in ("name", "address"):
        values = [getattr(host, what) for host in out]
        twice = next((v for v in values if values.count(v) > 1), None)
        if twice is not None:
            raise ClusterError(f"{where}: {what} {twice} is that of two hosts; each needs one line with an own {what}")
    if not out:
        raise ClusterError(f"{where} lists no host; write a line for each: node1 address=10.0.0.1 devices=8")
    return tuple(out)


def hosts_to_json(hosts: Sequence[Host]) -> list[dict[str, Any]]:
    """Hosts as JSON's types, for `hosts_from_json`."""
    return [asdict(host) for host in hosts]


def hosts_from_json(data: Any) -> tuple[Host, ...]:
    """The hosts that `hosts_to_json` wrote. Raises ClusterError for anything else."""
    try:
        lines = [
            " ".join([h["name"], *(f"{k}={h[k]}" for k in _KEYS if h.get(k))]) for h in data
        ]  # the same checks as for a file
        return hosts_from_text("\n".join(lines), "the cluster's record")
    except (TypeError, KeyError) as fault:
        raise ClusterError(f"the cluster's record is damaged: {type(fault).__name__}: {fault}") from None


def spec_of(hosts: Sequence[Host], like: ClusterSpec, name: str) -> ClusterSpec:
    """The ClusterSpec of ``hosts``, with the devices and links of ``like`` (a preset, or a file that was measured).

    Neighbours with equally many devices are a group; groups are linked by a NIC of theirs. Raises ClusterError where
    ``like`` has devices of several kinds.
    """
    group = like.groups[0]
    if len({g.device for g in like.groups}) > 1:
        raise ClusterError(f"cluster {like.name} has devices of several kinds; name one that has one kind")
    counts = [host.devices or group.devices_per_host for host in hosts]
    groups = tuple(replace(group, hosts=len(list(same)), devices_per_host=count) for count, same in groupby(counts))
    spec = ClusterSpec(name=name, groups=groups, between=group.nic if len(groups) > 1 else None)
    spec.verify()
    return spec
