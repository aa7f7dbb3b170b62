"""Which prices on memory the choices seen so far call for: a level bundle method.

Every choice x bounds the Lagrangian dual from above: L(λ) ≤ cost(x) + Σ_t λ_t (live_t(x) − limit). The best prices by
all choices seen are a small linear program, of which two kinds of points are asked: its maximum, and the prices
nearest to the best ones known at which it promises a part of what is left to gain (Lemaréchal, Nemirovskii and
Nesterov 1995, in the 1-norm). Only times at which some choice was at a peak beyond the limit have prices.
"""

from __future__ import annotations

from typing import Any

import highspy
import numpy as np

from autopar.intra_op.solvers.exact import THREADS, peaks

PEAKS = 3
"""Times that one choice adds, at most (measured on K and S: 3 better than 10)."""
FIRST_MOST, GROWTH, MOST = 4.0, 4.0, 1e6
"""Most that a price may be, relative cost for relative memory: at first, times the dearest of the best prices known,
and ever (guessed)."""
PARTS = (0.3, 0.6, 0.1)
"""Prices are sought at which the model promises these parts of what is left to gain, in turn (measured: one alone gets
stuck here or there)."""


class Level:
    """The model of the dual. Prices are float64[times], cost per byte. ``limit`` is in bytes; ``scale``, a typical
    cost, is the unit of costs inside the linear program."""

    def __init__(self, horizon: int, limit: float, scale: float) -> None:
        self.horizon, self.limit, self.scale = horizon, limit, scale
        self.times: list[int] = []
        self._excess: list[Any] = []
        """float64[times] of each choice: live bytes beyond the limit, relative."""
        self._costs: list[float] = []
        self._asked = 0
        self._most = FIRST_MOST
        self._model = highspy.Highs()
        for name, value in (("output_flag", False), ("threads", THREADS), ("solver", "simplex")):
            self._model.setOptionValue(name, value)
        self._model.changeObjectiveSense(highspy.ObjSense.kMaximize)
        self._column(1.0, -highspy.kHighsInf, highspy.kHighsInf)
        self._cuts: list[int] = []
        """The row of each choice."""
        self._near: list[int] = []
        """The row of each time: price − above + below = the price near which to stay."""

    def add(self, cost: float, live: Any) -> None:
        """Learns a choice: what it costs without prices, and its live bytes (float64[times])."""
        excess = live / self.limit - 1.0
        for t in peaks(excess, set(self.times), PEAKS):
            self._priced(t)
        self._excess.append(excess)
        self._costs.append(cost)
        values = -excess[self.times]
        some = np.flatnonzero(values)
        columns = np.concatenate([[0], 1 + 3 * some]).astype(np.int32)
        self._cuts.append(self._model.getNumRow())
        self._model.addRow(
            -highspy.kHighsInf, cost / self.scale, len(columns), columns, np.concatenate([[1.0], values[some]])
        )

    def _priced(self, t: int) -> None:
        """Gives a time a price."""
        values = np.array([-e[t] for e in self._excess])
        some = np.flatnonzero(values)
        first = self._model.getNumCol()
        rows = np.array(self._cuts, np.int32)[some] if len(some) else np.zeros(0, np.int32)
        self._model.addCol(0.0, 0.0, self._most, len(some), rows, values[some])
        self._column(0.0, 0.0, highspy.kHighsInf)
        self._column(0.0, 0.0, highspy.kHighsInf)
        self._near.append(self._model.getNumRow())
        self._model.addRow(0.0, 0.0, 3, np.array([first, first + 1, first + 2], np.int32), np.array([1.0, -1.0, 1.0]))
        self.times.append(t)

    def _column(self, cost: float, low: float, high: float) -> None:
        self._model.addCol(cost, low, high, 0, np.zeros(0, np.int32), np.zeros(0))

    def best(self, prices: Any) -> float:
        """No prices give a better bound, as far as the choices seen tell, and prices not much dearer than ``prices``,
        the best ones known."""
        dearest = float(prices.max(initial=0.0)) * self.limit / self.scale
        if GROWTH * dearest > self._most and self._most < MOST:
            self._most = min(GROWTH * GROWTH * dearest, MOST)
            columns = 1 + 3 * np.arange(len(self.times), dtype=np.int32)
            self._model.changeColsBounds(
                len(columns), columns, np.zeros(len(columns)), np.full(len(columns), self._most)
            )
        self._aim(1.0, 0.0, -highspy.kHighsInf)
        for row in self._near:
            self._model.changeRowBounds(row, -highspy.kHighsInf, highspy.kHighsInf)
        return float(self._solved()[0]) * self.scale

    def cheapest(self, prices: Any) -> int:
        """The choice that costs least at these prices, by its number in the order in which they were added."""
        some = np.flatnonzero(prices)
        excess = np.array([e[some] for e in self._excess])
        return int(np.argmin(self._costs + excess @ (prices[some] * self.limit)))

    def mixture(self) -> list[int]:
        """After `best`: the choices, by number, of which a mixture fits and costs that on average."""
        weights = np.array(self._model.getSolution().row_dual)[self._cuts]
        return np.flatnonzero(np.abs(weights) > 1e-9).tolist()

    def towards(self, best: float, bound: float, prices: Any) -> Any:
        """Prices near ``prices``, whose bound is ``bound``, on the way to ``best``."""
        at = prices[self.times] * self.limit / self.scale
        self._asked += 1
        self._aim(0.0, -1.0, (bound + PARTS[self._asked % len(PARTS)] * (best - bound)) / self.scale)
        for row, here in zip(self._near, at.tolist(), strict=True):
            self._model.changeRowBounds(row, here, here)
        found = np.maximum(0.0, self._solved()[1::3])
        out = np.zeros(self.horizon)
        out[self.times] = found * self.scale / self.limit
        return out

    def _aim(self, bound: float, away: float, least: float) -> None:
        """Costs of the bound and of each step away from the prices known."""
        model, count = self._model, len(self.times)
        model.changeColCost(0, bound)
        model.changeColBounds(0, least, highspy.kHighsInf)
        if count:
            columns = np.sort(np.concatenate([2 + 3 * np.arange(count), 3 + 3 * np.arange(count)])).astype(np.int32)
            model.changeColsCost(len(columns), columns, np.full(len(columns), away))

    def _solved(self) -> Any:
        model = self._model
        for _ in range(2):
            model.run()
            if model.getModelStatus() == highspy.HighsModelStatus.kOptimal:
                return np.array(model.getSolution().col_value)
            model.clearSolver()  # the basis it went on from was numerically bad
        raise RuntimeError(f"HiGHS on prices: {model.modelStatusToString(model.getModelStatus())}")
