"""Reference logits and greedy continuations of a GGUF model, in float64."""

import argparse
import hashlib
import json
import os

import numpy as np

from model import Model
from vocabulary import Vocabulary

NOTE = "float64 forward over exactly dequantised weights; greedy = argmax, no sampling"


def case(model, ids, n_greedy):
    """Everything about one prompt, given as ids."""
    cache = model.new_cache()
    logits = model.forward(ids, cache)
    peak = logits.max(-1, keepdims=True)
    log_sums = peak[:, 0] + np.log(np.exp(logits - peak).sum(-1))
    likelihoods = [logits[i, id] - log_sums[i] for i, id in enumerate(ids[1:])]
    last = logits[-1]
    top = np.argsort(-last, kind="stable")[:16]
    step = max(1, model.n_vocab // 64)
    found = {
        "nll_mean": float(-np.mean(likelihoods)) if likelihoods else None,
        "logits_l2": float(np.sqrt((last * last).sum())),
        "top": [[int(i), float(last[i])] for i in top],
        "probe": [[i, float(last[i])] for i in range(0, model.n_vocab, step)],
        "greedy": [],
        "greedy_margin": [],
    }
    for _ in range(n_greedy):
        second, first = np.argsort(last, kind="stable")[-2:]
        found["greedy"].append(int(first))
        found["greedy_margin"].append(float(last[first] - last[second]))
        if len(found["greedy"]) < n_greedy:
            last = model.forward([int(first)], cache, all_logits=False)[-1]
    return found


def report(path, prompts, n_greedy, context_tokens=None, note=NOTE):
    model = Model(path, context_tokens)
    vocabulary = Vocabulary(model.fields)
    cases = []
    for prompt in prompts:
        ids = vocabulary.encode(prompt)
        found = case(model, ids, n_greedy)
        text = vocabulary.decode(found["greedy"])
        cases.append({"prompt": prompt, "ids": ids, **found, "greedy_text": text})
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"file": os.path.basename(path), "sha256": digest, "note": note, "cases": cases}


def dump(value):
    """JSON with one line per part of a case."""
    lines = []
    for key, part in value.items():
        if key == "cases":
            cases = [
                "  {\n" + ",\n".join(f"   {json.dumps(k)}: {json.dumps(v)}" for k, v in c.items()) + "\n  }"
                for c in part
            ]
            lines.append(' "cases": [\n' + ",\n".join(cases) + "\n ]")
        else:
            lines.append(f" {json.dumps(key)}: {json.dumps(part)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("-p", "--prompt", action="append", required=True)
    parser.add_argument("-n", "--greedy", type=int, default=16)
    parser.add_argument("-c", "--context", type=int)
    args = parser.parse_args()
    print(dump(report(args.model, args.prompt, args.greedy, args.context)), end="")


if __name__ == "__main__":
    main()
