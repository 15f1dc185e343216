import pytest

from stof_tvm.tuning.measuring import builder


@pytest.fixture(autouse=True)
def eager_compilers(monkeypatch):
    """Beside other tests, what compiles with less priority would get next to no time."""
    monkeypatch.setattr(builder, "NICENESS", 0)
