"""What launching kernels costs on a GPU: eager steps, torch.compile and CUDA graphs, over batches of free and of few shapes.

A graph replays all kernels of a forward and backward pass by one call, for one shape of the batch. All ways train the same
updates with the same limit of a batch. No batch has a mask: samples are padded on the right, where no token sees the padding, so
that all ways run the same causal kernel.
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Any

import torch
from torch.nn.functional import pad
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.device_train import Case, job_of, run_of, turn_of
from benchmarks.machine import Machine
from benchmarks.methods import METHODS, Job, Method, in_fixed, longest_first, ours
from benchmarks.train import Run, about_job

CASE = Case("0.5B", "CV 1.0")
NO_MASK = {"full_attention": None}
"""What transformers' models take for masks that are made already."""
GRAPHS_PER_STEP = 512.0
"""Price of a step that is replayed, in linear tokens: it has one launch."""
NUM_EXAMPLES = 40
"""Updates whose shapes are captured beforehand."""
SHARE = 0.45
"""Of the tokens that are traced to fit: beside the memory of a graph, which nothing else can use, another batch must fit."""
COMPILING_S = 100.0
"""No compiled way is begun with less time left."""


class Eager:
    """Runs each batch as it comes."""

    compiles = False
    num_eager = 0
    """Batches that could not be replayed."""

    def __init__(self, model: Any, machine: Machine) -> None:
        self.model = model
        self.machine = machine
        self.items = torch.ones((), device=machine.device)
        """Label tokens of the update."""
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def prepare(self, examples: list[dict[str, Any]]) -> None:
        """Compiles or captures, before training; ``examples``: a batch of each shape."""

    def step(self, batch: Mapping[str, Any]) -> None:
        outputs = self.model(**batch, use_cache=False, num_items_in_batch=self.items)
        outputs.loss.backward()


class Dynamic(Eager):
    """Each layer is compiled once, for all shapes."""

    compiles = True
    dynamic = True

    def prepare(self, examples: list[dict[str, Any]]) -> None:
        torch._dynamo.reset()
        torch._dynamo.config.recompile_limit = 512
        backend = "inductor" if self.machine.is_gpu else "eager"
        for layer in self.model.model.layers:
            layer.compile(dynamic=self.dynamic, backend=backend)
        for batch in self._compiled_for(examples):  # not in an update that is timed
            self.step(batch)
        for parameter in self.model.parameters():
            parameter.grad.zero_()

    def _compiled_for(self, examples: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Of few rows and of many, since what has one row is compiled by itself."""
        by_rows = sorted(examples, key=lambda batch: len(batch["input_ids"]))
        return [by_rows[-1], by_rows[0]]


class Static(Dynamic):
    """Each layer is compiled for each shape."""

    dynamic = False

    def _compiled_for(self, examples: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return examples


class Graphs(Eager):
    """Forward and backward pass of each shape are captured once, and replayed."""

    def __init__(self, model: Any, machine: Machine) -> None:
        super().__init__(model, machine)
        self.captured: dict[Any, tuple[dict[str, Any], Any]] = {}
        self.pool: Any = None

    def prepare(self, examples: list[dict[str, Any]]) -> None:
        largest_first = sorted(examples, key=lambda batch: -batch["input_ids"].numel())
        if self.machine.is_gpu:
            self._warm_up(largest_first)
        for batch in largest_first:
            self.captured[shape_of(batch)] = self._capture(batch)
        for parameter in self.model.parameters():
            parameter.grad.zero_()

    def _warm_up(self, examples: list[dict[str, Any]]) -> None:
        """Fills caches, and lets libraries choose their kernels: of all shapes, before a graph holds memory that no other batch
        can use."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for batch in examples:
                super().step(batch)
                super().step(batch)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.empty_cache()

    def _capture(self, batch: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
        """Returns the inputs that the graph reads, and the function that replays it."""
        inputs: dict[str, Any] = {}
        for name, value in batch.items():
            inputs[name] = value.clone() if isinstance(value, torch.Tensor) else value

        def run() -> None:
            super(Graphs, self).step(inputs)

        if not self.machine.is_gpu:
            with NoSynchronisation():
                run()
            return inputs, run
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            run()
        if self.pool is None:
            self.pool = graph.pool()
        return inputs, graph.replay

    def step(self, batch: Mapping[str, Any]) -> None:
        if shape_of(batch) not in self.captured:
            self.num_eager += 1
            super().step(batch)
            return
        inputs, replay = self.captured[shape_of(batch)]
        for name, value in inputs.items():
            if isinstance(value, torch.Tensor):
                value.copy_(batch[name])
        replay()


class NoSynchronisation(TorchDispatchMode):
    """Raises where a GPU would wait for the host, which ends the capture of a graph: for trials on the CPU."""

    WAITS = (
        "aten::_local_scalar_dense",
        "aten::nonzero",
        "aten::masked_select",
        "aten::unique_dim",
    )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() in self.WAITS:
            raise RuntimeError(f"{func.name()} waits for the device; no graph can hold it")
        return func(*args, **(kwargs or {}))


def shape_of(batch: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a graph is captured for."""
    ids = batch["input_ids"].shape
    borders = batch.get("cu_seq_lens_q")
    return (*ids, None if borders is None else len(borders), batch.get("max_length_q"))


@dataclass
class LaunchedRun(Run):
    """A training whose batches are run by one of the classes above."""

    launch: type[Eager] = Eager
    fills_to_powers: bool = False
    begun_in_s: list[float] = field(default_factory=list)
    """Seconds from the model to the end of its first update, by turn."""
    reserved_bytes: int = 0
    first_gradient: float | None = None
    """Norm of the gradient of a layer in the very first update: alike for all ways."""
    num_eager: int = 0
    launcher: Any = None
    examples: list[dict[str, Any]] | None = None
    began: float | None = None
    """When the model was ready; None after its first update."""

    def _begin(self) -> None:
        super()._begin()
        if self.examples is None:
            self.examples = self._examples()
        self.began = time.monotonic()
        self.launcher = self.launch(self.model, self.machine)
        self.launcher.prepare(self.examples)

    def turn(self, *, seconds: float = 0.0, samples: int = 1) -> None:
        super().turn(seconds=seconds, samples=samples)
        self.num_eager += self.launcher.num_eager
        if self.machine.is_gpu:
            self.reserved_bytes = max(self.reserved_bytes, torch.cuda.max_memory_reserved())
        self.launcher = None
        self.model = None

    def _examples(self) -> list[dict[str, Any]]:
        """A batch of each shape of the first updates."""
        updates = self.method.updates(self.job, 0, self.setting)
        found: dict[Any, dict[str, Any]] = {}
        if self.launch is not Eager:
            for batch in chain.from_iterable(islice(updates, NUM_EXAMPLES)):
                inputs = self.inputs(batch)
                found.setdefault(shape_of(inputs), inputs)
        return list(found.values())

    def inputs(self, batch: list[int]) -> dict[str, Any]:
        inputs = super().inputs(batch)
        if self.fills_to_powers:
            inputs = filled_to_powers(inputs)
        return {**inputs, "attention_mask": NO_MASK}

    def _train(self, inputs: list[dict[str, Any]], num_predicted: int) -> None:
        self.launcher.items.fill_(num_predicted)
        for batch in inputs:
            self.launcher.step(batch)
        if self.first_gradient is None:
            gradient = self.model.model.layers[0].mlp.down_proj.weight.grad
            self.first_gradient = float(gradient.float().norm())
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)  # graphs add to these tensors
        if self.began is not None:
            self.machine.wait()
            self.begun_in_s.append(time.monotonic() - self.began)
            self.began = None

    def figures(self) -> dict[str, Any]:
        return {
            **super().figures(),
            "launch": self.launch.__name__,
            "begun_in_s": self.begun_in_s,
            "reserved_bytes": self.reserved_bytes,
            "first_gradient": self.first_gradient,
            "captured_shapes": len(self.examples or ()) if self.launch is Graphs else 0,
            "eager_batches": self.num_eager,
        }


def filled_to_powers(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Rows and columns of padding up to the next powers of two."""
    rows, width = inputs["input_ids"].shape
    further_rows = _power_of_two(rows) - rows
    further_columns = _power_of_two(width) - width
    filled = {}
    for name in ("input_ids", "labels"):
        value = -100 if name == "labels" else 0
        filled[name] = pad(inputs[name], (0, further_columns, 0, further_rows), value=value)
    return filled


def _power_of_two(number: int) -> int:
    """The least one that is not smaller."""
    return 1 << (number - 1).bit_length()


def sorted_in_powers(job: Any, epoch: int) -> Iterator[list[list[int]]]:
    """The rule of thumb: an update's samples by length, as many a batch as fit when both are powers of two."""
    order = job.order(epoch)
    num_updates = len(order) // job.per_update
    for update in in_fixed(order[: num_updates * job.per_update], job.per_update):
        members = longest_first(update, job.lengths).tolist()
        batches = []
        while members:
            width = _power_of_two(int(job.lengths[members[0]]))
            most = max(job.tokens // width, 1)
            size = 1 << (most.bit_length() - 1)
            batches.append(members[:size])
            members = members[size:]
        yield batches


@dataclass(frozen=True)
class Way:
    """How batches are formed, and how they are run."""

    method: Method
    launch: type[Eager]
    num_shapes: int = 8
    fills_to_powers: bool = False


OURS = METHODS["dynagroup"]
OURS_IN_FEW_SHAPES = Method(ours(few_shapes=True), few_shapes=True)
OURS_PACKED = METHODS["dynagroup, packed"]
PACKED_IN_FEW_TOTALS = Method(ours("packed", few_shapes=True), packed=True, few_shapes=True)
FIXED = METHODS["fixed"]
AT_ONE_SHAPE = replace(FIXED, few_shapes=True)
WAYS = {
    "fixed": Way(FIXED, Eager),
    "dynagroup": Way(OURS, Eager),
    "dynagroup, packed": Way(OURS_PACKED, Eager),
    "dynagroup, 8 shapes, graphs": Way(OURS_IN_FEW_SHAPES, Graphs),
    "dynagroup, packed, 8 totals, graphs": Way(PACKED_IN_FEW_TOTALS, Graphs),
    "fixed at one shape, graph": Way(AT_ONE_SHAPE, Graphs, num_shapes=1),
    "sorted, powers of two, graphs": Way(Method(sorted_in_powers), Graphs, fills_to_powers=True),
    "dynagroup, 16 shapes, graphs": Way(OURS_IN_FEW_SHAPES, Graphs, num_shapes=16),
    "dynagroup, 8 shapes": Way(OURS_IN_FEW_SHAPES, Eager),
    "dynagroup, compiled for all shapes": Way(OURS, Dynamic),
    "dynagroup, packed, compiled for all shapes": Way(OURS_PACKED, Dynamic),
    "dynagroup, 8 shapes, compiled for each": Way(OURS_IN_FEW_SHAPES, Static),
}
"""The most valuable first; compiled ways have one turn, since each compiles anew."""


def runs_of(machine: Machine, job: Job) -> dict[str, Run]:
    """Way -> its training; all share the job's samples and the limit of a batch."""
    runs: dict[str, Run] = {}
    for name, way in WAYS.items():
        work = job.work
        if way.num_shapes == 1:
            work = replace(job.work, per_step=1e9)  # then the shape is that of fixed batches
        elif way.launch is Graphs:
            work = replace(job.work, per_step=GRAPHS_PER_STEP)
        of_way = replace(job, work=work, num_shapes=way.num_shapes, updates_so_far={})
        plain = run_of(name, of_way, machine, CASE, method=way.method)
        runs[name] = LaunchedRun(
            name=name,
            job=of_way,
            machine=machine,
            size=CASE.size,
            ids=plain.ids,
            method=way.method,
            launch=way.launch,
            fills_to_powers=way.fills_to_powers,
        )
    return runs


def run(machine: Machine) -> Iterator[dict[str, Any]]:
    """Yields the figures so far, after each turn."""
    machine.warm_up()
    job = job_of(machine, CASE, SHARE)
    runs = runs_of(machine, job)
    failed: dict[str, str] = {}
    slowest = 15.0
    for number in range(1 if machine.dry else 3):
        for name, way in WAYS.items():
            if name not in runs or (way.launch.compiles and number > 0):
                continue
            needed = COMPILING_S if way.launch.compiles else 10 + slowest
            if not machine.has(needed):
                failed.setdefault(f"{name}, turn {number}", "no time")
                continue
            taken = turn_of(machine, runs, name, failed)
            if not way.launch.compiles:
                slowest = max(slowest, taken)
            methods = {one: of_way.figures() for one, of_way in runs.items() if of_way.timed}
            yield {**about_job(job), "methods": methods, "failed": dict(failed)}


def shown(figures: dict[str, Any]) -> list[str]:
    methods = figures["methods"]
    fixed = methods.get("fixed", {}).get("real_tokens_per_s")
    lines = []
    for name, found in methods.items():
        over_fixed = f"{found['real_tokens_per_s'] / fixed:.2f}x" if fixed else "?"
        begun_s = max(found["begun_in_s"])
        lines.append(
            f"{name}: {found['real_tokens_per_s']:,.0f} real tokens a second ({over_fixed} of fixed), "
            f"padding {found['padding']:.0%}, {found['batches_per_update']:.1f} batches an update, "
            f"begun in {begun_s:.1f} s, reserved {found['reserved_bytes'] / 2**30:.1f} GiB, "
            f"gradient {found['first_gradient']:.5g}"
        )
    for name, message in figures["failed"].items():
        lines.append(f"{name}: {message}")
    return lines
