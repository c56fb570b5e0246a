"""Every tensor is where the plan says: torch refuses an operation on tensors of two devices, so a step that ends has moved all."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import nn

import fxchimera
from fxchimera.runtime.weights.moving import move_model
from tests.device.models import Blocks, Tied, batch
from tests.device.twin import DEVICES
from tests.parity import gradients_of

TURN = [DEVICES[rank % 2] for rank in range(4)]


def pair(model: nn.Module, schedule: str, devices, n: int = 8, **options):
    """The same model as a pipeline on devices and as one on the CPU, which the CPU tests compare with plain torch."""
    x, _ = batch()
    common = {"example_args": (x,), "loss_fn": nn.functional.mse_loss, "num_stages": 4, "n_microbatches": n, "seed": 3} | options
    other = copy.deepcopy(model)
    return fxchimera.pipeline(model, schedule=schedule, devices=devices, **common), fxchimera.pipeline(
        other, schedule=schedule, devices="cpu", **common
    )


def assert_alike(found: nn.Module, expected: nn.Module) -> None:
    wanted = gradients_of(expected)
    for name, gradient in gradients_of(found).items():
        assert gradient is not None, name
        torch.testing.assert_close(gradient.cpu(), wanted[name], rtol=1e-10, atol=1e-14, msg=name)


@pytest.mark.parametrize(
    ("schedule", "devices"),
    [
        pytest.param("chimera", TURN),
        pytest.param("zbv", DEVICES[1], marks=pytest.mark.matrix),
        pytest.param("1f1b", TURN, marks=pytest.mark.matrix),
        pytest.param("zbv", TURN, marks=pytest.mark.matrix),
        pytest.param("dualpipe", TURN, marks=pytest.mark.matrix),
        pytest.param("chimera", DEVICES[1], marks=pytest.mark.matrix),
        pytest.param("auto", TURN, marks=pytest.mark.matrix),
    ],
)
def test_three_steps_with_dropout_and_an_optimizer(schedule, devices):
    x, y = batch()
    model = Blocks()
    parameters = list(model.parameters())
    early = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)  # made before the parameters were moved
    pipe, plain = pair(model, schedule, devices)
    other = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    with pipe, plain:
        assert [*map(id, model.parameters())] == [*map(id, parameters)]
        assert {str(p.device) for p in parameters} == set(devices if isinstance(devices, list) else [devices])
        for _ in range(3):
            torch.testing.assert_close(pipe.step(x, target=y), plain.step(x, target=y), rtol=1e-11, atol=0)
            assert_alike(model, plain._model)
            torch.testing.assert_close(pipe.clip_grad_norm_(0.5), plain.clip_grad_norm_(0.5), rtol=1e-10, atol=0)
            for optimizer in (early, other):
                optimizer.step()
                optimizer.zero_grad()
        outputs = pipe(x)
        assert outputs.device == x.device
        torch.testing.assert_close(outputs, plain(x), rtol=1e-10, atol=1e-12)
        pipe.eval(), plain.eval()
        torch.testing.assert_close(pipe(x), plain(x), rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(pipe.evaluate(x, target=y), plain.evaluate(x, target=y), rtol=1e-10, atol=0)


def test_every_parameter_is_where_its_stage_computes():
    model = Blocks()
    pipe, plain = pair(model, "chimera", TURN)
    with pipe, plain:
        owner = pipe._owner
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            assert str(tensor.device) == TURN[owner[name]], name


@pytest.mark.parametrize("schedule", ["chimera", pytest.param("1f1b", marks=pytest.mark.matrix)])
def test_a_tied_parameter_and_a_buffer_that_several_stages_read(schedule):
    x, y = batch()
    model = Tied()
    pipe, plain = pair(model, schedule, TURN)
    with pipe, plain:
        for _ in range(2):
            pipe.step(x, target=y), plain.step(x, target=y)
            assert_alike(model, plain._model)
            for either in (pipe._model, plain._model):
                with torch.no_grad():  # mirrors and copies follow
                    either.scale.mul_(1.5)
                    for parameter in either.parameters():
                        parameter.sub_(0.1 * parameter.grad)
                        parameter.grad = None
        assert model.first.weight is model.last.weight


def test_the_timeline_is_that_of_the_devices():
    x, y = batch()
    pipe, plain = pair(Blocks(), "chimera", TURN)
    with pipe, plain:
        pipe.step(x, target=y), plain.step(x, target=y)
        found, expected = pipe._timeline, plain._timeline
        assert sorted((e.rank, str(e.action)) for e in found.events) == sorted((e.rank, str(e.action)) for e in expected.events)
        ends = {(event.rank, str(event.action)): event for event in found.events}
        for microbatch in pipe.plan.order.placement.microbatches(0):  # rank r computes stage r of the down pipe
            for stage in range(3):
                sent, read = ends[stage, f"{stage}SEND_F{microbatch}"], ends[stage + 1, f"{stage + 1}F{microbatch}"]
                assert ends[stage, f"{stage}F{microbatch}"].end <= sent.start <= sent.end <= read.start
        assert 0 < found.makespan < 60


@pytest.mark.matrix
def test_state_dicts_and_verify():
    x, y = batch()
    model = Blocks()
    pipe, plain = pair(model, "chimera", TURN)
    with pipe, plain:
        state = pipe.state_dict()
        assert {tensor.device.type for tensor in state.values()} == {"cpu"}
        plain.load_state_dict({name: tensor * 2 for name, tensor in state.items()})
        pipe.load_state_dict({name: tensor * 2 for name, tensor in state.items()})
        torch.testing.assert_close(pipe.step(x, target=y), plain.step(x, target=y), rtol=1e-12, atol=0)
        assert pipe.verify(x, target=y).ok


@pytest.mark.matrix
def test_a_batch_on_one_of_the_devices_and_gradients_of_a_batch():
    x, y = batch()
    model = Blocks()
    pipe, plain = pair(model, "chimera", TURN)
    with pipe, plain:
        ours, theirs = x.to(DEVICES[1]).requires_grad_(), x.clone().requires_grad_()
        pipe.step(ours, target=y.to(DEVICES[0])), plain.step(theirs, target=y)
        assert_alike(model, plain._model)
        torch.testing.assert_close(ours.grad.cpu(), theirs.grad, rtol=1e-12, atol=1e-14)
        assert str(pipe(ours.detach()).device) == DEVICES[1]


@pytest.mark.matrix
@pytest.mark.parametrize("options", [{"cost": "measured"}, {"profile": True}], ids=["measured costs", "profile"])
def test_measuring_on_devices(options):
    x, y = batch()
    model = Blocks()
    pipe, plain = pair(model, "chimera", TURN, **options)
    with pipe, plain:
        assert {str(p.device) for p in model.parameters()} == set(DEVICES)
        torch.testing.assert_close(pipe.step(x, target=y), plain.step(x, target=y), rtol=1e-12, atol=0)
        pipe.profile(x, target=y, rounds=1)


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        (["twin:0"] * 3, "3 entries for 4 ranks"),
        ("twin:2", "2 devices"),
        (["cpu", "twin:0", "cpu", "twin:0"], "cpu and twin"),
        ("nonsense", "torch does not know"),
        ("meta", "names meta"),
    ],
)
def test_refused(devices, message):
    x, _ = batch()
    with pytest.raises(fxchimera.FxChimeraError, match=message):
        fxchimera.pipeline(Blocks(), example_args=(x,), num_stages=4, n_microbatches=4, schedule="1f1b", devices=devices)


def test_a_model_elsewhere_than_the_ranks_is_refused():
    x, _ = batch()
    model = Blocks(2)
    move_model(model, torch.device(DEVICES[0]))
    with pytest.raises(fxchimera.FxChimeraError, match=r"'blocks\.0\.up\.weight' is on twin:0, but ranks compute on the CPU"):
        fxchimera.pipeline(model, example_args=(x,), num_stages=2, n_microbatches=4, schedule="1f1b", devices="cpu")


@pytest.mark.parametrize("kind", ["module", pytest.param("partial", marks=pytest.mark.matrix)])
def test_the_weights_of_classes_in_a_loss(kind):
    x, _ = batch()
    y = torch.arange(16) % 3
    weight = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)
    loss_fn = nn.CrossEntropyLoss(weight) if kind == "module" else functools.partial(nn.functional.cross_entropy, weight=weight)
    pipe, plain = pair(Blocks(), "chimera", TURN, loss_fn=loss_fn)
    with pipe, plain:
        for _ in range(2):
            torch.testing.assert_close(pipe.step(x, target=y), plain.step(x, target=y), rtol=1e-11, atol=0)
            assert_alike(pipe._model, plain._model)
            weight.mul_(1.5)


def test_a_loss_that_writes_what_would_be_lost_is_refused():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(1))

        def forward(self, output, target):
            self.calls += 1
            return nn.functional.mse_loss(output, target)

    x, y = batch()
    pipe, plain = pair(Blocks(2), "1f1b", TURN[:2], loss_fn=Counting(), num_stages=2)
    with plain, pipe, pytest.raises(fxchimera.FxChimeraError, match="Counting writes into a tensor of its own"):
        pipe.step(x, target=y)


@pytest.mark.matrix
@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recomputation(recompute):
    x, y = batch()
    model = Blocks()
    pipe, plain = pair(model, "zbv", TURN, recompute=recompute)
    with pipe, plain:
        for _ in range(2):
            torch.testing.assert_close(pipe.step(x, target=y), plain.step(x, target=y), rtol=1e-11, atol=0)
            assert_alike(model, plain._model)


@pytest.mark.matrix
def test_a_checkpoint_of_the_cpu_goes_on_on_devices(tmp_path):
    x, y = batch()
    pipe, plain = pair(Blocks(), "chimera", TURN)
    with pipe, plain:
        ours, theirs = (torch.optim.AdamW(one.parameters()) for one in (pipe, plain))
        for one, optimizer in ((pipe, ours), (plain, theirs)):
            one.step(x, target=y)
            optimizer.step()
            optimizer.zero_grad()
        plain.save(tmp_path, optimizer=theirs)
        pipe.load(tmp_path, optimizer=ours)
        torch.testing.assert_close(pipe.step(x, target=y), plain.step(x, target=y), rtol=1e-11, atol=0)
        assert_alike(pipe._model, plain._model)
        ours.step()
        pipe.save(tmp_path, optimizer=ours)
