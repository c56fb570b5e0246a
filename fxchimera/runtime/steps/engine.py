"""Everything that runs: replicas, transports and executors of this process's ranks, and the proven orders they follow."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from fxchimera.errors import FxChimeraError
from fxchimera.runtime.batches.inspection import Inspection
from fxchimera.runtime.batches.safety import refuse_unsafe
from fxchimera.runtime.devices.crew import Crew
from fxchimera.runtime.devices.lanes import Lanes
from fxchimera.runtime.messages.carriers import join_sums, process_transport
from fxchimera.runtime.messages.handover import local_transport
from fxchimera.runtime.processes.world import LocalWorld, World
from fxchimera.runtime.stages.gradients import call_back
from fxchimera.runtime.stages.program import Program
from fxchimera.runtime.stages.replica import Replica
from fxchimera.runtime.steps.exchange import Exchange, Statistics
from fxchimera.runtime.steps.executor import Executor
from fxchimera.runtime.steps.job import Job, Result
from fxchimera.runtime.steps.probe import Probe
from fxchimera.runtime.steps.stagetimes import Sample
from fxchimera.runtime.transport import Channel, Transport
from fxchimera.runtime.weights.moving import drop_unowned, spread_model
from fxchimera.schedule.action import Kind
from fxchimera.schedule.check import check
from fxchimera.schedule.families import forward_only
from fxchimera.schedule.lower import lower
from fxchimera.schedule.mirrors import sync_edges
from fxchimera.schedule.order import Order
from fxchimera.schedule.profile import Costs
from fxchimera.schedule.timeline import Event, Timeline
from fxchimera_passes.capture.state import without_cache
from fxchimera_passes.plan import StagePlan

__all__ = ["Engine", "Orders"]


@dataclass(frozen=True, slots=True)
class Orders:
    """The lowered and proven orders of one pipeline: a step, a step without the gradient exchange, a forward-only call."""

    step: Order
    unsynchronised: Order
    forward: Order

    @classmethod
    def of(cls, order: Order, plan: StagePlan, costs: Costs, sizes: Mapping[str, int]) -> Orders:
        """Lower and prove a compute-only order and what follows from it.

        Raises:
            ScheduleError: An order cannot be proven.
        """
        edges = sync_edges(plan, order.placement, sizes)
        step = lower(order, costs, sync=edges)
        bare = Order(step.name, step.placement, tuple(tuple(a for a in rank if a.kind.content != "G") for rank in step.ranks))
        forward = lower(forward_only(order), costs, sync=edges)
        check(step, sync=edges)
        check(bare)  # the exchange is left out on purpose
        check(forward, sync=edges)
        return cls(step, bare, forward)

    def room(self) -> dict[Channel, int]:
        """By channel, the most messages that can be on the way, waiting to be used, or kept for a backward."""
        room: dict[Channel, int] = {}
        for proof in (check(self.step), check(self.forward)):
            for key, early in zip(proof.channels, proof.early, strict=True):
                room[key] = max(room.get(key, 0), early + proof.peak_activations[key[1]])
        return room


class Engine:
    """The ranks of this process, ready to run jobs.

    All processes construct it at the same time.  Afterwards, when processes are ranks, the parameters of the user's model that
    this rank does not own are meta tensors, so that a stale use fails loudly.
    """

    def __init__(self, model: nn.Module, program: Program, orders: Orders, world: World, *, deferred: bool = False) -> None:
        self.orders = orders
        self.world = world
        self._model, self._deferred = model, deferred
        self.placement = orders.step.placement
        self.accept(program)
        spread_model(program.captured, program.plan, self.placement, world)
        local = isinstance(world, LocalWorld)
        room = orders.room()
        channels = sorted(room)
        self.lanes = Lanes(world.devices, world.ranks)
        shared = local_transport(channels, self.lanes, world.failure) if local else None
        self.executors: list[Executor] = []
        self._transports: list[Transport] = []
        for rank in world.ranks:
            transport = shared or process_transport(rank, channels, world, self.lanes.of(rank), room)
            self._transports.append(transport)
            join_sums(world, self.lanes.of(rank))
            replicas = {
                (pipe, stage): Replica(
                    model, program, pipe, stage, shares_memory=local, device=world.devices.of(rank), deferred=deferred
                )
                for pipe, stage in self.placement.replicas(rank)
            }
            first = world.grid.pipeline * self.placement.n_microbatches
            exchange = Exchange(rank, self.placement, program.plan, replicas, first_microbatch=first)
            ways = world.counterparts, self.lanes.of(rank)
            self.executors.append(Executor(rank, self.placement, replicas, exchange, transport, world.failure, *ways))
        self.owned = {name: p for executor in self.executors for name, p in executor.exchange.owned.items()}
        if world.counterparts is not None:
            world.counterparts.take_values([*self.owned.values(), *model.buffers()])
        buffers = dict(model.named_buffers(remove_duplicate=False))
        read = dict.fromkeys(name for graph in program.graphs for name in graph.attributes if name in buffers)
        if not local:
            dropped = drop_unowned(model, set(map(id, self.owned.values())))
            for replica in (replica for executor in self.executors for replica in executor.replicas.values()):
                replica.release(dropped)
            del dropped
        self._inspection = Inspection(model, read)
        self._ran: dict[bool, weakref.WeakSet[Program]] = {True: weakref.WeakSet(), False: weakref.WeakSet()}
        self._crew = Crew(self.executors, world.failure)
        # also at interpreter exit: a helper thread that is still in a blocking call then would abort the process
        self._finalizer = weakref.finalize(self, _close, self._crew, self._transports, world)

    def inspect(self) -> None:
        """Refuse to go on with a model that was changed in a way that the ranks cannot follow.

        Raises:
            FxChimeraError: The pipeline is closed, or see :meth:`Inspection.check`.
        """
        if self.closed:
            raise FxChimeraError("this pipeline has been closed; wrap the model again to go on")
        self._inspection.check()

    def run(self, job: Job) -> tuple[list[Result], Timeline]:
        """Run a job on this process's ranks; returns their results and the measured timeline of these ranks.

        Raises:
            PipelineError: A rank failed.
        """
        ran, programs = self._ran[job.train], dict.fromkeys(job.programs)
        self.world.failure.taken = all(program in ran for program in programs)  # a stage may compile in its first job
        always = not all(program.captured.cache for program in programs)
        with without_cache(self._model, always=always):  # as recorded; closed modules read their configuration in every forward
            torch.clear_autocast_cache()  # holds the weights of an earlier step, if the caller's region spans several
            self._prepare(job)
            try:
                results = self.lanes.call(self._crew, lambda executor: executor.run(job))
            finally:
                torch.clear_autocast_cache()
        ran.update(programs)
        self.world.failure.taken = True
        events = sorted((e for result in results for e in result.events), key=lambda e: (e.start, e.rank, e.end))
        return results, Timeline(f"{job.order.name} (measured)", self.placement, tuple(events))

    def _prepare(self, job: Job) -> None:
        """Bring every replica to where the job begins.

        All replicas of a stage take in all recordings, not only those of their own micro-batches: buffers and batch-norm statistics
        travel as a list over those that a replica knows.
        """
        programs = dict.fromkeys(job.programs)
        for executor in self.executors:
            for replica in executor.replicas.values():
                try:
                    replica.learn(programs)
                except Exception as error:  # on this rank only, perhaps; the others are not to wait
                    text = f"stage {replica.stage}, before the first action: {type(error).__name__}: {error}"
                    raise self.world.failure.report(self.world.failure.cause_at(executor.rank, text)).error() from error
                replica.follow(job.settings)
                if job.assumes or job.trial:
                    replica.remember()

    def commit(self, job: Job, *, hooks: bool = True) -> None:
        """Give the owned parameters the gradients of a job that every rank has ended well; ``hooks`` calls the user's on them."""
        try:
            for executor in self.executors if job.synchronised else ():
                self._join_statistics(executor.exchange)
                executor.exchange.conclude(hooks=hooks)
        except BaseException:
            self.abandon()
            raise
        changed = [name for executor in self.executors for name in executor.exchange.commit(synchronised=job.synchronised)]
        with torch.no_grad():
            for name in changed if hooks else ():
                call_back(self.owned[name])

    def share_statistics(self) -> None:
        """Collective, after a forward-only call: the owners' batch-norm layers take over what both replicas have seen."""
        if not (self._deferred or len(self.placement.pipes) * self.world.grid.width > 1) or not self._norms_learn():
            return
        noted = {use: moments for e in self.executors for use, moments in e.exchange.take_statistics().items()}
        everything = _joined(self.world.gather_objects(noted, "statistics of batch norm"))
        for executor in self.executors:
            executor.exchange.apply_statistics(dict(everything))

    def _join_statistics(self, exchange: Exchange) -> None:
        """Collective among the owners of the same stages: give each what the replicas of all pipelines have seen."""
        width = self.world.counterparts
        if width is not None and self._norms_learn():
            exchange.add_statistics(_joined(width.gather(exchange.take_statistics(), "the exchange of batch norm's statistics")))

    def _norms_learn(self) -> bool:
        norms = [module for module in self._model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
        return any(norm.training for norm in norms)

    def remember(self) -> None:
        """Before a job that may have to be run again; see :meth:`retract`."""
        for executor in self.executors:
            executor.exchange.remember()

    def retract(self) -> None:
        """Undo what a job, which every rank has come to the end of, has left in the exchange since :meth:`remember`."""
        for executor in self.executors:
            executor.exchange.retract()

    def probes(self, sample: Sample) -> list[Probe]:
        """The ranks of this process, ready to time their stages of the first pipe on ``sample``."""
        found = []
        for executor, transport in zip(self.executors, self._transports, strict=True):
            replicas = {stage: replica for (pipe, stage), replica in executor.replicas.items() if pipe == 0}
            here = sample.on(self.world.devices.of(executor.rank))
            found.append(Probe(executor.rank, self.placement, replicas, transport, here, self.world.failure))
        return found

    def undo_trial(self) -> None:
        """Put the attributes of clones back as they were before a job that was a trial."""
        for executor in self.executors:
            for replica in executor.replicas.values():
                replica.retract()

    def abandon(self) -> None:
        """Give the owned parameters back the gradients that they had before a job that failed."""
        for executor in self.executors:
            executor.exchange.abandon()

    @property
    def recent(self) -> dict[int, tuple[Event, ...]]:
        """The last actions of this process's ranks."""
        return {executor.rank: tuple(executor.recent) for executor in self.executors}

    @property
    def closed(self) -> bool:
        """Whether the ranks have been ended."""
        return not self._finalizer.alive

    def close(self) -> None:
        """End threads and connections; may be called more than once."""
        self._finalizer()

    def accept(self, program: Program) -> None:
        """Refuse a recording that the placement cannot run right.

        Raises:
            FxChimeraError: See :func:`refuse_unsafe`.
        """
        used = sum(bool(self.placement.microbatches(pipe)) for pipe in range(len(self.placement.pipes)))
        refuse_unsafe(
            program,
            copies=used,
            n_microbatches=self.placement.n_microbatches,
            num_processes=self.world.num_processes,
            in_turn=_in_turn(self.orders.step),
            width=self.world.grid.width,
        )


def _joined(statistics: Iterable[Statistics]) -> Statistics:
    """The statistics of several ranks together; no micro-batch is in two of them."""
    joined: Statistics = {}
    for part in statistics:
        for use, moments in part.items():
            joined.setdefault(use, {}).update(moments)
    return joined


def _in_turn(order: Order) -> bool:
    """Whether every stage runs the forwards of its micro-batches in ascending order."""
    for actions in order.ranks:
        forwards: dict[tuple[int, int], list[int]] = {}
        for action in actions:
            if action.kind is Kind.F and action.microbatch is not None:
                place = (order.placement.pipe_of[action.microbatch], action.stage)
                forwards.setdefault(place, []).append(action.microbatch)
        if any(found != sorted(found) for found in forwards.values()):
            return False
    return True


def _close(crew: Crew[Executor], transports: list[Transport], world: World) -> None:
    world.part()
    crew.close()
    for transport in transports:
        transport.close()
    world.close()
