"""Counts of a run, added over ranks."""

from dynagroup.distributed import World
from dynagroup.testing import run_ranks
from dynagroup.update.step import LoaderStats


def test_counts_of_ranks_are_added_and_the_largest_predicted_memory_is_kept() -> None:
    def merged(world: World) -> LoaderStats:
        stats = LoaderStats()
        stats.count_step(3, real_tokens=20, padded_tokens=30)
        stats.count_memory(0.2 + 0.301 * world.rank)
        return stats.merged(world)

    for stats in run_ranks(2, merged):
        assert stats.batch_sizes == {3: 2}
        assert stats.memory_percent == {20: 1, 51: 1}
        assert stats.predicted_memory == 0.51
        assert stats.figures(seconds=2)["tokens_per_s"] == 20
    alone = LoaderStats()
    alone.count_memory(None)
    assert "predicted_memory" not in alone.figures(seconds=1)
