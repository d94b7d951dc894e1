"""LLaMA-Factory's own trainers, template and collators. Needs an environment of its own: scripts/test_llamafactory.sh."""

import json

import numpy as np
import pytest

pytest.importorskip(
    "llamafactory", reason="LLaMA-Factory has an environment of its own: bash scripts/test_llamafactory.sh"
)
from transformers import TrainerCallback  # noqa: E402

from dynagroup import TokenBudget  # noqa: E402
from dynagroup.integrations.hf_data import UpdateItems
from dynagroup.integrations.llamafactory import dynamic_batching  # noqa: E402
from dynagroup.update.planned import PlannedDataLoader  # noqa: E402
from tests.integrations import toys  # noqa: E402
from tests.integrations.jobs import parameters  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


class Watch(TrainerCallback):
    """Remembers what the workflow trained with."""

    def on_train_end(self, args, state, control, model=None, train_dataloader=None, **kwargs):
        self.parameters, self.loader, self.num_updates = parameters(model), train_dataloader, state.global_step


def saved(folder):
    """A model, its tokenizer and a data set of pairs and texts, as LLaMA-Factory reads them from disk."""
    toys.causal_lm().float().save_pretrained(folder / "model")
    toys.tokenizer().save_pretrained(folder / "model")
    rng = np.random.default_rng(0)

    def text(size):
        return " ".join(f"w{i}" for i in rng.integers(4, toys.VOCAB, size))

    sizes = [int(size) for size in rng.integers(2, 40, 32)]
    talks = [{"instruction": text(4), "output": text(size)} for size in sizes]
    pairs = [{"instruction": text(4), "chosen": text(size), "rejected": text(size // 2 + 1)} for size in sizes]
    data = folder / "data"
    data.mkdir()
    (data / "talks.json").write_text(json.dumps(talks))
    (data / "pairs.json").write_text(json.dumps(pairs))
    answers = {"prompt": "instruction", "chosen": "chosen", "rejected": "rejected"}
    info = {
        "talks": {"file_name": "talks.json", "columns": {"prompt": "instruction", "response": "output"}},
        "pairs": {"file_name": "pairs.json", "ranking": True, "columns": answers},
    }
    (data / "dataset_info.json").write_text(json.dumps(info))


@pytest.mark.parametrize("stage", ["sft", "pt", "dpo"])
def test_the_whole_program_makes_the_updates_of_fixed_batches(stage, tmp_path):
    from llamafactory.train.tuner import run_exp

    saved(tmp_path)

    def run(name):
        watch = Watch()
        arguments = {
            "model_name_or_path": str(tmp_path / "model"), "stage": stage, "do_train": True, "finetuning_type": "full",
            "dataset_dir": str(tmp_path / "data"), "dataset": "pairs" if stage == "dpo" else "talks", "template": "empty",
            "output_dir": str(tmp_path / name), "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2,
            "num_train_epochs": 1, "learning_rate": 1e-2, "use_cpu": True, "report_to": "none", "save_strategy": "no",
            "cutoff_len": 16 if stage == "pt" else 128, "overwrite_cache": True, "dataloader_pin_memory": False,
            "disable_tqdm": True, "disable_gradient_checkpointing": True,
        }  # fmt: skip
        run_exp(arguments, callbacks=[watch])
        return watch

    with dynamic_batching(TokenBudget(96 if stage == "pt" else 320)):  # texts are packed into blocks of 16 tokens
        ours = run("ours")
    fixed = run("fixed")  # behind the block everything is as it was
    assert not isinstance(fixed.loader, UpdateItems)
    assert isinstance(ours.loader.loader, PlannedDataLoader)
    assert ours.num_updates == fixed.num_updates >= 2
    assert sum(ours.loader.loader.stats.batch_sizes.values()) > ours.num_updates, "updates were divided"
    assert (fixed.parameters - ours.parameters).abs().max() < 2e-5
    assert (fixed.parameters - parameters(toys.causal_lm().float())).abs().max() > 1e-2, "nothing was trained"
    assert (tmp_path / "ours" / "model.safetensors").exists()
