"""Where a pass over an order begins, and how far it is: what an `HDF5Loader` and `mpidp.shares` have in common."""

import logging

from mpidp.hdf5.order.order import Order

log = logging.getLogger("mpidp")


class Passes:
    """Passes over the epochs of an order, one after the other, at one position in the current one."""

    order: Order

    def __init__(self) -> None:
        self._epoch = 0
        self._position = 0
        self._continues = False  # the next pass goes on from the position because someone asked for it
        self._told = False

    @property
    def num_samples(self) -> int:
        """Samples of an epoch, over all ranks."""
        return self.order.num_samples

    @property
    def epoch(self) -> int:
        """The current epoch, counted from 0."""
        return self._epoch

    @property
    def position(self) -> int:
        """Global samples of the current epoch that were handed out."""
        return self._position

    @property
    def remaining_steps(self) -> int:
        """Steps from the position to the end of the current epoch."""
        return self.order.steps(self._position)

    def __len__(self) -> int:
        """Return the number of steps of a whole epoch."""
        return self.order.steps()

    def _begin_pass(self, over: str, name: str, speaks: bool) -> None:
        """Choose where a pass begins: behind the position only in a shuffled order, or if someone asked for it.

        over: what the loop is over, for the message. name: of the variable that holds it, likewise. speaks: whether
        this rank says that a pass goes on which was left.
        """
        if not self.remaining_steps:
            self._finish_epoch()
        if self._position and not self._continues:
            if self.order.shuffle == "none":
                self._position = 0
            elif not self._told and speaks:
                self._told = True
                log.warning(
                    "the loop over %s goes on behind the %s of %s samples of epoch %d that the last loop was handed "
                    "before it was left; %s.restart() before a loop begins the epoch anew",
                    over,
                    f"{self._position:,}",
                    f"{self.num_samples:,}",
                    self._epoch,
                    name,
                )
        self._continues = False

    def _finish_epoch(self) -> None:
        self._epoch, self._position = self._epoch + 1, 0
