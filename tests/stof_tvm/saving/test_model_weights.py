"""Weights of a model on the meta device from files: what is read, what is copied, what is refused."""

import ctypes
import gc

import pytest
import torch
from torch import nn

import stof_tvm
from relax_passes.parallel.placement import Ranks
from relax_passes.pipeline import run_pipeline
from stof_tvm.errors import InputError
from stof_tvm.frontend import import_model
from stof_tvm.saving.model_weights import with_weights
from stof_tvm.site_masks import SiteMasks
from tests.models.families import GptLike
from tests.models.quick_llvm import QUICK_LLVM

WIDE = 1 << 17


class Mlp(nn.Module):
    def __init__(self, hidden=WIDE):
        super().__init__()
        self.up, self.down = nn.Linear(64, hidden, bias=False), nn.Linear(hidden, 64, bias=False)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def on_meta(kind, **sizes):
    with torch.device("meta"):
        return kind(**sizes).eval()


def saved(model, path):
    if path.suffix == ".safetensors":
        pytest.importorskip("safetensors.torch").save_model(model, str(path))  # of tied tensors it saves one
    else:
        torch.save(model.state_dict(), path)
    return path


def anonymous_mib() -> float:
    """Memory that this process has in use and that is no file's."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) / 1024


@pytest.mark.parametrize("name", ["weights.safetensors", "weights.pt"])
def test_an_engine_of_a_file_is_that_of_the_model(name, tmp_path):
    torch.manual_seed(0)
    model, ids = GptLike(layers=1).eval(), torch.randint(0, 50, (1, 16))
    model.head, model.head.weight = nn.Linear(32, 50, bias=False), model.tokens.weight  # tied
    path = saved(model, tmp_path / name)
    empty = on_meta(GptLike, layers=1)
    empty.head, empty.head.weight = nn.Linear(32, 50, bias=False, device="meta"), empty.tokens.weight
    engine = stof_tvm.build(empty, QUICK_LLVM, (ids,), weights=path, tuning_logs=False)
    assert engine.report().verification.result == "passed"
    assert empty.tokens.weight.is_meta  # the caller's model stays as it was
    with torch.no_grad():
        torch.testing.assert_close(engine(ids), model(ids), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["weights.safetensors", "weights.pt"])
def test_a_rank_copies_its_part_of_a_file_only(name, tmp_path):
    """64 MiB of weights: nothing of them is copied before they are divided, then 32 MiB, on each of two ranks."""
    path, x = saved(Mlp(), tmp_path / name), torch.randn(2, 64)
    import_model(Mlp(8), (x,))  # what is made once
    before = anonymous_mib()
    imported = import_model(with_weights(on_meta(Mlp), path), (x,), shares=True)
    assert anonymous_mib() - before < 8
    mod = run_pipeline(
        imported.mod, QUICK_LLVM, SiteMasks(None), ranks=Ranks(1, 2, "a sum over ranks"), until="shard_tensors"
    )
    assert 28 < anonymous_mib() - before < 44
    assert f"({WIDE // 2}, 64)" in str(mod["main"]) and f"({WIDE}, 64)" not in str(mod["main"])


def test_a_folder_of_files_is_one_set(tmp_path):
    save_file = pytest.importorskip("safetensors.torch").save_file
    model = Mlp(8)
    save_file({"up.weight": model.up.weight.detach()}, tmp_path / "1.safetensors")
    save_file({"down.weight": model.down.weight.detach()}, tmp_path / "2.safetensors")
    found = with_weights(on_meta(Mlp, hidden=8), tmp_path)
    assert all(torch.equal(x, y) for x, y in zip(found.parameters(), model.parameters(), strict=True))
    save_file({"up.weight": model.up.weight.detach()}, tmp_path / "3.safetensors")
    with pytest.raises(InputError, match="up.weight is in 3.safetensors and in another file"):
        with_weights(on_meta(Mlp, hidden=8), tmp_path)


def test_other_tensors_are_refused_by_name(tmp_path):
    model = Mlp(8)
    kept = {"up.weight": model.up.weight}
    torch.save(kept, tmp_path / "few.pt")
    with pytest.raises(InputError, match=r"down\.weight is on the meta device, and .*few\.pt does not have it"):
        with_weights(on_meta(Mlp, hidden=8), tmp_path / "few.pt")
    assert torch.equal(with_weights(model, tmp_path / "few.pt").down.weight, model.down.weight)
    torch.save(kept | {"other": torch.zeros(1)}, tmp_path / "more.pt")
    with pytest.raises(InputError, match="has 'other', and the model has no tensor of that name"):
        with_weights(model, tmp_path / "more.pt")
    torch.save({name: x.half() for name, x in model.state_dict().items()}, tmp_path / "half.pt")
    with pytest.raises(
        InputError, match=r"up\.weight in .*half\.pt is float16 \(8, 64\), in the model float32 \(8, 64\)"
    ):
        with_weights(model, tmp_path / "half.pt")


@pytest.mark.parametrize("name", ["bad.safetensors", "bad.pt"])
def test_a_damaged_file_is_refused(name, tmp_path):
    (tmp_path / name).write_bytes(b"no tensors")
    with pytest.raises(InputError, match=r"cannot be read"):
        with_weights(Mlp(8), tmp_path / name)
    with pytest.raises(InputError, match="is no file, and no folder with .safetensors files"):
        with_weights(Mlp(8), tmp_path / "missing.pt")
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(InputError, match="ends neither in .safetensors nor in"):
        with_weights(Mlp(8), tmp_path / "notes.txt")
