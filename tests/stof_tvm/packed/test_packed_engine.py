"""Engines for batches without padding: each sequence gets what the model gives for it alone."""

import gc
import re
import threading

import pytest
import torch
from torch import nn

import stof_tvm
from stof_tvm import compiler, masks
from stof_tvm.errors import InputError, MaskError, NotRewrittenError, UnsupportedError
from stof_tvm.packed.device_lists import plans_of
from stof_tvm.packed.layout import layout_of_lengths
from stof_tvm.packed.packed_engine import PackedEngine
from tests.models.quick_llvm import QUICK_LLVM
from tests.stof_tvm.frontend.packing.modules import TOKENS, Padded, added, attend, keys, sdpa

LONGEST, WIDTH = 24, 32


class Encoder(nn.Module):
    """Ids to states of tokens, a first token's state and a mean; a whole attention and a causal one."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = nn.Embedding(50, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.layers = nn.ModuleList([Layer(False), Layer(True)])
        self.pooler = nn.Linear(WIDTH, WIDTH)
        self.to(dtype)

    def forward(self, ids, attention_mask, bias=None):
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x, attention_mask)
        mean = (x * attention_mask[..., None]).sum(1) / attention_mask.sum(1, keepdim=True)
        return {"states": x, "pooled": (torch.tanh(self.pooler(x[:, 0])), mean)}


class Layer(nn.Module):
    def __init__(self, is_causal):
        super().__init__()
        self.is_causal, self.given = is_causal, None
        self.qkv, self.out, self.norm = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x, attention_mask):
        q, k, v = self.qkv(x).unflatten(2, (3, 4, WIDTH // 4)).permute(2, 0, 3, 1, 4).unbind(0)
        keep = (attention_mask == 1)[:, None, None, :]
        if self.is_causal:
            keep = keep & torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        if self.given is not None:
            keep = keep & self.given.dense(x.shape[1]).to(x.device)
        y = nn.functional.scaled_dot_product_attention(q, k, v, keep)
        return self.norm(x + self.out(y.transpose(1, 2).flatten(2)))


def batch(lengths, width=None, left=False, seed=1):
    """Random ids, padding's as well, and the padding mask."""
    width = max(lengths) if width is None else width
    place = torch.arange(width)[None]
    lengths = torch.tensor(lengths)[:, None]
    mask = place >= width - lengths if left else place < lengths
    ids = torch.randint(0, 50, mask.shape, generator=torch.Generator().manual_seed(seed))
    return ids, mask.long()


def alone(model, ids, mask, row):
    real = mask[row].bool()
    with torch.no_grad():
        return model(ids[row : row + 1, real], torch.ones(1, int(real.sum()), dtype=mask.dtype))


def check(model, found, ids, mask, tolerance=1e-5):
    for row in range(len(ids)):
        real, wanted = mask[row].bool(), alone(model, ids, mask, row)
        torch.testing.assert_close(found["states"][row, real], wanted["states"][0], rtol=tolerance, atol=tolerance)
        for got, want in zip(found["pooled"], wanted["pooled"]):
            torch.testing.assert_close(got[row : row + 1], want, rtol=tolerance, atol=tolerance)
        assert not found["states"][row, ~real].any()


@pytest.fixture(scope="module")
def model():
    return Encoder().eval()


@pytest.fixture(scope="module")
def engine(model):
    ids, mask = batch([LONGEST, 5, 1])
    return stof_tvm.build(model, QUICK_LLVM, (ids, mask), without_padding=True)


def test_it_is_verified_and_says_what_it_is(engine):
    assert isinstance(engine, PackedEngine) and engine.longest == LONGEST
    report = engine.report()
    assert report.verification.result == "passed" and "3 sequences, each alone" in report.verification.detail
    assert "without padding: a row of 64 tokens" in str(report) and "layers.1 masks each sequence by causal()" in str(
        report
    )
    assert repr(engine) == "PackedEngine(ids, attention_mask; sequences of 1 to 24 tokens; on cpu)"


@pytest.mark.parametrize(
    "lengths, width, left",
    [
        ([LONGEST, 5, 1], None, False),
        ([1], None, False),
        ([LONGEST], None, False),
        ([3, 17, 1, 20, 9], LONGEST, True),
        ([24, 24, 16], 40, False),  # a whole row, and a batch wider than the longest sequence
        ([1] * 7, 3, True),
    ],
)
def test_lengths(lengths, width, left, model, engine, monkeypatch):
    monkeypatch.setattr(compiler, "_generate_code", None)  # nothing is compiled
    ids, mask = batch(lengths, width, left)
    check(model, engine(ids, mask), ids, mask)


@pytest.mark.slow
def test_rows_and_batches_of_other_sizes(model, engine):
    for lengths in ([LONGEST] * 3, [1] * 12, [23, 7] * 9):
        ids, mask = batch(lengths)
        check(model, engine(ids, mask), ids, mask)
    assert "one of 4 lengths" in str(engine.report())


def test_lengths_instead_of_a_mask(model, engine):
    ids, mask = batch([7, 2, 19], 20)
    for found in (engine(ids, lengths=[7, 2, 19]), engine(ids, attention_mask=None, lengths=torch.tensor([7, 2, 19]))):
        check(model, found, ids, mask)


def test_packed_outputs(model, engine):
    ids, mask = batch([4, 9, 1], left=True)
    engine.packed_outputs = True
    try:
        found = engine(ids, mask)
    finally:
        engine.packed_outputs = False
    states = torch.cat([alone(model, ids, mask, row)["states"][0] for row in range(3)])
    torch.testing.assert_close(found["states"], states, rtol=1e-5, atol=1e-5)
    assert found["pooled"][0].shape == (3, WIDTH)


@pytest.mark.parametrize(
    "inputs, lengths, told",
    [
        (
            (torch.zeros(2, 4).long(), torch.tensor([[1, 0, 1, 1], [1, 1, 1, 1]])),
            None,
            "padding between the tokens of row 0",
        ),
        (
            (torch.zeros(1, 30).long(), torch.ones(1, 30).long()),
            None,
            "a sequence has 30 tokens; the example inputs had up to 24",
        ),
        ((torch.zeros(2, 4), torch.ones(2, 4).long()), None, "ids must be an int64 tensor of shape"),
        ((torch.zeros(2, 4).long(), torch.ones(2, 5).long()), None, "attention_mask must be an int64 tensor of shape"),
        ((torch.zeros(2, 4).long(),), [1, 2, 3], "lengths has 3 entries for a batch of 2"),
        ((torch.zeros(2, 4).long(), None), None, "give attention_mask, or lengths="),
        ((torch.zeros(2, 4).long(),), None, "argument 'attention_mask' is missing"),
    ],
)
def test_calls_that_are_refused(inputs, lengths, told, engine):
    with pytest.raises(InputError, match=told):
        engine(*inputs, lengths=lengths)


@pytest.mark.parametrize("name", ["save", "with_mask", "share_state"])
def test_what_only_a_row_has(name, engine):
    with pytest.raises(InputError, match=f"a PackedEngine has no {name}"):
        getattr(engine, name)("there")
    with pytest.raises(InputError, match=r"has no found_blocks\(\)"):
        engine.found_blocks()
    with pytest.raises(InputError, match="has no reuse_outputs"):
        engine.reuse_outputs = True


def test_a_row_is_prepared_ahead(engine, monkeypatch):
    row = engine.prepare_for([LONGEST, LONGEST])
    assert type(row) is stof_tvm.Engine
    monkeypatch.setattr(compiler, "_generate_code", None)
    assert engine.row_for([20, 20]) is engine.row_for([LONGEST, LONGEST])
    assert engine.prepare_for([20, 20]).report().sites != row.report().sites


def test_the_engine_of_a_row_is_for_its_lengths_only(model, engine, tmp_path):
    """Whatever lengths the row was compiled for, or called with meanwhile; saved, too."""
    engine.prepare_for([LONGEST, 5, 1])
    for lengths in ([3, 17, 9], [20, 2]):
        ids, mask = batch(lengths)
        row, layout = engine.prepare_for(lengths), layout_of_lengths(lengths, len(lengths), ids.shape[1])
        row.save(tmp_path / "row.stof")
        engine(*batch([LONGEST, LONGEST]))
        compiled = engine.row_for(lengths)
        given = layout.vectors(compiled.row, compiled.sequences or len(lengths) + 1)
        tokens = torch.zeros(1, compiled.row, dtype=torch.int64)
        tokens[0, : layout.tokens] = ids[mask.bool()]
        values = [torch.from_numpy(given[x]) if x in given else tokens for x in compiled.packed.inputs]
        states = engine(ids, mask)["states"][mask.bool()]
        for one in (row, stof_tvm.load(tmp_path / "row.stof")):
            found = [x for x in one.run(list(values)) if x.shape[-2] == compiled.row]
            torch.testing.assert_close(found[0].squeeze(0)[: layout.tokens], states, rtol=1e-5, atol=1e-5)


def test_a_model_without_attention():
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)).eval()
    x = torch.randn(3, 12, 8)
    engine = stof_tvm.build(model, QUICK_LLVM, (x,), without_padding=True)
    found = engine(x, lengths=[4, 12, 1])
    torch.testing.assert_close(found[1], model(x)[1], rtol=1e-5, atol=1e-5)
    assert not found[0, 4:].any() and type(engine.prepare_for([2, 2])) is stof_tvm.Engine


def test_what_is_kept_is_bounded(model, engine):
    engine.most_layouts = 3
    try:
        for n in range(2, 12):
            ids, mask = batch([n, 3], seed=n)
            check(model, engine(ids, mask), ids, mask)
        gc.collect()
        assert len(engine._rows.plans.entries) == 3
    finally:
        engine.most_layouts = 64
    with pytest.raises(InputError, match="most_engines must be a whole number from 1 on, got 0"):
        engine.most_engines = 0


def test_threads_with_other_lengths(model, engine):
    calls = [batch([n, 25 - n], seed=n) for n in range(5, 13)]
    found, failed = {}, []

    def run(number):
        try:
            found[number] = engine(*calls[number])
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    for number, (ids, mask) in enumerate(calls):
        check(model, found[number], ids, mask)


@pytest.mark.slow
@pytest.mark.parametrize("dtype, tolerance", [(torch.float16, 1e-2), (torch.bfloat16, 6e-2)])
def test_half_precision(dtype, tolerance):
    model = Encoder(dtype).eval()
    ids, mask = batch([LONGEST, 5, 1])
    engine = stof_tvm.build(model, QUICK_LLVM, (ids, mask), without_padding=True)
    assert engine.report().verification.result == "passed"
    ids, mask = batch([2, 20, 7], left=True)
    check(model, engine(ids, mask), ids, mask, tolerance)


@pytest.mark.parametrize(
    "mask", [masks.sliding_window(3), masks.global_tokens([0]) | masks.sliding_window(1)], ids=repr
)
def test_given_masks_are_of_positions_in_a_sequence(mask, model):
    ids, real = batch([LONGEST, 5, 11])
    engine = stof_tvm.build(model, QUICK_LLVM, (ids, real), {"layers.0": mask}, without_padding=True)
    assert engine.report().verification.result == "passed"
    masked = Encoder().eval()
    masked.layers[0].given = mask
    ids, real = batch([9, 20, 1], left=True)
    check(masked, engine(ids, real), ids, real)


def test_poisoned_padding():
    model = Padded(TOKENS["a window"]).eval()
    x, mask = torch.randn(3, 12, 16), torch.ones(3, 12).long()
    engine = stof_tvm.build(model, QUICK_LLVM, (x, mask), without_padding=True)
    mask = (torch.arange(12)[None] < torch.tensor([[12], [4], [7]])).long()
    x[mask == 0] = torch.nan
    found = engine(x, mask)
    for row, n in enumerate((12, 4, 7)):
        with torch.no_grad():
            wanted = model(x[row : row + 1, :n], mask[row : row + 1, :n])
        torch.testing.assert_close(found[row, :n], wanted[0], rtol=1e-5, atol=1e-5)
        assert not found[row, n:].any()


def test_a_model_without_a_padding_mask():
    class Causal(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Padded(lambda m, x, mask: sdpa(m, x, None, is_causal=True).transpose(0, 1))

        def forward(self, x):
            return self.inner(x, None)

    model = Causal().eval()
    engine = stof_tvm.build(model, QUICK_LLVM, torch.randn(2, 12, 16), without_padding=True)
    assert engine.report().verification.result == "passed"
    x = torch.randn(2, 8, 16)
    found = engine(x, lengths=[8, 3])
    with torch.no_grad():
        torch.testing.assert_close(found[:3, 1], model(x[1:, :3])[:, 0], rtol=1e-5, atol=1e-5)
    with pytest.raises(InputError, match="give lengths=, the length of each sequence: the model has no padding mask"):
        engine(x)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["causal slopes", "distances", "chosen", "heads in the batch", "by what tokens are"])
def test_spellings_of_attention(name):
    x, mask = torch.randn(3, 12, 16), (torch.arange(12)[None] < torch.tensor([[12], [4], [7]])).long()
    engine = stof_tvm.build(Padded(TOKENS[name]).eval(), QUICK_LLVM, (x, mask), without_padding=True)
    assert engine.report().verification.result == "passed"


def test_an_attention_that_is_not_recognised():
    def squared(m, x, mask):
        return attend(m, x, lambda s: torch.tanh(s + added(mask)) * 2 + torch.relu(s))

    x, mask = torch.randn(2, 12, 16), torch.ones(2, 12).long()
    told = (
        "1 attention(s) stay dense, where a mask of the sequences, by which padding is left out, cannot be applied "
        "(build without without_padding to compute the padded batch): (the model): "
    )
    with pytest.raises(NotRewrittenError, match=re.escape(told)):
        stof_tvm.build(Padded(squared).eval(), QUICK_LLVM, (x, mask), without_padding=True)


def test_bounded_scores_before_the_mask_of_padding():
    def bounded(m, x, mask):
        padding = (mask == 0)[:, None, None]
        return attend(m, x, lambda s: s.clamp(-2, 2).masked_fill(padding, -torch.inf))

    x, mask = torch.randn(2, 12, 16), torch.ones(2, 12).long()
    mask[1, 7:] = 0
    told = "a mask of the sequences, by which padding is left out, cannot be applied (build without without_padding"
    with pytest.raises(NotRewrittenError, match=re.escape(told)):
        stof_tvm.build(Padded(bounded).eval(), QUICK_LLVM, (x, mask), without_padding=True)
    stof_tvm.build(Padded(bounded).eval(), QUICK_LLVM, (x, mask))


def test_masks_that_do_not_fit(model):
    ids, mask = batch([LONGEST, 5])
    with pytest.raises(MaskError, match="depends on the batch entry"):
        stof_tvm.build(model, QUICK_LLVM, (ids, mask), masks.padding([5, 6]), without_padding=True)


def test_a_warning_where_pytorch_does_not_compute_the_example(model):
    """Longer sequences than the model has positions are NaN in an engine."""
    ids, mask = batch([LONGEST + 2, 3])
    with pytest.warns(UserWarning, match="not verified: PyTorch fails on the example inputs: IndexError"):
        found = stof_tvm.build(model, QUICK_LLVM, (ids, mask), without_padding=True)
    assert found.report().verification.result == "not verified"


@pytest.mark.parametrize("more", [{"lazy": True}, {"replaceable_masks": True}, {"fusion_scheme": "0"}])
def test_arguments_that_do_not_go_together(more, model):
    with pytest.raises(InputError, match="without_padding=True takes batches of all lengths"):
        stof_tvm.build(model, QUICK_LLVM, batch([5, 3]), without_padding=True, **more)


def test_an_exported_program_is_refused(model):
    program = torch.export.export(model, batch([5, 3]))
    with pytest.raises(InputError, match="without_padding is for a torch.nn.Module"):
        stof_tvm.build(program, QUICK_LLVM, without_padding=True)


def test_what_mixes_tokens_is_refused():
    x, mask = torch.randn(2, 12, 16), torch.ones(2, 12).long()
    with pytest.raises(UnsupportedError, match="without_padding=False computes the padded batch"):
        stof_tvm.build(
            Padded(lambda m, x, mask: sdpa(m, x, keys(mask)).cumsum(1)), QUICK_LLVM, (x, mask), without_padding=True
        )


@pytest.mark.slow
def test_code_for_a_gpu_that_is_not_here():
    engine = stof_tvm.build(
        Encoder(torch.float16).eval(), "cuda -arch=sm_80", batch([LONGEST, 5, 1]), without_padding=True
    )
    assert len(engine.report().rewritten) == 2
    row = engine.prepare_for([LONGEST, 5, 1])
    assert "__global__" in row.cuda_source()
    # On a GPU, kernels write what these read; here the CPU has, for the example's lengths.
    masks_of = row.mask_arrays
    plans = plans_of(masks_of, {"layers.0": None, "layers.1": masks.causal()}, 64, LONGEST)
    assert [len(plan.operands) + len(plan.rest.arrays) for plan in plans] == [x.count for x in masks_of.kernels]
    assert plans[0] is not plans[1] and plans_of(masks_of, {"layers.0": None, "layers.1": None}, 64, LONGEST)[0]
    by_place = masks.causal() & masks.global_tokens([0])
    assert plans_of(masks_of, {"layers.0": None, "layers.1": by_place}, 64, LONGEST) is None
    assert plans_of(masks_of, {"layers.0": None}, 64, LONGEST) is None


def test_each_row_that_is_compiled_is_told(engine, caplog):
    lengths = [LONGEST] * 9
    with caplog.at_level("INFO", "stof_tvm"):
        for _ in range(2):
            engine.prepare_for(lengths)
    told = [record.getMessage() for record in caplog.records if record.name == "stof_tvm"]
    assert told == ["a PackedEngine compiles the engine of rows of 256 tokens, for a batch of 216 real ones"]
