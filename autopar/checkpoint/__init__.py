"""Checkpoints: each process writes and reads its own slices, in the format that Orbax writes and reads.

A root folder holds one folder per step, as `orbax.checkpoint.CheckpointManager` lays them out:

    root/
      120/                            a complete checkpoint
        _CHECKPOINT_METADATA          which item is of which kind, when it was made
        commit_success.txt            the marker, written last
        default/                      the one item: a pytree
          _METADATA                   paths of the leaves, and what each is
          array_metadatas/process_0   the implementation of random keys
          manifest.ocdbt, d/          the database of all leaves (OCDBT, Zarr 3), which refers to
          ocdbt.process_0/, …         what each process wrote
      140.orbax-checkpoint-tmp-…/     one that was not finished
      autopar_owner.json              which driver writes here

A checkpoint is written into a folder with another name and renamed when it is complete, so whatever the moment of an
interruption, a folder named by a number is whole. The root has to be on a file system that renames folders atomically
and that all processes see. One driver at a time writes into a root (`owner.py`).

- `save` and `restore` are for pytrees of `jax.Array` (`saving.py`, `restoring.py`);
- `begin`, `write_slices`, `commit`, `open_checkpoint`, `read_slices` (`store.py`, `reading.py`) are what they are made
  of: numpy slices of named leaves, for processes each of which holds a part of the tree only, such as the workers of a
  pipeline.

tensorstore is needed, and imported where it is first used.
"""

from __future__ import annotations

from autopar.checkpoint.folder import begin, delete, item_of, latest, steps
from autopar.checkpoint.leaf import Index, Key, Leaf, chunk_of
from autopar.checkpoint.owner import OWNER, own, release
from autopar.checkpoint.reading import Checkpoint, open_checkpoint, read_slices
from autopar.checkpoint.restoring import restore
from autopar.checkpoint.saving import Save, save
from autopar.checkpoint.store import commit, write_slices
from autopar.checkpoint.tree import leaves_of

__all__ = [
    "Checkpoint",
    "Index",
    "Key",
    "OWNER",
    "Leaf",
    "Save",
    "begin",
    "chunk_of",
    "commit",
    "delete",
    "item_of",
    "latest",
    "leaves_of",
    "open_checkpoint",
    "own",
    "read_slices",
    "release",
    "restore",
    "save",
    "steps",
    "write_slices",
]
