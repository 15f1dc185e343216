"""What is measured: models of equal layers, prompts and single tokens."""

from dataclasses import dataclass, replace

LLAMA, BERT = "llama-like", "bert-like"


@dataclass(frozen=True)
class Case:
    """A call of a model.

    Attributes
    ----------
    name : str
        How the case is asked for.
    model : str
        LLAMA or BERT.
    batch, q_len : int
        Shape of the ids.
    cache : int
        Length of a cache of keys and values that one token is computed with; 0 for a prompt.
    window : int
        Tokens on each side that a row of a BERT keeps; 0 for a causal mask.
    layers, dim, heads, kv_heads, hidden, vocabulary : int
        Sizes of the model; `hidden` is the width of its MLPs.
    dtype : str
    """

    name: str
    model: str = LLAMA
    batch: int = 1
    q_len: int = 2048
    cache: int = 0
    window: int = 0
    layers: int = 32
    dim: int = 4096
    heads: int = 32
    kv_heads: int = 32
    hidden: int = 11008
    vocabulary: int = 32000
    dtype: str = "float16"

    @property
    def tiny(self) -> "Case":
        """A case of the same kind for the CPU."""
        sizes = {"dim": 64, "heads": 4, "kv_heads": 4, "hidden": 128, "vocabulary": 100, "dtype": "float32"}
        length = self.q_len if self.cache else 32
        small = {"q_len": length, "cache": min(self.cache, 16), "window": min(self.window, 4), "layers": 1}
        return replace(self, **sizes, **small, batch=min(self.batch, 2))

    @property
    def sizes(self) -> str:
        """The model in a few words."""
        return f"{self.model}, {self.layers} layers {self.dim} wide"

    @property
    def call(self) -> str:
        """The call in a few words."""
        return f"a token, cache of {self.cache}" if self.cache else f"{self.batch} × {self.q_len} tokens"


CASES = (
    Case("1x2048"),
    Case("8x2048", batch=8),
    Case("decode", q_len=1, cache=2048),
    Case("bert", BERT, batch=8, window=64, layers=24, dim=1024, heads=16, kv_heads=16, hidden=4096, vocabulary=30522),
)
