"""Examples of tutorials/errors.md for what other devices, hosts, processes and versions bring about, on the parts that meet it."""

from __future__ import annotations

import math
import queue
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import pipeline as torch_pipeline

from fxchimera import BatchError, FxChimeraError, PipelineError
from fxchimera.planner.link import Measures
from fxchimera.runtime import sharded
from fxchimera.runtime.batches.example import common_example
from fxchimera.runtime.batches.placedloss import _Placed
from fxchimera.runtime.batches.safety import refuse_unsafe
from fxchimera.runtime.failures.failure import Failure, Limits
from fxchimera.runtime.failures.patience import Patience
from fxchimera.runtime.grid import Grid
from fxchimera.runtime.interop import pippy
from fxchimera.runtime.interop.torch_pipe import whole_model
from fxchimera.runtime.message import Key, check_tensor
from fxchimera.runtime.messages import carriers
from fxchimera.runtime.messages.grouptransport import GroupTransport
from fxchimera.runtime.messages.handover import StreamTransport
from fxchimera.runtime.messages.local import LocalTransport
from fxchimera.runtime.microbatch import ChunkSpecs, divide
from fxchimera.runtime.processes import width
from fxchimera.runtime.processes.layout import Layout
from fxchimera.runtime.processes.width import Width
from fxchimera.runtime.processes.wires import _dial
from fxchimera.runtime.processes.world import DistributedWorld
from fxchimera.runtime.weights import moving, parallelize
from fxchimera.runtime.weights.savedindex import Saved, Stored, commit
from fxchimera.schedule import make_order
from fxchimera_passes.captured import TensorMeta
from tests.local.toys import chain, data, wrapped

X, _ = data(8)


@pytest.mark.parametrize(
    ("devices", "text"),
    [
        (["cpu"] * 3, "devices= has 3 entries for 2 ranks; pass one for all, or one for each"),
        ("abacus", "devices= names 'abacus', which torch does not know"),
        ("meta", "devices= names meta, but this host has no accelerator"),
    ],
)
def test_devices_that_are_not_there(devices: Any, text: str) -> None:
    with pytest.raises(FxChimeraError, match=text):
        wrapped(chain(4), X, num_stages=2, n_microbatches=2, devices=devices)


@pytest.mark.parametrize(
    ("devices", "text"),
    [
        ("cuda:5", "devices= names cuda:5, but this host has 2 devices of that kind, numbered from 0"),
        (["cuda:0", "cpu"], "devices= names devices of the kinds cpu and cuda; all ranks need one kind"),
    ],
)
def test_devices_of_a_host_with_two(devices: Any, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    with pytest.raises(FxChimeraError, match=text):
        wrapped(chain(4), X, num_stages=2, n_microbatches=2, devices=devices)


def test_a_mesh_that_lists_its_ranks_backwards() -> None:
    mesh = SimpleNamespace(mesh_dim_names=("pp",), ndim=1, mesh=torch.tensor([1, 0]))
    with pytest.raises(FxChimeraError, match=r"dimension 'pp' of device_mesh lists the ranks \[1, 0\]; a pipeline's must ascend"):
        Layout.of(2, None, "compact", mesh, "pp")


def test_a_price_below_nothing() -> None:
    with pytest.raises(FxChimeraError, match=r"got split_price=-1\.0"):
        Measures(split_price=-1.0)


def test_a_port_where_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxchimera.runtime.failures.sharedfailure.GRACE_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    store = SimpleNamespace(check=lambda keys: True, get=lambda key: f"127.0.0.1 {port} 00".encode())
    failure: Any = Mock(store=store, limits=Limits(1.0), cause=None)
    with pytest.raises(FxChimeraError, match=rf"rank 0 cannot connect to rank 1 at 127\.0\.0\.1 port {port}: .*a firewall"):
        _dial(failure, "key", (0, 1, "down-F"), 0, math.inf)


def test_a_message_that_is_another() -> None:
    channel = (0, 1, "down-F")
    transport = LocalTransport([channel], Failure(Limits()))
    transport.send(channel, Key(0, 1, 2), [X], [TensorMeta.of(X)])
    with pytest.raises(PipelineError, match=r"1RECV_F3: expected .*, micro-batch 3, but .*, micro-batch 2 arrived in its place"):
        transport.receive(channel, Key(0, 1, 3), "1RECV_F3")


def test_a_message_that_is_another_between_streams() -> None:
    channel, transport = (0, 1, "down-F"), StreamTransport.__new__(StreamTransport)
    arrived: queue.SimpleQueue[Any] = queue.SimpleQueue()
    arrived.put((Key(0, 1, 2), [X], None))
    failure = Failure(Limits())
    transport._failure = failure
    transport._lines = {channel: SimpleNamespace(queue=arrived, awaited=failure.message(0, 1))}
    with pytest.raises(PipelineError, match=r"1RECV_F3: expected .*, micro-batch 3, but .*, micro-batch 2 arrived in its place"):
        transport.receive(channel, Key(0, 1, 3), "1RECV_F3")


def test_a_message_that_is_another_between_groups() -> None:
    channel, transport = (0, 1, "down-F"), GroupTransport.__new__(GroupTransport)
    coming = [SimpleNamespace(expected=SimpleNamespace(key=Key(0, 1, 2)))]
    transport._incoming = {channel: SimpleNamespace(coming=coming)}
    with pytest.raises(PipelineError, match=r"expected .*, micro-batch 3, but .*, micro-batch 2 was announced in its place"):
        transport.receive(channel, Key(0, 1, 3), "1RECV_F3")


def test_two_processes_of_one_gpu_over_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    world = DistributedWorld.__new__(DistributedWorld)
    world.devices = SimpleNamespace(by_rank=(), of=lambda rank: torch.device("cuda", 0))
    world.ranks, world.apart = (0,), False
    world.grid = Grid(((0, 1),), 0)
    monkeypatch.setattr(world, "gather_objects", lambda value, what: [value, value], raising=False)
    monkeypatch.setattr(carriers, "_backend_for", lambda device: "nccl")
    with pytest.raises(FxChimeraError, match=r"but the processes 0 and 1 share cuda:0 of .* goes through the host's memory"):
        carriers.choose_backend("groups", world)


def test_pipelines_whose_example_batches_are_of_two_kinds() -> None:
    theirs = [X.float()]
    grid = SimpleNamespace(width=2, pipeline=1)
    world: Any = SimpleNamespace(grid=grid, spread=lambda tensors, what: theirs)
    batch = divide((X,), {}, None, 2, ChunkSpecs())
    with pytest.raises(BatchError, match=r"of pipeline 1 holds .*float64, 2\)\], but that of pipeline 0 .*float32, 2\)\]"):
        common_example(batch, world)


def test_stages_sharded_beside_other_pipelines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(width, "is_sharded", lambda tensor: True)
    pipelines = Width.__new__(Width)
    pipelines.size = 2
    with pytest.raises(FxChimeraError, match="parallelize has sharded a stage, but these processes are 2 pipelines"):
        pipelines.take_values([X])


def test_a_stage_that_returns_a_sharded_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallelize, "is_sharded", lambda tensor: True)
    stage = parallelize._Shelled(parallelize._Shell(), 3, SimpleNamespace(forward=lambda x: (x,)))
    with pytest.raises(FxChimeraError, match="stage 3 returns a DTensor; let its last module return plain tensors"):
        stage.forward(X)


def test_an_optimizers_state_of_another_shape_than_a_sharded_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharded, "is_sharded", lambda tensor: True)
    with pytest.raises(
        FxChimeraError, match=r"the optimizer's 0\.weight\.row has shape \(8,\), the parameter \(8, 6\): how it would"
    ):
        sharded.placed_as(X, X[:, 0], "0.weight.row")


def test_a_wait_for_nobody_in_particular() -> None:
    patience = Patience(Failure(Limits()), "rank 0, action 1RECV_F0", 0.0, 10.0, None)
    with pytest.raises(PipelineError, match=r"rank 0, action 1RECV_F0 has waited 0 s; the sender is slow or gone. A longer limit"):
        patience()


def test_a_stage_whose_output_has_another_shape() -> None:
    with pytest.raises(
        PipelineError, match=r"produced a tensor of shape \(8, 6\) and torch.float64, but the recording .* \(4, 6\)"
    ):
        check_tensor(Key(0, 1, 2), X, TensorMeta.of(X[:4]))


def test_a_stage_whose_output_is_sparse() -> None:
    with pytest.raises(PipelineError, match=r"a tensor of layout torch.sparse_coo cannot cross a process boundary; make it dense"):
        check_tensor(Key(0, 1, 2), X.to_sparse(), TensorMeta.of(X))


def test_files_that_other_hosts_wrote_elsewhere(tmp_path: Path) -> None:
    saved = Saved({"weight": Stored("model-2.safetensors", "digest")}, {}, {})
    with pytest.raises(FxChimeraError, match=r"1 files that other ranks have written are not in rank 0's .*model-2\.safetensors"):
        commit(tmp_path, saved)


def test_a_torch_that_runs_no_order_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("torch.distributed.pipelining.schedules._PipelineScheduleRuntime")
    with pytest.raises(FxChimeraError, match="pass one of torch's schedule classes"):
        pippy.any_order(make_order("1f1b", 2, 4), [])


def test_a_pipe_that_was_traced_with_its_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = torch_pipeline(chain(4), (X,))
    pipe.has_loss_and_backward = True
    with pytest.raises(FxChimeraError, match="the Pipe was traced with a loss and computes its own backward"):
        whole_model(pipe)


def test_synchronised_batch_norm_in_processes() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.SyncBatchNorm(6))
    program: Any = SimpleNamespace(captured=SimpleNamespace(model=model))
    with pytest.raises(FxChimeraError, match="module '1' is a SyncBatchNorm, which would wait for ranks that run other stages"):
        refuse_unsafe(program, copies=1, n_microbatches=4, num_processes=2)


def test_a_model_on_another_device_than_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = SimpleNamespace(device=torch.device("cuda", 0))
    monkeypatch.setattr(moving, "_tensors", lambda model: [("0.linear.weight", weight)])
    captured: Any = SimpleNamespace(model=chain(2))
    world: Any = SimpleNamespace(devices=SimpleNamespace(by_rank=()))
    with pytest.raises(FxChimeraError, match=r"'0\.linear\.weight' is on cuda:0, but ranks compute on the CPU"):
        moving.spread_model(captured, SimpleNamespace(), SimpleNamespace(), world)


class Remembering(nn.Module):
    """A loss with a memory."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(()))

    def forward(self, output: torch.Tensor) -> torch.Tensor:
        return output.sum() + self.last.add_(1)


def test_a_loss_with_a_memory_on_another_device() -> None:
    loss_fn = Remembering()
    placed = _Placed(loss_fn, [loss_fn.last], torch.device("cpu"))
    with pytest.raises(FxChimeraError, match="writes into a tensor of its own, which was copied to the device of the last stage"):
        placed(X)
