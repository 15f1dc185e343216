"""`build`: from a PyTorch model to an Engine."""

import json
import sys

import tvm
from tqdm import tqdm
from tvm import relax

from relax_passes.pipeline import phases, run_pipeline
from relax_passes.rewrite_masked_attention import SITES
from stof_tvm.engine import Engine
from stof_tvm.frontend import import_model
from stof_tvm.report import Report
from stof_tvm.site_masks import SiteMasks
from tir_kernels.cuda_compile import tir_pipeline_name
from tir_kernels.errors import CompileError, NotRewrittenError, StofError
from tir_kernels.target import parse_target


def build(
    model,
    target=None,
    example_inputs=None,
    mask=None,
    *,
    example_kwargs: dict | None = None,
    strict: bool = False,
    progress: bool = False,
) -> Engine:
    """Compile a PyTorch model whose attention is masked into an engine that skips what the masks skip.

    Parameters
    ----------
    model : torch.nn.Module or torch.export.ExportedProgram
        In float32, float16 or bfloat16.
    target : optional
        What TVM takes (Target, tag, dict) or "cuda -arch=sm_80"; default: the GPU present, else LLVM.
    example_inputs : tuple, tensor or dict, optional
        Arguments of one call (a dict: keyword arguments); they fix shapes and dtypes.  Not needed for an
        ExportedProgram or a model that carries `dummy_inputs` or `example_inputs`.
    mask : Mask or dict of module path to Mask, optional
        For all attentions, or by path with wildcards.  It only restricts: a mask of the model's own also holds.
    example_kwargs : dict, optional
        Keyword arguments of the example call, beside positional `example_inputs`.
    strict : bool
        Raise NotRewrittenError where an attention stays dense, instead of reporting it.
    progress : bool
        Show a progress bar on stderr.

    Raises InputError, TargetError, ExportError, UnsupportedError, MaskError, CompileError or NotRewrittenError.
    """
    target = parse_target(target)
    site_masks = SiteMasks(mask)
    bar = tqdm(total=len(phases(target, site_masks)) + 2, desc="build", file=sys.stderr, disable=not progress)

    def step(name):
        bar.set_postfix_str(name)
        bar.update()

    with bar:
        step("import")
        imported = import_model(model, *_example_call(example_inputs, example_kwargs))
        try:
            mod = run_pipeline(imported.mod, target, site_masks, step)
            report = _report(mod, target, imported, site_masks)
            if strict and report.not_rewritten:
                reasons = "; ".join(f"{s['site'] or '(the model)'}: {s['reason']}" for s in report.not_rewritten)
                raise NotRewrittenError(f"{len(report.not_rewritten)} attention(s) stay dense: {reasons}")
            step("generate code")
            executable = _generate_code(mod, target)
        except StofError:
            raise
        except Exception as error:
            raise CompileError(f"the model did not compile for {target}: {error}") from error
    digests = sorted({site["mask_digest"] for site in report.sites if site["rewritten"]})
    return Engine(executable, executable.export_library, imported.signature, report, digests)


def _example_call(inputs, kwargs: dict | None) -> tuple[tuple, dict]:
    """(args, kwargs) of the example call, from the forms that `example_inputs` takes."""
    if isinstance(inputs, dict):
        return (), {**inputs, **(kwargs or {})}
    if inputs is None:
        return (), kwargs or {}
    return (tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)), kwargs or {}


def _report(mod, target, imported, site_masks: SiteMasks) -> Report:
    sites = json.loads(str(mod.attrs[SITES]))
    site_masks.check([site["site"] for site in sites])
    return Report(str(target), tuple(sites))


def _generate_code(mod: tvm.IRModule, target):
    """Machine code and bytecode of a fully lowered module."""
    is_cuda = target.kind.name == "cuda"
    with target, tvm.transform.PassContext(config={"relax.backend.use_cuda_graph": False}):
        return relax.build(mod, target, relax_pipeline=None, tir_pipeline=tir_pipeline_name if is_cuda else "default")
