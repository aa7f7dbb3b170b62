"""Every operator under its strategies on 8 CPU devices equals itself unsharded."""

from __future__ import annotations

import pytest

from tests.cpu8.op_harness import check_case
from tests.op_case import Case
from tests.op_cases_dense import CASES as DENSE
from tests.op_cases_indexing import CASES as INDEXING


@pytest.mark.parametrize("c", (*DENSE, *INDEXING), ids=lambda c: c.name)
def test_sharded_equals_unsharded(c: Case) -> None:
    assert check_case(c) >= 1
