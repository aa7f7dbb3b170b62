"""Intra-operator parallelism: how a step, or a stage of a pipeline, is sharded over one mesh of devices."""
