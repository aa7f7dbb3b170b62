"""Programs of a pipeline: emitted from its plan, checked, simulated and drawn."""
