"""FSDP2 after it ran out of memory: started again with smaller batches, from the last update."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.test_examples import example
from tests.torchrun import on_ranks


def trained(folder: Path, *pretended: float) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    return example("restart_fsdp2.py")["main"](folder, *pretended)


@pytest.mark.slow
def test_a_run_that_ran_out_of_memory_goes_on_with_smaller_batches_to_the_same_parameters(tmp_path: Path) -> None:
    whole, _ = on_ranks(2, trained, tmp_path / "once")
    with pytest.raises(AssertionError, match="OutOfMemoryError"):
        on_ranks(2, trained, tmp_path / "again", 245)
    assert (tmp_path / "again" / "last.json").exists(), "it had not even saved"
    found = on_ranks(2, trained, tmp_path / "again")
    for result in found:
        assert result["limit"] <= 0.9 * 256
        torch.testing.assert_close(result["weights"], whole["weights"], rtol=1e-9, atol=1e-12)
    seen = Counter(line for path in tmp_path.glob("again/seen-*.txt") for line in path.read_text().split())
    assert seen == Counter({str(index): 2 for index in range(128)})
