"""What of a program's temporaries stays in a TPU's vector memory, and needs none of its main memory nor of its time.

XLA for TPUs assigns buffers to VMEM for as long as they are read and written there ("memory space assignment"), and
copies what is needed later to main memory and back beside products. In programs for v5e (libtpu 0.0.42,
`python -m benchmarks.fidelity`) nearly all of it is full where temporaries are most: what was there was 109 to 134 of
134 MB.
"""

from __future__ import annotations

from collections.abc import Mapping

_MIB = 2**20
ON_CHIP_BYTES: Mapping[str, int] = {
    "TPU-v5e": 128 * _MIB, "TPU-v5p": 64 * _MIB, "TPU-v6e": 128 * _MIB, "TPU7x": 64 * _MIB,
}  # fmt: skip
"""`products.family` → VMEM of a core (jax/_src/pallas/mosaic/tpu_info.py); of others too little to count."""
FILLED = 0.85
"""Of it, what buffers are taken to fill (of v5e as above; of others a guess)."""
LARGEST = 0.5
"""Of it, the largest buffer that is taken to go there (chosen: it is written while another is read)."""
