"""Text from causal language models of transformers: `stof_tvm.generate`.

    tokens = stof_tvm.generate(model, ids, max_new_tokens=64)

    generator = stof_tvm.generation.engines(model, max_length=2048, prompt=[256, 1024])
    tokens = generator.generate(ids, max_new_tokens=64, streamer=TextStreamer(tokenizer))

A prompt is one call of sparse kernels; then an engine computes token after token, with its cache and its position on
the device.  How: docs/generation.md.
"""

from stof_tvm.running.needs_transformers import needs_transformers

with needs_transformers("stof_tvm.generation"):
    import transformers  # noqa: F401

from stof_tvm.generation.building import engines
from stof_tvm.generation.entry import generate
from stof_tvm.generation.generator import Generator, Sizes

__all__ = ["Generator", "Sizes", "engines", "generate"]
