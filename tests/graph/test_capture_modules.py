"""How the recorder writes down module calls: what a closed module reads, writes and keeps."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fxchimera_passes.capture import capture
from fxchimera_passes.captured import info
from fxchimera_passes.errors import CaptureError
from tests.graph.recorded import RECORDINGS, WIDTH, Branch, Two, Wrapped, build, check, data, find


def test_data_dependent_leaf_runs_for_real_also_without_weights():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.router, self.experts = nn.Linear(WIDTH, 3), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x):
            choice, out = self.router(x).argmax(-1), torch.zeros_like(x)
            for index, expert in enumerate(self.experts):
                rows = (choice == index).nonzero().squeeze(-1)
                if rows.numel():
                    out = out.index_add(0, rows, expert(x[rows]))
            return out

    model = build(lambda: Wrapped(Experts()))
    captured = check(model)
    hollow = capture(copy.deepcopy(model).to("meta"), (data(),), {}, num_stages=8)
    assert str(hollow.graph) == str(captured.graph)


def test_a_module_that_keeps_python_state_is_named():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.calls, self.log = nn.Linear(WIDTH, WIDTH), 0, []

        def forward(self, x):
            self.calls += 1
            self.log.append(self.calls)
            return self.layer(x)

    model = build(lambda: Wrapped(Counting()))
    captured = check(model)
    assert captured.report.stateful == {"inner": ("calls", "log")}
    assert "inner" not in captured.open_modules
    assert model.inner.calls == 1, "one real run, none from the recording"


def test_buffers_written_by_batch_norm_are_listed():
    class Model(Two):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(WIDTH)

        def between(self, x):
            return self.norm(x)

    captured = check(build(Model))
    wanted = {"norm.num_batches_tracked", "norm.running_mean", "norm.running_var"}
    assert {name for node in captured.graph.nodes if node.op != "output" for name in info(node).writes} == wanted
    assert set(info(find(captured, "norm")[0]).buffers) == wanted


@pytest.mark.parametrize("inside", [False, True])
def test_a_buffer_rebound_in_the_forward(inside):
    class Average(Two):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(WIDTH))

        def between(self, x):
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            return x - self.mean

    model = build(lambda: Wrapped(Average())) if inside else build(Average)
    captured = check(model)
    writes = [info(node).writes for node in captured.graph.nodes if node.op != "output" and info(node).writes]
    assert writes == [("inner.mean" if inside else "mean",)]


def test_a_parameter_read_outside_its_module():
    class Model(Two):
        def between(self, x):
            return F.linear(x, self.second.weight) + x * self.first.weight.norm()

    check(build(Model))


def test_a_leaf_that_reads_a_parameter_of_another_module():
    class Head(nn.Module):
        def __init__(self, owner):
            super().__init__()
            self.owner = [owner]

        def forward(self, x):
            return F.linear(x, self.owner[0].weight)

    class Model(Two):
        def __init__(self):
            super().__init__()
            self.head = Head(self.first)

        def between(self, x):
            return self.head(x)

    captured = capture(build(Model), (data(),), {})
    assert info(find(captured, "head")[0]).parameters == ("first.weight",)


def test_an_unregistered_parameter_is_refused():
    class Model(Two):
        def __init__(self):
            super().__init__()
            self.hidden = [torch.ones(WIDTH, dtype=torch.float64, requires_grad=True)]

        def between(self, x):
            return x * self.hidden[0]

    with pytest.raises(CaptureError, match=r"register it with nn\.Parameter"):
        capture(build(Model), (data(),), {})


def test_a_module_with_hooks_stays_whole_and_runs_them():
    model = build(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Two()))
    calls: list[int] = []
    model[1].register_forward_hook(lambda module, args, output: calls.append(1) or output + 1)
    model[1].register_full_backward_hook(lambda module, grad_in, grad_out: (grad_in[0] * 3,))
    captured = check(model)
    assert captured.open_modules == {""}
    assert len(calls) == 2 + RECORDINGS, "the plain model, the graph, and the recordings"


def test_a_torch_func_transform_keeps_the_module_whole():
    class Vmapped(Branch):
        def forward(self, x):
            return torch.func.grad(lambda rows: (rows * rows.sin()).sum())(self.layer(x))

    assert "inner" in check(build(lambda: Wrapped(Vmapped()))).report.closed


def test_recurrent_layers():
    class Model(Two):
        def __init__(self):
            super().__init__()
            self.rnn = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True)

        def between(self, x):
            return self.rnn(x[None])[0][0]

    model = build(Model)
    captured = check(model)
    # two layers, each 2 * rows * (4*hidden*input + 4*hidden*hidden) multiply-adds
    assert info(find(captured, "rnn")[0]).forward_flops == 2 * (2 * 3 * 4 * WIDTH * 2 * WIDTH)
    assert str(capture(copy.deepcopy(model).to("meta"), (data(),), {}, num_stages=8).graph) == str(captured.graph)
