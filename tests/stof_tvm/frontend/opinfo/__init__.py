"""The importer against PyTorch on the samples that PyTorch ships for each of its operators (OpInfo), and on special
values: NaN, infinities, ties, negative and huge integers.  `python -m tests.stof_tvm.frontend.opinfo` runs all."""
