"""The one line: ``fxchimera.pipeline(model, ...)`` and the object it returns.

It plans (capture, cost, cut, order) and joins the ranks; the object, :class:`Pipeline`, runs the user's calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fxchimera.interop import SplitPoints, plain
from fxchimera.pipe import Pipeline
from fxchimera.planned import Schedule, order_of, planned
from fxchimera.planner.caps import Cap
from fxchimera.planner.draft import Draft
from fxchimera.planner.measured import replanned
from fxchimera.planner.relief import Recompute
from fxchimera.runtime.batches.example import common_example
from fxchimera.runtime.batches.loss import LossFn, LossWeight, weights_of
from fxchimera.runtime.batches.losscheck import check_loss, with_named_draws
from fxchimera.runtime.checks.profile import profile_cut
from fxchimera.runtime.checks.reference import Reference, run_reference, true_programs
from fxchimera.runtime.devices.devices import DeviceLike, choose_devices
from fxchimera.runtime.failures.failure import Cause, Limits
from fxchimera.runtime.messages.carriers import TransportChoice, choose_backend
from fxchimera.runtime.microbatch import ChunkSpecs, divide
from fxchimera.runtime.processes.layout import Layout
from fxchimera.runtime.processes.rankplacement import RankPlacement
from fxchimera.runtime.processes.world import make_world
from fxchimera.runtime.stages.batchnorm import BatchNorm, check_batch_norm
from fxchimera.runtime.stages.compiled import compiler_of
from fxchimera.runtime.steps.nonfinite import NanPolicy, check_policy
from fxchimera.runtime.weights.initialise import ParamInit
from fxchimera.runtime.weights.materialise import Weights, materialise, placed, refuse_meta
from fxchimera.runtime.weights.parallelize import Parallelize, blocks_of, parallelize_stages, refuse_parallelize
from fxchimera.runtime.weights.state import owner_process
from fxchimera.runtime.weights.weightfiles import Checkpoint

__all__ = ["Pipeline", "pipeline", "reference"]


def pipeline(
    model: nn.Module,
    *,
    example_args: tuple[Any, ...] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    loss_fn: LossFn | None = None,
    num_stages: int,
    n_microbatches: int,
    data_parallel: int | None = None,
    rank_placement: RankPlacement = "compact",
    device_mesh: DeviceMesh | None = None,
    pipeline_dim: str = "pp",
    schedule: Schedule = "auto",
    split_points: SplitPoints = (),
    loss_weight: LossWeight = "samples",
    args_chunk_spec: Sequence[Any] | None = None,
    kwargs_chunk_spec: Mapping[str, Any] | None = None,
    target_chunk_spec: Any = 0,
    cost: Literal["analytic", "measured"] = "analytic",
    memory: Cap | Sequence[Cap] | None = None,
    optimizer_values: float = 2.0,
    recompute: Recompute = "auto",
    profile: bool = False,
    compile: bool | Mapping[str, Any] = False,  # noqa: A002
    parallelize: Parallelize | None = None,
    checkpoint: Checkpoint | None = None,
    param_init_fn: ParamInit | None = None,
    seed: int | None = None,
    nan: NanPolicy = "raise",
    devices: DeviceLike | Sequence[DeviceLike] | None = None,
    transport: TransportChoice = "auto",
    batch_norm: BatchNorm = "each",
    wait_seconds: float = 600.0,
    slow_seconds: float = 10.0,
) -> Pipeline:
    """Wrap ``model`` so that it trains on ``num_stages`` ranks, or, by several pipelines side by side, on a multiple of that.

    The ranks are threads of this process, or, under torchrun (or with a process group already made), one process each.  A world of
    W times ``num_stages`` processes makes W pipelines (data parallelism): every pipeline is given its own shard of each batch, of
    any number of rows, and losses and gradients are those of all shards together.

    Args:
        model: Any ``nn.Module``, in training mode if it is to be trained.  Built under ``torch.device("meta")`` it has no weights;
            then every rank gets those that it owns, and no others, from ``checkpoint``, or as the model's own
            ``reset_parameters``, ``_init_weights`` or ``init_weights`` say, the same for every ``num_stages``.  A ``Pipe`` of
            ``torch.distributed.pipelining`` is cut where it is; it takes micro-batches of the shape that it was traced with.
        example_args: Positional arguments of one batch, as ``step`` will get it.
        example_kwargs: Keyword arguments of one batch.
        loss_fn: ``loss_fn(output, target)``, or ``loss_fn(output)`` when ``step`` gets no target; None when the model returns
            its own loss.
        num_stages: Number of ranks (D), and of stages; a schedule with two stages a rank cuts the model into 2D.
        n_microbatches: Number of micro-batches a batch is divided into (N), both directions together.
        data_parallel: Number of pipelines (W), to be refused if the processes make another; by default what they make.
        rank_placement: How ranks lie on nodes: "compact" (neighbours of a pipeline on one node, where that is possible) or
            "mirrors_apart" (ranks r and D-1-r, which hold copies of each other's stages under two directions, on two nodes).
        device_mesh: A mesh of which one dimension names the ranks of the pipeline, if the others are the caller's own: nothing is
            summed over them, and ``step`` returns the loss of this pipeline's batch.
        pipeline_dim: The name of that dimension; a mesh of one dimension need not have it.
        schedule: "auto" searches, in about a second, for the cut, the order and the shape that end soonest together: one way, a V
            (two stages a rank), both directions, or both with V; for any D.  A rank holds at most the activations of D
            micro-batches in 1/D of the model, or what ``memory`` allows, and a second copy of a stage where the model allows it.
            Or "chimera" (even D), "1f1b", "gpipe" or another family, an :class:`Order`, or a callable ``(D, N) -> Order``.
        split_points: Qualified names of the modules that begin a new stage, or a dict from names to torch's ``SplitPoint``
            (BEGINNING or END), instead of the automatic cut; for "auto" D-1 of them, or 2D-1 for two stages a rank.  Without it the
            cuts are where the forward calls :func:`fxchimera.split`, or torch's ``pipe_split``, if it does.
        loss_weight: How a micro-batch counts: "samples" (by rows), "sum" (the loss is a sum), an ignore_index (by targets that are
            not it), or a callable ``(target, args, kwargs) -> number``.
        args_chunk_spec: Batch dimension of each positional argument where it is not the first: torch's ``TensorChunkSpec``, an
            int, or None to give the whole tensor to every micro-batch.
        kwargs_chunk_spec: The same for keyword arguments, by name.
        target_chunk_spec: The same for the target.
        cost: "analytic" (flops and bytes; the same cut in every run) or "measured" (seconds on this machine, rank 0's).
        memory: The most that a rank may need, in bytes or as text ("24GiB"); one for all ranks, or one for each.  What kernels need
            for a moment is not counted.
        optimizer_values: Numbers that the optimizer keeps for each parameter, for ``memory`` (AdamW: 2, SGD: 0 or 1).
        recompute: What a backward computes again instead of keeping it from the forward: "none", "selective" (all but products,
            convolutions and attention), "full" (what enters a group of layers is kept), or one of these for each stage.  "auto" is
            what makes a step end soonest within ``memory``, so none without it.  Gradients are the same to the last bit.
        profile: Measure the stages of a first plan on the ranks, what is in them, and messages between ranks, and plan cuts and
            order again from that; the model is recorded once.  A ``loss_fn`` that takes a target is left out, as there
            is none yet (:meth:`Pipeline.profile` has one).
        compile: Run every stage through ``torch.compile``, with these of its keyword arguments ("backend", "mode", "options",
            "dynamic", "fullgraph"), or by default.  Backwards are not split then, and random numbers are the same from run to
            run only.  Results are those of the compiled model up to rounding.
        parallelize: ``parallelize(stage_module, *, stage, device)``, called once for every stage on its rank, may apply
            ``fully_shard`` or ``parallelize_module`` to the stage's modules, over the other dimensions of ``device_mesh``.  The
            elements of the model's outermost lists of modules stay whole; schedules with one copy of each stage only, and
            batches like the example.
        checkpoint: Weights to begin with, read tensor by tensor and converted to the model's dtype: a file (.safetensors, .bin,
            .pt, .pth), a folder with one, or with several and an index (``model.safetensors.index.json``), a mapping from names
            to tensors, or a function of a name.  Buffers that it lacks are initialised.
        param_init_fn: Fills the parameters and buffers that one module holds, as in FSDP, where the model is on the meta device
            and the checkpoint, if any, lacks them; modules that it leaves alone are initialised in their own way.
        seed: Seed of the keyed randomness (dropout, initialisation); default ``torch.initial_seed()`` of rank 0.
        nan: What a step does whose loss is nan or infinite: "raise" an error (gradients are as before, statistics of batch norm
            need not be), "skip" (return the loss; all is as before), or "ignore" (the gradients count).  All ranks do the same.
        devices: Where ranks compute: one device for all, or one for each, as ``torch.device`` or text.  Default: every visible
            CUDA device in turn, under torchrun the one numbered LOCAL_RANK; else the CPU.  The parameters are moved there and
            stay the same objects; a batch is copied there; what a forward-only call returns comes back to the batch's device.
        transport: What carries messages between processes: "sockets" (through the host's memory), "groups" (torch's backend for the
            devices, NCCL on CUDA, one device a process; gloo on the CPU), or "auto": what the environment's FXCHIMERA_TRANSPORT
            says, else groups on accelerators where that can be.
        batch_norm: Each micro-batch is normalised by its own statistics.  The running ones are updated by "each", as in a plain
            loop over micro-batches, with a warning that names the layers, or "deferred": once a step, by the whole batch's.
        wait_seconds: How long a rank waits for one message before it raises.
        slow_seconds: How long a rank waits for others before it says so in torch's manner, once for each wait: a warning of the
            logger "fxchimera" that names the slow rank and its action.  The first step, which may compile, is left alone.

    Warns:
        CoarseCutWarning: The model has fewer pieces than stages, so that some ranks compute nothing.

    Raises:
        CaptureError: The model cannot be recorded; the message names the user's file and line.
        PartitionError: The model cannot be cut into ``num_stages`` stages, or not so that every rank has ``memory`` enough.
        ScheduleError: The schedule is unknown or does not fit D and N.
        FxChimeraError: The number of ranks is no multiple of ``num_stages``, or not the one asked for, or ranks disagree.
    """
    check_policy(nan)
    check_batch_norm(batch_norm, model, n_microbatches)
    order = order_of(schedule, num_stages, n_microbatches, copied=parallelize is None)
    model, cuts = plain(model, split_points, order)
    compiler = compiler_of(compile, recompute=recompute, profile=profile)
    if parallelize is not None:
        refuse_parallelize(compile=compiler is not None, profile=profile, recompute=recompute)
    layout = Layout.of(num_stages, data_parallel, rank_placement, device_mesh, pipeline_dim)
    world = make_world(layout, Limits(wait_seconds, slow_seconds))
    try:
        world.devices = choose_devices(devices, num_stages, world.ranks)
        world.backends = choose_backend(transport, world)
        specs = ChunkSpecs(args=args_chunk_spec, kwargs=kwargs_chunk_spec, target=target_chunk_spec)
        batch = common_example(divide(example_args, dict(example_kwargs or {}), None, n_microbatches, specs), world)

        def profiled(made: Draft) -> Draft:
            """Plan again from what the stages of a first plan take."""
            example, placement = batch.microbatches[0], made.order.placement
            found, shares = profile_cut(made.captured, made.cut, example, placement, world, loss_fn=loss_fn)
            return replanned(
                made,
                found,
                shares,
                order,
                split_points=cuts,
                memory=memory,
                optimizer_values=optimizer_values,
                recompute=recompute,
                shared=world.num_processes == 1,
            )

        def settled(made: Draft) -> Draft:
            """Plan from measured stages if asked to, then fetch the weights of what this process owns."""
            made = profiled(made) if profile else made
            owner = owner_process(model, made.cut, made.captured.parameters, made.order.placement)
            read = {name for stage in made.cut.stages for name in stage.buffers}
            device_of = placed(made.captured, owner, world)
            materialise(made.captured, owner, world.ranks, read, Weights(device_of, checkpoint, param_init_fn, chosen_seed))
            return made

        chosen_seed = world.spread(torch.initial_seed() if seed is None else seed, "pipeline()")
        blocks = None if parallelize is None else blocks_of(model)
        programs, plan = planned(
            model, batch, order, cuts, cost, world, memory, optimizer_values, recompute, settled, compiler, blocks
        )
        if parallelize is not None:
            parallelize_stages(programs, batch, plan.placement, world, parallelize)
        return Pipeline(
            model, programs, plan.order, world, plan=plan, loss_fn=loss_fn, loss_weight=loss_weight, specs=specs,
            seed=chosen_seed, nan=nan, batch_norm=batch_norm,
        )  # fmt: skip
    except BaseException as error:
        world.failure.report(Cause(world.process, f"pipeline() could not be made: {type(error).__name__}: {error}"))
        world.close()
        raise


def reference(
    model: nn.Module,
    *args: Any,
    target: Any = None,
    loss_fn: LossFn | None = None,
    num_stages: int,
    n_microbatches: int,
    schedule: Schedule = "auto",
    split_points: SplitPoints = (),
    loss_weight: LossWeight = "samples",
    args_chunk_spec: Sequence[Any] | None = None,
    kwargs_chunk_spec: Mapping[str, Any] | None = None,
    target_chunk_spec: Any = 0,
    loss_scale: float = 1.0,
    seed: int | None = None,
    step: int = 0,
    **kwargs: Any,
) -> Reference:
    """Run the plain ``model`` in this process, micro-batch by micro-batch, as a pipeline's step number ``step`` would.

    The randomness is keyed as in the pipeline, and the gradient sums are associated as in the pipeline: per (stage, replica) over
    micro-batches ascending, then the uses of a tied parameter by stage ascending, then the replicas, down before up.  So the
    returned loss and gradients equal the pipeline's to the last bit.  The model's ``.grad`` stays as it is.  For a pipeline made
    with "auto" under ``memory``, measured costs or ``profile``, pass its ``plan.order`` as ``schedule``.
    """
    order = order_of(schedule, num_stages, n_microbatches)
    refuse_meta(model, "reference()")
    model, cuts = plain(model, split_points, order)
    specs = ChunkSpecs(args=args_chunk_spec, kwargs=kwargs_chunk_spec, target=target_chunk_spec)
    batch = divide(args, kwargs, target, n_microbatches, specs)
    programs, plan = planned(model, batch, order, cuts, "analytic", None)
    chosen_seed = torch.initial_seed() if seed is None else seed
    found = true_programs(programs, batch, seed=chosen_seed, step=step)
    return run_reference(
        model,
        batch,
        found,
        plan.placement,
        weights=weights_of(batch, loss_weight, loss_fn, found),
        loss_fn=with_named_draws(loss_fn, check_loss(found[0].captured, batch.microbatches[0].target, loss_fn)),
        loss_scale=loss_scale,
        seed=chosen_seed,
        step=step,
    )
