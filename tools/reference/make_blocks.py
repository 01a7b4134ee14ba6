"""Writes blocks of the types that are transcoded, and their weights as gguf dequantises them."""

import argparse

import gguf
import numpy as np

import blocks
from make_models import Random

# The bytes that hold the exponents of a block's halves.
TYPES = {"Q2_K": (81, 83), "Q3_K": (109,), "IQ4_NL": (1,), "IQ4_XS": (1,)}
N_WEIGHTS = 512


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("csv", help="crates/q4k-soa/tests/data/gguf_transcoded.csv")
    args = parser.parse_args()
    with open(args.csv, "w", encoding="utf-8") as file:
        file.write("# made by tools/reference/make_blocks.py\ntype,blocks,weights\n")
        for name, exponents in TYPES.items():
            type_id = blocks.IDS[name]
            _, elems, size = blocks.TYPES[type_id]
            data = Random("blocks", name).bytes(N_WEIGHTS // elems * size).reshape(-1, size).copy()
            data[:, exponents] &= 0xBF  # finite, and no larger than 2
            kind = gguf.GGMLQuantizationType(type_id)
            weights = gguf.quants.dequantize(data.reshape(-1), kind).reshape(-1)
            assert weights.dtype == np.float32 and np.isfinite(weights).all()
            values = " ".join(f"{weight:.9g}" for weight in weights)
            file.write(f"{name},{data.tobytes().hex()},{values}\n")


if __name__ == "__main__":
    main()
