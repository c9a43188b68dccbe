"""The demo's photos: the same bytes for the same seed, drawn once, labelled right."""

import csv
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from dure.base.errors import JobError, UsageError
from dure.tools.demo.cats import LABELS, model, photos
from dure.tools.demo.draw import Drawn, Photo, draw_photos, draw_training_data


def hashes(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def run_python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    return done.stdout.strip()


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture(scope="module")
def drawn_once(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("drawn")
    draw_photos(folder, 20, seed=5, say=lambda _: None)
    return folder


@pytest.fixture
def small(drawn_once, tmp_path) -> Path:
    """20 photos: ten cats, and at least two of every other kind; a copy that the test may spoil."""
    return Path(shutil.copytree(drawn_once, tmp_path / "small"))


def test_the_same_seed_draws_the_same_bytes(small, tmp_path):
    draw_photos(tmp_path / "again", 20, seed=5, say=lambda _: None)
    assert hashes(small) == hashes(tmp_path / "again")


def test_another_process_draws_the_same_bytes():
    code = (
        "import hashlib; from dure.tools.demo.draw import Photo\n"
        "print([hashlib.sha256(Photo(i).png(3)).hexdigest() for i in range(10)])"
    )
    here = [hashlib.sha256(Photo(i).png(3)).hexdigest() for i in range(10)]
    # Strings hash differently in the other process: no dice may depend on that.
    assert run_python(code, PYTHONHASHSEED="77") == str(here)


def test_every_photo_is_another(small, tmp_path):
    draw_photos(tmp_path / "other", 20, seed=6, say=lambda _: None)
    drawn = [hashes(folder) for folder in (small, tmp_path / "other")]
    pngs = [value for one in drawn for name, value in one.items() if name.endswith(".png")]
    assert len(pngs) == len(set(pngs)) == 40


def test_a_photo_does_not_depend_on_how_many_there_are(small, tmp_path):
    draw_photos(tmp_path / "few", 6, seed=5, say=lambda _: None)
    few, many = hashes(tmp_path / "few"), hashes(small)
    assert all(many[name] == few[name] for name in few if name.endswith(".png"))


def test_half_are_cats_and_all_kinds_of_others_are_there(small):
    with (small / "labels.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["file"] for row in rows[:3]] == ["cat-000.png", "other-000.png", "cat-001.png"]
    assert sum(row["label"] == "cat" for row in rows) == 10
    assert {row["kind"] for row in rows} == {"cat", "dog", "rabbit", "thing"}
    assert all(row["file"].startswith(row["label"]) for row in rows)
    assert all((row["label"] == "cat") == (row["kind"] == "cat") for row in rows)
    for row in rows:
        with Image.open(small / row["file"]) as image:
            assert (image.format, image.mode, image.size) == ("PNG", "RGB", (64, 64))


def test_a_second_call_touches_nothing(small, said):
    before = {path: path.stat().st_mtime_ns for path in small.iterdir()}
    paths = draw_photos(small, 20, seed=5, say=said.append)
    assert {path: path.stat().st_mtime_ns for path in small.iterdir()} == before
    assert said == []
    assert paths == [small / Photo(index).file for index in range(20)]


def test_other_arguments_draw_anew_and_say_what_changed(small, said, tmp_path):
    (small / "notes.txt").write_text("mine")
    draw_photos(small, 6, seed=9, say=said.append)
    assert said == [f"{small}: drawing again (seed 5 → 9, count 20 → 6)"]
    draw_photos(tmp_path / "fresh", 6, seed=9, say=lambda _: None)
    assert (small / "notes.txt").read_text() == "mine"
    (small / "notes.txt").unlink()
    assert hashes(small) == hashes(tmp_path / "fresh")


def test_photos_of_an_older_version_are_drawn_anew(small, said):
    (small / "drawn.json").write_text('{"seed": 5, "count": 20, "version": 0}')
    (small / "cat-000.png").write_bytes(b"an older cat")
    draw_photos(small, 20, seed=5, say=said.append)
    assert said == [f"{small}: drawing again (version 0 → {Drawn(0, 0).version})"]
    assert (small / "cat-000.png").read_bytes() == Photo(0).png(5)


def test_missing_photos_are_drawn_and_the_rest_left(small, said):
    before, kept = hashes(small), (small / "cat-003.png").stat().st_mtime_ns
    (small / "cat-001.png").unlink()
    (small / "labels.csv").unlink()
    draw_photos(small, 20, seed=5, say=said.append)
    assert said == [f"{small}: drawing 1 missing of 20 photos"]
    assert hashes(small) == before
    assert (small / "cat-003.png").stat().st_mtime_ns == kept


def test_somebody_elses_photos_are_never_overwritten(tmp_path):
    (tmp_path / "cat-001.png").write_bytes(b"my own cat")
    with pytest.raises(UsageError, match=r"cat-001\.png is in the way"):
        draw_photos(tmp_path, 10)
    assert [path.name for path in tmp_path.iterdir()] == ["cat-001.png"]


@pytest.mark.parametrize("count", [-2, 0, 1, 7])
def test_a_number_that_has_no_half_is_refused(count, tmp_path):
    with pytest.raises(UsageError, match=f"^{count} photos cannot be half cats"):
        draw_photos(tmp_path / "none", count)
    assert not (tmp_path / "none").exists()


def test_a_broken_record_is_named(small):
    (small / "drawn.json").write_text("{")
    with pytest.raises(UsageError, match=r"drawn\.json is not a record"):
        draw_photos(small, 20, seed=5)


def test_held_out_photos_are_none_of_the_training_photos(tmp_path):
    for seed in (0, 1):
        train, heldout = draw_training_data(
            tmp_path / str(seed), count=12, heldout=6, seed=seed, say=lambda _: None
        )
        assert (len(train), len(heldout)) == (12, 6)
    pngs = [path.read_bytes() for path in tmp_path.rglob("*.png")]
    assert len(pngs) == len(set(pngs)) == 36


def test_the_data_set_decodes_photos_with_their_labels(small):
    data = photos(str(small))
    assert len(data) == 20
    for index in range(len(data)):
        photo, label = data[index]
        assert (photo.shape, photo.dtype) == ((3, 64, 64), torch.float32)
        assert -1 <= photo.min() < photo.max() <= 1
        assert label == (Photo(index).label == "cat")
    assert torch.equal(data[4][0], data[4][0])


def test_photos_vary_by_torchs_dice_alone(small):
    plain, varied = photos(str(small)), photos(str(small), augment=True)

    def roll(seed):
        torch.manual_seed(seed)
        return varied[2][0]

    assert torch.equal(roll(1), roll(1))
    assert len({roll(seed).sum().item() for seed in range(20)}) == 20
    assert roll(1).shape == (3, 64, 64)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    assert torch.equal(plain[2][0], plain[2][0])
    assert torch.equal(torch.get_rng_state(), before)


def test_a_folder_without_photos_says_how_to_get_them(tmp_path):
    with pytest.raises(JobError, match=r"labels\.csv does not exist; `dure demo` draws"):
        photos(str(tmp_path))


def test_the_model_is_small_and_takes_a_shard(small):
    net = model()
    assert sum(weight.numel() for weight in net.parameters()) == 27_170
    batch = torch.stack([photos(str(small))[index][0] for index in range(5)])
    assert net(batch).shape == (5, len(LABELS))


def test_the_demo_and_its_drawing_start_without_torch():
    modules = "import sys, dure.tools.demo, dure.tools.demo.draw"
    loaded = f"{modules}; print([m for m in ('torch', 'numpy') if m in sys.modules])"
    assert run_python(loaded) == "[]"
