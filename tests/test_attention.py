"""Which kernels of attention run: cuDNN's is off in every step of varying shapes, and on again after it."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from dynagroup import ConfigError, TokenBudget, generate_with_oom_retry
from dynagroup.attention import attention_kernels
from dynagroup.integrations.config import DynagroupConfig
from dynagroup.jobs import embed_dataset, generate_dataset, score_dataset
from tests import models
from tests.integrations import toys
from tests.models import TEXTS

pytestmark = pytest.mark.filterwarnings("ignore")
FLAGS = torch.backends.cuda
MATH: list[Any] = [SDPBackend.MATH]
FREE = {"cuDNN": False, "flash": True}
"""Kernels while shapes vary."""
ALL = {"cuDNN": True, "flash": True}
ONLY_MATH = {"cuDNN": False, "flash": False}


def kernels() -> dict[str, bool]:
    return {"cuDNN": FLAGS.cudnn_sdp_enabled(), "flash": FLAGS.flash_sdp_enabled()}


def kernels_of(model: torch.nn.Module) -> list[dict[str, bool]]:
    """Kernels in each forward and backward pass of a model from now on."""
    seen: list[dict[str, bool]] = []
    layer = next(one for one in model.modules() if isinstance(one, torch.nn.Embedding))

    def note(*_: object) -> None:
        seen.append(kernels())

    layer.register_forward_pre_hook(note)
    layer.weight.register_hook(note)
    return seen


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    was_enabled = FLAGS.cudnn_sdp_enabled()
    FLAGS.enable_cudnn_sdp(True)
    yield
    assert kernels() == ALL
    FLAGS.enable_cudnn_sdp(was_enabled)


CHOICES = [
    ({}, FREE),
    ({"shapes": 4}, ALL),
    ({"attention_backends": None}, ALL),
    ({"attention_backends": MATH}, ONLY_MATH),
    ({"attention_backends": MATH, "shapes": 4}, ONLY_MATH),
]


@pytest.mark.parametrize(("config", "expected"), CHOICES)
def test_a_trainer_trains_evaluates_and_runs_its_preflight_with_them(tmp_path, config, expected):
    rows = toys.samples("causal", 20)
    run = toys.trainer(
        "causal",
        tmp_path,
        fits=True,
        config={**config, "preflight": True},
        eval_dataset=rows,
        max_steps=2,
    )
    seen = kernels_of(run.model)
    run.train()
    num_in_training = len(seen)
    run.evaluate()
    assert len(seen) > num_in_training > 4
    assert seen == [expected] * len(seen)


@pytest.mark.parametrize(("backends", "expected"), [("auto", FREE), (None, ALL), (MATH, ONLY_MATH)])
def test_lightning_trains_with_them(tmp_path, backends, expected):
    lightning = pytest.importorskip("lightning.pytorch")
    from dynagroup.integrations.lightning import LightningSteps
    from tests.integrations.test_lightning import QUIET, Module, loader

    module = Module()
    seen = kernels_of(module)
    steps = LightningSteps(loader(), attention_backends=backends)
    trainer = lightning.Trainer(
        default_root_dir=tmp_path,
        precision="64-true",
        callbacks=[steps],
        enable_checkpointing=False,
        max_epochs=1,
        **QUIET,
    )
    trainer.fit(module, steps)
    assert len(seen) > 4
    assert seen == [expected] * len(seen)


def test_they_are_as_before_after_an_error_of_lightnings_module(tmp_path):
    lightning = pytest.importorskip("lightning.pytorch")
    from dynagroup.integrations.lightning import LightningSteps
    from tests.integrations.test_lightning import QUIET, Module, loader

    class Broken(Module):
        def on_before_optimizer_step(self, optimizer: object) -> None:
            assert kernels() == FREE
            raise RuntimeError("broken")

    steps = LightningSteps(loader())
    trainer = lightning.Trainer(
        default_root_dir=tmp_path, precision="64-true", callbacks=[steps], **QUIET
    )
    with pytest.raises(RuntimeError, match="broken"):
        trainer.fit(Broken(), steps)
    assert kernels() == ALL


def embedded(model: Any, **options: Any) -> None:
    embed_dataset(model, models.small_tokenizer(), TEXTS, progress=False, **options)


def generated(model: Any, **options: Any) -> None:
    generate_dataset(
        model, models.small_tokenizer(), TEXTS, max_new_tokens=2, progress=False, **options
    )


def scored(model: Any, **options: Any) -> None:
    score_dataset(model, models.small_tokenizer(), TEXTS, progress=False, **options)


def one_batch_generated(model: Any, **options: Any) -> None:
    generate_with_oom_retry(model, torch.ones(2, 3, dtype=torch.int64), max_new_tokens=2, **options)


WITH_MATH: dict[str, Any] = {"attention_backends": MATH}
AS_TORCH_CHOOSES: dict[str, Any] = {"attention_backends": None}
JOBS: list[tuple[Callable[..., None], dict[str, Any], dict[str, bool]]] = [
    (embedded, {"budget": TokenBudget(40)}, FREE),
    (embedded, {"budget": TokenBudget(40), "shapes": 2}, ALL),
    (generated, {"budget": TokenBudget(40)}, FREE),
    (scored, {"budget": TokenBudget(40)}, FREE),
    (scored, {"budget": TokenBudget(40), **WITH_MATH}, ONLY_MATH),
    (one_batch_generated, {}, FREE),
    (one_batch_generated, WITH_MATH, ONLY_MATH),
    (one_batch_generated, AS_TORCH_CHOOSES, ALL),
]


@pytest.mark.parametrize(("job", "options", "expected"), JOBS)
def test_jobs_run_with_them(job, options, expected):
    model = models.small_llama()
    seen = kernels_of(model)
    job(model, **options)
    assert seen
    assert seen == [expected] * len(seen)


def test_sentence_transformers_run_with_them(tmp_path):
    pytest.importorskip("sentence_transformers")
    from tests.jobs.test_sentences import built

    model = built(tmp_path)
    seen = kernels_of(model)
    embed_dataset(model, None, TEXTS, budget=TokenBudget(40), progress=False)
    assert seen
    assert seen == [FREE] * len(seen)


def test_a_kernel_that_was_off_before_stays_off():
    FLAGS.enable_cudnn_sdp(False)
    try:
        with attention_kernels("auto", varies=True):
            assert kernels() == FREE
        assert kernels() == FREE
    finally:
        FLAGS.enable_cudnn_sdp(True)


def test_the_only_kernel_that_a_user_allows_stays_on():
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION), attention_kernels("auto", varies=True):
        assert kernels() == {"cuDNN": True, "flash": False}


def test_steps_in_threads_may_overlap():
    """The first step to begin ends before the second."""
    first = attention_kernels("auto", varies=True)
    second = attention_kernels("auto", varies=True)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert kernels() == FREE
    second.__exit__(None, None, None)
    assert kernels() == ALL


@pytest.mark.parametrize("wrong", ["cudnn", [], ["math"], SDPBackend.MATH, 3])
def test_what_is_no_list_of_kernels_is_refused(wrong):
    with pytest.raises(ConfigError, match=r"`attention_backends` must be .* but is"):
        DynagroupConfig(budget=4, attention_backends=wrong)
    with pytest.raises(ConfigError, match="`attention_backends`"):
        one_batch_generated(models.small_llama(), attention_backends=wrong)
