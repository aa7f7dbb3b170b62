"""What a pipeline takes and holds at least, whatever its transfers wait for: without emitting or simulating it.

With f, b, w a stage's forward task, the backward task that the stage before waits for, and the weight gradients apart
from it (0 where they are not), o what it does once a step, t(r → s) a transfer, and m microbatches:

    a_s   = max over r that send to s of  a_r + f_r + t(r → s)            first forward task of s starts
    e_s   = max(a_s + f_s, max over q of e_q + t(q → s)) + b_s            first backward task of s ends
    z_s   = max(w_s + o_s, max over r that s sends back to of  t(s → r) + b_r + z_r)     after the last one, at least

    T  ≥  a_s + m (f_s + b_s) + z_s           T  ≥  a_s + m (f_s + b_s + w_s) + o_s
    T  ≥  a_r + f_r + m t(r → s) + f_s + b_s + z_s                        each mesh sends one transfer at a time
    T  ≥  e_s + m t(s → r) + b_r + z_r

(for a mesh with several stages their work is added up). A device holds at least the state of its stages, what the order
of its own tasks keeps for later ones, and what one task reads and needs beside.
"""

from __future__ import annotations

from autopar.ir.pipeline import Cut, PipelinePlan, StageCost


def work_s(cost: StageCost, num_microbatches: int) -> float:
    """Seconds that a stage's mesh computes for it in a step: all its tasks, the gradients' reduction and the update."""
    return num_microbatches * (cost.forward_s + cost.backward_s) + cost.grad_sync_s + cost.update_s


def least_s(plan: PipelinePlan) -> float:
    """Seconds that a step takes at least (above); of a plan without backward tasks, by their forward tasks."""
    schedule, stages = plan.schedule, plan.stages
    m, mesh_of = schedule.num_microbatches, schedule.mesh_of_stage
    phases = {task.phase for task in schedule.tasks[0]}
    trains, split = len(phases) > 1, "input_grad" in phases
    forward = [stage.cost.forward_s for stage in stages]
    back = [(s.cost.input_grad_s if split else s.cost.backward_s) if trains else 0.0 for s in stages]
    later = [stage.cost.weight_grad_s if split else 0.0 for stage in stages]
    own, once = [0.0] * len(schedule.tasks), [0.0] * len(schedule.tasks)
    for s, stage in enumerate(stages):
        own[mesh_of[s]] += m * (forward[s] + back[s] + later[s])
        once[mesh_of[s]] += stage.cost.grad_sync_s + stage.cost.update_s if trains else 0.0
    ahead: list[list[Cut]] = [[] for _ in stages]  # by their target
    behind: list[list[Cut]] = [[] for _ in stages]
    for cut in plan.cuts:
        if cut.phase in ("forward", "backward"):
            (ahead if cut.phase == "forward" else behind)[cut.target].append(cut)
    arrives, first, after = [0.0] * len(stages), [0.0] * len(stages), [0.0] * len(stages)
    for s in range(len(stages)):
        arrives[s] = max((arrives[c.source] + forward[c.source] + c.time_s for c in ahead[s]), default=0.0)
        after[s] = later[s] + once[mesh_of[s]]
        for r in range(s):
            back_s = max((c.time_s for c in behind[r] if c.source == s), default=-1.0)
            if back_s >= 0:
                after[s] = max(after[s], back_s + back[r] + after[r])
    out = 0.0
    for s in reversed(range(len(stages))):
        first[s] = max([arrives[s] + forward[s], *(first[c.source] + c.time_s for c in behind[s])]) + back[s]
        for c in ahead[s]:
            sends = arrives[c.source] + forward[c.source] + m * c.time_s
            out = max(out, sends + forward[s] + back[s] + after[s])
        for c in behind[s]:
            out = max(out, first[c.source] + m * c.time_s + back[s] + after[s])
    for mesh in range(len(schedule.tasks)):
        mine = [s for s, at in enumerate(mesh_of) if at == mesh]
        late = min(after[s] - later[s] * m for s in mine) if len(mine) == 1 else once[mesh]
        out = max(out, min(arrives[s] for s in mine) + own[mesh] + max(once[mesh], late))
    return out


def least_bytes(plan: PipelinePlan) -> list[float]:
    """Bytes that a device of each mesh holds at least at its fullest."""
    schedule, stages = plan.schedule, plan.stages
    message: dict[tuple[int, str], float] = {}
    for cut in plan.cuts:
        key = (cut.target, cut.phase)
        message[key] = message.get(key, 0.0) + cut.receive_bytes
    out = [0.0] * len(schedule.tasks)
    for s, mesh in enumerate(schedule.mesh_of_stage):
        out[mesh] += stages[s].cost.state_bytes
    for mesh, tasks in enumerate(schedule.tasks):
        level = peak = out[mesh]
        for task in tasks:
            cost = stages[task.stage].cost
            match task.phase:
                case "forward":
                    level += cost.activation_bytes
                    beside, less = message.get((task.stage, "forward"), 0.0), 0.0
                case "backward":
                    beside, less = message.get((task.stage, "backward"), 0.0), cost.activation_bytes
                case "input_grad":
                    level += cost.weight_context_bytes - cost.kept_bytes
                    beside = message.get((task.stage, "backward"), 0.0)
                    less = cost.activation_bytes - cost.kept_bytes
                case "weight_grad":
                    beside, less = 0.0, cost.weight_context_bytes
            peak = max(peak, level + beside + cost.transients.of(task.phase))
            level -= less
        out[mesh] = peak
    return out
