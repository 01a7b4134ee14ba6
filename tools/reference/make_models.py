"""Writes small synthetic models, one per architecture, feature and weight type, each with its
reference results. The same bytes every time: all randomness is SHAKE-256 of names.
"""

import argparse
import hashlib
import math
import os

import gguf
import numpy as np

import blocks
from reference import dump, report
from vocabulary import ALPHABET, CONTROL, NORMAL

PROMPTS = ["the cat and the hat in the other", "A whale! 12 of them, here."]
GREEDY_TOKENS = 24
MERGES = ["t h", "th e", "Ġ the", "a n", "an d", "i n", "Ġ in", "e r", "h e", "r e", "o n", "a t"]
# What a type's rows fall back to where their length is no multiple of 256, as in real files.
FALLBACK = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
FALLBACK |= {name: "IQ4_NL" for name in ("Q2_K", "Q3_K", "IQ4_XS")}


class Random:
    """Bytes and numbers that depend on a name alone."""

    def __init__(self, *names):
        self.seed = "/".join(names).encode()
        self.drawn = 0

    def bytes(self, n):
        self.drawn += 1
        seed = self.seed + self.drawn.to_bytes(4, "little")
        return np.frombuffer(hashlib.shake_256(seed).digest(n), np.uint8)

    def uniform(self, n, low, high):
        words = self.bytes(4 * n).view("<u4").astype(np.float64)
        return low + (high - low) * words / 2**32

    def normal(self, n):
        """Nearly: a sum of uniform numbers."""
        return self.uniform(6 * n, -1, 1).reshape(6, n).sum(0) / math.sqrt(2)


def random_rows(random, type_name, n_out, n_in, deviation):
    """Blocks of random quants under scales that give weights of mean 0 and about `deviation`."""
    type_id = blocks.IDS[type_name]
    _, elems, size = blocks.TYPES[type_id]
    n = n_out * n_in // elems
    if type_name in ("F32", "F16", "BF16"):
        values = (random.normal(n) * deviation).astype("<f4")
        if type_name == "F16":
            values = values.astype("<f2")
        data = values.view(np.uint8).reshape(n, -1)
        return (data[:, 2:] if type_name == "BF16" else data).reshape(n_out, -1)
    data = random.bytes(n * size).reshape(n, size).copy()
    # Deviation of a uniform quant of that many bits, and of a uniform 6-bit or 8-bit scale.
    bits = {"Q2": 2, "Q3": 3, "IQ": 4, "Q4": 4, "Q5": 5, "Q6": 6, "Q8": 8}[type_name[:2]]
    unit = deviation / (2**bits / math.sqrt(12))

    def put(at, values):
        data[:, at : at + 2] = values.astype("<f2").view(np.uint8).reshape(n, 2)

    jitter = random.uniform(n, 0.7, 1.3)
    if type_name == "Q6_K":
        put(208, unit / 73 * jitter)
    elif type_name in ("Q4_K", "Q5_K"):
        scale = unit / 37 * jitter
        put(0, scale)
        # The minimum of a group is about half its largest quant times its scale.
        data[:, 8:12] = data[:, 4:8]
        data[:, 12:16] = (data[:, 12:16] & 15) * 17
        put(2, scale * (2**bits - 1) / 2)
    elif type_name == "Q2_K":
        scale = unit / 8.8 * jitter
        data[:, :16] = (data[:, :16] & 15) * 17
        put(80, scale)
        put(82, scale * (2**bits - 1) / 2)
    elif type_name == "Q3_K":
        put(108, unit / 18.5 * jitter)
    elif type_name in ("IQ4_NL", "IQ4_XS"):
        # The table's values are about 15 times as far apart as quants.
        put(0, unit / 15 * jitter / (18.5 if type_name == "IQ4_XS" else 1))
    else:
        put(0, unit * jitter)
        if type_name in ("Q4_1", "Q5_1"):
            put(2, -unit * jitter * (2**bits - 1) / 2)
    return data.reshape(n_out, -1)


class Writer:
    def __init__(self, path, name, arch, type_name):
        self.name, self.arch, self.type_name = name, arch, type_name
        self.gguf = gguf.GGUFWriter(path, arch)
        self.gguf.add_name(name)

    def key(self, name, value):
        add = self.gguf.add_float32 if isinstance(value, float) else self.gguf.add_uint32
        if isinstance(value, str):
            add = self.gguf.add_string
        add(f"{self.arch}.{name}", value)

    def vector(self, name, n, around=1.0, spread=0.3):
        values = around + spread * Random(self.name, name).normal(n)
        self.gguf.add_tensor(name, values.astype(np.float32))

    def values(self, name, values):
        self.gguf.add_tensor(name, np.asarray(values, np.float32))

    def matrix(self, name, n_out, n_in, gain=1.0):
        """Scaled so that the output is about `gain` times as large as the input."""
        type_name = self.type_name
        if n_in % 256 and type_name in FALLBACK:
            type_name = FALLBACK[type_name]
        random = Random(self.name, name)
        rows = random_rows(random, type_name, n_out, n_in, gain / math.sqrt(n_in))
        type_id = gguf.GGMLQuantizationType(blocks.IDS[type_name])
        if type_name in ("F32", "F16"):
            rows = rows.view("<f4" if type_name == "F32" else "<f2")
            self.gguf.add_tensor(name, rows)
        else:
            self.gguf.add_tensor(name, rows, raw_dtype=type_id)

    def tokenizer(self):
        """Byte-level BPE with a few merges; the last token ends a text."""
        tokens = list(ALPHABET.values()) + [merge.replace(" ", "") for merge in MERGES]
        types = [NORMAL] * len(tokens)
        tokens.append("<|end|>")
        types.append(CONTROL)
        self.gguf.add_tokenizer_model("gpt2")
        self.gguf.add_tokenizer_pre("gpt-2")
        self.gguf.add_token_list(tokens)
        self.gguf.add_token_types(types)
        self.gguf.add_token_merges(MERGES)
        self.gguf.add_bos_token_id(len(tokens) - 1)
        self.gguf.add_eos_token_id(len(tokens) - 1)
        self.gguf.add_add_bos_token(False)
        return len(tokens)

    def finish(self):
        self.gguf.write_header_to_file()
        self.gguf.write_kv_data_to_file()
        self.gguf.write_tensors_to_file()
        self.gguf.close()


def write_model(path, name, arch="llama", type_name="Q8_0", n_layer=2, n_embd=64, n_head=2, n_kv=1,
                head_dim=32, n_ff=96, tied=True, keys=(), factors=()):
    out = Writer(path, name, arch, type_name)
    q, kv = n_head * head_dim, n_kv * head_dim
    gemma, fused = arch == "gemma3", arch == "phi3"
    dims = {
        "block_count": n_layer,
        "context_length": 128,
        "embedding_length": n_embd,
        "feed_forward_length": n_ff,
        "attention.head_count": n_head,
        "attention.head_count_kv": n_kv,
        "attention.layer_norm_rms_epsilon": 1e-6 if gemma or arch.startswith("qwen") else 1e-5,
        "rope.freq_base": 1e6 if gemma else 10000.0,
    }
    if head_dim != n_embd // n_head:
        dims |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    for key, value in (dims | dict(keys)).items():
        out.key(key, value)
    n_vocab = out.tokenizer()
    # Logits then differ by about 3, with clear winners. Gemma's embeddings, scaled up by the root
    # of their length, would drown what the layers add.
    out.matrix("token_embd.weight", n_vocab, n_embd, gain=1.5 if gemma else 3.0)
    if not tied:
        out.matrix("output.weight", n_vocab, n_embd, gain=3.0)
    out.vector("output_norm.weight", n_embd)
    for factor_name, values in factors:
        out.values(factor_name, values)
    for index in range(n_layer):
        own = lambda part: f"blk.{index}.{part}"
        out.vector(own("attn_norm.weight"), n_embd)
        if fused:
            out.matrix(own("attn_qkv.weight"), q + 2 * kv, n_embd)
        else:
            for part, rows in (("q", q), ("k", kv), ("v", kv)):
                out.matrix(own(f"attn_{part}.weight"), rows, n_embd)
                if arch == "qwen2":
                    out.vector(own(f"attn_{part}.bias"), rows, around=0.0, spread=0.5)
        if arch in ("qwen3", "gemma3"):
            for part in "qk":
                out.vector(own(f"attn_{part}_norm.weight"), head_dim)
        out.matrix(own("attn_output.weight"), n_embd, q)
        if gemma:
            out.vector(own("post_attention_norm.weight"), n_embd, around=2.0)
        out.vector(own("ffn_norm.weight"), n_embd)
        if fused:
            out.matrix(own("ffn_up.weight"), 2 * n_ff, n_embd, gain=1.5)
        else:
            out.matrix(own("ffn_gate.weight"), n_ff, n_embd, gain=1.5)
            out.matrix(own("ffn_up.weight"), n_ff, n_embd, gain=1.5)
        out.matrix(own("ffn_down.weight"), n_embd, n_ff)
        if gemma:
            out.vector(own("post_ffw_norm.weight"), n_embd, around=2.0)
    out.finish()


def ramp(n, low, high):
    """Rope factors from `low` for the fastest pair to `high` for the slowest."""
    return [low * (high / low) ** (i / (n - 1)) for i in range(n)]


def models():
    """Name and dimensions of every model."""
    for type_name, (_, elems, _) in sorted((t[0], t) for t in blocks.TYPES.values()):
        name = f"llama-{type_name.lower()}"
        if elems == 256:
            # Rows of 256 are of the type, shorter ones of what real files fall back to.
            yield name, dict(type_name=type_name, n_embd=256, n_head=1, n_ff=32)
        elif elems == 1:
            yield name, dict(type_name=type_name, n_embd=32, n_ff=64)
        else:
            yield name, dict(type_name=type_name)
    small = dict(type_name="Q4_1")
    yield "llama-rope-freqs", small | dict(factors=[("rope_freqs.weight", ramp(16, 1.0, 8.0))])
    scaled = lambda kind, factor: {"rope.scaling.type": kind, "rope.scaling.factor": factor}
    yield "llama-linear", small | dict(keys=scaled("linear", 4.0))
    yarn = scaled("yarn", 4.0) | {"rope.scaling.original_context_length": 32}
    yield "llama-yarn", small | dict(keys=yarn)
    yield "llama-partial-rope", small | dict(keys={"rope.dimension_count": 16})
    yield "qwen2-tied", small | dict(arch="qwen2", n_head=4, n_kv=2, head_dim=16)
    yield "qwen2-untied", small | dict(arch="qwen2", tied=False)
    yield "qwen3", small | dict(arch="qwen3", n_head=4, n_kv=2)
    window = {"attention.sliding_window": 8}
    gemma = small | dict(arch="gemma3", n_layer=7, n_ff=32)
    yield "gemma3", gemma | dict(keys=window)
    stretched = window | scaled("linear", 8.0) | {"attention.sliding_window_pattern": 2}
    yield "gemma3-linear", gemma | dict(n_layer=3, n_head=4, n_kv=2, keys=stretched)
    yield "phi3", small | dict(arch="phi3", n_head=2, n_kv=2, tied=False)
    long = window | {"rope.scaling.original_context_length": 64, "rope.scaling.attn_factor": 1.1}
    short_and_long = [
        ("rope_factors_long.weight", ramp(16, 1.1, 6.0)),
        ("rope_factors_short.weight", ramp(16, 1.0, 1.5)),
    ]
    yield "phi3-longrope", small | dict(arch="phi3", keys=long, factors=short_and_long)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("names", nargs="*", help="only these")
    args = parser.parse_args()
    os.makedirs(args.folder, exist_ok=True)
    total = 0
    for name, dims in models():
        if args.names and name not in args.names:
            continue
        path = os.path.join(args.folder, f"{name}.gguf")
        write_model(path, name, **dims)
        gold = report(path, PROMPTS, GREEDY_TOKENS)
        with open(os.path.join(args.folder, f"{name}.json"), "w", encoding="utf-8") as file:
            file.write(dump(gold))
        size = os.path.getsize(path)
        total += size
        margins = [margin for c in gold["cases"] for margin in c["greedy_margin"]]
        spread = gold["cases"][0]["logits_l2"] / math.sqrt(269)
        distinct = len({id for c in gold["cases"] for id in c["greedy"]})
        print(f"{name:20} {size:7} bytes, logits {spread:.2f}, smallest margin {min(margins):.4f}, "
              f"{distinct} distinct tokens")
    print(f"{total} bytes in all")


if __name__ == "__main__":
    main()
