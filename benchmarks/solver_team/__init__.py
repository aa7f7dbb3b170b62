"""All the time there is, in processes, on what is left of a problem: for contest instances, which planning never has.

`EXHAUST` is an effort of `autopar.intra_op.search.Search`: give it to `solve`.
"""

from __future__ import annotations

import numpy as np

from autopar.intra_op.search import Effort, Search
from autopar.intra_op.solvers.prices import Pricing
from benchmarks.solver_team.helpers import Helper
from benchmarks.solver_team.team import Team


def helped(search: Search, pricing: Pricing) -> None:
    """Two processes until time is up or the best choice is proven."""
    pricing.settle()
    excess = pricing.excess()
    choice = search.start(pricing)
    if choice is None:
        return
    helpers = [Helper(search.core), Helper(search.core)]
    try:
        Team(search, pricing, excess, choice, helpers).run()
    finally:
        for helper in helpers:
            helper.close()
        search.lap("processes")


EXHAUST = Effort(
    accept=0.0, price_s=np.inf, price_share=0.15, exact_s=np.inf, exact_share=0.2, parts=np.inf, idle_parts=np.inf,
    finish=helped,
)  # fmt: skip
"""Uses two processes and all the time there is, unless the optimum is proven."""
