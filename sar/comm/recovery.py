"""Going on after an error that the training script caught."""

from sar.comm.session import current_group


def recover(step: int = 0) -> int:
    """Go on after an error in a distributed call, together with all other workers.

    After such an error every further call raises. All workers call this instead, those that saw no error included, and
    are then at the same call: they repeat the step that is returned. With one worker there is nothing to do.

    Args:
        step: the first step that this worker has not finished.

    Returns:
        The least of all workers' `step`: the first one that not all have finished.

    Raises:
        PeerError: where a worker has died or left, which is final, or raised an error meanwhile.
        CommunicationTimeout: where a worker does not call this within five minutes, or `Config.timeout` if less.
    """
    return current_group().recover(step)
