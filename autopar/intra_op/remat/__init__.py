"""Which values to compute again instead of keeping them, chosen together with the shardings (decision 011)."""
