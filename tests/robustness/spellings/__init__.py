"""Random small PyTorch modules, spelled as an adversary and as a new user would, against PyTorch in float64.

    python -m tests.robustness.spellings --seed 1 --programs 1000 --jobs 4

`generate` composes programs from the templates of its neighbours, `program` makes source code of them, `check` builds,
runs and compares one, `pool` does so in processes that may crash, `shrink` makes what fails small.
"""
