"""The cost model's two parts: FLOPs of operators, seconds of collectives."""
