"""The chapters of the page of errors: when an error happens, from the module that makes it, and what helps in general."""

from __future__ import annotations

from typing import NamedTuple

from tests.errorpage.sites import Site

__all__ = ["GROUPS", "Group", "group_of"]


class Group(NamedTuple):
    """A chapter; the first whose prefixes match a site's module takes it."""

    title: str
    advice: str
    modules: tuple[str, ...]


_R = "fxchimera.runtime."
_P = "fxchimera_passes."

GROUPS = (
    Group(
        "Recording the model",
        "`fxchimera.pipeline` runs the model once on the example batch and writes down what it does. What cannot be written down "
        "is named with your file and line; nothing has been changed in the model by then. A submodule is kept as one whole call, "
        "so moving the odd lines into a submodule of their own nearly always helps.",
        (f"{_P}capture", f"{_P}soundness", f"{_P}assumed", f"{_R}settling", f"{_R}again"),
    ),
    Group(
        "Cutting it into stages",
        "The recording is cut where only tensors cross. A stage needs a parameter, and a place to be cut at; `print(pipe.plan)` "
        "with fewer stages shows the places that there are.",
        (_P, "fxchimera.planned"),
    ),
    Group(
        "Planning: memory, costs, the command line",
        "Raised by `fxchimera plan`, `simulate`, `compare`, by `pipeline(..., memory=, recompute=, cost=)`, before anything runs.",
        ("fxchimera.planner", "fxchimera.plan_cli", "fxchimera.simulate_cli", "fxchimera.demo"),
    ),
    Group(
        "Ranks, devices, processes",
        "Raised while the pipeline is being made, when what was asked for does not fit the processes and devices that there are.",
        tuple(_R + name for name in ("layout", "devices", "rankplacement", "addresses", "wires", "width", "moving", "carriers")),
    ),
    Group(
        "Wrapping a model: what a pipeline cannot keep right",
        "A pipeline refuses what it would compute otherwise than the plain model, and names the module, buffer or parameter.",
        tuple(_R + name for name in ("safety", "clone", "homes", "inspection", "stagebuffers", "batchnorm", "deferral", "trial")),
    ),
    Group(
        "Weights from a checkpoint, or made on the ranks",
        "Raised for models on the meta device, and by `checkpoint=` and `param_init_fn=`.",
        tuple(_R + name for name in ("materialise", "initialise", "weightfiles")),
    ),
    Group(
        "The batch",
        "A batch is divided along the first dimension of its tensors, for every micro-batch alike. Raised before anything is "
        "computed, on every rank.",
        tuple(_R + name for name in ("microbatch", "rows", "example", "agreement", "warmup", "preparation", "program", "packets")),
    ),
    Group(
        "The loss",
        "Raised before gradients have changed.",
        tuple(_R + name for name in ("loss", "losscheck", "nonfinite", "placedloss")),
    ),
    Group(
        "During a step",
        "A step that failed is named the same on every rank: rank, stage, direction, micro-batch, action, and the error that began "
        "it. After a `PipelineError` wrap the model again; after the others the pipeline goes on.",
        (
            "fxchimera.pipe", "fxchimera.pipestate", *(_R + name for name in (
                "engine", "verify", "world", "failure", "distributed", "grouptransport", "local", "handover", "message", "patience",
                "buckets", "profile", "probe",
            )),
        ),
    ),
    Group(
        "Saving and loading",
        "A checkpoint that is there already stays whole when `save` raises; model and optimizer stay as they were "
        "when `load` raises.",
        tuple(_R + name for name in ("saving", "savedfiles", "savedindex", "jsonvalues", "optimizerstate", "state", "sharded")),
    ),
    Group(
        "With torch.compile, FSDP, tensor parallelism, torch.distributed.pipelining",
        "Raised while the pipeline is being made, unless the message says otherwise.",
        ("fxchimera.interop", *(_R + name for name in ("compiled", "parallelize", "pippy", "torch_pipe"))),
    ),
    Group(
        "Schedules and orders",
        "Orders by name are proven before the first step and raise these only for numbers that do not fit. The others meet orders "
        "of your own: the message names the rank, the position in its list and the action that is wrong, or is missing.",
        ("fxchimera.schedule", "fxchimera.view"),
    ),
    Group("Elsewhere", "", ("",)),
)  # fmt: skip


def group_of(site: Site) -> Group:
    """The chapter of a site; of a module of the runtime the name counts, not the package that it is in."""
    first, last = site.module.rpartition(".")[::2]
    module = _R + last if first.startswith(_R.rstrip(".")) else site.module
    return next(group for group in GROUPS if any(_within(module, prefix) for prefix in group.modules))


def _within(module: str, prefix: str) -> bool:
    return not prefix or module == prefix or module.startswith(prefix if prefix.endswith(".") else prefix + ".")
