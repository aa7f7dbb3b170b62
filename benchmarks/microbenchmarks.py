"""Do the prices of products, collectives and attention hold against what others measured? Needs no device.

    python -m benchmarks.microbenchmarks [--data FOLDER]

Rows of ``../shared/data/published_runs`` (its README says where each is from): microbenchmarks.csv and XLA's own
tables. For each device and kind of operator: rows, median and 90th percentile of |ln(predicted / measured)|, and the
medians of what the constants were fitted on and of what was kept apart: of products a third of the shapes, of
collectives each third size, and groups of 8 and 32 in racks, of attention 2048 and 8192 positions. The bar is 15 % in
the median, of all and of what was kept apart, for each (device, kind) with at least 10 rows. Rows of devices or fabrics
that have no constants of their own are left out, and so are products that are said to be faster than the data sheet's
peak; both are counted. Exit status 1 where the bar is missed.
"""

from __future__ import annotations

import argparse
import csv
import math
import re
import statistics
import sys
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from autopar.cost.collectives import collective_s
from autopar.cost.kernels import attention_s
from autopar.cost.logical_meshes import logical_mesh
from autopar.cost.products import product_s
from autopar.ir.cluster import DeviceSpec
from autopar.ir.presets import PRESETS, cluster_from_text
from autopar.ir.slices import GENERATIONS
from autopar.primitives.attention import Attended

DATA = Path("../shared/data/published_runs")
BAR = 0.15
LEAST = 10
FILES = ("microbenchmarks.csv", "xla_collectives_all.csv", "xla_matmul_all.csv")
Row = Mapping[str, str]

DEVICES = {
    "sm_90 (H100/H200)": "dgx-h100", "H100-SXM-80GB": "dgx-h100", "H100 SXM": "dgx-h100", "H200 SXM": "dgx-h200",
    "B200": "dgx-b200", "B200 SXM": "dgx-b200", "GB200 SXM": "gb200-nvl72", "A100 SXM": "dgx-a100",
    "A100-SXM-80GB": "dgx-a100",
}  # fmt: skip
"""How rows call a device → a preset with it."""
HOSTS = {
    "sm_90 (H100/H200 8-GPU host)": "dgx-h100", "B200 8-GPU host": "dgx-b200", "GB200 NVL72": "gb200-nvl72",
    "sm_103 (B300/GB300) NVL72": "gb200-nvl72", "H100-SXM-80GB": "dgx-h100", "H100-SXM-80GB (p5)": "p5.48xlarge:2",
    "A100-SXM-80GB (p4de)": "p4de.24xlarge:2", "H100-SXM-80GB (GCP a3-mega)": "a3-megagpu-8g:2",
}  # fmt: skip
"""How they call hosts with their links → a cluster of them."""
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "f32": "float32", "fp8": "float8_e4m3fn", "f8e4m3fn": "float8_e4m3fn",
          "f8e5m2": "float8_e5m2"}  # fmt: skip
SCORES_READ = 11.0
"""How often an attention that is not fused goes over its scores, forward and backward (fitted on A100 rows)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A row's log error; ``kept``: True where no constant was fitted on it."""

    device: str
    kind: str
    error: float
    kept: bool


class Skipped(Exception):
    """Why a row has no prediction."""


def compared(row: Row) -> Compared:
    """Raises Skipped where a row has no prediction."""
    match row["kind"]:
        case "matmul":
            return _product(row)
        case "collective":
            return _collective(row)
        case "attention":
            return _attention(row)
        case kind:
            raise Skipped(f"kind {kind}")


def _device(name: str) -> DeviceSpec:
    if name.startswith("TPU v7x"):
        return GENERATIONS["v7x"].device
    if name.startswith("TPU v6e"):
        return GENERATIONS["v6e"].device
    if name not in DEVICES:
        raise Skipped(f"device {name}")
    return PRESETS[DEVICES[name]].groups[0].device


def _product(row: Row) -> Compared:
    if not row["M"] or "host timed" in row["op"]:
        raise Skipped("product without a shape, or with the host's time")
    device = _device(row["hw"])
    operand, _, result = row["dtype"].partition("->")
    dtype = DTYPES.get(operand.partition("x")[0], "bfloat16")
    batch, m, n, k = (float(row[name] or 1) for name in ("batch", "M", "N", "K"))
    flops = 2 * batch * m * n * k
    measured_s = float(row["time_us"]) * 1e-6 if row["time_us"] else flops / (float(row["tflops"]) * 1e12)
    if flops / measured_s > device.peak_flops_per_s(dtype):
        raise Skipped(f"{row['hw']}: faster than the data sheet's peak")
    predicted_s = float(product_s(device, dtype, batch, m, n, k, DTYPES.get(result, dtype)))
    kept = zlib.crc32(f"{m} {n} {k}".encode()) % 3 == 0
    return Compared(device=row["hw"], kind=f"product {dtype}", error=math.log(predicted_s / measured_s), kept=kept)


def _collective(row: Row) -> Compared:
    if row["hw"] not in HOSTS or not row["devices"].isdigit() or not row["time_us"] or not float(row["time_us"]):
        raise Skipped(f"fabric {row['hw']}")
    cluster, kind, size = cluster_from_text(HOSTS[row["hw"]]), row["op"].replace("_", "-"), float(row["size_bytes"])
    count = 2 if kind == "collective-permute" else int(row["devices"])
    (axis,) = logical_mesh(cluster, (count,)).axes
    operand = size / count if kind == "all-gather" else size
    predicted_s = float(collective_s(kind, count, operand, axis.link))
    kept = round(math.log2(size)) % 3 == 0 or ("NVL72" in row["hw"] and count in (8, 32))
    error = math.log(predicted_s / (float(row["time_us"]) * 1e-6))
    return Compared(device=row["hw"], kind=kind, error=error, kept=kept)


def _attention(row: Row) -> Compared:
    """FLOPs are of two products forward, five backward; halved for causality."""
    device, positions, size = _device(row["hw"]), int(row["seq"]), int(row["head_dim"])
    causal, both = row["causal"] == "1", row["pass"] == "fwd+bwd"
    heads = 16384 / positions * 2048 / size
    forward = 4 * heads * positions**2 * size / (2 if causal else 1)
    measured_s = forward * (3.5 if both else 1) / (float(row["tflops"]) * 1e12)
    if row["op"].startswith("PyTorch"):
        one = float(product_s(device, "bfloat16", heads, positions, positions, size))
        passes_s = SCORES_READ * heads * positions**2 * 2 / device.memory_bytes_per_s
        predicted_s = 6 * one + passes_s * (2 if causal else 1)
    elif (row["op"], row["hw"][:4]) in (("cuDNN", "H100"), ("FlashAttention-2", "A100")):
        of = Attended(positions=positions, head_size=size, causal=causal, backward=False)
        predicted_s = float(attention_s(device, "bfloat16", forward, of))
        if both:
            of = Attended(positions=positions, head_size=size, causal=causal, backward=True)
            predicted_s += float(attention_s(device, "bfloat16", 2.5 * forward, of))
    else:
        raise Skipped(f"{row['op']} is not what {row['hw']} runs")
    kept = positions in (2048, 8192)
    return Compared(
        device=row["hw"], kind=f"attention {row['op']}", error=math.log(predicted_s / measured_s), kept=kept
    )


def rows_of(folder: Path) -> Iterator[Row]:
    """All rows of all files, those that are in two of them once."""
    seen: set[tuple[str, ...]] = set()
    for name in FILES:
        with (folder / name).open(newline="", encoding="utf-8") as lines:
            for row in csv.DictReader(lines):
                names = ("kind", "op", "hw", "devices", "dtype", "size_bytes", "batch", "M", "N", "K", "notes",
                         "seq", "head_dim", "causal", "pass", "time_us", "tflops")  # fmt: skip
                key = tuple(row[name] for name in names)
                if key not in seen:
                    seen.add(key)
                    yield row


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table; 1 where the bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the files")
    options = parser.parse_args(argv)
    groups: dict[tuple[str, str], list[Compared]] = defaultdict(list)
    skipped: Counter[str] = Counter()
    for row in rows_of(options.data):
        try:
            found = compared(row)
        except Skipped as why:
            skipped[re.sub(r"\(.*", "", str(why)).strip()] += 1
            continue
        groups[found.device, found.kind].append(found)
    table, missed = Table("device", "kind", "rows", "median", "p90", "fitted on", "kept apart", "bar"), False
    for (device, kind), found in sorted(groups.items()):
        errors = sorted(abs(c.error) for c in found)
        parts = [[abs(c.error) for c in found if c.kept is kept] for kept in (False, True)]
        medians = [statistics.median(part) if part else math.nan for part in parts]
        median, counts = statistics.median(errors), len(found) >= LEAST
        bad = counts and (median > BAR or (len(parts[1]) >= LEAST / 2 and medians[1] > BAR))
        missed |= bad
        cells = (median, errors[int(0.9 * len(errors))], *medians)
        bar = ("missed" if bad else "met") if counts else ""
        table.add_row(device, kind, str(len(found)), *(f"{x:.3f}" for x in cells), bar)
    Console(width=160).print(table)
    Console(width=160).print("left out:", ", ".join(f"{count} ({why})" for why, count in skipped.most_common()))
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
