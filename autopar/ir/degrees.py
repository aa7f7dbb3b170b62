"""Degrees of parallelism that a user asks for: `Degrees`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

DATA, EXPERTS, SEQUENCE, TENSOR = "data", "experts", "sequence", "tensor"
ZERO = (0, 1, 2, 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Degrees:
    """How many devices share what; None: not said. Where any is said, those that are not are 1, and the rest of the
    devices hold examples of their own: on 32 devices ``tensor=4`` is a mesh of 8 (``data``) x 4 (``tensor``).

    Attributes:
        zero: which state is split over the axes that the batch is split over (Rajbhandari et al., "ZeRO", SC 2020): 0
            none, 1 the optimizer's, 2 also sums of gradients over microbatches, 3 also parameters.
        tensor: devices that share each weight of a product or a lookup (Shoeybi et al., "Megatron-LM", 2019).
        sequence: devices that share each example's positions, its first dimension beside the batch's.
        experts: devices that share experts: weights that are stacked, each taken by a product of its own (Lepikhin et
            al., "GShard", ICLR 2021). They have different examples too.
    """

    zero: int | None = None
    tensor: int | None = None
    sequence: int | None = None
    experts: int | None = None

    def __bool__(self) -> bool:
        return any(getattr(self, field.name) is not None for field in fields(self))

    def __str__(self) -> str:
        said = ((field.name, getattr(self, field.name)) for field in fields(self))
        return ", ".join(f"{name} {value}" for name, value in said if value is not None)

    @property
    def names(self) -> tuple[str, ...] | None:
        """Names of the mesh's axes; None where no degree says which there are."""
        said = [name for name in (EXPERTS, SEQUENCE, TENSOR) if getattr(self, name) is not None]
        return (DATA, *said) if said else None

    def shape(self, devices: int) -> tuple[int, ...] | None:
        """Sizes of these axes on so many devices; None where the degrees do not divide them, or there are none."""
        if self.names is None:
            return None
        sizes = [getattr(self, name) for name in self.names[1:]]
        data = devices
        for size in sizes:
            data, rest = divmod(data, size)
            if rest:
                return None
        return data, *sizes

    def batch_axes(self, axes: Sequence[str]) -> tuple[str, ...]:
        """Those of a mesh's axes that the batch is split over."""
        return tuple(axes) if self.names is None else tuple(name for name in axes if name in (DATA, EXPERTS))


OF_METHODS = {"data_parallel": Degrees(zero=0), "zero2": Degrees(zero=2), "zero3": Degrees(zero=3)}
"""What a forced method says of each stage's mesh, all of whose axes the batch is split over."""
