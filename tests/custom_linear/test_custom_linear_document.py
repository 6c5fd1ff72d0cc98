"""docs/custom_ops.md shows the example's own files and sums that are right; what needs no compiler works."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from examples.custom_linear import linear_python, on_paper, render
from fastlayers.equivalence import assert_linear_as_accurate

ROOT = Path(__file__).resolve().parents[2]


def test_document_shows_the_files_as_they_are(document):
    assert render.render(document) == document, "run: python -m examples.custom_linear.render"


def test_every_code_block_but_commands_and_sums_is_rendered(document):
    prose = render.SLOT.sub("", document)
    assert re.findall(r"^```(\w+)$", prose, re.MULTILINE) == ["sh", "sh"]


def test_a_region_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match=r"linear_op\.py must have one comment 'doc: nothing', has 0"):
        render.region("linear_op.py", "nothing")


def test_the_sums_are_right_and_are_all_of_them(document):
    sums = re.findall(r"(\d+·\d+(?: \+ \d+·\d+)+) = (\d+)", document)
    for terms, total in sums:
        products = (term.split("·") for term in terms.split(" + "))
        assert sum(int(a) * int(b) for a, b in products) == int(total), terms
    expected = torch.cat([t.flatten() for t in (on_paper.Y, on_paper.GRAD_X, on_paper.GRAD_W)])
    assert [int(total) for _, total in sums] == expected.tolist()


def test_links_lead_somewhere(document):
    targets = re.findall(r"\]\((\.[^)]+)\)", render.SLOT.sub("", document))
    assert targets
    for target in targets:
        assert (ROOT / "docs" / target).exists(), target


@pytest.mark.parametrize("layer", [nn.Linear(3, 2, bias=False), linear_python.Layer(3, 2)])
def test_lab_numbers(layer):
    y, grad_x, grad_weight = on_paper.run(layer)
    assert y.tolist() == [[50, 122], [68, 167]]
    assert grad_x.tolist() == [[9, 12, 15], [14, 19, 24]]
    assert grad_weight.tolist() == [[27, 30, 33], [44, 49, 54]]


def test_python_function_on_random_input():
    x, weight, grad_y = torch.randn(50, 7), torch.randn(9, 7), torch.randn(50, 9)

    def function(x, weight, bias):
        return linear_python.Function.apply(x[:, 0], weight[0]).unsqueeze(1)

    assert_linear_as_accurate(function, None, x[:, None], weight[None], None, grad_y[:, None])


def test_python_function_derivatives():
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(linear_python.Function.apply, (x, weight))
    assert torch.autograd.gradgradcheck(linear_python.Function.apply, (x, weight))


def test_python_function_skips_what_is_not_needed():
    x, weight, grad_y = torch.randn(4, 3), torch.randn(2, 3), torch.randn(4, 2)
    for needs in ((True, False), (False, True)):
        context = SimpleNamespace(saved_tensors=(x, weight), needs_input_grad=needs)
        grads = linear_python.Function.backward(context, grad_y)
        assert tuple(grad is not None for grad in grads) == needs


def test_layer_takes_the_weights_of_nn_linear():
    linear, layer = nn.Linear(5, 3, bias=False), linear_python.Layer(5, 3)
    layer.load_state_dict(linear.state_dict())
    assert torch.equal(layer.weight, linear.weight)
    fresh = linear_python.Layer(100, 2000).weight
    assert fresh.abs().max() <= 0.1 and fresh.abs().max() > 0.0999


UNBUILT = """
import torch
from custom_linear import linear_op, on_paper
assert not linear_op.compiled
print([t.tolist() for t in on_paper.run(linear_op.Layer(3, 2))])
leaves = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((4, 3), (2, 3))]
assert torch.autograd.gradcheck(linear_op.linear, leaves)
assert torch.autograd.gradgradcheck(linear_op.linear, leaves)
"""


def test_op_works_without_its_library(tmp_path):
    source = ROOT / "examples" / "custom_linear"
    shutil.copytree(source, tmp_path / "custom_linear", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    done = subprocess.run([sys.executable, "-c", UNBUILT], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str([t.tolist() for t in (on_paper.Y, on_paper.GRAD_X, on_paper.GRAD_W)])
