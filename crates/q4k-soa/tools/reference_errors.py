#!/usr/bin/env python3
"""Writes tests/data/ggml_errors.csv and tests/data/ggml_dequantised.csv from ggml itself.

    npm pack @node-llama-cpp/linux-x64 && tar xf node-llama-cpp-linux-x64-*.tgz
    pip install numpy
    python3 tools/reference_errors.py package/bins/linux-x64/libggml-base.so

ggml_errors.csv: relative RMS error, sqrt(sum (w - x)^2 / sum x^2), that ggml's quantiser leaves on
the rows that `rows` makes. ggml_dequantised.csv: FNV-1a of the floats (little-endian) that ggml
makes of the blocks that `blocks` makes, and the first four of them. tests/common/mod.rs makes the
same rows and blocks.
"""

import ctypes
import math
import pathlib
import sys

import numpy as np

N_ROWS, N_IN = 32, 1024

# name: ggml id, elements, bytes, offsets of the high bytes of the halves (or of the floats)
TYPES = {
    "F32": (0, 1, 4, [3]),
    "F16": (1, 1, 2, [1]),
    "BF16": (30, 1, 2, [1]),
    "Q4_0": (2, 32, 18, [1]),
    "Q4_1": (3, 32, 20, [1, 3]),
    "Q5_0": (6, 32, 22, [1]),
    "Q5_1": (7, 32, 24, [1, 3]),
    "Q8_0": (8, 32, 34, [1]),
    "Q4_K": (12, 256, 144, [1, 3]),
    "Q5_K": (13, 256, 176, [1, 3]),
    "Q6_K": (14, 256, 210, [209]),
}


class Random:
    """Knuth's 64-bit linear congruential generator; the upper bits are used."""

    def __init__(self, seed):
        self.state = seed

    def next(self):
        self.state = (self.state * 6364136223846793005 + 1442695040888963407) % 2**64
        return self.state

    def uniform(self):
        return (self.next() >> 11) * 2.0**-53

    def byte(self):
        return self.next() >> 56

    def gaussian(self):
        radius = math.sqrt(-2.0 * math.log(1.0 - self.uniform()))
        return radius * math.cos(2.0 * math.pi * self.uniform())

    def student_t3(self):
        """Heavy tails: Student's t with three degrees of freedom."""
        numerator = self.gaussian()
        squares = sum(self.gaussian() ** 2 for _ in range(3))
        return numerator / math.sqrt(squares / 3.0)


def rows(distribution):
    random = Random(1)
    draw = getattr(random, distribution)
    values = [0.02 * draw() for _ in range(N_ROWS * N_IN)]
    return np.array(values, dtype=np.float64).astype(np.float32)


def blocks(name):
    """Random bytes for 1024 weights, the exponents of all halves and floats kept below 1."""
    _, elems, n_bytes, high_bytes = TYPES[name]
    random = Random(2)
    data = bytearray(random.byte() for _ in range(1024 // elems * n_bytes))
    for start in range(0, len(data), n_bytes):
        for offset in high_bytes:
            data[start + offset] &= 0xBF
    return bytes(data)


def fnv1a(data):
    state = 0xCBF29CE484222325
    for byte in data:
        state = (state ^ byte) * 0x100000001B3 % 2**64
    return state


class Ggml:
    def __init__(self, path):
        self.library = ctypes.CDLL(path)
        self.library.ggml_quantize_chunk.restype = ctypes.c_size_t

    def dequantize(self, name, data, n):
        if name == "F32":
            return np.frombuffer(data, dtype="<f4")
        functions = {"F16": "ggml_fp16_to_fp32_row", "BF16": "ggml_bf16_to_fp32_row"}
        function = functions.get(name, f"dequantize_row_{name[0].lower()}{name[1:]}")
        out = np.zeros(n, dtype=np.float32)
        out_pointer = out.ctypes.data_as(ctypes.c_void_p)
        getattr(self.library, function)(data, out_pointer, ctypes.c_int64(n))
        return out

    def quantize(self, name, values):
        ggml_id, elems, n_bytes, _ = TYPES[name]
        out = ctypes.create_string_buffer(values.size // elems * n_bytes)
        written = self.library.ggml_quantize_chunk(
            ctypes.c_int(ggml_id),
            values.ctypes.data_as(ctypes.c_void_p),
            out,
            ctypes.c_int64(0),
            ctypes.c_int64(N_ROWS),
            ctypes.c_int64(N_IN),
            None,
        )
        assert written == len(out), (name, written, len(out))
        return out.raw


def main():
    ggml = Ggml(sys.argv[1])
    folder = pathlib.Path(__file__).parent.parent / "tests" / "data"

    with open(folder / "ggml_errors.csv", "w") as file:
        print("# made by tools/reference_errors.py", file=file)
        print("type,distribution,relative_rms_error", file=file)
        for distribution in ["gaussian", "student_t3"]:
            values = rows(distribution)
            for name in TYPES:
                if name == "F32":
                    continue
                weights = ggml.dequantize(name, ggml.quantize(name, values), values.size)
                exact = values.astype(np.float64)
                error = np.sqrt(((weights - exact) ** 2).sum() / (exact**2).sum())
                print(f"{name},{distribution},{error:.9f}", file=file)

    with open(folder / "ggml_dequantised.csv", "w") as file:
        print("# made by tools/reference_errors.py", file=file)
        print("type,fnv1a_of_1024_weights,weight_0,weight_1,weight_2,weight_3", file=file)
        for name in TYPES:
            weights = ggml.dequantize(name, blocks(name), 1024)
            first = ",".join(f"{weight:.9g}" for weight in weights[:4])
            print(f"{name},{fnv1a(weights.astype('<f4').tobytes()):016x},{first}", file=file)


if __name__ == "__main__":
    main()
