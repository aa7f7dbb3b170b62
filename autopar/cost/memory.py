"""Memory that an operator needs while it runs, beside its operands and results.

In: a Node. Out: weights, by which the bytes of each operand and result on a device count towards that workspace.
From how XLA compiles for a CPU: other backends need as much or less (cuDNN takes more layouts, for one).
"""

from __future__ import annotations

from typing import TypeAlias

from autopar.ir.graph import Node

Weights: TypeAlias = "tuple[tuple[int, float], ...]"
"""(position, weight): operands count from 0, results from the number of operands."""

INDEX_BYTES = 4
THREEFRY_WORDS = 4.0
"""Two words of state for every word of output, before and after a round."""


def workspace(node: Node) -> Weights:
    """Weights of the operands and results whose bytes make up the workspace; empty for most operators."""
    if node.primitive == "conv_general_dilated":
        return _convolution(node)
    if node.primitive == "dot_general":
        return _dot(node)
    if node.primitive == "select_and_scatter_add":
        return _select_and_scatter(node)
    if node.primitive == "random_bits":
        return ((len(node.operand_types), THREEFRY_WORDS if draws_in_parts(node) else 1.0),)
    return ()


def draws_in_parts(node: Node) -> bool:
    """False where random bits are drawn whole, whatever part is wanted: their flat position does not give them
    (jax_threefry_partitionable off). The workspace of such a draw is `Signature.workspace`, with weight 1."""
    return node.primitive != "random_bits" or node.params.get("partitionable", True)


def _convolution(node: Node) -> Weights:
    """Operands are copied into the layout of the library: batch, space, feature; kernel: space, input, output.
    A gradient towards the kernel has batch and feature swapped, so both of its operands are copied."""
    numbers, rank = node.params["dimension_numbers"], len(node.result_types[0].shape)
    space = tuple(range(1, rank - 1))
    copied = []
    if tuple(numbers["lhs_spec"]) != (0, rank - 1, *space):
        copied.append((0, 1.0))
    if tuple(numbers["rhs_spec"]) != (rank - 1, rank - 2, *range(rank - 2)):
        copied.append((1, 1.0))
    return tuple(copied)


def _dot(node: Node) -> Weights:
    """An operand whose batch dimensions do not lead, or whose contracted ones do not stand together, is transposed."""
    contract, batch = node.params["dimension_numbers"]
    return tuple((i, 1.0) for i in (0, 1) if _scattered(len(node.operand_types[i].shape), contract[i], batch[i]))


def _scattered(rank: int, contract: tuple[int, ...], batch: tuple[int, ...]) -> bool:
    if tuple(batch) != tuple(range(len(batch))):
        return True
    ends = tuple(range(len(batch), len(batch) + len(contract))), tuple(range(rank - len(contract), rank))
    return tuple(sorted(contract)) not in ends


def _select_and_scatter(node: Node) -> Weights:
    """Expanded into a windowed reduction that carries the index of the chosen element in each dimension, and a scatter
    to those: an int32 per dimension for every element of the operand and for every window. The result takes the place
    of one of the former."""
    rank = len(node.result_types[0].shape)
    source, operand = (_item_bytes(node, i) for i in (0, 1))
    return ((0, 1 + rank * INDEX_BYTES / source), (1, max(0.0, rank * INDEX_BYTES / operand - 1)))


def _item_bytes(node: Node, i: int) -> float:
    value_type = node.operand_types[i]
    return value_type.size_bytes / max(1, value_type.size)
