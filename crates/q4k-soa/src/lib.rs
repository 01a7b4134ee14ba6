//! GGUF quantised blocks to and from structure-of-arrays planes, with fingerprints and reference arithmetic.
