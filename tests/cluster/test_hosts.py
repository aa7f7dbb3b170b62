"""The hosts file, and ClusterSpecs from it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.ir.errors import ClusterError
from autopar.ir.presets import cluster_from_text
from autopar.launch.hosts import Host, hosts_from_json, hosts_from_text, hosts_to_json, spec_of

NAMES = st.from_regex(r"[a-z][a-z0-9.-]{0,8}", fullmatch=True)


@pytest.mark.slow
@given(st.lists(st.builds(Host, name=NAMES, address=NAMES, devices=st.integers(0, 99)), min_size=1, max_size=5))
def test_records_are_read_as_they_were_written(hosts: list[Host]) -> None:
    if len({h.name for h in hosts}) == len({h.address for h in hosts}) == len(hosts):
        assert hosts_from_json(json.loads(json.dumps(hosts_to_json(hosts)))) == tuple(hosts)


def test_a_line_for_each_host() -> None:
    text = "# head first\nme@node1 devices=4  # comment\n\nnode2 address=10.0.0.2 python=/opt/py/bin/python\n"
    assert hosts_from_text(text) == (
        Host(name="me@node1", address="node1", devices=4),
        Host(name="node2", address="10.0.0.2", python="/opt/py/bin/python"),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "lists no host"),
        ("a\nb c", "line 2: 'c' is not an option"),
        ("a adress=b", r"did you mean address=\?"),
        ("a devices=0", "expected a whole number above 0"),
        ("a devices=1 devices=2", "given twice"),
        ("a\nb\na", "name a is that of two hosts"),
        ("a address=x\nb address=x", "address x is that of two hosts"),
        ("-oProxyCommand=x", "is not a host's name"),
        ("a;reboot", "is not a host's name"),
        ("a address=$(x)", "expected an address"),
        ("a python=/a/b;c", "what shells read"),
        ("a python=-Sfoo", "expected a path"),
        ("a " + "x" * 2000, "2002 characters; a host takes 1000 at most"),
    ],
)
def test_what_is_wrong_with_a_file(text: str, message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        hosts_from_text(text)


@pytest.mark.parametrize("data", [None, 3, [{}], [{"name": 3}], {"name": "a"}, [{"name": "a b"}]])
def test_a_damaged_record(data: object) -> None:
    with pytest.raises(ClusterError, match="the cluster's record"):
        hosts_from_json(data)


def test_spec() -> None:
    like = cluster_from_text("dgx-h100")
    hosts = hosts_from_text("a devices=4\nb devices=4\nc")
    spec = spec_of(hosts, like, "mine")
    assert [(g.hosts, g.devices_per_host) for g in spec.groups] == [(2, 4), (1, 8)]
    assert spec.between == like.groups[0].nic and spec.num_devices == 16
    assert spec_of(hosts[:2], like, "mine").between is None
