"""Generate the CUDA of every case, compare it with the manifest, and note there what it was generated from.

usage: python tests/gpu/check_sources.py      needs no GPU and no nvcc; exit status 1 if a source differs

While the kernels' Python and the cases are what was noted, the tests generate one case of each configuration only.
"""

import json
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parent)]

import all_cases  # noqa: E402
from attention_cases import source_hash  # noqa: E402
from sources import distinct, fingerprint, source_of  # noqa: E402

MANIFEST = Path(__file__).with_name("verified.json")
CASES = distinct(all_cases.CASES)


def hash_of(index: int) -> str:
    return source_hash(source_of(CASES[index]))  # by number: the modules that cases name do not go to other processes


def main() -> int:
    manifest = json.loads(MANIFEST.read_text())
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        hashes = []
        for found in pool.map(hash_of, range(len(CASES)), chunksize=8):
            hashes.append(found)
            if len(hashes) % 200 == 0:
                print(f"{len(hashes)} of {len(CASES)}", flush=True)
        known = [manifest["cases"].get(c.label, {}).get("source") for c in CASES]
        other = [c.label for c, found, source in zip(CASES, hashes, known) if source and found != source]
    missing = [c.label for c, source in zip(CASES, known) if not source]
    print(f"{len(other)} of {len(CASES)} sources differ from what was verified", *other, sep="\n")
    print(f"{len(missing)} were never verified", *missing, sep="\n")
    if not other and not missing:
        MANIFEST.write_text(json.dumps({**manifest, "generated_from": fingerprint()}, indent=1) + "\n")
    return bool(other or missing)


if __name__ == "__main__":
    sys.exit(main())
