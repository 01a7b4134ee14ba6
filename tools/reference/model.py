"""Llama-family models in float64."""

import math

import gguf
import numpy as np

import blocks

# Where a file is silent.
EPS = {"llama": 1e-5, "qwen2": 1e-6, "qwen3": 1e-6, "gemma3": 1e-6, "phi3": 1e-5}
ROPE_BASE = {"llama": 1e4, "qwen2": 1e4, "qwen3": 1e4, "gemma3": 1e6, "phi3": 1e4}
# A matrix of at most this many weights stays in memory as float64.
KEEP_ELEMS = 1 << 24
# Rows that are dequantised at once where it does not.
CHUNK_ROWS = 16384


class Matrix:
    """Rows of a tensor `[n_out, n_in]`."""

    def __init__(self, tensor, rows=None):
        self.type_id = int(tensor.tensor_type)
        dims = [int(dim) for dim in tensor.shape]  # the contiguous one first
        self.n_in = dims[0]
        n_rows = dims[1] if len(dims) > 1 else 1
        size = blocks.row_bytes(self.type_id, self.n_in)
        self.bytes = np.ascontiguousarray(tensor.data).reshape(-1).view(np.uint8)
        self.bytes = self.bytes.reshape(n_rows, size)
        if rows is not None:
            self.bytes = self.bytes[rows]
        self.n_out = len(self.bytes)
        self.kept = None

    def rows(self, which):
        data = np.ascontiguousarray(self.bytes[which])
        return blocks.dequantize(self.type_id, data, self.n_in)

    def times(self, x):
        """`x [tokens, n_in]` to `[tokens, n_out]`."""
        if self.n_out * self.n_in <= KEEP_ELEMS:
            if self.kept is None:
                self.kept = self.rows(slice(None))
            return x @ self.kept.T
        parts = [
            x @ self.rows(slice(first, first + CHUNK_ROWS)).T
            for first in range(0, self.n_out, CHUNK_ROWS)
        ]
        return np.concatenate(parts, axis=1)


class Model:
    def __init__(self, path, context_tokens=None):
        """`context_tokens`: planned context, which chooses between phi3's two sets of factors."""
        reader = gguf.GGUFReader(path)
        self.fields = reader.fields
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}
        arch = self.arch = self.fields["general.architecture"].contents()
        self.n_layer = self.key("block_count")
        self.n_embd = self.key("embedding_length")
        self.n_head = self.key("attention.head_count")
        self.n_kv = self.key("attention.head_count_kv", self.n_head)
        self.head_dim = self.key("attention.key_length", self.n_embd // self.n_head)
        self.n_ff = self.key("feed_forward_length")
        self.eps = self.key("attention.layer_norm_rms_epsilon", EPS[arch])
        self.embed = Matrix(self.tensors["token_embd.weight"])
        output = self.tensors.get("output.weight")
        self.output = Matrix(output) if output is not None else self.embed
        self.output_norm = self.vector("output_norm.weight")
        self.n_vocab = self.embed.n_out
        self.embed_scale = math.sqrt(self.n_embd) if arch == "gemma3" else 1.0
        # The 27B, which has 62 layers, is the only Gemma 3 whose scale is not the head's.
        scale_dim = self.head_dim
        if arch == "gemma3" and self.n_layer == 62:
            scale_dim = self.n_embd // self.n_head
        self.scale = self.key("attention.scale", 1 / math.sqrt(scale_dim))
        self.window = self.key("attention.sliding_window", 0) if arch in ("gemma3", "phi3") else 0
        self.pattern = self.key("attention.sliding_window_pattern", 6) if arch == "gemma3" else 1
        self.rope(context_tokens or self.key("context_length"))
        self.layers = [self.layer(index) for index in range(self.n_layer)]

    def key(self, name, default=None):
        field = self.fields.get(f"{self.arch}.{name}")
        if field is None:
            assert default is not None, name
            return default
        return field.contents()

    def vector(self, name):
        tensor = self.tensors.get(name)
        return None if tensor is None else Matrix(tensor).rows(slice(None))[0]

    def slides(self, index):
        """Whether a layer sees only its window."""
        if not self.window:
            return False
        return self.arch == "phi3" or index % self.pattern < self.pattern - 1

    def rope(self, context_tokens):
        dims = self.key("rope.dimension_count", self.head_dim)
        base = self.key("rope.freq_base", ROPE_BASE[self.arch])
        pairs = np.arange(dims // 2, dtype=np.float64)
        plain = base ** (-2 * pairs / dims)
        self.magnitude = self.key("rope.scaling.attn_factor", 1.0)
        original = self.key("rope.scaling.original_context_length", self.key("context_length"))
        factors = self.vector("rope_freqs.weight")
        if factors is None:
            name = "long" if context_tokens > original else "short"
            factors = self.vector(f"rope_factors_{name}.weight")
        if factors is not None:
            plain = plain / factors
        kind = self.key("rope.scaling.type", "linear")
        factor = self.key("rope.scaling.factor", 1.0) or 1.0
        if kind == "linear":
            self.frequencies = plain / factor
        elif kind == "yarn":

            def pair_of(turns):
                return dims * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

            low = max(0, math.floor(pair_of(self.key("rope.scaling.yarn_beta_fast", 32.0))))
            high = min(dims - 1, math.ceil(pair_of(self.key("rope.scaling.yarn_beta_slow", 1.0))))
            kept = 1 - np.clip((pairs - low) / max(0.001, high - low), 0, 1)
            self.frequencies = plain * kept + plain / factor * (1 - kept)
            self.magnitude *= 1 + 0.1 * math.log(factor)
        else:
            assert kind in ("none", "longrope"), kind
            self.frequencies = plain
        # Layers that slide turn by a base of their own, unscaled.
        self.local_frequencies = self.frequencies
        if self.arch == "gemma3":
            local = self.key("rope.freq_base_swa", 10000.0)
            self.local_frequencies = local ** (-2 * pairs / dims)

    def layer(self, index):
        name = lambda own: f"blk.{index}.{own}"
        matrix = lambda own, rows=None: Matrix(self.tensors[name(own)], rows)
        vector = lambda own: self.vector(name(own))
        layer = {
            own: vector(f"{own}.weight")
            for own in (
                "attn_norm",
                "attn_q_norm",
                "attn_k_norm",
                "post_attention_norm",
                "ffn_norm",
                "post_ffw_norm",
            )
        }
        q, kv = self.n_head * self.head_dim, self.n_kv * self.head_dim
        if name("attn_qkv.weight") in self.tensors:
            ends = {"q": (0, q), "k": (q, q + kv), "v": (q + kv, q + 2 * kv)}
            for part, (first, end) in ends.items():
                layer[part] = matrix("attn_qkv.weight", slice(first, end))
                layer[f"{part}_bias"] = None
        else:
            for part in "qkv":
                layer[part] = matrix(f"attn_{part}.weight")
                layer[f"{part}_bias"] = vector(f"attn_{part}.bias")
        layer["o"] = matrix("attn_output.weight")
        if name("ffn_gate.weight") in self.tensors:
            layer["gate"], layer["up"] = matrix("ffn_gate.weight"), matrix("ffn_up.weight")
        else:
            layer["gate"] = matrix("ffn_up.weight", slice(0, self.n_ff))
            layer["up"] = matrix("ffn_up.weight", slice(self.n_ff, 2 * self.n_ff))
        layer["down"] = matrix("ffn_down.weight")
        return layer

    def norm(self, x, weight):
        if weight is None:
            return x
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.eps) * weight

    def turn(self, heads, positions, frequencies):
        """Rotary embedding of `[tokens, heads, head_dim]`."""
        angles = positions[:, None] * frequencies
        cos = np.cos(angles)[:, None] * self.magnitude
        sin = np.sin(angles)[:, None] * self.magnitude
        n = len(frequencies)
        turned = heads.copy()
        if self.arch == "llama":
            first, second = slice(0, 2 * n, 2), slice(1, 2 * n, 2)
        else:
            first, second = slice(0, n), slice(n, 2 * n)
        a, b = heads[..., first], heads[..., second]
        turned[..., first] = a * cos - b * sin
        turned[..., second] = a * sin + b * cos
        return turned

    def attend(self, index, layer, x, positions, cache):
        tokens = len(x)

        def heads(part, norm=None):
            y = layer[part].times(x)
            if layer[f"{part}_bias"] is not None:
                y = y + layer[f"{part}_bias"]
            return self.norm(y.reshape(tokens, -1, self.head_dim), norm)

        slides = self.slides(index)
        frequencies = self.local_frequencies if slides else self.frequencies
        q = self.turn(heads("q", layer["attn_q_norm"]), positions, frequencies)
        k = self.turn(heads("k", layer["attn_k_norm"]), positions, frequencies)
        keys, values = cache[index]
        keys, values = np.concatenate([keys, k]), np.concatenate([values, heads("v")])
        cache[index] = keys, values
        group = self.n_head // self.n_kv
        q = q.reshape(tokens, self.n_kv, group, self.head_dim)
        scores = np.einsum("tkgd,skd->kgts", q, keys) * self.scale
        age = positions[:, None] - np.arange(len(keys))
        hidden = (age < 0) | (age >= self.window if slides else False)
        scores = np.where(hidden, -np.inf, scores)
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        scores /= scores.sum(-1, keepdims=True)
        out = np.einsum("kgts,skd->tkgd", scores, values)
        return layer["o"].times(out.reshape(tokens, -1))

    def feed_forward(self, layer, x):
        gate = layer["gate"].times(x)
        if self.arch == "gemma3":  # GELU, by the hyperbolic tangent
            inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
            gate = 0.5 * gate * (1 + np.tanh(inner))
        else:
            gate = gate / (1 + np.exp(-gate))
        return layer["down"].times(gate * layer["up"].times(x))

    def new_cache(self):
        empty = np.zeros((0, self.n_kv, self.head_dim))
        return [(empty, empty)] * self.n_layer

    def forward(self, ids, cache, all_logits=True):
        """Logits `[len(ids), n_vocab]` (or the last row alone) of tokens that follow `cache`."""
        positions = np.arange(len(ids), dtype=np.float64) + len(cache[0][0])
        x = self.embed.rows(list(ids)) * self.embed_scale
        for index, layer in enumerate(self.layers):
            y = self.attend(index, layer, self.norm(x, layer["attn_norm"]), positions, cache)
            x = x + self.norm(y, layer["post_attention_norm"])
            y = self.feed_forward(layer, self.norm(x, layer["ffn_norm"]))
            x = x + self.norm(y, layer["post_ffw_norm"])
        if not all_logits:
            x = x[-1:]
        return self.output.times(self.norm(x, self.output_norm))
