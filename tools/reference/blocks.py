"""Weights of GGUF blocks as float64, from the documented layouts.

Every product here has at most 11 + 8 + 6 significant bits, so float64 holds it exactly, and so
does the sum of a scaled quant and a minimum.
"""

import numpy as np

# GGUF type id: name, weights per block, bytes per block.
TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    30: ("BF16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    20: ("IQ4_NL", 32, 18),
    23: ("IQ4_XS", 256, 136),
}
IDS = {name: type_id for type_id, (name, _, _) in TYPES.items()}


def row_bytes(type_id, n_in):
    _, elems, size = TYPES[type_id]
    assert n_in % elems == 0, (type_id, n_in)
    return n_in // elems * size


def dequantize(type_id, data, n_in):
    """Float64 `[rows, n_in]` from the bytes of whole rows."""
    name, _, size = TYPES[type_id]
    blocks = np.frombuffer(data, np.uint8).reshape(-1, size)
    return _FORMATS[name](blocks).reshape(-1, n_in)


def _half(blocks, at):
    """The f16 at byte `at` of every block, as a column."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float64)


def _nibbles(quants):
    """Low nibbles of all bytes, then high nibbles."""
    return np.concatenate([quants & 15, quants >> 4], axis=-1).astype(np.float64)


def _fifth_bits(blocks, at):
    """32 bits of a little-endian u32 as 0 or 16."""
    word = np.ascontiguousarray(blocks[:, at : at + 4]).view("<u4")
    return ((word >> np.arange(32, dtype=np.uint32)) & 1).astype(np.float64) * 16


def _f32(blocks):
    return np.ascontiguousarray(blocks).view("<f4").astype(np.float64)


def _f16(blocks):
    return np.ascontiguousarray(blocks).view("<f2").astype(np.float64)


def _bf16(blocks):
    word = np.ascontiguousarray(blocks).view("<u2").astype(np.uint32) << 16
    return word.view(np.float32).astype(np.float64)


def _q4_0(blocks):
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]) - 8)


def _q4_1(blocks):
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]) + _half(blocks, 2)


def _q5_0(blocks):
    return _half(blocks, 0) * (_nibbles(blocks[:, 6:]) + _fifth_bits(blocks, 2) - 16)


def _q5_1(blocks):
    quants = _nibbles(blocks[:, 8:]) + _fifth_bits(blocks, 4)
    return _half(blocks, 0) * quants + _half(blocks, 2)


def _q8_0(blocks):
    return _half(blocks, 0) * np.ascontiguousarray(blocks[:, 2:]).view(np.int8)


def _scales_and_mins(packed):
    """Eight 6-bit scales and eight 6-bit mins from 12 bytes."""
    s = packed.astype(np.int64)
    first, second, third = s[:, 0:4], s[:, 4:8], s[:, 8:12]
    scales = np.concatenate([first & 63, (third & 15) | (first >> 6) << 4], axis=1)
    mins = np.concatenate([second & 63, (third >> 4) | (second >> 6) << 4], axis=1)
    return scales.astype(np.float64), mins.astype(np.float64)


def _k_groups(blocks, quants):
    """`d · scale · q − dmin · min` for quants `[blocks, 8 groups, 32]`."""
    scales, mins = _scales_and_mins(blocks[:, 4:16])
    scales = _half(blocks, 0) * scales
    mins = _half(blocks, 2) * mins
    return scales[:, :, None] * quants - mins[:, :, None]


def _k_nibbles(quants):
    """`[blocks, 8 groups, 32]`: 32 bytes hold one group in low nibbles, the next in high ones."""
    pairs = quants.reshape(-1, 4, 1, 32)
    return np.concatenate([pairs & 15, pairs >> 4], axis=2).reshape(-1, 8, 32)


def _q4_k(blocks):
    return _k_groups(blocks, _k_nibbles(blocks[:, 16:]).astype(np.float64))


def _q5_k(blocks):
    # Bit g of byte i is the fifth bit of weight i of group g.
    high = blocks[:, 16:48].reshape(-1, 1, 32) >> np.arange(8, dtype=np.uint8).reshape(1, 8, 1)
    quants = _k_nibbles(blocks[:, 48:]) + ((high & 1) << 4)
    return _k_groups(blocks, quants.astype(np.float64))


def _q6_k(blocks):
    low, high = blocks[:, :128], blocks[:, 128:192]
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float64)
    halves = []
    for half in range(2):  # 128 weights each: 64 bytes of low bits, 32 of high ones
        ql, qh = low[:, 64 * half : 64 * half + 64], high[:, 32 * half : 32 * half + 32]
        quarters = [ql[:, :32] & 15, ql[:, 32:] & 15, ql[:, :32] >> 4, ql[:, 32:] >> 4]
        halves += [q | (qh >> 2 * i & 3) << 4 for i, q in enumerate(quarters)]
    quants = np.concatenate(halves, axis=1).astype(np.float64) - 32
    return _half(blocks, 208) * np.repeat(scales, 16, axis=1) * quants


def _crumbs(quants):
    """`[blocks, 256]`: byte i of 32 holds weights i, 32 + i, 64 + i, 96 + i from bit 0 up."""
    pairs = quants.reshape(-1, 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8).reshape(1, 1, 4, 1)
    return (pairs & 3).reshape(-1, 256)


def _q2_k(blocks):
    scales, mins = blocks[:, :16] & 15, blocks[:, :16] >> 4
    scales = np.repeat(_half(blocks, 80) * scales, 16, axis=1)
    mins = np.repeat(_half(blocks, 82) * mins, 16, axis=1)
    return scales * _crumbs(blocks[:, 16:80]) - mins


def _q3_k(blocks):
    bits = blocks[:, :32].reshape(-1, 1, 32) >> np.arange(8, dtype=np.uint8).reshape(1, 8, 1)
    quants = _crumbs(blocks[:, 32:96]).astype(np.float64) + 4 * (bits & 1).reshape(-1, 256) - 4
    low, high = blocks[:, 96:104], blocks[:, 104:108]
    low = np.concatenate([low & 15, low >> 4], axis=1)
    high = np.concatenate([high >> shift & 3 for shift in (0, 2, 4, 6)], axis=1)
    scales = (low | high << 4).astype(np.float64) - 32
    return np.repeat(_half(blocks, 108) * scales, 16, axis=1) * quants


_IQ4 = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float64
)


def _iq4_nl(blocks):
    return _half(blocks, 0) * _IQ4[_nibbles(blocks[:, 2:]).astype(int)]


def _iq4_xs(blocks):
    high = np.ascontiguousarray(blocks[:, 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16)
    low = np.stack([blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4], axis=2).reshape(-1, 8)
    scales = _half(blocks, 0) * ((low | (high & 3) << 4).astype(np.float64) - 32)
    values = _IQ4[_nibbles(blocks[:, 8:].reshape(-1, 8, 16)).astype(int)]
    return (scales[:, :, None] * values).reshape(-1, 256)


_FORMATS = {
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
}
