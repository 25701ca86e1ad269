"""Copies of states: equal, apart from the original, in memory that the next copy uses again."""

from collections import OrderedDict

import torch

from mpidp.train.checkpoint.write import Snapshot


def test_a_copy_is_equal_and_does_not_change_with_the_original() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "odd": [(1, None, "x"), {2: 3.0}]}
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    copied = Snapshot().take(state)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    optimizer.param_groups[0]["lr"] = 7.0
    state["odd"][1][2] = 4.0
    assert isinstance(copied["model"], OrderedDict)
    assert copied["model"].keys() == before.keys()
    assert all(torch.equal(copied["model"][name], tensor) for name, tensor in before.items())
    assert copied["optimizer"]["param_groups"][0]["lr"] == 1e-3
    assert copied["odd"] == [(1, None, "x"), {2: 3.0}]
    model.load_state_dict(copied["model"])


def test_buffers_are_used_again_while_they_fit() -> None:
    snapshot = Snapshot()
    first = snapshot.take({"a": torch.ones(3), "b": [torch.zeros(2, 2)]})
    addresses = first["a"].data_ptr(), first["b"][0].data_ptr()
    second = snapshot.take({"a": torch.full((3,), 5.0), "b": [torch.ones(2, 2)]})
    assert (second["a"].data_ptr(), second["b"][0].data_ptr()) == addresses
    assert second["a"].tolist() == [5.0] * 3
    third = snapshot.take({"a": torch.ones(4), "b": [torch.ones(2, 2, dtype=torch.float64)]})
    assert third["a"].tolist() == [1.0] * 4
    assert third["b"][0].dtype == torch.float64


def test_tied_weights_stay_tied_and_views_do_not_bring_their_storage() -> None:
    flat = torch.arange(1000.0)
    copied = Snapshot().take({"a": flat[:4], "b": flat[:4], "c": flat[2:6]})
    assert copied["a"].data_ptr() == copied["b"].data_ptr() != copied["c"].data_ptr()
    assert copied["a"].untyped_storage().nbytes() == 16
    assert copied["c"].tolist() == [2.0, 3.0, 4.0, 5.0]


def test_memory_formats_and_odd_tensors() -> None:
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    sparse = torch.eye(3).to_sparse()
    copied = Snapshot().take(
        [image, image[:, :, ::2], sparse, torch.tensor(1), torch.empty(0), torch.ones(1, dtype=torch.bool)]
    )
    assert copied[0].is_contiguous(memory_format=torch.channels_last) and torch.equal(copied[0], image)
    assert torch.equal(copied[1], image[:, :, ::2])
    assert torch.equal(copied[2].to_dense(), torch.eye(3))
    assert (copied[3].item(), copied[4].numel(), copied[5].item()) == (1, 0, True)
