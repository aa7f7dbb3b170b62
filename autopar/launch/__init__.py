"""Starts, checks and ends clusters: one machine, hosts over ssh, Slurm, Kubernetes; `autopar cluster`, `run`, `doctor`.

The launching machine talks to one agent on each host (`agent.py`, `sessions.py`): lines of JSON through the standard
input and output of whatever starts commands there (``--rsh``: ssh, srun, kubectl exec). No port is opened for it.
"""
