"""Checks the reference program: its dequantisation against gguf's, its results against gold."""

import argparse
import json

import gguf
import numpy as np

import blocks
from model import Model
from reference import case
from vocabulary import Vocabulary


def check_blocks():
    """gguf computes in float32, so equal up to its rounding."""
    rng = np.random.default_rng(1)
    for type_id, (name, elems, size) in blocks.TYPES.items():
        data = rng.integers(0, 256, (256, size), np.uint8)
        with np.errstate(all="ignore"):  # some scales are infinite or no numbers
            ours = blocks.dequantize(type_id, data, elems)
            theirs = gguf.quants.dequantize(data.reshape(-1), gguf.GGMLQuantizationType(type_id))
            theirs = theirs.reshape(ours.shape).astype(np.float64)
            scale = np.abs(ours).max(-1, keepdims=True)
            good = np.isfinite(ours) & np.isfinite(theirs) & np.isfinite(scale)
            error = (np.abs(ours - theirs) / scale.clip(1e-30))[good]
        assert good.mean() > 0.8, (name, good.mean())
        assert error.max() < 4e-7, (name, error.max())
        print(f"{name}: {good.sum()} weights, largest difference {error.max():.1e} of the block's")


def values(pairs):
    return [value for _, value in pairs]


def relative(a, b):
    return float(np.abs(np.subtract(a, b)).max() / np.abs(b).max())


def check_gold(gold, path, n_greedy, n_cases):
    model = Model(path)
    vocabulary = Vocabulary(model.fields)
    for wanted in gold["cases"][:n_cases]:
        n = len(wanted["greedy"]) if n_greedy is None else n_greedy
        found = case(model, wanted["ids"], n)
        errors = {
            "nll": relative(found["nll_mean"], wanted["nll_mean"]),
            "l2": relative(found["logits_l2"], wanted["logits_l2"]),
            "top": relative(values(found["top"]), values(wanted["top"])),
            "probe": relative(values(found["probe"]), values(wanted["probe"])),
        }
        assert max(errors.values()) < 1e-9, errors
        for part in ("top", "probe"):
            assert [i for i, _ in found[part]] == [i for i, _ in wanted[part]], part
        assert found["greedy"] == wanted["greedy"][:n]
        # Recorded margins are rounded to four decimals.
        assert np.allclose(found["greedy_margin"], wanted["greedy_margin"][:n], rtol=0, atol=1e-4)
        tokenized = vocabulary.encode(wanted["prompt"]) if wanted["prompt"].isascii() else None
        same = "same ids" if tokenized == wanted["ids"] else "other ids (not plain ASCII words)"
        print(repr(wanted["prompt"][:32]), same, {k: f"{v:.0e}" for k, v in errors.items()})


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("gold", nargs="?")
    parser.add_argument("model", nargs="?")
    parser.add_argument("-n", "--greedy", type=int)
    parser.add_argument("--cases", type=int)
    args = parser.parse_args()
    check_blocks()
    if args.gold:
        with open(args.gold, encoding="utf-8") as file:
            check_gold(json.load(file), args.model, args.greedy, args.cases)


if __name__ == "__main__":
    main()
