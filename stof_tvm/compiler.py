"""`build`: from a PyTorch model to an Engine."""

import contextlib
import dataclasses
import functools
import json
import reprlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
import tvm
from tqdm import tqdm
from tvm import relax

from relax_passes.attention.replaceable_masks import ReplaceableMasks
from relax_passes.collected_seldom import collected_seldom
from relax_passes.extensions import Extensions
from relax_passes.fusion.partition_segments import SCHEME
from relax_passes.fusion.schemes.fusion_scheme import FusionScheme
from relax_passes.pipeline import PHASES, run_pipeline
from relax_passes.report_rows import segment_rows, site_rows
from relax_passes.runtime.memory_parameters import MEMORY
from relax_passes.runtime.update_states import COPIED
from relax_passes.schedule.cpu_rules.plain import without_refused_schedules
from relax_passes.schedule.segment_schedules import FUNCTIONS, described
from stof_tvm.buckets.building import bucket_engine
from stof_tvm.buckets.masks import RangeMasks
from stof_tvm.buckets.weights import SharedWeights
from stof_tvm.engine import Engine
from stof_tvm.frontend import ImportedModel, import_model
from stof_tvm.frontend.shape_range import has_dynamic_shapes
from stof_tvm.frontend.snapshot import Snapshot
from stof_tvm.frontend.states import with_states
from stof_tvm.given_masks import GivenAsMask, own_masks
from stof_tvm.mask_arrays import MaskArrays
from stof_tvm.masks.runtime.rule import Rule
from stof_tvm.older_keys.refuse import refuse_older_keys
from stof_tvm.packed.build import packed_engine
from stof_tvm.parallel.contents import contents_of
from stof_tvm.parallel.context.build import context_engine
from stof_tvm.parallel.ranks import Peers, among_ranks, peers_of, step_of
from stof_tvm.parallel.states import local_states, shards_of
from stof_tvm.parallel.tensor import meaning_of, notes_of, ranks_of, refuse_beside
from stof_tvm.range_engine import range_engine
from stof_tvm.report import Report
from stof_tvm.running.gpus import gpu_of, on_gpu
from stof_tvm.saving.lift_weights import lift_weights
from stof_tvm.saving.model_weights import with_weights
from stof_tvm.saving.weights_file import Weights
from stof_tvm.site_masks import SiteMasks
from stof_tvm.tuning.logs.replay import replay_lines, tuned_choices
from stof_tvm.verification.verify import SKIPPED, call_once, verify_engine
from tir_kernels.compiling.one_at_a_time import one_at_a_time
from tir_kernels.cuda.float32.modes import check_mode
from tir_kernels.cuda.machine_code import machine_code
from tir_kernels.errors import CompileError, ExportError, InputError, StofError
from tir_kernels.pipelines import pipeline_of
from tir_kernels.target import parse_target

ARGUMENTS = "the arguments of build"
COMPOSED = "canonicalize_attention"  # the phase after which every attention has one form


@one_at_a_time
@among_ranks
def build(
    model: torch.nn.Module | torch.export.ExportedProgram,
    target: str | dict | tvm.target.Target | None = None,
    example_inputs: tuple | list | Mapping | torch.Tensor | None = None,
    mask: GivenAsMask | Rule | Mapping[str, GivenAsMask | Rule] | str | Path | None = None,
    *,
    example_kwargs: Mapping | None = None,
    strict: bool = False,
    fusion_scheme: FusionScheme | str | None = None,
    tuning_logs: str | Path | bool | None = None,
    templates: Iterable = (),
    rules: Iterable[tvm.transform.Pass] = (),
    progress: bool = False,
    verify: bool = True,
    float32: str = "ieee",
    dynamic_shapes=None,
    lazy: bool = False,
    buckets: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
    replaceable_masks: bool = False,
    without_padding: bool | str = False,
    mesh=None,
    context_parallel=None,
    weights: str | Path | None = None,
) -> Engine:
    """Compile a PyTorch model whose attention is masked into an engine that skips what the masks skip.

    Parameters
    ----------
    model : torch.nn.Module or torch.export.ExportedProgram
        In float32, float16 or bfloat16.
    target : optional
        Any target of TVM (Target, tag, dict), "cpu" or "cuda -arch=sm_80"; default: the GPU present, else LLVM.
    example_inputs : tuple, tensor or dict, optional
        Arguments of one call; they fix shapes and dtypes.  A dict or other mapping, such as a tokenizer's output, holds
        keyword arguments.  Not needed for a model with `dummy_inputs` or `example_inputs`, nor for an ExportedProgram;
        if given with an ExportedProgram, they must fit its own.
    mask : Mask, tensor or array, BlockMask, mask_mod function, Rule, dict of module path to these, or file, optional
        One mask for all attentions, or one for each module path; paths may have wildcards, and where several match,
        the last one in the dict counts alone.  The name of a .json file stands for the masks by path that
        `masks.calibrate` found and `save` wrote.  A mask only restricts: one in the model itself also holds.  A tensor
        must broadcast to (B, H, Sq, Skv), True is kept.  Masks are read as in `sparse_attention`.  A rule of
        `masks.runtime` becomes a part of the program (docs/runtime_masks.md).
    example_kwargs : dict, optional
        Keyword arguments of the example call, beside positional `example_inputs`.
    strict : bool
        Raise NotRewrittenError if an attention stays dense, instead of only reporting it.  An attention with a
        given `mask` that stays dense is always an error.
    fusion_scheme : FusionScheme or str, optional
        The cut of the operators around attention into segments: digits ("00 11111 0") or hexadecimal ("0x4f"), one
        digit for each operator in the order of the report.  Default: the scheme in the tuning log, else the cut with
        the least predicted time.
    tuning_logs : path or False, optional
        A folder of tuning logs to replay, without measuring: the fastest recorded kernels, configurations and schemes
        are preferred to the predicted ones.  Default: "tuning_logs" in the working directory, or the logs that came
        with this package, if they have any for the target's architecture.  False replays none.
    templates : sequence, optional
        Your own kernel templates for segments (tutorials/06_extending.ipynb), preferred to the project's; a record of a
        tuning log is preferred to both.
    rules : sequence of tvm.transform.Pass, optional
        Your own passes on the Relax module, run just before it is cut into segments.
    progress : bool
        Show a progress bar on stderr.
    verify : bool
        Compare the engine with PyTorch on the example inputs, masks included, and raise VerificationError where it
        differs by more than roundings (docs/verification.md).  The report has the result and the time that it took.
    float32 : str
        How a GPU multiplies float32 in attention and in matrix products: "ieee", as exactly as PyTorch by default, or
        "tf32", with 11 bits of each number as `torch.backends.cuda.matmul.allow_tf32` has it.  On CPUs and for other
        dtypes it has no effect.
    dynamic_shapes : dict, tuple or list, optional
        The dimensions of the inputs that may change from call to call and their ranges, exactly as
        `torch.export.export` takes them: `{"ids": {0: Dim("batch", max=8), 1: Dim("length", max=512)}}`.  An
        ExportedProgram has its own.  Without `lazy` the result is a BucketEngine: engines of a few sizes, compiled now.
    lazy : bool
        Return a RangeEngine, which compiles the model for each set of shapes at its first call, from a copy of the
        model.  With `verify`, the shapes of the example inputs are compiled now, and every later engine is compared
        with PyTorch on the inputs of its first call.
    buckets : sequence of int, or dict of name to these, optional
        The sizes of a BucketEngine.  A size is named by the first dimension that it is, as "ids[1]", or by its Dim.
        Default: sizes that grow by 8 %, or by more where there would be more than 48 engines.  They are compiled beside
        each other, in forks of the process, if the model is on the CPU (docs/limits.md).
    replaceable_masks : bool
        Let `engine.with_mask` give the engine other masks, such as other documents in every batch, without compiling.
        Kernels are chosen for `mask`, and compute any.
    without_padding : bool or str
        Return a PackedEngine, for padded batches of any number of sequences up to the example's length, which computes
        real tokens only; each sequence gets what the model gives for it alone (docs/packing.md).  The padding mask is
        the input `attention_mask`, or `key_padding_mask`, `src_key_padding_mask` (True is padding), or, with a
        str, the input of that name (1 or True is real); calls may give `lengths=` instead.  `mask` is one of positions
        in a sequence.
    mesh : DeviceMesh of one dimension or ProcessGroup, optional
        Divide the model among its ranks, one process a GPU (NCCL) or on CPUs (gloo), as torchrun starts them; every
        rank calls `build`, and later the engine, with the same arguments, and gets the whole result
        (docs/parallel.md).
    context_parallel : DeviceMesh of one dimension or ProcessGroup, optional
        Return a ContextEngine: its ranks, started as with `mesh`, share each sequence.  Every rank gives the same whole
        inputs, and gets the whole result (docs/parallel.md).
    weights : path, optional
        A .safetensors file, a folder of them, or a file of `torch.save(model.state_dict())`, that has the tensors of
        `model`, which may be on the meta device; they must be in the file by their names in the model, as they are
        there.  The file is mapped into memory, also later by the engine: do not write into it.  With `mesh`, a rank
        copies only its part of what is divided.

    Raises
    ------
    StofError
        InputError, TargetError, ExportError, UnsupportedError, MaskError, SchemeError, TuningLogError, CompileError,
        NotRewrittenError, VerificationError or, with `mesh` or `context_parallel`, ParallelError.
    """
    if not isinstance(without_padding, str):
        _check_switches(without_padding=without_padding)
    _check_switches(strict=strict, progress=progress, verify=verify, lazy=lazy, replaceable_masks=replaceable_masks)
    check_mode(float32)
    if isinstance(target, tuple | list | torch.Tensor) or isinstance(example_inputs, str):
        given, inputs = type(target).__name__, type(example_inputs).__name__
        raise InputError(
            f"target must be a string, got {given}, and example_inputs tensors, got {inputs}: are the two swapped? "
            "It is build(model, target, example_inputs, mask)"
        )
    if weights is not None:
        model = with_weights(model, weights)
    call = _example_call(example_inputs, example_kwargs)
    target = parse_target(target)
    site_masks = SiteMasks(mask, takes_rules=True)
    extensions = Extensions(templates, rules)
    if isinstance(fusion_scheme, str):
        fusion_scheme = FusionScheme.parse(fusion_scheme)
    elif not isinstance(fusion_scheme, FusionScheme | None):
        raise InputError(f"fusion_scheme is a FusionScheme or a str, got {type(fusion_scheme).__name__}")
    options = _Options(
        target,
        strict,
        fusion_scheme,
        tuning_logs,
        extensions,
        progress,
        verify,
        float32,
        replaceable_masks,
        is_mapped=weights is not None,
    )
    is_range = dynamic_shapes is not None or has_dynamic_shapes(model)
    if mesh is not None:
        site_masks.refuse_rules("ranks of a mesh have some of the heads only: leave mesh out")
    if context_parallel is not None:
        site_masks.refuse_rules("ranks that share a sequence have some of its tokens only: leave context_parallel out")
    if replaceable_masks:
        site_masks.refuse_rules("no mask can take its place later: leave replaceable_masks out")
    if without_padding:
        site_masks.refuse_rules("without_padding joins sequences into one, whose tokens it would see: leave it out")
    if is_range and not lazy:
        site_masks.refuse_rules("would see the padding of a range of shapes: lazy=True compiles each shape instead")
    for name, ranks in (("mesh", mesh), ("context_parallel", context_parallel)):
        if ranks is not None:
            refuse_beside(
                name,
                dynamic_shapes=dynamic_shapes or is_range,
                lazy=lazy,
                buckets=buckets,
                replaceable_masks=replaceable_masks,
                without_padding=without_padding,
            )
    if context_parallel is not None:
        if mesh is not None:
            raise InputError("mesh and context_parallel divide a model in two ways, which are not combined: give one")
        refuse_beside("context_parallel", fusion_scheme=fusion_scheme)
        peers = peers_of(context_parallel, "context_parallel")
        peers.agree(ARGUMENTS, {"the argument": "context_parallel", **options.told()})
        return context_engine(model, call, peers, site_masks, target, float32, verify, _build_shared(options))
    if mesh is not None:
        peers_of(mesh).agree(ARGUMENTS, {"the argument": "mesh", **options.told()})
        return _build_one(model, call, site_masks, options, peers=peers_of(mesh))
    with on_gpu(gpu_of(model, call) if options.target.kind.name == "cuda" else None):
        if buckets is not None and (lazy or not is_range or without_padding):
            raise InputError("buckets are sizes for dynamic_shapes without lazy=True")
        if replaceable_masks and is_range and not lazy:
            raise InputError(
                "replaceable_masks is for engines of one shape: with lazy=True each engine of a range has with_mask, "
                "engine.engine_for(*inputs).with_mask(mask)"
            )
        if without_padding:
            if lazy or dynamic_shapes is not None or replaceable_masks or fusion_scheme is not None:
                raise InputError(
                    "without_padding=True takes batches of all lengths and makes engines as they are needed: leave "
                    "dynamic_shapes, lazy, replaceable_masks and fusion_scheme out"
                )
            return packed_engine(*(model, call, without_padding, own_masks(mask), target, verify), _build_row(options))
        if not lazy and not is_range:
            return _build_one(model, call, site_masks, options)
        own = own_masks(mask)  # the caller may write to a tensor later
        if not lazy:
            return bucket_engine(
                *(model, call, dynamic_shapes, target),
                lambda program, call, shared, plan: _build_one(
                    *(program, call, RangeMasks(own)),
                    *(dataclasses.replace(options, progress=False, verify=plan is not None), shared),
                    list if plan is None else plan.cut,
                    owned=plan is None,
                ),
                buckets,
                has_masks=mask is not None,
                verify=verify,
                progress=progress,
            )
        return range_engine(
            *(model, call, dynamic_shapes, target, verify),
            lambda model, call, snapshot: _build_one(model, call, SiteMasks(own, takes_rules=True), options, snapshot),
        )


def _build_row(options: "_Options") -> Callable:
    """A function that builds the engine of a program for rows of tokens, given masks by path."""
    options = dataclasses.replace(options, verify=False, replaceable_masks=True, lists_written_on_gpu=True)
    dense = (
        ", where a mask of the sequences, by which padding is left out, cannot be applied (build without "
        "without_padding to compute the padded batch)"
    )
    return lambda program, call, found, snapshot: _build_one(
        program, call, SiteMasks(found, dense=dense), options, snapshot, owned=True
    )


def _build_shared(options: "_Options") -> Callable:
    """A function that builds the engine of a program for a rank's tokens, given what names its attentions."""
    options = dataclasses.replace(options, verify=False)
    return lambda program, call, snapshot, name_of: _build_one(
        program, call, SiteMasks(None), options, snapshot, owned=True, shared=name_of
    )


@dataclasses.dataclass(frozen=True)
class _Options:
    """Arguments of `build`, checked."""

    target: tvm.target.Target
    strict: bool
    fusion_scheme: FusionScheme | None
    tuning_logs: str | Path | bool | None
    extensions: Extensions
    progress: bool
    verify: bool
    float32: str
    replaceable_masks: bool
    is_mapped: bool = False  # the model's tensors are a file's, which nobody writes to
    lists_written_on_gpu: bool = False  # those of replaceable masks

    def told(self) -> dict[str, str]:
        """What ranks that build one engine must be given alike, in words, by the names of the arguments."""
        same = ("strict", "fusion_scheme", "verify", "float32")
        return {"the kind of target": self.target.kind.name} | {name: str(getattr(self, name)) for name in same}


@collected_seldom()
def _build_one(
    model,
    call: tuple,
    site_masks: SiteMasks,
    options: _Options,
    snapshot: Snapshot | SharedWeights | None = None,
    part: Callable[[list], list] = list,
    owned: bool = False,
    peers: Peers | None = None,
    shared: Callable | None = None,
) -> Engine:
    """The engine for the shapes of one call; `snapshot` is what `model` comes from if other engines do as well.

    `part` is what is verified of a result's leaves; `owned` says that a program may be changed.  With `peers` it is
    this rank's engine.  `shared` names the functions that compute its attentions, where ranks share its sequence.
    """
    target, strict, verify = options.target, options.strict, options.verify
    tuned = tuned_choices(options.tuning_logs, target, options.extensions.templates)
    # None, not a disabled bar: an interrupt while a bar is garbage-collected would be lost in its `__del__`.
    bar = tqdm(total=len(PHASES) + 3, desc="build", file=sys.stderr) if options.progress else None

    def step(name):
        if bar is not None:
            bar.set_postfix_str(name)
            bar.update()

    def compiled(imported, scheme=None, check=None) -> Engine:
        try:
            return _compiled(imported, options, site_masks, scheme, step, tuned, check, snapshot, peers, shared)
        except StofError:
            raise
        except Exception as error:
            raise CompileError(f"the model did not compile for {target}: {error}") from error

    with contextlib.nullcontext() if bar is None else bar:
        step("import")
        called = call_once(model, call, target) if verify else None
        try:
            args, kwargs = call
            kept = snapshot.states if snapshot is not None else ()
            shares = isinstance(snapshot, SharedWeights) or (options.is_mapped and peers is not None)
            imported = step_of(
                peers,
                "import",
                lambda: import_model(model, args, kwargs, kept=kept, owned=owned, shares=shares),
                lambda imported: contents_of(imported.program, imported.source.tensors.values(), call),
            )
        except ExportError as error:
            raise error.with_traceback(None) from error.__cause__  # the cause shows the model's lines; ours hide them
        if snapshot is not None:
            snapshot.check(imported.source.tensors.values())

        def check(report: Report) -> None:
            site_masks.check_reached(report.sites, strict)
            if peers is not None:
                peers.step("masks", lambda: report, lambda report: meaning_of(report, site_masks))

        engine = step_of(peers, "compilation", lambda: compiled(imported, options.fusion_scheme, check))
        step("verify")
        outcome = SKIPPED
        if verify:
            arguments = engine, model, imported, call, site_masks.given_for, compiled, called, part, peers
            outcome = step_of(peers, "verification", lambda: verify_engine(*arguments, rule_for=site_masks.rule_for))
        engine.set_verification(outcome)
    return engine


def _compiled(
    imported: ImportedModel, options, site_masks, scheme, step, tuned, check, snapshot, peers, shared
) -> Engine:
    """The engine of an imported model; calls `check(report)` before it generates code."""
    target = options.target
    float32 = options.float32 if target.kind.name == "cuda" else "ieee"
    replaceable = ReplaceableMasks(options.lists_written_on_gpu) if options.replaceable_masks else None
    ranks = ranks_of(peers, target.kind.name == "cuda")
    run = functools.partial(
        run_pipeline,
        target=target,
        site_mask=site_masks,
        fusion_scheme=scheme,
        progress=step,
        tuned=tuned,
        extensions=options.extensions,
        float32=float32,
        replaceable=replaceable,
        ranks=ranks,
        shared=shared,
    )
    mod = run(imported.mod, until=COMPOSED)
    refuse_older_keys(mod, site_masks, options.replaceable_masks and not options.lists_written_on_gpu)
    mod = run(mod, after=COMPOSED)
    report = dataclasses.replace(
        _report(mod, target, tuned),
        notes=(*imported.notes, *notes_of(mod, peers, target.kind.name == "cuda")),
        float32=float32,
    )
    if check is not None:
        check(report)
    step("generate code")
    code, weights = lift_weights(mod)
    if snapshot is not None:
        weights = snapshot.shared(weights)
    executable, compiled = _generate_code(code, target)
    if FUNCTIONS in mod.attrs:
        rows = described(report.segments, compiled, str(mod.attrs[FUNCTIONS]))
        report = dataclasses.replace(report, segments=tuple(rows))
    digests = sorted({site.mask_digest for site in report.rewritten})
    is_cuda = target.kind.name == "cuda"
    memory = json.loads(str(mod.attrs[MEMORY])) if is_cuda else []
    shards = shards_of(imported.states, mod)
    states = local_states(imported.states, shards, ranks)
    signature = with_states(imported.signature, states, json.loads(str(mod.attrs.get(COPIED, "[]"))))
    initial = [state.initial for state in states if state.initial is not None]
    kernels = functools.partial(machine_code, executable, str(target.attrs["arch"])) if is_cuda else bytes
    masks = MaskArrays(replaceable.kernels, target) if replaceable is not None and replaceable.kernels else None
    engine = Engine(
        executable,
        executable.export_library,
        signature,
        report,
        digests,
        memory,
        Weights(weights),
        kernels,
        initial,
        masks,
        () if masks is None else masks.of(site_masks)[0],
    )
    if peers is not None and ranks is not None:
        engine.belongs_to(peers, shards, ranks.mailboxes)
    return engine


def _example_call(inputs, kwargs: Mapping | None) -> tuple:
    """(args, kwargs) of the example call: a mapping of inputs is keyword arguments."""
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise InputError(f"example_kwargs must be a dict of keyword arguments, got {_described(kwargs)}")
    if isinstance(inputs, Mapping):
        return (), {**inputs, **(kwargs or {})}
    if inputs is not None and not isinstance(inputs, tuple | list | torch.Tensor):
        raise InputError(f"example_inputs must be a tuple, a tensor or a dict, got {_described(inputs)}")
    return (inputs,) if isinstance(inputs, torch.Tensor) else inputs, kwargs


def _check_switches(**switches) -> None:
    """InputError for the first switch that is neither True nor False."""
    for name, value in switches.items():
        if not isinstance(value, bool | np.bool_):
            raise InputError(f"{name} must be True or False, got {_described(value)}")


def _described(value) -> str:
    return f"{type(value).__name__} {reprlib.repr(value)}"


def _report(mod, target, tuned) -> Report:
    sites, segments = tuple(site_rows(mod)), tuple(segment_rows(mod))
    return Report(str(target), sites, segments, str(mod.attrs[SCHEME]), replay_lines(tuned))


def _generate_code(mod: tvm.IRModule, target):
    """(machine code and bytecode of a fully lowered module, the module that was compiled).

    On LLVM, that module leaves out the schedules that do not compile.
    """
    is_cuda = target.kind.name == "cuda"

    # An engine checks its inputs, and what passes between kernels was planned: checks of every kernel's arguments would
    # be most of the code that is generated on a CPU.
    now = tvm.transform.PassContext.current()
    config = {**now.config, "tirx.disable_assert": True}
    unchecked = tvm.transform.PassContext(now.opt_level, config=config, instruments=list(now.instruments or ()))

    def build(mod, target):
        with target, unchecked:
            return relax.build(mod, target, relax_pipeline=None, tir_pipeline=pipeline_of(target))

    try:
        return build(mod, target), mod
    except Exception:
        if is_cuda:
            raise
        mod = without_refused_schedules(mod, target, build)
        return build(mod, target), mod
