"""Perplexity by llama.cpp's rules and divergence from another model, in float64, as JSON."""

import argparse
import json
import os

import numpy as np

from model import Model
from vocabulary import Vocabulary


def log_softmax(logits):
    logits = logits - logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def chunks(vocabulary, text, n_ctx):
    """Whole chunks of `n_ctx` ids, the first id of each replaced by BOS where the model has one."""
    ids = vocabulary.encode(text)
    for start in range(0, len(ids) - n_ctx + 1, n_ctx):
        chunk = ids[start : start + n_ctx]
        if vocabulary.bos is not None:
            chunk[0] = vocabulary.bos
        yield chunk


def predictions(model, chunk):
    """Log-probabilities behind the tokens of the second half, all but the last, and what came."""
    first = len(chunk) // 2
    logits = model.forward(chunk, model.new_cache())[first:-1]
    return log_softmax(logits), np.array(chunk[first + 1 :])


def mean_and_error(values):
    return float(np.mean(values)), float(np.std(values) / np.sqrt(len(values) - 1))


def measure(path, text, n_ctx, reference=None):
    model = Model(path)
    vocabulary = Vocabulary(model.fields)
    base = Model(reference) if reference else None
    nll, running, kl, same = np.zeros(0), [], np.zeros(0), np.zeros(0)
    for chunk in chunks(vocabulary, text, n_ctx):
        q, came = predictions(model, chunk)
        nll = np.append(nll, -q[np.arange(len(came)), came])
        running.append(float(np.exp(nll.mean())))
        if base:
            p, _ = predictions(base, chunk)
            kl = np.append(kl, (np.exp(p) * (p - q)).sum(-1))
            same = np.append(same, p.argmax(-1) == q.argmax(-1))
    mean, error = mean_and_error(nll)
    found = {
        "file": os.path.basename(path),
        "n_ctx": n_ctx,
        "n_scored": len(nll),
        "running": running,
        "ppl": float(np.exp(mean)),
        "ppl_error": float(np.exp(mean) * error),
    }
    if base:
        found["reference"] = os.path.basename(reference)
        found["kl_mean"], found["kl_error"] = mean_and_error(kl)
        found["kl_max"] = float(kl.max())
        found["same_top"] = float(same.mean())
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("text")
    parser.add_argument("-c", "--context", type=int, default=512)
    parser.add_argument("--kl", metavar="MODEL")
    args = parser.parse_args()
    with open(args.text, encoding="ascii") as file:
        text = file.read()
    print(json.dumps(measure(args.model, text, args.context, args.kl), indent=1))


if __name__ == "__main__":
    main()
