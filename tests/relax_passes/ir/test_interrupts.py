"""An interrupt that comes while TVM is in Python is not wrapped on its way through TVM."""

import os
import signal

import pytest
import torch
import tvm
import tvm_ffi

import relax_passes  # noqa: F401  which says so to TVM
import stof_tvm
from tests.models.quick_llvm import QUICK_LLVM
from tests.relax_passes.test_extensions import AddAndNorm, built


@pytest.fixture(autouse=True)
def python_handles_interrupts():
    """Which it does not in what a shell starts in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@tvm.transform.module_pass(opt_level=0)
def interrupted(mod, _):
    os.kill(os.getpid(), signal.SIGINT)
    return mod


def test_ctrl_c_within_a_pass_of_a_build_is_a_keyboard_interrupt_and_the_next_build_works():
    model, inputs = AddAndNorm().eval(), (torch.randn(2, 8, 24), torch.randn(2, 8, 24))
    with pytest.raises(KeyboardInterrupt):
        stof_tvm.build(model, QUICK_LLVM, inputs, tuning_logs=False, rules=[interrupted])
    built()


def test_ctrl_c_within_nested_callbacks_and_sequences_is_a_keyboard_interrupt():
    outer = tvm.transform.Sequential([tvm.transform.Sequential([interrupted])])
    with pytest.raises(KeyboardInterrupt):
        tvm_ffi.convert(lambda: outer(tvm.IRModule()))()


@pytest.mark.parametrize("code", [0, 3, None, "a reason"])
def test_what_a_signal_handler_exits_with_is_kept(code):
    def exits():
        raise SystemExit(code)

    with pytest.raises(SystemExit) as caught:
        tvm_ffi.convert(exits)()
    assert caught.value.code == code


def test_an_error_that_is_none_of_these_is_still_an_error():
    def fails():
        raise ZeroDivisionError("by zero")

    with pytest.raises(RuntimeError, match="by zero"):
        tvm_ffi.convert(fails)()


def test_a_build_that_shows_no_progress_makes_no_bar_whose_end_could_swallow_an_interrupt(monkeypatch):
    monkeypatch.setattr("stof_tvm.compiler.tqdm", None)
    built()
