"""Values that a forward reads into Python: guards, refusals, and modules kept whole."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fxchimera_passes.capture import capture, recapture
from fxchimera_passes.errors import CaptureError
from tests.graph.recorded import Branch, Two, Wrapped, assert_same, build, check, data, find


class Masked(Two):
    def between(self, x, mask):
        if mask.all():
            return x
        return x * mask[:, None]


def test_a_branch_on_an_input_is_a_guard():
    full, part = torch.ones(3), torch.tensor([1.0, 0.0, 1.0])
    captured = check(build(Masked), data(), full)
    (guard,) = captured.guards
    assert guard.expected is True
    assert guard.line.startswith(__file__)
    assert guard.holds((data(), full))
    assert guard.holds((data(5), torch.ones(5)))
    assert not guard.holds((data(), part))
    other = recapture(captured, (data(), part), {}, training=True)
    assert_same(other, data(), part)
    assert not other.guards[0].holds((data(), full))


def test_a_guard_replays_writes_and_leaves_the_batch_alone():
    class Model(Two):
        def between(self, x, mask):
            counts = mask.clone()
            counts[0].add_(5)
            mask.add_(1)
            return x * int(counts.sum()) + int(mask.sum())

    mask = torch.zeros(3, dtype=torch.long)
    captured = check(build(Model), data(), mask)
    assert torch.equal(mask, torch.zeros(3, dtype=torch.long))
    assert [guard.expected for guard in captured.guards] == [5, 3]
    assert all(guard.holds((data(), mask)) for guard in captured.guards)
    assert torch.equal(mask, torch.zeros(3, dtype=torch.long))


def test_a_value_that_depends_on_nothing_needs_no_guard():
    class Model(Two):
        def between(self, x):
            return x * int(torch.arange(4).sum())

    captured = check(build(Model))
    assert captured.guards == ()


@pytest.mark.parametrize("read", ["float(x.sum()) > 0", "self.first.weight.sum().item() > 0", "x.tolist()[0][0] > 0"])
def test_a_number_that_depends_on_parameters_is_refused_at_the_root(read):
    class Model(Two):
        def between(self, x):
            if eval(read):
                return x
            return -x

    with pytest.raises(CaptureError, match=r"reads\.py:\d+: (float|item|tolist)\(\) reads a value that depends on .*submodule"):
        capture(build(Model), (data(),), {})


def test_a_branch_in_a_submodule_keeps_it_whole():
    captured = check(build(lambda: nn.Sequential(*(Branch() for _ in range(10)))))
    for name in map(str, range(10)):  # each does a tenth of the work, less than one of 8 stages
        assert name not in captured.open_modules
        assert "depends on" in captured.report.closed[name]
        assert find(captured, name)
    assert captured.assumed == ()


def test_a_value_needed_for_a_shape_keeps_the_module_whole():
    class Select(Branch):
        def forward(self, x):
            y = self.layer(x)
            return y * y[y > 0].mean()

    captured = check(build(lambda: Wrapped(Select())))
    assert "inner" in captured.report.closed


def test_iterating_over_rows():
    class Model(Two):
        def between(self, x):
            return torch.stack([row * index for index, row in enumerate(x)])

    check(build(Model))


def test_distributions_check_their_arguments_in_a_plain_run_only():
    class Model(Two):
        def between(self, x):
            return x + torch.distributions.Normal(x, x.exp(), validate_args=True).log_prob(x.detach())

    captured = check(build(Model))
    assert captured.guards == ()
