"""Exception classes that a user can meet.

Each message says what, where (pytree path, node, source line), what was got, what was expected and
what to try. ``assert`` is for our own bugs; these are for the user's.
"""


class AutoparError(Exception):
    """Base class of every error that autopar raises on purpose."""


class VersionError(AutoparError, ImportError):
    """A package is of a version that autopar was not made for."""


class AutoparWarning(UserWarning):
    """What works, but not as well as a user may expect."""


class OptionError(AutoparError, ValueError):
    """An option has a value that it cannot have."""


class TraceError(AutoparError):
    """The step cannot be traced to a jaxpr."""


class ArgumentError(AutoparError, ValueError):
    """An argument of a call cannot be used; the message says which."""


class ClusterError(AutoparError, ValueError):
    """A cluster or mesh description is malformed, or asks for devices that are not there."""


class NoRoomError(ClusterError):
    """A cluster has no room for a plan's workers now."""


class ShardingError(AutoparError, ValueError):
    """A pinned sharding does not fit its value or its mesh."""


class ReshardingError(AutoparError, ValueError):
    """Meshes, values or transfers of a resharding do not fit each other."""


class ScheduleError(AutoparError, ValueError):
    """A pipeline schedule cannot be made as asked, misses a task, or would wait for ever."""


class ProgramError(AutoparError, ValueError):
    """A pipeline's program reads what is not there, keeps what nobody frees, or would wait for ever."""


class RuleError(AutoparError, ValueError):
    """A sharding rule is malformed or does not fit the operator that it is given for."""


class LoweringError(AutoparError):
    """An operator of the step cannot run on its shards, or is one that autopar may not replicate."""


class InfeasibleError(AutoparError):
    """No plan exists within the limits; the message says which limit and by how much."""


class SolverTimeoutError(AutoparError):
    """The time limit passed before any plan was found."""


class MicrobatchError(AutoparError, ValueError):
    """The step cannot be split into microbatches exactly; the message says why."""


class PlanFormatError(AutoparError, ValueError):
    """A plan or cluster file is damaged, or of another schema version."""


class PlanMismatchError(AutoparError, ValueError):
    """A plan is used with another function, other shapes or other devices."""


class CompilerError(AutoparError):
    """A compiler is not installed, cannot compile for a plan's devices, or failed."""


class WorkerError(AutoparError, RuntimeError):
    """A worker of a cluster died, failed, or did not answer in time; the message says which one, and where it was."""


class CheckpointError(AutoparError, ValueError):
    """A checkpoint cannot be written, or cannot be restored as asked; the message names the leaf."""


class DataError(AutoparError, ValueError):
    """A host's part of a batch does not fit the others', or its source failed."""


class CheckError(AutoparError):
    """`autopar.check` found a value that differs from the unsharded step's."""


class VerifyError(AutoparError, AssertionError):
    """A value of ``ir`` breaks one of its own constraints (a bug, or an edited file)."""
