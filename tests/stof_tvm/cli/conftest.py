"""A working directory with a module of models, and a saved engine, built once."""

import json

import pytest

from stof_tvm.cli import main

MODELS = """
import torch

from stof_tvm import masks


def encoder():
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(d_model=16, nhead=2, dim_feedforward=32, batch_first=True).eval()
    return layer, (torch.randn(1, 128, 16),)


def unattentive():
    return torch.nn.Linear(4, 4).eval(), (torch.randn(2, 4),)


def any_batch():
    x = torch.randn(2, 4)
    batch = {"input": {0: torch.export.Dim("batch", max=8)}}
    return torch.export.export(torch.nn.Linear(4, 4).eval(), (x,), dynamic_shapes=batch), (x,)


def vector():
    return torch.nn.Linear(4, 4).eval(), (torch.randn(4),)


def broken():
    class Broken(torch.nn.Module):
        def forward(self, x):
            return x + torch.zeros(3)

    return Broken(), (torch.randn(2, 4),)


def masked_by_path():
    return *encoder(), {"self_attn": masks.sliding_window(8)}
"""


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """The folder with my_models.py and encoder.stof."""
    folder = tmp_path_factory.mktemp("work")
    (folder / "my_models.py").write_text(MODELS)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["build", "my_models:encoder", "encoder.stof", "--mask", "sliding_window(8)", "--json"]) == 0
    return folder


@pytest.fixture
def work(built, monkeypatch):
    """The same, as working directory."""
    monkeypatch.chdir(built)
    return built


@pytest.fixture
def stof(capsys):
    """Run a command in this process: (exit status, stdout, stderr), stdout as the object that it is with --json."""

    def run(*arguments):
        try:
            status = main([*map(str, arguments)])
        except SystemExit as stop:  # wrong usage
            status = stop.code
        told = capsys.readouterr()
        return status, json.loads(told.out) if "--json" in arguments and told.out else told.out, told.err

    return run
