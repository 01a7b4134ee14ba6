"""Token ids of short ASCII prompts, and the bytes of tokens: no more than the reference needs."""

import re

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)


def _alphabet():
    """GPT-2's printable character for each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {**{byte: chr(byte) for byte in plain},
            **{byte: chr(256 + i) for i, byte in enumerate(others)}}


ALPHABET = _alphabet()
BYTES = {char: byte for byte, char in ALPHABET.items()}
# GPT-2's split of ASCII text.
PIECES = re.compile(r"'(?:[sdmt]|ll|ve|re)| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+")


class Vocabulary:
    def __init__(self, fields):
        get = lambda key, default=None: (
            fields[f"tokenizer.ggml.{key}"].contents() if f"tokenizer.ggml.{key}" in fields else default
        )
        self.sentencepiece = get("model") == "llama"
        self.tokens = get("tokens")
        self.types = get("token_type", [NORMAL] * len(self.tokens))
        self.scores = get("scores")
        self.ids = {token: i for i, token in enumerate(self.tokens)}
        self.ranks = {merge: i for i, merge in enumerate(get("merges", []))}
        self.bos = get("bos_token_id") if get("add_bos_token", self.sentencepiece) else None
        self.prefix = get("add_space_prefix", True)

    def encode(self, text):
        assert text.isascii()
        ids = self._sentencepiece(text) if self.sentencepiece else self._byte_level(text)
        return ids if self.bos is None else [self.bos, *ids]

    def _byte_level(self, text):
        ids = []
        for piece in PIECES.findall(text):
            parts = [ALPHABET[byte] for byte in piece.encode()]
            rank = lambda i: self.ranks.get(f"{parts[i]} {parts[i + 1]}", 1 << 30)
            while len(parts) > 1 and rank(i := min(range(len(parts) - 1), key=rank)) < 1 << 30:
                parts[i : i + 2] = [parts[i] + parts[i + 1]]
            ids += [self.ids[part] for part in parts]
        return ids

    def _sentencepiece(self, text):
        parts = list((" " + text if self.prefix else text).replace(" ", "\u2581"))
        while True:
            pairs = [(self.scores[self.ids[a + b]], -i) for i, (a, b) in
                     enumerate(zip(parts, parts[1:])) if a + b in self.ids]
            if not pairs:
                break
            i = -max(pairs)[1]
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        byte = lambda part: [self.ids[f"<0x{b:02X}>"] for b in part.encode()]
        return [i for part in parts for i in ([self.ids[part]] if part in self.ids else byte(part))]

    def decode(self, ids):
        out = b""
        for i in ids:
            token, kind = self.tokens[i], self.types[i]
            if kind == CONTROL:
                continue
            if kind == BYTE:
                out += bytes([int(token[3:5], 16)])
            elif self.sentencepiece or kind == USER:
                out += token.replace("\u2581", " ").encode()
            else:
                out += bytes(BYTES[char] for char in token)
        return out.decode(errors="replace")
