"""Published training runs and layout trials as values: `Case`, what is planned, and `Run`, what was measured.

In: rows of ``runs.csv`` and ``layout_trials.csv`` of ``../shared/data/published_runs``, whose README describes the
columns; rows of others with the same columns. Columns that are missing are blank cells. What a row does not say is
filled in here, and named in `Case.assumed`.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeAlias

Cells: TypeAlias = Mapping[str, str | None]
Recompute: TypeAlias = Literal["none", "dots", "full"]
VOCAB = 51_200
"""Where a row says nothing: GPT-2's 50,257, padded as Megatron-LM does."""
CORES = {"TPU_v3": 2, "TPU_v7x": 2}
"""Devices of JAX that one device of a row is, where rows count chips."""


class RowError(Exception):
    """A row cannot be planned, for the reason that is said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A transformer: ``kv_heads`` share the ``heads`` of queries; ``gated``: a feed-forward part of three matrices;
    with ``experts`` each layer has so many of inner width ``expert_ffn``, ``topk`` of which a token goes through."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    gated: bool
    vocab: int
    tied: bool
    seq: int
    experts: int = 0
    topk: int = 0
    expert_ffn: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is planned: equal cases have one plan.

    Attributes:
        hardware: ``hw_key``; ``devices`` and ``devices_per_host`` are devices of JAX.
        compute: dtype of products, ``float8`` for those of weights in float8 and the rest in bfloat16.
        adafactor: else AdamW.
        masters_apart: weights of the compute dtype, float32 copies among the optimizer's state (Megatron-LM,
            DeepSpeed); else float32 weights, which are cast where they are used (FSDP, JAX).
        batch: sequences of a step, in ``microbatches``.
        shard: devices of the axis that state is split over under ``zero`` 3; below the degree of data parallelism, the
            rest are replicas.
        virtual: stages on each of ``pipeline`` meshes.
        sequence_parallel: norms and residuals split over the tensor axis, as Megatron-LM's; None: not said.
        fused_attention: by one kernel that keeps no scores.
        tensor_overlaps: collectives of tensor parallelism run beside pieces of the products that they feed.
        assumed: what the row does not say; no part of the comparison.
    """

    model: Model
    hardware: str
    devices: int
    devices_per_host: int
    interconnect: str
    compute: str
    adafactor: bool
    masters_apart: bool
    batch: int
    microbatches: int
    tensor: int
    pipeline: int
    context: int
    virtual: int
    experts: int
    shard: int
    zero: int
    sequence_parallel: bool | None
    recompute: Recompute
    fused_attention: bool
    schedule: str
    tensor_overlaps: bool = False

    @property
    def data(self) -> int:
        """Degree of data parallelism of what is not an expert."""
        return self.devices // (self.tensor * self.pipeline * self.context)

    @property
    def platform(self) -> str:
        """JAX's name of the hardware's platform."""
        return "tpu" if self.hardware.startswith("TPU") else "gpu"

    @property
    def family(self) -> str:
        """The kind of layout, for summaries."""
        if self.context > 1:
            return "CP"
        if self.pipeline > 1:
            return "TP+PP" if self.tensor > 1 else "PP"
        if self.tensor > 1:
            return "TP+FSDP" if self.zero == 3 else "TP+DP"
        return "FSDP" if self.zero == 3 else "DP"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One row: ``case`` is None where ``why`` says what cannot be planned. ``step_s``: measured; None of a trial that
    did not run. ``kind``: ``dense``, ``context``, ``moe`` or ``fp8``, reported apart. ``group``: runs of one model,
    sequence, batch, number of devices and dtype from one source. ``sheet``, ``kernel``: of a trial."""

    id: str
    source: str
    quality: str
    hardware: str
    kind: str
    group: tuple[str, ...]
    step_s: float | None
    case: Case | None
    assumed: tuple[str, ...] = ()
    why: str = ""
    status: str = "ok"
    sheet: str = ""
    kernel: str = ""


def read_runs(path: Path) -> list[Run]:
    """The rows of a file of runs, in order."""
    with path.open(newline="") as file:
        return [run_of(row) for row in csv.DictReader(file)]


def read_trials(path: Path) -> list[Run]:
    """The trials whose kernel was there, in order."""
    with path.open(newline="") as file:
        return [trial_of(row) for row in csv.DictReader(file) if row.get("status") != "Kernel not available"]


def run_of(row: Cells) -> Run:
    """One row of runs."""
    assumed: list[str] = []
    fp8 = re.match("fp8|int8", text(row, "dtype").lower()) is not None
    cp, experts = whole(row, "cp", 1), whole(row, "experts", 0)
    kind = "fp8" if fp8 else "moe" if experts else "context" if cp > 1 else "dense"
    try:
        case, why = case_of(row, assumed), ""
    except RowError as error:
        case, why = None, str(error)
    return Run(
        id=text(row, "id") or "?", source=text(row, "source"), quality=text(row, "quality"),
        hardware=text(row, "hw_key") or text(row, "hw"), kind=kind,
        group=tuple(text(row, name) for name in ("source", "model", "hw_key", "seq", "devices", "gbs_seq", "dtype")),
        step_s=number(row, "step_s"), case=case, assumed=tuple(assumed), why=why,
    )  # fmt: skip


def case_of(row: Cells, assumed: list[str]) -> Case:
    """What a row of runs plans; appends what it does not say. Raises RowError."""
    hardware = text(row, "hw_key").removesuffix("_chip")
    cores = CORES.get(hardware, 1)
    devices, per_host = cores * need(row, "devices"), cores * whole(row, "devices_per_host", 8)
    tensor, pipeline, context = (whole(row, name, 1) for name in ("tp", "pp", "cp"))
    data, rest = divmod(devices, tensor * pipeline * context)
    if rest or not data:
        raise RowError(f"tp {tensor} x pp {pipeline} x cp {context} do not divide {devices} devices")
    schedule, virtual = schedule_of(row, pipeline, assumed)
    zero = zero_of(row, assumed)
    experts = whole(row, "ep", 1)
    if data * context % experts:
        raise RowError(f"ep {experts} does not divide dp {data}")
    gpu = not hardware.startswith("TPU")
    batch = need(row, "gbs_seq")
    shard = whole(row, "fsdp_shard", 0) if zero == 3 else 0
    dtype = text(row, "dtype").lower()
    flash = text(row, "flash").lower()
    if not flash or flash.startswith("("):
        assumed.append("fused attention")
    return Case(
        model=model_of(row, assumed), hardware=hardware, devices=devices, devices_per_host=min(per_host, devices),
        interconnect=text(row, "interconnect"),
        compute="float8" if re.match("fp8|int8", dtype) else "float16" if dtype.startswith("fp16") and "bf16" not in
        dtype else "bfloat16",
        adafactor="adafactor" in text(row, "optimizer").lower(), masters_apart=gpu and zero < 3, batch=batch,
        microbatches=microbatches_of(row, batch, data, devices // pipeline, pipeline, zero == 3, assumed),
        tensor=tensor,
        pipeline=pipeline, context=context, virtual=virtual, experts=experts,
        shard=shard if 0 < shard < data * context and data % shard == 0 else data, zero=zero,
        sequence_parallel=said_so(text(row, "seq_parallel")) if tensor > 1 else None,
        recompute=recompute_of(row, gpu, assumed), fused_attention=not flash.startswith("no"), schedule=schedule,
        tensor_overlaps=tensor > 1 and tensor_overlaps(row, hardware),
    )  # fmt: skip


def tensor_overlaps(row: Cells, hardware: str) -> bool:
    """Whether tensor-parallel collectives run beside products: where the row says it, and by default in NeMo and
    Megatron-Core since Hopper (Transformer Engine's user buffers)."""
    if re.search(r"\bTP\b", text(row, "overlap")):
        return True
    recent = not hardware.startswith(("A100", "V100", "TPU"))
    return recent and re.search("NeMo|Megatron-Core", text(row, "framework_notes")) is not None


def model_of(row: Cells, assumed: list[str]) -> Model:
    """The model of a row. Raises RowError where a dimension is missing."""
    hidden, heads = need(row, "hidden"), need(row, "heads")
    gated, vocab, tied = text(row, "gated") == "1", whole(row, "vocab", 0), text(row, "tied_emb")
    if not vocab:
        assumed.append(f"vocab {VOCAB}")
    if not tied:
        assumed.append(f"{'untied' if gated else 'tied'} embedding")
    tensor = whole(row, "tp", 1)
    padded = -(-(vocab or VOCAB) // (128 * tensor)) * 128 * tensor  # as Megatron-LM pads it
    experts, ffn = whole(row, "experts", 0), whole(row, "ffn", 0)
    if not ffn and not experts:
        raise RowError("ffn is blank")
    return Model(
        layers=need(row, "layers"), hidden=hidden, heads=heads, kv_heads=whole(row, "kv_heads", heads),
        head_dim=whole(row, "head_dim", hidden // heads), ffn=ffn, gated=gated, vocab=padded,
        tied=tied == "1" if tied else not gated, seq=need(row, "seq"), experts=experts, topk=whole(row, "topk", 0),
        expert_ffn=whole(row, "expert_ffn", ffn),
    )  # fmt: skip


def microbatches_of(
    row: Cells, batch: int, data: int, devices: int, pipeline: int, fsdp: bool, assumed: list[str]
) -> int:
    """Microbatches of a step of ``batch`` sequences on ``data`` replicas; ``devices``: of one stage. Raises
    RowError where they do not divide it."""
    size = number(row, "mbs")
    if size is None and pipeline == 1:
        assumed.append("one microbatch")
        return 1
    if size is None:
        assumed.append("mbs 1")
        size = 1.0
    if fsdp and pipeline == 1 and math.isclose(size * devices, batch):  # a batch of each device: MaxText's, on all axes
        return 1
    count = batch / (size * data)
    if count < 1 and pipeline == 1:
        assumed.append("one microbatch")
        return 1
    if abs(count - round(count)) > 1e-6 or round(count) < 1:
        raise RowError(f"mbs {size:g} x dp {data} do not divide gbs {batch}")
    return round(count)


def schedule_of(row: Cells, pipeline: int, assumed: list[str]) -> tuple[str, int]:
    """(autopar's name of the schedule, stages on each mesh)."""
    said, virtual = text(row, "schedule").lower(), whole(row, "vp", 1)
    if pipeline == 1:
        return "1f1b", 1
    if said.startswith("zb"):
        return ("zb_h2" if "2p" in said else "zb_h1"), 1
    if virtual > 1:
        return "interleaved_1f1b", virtual
    if "interleaved" in said or not said:
        assumed.append("1F1B without virtual stages")
    return ("gpipe" if "gpipe" in said else "1f1b"), 1


def zero_of(row: Cells, assumed: list[str]) -> int:
    """Level of ZeRO."""
    said = text(row, "zero").lower()
    if not said:
        assumed.append("ZeRO 1")
        return 1
    if "fsdp" in said:
        return 3
    if not said[0].isdigit():
        raise RowError(f"zero {said!r} is no level")
    return int(said[0])


def recompute_of(row: Cells, gpu: bool, assumed: list[str]) -> Recompute:
    """What layers compute again, of the three ways there are."""
    said = text(row, "recompute").lower()
    if said in ("none", "full"):
        return "none" if said == "none" else "full"
    if not said or "not stated" in said:
        assumed.append(f"recompute {'none' if gpu else 'dots'}")
        return "none" if gpu else "dots"
    kind: Recompute = "full" if said.startswith("full") or ("custom" in said and "dots" not in said) else "dots"
    if said not in ("selective", "selective (attention)", "minimal (save dots)", "dots_saveable"):
        assumed.append(f"recompute {said} as {kind}")
    return kind


LLAMA: dict[str, dict[str, str]] = {
    "LLaMA 13B": {"layers": "40", "hidden": "5120", "heads": "40", "ffn": "13824"},
    "LLaMA 30B": {"layers": "60", "hidden": "6656", "heads": "52", "ffn": "17920"},
    "LLaMA 65B": {"layers": "80", "hidden": "8192", "heads": "64", "ffn": "22016"},
}
"""Of the trials: Touvron et al., "LLaMA", 2023."""
TRIALS_VOCAB = "128000"
"""Inferred (README of the data)."""


def trial_of(row: Cells) -> Run:
    """One trial of Aleph Alpha's."""
    model, kernel, status = text(row, "model"), text(row, "kernel").lower(), text(row, "status")
    cells: dict[str, str | None] = {
        **LLAMA.get(model, {}), "id": f"trial-{text(row, 'trial')}", "source": "Aleph Alpha trials", "quality": "A",
        "hw_key": "A100_80GB", "devices": text(row, "gpus"), "devices_per_host": "8", "interconnect": "HDR IB",
        "model": model, "gated": "1", "vocab": TRIALS_VOCAB, "tied_emb": "0", "seq": text(row, "seq"), "dtype": "bf16",
        "optimizer": "adam", "gbs_seq": text(row, "gbs_seq_inferred"), "mbs": text(row, "mbs"), "tp": text(row, "tp"),
        "pp": text(row, "pp"), "zero": "1", "seq_parallel": "yes" if text(row, "sequence_parallel") == "1" else "no",
        "recompute": "none" if text(row, "activation_checkpointing") == "disabled" else "full",
        "flash": "yes" if "flash" in kernel else "no", "schedule": "1F1B", "step_s": text(row, "step_s"),
    }  # fmt: skip
    return replace(run_of(cells), status=status, sheet=text(row, "sheet"), kernel=kernel)


def said_so(cell: str) -> bool | None:
    """What a cell of yes and no says; None where it says neither."""
    return None if not cell else cell.lower().startswith("yes")


def text(row: Cells, name: str) -> str:
    """A cell; "" for one that is blank or not there."""
    return (row.get(name) or "").strip()


def number(row: Cells, name: str) -> float | None:
    """A cell's figure; None where it holds none."""
    try:
        found = float(text(row, name))
    except ValueError:
        return None
    return found if math.isfinite(found) else None


def whole(row: Cells, name: str, default: int) -> int:
    """A cell's whole number, ``default`` where it is blank. Raises RowError for a fraction."""
    found = number(row, name)
    if found is None:
        return default
    if found != int(found):
        raise RowError(f"{name} {found:g} is no whole number")
    return int(found)


def need(row: Cells, name: str) -> int:
    """A cell's whole number, which has to be there. Raises RowError."""
    found = whole(row, name, 0)
    if found < 1:
        raise RowError(f"{name} is {text(row, name) or 'blank'}")
    return found
