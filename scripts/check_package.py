"""Checks of scripts/test_package.sh. usage: check_package.py files FOLDER | check_package.py extra NAME"""

import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def files(folder: Path) -> None:
    """The wheel has every file of the package and nothing else; both have the version of the package and of the changes."""
    [wheel] = folder.glob("*.whl")
    [sdist] = folder.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    packed = {name for name in names if ".dist-info/" not in name}
    package = ROOT / "dynagroup"
    tracked = {
        path.relative_to(ROOT).as_posix()
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert packed == tracked, sorted(packed ^ tracked)
    with tarfile.open(sdist) as archive:
        source = {name.partition("/")[2] for name in archive.getnames()}
    missing = (tracked | {"LICENSE", "README.md", "pyproject.toml"}) - source
    assert not missing, sorted(missing)
    version = re.search(r'__version__ = "(.*)"', (package / "__init__.py").read_text())
    changes = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    citation = re.search(r"^version: (\S+)", (ROOT / "CITATION.cff").read_text(), re.M)
    assert version
    assert changes
    assert citation
    versions = {version[1], changes[1], citation[1], wheel.name.split("-")[1]}
    assert len(versions) == 1, f"package, changes, citation and wheel have the versions {versions}"
    print(f"{wheel.name}: {len(packed)} files; {sdist.name}: {len(source)} files")


def core() -> None:
    import numpy as np

    from dynagroup import LengthAwareBatchSampler, TokenBudget

    sampler = LengthAwareBatchSampler([3, 5, 9], TokenBudget(10))
    assert sampler.plan.num_steps == 2
    np.save("lengths.npy", [5, 90, 7, 12] * 50)
    command = [sys.executable, "-m", "dynagroup", "doctor", "lengths.npy", "--batch-size", "8"]
    subprocess.run([*command, "--html", "doctor.html"], check=True, capture_output=True)
    assert "<table>" in Path("doctor.html").read_text(encoding="utf-8")


def memory() -> None:
    from dynagroup.memory import MemoryRegressor
    from dynagroup.shapes import BatchShape

    regressor = MemoryRegressor.pretrained()
    [share] = regressor.relative(BatchShape.of(4, 512), BatchShape.of(8, 512))
    assert 0.5 < share < 1


def hf() -> None:
    from transformers import GPT2Config

    from dynagroup import MemoryBudget
    from dynagroup.integrations.accelerate import prepare  # noqa: F401
    from dynagroup.integrations.hf import DynagroupTrainer  # noqa: F401

    config = GPT2Config(vocab_size=99, n_embd=32, n_layer=2, n_head=2)
    assert MemoryBudget.from_model(config, "1GB").most_samples(512)[0] > 1


def trl() -> None:
    from trl import SFTTrainer

    from dynagroup.integrations.hf import dynagroup_trainer

    assert issubclass(dynagroup_trainer(SFTTrainer), SFTTrainer)


def lightning() -> None:
    from lightning.pytorch.callbacks import Callback

    from dynagroup.integrations.lightning import LightningSteps

    assert issubclass(LightningSteps, Callback)


def viz() -> None:
    from dynagroup import LengthAwareBatchSampler, TokenBudget

    LengthAwareBatchSampler([3, 5, 9], TokenBudget(10)).plan.plot().savefig("plan.png")
    assert Path("plan.png").read_bytes().startswith(b"\x89PNG")


def parquet() -> None:
    from dynagroup import LengthAwareBatchSampler, TokenBudget

    LengthAwareBatchSampler([3, 5, 9], TokenBudget(10)).plan.to_parquet("plan.parquet")
    assert Path("plan.parquet").stat().st_size


def ray() -> None:
    import ray.data  # noqa: F401

    import dynagroup.integrations.ray  # noqa: F401


EXTRAS: dict[str, Callable[[], None]] = {
    "core": core,
    "memory": memory,
    "hf": hf,
    "trl": trl,
    "lightning": lightning,
    "viz": viz,
    "parquet": parquet,
    "ray": ray,
}

if __name__ == "__main__":
    what, value = sys.argv[1:]
    if what == "files":
        files(Path(value))
    else:
        sys.path.pop(0)  # the folder of this script: what is imported must be the wheel
        EXTRAS[value]()
        print(f"{value}: works")
