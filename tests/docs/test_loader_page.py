"""What docs/reference/loader.md shows works as it is written (Behaviour 50)."""

import re
import tomllib
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812

import mpidp
from mpidp.config import from_dict
from mpidp.train.components import field_specs_of

PAGE = Path(__file__).resolve().parents[2] / "docs/reference/loader.md"
ROWS = 600


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)


def test_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two epochs of the page's digits, the second with the tensors unpacked."""
    monkeypatch.chdir(PAGE.parents[2])
    sizes: list[int] = []

    def model(x: torch.Tensor) -> torch.Tensor:
        sizes.append(len(x))
        return x.flatten(1)[:, :10]

    scope = {"mpidp": mpidp, "F": F, "model": model, "world": mpidp.init()}
    exec(blocks("python")[0], scope)
    loader = scope["loader"]
    assert sum(sizes) == 2 * len(loader.dataset) and len(sizes) == 2 * len(loader)
    assert scope["loss"].isfinite()
    loader.close()


@pytest.fixture
def particles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file as the page has it: a compound, images with the samples last, labels of fixed length."""
    monkeypatch.chdir(tmp_path)
    tracks = np.zeros(ROWS, dtype=[("energy", "f8"), ("charge", "i1")])
    tracks["energy"] = np.arange(ROWS) / 4
    with h5py.File("particles.h5", "w") as file:
        file["tracks"] = tracks
        file["images"] = (np.arange(4 * 3 * ROWS) % 256).astype("u1").reshape(4, 3, ROWS)
        file["labels"] = np.array([b"a" * (row % 5 + 1) for row in range(ROWS)])
    return tmp_path / "particles.h5"


@pytest.mark.filterwarnings("ignore:.*is read by HDF5, one thread at a time.*:UserWarning")
def test_field_specs(particles: Path) -> None:
    loader = eval(blocks("python")[1].strip(), {"mpidp": mpidp, "np": np})
    seen = 0
    for batch in loader:
        rows = torch.from_numpy(batch.indices)
        assert batch["tracks.energy"].dtype == torch.float32
        torch.testing.assert_close(batch["tracks.energy"], rows / 4, check_dtype=False)
        assert batch["images"].shape == (batch.size, 4, 3)
        assert batch["images"].min() >= 0 and batch["images"].max() <= 1
        assert batch["labels"].tolist() == (rows % 5 + 1).tolist()
        seen += batch.size
    assert seen == ROWS
    loader.close()


def test_the_same_in_a_run_file(particles: Path) -> None:
    config = from_dict(tomllib.loads(blocks("toml")[0]))
    energy, images = field_specs_of(config.data)
    assert (energy.dataset, energy.name, energy.member, energy.dtype) == ("tracks", "energy", "energy", "float32")
    assert images == mpidp.FieldSpec("images")


def test_random_numbers_belong_to_samples(particles: Path) -> None:
    """The transform of the page flips the same samples whatever the batch."""
    scope: dict[str, object] = {"torch": torch}
    exec(blocks("python")[2], scope)

    def flipped(global_batch: int) -> dict[int, bool]:
        fields = [mpidp.FieldSpec("images", name="x", axis=-1)]
        loader = mpidp.HDF5Loader("particles.h5", fields, global_batch, transform=scope["flip"])
        with h5py.File("particles.h5") as file:
            stored = torch.from_numpy(np.moveaxis(file["images"][:], -1, 0))
        found = {}
        for batch in loader:
            for row, image in zip(batch.indices.tolist(), batch.x, strict=True):
                assert torch.equal(image, stored[row]) or torch.equal(image, stored[row].flip(-1))
                found[row] = not torch.equal(image, stored[row])
        loader.close()
        return found

    with pytest.warns(UserWarning, match="read by HDF5"):
        first, second = flipped(512), flipped(100)
    assert first == second
    assert 0.4 < sum(first.values()) / ROWS < 0.6
