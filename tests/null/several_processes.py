"""A child of `benchmarks.child.ask` that starts another process; both hold memory for a while."""

from __future__ import annotations

import json
import os
import time

EACH_BYTES = 100_000_000

if __name__ == "__main__":
    other = os.fork()
    held = b"x" * EACH_BYTES
    time.sleep(1.5)
    if other:
        os.waitpid(other, 0)
        print(json.dumps({"each_bytes": len(held)}))
