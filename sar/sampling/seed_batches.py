"""Which seed nodes are in which mini-batch: as many batches on every worker, each seed once an epoch."""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from sar.comm import session
from sar.errors import ConfigError
from sar.sampling.optimized_batches import OptimizedBatches
from sar.sampling.seeds import check_seeds


class SeedBatches:
    """This worker's seeds in batches, as many as every other worker has.

    Without `drop_last` there are as many batches as the worker with most seeds needs, and each seed is in one batch of
    every epoch. That worker, and those that need as many, cut their seeds as `torch.utils.data.DataLoader` does: whole
    batches and the rest. The others spread theirs evenly over all batches, whose sizes differ by one at most; where
    there are fewer seeds than batches, some are empty.

    With `drop_last` there are as many batches as the worker with fewest seeds can fill, all whole. What is left over
    sits out the epoch: the end of the seeds, or of their new order with `shuffle`.

    `optimized` fixes which seeds come together. `shuffle` then changes the order of the batches, and `drop_last` leaves
    out the seeds of the last, smaller batch in every epoch.

    Called by all workers together.

    Args:
        seeds: this worker's, (S,) integer global IDs; may be empty.
        batch_size: seeds in a batch, at least 1; the same on every worker.
        drop_last: only whole batches.
        shuffle: another order in every epoch.
        seed: of the shuffling; with the number of the epoch and the rank it determines the order.
        optimized: puts seeds that lie close into one batch; None takes them as they come.
        node_ranges: `graph.node_ranges`, by which seeds of other partitions are refused; None where that has been done.
        foreign: allow seeds of other partitions, such as `split_seeds` returns, as long as each is on one worker only.

    Raises:
        GraphError: for seeds that are no nodes, given twice, or of another partition.
        ConfigError: for a batch size below 1.
        CommunicationError: where another worker raised, or passes other settings.
    """

    def __init__(
        self,
        seeds: Tensor,
        batch_size: int,
        *,
        drop_last: bool = False,
        shuffle: bool = False,
        seed: int = 0,
        optimized: OptimizedBatches | None = None,
        node_ranges: Sequence[tuple[int, int]] | None = None,
        foreign: bool = False,
    ) -> None:
        group = session.current_group()
        self._shuffle = shuffle
        self.seed = seed
        self._rank = group.rank
        with group.guard():
            group.agree(
                f"SeedBatches of {batch_size}, drop_last {drop_last}, shuffle {shuffle}, "
                f"optimised {optimized is not None}, foreign seeds {foreign}"
            )
            if not isinstance(batch_size, int) or batch_size < 1:
                raise ConfigError(f"batch_size is {batch_size}; expected an integer of at least 1.")
            self._seeds = check_seeds(seeds, group, node_ranges, foreign=foreign)
            counts = [int(count) for count in group.all_gather(torch.tensor(len(self._seeds)), "SeedBatches")]
            self._count = min(counts) // batch_size if drop_last else -(-max(counts) // batch_size)
            self._sizes = _sizes(len(self._seeds), self._count, batch_size, drop_last)
            self._fixed: list[Tensor] | None = None
            if optimized is not None:
                self._fixed = optimized.group(self._seeds, self._sizes)
                group.agree("SeedBatches: optimised batches are made")

    def __len__(self) -> int:
        """The number of batches in an epoch, the same on every worker."""
        return self._count

    def epoch(self, number: int) -> list[Tensor]:
        """The batches of an epoch, `len(self)` tensors of global IDs, (S_batch,) int64; not a collective call.

        Args:
            number: of the epoch; the same number gives the same batches.
        """
        if self._fixed is not None:
            return [self._fixed[k] for k in self._order(len(self._fixed), number)[: self._count].tolist()]
        sizes = self._sizes[: self._count]
        return list(self._seeds[self._order(len(self._seeds), number)[: sum(sizes)]].split(sizes))

    def _order(self, count: int, number: int) -> Tensor:
        if not self._shuffle:
            return torch.arange(count)
        text = f"{self.seed} {number} {self._rank}"
        state = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)
        return torch.randperm(count, generator=torch.Generator().manual_seed(state))


def _sizes(num_seeds: int, count: int, batch_size: int, drop_last: bool) -> list[int]:
    """How many seeds are in each of a worker's batches; with `drop_last` of all that it can fill, `count` or more."""
    whole, rest = divmod(num_seeds, batch_size)
    if drop_last:
        return [batch_size] * whole
    if whole + (rest > 0) == count:
        return [batch_size] * whole + [rest] * (rest > 0)
    return [(k + 1) * num_seeds // count - k * num_seeds // count for k in range(count)]
