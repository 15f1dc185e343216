"""The scheme of a tuning log, found by the graph that it was tuned for."""

from types import SimpleNamespace

from relax_passes.fusion.operators import OperatorGraph
from relax_passes.fusion.schemes.fusion_scheme import FusionScheme
from relax_passes.fusion.schemes.initial_scheme import InitialScheme
from relax_passes.fusion.schemes.tuned_scheme import TunedScheme, graph_key
from relax_passes.fusion.template_choice import TemplateChooser
from relax_passes.tuned_choices import TunedChoices
from tests.relax_passes.fusion.modules import encoder_decoder, gated_mlp, post_norm_layer, pre_norm_mlp
from tir_kernels.target import parse_target

LLVM = parse_target("llvm")
DEFAULT = InitialScheme(TemplateChooser(LLVM, []))


class Log:
    """One scheme of one graph."""

    def __init__(self, key, scheme):
        self.key = key
        self.record = SimpleNamespace(scheme=scheme, us=1.0, gpu="here", date="2026-01-31")

    def scheme(self, key, gpu):
        return self.record if key == self.key else None


def graph_of(make):
    return OperatorGraph(make()["main"])


def test_keys_tell_graphs_apart_and_nothing_else():
    makes = (post_norm_layer, pre_norm_mlp, gated_mlp, encoder_decoder)
    keys = [graph_key(graph_of(make)) for make in makes]
    assert len(set(keys)) == len(makes)
    assert keys == [graph_key(graph_of(make)) for make in makes]


def test_the_log_s_scheme_is_taken():
    graph = graph_of(pre_norm_mlp)
    scheme = FusionScheme("01" * (len(graph.operators) // 2) + "0" * (len(graph.operators) % 2))
    tuned = TunedChoices(Log(graph_key(graph), scheme.hex), LLVM)
    assert TunedScheme(tuned, DEFAULT)(graph) == scheme != DEFAULT(graph)
    assert tuned.scheme_in_use.us == 1.0 and not tuned.notes


def test_another_graph_gets_the_default():
    graph = graph_of(pre_norm_mlp)
    tuned = TunedChoices(Log(graph_key(graph_of(gated_mlp)), "0x2"), LLVM)
    assert TunedScheme(tuned, DEFAULT)(graph) == DEFAULT(graph)
    assert tuned.scheme_in_use is None and not tuned.notes


def test_a_scheme_that_does_not_fit_is_skipped_with_a_note():
    graph = graph_of(pre_norm_mlp)
    for scheme in ("0x2", "nonsense"):
        tuned = TunedChoices(Log(graph_key(graph), scheme), LLVM)
        assert TunedScheme(tuned, DEFAULT)(graph) == DEFAULT(graph)
        (note,) = tuned.notes
        assert note.startswith(f"the fusion scheme {scheme} of 2026-01-31 no longer fits: ")
