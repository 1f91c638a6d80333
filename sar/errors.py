"""The exceptions of sar. Messages describe what was found, what was expected and how to fix the problem."""


class SarError(Exception):
    """Base class of all errors raised by sar."""


class ConfigError(SarError, ValueError):
    """An argument or a `Config` value that cannot be used."""


class PartitionError(SarError, ValueError):
    """Partition data that is missing, damaged, or does not fit this run."""


class CheckpointError(SarError, ValueError):
    """Saved training state that cannot be written, is missing or damaged, or belongs to a different model."""


class GraphError(SarError, ValueError):
    """A graph operation that this graph does not allow."""


class MissingMethodError(GraphError, AttributeError):
    """A method or attribute of DGL's graphs that a distributed graph does not have."""


class FieldError(SarError, KeyError):
    """A node or edge feature, or a node or edge type, that the graph does not have."""

    def __str__(self) -> str:
        # KeyError prints the repr of its argument, which mangles a sentence.
        return str(self.args[0]) if self.args else ""


class NotInitializedError(SarError, RuntimeError):
    """A distributed call before `sar.initialize_comms`."""


class CommunicationError(SarError, RuntimeError):
    """Communication with the other workers failed. `sar.recover` resumes, unless a worker has died.

    final: whether the workers cannot recover.
    """

    final = False


class PeerError(CommunicationError):
    """Another worker died, left, or raised an error inside a distributed call."""


class DisagreementError(CommunicationError):
    """The workers are not making the same distributed call on the same graph."""


class CommunicationTimeout(CommunicationError, TimeoutError):
    """A wait for other workers exceeded `Config.timeout`."""


class SpillError(SarError, OSError):
    """Tensors could not be written to disk in out-of-core training."""


class DglError(SarError, ImportError):
    """DGL is missing, or a part of DGL was used that cannot run on the installed torch."""
