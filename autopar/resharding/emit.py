"""`emit`: a ReshardingPlan → what each device does, as instructions whose number does not grow with chunks."""

from __future__ import annotations

from autopar.ir.resharding import ReshardingPlan
from autopar.ir.resharding_program import Instruction, Recv, Relay, Send


def emit(plan: ReshardingPlan) -> dict[int, tuple[Instruction, ...]]:
    """Device id → its instructions, in the order of the plan's transfers; all devices of its meshes have an entry.

    A transfer gives one instruction to its sender and one to each device that it is brought to. Copies inside a host
    are instructions as any others: the hop's device passes the piece to the first copy too, that one to the next.
    """
    out: dict[int, list[Instruction]] = {d: [] for mesh in plan.meshes for d in mesh.mesh.device_ids}
    for index, transfer in enumerate(plan.transfers):
        source: dict[int, int] = {}
        to: dict[int, list[int]] = {transfer.sender: []}
        for hop in transfer.hops:
            giver = transfer.sender if hop.source < 0 else transfer.hops[hop.source].device
            for device in (hop.device, *hop.copies):
                source[device] = giver
                to[giver].append(device)
                to[device] = []
                giver = device
        about = {"transfer": index, "stream": transfer.stream, "chunks": transfer.chunks}
        for device, targets in to.items():
            if device not in source:
                out[device].append(Send(**about, to=tuple(targets)))
            elif targets:
                out[device].append(Relay(**about, source=source[device], to=tuple(targets)))
            else:
                out[device].append(Recv(**about, source=source[device]))
    return {device: tuple(instructions) for device, instructions in out.items()}
