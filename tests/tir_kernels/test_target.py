import pytest
import tvm

from tir_kernels.errors import StofError, TargetError
from tir_kernels.target import parse_target


def test_short_form_that_tvm_no_longer_parses():
    target = parse_target("cuda -arch=sm_80")
    assert target.kind.name == "cuda"
    assert target.attrs["arch"] == "sm_80"
    assert int(target.attrs["max_shared_memory_per_block"]) == 166912
    assert int(target.attrs["thread_warp_size"]) == 32


@pytest.mark.parametrize(
    "given, shared_memory",
    [
        ({"kind": "cuda", "arch": "sm_90a"}, 232448),
        ('{"kind": "cuda", "arch": "sm_86"}', 101376),
        ("nvidia/nvidia-a100", 166912),  # the tag itself says 49152
        (tvm.target.Target({"kind": "cuda", "arch": "sm_90"}), 232448),
    ],
)
def test_every_form_gets_the_limits_of_its_architecture(given, shared_memory):
    assert int(parse_target(given).attrs["max_shared_memory_per_block"]) == shared_memory


def test_llvm_is_for_this_cpu_unless_one_is_named():
    assert str(parse_target("llvm").attrs["mcpu"]) == tvm.target.codegen.llvm_get_system_cpu()
    assert str(parse_target("llvm -mcpu=skylake").attrs["mcpu"]) == "skylake"
    assert int(parse_target("llvm -num-cores=4").attrs["num-cores"]) == 4


@pytest.mark.parametrize(
    "given, rule",
    [
        ("llvm -mcpu=foo", r"'foo' in mcpu is no CPU that LLVM knows for x86_64.*llvm_get_cpu_archlist\(\) lists them"),
        ("cpu -mcpu=skylake-avx521", "did you mean 'skylake-avx512'"),
        ({"kind": "llvm", "mcpu": "native"}, "leave mcpu out for this machine's"),
        (
            {"kind": "llvm", "mcpu": "znver4", "mtriple": "aarch64-linux-gnu"},
            "'znver4' in mcpu .* for aarch64-linux-gnu",
        ),
        (
            {"kind": "llvm", "mtriple": "nonsense-foo"},
            "'nonsense-foo' in mtriple is of no architecture .*x86_64 or aarch64",
        ),
        ({"kind": "llvm", "mcpu": "haswell", "mattr": ["+avx2", "+nonsense"]}, r"'\+nonsense' in mattr .* 'haswell'"),
        ({"kind": "llvm", "mattr": ["-nonsense"]}, "'-nonsense' in mattr is no feature"),
        ({"kind": "llvm", "mattr": ["avx2"]}, r"'avx2' in mattr is not of the form \+name or -name"),
        ("llvm -mcpu=haswell -mattr=+avx512f,+nonsense", r"'\+nonsense' in mattr"),
        (tvm.target.Target({"kind": "llvm", "mcpu": "foo"}), "'foo' in mcpu"),
    ],
    ids=str,
)
def test_code_for_no_cpu_is_refused(given, rule):
    with pytest.raises(TargetError, match=rule):
        parse_target(given)


@pytest.mark.parametrize(
    "given, cpu, attributes",
    [
        ("llvm -mcpu=haswell -mattr=+avx512f,-fma", "haswell", ["+avx512f", "-fma"]),
        ({"kind": "llvm", "mcpu": "haswell", "mattr": ["+soft-float"]}, "haswell", ["+soft-float"]),
        ({"kind": "llvm", "mcpu": "cortex-a76", "mtriple": "aarch64-linux-gnu"}, "cortex-a76", []),
        ({"kind": "llvm", "mtriple": "aarch64-linux-gnu"}, "generic", []),  # which this machine's is none of
        ({"kind": "llvm", "mcpu": "generic"}, "generic", []),
    ],
    ids=str,
)
def test_cpus_triples_and_features_that_llvm_knows(given, cpu, attributes):
    attrs = parse_target(given).attrs
    assert (str(attrs["mcpu"]), [str(x) for x in attrs.get("mattr", ())]) == (cpu, attributes)


def test_parsing_is_idempotent():
    target = parse_target("cuda -arch=sm_80")
    assert str(parse_target(target)) == str(target)


@pytest.mark.parametrize(
    "given, rule",
    [
        ("cuda -arch=sm_70", "sm_80 or later"),
        ("cuda -arch=ampere", "'ampere' is not of the form sm_80"),
        ("cuda -arch=80", "'80' is not of the form sm_80"),
        ({"kind": "cuda", "arch": 80}, "'80' is not of the form sm_80"),
        ("cuda -arch=sm_80 -foo=1", "'foo'"),
        ('{"kind": "cuda"', "delimiter"),
        ("cuda -arch", "-name=value"),
        ("nosuch", "'nosuch' is not a target"),
        ("nosuch -x=1", "is not a target"),
        ({"kind": "vulkan"}, "not supported"),
        ({"arch": "sm_80"}, "is not a target"),
        (17, "17 is not a target"),
    ],
)
def test_a_bad_target_is_one_clear_error(given, rule):
    with pytest.raises(TargetError, match=rule) as raised:
        parse_target(given)
    assert isinstance(raised.value, StofError)
    assert len(str(raised.value)) < 400


@pytest.mark.parametrize(
    "given, meant",
    [
        ("gpu", "cuda"),
        ("cudda", "cuda"),
        ("CUDA", "cuda"),
        ("cuda:0", "cuda"),
        ("nvidia", "cuda"),
        ({"kind": "cudda"}, "cuda"),
        ("CPU", "cpu"),
        ("lvm", "llvm"),
        ("sm_80", "cuda -arch=sm_80"),
        ("cuda sm_90a", "cuda -arch=sm_90a"),
        ("h100", "nvidia/nvidia-h100"),
    ],
)
def test_what_somebody_may_have_meant(given, meant):
    with pytest.raises(TargetError, match=f'did you mean "{meant}"[?] Accepted are .*"cpu", "llvm", "cuda"') as raised:
        parse_target(given)
    assert "Target creation" not in str(raised.value)
    assert meant == "cuda" or parse_target(meant)


@pytest.mark.parametrize("given", ["", "tpu-like", 17, {"arch": "sm_80"}])
def test_what_is_like_nothing(given):
    with pytest.raises(TargetError, match='is not a target: Accepted are .*"cuda -arch=sm_80"'):
        parse_target(given)


@pytest.mark.skipif(tvm.cuda(0).exist, reason="says what happens without a GPU")
def test_cuda_without_architecture_or_gpu():
    with pytest.raises(TargetError, match="names no architecture and no GPU"):
        parse_target("cuda")
    assert parse_target(None).kind.name == "llvm"


@pytest.mark.parametrize("text", ["llvm", "cuda -arch=sm_80"])
def test_equal_targets_are_one(text):
    """TVM compares them by identity, so caches keyed by a target would miss."""
    assert parse_target(text) is parse_target(parse_target(text)) is parse_target(text)


@pytest.mark.parametrize(
    "text",
    [
        "cuda -arch=sm_²",
        "llvm -num-cores=²",
        "llvm -num-cores=" + "9" * 5000,
        '{"kind":' * 100_000,
        "{" * 100_000,
        '{"kind": "cuda", "arch": "sm_80", "max_num_threads": NaN}',
    ],
    ids=lambda text: text[:20],
)
def test_text_that_would_trip_a_reader_is_refused(text):
    with pytest.raises(TargetError):
        parse_target(text)
