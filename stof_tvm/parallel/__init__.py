"""Several processes, one a GPU or CPU, that share the work of an attention or a model."""

from stof_tvm.parallel.context.plan import ContextPlan, context_plan

__all__ = ["ContextPlan", "context_plan"]
