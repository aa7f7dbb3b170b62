"""Pipelines on a Ray cluster: one actor for each mesh, and a driver that watches over them.

cluster   starts or joins Ray; `Cluster.compile` makes a step of a plan
gang      the actors of one step: messages to all of them, each with a deadline
worker    what an actor does: it traces, compiles and runs its stages
step      the driver's side of a step: ships what a worker lacks, keeps handles of what it has
keeper    checkpoints of its arrays, the driver's side; archive: the worker's
between   arrays from a worker's mesh to another's
"""
