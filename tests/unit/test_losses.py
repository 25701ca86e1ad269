"""Losses by name, and the count of right answers."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from mpidp.config import LossSection
from mpidp.errors import ConfigError, DataError
from mpidp.train.components import build_loss
from mpidp.train.losses import LOSSES, ClassLoss, count_right, cross_entropy

GENERATOR = torch.Generator().manual_seed(0)
SCORES = torch.randn(6, 5, generator=GENERATOR)
LABELS = torch.tensor([0, 1, 2, 3, 4, 0])
SHARES = torch.softmax(torch.randn(6, 5, generator=GENERATOR), 1)
SEQUENCES = torch.randn(2, 3, 5, generator=GENERATOR)


def test_cross_entropy_is_torchs() -> None:
    assert torch.equal(cross_entropy(SCORES, LABELS), F.cross_entropy(SCORES, LABELS))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_cross_entropy_takes_labels_of_any_integer_dtype(dtype: torch.dtype) -> None:
    assert torch.equal(cross_entropy(SCORES, LABELS.to(dtype)), F.cross_entropy(SCORES, LABELS))


def test_cross_entropy_of_sequences_is_the_mean_over_all_places() -> None:
    expected = F.cross_entropy(SEQUENCES.reshape(6, 5), LABELS)
    assert torch.equal(cross_entropy(SEQUENCES, LABELS.view(2, 3)), expected)


def test_cross_entropy_of_images_has_classes_in_the_second_place_as_torch_has_it() -> None:
    scores, labels = torch.randn(2, 5, 4, 3), torch.randint(0, 5, (2, 4, 3))
    assert torch.equal(cross_entropy(scores, labels), F.cross_entropy(scores, labels))


def test_cross_entropy_of_class_probabilities_is_torchs() -> None:
    assert torch.equal(cross_entropy(SCORES, SHARES), F.cross_entropy(SCORES, SHARES))
    assert cross_entropy(SCORES, SHARES) > -(SHARES * SHARES.log()).sum(1).mean()  # the targets' own entropy
    assert torch.isnan(cross_entropy(SCORES[:0], SHARES[:0]))  # which `weigh` turns into nothing


@pytest.mark.parametrize(
    ("output", "target", "advice"),
    [
        (SCORES, SHARES[:, 0], 'decode = "numpy:int64"'),
        (SCORES, LABELS.double(), 'decode = "numpy:int64"'),
        (SCORES, SHARES[:, :3], 'loss.name = "mse_loss"'),
        (SCORES[:, 0], SHARES[:, 0], 'loss.name = "mse_loss"'),
        (SEQUENCES, SHARES.view(2, 3, 5)[:, :, 0], 'loss.name = "mse_loss"'),
        (SEQUENCES, SHARES[:2, None].expand(2, 3, 5), 'loss.name = "torch.nn.functional:cross_entropy"'),
        (SCORES, LABELS[:, None], 'decode = "numpy:ravel"'),
        (SCORES, F.one_hot(LABELS, 5), 'dtype = "float32"'),
        (SCORES, LABELS[:, None].expand(6, 2), "data.transform"),
    ],
)
def test_targets_that_are_neither_classes_nor_probabilities(
    output: torch.Tensor, target: torch.Tensor, advice: str
) -> None:
    """A fraction cut off to an integer would be class 0, unsaid."""
    with pytest.raises(DataError) as caught:
        cross_entropy(output, target)
    assert all(words in str(caught.value) for words in (str(tuple(target.shape)), advice)), caught.value


@pytest.mark.parametrize(("output", "target"), [(SCORES[:0], LABELS[:0]), (SEQUENCES[:0], LABELS.view(2, 3)[:0])])
def test_no_samples_are_no_error(output: torch.Tensor, target: torch.Tensor) -> None:
    """Behaviour 16: NaN there, which `weigh` turns into nothing."""
    assert torch.isnan(cross_entropy(output, target))
    right = count_right(output, target)
    assert right is not None and (right[0] == 0 or torch.isnan(right[0]))


def test_arguments_reach_the_loss() -> None:
    loss = build_loss(LossSection(arguments={"label_smoothing": 0.1}))
    assert torch.equal(loss(SCORES, LABELS), F.cross_entropy(SCORES, LABELS, label_smoothing=0.1))


@pytest.mark.parametrize("name", LOSSES)
def test_every_built_in_gives_one_number(name: str) -> None:
    loss = build_loss(LossSection(name=name))
    labelled = name in ("cross_entropy", "nll_loss")
    value = loss(SCORES, LABELS) if labelled else loss(SCORES, torch.rand(6, 5))
    assert value.dim() == 0 and torch.isfinite(value)


def test_a_users_own_loss() -> None:
    loss = build_loss(LossSection(name="torch.nn.functional:huber_loss", arguments={"delta": 0.5}))
    assert torch.equal(loss(SCORES, SCORES + 1), torch.tensor(0.375))


ELEMENTWISE = [name for name in LOSSES if name not in ("cross_entropy", "nll_loss")]


@pytest.mark.parametrize("name", [*ELEMENTWISE, "torch.nn.functional:mse_loss"])
def test_nothing_is_broadcast(name: str) -> None:
    """(6,) against (6, 1) would be the mean over 36 pairs of samples."""
    loss, column = build_loss(LossSection(name=name)), torch.rand(6, 1)
    with pytest.raises(DataError, match=r"\(6, 1\) and \(6,\).*unsqueeze"):
        loss(column, column[:, 0])
    with pytest.raises(DataError, match=r"\(6,\) and \(6, 1\).*numpy:ravel"):
        loss(column[:, 0], column)
    with pytest.raises(DataError, match=r"\(6, 1\) and \(6, 5\)"):
        loss(column, SHARES)


@pytest.mark.parametrize("name", ELEMENTWISE)
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64])
def test_whole_numbers_are_numbers(name: str, dtype: torch.dtype) -> None:
    """Of torch's losses some refuse them, one in backward only."""
    loss, output, target = build_loss(LossSection(name=name)), SCORES.clone().requires_grad_(), LABELS % 2
    value = loss(output[:, 0], target.to(dtype))
    value.backward()
    assert torch.equal(value, getattr(F, name)(SCORES[:, 0], target.float()))


def test_the_nearest_name_is_offered() -> None:
    with pytest.raises(ConfigError, match=r"loss\.name = 'cross_entropi' .*'cross_entropy'"):
        build_loss(LossSection(name="cross_entropi"))


def test_right_answers_are_counted() -> None:
    output = F.one_hot(torch.tensor([0, 1, 2, 0, 0, 0]), 5).float()
    assert count_right(output, LABELS) == (4, 6)
    assert count_right(output, LABELS, ignored=0) == (int((output.argmax(-1) == LABELS)[LABELS != 0].sum()), 4)


def test_right_answers_of_sequences_are_means_over_the_sequence() -> None:
    output = F.one_hot(torch.tensor([[0, 1, 2], [0, 0, 1]]), 5).float()
    right = count_right(output, torch.tensor([[0, 1, 2], [0, 0, 0]]))
    assert right is not None and right[0].item() == pytest.approx(1 + 2 / 3) and right[1] == 2


@pytest.mark.parametrize(
    ("output", "target"),
    [(torch.zeros(4, 1), torch.zeros(4, 1)), (torch.zeros(4), torch.zeros(4)), (torch.zeros(4, 3), torch.zeros(4))],
)
def test_regression_has_no_right_answers(output: torch.Tensor, target: torch.Tensor) -> None:
    assert count_right(output, target) is None


def test_probabilities_have_no_right_answers() -> None:
    """Which class is right, they do not say: no accuracy is recorded."""
    assert count_right(SCORES, SHARES) is None


def test_an_output_that_is_no_tensor_has_no_right_answers() -> None:
    assert count_right((SCORES, SCORES), LABELS) is None  # type: ignore[arg-type]


WEIGHTS = [0.5, 2.0, 0.0, 1.5, 3.0]


@pytest.mark.parametrize(
    "arguments",
    [
        {"weight": WEIGHTS},
        {"ignore_index": 3},
        {"ignore_index": -100},
        {"weight": WEIGHTS, "ignore_index": 0},
        {"weight": WEIGHTS, "ignore_index": 0, "label_smoothing": 0.1},
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_sum_of_losses_of_weighed_classes_over_their_weights_is_torchs_mean(
    arguments: dict[str, Any], dtype: torch.dtype
) -> None:
    loss = build_loss(LossSection("cross_entropy", arguments), dtype)
    assert isinstance(loss, ClassLoss)
    if "weight" in arguments:
        arguments = arguments | {"weight": torch.tensor(WEIGHTS, dtype=dtype)}
    for labels in (LABELS, torch.tensor([arguments.get("ignore_index", 1), 1, 2, 3, 4, 4])):
        expected = F.cross_entropy(SCORES.to(dtype), labels, **arguments)
        found = loss(SCORES.to(dtype), labels) * 6 / loss.weight_of(labels)
        torch.testing.assert_close(found, expected.double(), rtol=1e-6, atol=0, check_dtype=False)
        sequence = loss(SCORES.view(2, 3, 5).to(dtype), labels.view(2, 3)) * 2 / loss.weight_of(labels.view(2, 3))
        torch.testing.assert_close(sequence, found)


def test_probabilities_with_class_weights_are_a_mean_over_samples() -> None:
    loss = build_loss(LossSection("cross_entropy", {"weight": WEIGHTS}))
    assert isinstance(loss, ClassLoss) and loss.weight_of(SHARES) == 6
    torch.testing.assert_close(loss(SCORES, SHARES), F.cross_entropy(SCORES, SHARES, torch.tensor(WEIGHTS)))


def test_label_smoothing_is_torchs() -> None:
    loss = build_loss(LossSection("cross_entropy", {"label_smoothing": 0.1}))
    assert torch.equal(loss(SCORES, LABELS), F.cross_entropy(SCORES, LABELS, label_smoothing=0.1))


def test_lists_become_tensors_for_losses_of_torch() -> None:
    loss = build_loss(LossSection("binary_cross_entropy_with_logits", {"pos_weight": WEIGHTS}))
    expected = F.binary_cross_entropy_with_logits(SCORES, SHARES, pos_weight=torch.tensor(WEIGHTS))
    assert torch.equal(loss(SCORES, SHARES), expected)


@pytest.mark.parametrize("name", ["cross_entropy", "torch.nn.functional:cross_entropy"])
def test_targets_of_torchs_ignored_class_are_refused_unless_the_run_file_says_so(name: str) -> None:
    """They are not the same number on all ranks."""
    padded = torch.tensor([0, 1, -100, 3, 4, 0])
    with pytest.raises(IndexError, match="-100 is out of bounds"):
        build_loss(LossSection(name))(SCORES, padded)
    with pytest.raises(IndexError, match="-100 is out of bounds"):
        build_loss(LossSection(name, {"weight": WEIGHTS}))(SCORES, padded)


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("cross_entropy", {"weights": [1.0]}, "unexpected keyword argument 'weights'"),
        ("cross_entropy", {"weight": ["a"]}, "loss.arguments.weight = .*; expected a list of numbers"),
        ("mse_loss", {"label_smoothing": 0.1}, "loss 'mse_loss': .*'label_smoothing'"),
        ("mse_loss", {"reduction": "sum"}, "loss.arguments.reduction is set; the loss has to be the mean"),
    ],
)
def test_arguments_that_are_refused(name: str, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build_loss(LossSection(name, arguments))


def test_weights_of_classes_with_probabilities_of_sequences_divide_as_torch_does() -> None:
    scores, weight = torch.randn(4, 3, 5, generator=GENERATOR), torch.tensor([1.0, 2.0, 3.0])
    shares = torch.softmax(torch.randn(4, 3, 5, generator=GENERATOR), 1)
    loss = ClassLoss(F.cross_entropy, weight)
    found = loss(scores, shares) * len(shares) / loss.weight_of(shares)
    assert float(found) == pytest.approx(float(F.cross_entropy(scores, shares, weight)), rel=1e-6)
