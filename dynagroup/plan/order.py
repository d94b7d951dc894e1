"""The order that a user's sampler gives, read once per epoch and checked."""

import zlib
from collections.abc import Iterable, Iterator, Sized

import numpy as np

from dynagroup.distributed import current_world, differing
from dynagroup.errors import AlignmentError, ConfigError
from dynagroup.plan.epoch import NONE
from dynagroup.plan.mixture import Mixture
from dynagroup.shapes import IntArray
from dynagroup.validation import explained


class OrderSource:
    """Reads a user's sampler of indices once per epoch, and keeps the indices of the running epoch.

    A sampler with ``set_epoch`` is given the epoch; others are just read, so only a list, or a sampler that begins anew,
    has the same order when an epoch is read again. Raises ConfigError if the sampler can be read only once, or yields a
    value that is no index. ``argument``: the user's name of the source, in messages."""

    def __init__(self, source: Iterable[int], num_samples: int, argument: str = "sampler") -> None:
        is_iterable = isinstance(source, Iterable) and not isinstance(source, Iterator)
        is_scalar = getattr(source, "ndim", 1) == 0
        if not is_iterable or is_scalar:
            raise ConfigError(
                f"`{argument}` must be a list or a sampler, which can be read anew in every epoch, "
                f"but is {source!r}"
            )
        self._source = source
        self.argument = argument
        self._num_samples = num_samples
        self._epoch = -1
        self._indices = NONE
        self._counts: dict[int, int] = {}  # samples left out -> indices in every epoch without them

    def __len__(self) -> int:
        """Returns the number of indices in an epoch, by the sampler's own ``len()`` if it has one."""
        if isinstance(self._source, Sized):
            return len(self._source)
        return len(self._known_epoch())

    def _known_epoch(self) -> IntArray:
        """Returns the indices of the epoch that was read last, or of the first."""
        return self.of_epoch(max(self._epoch, 0))

    @property
    def mixture(self) -> Mixture | None:
        """The source, if it is a mixture with the same shares in every update."""
        if isinstance(self._source, Mixture) and self._source.samples_per_update is not None:
            return self._source
        return None

    def forget(self) -> None:
        """Reads the running epoch anew when it is next needed."""
        self._epoch = -1

    def check_update(self, num_samples: int, where: str = "") -> None:
        """Raises ConfigError if an update would have other shares than a mixture gives it."""
        mixture = self.mixture
        if mixture is not None and num_samples % (mixture.samples_per_update or 1):
            raise ConfigError(
                f"`samples_per_update` ({num_samples}{where}) must be a multiple of that of the Mixture "
                f"({mixture.samples_per_update}), so that each update has its shares; give both the "
                "same, or a schedule of multiples, such as linear_ramp(..., multiple_of=...)"
            )

    def counted(self, left_out: IntArray = NONE) -> int:
        """Returns the number of indices in every epoch, without those left out."""
        if len(left_out) and isinstance(self._source, Mixture):
            raise ConfigError(
                "oversize='drop' would leave out more of a Mixture in some epochs; filter its `sources`"
            )
        if len(left_out) not in self._counts:
            num_out = 0
            if len(left_out):
                num_out = int(np.isin(self._known_epoch(), left_out).sum())
            self._counts[len(left_out)] = len(self) - num_out
        return self._counts[len(left_out)]

    def counted_epoch(self, epoch: int, left_out: IntArray = NONE) -> IntArray:
        """Returns the indices of an epoch, without those left out. ConfigError: other epochs have another number."""
        num_wanted = self.counted()
        num_fitting = self.counted(left_out)
        indices = self.of_epoch(epoch)
        fitting = indices
        if len(left_out):
            fitting = indices[~np.isin(indices, left_out)]
        if len(indices) != num_wanted or len(fitting) != num_fitting:
            raise ConfigError(
                f"`sampler` yields {len(indices)} indices ({len(fitting)} that fit) in epoch {epoch}, "
                f"but {num_wanted} ({num_fitting} that fit) by its len() or in the epoch before; "
                "yield each sample once in every epoch, and correct __len__"
            )
        return fitting

    def of_epoch(self, epoch: int) -> IntArray:
        if epoch != self._epoch:
            self._indices = self._checked(self._read(epoch))
            self._epoch = epoch
        return self._indices

    def checksum(self, epoch: int) -> int:
        return zlib.crc32(self.of_epoch(epoch).data)

    def _read(self, epoch: int) -> list[int]:
        if hasattr(self._source, "set_epoch"):
            self._source.set_epoch(epoch)  # type: ignore[attr-defined]
        indices = list(self._source)
        if not indices and len(self._indices):
            name = type(self._source).__name__
            raise ConfigError(
                f"`{self.argument}` ({name}) yields nothing after its first epoch; its __iter__ must "
                "begin anew"
            )
        return indices

    def _checked(self, indices: list[int]) -> IntArray:
        with explained(f"`{self.argument}` must yield integer indices"):
            array = np.asarray(indices)
        if array.ndim != 1 or (len(array) and array.dtype.kind not in "iu"):
            raise ConfigError(
                f"`{self.argument}` must yield integer indices, but yields {array.dtype} {array.shape[1:]}"
            )
        outside = np.flatnonzero((array < 0) | (array >= self._num_samples))
        if len(outside):
            raise ConfigError(
                f"`{self.argument}` yields index {array[outside[0]]}, but there are only "
                f"{self._num_samples} samples"
            )
        return array.astype(np.int64)


def check_alike(order: OrderSource, epoch: int) -> None:
    """Raises AlignmentError if ranks have different orders. All ranks must call it, once per epoch."""
    if differing(current_world(), {"order": order.checksum(epoch)}):
        raise AlignmentError(
            f"`{order.argument}` yields different indices on different ranks in epoch {epoch}, so "
            "samples would be lost and repeated; seed it the same on all ranks, e.g. "
            "RandomSampler(data, generator=torch.Generator().manual_seed(0))"
        )
