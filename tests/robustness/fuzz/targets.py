"""What is fuzzed: for each reader, how an input is made and what must hold of what it answers.

`make(rng)` gives files by name, `check(files, folder)` whether they were "read" or "refused".  Any exception out of
`check` is a finding: nothing may leave a reader but a StofError, and what is read must be sound.
"""

import contextlib
import functools
import io
import json
import math
import os
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from random import Random
from unittest import mock

import numpy as np
import torch

from relax_passes.fusion.operators import CI, MI, Operator
from relax_passes.fusion.schemes.fusion_scheme import FusionScheme, is_legal
from relax_passes.tuned_choices import TunedChoices
from stof_tvm import masks
from stof_tvm.cli import main
from stof_tvm.cli.measuring.timing import random_inputs
from stof_tvm.cli.named.tensors import load_tensor
from stof_tvm.errors import ArtifactError, InputError, MaskError, SchemeError, StofError, TargetError, TuningLogError
from stof_tvm.masks.compilation import LONGEST
from stof_tvm.masks.quality.assignment import FORMAT
from stof_tvm.masks.quality.assignment import load as load_masks
from stof_tvm.masks.quality.recall import recall
from stof_tvm.masks.text import parse_mask, parse_rule
from stof_tvm.saving.artifact import load_artifact, read_report
from stof_tvm.saving.loading import load
from stof_tvm.saving.strict_json import read_json
from stof_tvm.tuning.logs.log import CHECKSUMS, FAILURES, RECORDS, SCHEMES, WORKLOADS, TuningLog
from tests.robustness.fuzz import bases
from tests.robustness.fuzz.archives import mutated_archive
from tests.robustness.fuzz.mutate import mutated_bytes, mutated_json, mutated_lines, mutated_text
from tests.stof_tvm.tuning.logged import GPU, PROBLEM, TARGET, WORKLOAD, trace
from tir_kernels.masks.block_sparse import BlockSparseMask
from tir_kernels.target import parse_target
from tir_kernels.tuning.problem_json import problem_from_json, problem_to_json

READ, REFUSED = "read", "refused"
LONGEST_MESSAGE = 3000
OPERATORS = [Operator("matmul", CI), *(Operator("add", MI, (i,)) for i in range(6))]


class Found(AssertionError):
    """A reader let something pass that it must not."""


def demand(holds: bool, what: str) -> None:
    if not holds:
        raise Found(what)


def sometimes(files: dict[str, bytes], one_in: int) -> bool:
    """Whether a costly check is made of these files; the same for the same files."""
    return sum(zlib.crc32(data) for data in files.values()) % one_in == 0


def demand_clear(error: StofError, *names: str) -> str:
    text = str(error)
    demand(0 < len(text) < LONGEST_MESSAGE, f"a message of {len(text)} characters")
    demand(not names or any(name in text for name in names), f"a message that names no file: {text}")
    return REFUSED


@dataclass(frozen=True)
class Log:
    """A tuning log: its lines under checksums, or as another program wrote them."""

    name = "log"
    weight = 35

    def make(self, rng: Random) -> dict[str, bytes]:
        files = dict(bases.log_files())
        if rng.random() < 0.5:
            del files[CHECKSUMS]
        for name in rng.sample(sorted(files), rng.choice((1, 1, 1, 2))):
            files[name] = mutated_file(rng, name, files[name])
        return files

    def check(self, files: dict[str, bytes], folder: Path) -> str:
        write_log(files, folder)
        try:
            log = TuningLog(folder, TARGET)
        except TuningLogError as error:
            return demand_clear(error, *files)
        records = all_records(log)
        for record in records:
            read_json(json.dumps([record.decisions, record.us, record.gpu, record.reason]))
            demand(record.us is None or 0 < record.us < math.inf, f"a time of {record.us} µs")
        for schemes in log.schemes.values():
            for scheme in schemes:
                FusionScheme.parse(scheme.scheme)
        TunedChoices(log, TARGET, GPU).fusion(PROBLEM)
        if CHECKSUMS in files:
            self._check_sealed(files, log, records)
        return READ

    def _check_sealed(self, files, log, records) -> None:
        wrong = [record for record in records if identity(record) not in base_records()]
        demand(not wrong, f"records that nobody wrote: {wrong[:1]}")
        if not sometimes(files, 8):
            return
        for key, workload in log.workloads():
            demand(workload is not None, key)
        log.add(WORKLOAD, trace(1), 5.0, GPU)
        again = [identity(record) for record in all_records(TuningLog(log.folder.parent, TARGET))]
        demand(len(again) == len(records) + 1, "adding a record lost others")


def mutated_file(rng: Random, name: str, data: bytes) -> bytes:
    if name in (WORKLOADS, RECORDS, FAILURES, CHECKSUMS):
        return mutated_lines(rng, data)
    if name == SCHEMES and rng.random() < 0.8:
        return mutated_json(rng, json.loads(data))
    return mutated_bytes(rng, data)


def write_log(files: dict[str, bytes], folder: Path) -> None:
    arch = folder / bases.ARCH
    arch.mkdir(exist_ok=True)
    for path in arch.iterdir():
        path.unlink()
    for name, data in files.items():
        (arch / name).write_bytes(data)


def all_records(log: TuningLog) -> list:
    return [record for key in log.keys for record in log.records(key)]


def identity(record) -> str:
    return json.dumps([record.decisions, record.us, record.gpu, record.reason, record.trace], sort_keys=True)


@functools.cache
def base_records() -> frozenset[str]:
    with tempfile.TemporaryDirectory() as folder:
        write_log(bases.log_files(), Path(folder))
        return frozenset(map(identity, all_records(TuningLog(folder, TARGET))))


@dataclass(frozen=True)
class Artifact:
    """A saved engine; the library that reaches the loader is the one that was saved."""

    name = "artifact"
    weight = 35

    def make(self, rng: Random) -> dict[str, bytes]:
        return {"a.stof": mutated_archive(rng, bases.engine_file())}

    def check(self, files: dict[str, bytes], folder: Path) -> str:
        path = folder / "a.stof"
        path.write_bytes(files["a.stof"])
        before = sorted(os.listdir(folder))
        answers = {self._report(path), self._engine(path)}
        demand(sorted(os.listdir(folder)) == before, "files beside the artifact")
        return READ if READ in answers else REFUSED

    def _report(self, path: Path) -> str:
        try:
            _, report = read_report(path)
        except ArtifactError as error:
            return demand_clear(error)
        demand(bool(str(report)), "an empty report")
        return READ

    def _engine(self, path: Path) -> str:
        with mock.patch("stof_tvm.saving.artifact.load_library", load_only_what_was_saved):
            try:
                engine = load(path)
            except ArtifactError as error:
                return demand_clear(error)
            library, artifact = path.with_name("again.so"), load_artifact(path)
            artifact.export_library(library)
            demand(library.read_bytes() == bases.LIBRARY, "another library was exported")
            library.unlink()
            pairs = list(zip(artifact.weights.tensors, bases.WEIGHTS.tensors, strict=False))
            if all(found.nbytes == saved.nbytes for found, saved in pairs):  # as the manifest describes them
                demand(all(bytes_of(found) == bytes_of(saved) for found, saved in pairs), "other weights were mapped")
        sizes = [math.prod(spec.shape) for spec in engine.signature.inputs]
        if all(size < 1 << 20 for size in sizes):
            args, kwargs = random_inputs(engine.signature, "cpu")
            demand(len(engine.signature.flatten(args, kwargs)) == len(sizes), "inputs do not come apart again")
        return READ


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def load_only_what_was_saved(path: str):
    demand(Path(path).read_bytes() == bases.LIBRARY, "a library that was altered reached the loader")
    return mock.sentinel.library


@dataclass(frozen=True)
class MaskText:
    """A mask of the command line."""

    name = "mask"
    weight = 12

    def make(self, rng: Random) -> dict[str, bytes]:
        text = rng.choice(bases.MASKS) if rng.random() < 0.3 else random_mask(rng)
        if rng.random() < 0.5:
            text = mutated_text(rng, text, bases.MASK_WORDS)
        return {"mask": text.encode(errors="surrogatepass"), "lengths": bytes((rng.choice((1, 9, 17)), 17))}

    def check(self, files: dict[str, bytes], folder: Path) -> str:
        text, lengths = files["mask"].decode(errors="surrogatepass"), tuple(files["lengths"])
        try:
            mask = parse_mask(text)
            shown = repr(mask)
            if "..." not in shown and "<" not in shown:
                demand(parse_mask(shown) == mask, f"{text!r} prints as {shown!r}")
            compiled = mask.compile(*lengths, (8, 16))
        except MaskError as error:
            return demand_clear(error)
        dense = mask.dense(*lengths).numpy()
        demand(compiled == BlockSparseMask.from_dense(np.atleast_2d(dense), (8, 16)), f"{text!r} compiles to another")
        return READ


@dataclass(frozen=True)
class RuleText:
    """A rule of the command line."""

    name = "rule"
    weight = 3

    def make(self, rng: Random) -> dict[str, bytes]:
        text = rng.choice(bases.RULES)
        if rng.random() < 0.8:
            text = mutated_text(rng, text, bases.MASK_WORDS)
        return {"rule": text.encode(errors="surrogatepass")}

    def check(self, files: dict[str, bytes], folder: Path) -> str:
        text = files["rule"].decode(errors="surrogatepass")
        try:
            shown = repr(parse_rule(text))
            if "..." not in shown and "<" not in shown:
                demand(repr(parse_rule(shown)) == shown, f"{text!r} prints as {shown!r}")
        except MaskError as error:
            return demand_clear(error)
        return READ


@dataclass(frozen=True)
class MaskFile:
    """Masks by module path, as `Assignment.save` writes them."""

    name = "masks"
    weight = 5

    def make(self, rng: Random) -> dict[str, bytes]:
        content = {"format": FORMAT, "density": 0.5, "loss": 0.1, "masks": {"a.b": [rng.choice(bases.MASKS)], "": []}}
        content["masks"][""] = [rng.choice((*bases.MASKS, random_mask(rng))) for _ in range(rng.randint(1, 3))]
        if rng.random() < 0.6:
            return {"masks.json": mutated_json(rng, content)}
        data = json.dumps(content, indent=1).encode()
        return {"masks.json": mutated_bytes(rng, data) if rng.random() < 0.8 else data}

    def check(self, files: dict[str, bytes], folder: Path) -> str:
        path = folder / "masks.json"
        path.write_bytes(files["masks.json"])
        try:
            found = load_masks(path)
        except MaskError as error:
            return demand_clear(error, "masks.json")
        demand(bool(str(found)) and len(found) > 0, "no masks")
        try:
            found.save(path)
        except MaskError as error:  # of a tensor that the text wrote out
            return demand_clear(error)
        again = load_masks(path)
        demand(dict(again) == dict(found) and again.density == found.density, "no round trip")
        return READ


@dataclass(frozen=True)
class TensorFile:
    """A tensor as `torch.save` writes it, for `stof mask --from-tensors`."""

    name = "tensor"
    weight = 3

    def make(self, rng: Random) -> dict[str, bytes]:
        held = io.BytesIO()
        torch.save(torch.arange(24.0).view(1, 2, 3, 4), held)
        return {"q.pt": mutated_bytes(rng, held.getvalue())}

    def check(self, files: dict[str, bytes], folder: Path) -> str:
        path = folder / "q.pt"
        path.write_bytes(files["q.pt"])
        try:
            found = load_tensor(path)
            recall(masks.causal(), found, found)
        except InputError as error:
            return demand_clear(error)
        return READ


@dataclass(frozen=True)
class SchemeText:
    """A fusion scheme, of the command line or a log."""

    name = "scheme"
    weight = 5

    def make(self, rng: Random) -> dict[str, bytes]:
        text = mutated_text(rng, rng.choice(bases.SCHEMES), ["0x", "0", "1", " ", "_", "-", "f" * 4000, "01" * 3000])
        return {"scheme": text.encode(errors="surrogatepass")}

    def check(self, files: dict[str, bytes], folder: Path) -> str:
        text = files["scheme"].decode(errors="surrogatepass")
        try:
            scheme = FusionScheme.parse(text)
        except SchemeError as error:
            return demand_clear(error)
        demand(FusionScheme.parse(scheme.hex) == FusionScheme.parse(str(scheme)) == scheme, "no round trip")
        demand(not is_legal(scheme, OPERATORS) or len(scheme) == len(OPERATORS), "a scheme for other operators")
        return READ


@dataclass(frozen=True)
class CommandLine:
    """Commands that read masks, engines and logs: an answer in JSON, or one line on stderr, or wrong usage."""

    name = "command"
    weight = 13

    def make(self, rng: Random) -> dict[str, bytes]:
        command = rng.choice(("mask", "report", "logs"))
        files = {"report": Artifact, "logs": Log}[command]().make(rng) if command != "mask" else {}
        arguments = {
            "mask": ["mask", rng.choice(bases.MASKS), "17", "--block", "16x8"],
            "report": ["report", "{folder}/a.stof"],
            "logs": ["logs", "list", "{folder}"],
        }[command]
        if command == "mask" or rng.random() < 0.1:
            at = rng.randrange(1, len(arguments))
            changed = mutated_text(rng, arguments[at], bases.MASK_WORDS).replace("\0", "")
            arguments[at] = changed if not takes_long(changed) else "3000"
        return files | {"arguments": json.dumps(arguments).encode()}

    def check(self, files: dict[str, bytes], folder: Path) -> str:
        files = dict(files)
        arguments = json.loads(files.pop("arguments"))
        if arguments[0] == "report":
            (folder / "a.stof").write_bytes(files["a.stof"])
        elif arguments[0] == "logs":
            # Modules of a log without checksums are for TVM to read, which is not safe from damage.
            write_log({CHECKSUMS: bases.log_files()[CHECKSUMS]} | files, folder)
        arguments = [argument.replace("{folder}", str(folder)) for argument in arguments]
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                status = main([*arguments, "--json"])
            except SystemExit as stop:
                status = stop.code
        if status == 0 and out.getvalue().startswith("usage: "):
            return READ  # --help was asked for
        demand(status in (0, 1, 2), f"status {status}")
        if status == 0:
            demand(isinstance(read_json(out.getvalue()), dict), "no JSON object")
            return READ
        told = err.getvalue()
        demand(out.getvalue() == "", "an answer although it failed")
        demand(told.startswith("stof: ") and told.count("\n") == 1 if status == 1 else "usage" in told, told)
        return REFUSED


def random_mask(rng: Random, depth: int = 3) -> str:
    """A mask by the rules, with arguments that may be out of range."""
    if depth == 0 or rng.random() < 0.3:
        name, count = rng.choice(bases.CONSTRUCTORS)
        return f"{name}({', '.join(str(rng.choice(bases.ARGUMENTS)) for _ in range(count))})"
    inner = [random_mask(rng, depth - 1) for _ in range(2)]
    forms = ("({} & {})", "{} | {}", "~{}", "~({} | {})", "per_head([{}, {}])", "~~({})")
    return rng.choice(forms).format(*inner)


@dataclass(frozen=True)
class TargetText:
    """A compilation target of the command line, in the short form or JSON."""

    name = "target"
    weight = 4

    def make(self, rng: Random) -> dict[str, bytes]:
        text = rng.choice(bases.COMPILATION_TARGETS)
        if text.startswith("{") and rng.random() < 0.7:
            return {"target": mutated_json(rng, json.loads(text))}
        words = ["-arch=", "sm_", "{", "}", ":", "-", "kind", "-num-cores=", "9" * 5000, " "]
        return {"target": mutated_text(rng, text, words).encode(errors="surrogatepass")}

    def check(self, files: dict[str, bytes], folder: Path) -> str:
        text = files["target"].decode(errors="surrogateescape")  # as arguments are
        try:
            target = parse_target(text)
        except TargetError as error:
            return demand_clear(error)
        demand(target.kind.name in ("cuda", "llvm"), str(target))
        demand(str(parse_target(str(target))) == str(target), "no round trip")
        return READ


@dataclass(frozen=True)
class ProblemText:
    """A problem of the kernel templates, as workloads hold it."""

    name = "problem"
    weight = 4

    def make(self, rng: Random) -> dict[str, bytes]:
        return {"problem": mutated_json(rng, json.loads(problem_to_json(rng.choice(bases.PROBLEMS))))}

    def check(self, files: dict[str, bytes], folder: Path) -> str:
        text = files["problem"].decode(errors="replace")
        try:
            problem_to_json(problem_from_json(text))
        except InputError as error:
            return demand_clear(error)
        return READ


def takes_long(text: str) -> bool:
    """Whether a text is a length that takes minutes and gigabytes, which is no error."""
    try:
        return 3000 < int(text) <= LONGEST
    except ValueError:
        return False


TARGETS = (
    Log(),
    Artifact(),
    MaskText(),
    RuleText(),
    MaskFile(),
    TensorFile(),
    SchemeText(),
    CommandLine(),
    TargetText(),
    ProblemText(),
)
