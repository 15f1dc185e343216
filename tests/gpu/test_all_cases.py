"""Every CUDA kernel case as far as a machine without a GPU can prove it: it generates the very source that was verified
on a GPU, and that source compiles for sm_80 and sm_90a without spilling a register."""

import json
import shutil
import sys
import warnings
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
import all_cases  # noqa: E402
import compile_all  # noqa: E402
from attention_cases import source_hash  # noqa: E402
from compile_only_cases import compile_only_cases  # noqa: E402
from sources import architectures, decisive, distinct, fingerprint, source, source_of  # noqa: E402

from tir_kernels.fusion.gemm.sizes.configs import TMA_TILES, WARPGROUP_TILES  # noqa: E402

MANIFEST = json.loads((HERE / "verified.json").read_text())
RECORD = compile_all.read()
TO_VERIFY, TO_COMPILE = distinct(all_cases.CASES), distinct(compile_only_cases())
COMPILED = dict.fromkeys(compile_all.one_of_each_configuration(TO_VERIFY))
OF_EACH_TEMPLATE = list({case.template.NAME: case for case in [*COMPILED, *TO_COMPILE]}.values())
EVERY = 8


def some(cases) -> list:
    """The last case of each template and one of `EVERY` of all: half a second each."""
    return [case for i, case in enumerate(cases) if i % EVERY == 0 or case in OF_EACH_TEMPLATE]


# Where all that sources are generated from is as it was when all were compared with the record, some are enough: to
# find what is neither the kernels' Python nor a case nor TVM's version.
TO_GENERATE = some(COMPILED) if MANIFEST.get("generated_from") == fingerprint() else TO_VERIFY
TO_COMPILE_NOW = some(TO_COMPILE) if RECORD.get("generated_from") == fingerprint() else TO_COMPILE
if TO_GENERATE is TO_VERIFY or TO_COMPILE_NOW is TO_COMPILE:
    advice = "run check_sources.py and compile_all.py (tests/gpu): until then all CUDA sources are generated"
    warnings.warn(f"the kernels' Python changed; {advice}", stacklevel=1)
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed: nothing can be compiled")


def label(case) -> str:
    return case.label


def assert_compiles_without_spills(case):
    text = source_of(case)
    entry = RECORD["sources"].get(source_hash(text))
    assert entry is not None, "no one has compiled this CUDA source; run `python tests/gpu/compile_all.py`"
    assert set(entry) >= set(architectures(case)) and RECORD["figures"] == compile_all.FIGURES
    assert compile_all.why_not(text, entry, compile_all.may_spill(case)) is None


def test_what_decides_no_source_is_not_fingerprinted():
    text = '"""Doc."""\nA = 1\n\n\n# why\ndef f():\n    """Doc\n    string."""\n    return "#" + """kept"""\n'
    assert decisive(text) == 'A = 1\ndef f():\n    return "#" + """kept"""'


def test_manifest_lists_exactly_the_cases():
    assert list(MANIFEST["cases"]) == [case.label for case in all_cases.CASES]


def test_manifest_has_one_source_for_cases_that_differ_only_in_their_data():
    verified = {(case.template.NAME, case.problem, case.config): MANIFEST["cases"][case.label] for case in TO_VERIFY}
    for case in all_cases.CASES:
        same = verified[case.template.NAME, case.problem, case.config]
        assert MANIFEST["cases"][case.label]["source"] == same["source"], case.label


def test_manifest_records_a_gpu_run_within_the_allowed_error():
    assert MANIFEST["gpu"].startswith("NVIDIA") and MANIFEST["date"] and MANIFEST["driver"]
    for name, entry in MANIFEST["cases"].items():
        # The second term is one rounding of an output of size 4: rows that copy a single value.
        rounding = 4 * (2**-8 if "bfloat16" in name else 2**-10)
        assert 0 <= entry["error"] <= max(2 * entry["half_error"], rounding), name
        assert entry["time_us"] > 0, name


@pytest.mark.slow  # generates some 150 kernels, half a second each; 2,200 after any change of one
@pytest.mark.parametrize("case", TO_GENERATE, ids=label)
def test_source_is_the_verified_one_and_every_configuration_compiles_without_spills(case):
    advice = "the generated CUDA differs from what was verified; run `python tests/gpu/verify.py` on a GPU"
    assert source_hash(source_of(case)) == MANIFEST["cases"][case.label]["source"], advice
    if case in COMPILED:
        assert_compiles_without_spills(case)


def test_every_configuration_that_was_verified_has_been_compiled_without_spills():
    """Without generating them again; their launch bounds are compared where they are compiled."""
    for case in COMPILED:
        entry = RECORD["sources"][MANIFEST["cases"][case.label]["source"]]
        assert set(entry) >= set(architectures(case)), case.label
        spilled = max(dict(zip(RECORD["figures"], found))["spill_bytes"] for found in entry.values())
        assert spilled <= compile_all.may_spill(case), case.label


def test_every_tile_of_wgmma_is_compiled_in_every_layout():
    """With rows of w along n, a warpgroup has whole panels of 64 columns."""
    of_products = (case for case in TO_COMPILE if case.template.NAME == "gemm")
    products = [case for case in of_products if case.config.warpgroup]
    tile = lambda c: (c.block_m, c.block_n, c.warps_m, c.warps_n, *([c.sets] if c.tma else []))
    compiled = sorted((tile(case.config), case.problem.w_layout) for case in products)
    tiles = [*WARPGROUP_TILES, *TMA_TILES]
    along_n = [tile for tile in tiles if tile[1] % (64 * tile[3]) == 0]
    assert compiled == sorted([*((tile, "nk") for tile in tiles), *((tile, "kn") for tile in along_n)])


@pytest.mark.slow  # generates some 15 kernels, half a second each; 90 after any change of one
@pytest.mark.parametrize("case", TO_COMPILE_NOW, ids=label)
def test_large_problem_compiles_without_spills(case):
    assert_compiles_without_spills(case)


@pytest.mark.parametrize("case", OF_EACH_TEMPLATE, ids=label)
def test_source_is_the_same_for_every_architecture(case):
    of = [source_hash(source(case.template, case.problem, case.config, arch)) for arch in architectures(case)]
    assert len(set(of)) == 1


@needs_nvcc
@pytest.mark.parametrize("case", OF_EACH_TEMPLATE, ids=label)
def test_recorded_figures_are_what_the_compiler_says(case):
    entry = RECORD["sources"][source_hash(source_of(case))]
    same_compiler = all(RECORD[name] == value for name, value in compile_all.compiler().items())
    for arch in architectures(case):
        figures = compile_all.figures(source_of(case), arch)
        if same_compiler:
            assert figures == entry[arch]
        assert dict(zip(compile_all.FIGURES, figures))["spill_bytes"] == 0


def test_source_hash_sees_a_change_in_the_kernel_and_in_a_helper():
    text = source_of(TO_VERIFY[0])
    assert source_hash(text.replace("for (int p", "for (int q")) != source_hash(text)
    assert source_hash(text.replace("mma.sync", "mma.async")) != source_hash(text)
