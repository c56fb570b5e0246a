"""PiPPy, which is ``torch.distributed.pipelining`` in torch by now, beside fxchimera: each runs what the other one made.

    our stages, torch's schedules     torch_stages(model, ...).runner(rank, Schedule1F1B) -> .step(x, target=y)
    our orders, torch's runtime       torch_stages(model, ..., schedule="zbv").runner(rank)
    orders as CSV                     schedule.write_csv_file(order, path), schedule.read_csv_file(path)
    torch's Pipe, our schedules       fxchimera.pipeline(pipe, ...)

torch's schedules need micro-batches of one size and shape, one way through the model, and no tied parameters in different stages;
what would train wrongly, or hang, there is refused here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import Pipe, SplitPoint
from torch.distributed.pipelining.schedules import PipelineScheduleMulti
from torch.distributed.pipelining.stage import PipelineStage

from fxchimera.errors import FxChimeraError, PartitionError
from fxchimera.planner.draft import Auto, draft
from fxchimera.planner.table import Plan
from fxchimera.runtime.batches.loss import LossFn, LossWeight, loss_of, weights_of
from fxchimera.runtime.interop.pippy import TorchStage, any_order, chunk_spec, example_tensors, refuse_other
from fxchimera.runtime.interop.torch_pipe import stages_of, whole_model
from fxchimera.runtime.microbatch import Batch, ChunkSpecs, MicroBatch, dimensions, divide
from fxchimera.runtime.stages.program import Program
from fxchimera.schedule.families import make_order
from fxchimera.schedule.files import one_way_only
from fxchimera.schedule.order import Order
from fxchimera_passes.captured import TensorMeta, info
from fxchimera_passes.points import After, Place
from fxchimera_passes.split import StageGraph
from fxchimera_passes.structure import flatten

__all__ = ["SplitPoints", "TorchRunner", "TorchStage", "TorchStages", "original_names", "plain", "torch_stages"]

TorchSchedule = Callable[..., Any]
SplitPoints = Sequence[str] | Mapping[str, SplitPoint]


def places(split_points: SplitPoints) -> tuple[Place, ...]:
    """The cuts that a user names: modules that begin a stage, or torch's ``split_spec``, which says of each whether it ends one.

    Raises:
        PartitionError: It is one name alone, or a value is no ``SplitPoint``.
    """
    if isinstance(split_points, str):
        raise PartitionError(f"split_points is the text {split_points!r}; write a list of names: [{split_points!r}]")
    if not isinstance(split_points, Mapping):
        return tuple(split_points)
    for name, point in split_points.items():
        if not isinstance(point, SplitPoint):
            raise PartitionError(f"split_points[{name!r}] is {point!r}; it must be SplitPoint.BEGINNING or SplitPoint.END")
    return tuple(After(name) if point is SplitPoint.END else name for name, point in split_points.items())


def plain(model: nn.Module, split_points: SplitPoints, order: Order | Auto) -> tuple[nn.Module, tuple[Place, ...]]:
    """What is to be recorded, and where to cut it: torch's ``Pipe`` is taken apart, and cut where it is unless cuts are given.

    Raises:
        PartitionError: The pipe has another number of stages than ``order`` needs.
        FxChimeraError: The pipe cannot be taken apart.
    """
    cuts = places(split_points)
    if not isinstance(model, Pipe):
        return model, cuts
    found = stages_of(model)
    stages = (order.num_ranks, 2 * order.num_ranks) if isinstance(order, Auto) else (order.placement.num_stages,)
    if not cuts and len(found) not in stages:
        raise PartitionError(
            f"the Pipe has {len(found)} stages ({', '.join(found)}), the schedule needs {' or '.join(map(str, stages))}; pass "
            "another num_stages, or split_points= with the names of those that begin a stage"
        )
    return whole_model(model), cuts or found[1:]


def torch_stages(
    model: nn.Module,
    *,
    example_args: tuple[Any, ...] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    num_stages: int,
    n_microbatches: int,
    schedule: str | Order = "1f1b",
    split_points: SplitPoints = (),
    args_chunk_spec: Sequence[Any] | None = None,
    kwargs_chunk_spec: Mapping[str, Any] | None = None,
    target_chunk_spec: Any = 0,
) -> TorchStages:
    """Cut ``model`` as :func:`fxchimera.pipeline` does, into stages for torch's own runtime; every rank calls it.

    Args:
        model: Any ``nn.Module`` whose parameters are each read by one stage only.
        example_args: Positional arguments of one batch.
        example_kwargs: Keyword arguments of one batch.
        num_stages: Number of ranks.
        n_microbatches: Number of micro-batches, all of the same size.
        schedule: A one-way family or order; it says how many stages a rank has, and where.
        split_points: As in :func:`fxchimera.pipeline`.
        args_chunk_spec: As there.
        kwargs_chunk_spec: As there.
        target_chunk_spec: As there.

    Raises:
        ScheduleError: The order has several pipes.
        PartitionError: The model cannot be cut so, or has fewer pieces than stages.
        FxChimeraError: Several stages would read one parameter: torch would not add their gradients.
    """
    order = one_way_only(make_order(schedule, num_stages, n_microbatches) if isinstance(schedule, str) else schedule)
    specs = ChunkSpecs(args=args_chunk_spec, kwargs=kwargs_chunk_spec, target=target_chunk_spec)
    batch = divide(example_args, dict(example_kwargs or {}), None, n_microbatches, specs)
    example = batch.microbatches[0]
    made = draft(model, example.args, example.kwargs, order, split_points=places(split_points), recompute="none")
    readers: dict[str, list[int]] = {}
    for stage in made.cut.stages:
        for name in stage.parameters:
            readers.setdefault(name, []).append(stage.index)
    for note in made.cut.notes:
        raise PartitionError(f"{note} torch's stages must not be empty; ask for fewer")
    shared = {name: stages for name, stages in readers.items() if len(stages) > 1}
    for name, stages in shared.items():
        raise FxChimeraError(
            f"stages {' and '.join(map(str, stages))} read parameter {name!r}, and torch.distributed.pipelining does not add their "
            f"gradients ({len(shared)} such parameters); use fxchimera.pipeline, which does, or cut elsewhere"
        )
    return TorchStages(model, Program.of(made.captured, made.cut), made.plan, order, example, specs)


@dataclass(frozen=True, slots=True)
class TorchStages:
    """A model cut for torch's runtime; made by :func:`torch_stages`."""

    model: nn.Module
    program: Program
    plan: Plan
    order: Order
    example: MicroBatch
    specs: ChunkSpecs

    def on_rank(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank."""
        return tuple(stage for _, stage in self.order.placement.replicas(rank))

    def module(self, index: int) -> TorchStage:
        """Stage ``index``; its parameters are those of the model that was cut."""
        return TorchStage(self.program.graphs[index], self.model, last=index == len(self.program.graphs) - 1)

    def pipeline_stage(
        self, index: int, *, device: torch.device | None = None, group: dist.ProcessGroup | None = None
    ) -> PipelineStage:
        """Torch's ``PipelineStage`` around stage ``index``, with shapes given, so that torch need not run the model to find them.

        Args:
            index: The stage.
            device: Where it runs; by default where the model was recorded.
            group: The process group of the pipeline; by default all ranks.
        """
        graph = self.program.graphs[index]
        first = [TensorMeta.of(self.example.inputs[k]) for k in graph.stage.inputs]
        place = device or self.program.captured.device
        return PipelineStage(
            self.module(index),
            index,
            len(self.program.graphs),
            place,
            input_args=example_tensors([value.meta for value in graph.stage.received] if index else first, place),
            output_args=example_tensors(self._sent(graph), place),
            group=group,
        )

    def _sent(self, graph: StageGraph) -> list[TensorMeta]:
        if graph is not self.program.graphs[-1]:
            return [value.meta for value in graph.stage.sent]
        output = next(node for node in reversed(graph.graph.nodes) if node.op == "output")
        return [value for node in output.args[0] if (value := info(node).value) is not None]

    def runner(
        self,
        rank: int,
        schedule: TorchSchedule | None = None,
        *,
        loss_fn: LossFn | None = None,
        loss_weight: LossWeight = "samples",
        device: torch.device | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> TorchRunner:
        """What steps this rank's stages.

        Args:
            rank: This process's rank in the pipeline.
            schedule: A class of torch's (``Schedule1F1B``); None runs this object's own order in torch's runtime.
            loss_fn: As in :func:`fxchimera.pipeline`.
            loss_weight: As there.
            device: Where the stages run.
            group: The process group of the pipeline.
        """
        stages = [self.pipeline_stage(index, device=device, group=group) for index in self.on_rank(rank)]
        return TorchRunner(self, stages, schedule, loss_fn, loss_weight)


class TorchRunner:
    """Steps the stages of one rank under a schedule of torch's; made by :meth:`TorchStages.runner`."""

    def __init__(
        self,
        stages: TorchStages,
        mine: Sequence[PipelineStage],
        schedule: TorchSchedule | None,
        loss_fn: LossFn | None,
        loss_weight: LossWeight,
    ) -> None:
        self.stages, self.mine, self._loss_fn, self._loss_weight = stages, tuple(mine), loss_fn, loss_weight
        self._batch: tuple[Batch, tuple[float, ...]] | None = None
        self._indices = [stage.stage_index for stage in mine]
        self._last = len(stages.program.graphs) - 1
        self.schedule: Any = self._made(schedule)

    def parameters(self) -> list[nn.Parameter]:
        """The parameters of this rank's stages."""
        return [parameter for stage in self.mine for parameter in stage.submod.parameters()]

    def step(self, *args: Any, target: Any = None, **kwargs: Any) -> Tensor | None:
        """Run forward and backward of one batch, the same on every rank; gradients are added to the model's own ``.grad``.

        Returns the batch's loss on the rank of the last stage, None on the others.

        Raises:
            BatchError: A micro-batch has another shape than in the example, or takes another path through the model.
        """
        stages = self.stages
        batch = divide(args, kwargs, target, stages.order.placement.n_microbatches, stages.specs)
        refuse_other(batch, stages.example, stages.program.captured)
        count = len(batch.microbatches)
        weights = weights_of(batch, self._loss_weight, self._loss_fn, [stages.program] * count)
        tensors, _ = flatten((args, kwargs))
        positional, named = self._split(tensors)
        losses: list[Tensor] = []
        numbers = {"target": torch.arange(count)} if self._last in self._indices else {}
        self._batch = batch, weights
        self.schedule.step(*positional, **numbers, losses=losses, return_outputs=False, **named)
        return torch.stack(losses).sum().detach() if losses else None

    def _loss(self, output: Sequence[Tensor], number: Tensor) -> Tensor:
        """What a micro-batch's loss counts in the batch's."""
        assert self._batch is not None
        (batch, weights), index = self._batch, int(number)
        structured = self.stages.program.captured.out_structure.rebuild(list(output))
        return loss_of(structured, batch.microbatches[index].target, self._loss_fn) * weights[index]

    def _made(self, schedule: TorchSchedule | None) -> Any:
        """The schedule object, told how to divide what this rank passes to it.

        The losses are weighted already; torch would divide all of ``.grad`` by N, what earlier steps left there included.
        """
        dims = dimensions(self.stages.example.args, self.stages.example.kwargs, self.stages.specs)
        positional, named = self._split([chunk_spec(dim) for dim in dims])
        options: dict[str, Any] = {"loss_fn": self._loss, "scale_grads": False}
        if any(dim != 0 for dim in dims):  # torch's default else, and not all of its schedules can be told
            options |= {"args_chunk_spec": tuple(positional) or None, "kwargs_chunk_spec": named or None}
        count = self.stages.order.placement.n_microbatches
        if schedule is None:
            return any_order(self.stages.order, self.mine, **options)
        several = isinstance(schedule, type) and issubclass(schedule, PipelineScheduleMulti)
        return schedule(list(self.mine) if several else self.mine[0], count, **options)

    def _split(self, values: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """Of one value for each tensor of the batch, what this rank passes by position and what by keyword."""
        wanted = {index: self.stages.program.graphs[index].stage.inputs for index in self._indices}
        named = {f"input_{k}": values[k] for index, positions in wanted.items() if index for k in positions}
        return [values[k] for k in wanted.get(0, ())], named


def original_names(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state dict of a wrapped ``Pipe`` under the names of the model that torch traced: without ``submod_pp_0.``."""
    return {name.split(".", 1)[1] if name.startswith("submod_pp_") else name: value for name, value in state.items()}
