//! Cutting text into the words that byte-level BPE merges within.
//!
//! A file names its rule (`tokenizer.ggml.pre`); each is one or more regular expressions, applied
//! one after the other: every piece is cut into the matches of the next expression and what lies
//! between them.
//!
//! The published expressions end in `\s+(?!\S)|\s+`: a run of spaces before a word leaves its last
//! space to the word. The look-ahead would need a backtracking engine, whose stack a long run of
//! spaces exhausts; here the expressions end in `\s+`, so that they run in linear time, and the
//! last space is given back afterwards ([`Run`]).

use tokenizers::utils::SysRegex;

use super::TokenizerError;

/// What a match that is a run of white space gives back to the word after it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Run {
    /// Nothing: the expression says nothing of white space.
    Whole,
    /// Its last character.
    GivesBack,
    /// Its last character, unless that ends a line (the expression takes line ends by themselves).
    GivesBackInLine,
}

/// One expression of a rule.
struct Stage {
    regex: &'static str,
    run: Run,
}

/// A rule of cutting, and what else goes with its name.
struct Rule {
    names: &'static [&'static str],
    stages: &'static [Stage],
    /// A word that is a token as it stands is not merged up from its bytes.
    whole_words_first: bool,
    /// Whether prompts start with the beginning-of-sequence token where the file is silent.
    adds_bos: bool,
}

const GPT2: Stage = Stage {
    regex: r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+",
    run: Run::GivesBack,
};
const ONE_DIGIT: Stage = Stage { regex: r"\p{N}", run: Run::Whole };
const LLAMA3: Stage = Stage {
    regex: r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+",
    run: Run::GivesBackInLine,
};
const QWEN2: Stage = Stage {
    regex: r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+",
    run: Run::GivesBackInLine,
};
const TEKKEN: Stage = Stage {
    regex: r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+",
    run: Run::GivesBackInLine,
};
const GPT4O: Stage = Stage {
    regex: r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+",
    run: Run::GivesBackInLine,
};
const LINE_END: Stage = Stage { regex: r"[\r\n]", run: Run::Whole };
const DEEPSEEK_WORD: Stage = Stage {
    regex: r"\s?[A-Za-z\x{B5}\x{C0}-\x{D6}\x{D8}-\x{F6}\x{F8}-\x{1BA}\x{1BC}-\x{1BF}\x{1C4}-\x{293}\x{295}-\x{2AF}\x{370}-\x{373}\x{376}\x{377}\x{37B}-\x{37D}\x{37F}\x{386}\x{388}-\x{38A}\x{38C}\x{38E}-\x{3A1}\x{3A3}-\x{3F5}\x{3F7}-\x{481}\x{48A}-\x{52F}\x{531}-\x{556}\x{10A0}-\x{10C5}\x{13A0}-\x{13F5}\x{13F8}-\x{13FD}\x{1C90}-\x{1CBA}\x{1CBD}-\x{1CBF}\x{1D00}-\x{1D2B}\x{1D6B}-\x{1D77}\x{1D79}-\x{1D9A}\x{1E00}-\x{1F15}\x{1F18}-\x{1F1D}\x{1F20}-\x{1F45}\x{1F48}-\x{1F4D}\x{1F50}-\x{1F57}\x{1F59}\x{1F5B}\x{1F5D}\x{1F5F}-\x{1F7D}\x{1F80}-\x{1FB4}\x{1FB6}-\x{1FBC}\x{1FBE}\x{1FC2}-\x{1FC4}\x{1FC6}-\x{1FCC}\x{1FD0}-\x{1FD3}\x{1FD6}-\x{1FDB}\x{1FE0}-\x{1FEC}\x{1FF2}-\x{1FF4}\x{1FF6}-\x{1FFC}\x{2102}\x{2107}\x{210A}-\x{2113}\x{2115}\x{2119}-\x{211D}\x{2124}\x{2126}\x{2128}\x{212A}-\x{212D}\x{212F}-\x{2134}\x{2139}\x{213C}-\x{213F}\x{2145}-\x{2149}\x{214E}\x{2183}\x{2184}\x{2C00}-\x{2C7B}\x{2C7E}-\x{2CE4}\x{2CEB}-\x{2CEE}\x{2CF2}\x{2CF3}\x{A640}-\x{A66D}\x{A680}-\x{A69B}\x{A722}-\x{A76F}\x{A771}-\x{A787}\x{A78B}-\x{A78E}\x{AB70}-\x{ABBF}\x{FB00}-\x{FB06}\x{FB13}-\x{FB17}\x{FF21}-\x{FF3A}\x{FF41}-\x{FF5A}\x{10400}-\x{1044F}\x{104B0}-\x{104D3}\x{104D8}-\x{104FB}\x{10C80}-\x{10CB2}\x{10CC0}-\x{10CF2}\x{118A0}-\x{118DF}\x{1E900}-\x{1E943}]+",
    run: Run::Whole,
};
const DEEPSEEK_PUNCTUATION: Stage =
    Stage { regex: r"\s?[!-/:-~！-／：-～‘-‟　-。]+", run: Run::Whole };
const TRAILING_SPACE: Stage = Stage { regex: r"\s+$", run: Run::Whole };
const CJK_AND_HANGUL: Stage = Stage { regex: r"[一-龥ࠀ-一가-퟿]+", run: Run::Whole };

const RULES: &[Rule] = &[
    Rule {
        // What files without a rule were made with; kept for them alone.
        names: &["default"],
        stages: &[
            Stage { regex: r"[\p{P}\$\+<=>\^~\|]+", run: Run::Whole },
            GPT2,
            Stage { regex: r"\p{N}+", run: Run::Whole },
            Stage { regex: r"[0-9][0-9][0-9]", run: Run::Whole },
        ],
        whole_words_first: false,
        adds_bos: false,
    },
    Rule {
        names: &[
            "gpt-2", "phi-2", "mpt", "olmo", "jais", "exaone4", "mellum", "gigachat", "a.x-4.0",
        ],
        stages: &[GPT2],
        whole_words_first: false,
        adds_bos: false,
    },
    Rule {
        names: &["smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"],
        stages: &[ONE_DIGIT, GPT2],
        whole_words_first: false,
        adds_bos: false,
    },
    Rule {
        names: &[
            "llama-bpe",
            "llama3",
            "llama-v3",
            "falcon3",
            "falcon-h1",
            "pixtral",
            "midm-2.0",
            "lfm2",
        ],
        stages: &[LLAMA3],
        whole_words_first: true,
        adds_bos: true,
    },
    Rule {
        names: &["dbrx", "smaug-bpe", "glm4", "chatglm-bpe"],
        stages: &[LLAMA3],
        whole_words_first: false,
        adds_bos: false,
    },
    Rule {
        names: &["qwen2", "stablelm2", "deepseek-r1-qwen", "megrez", "hunyuan", "grok-2"],
        stages: &[QWEN2],
        whole_words_first: false,
        adds_bos: false,
    },
    Rule {
        names: &["deepseek-llm"],
        stages: &[
            LINE_END,
            DEEPSEEK_WORD,
            DEEPSEEK_PUNCTUATION,
            TRAILING_SPACE,
            CJK_AND_HANGUL,
            ONE_DIGIT,
        ],
        whole_words_first: false,
        adds_bos: false,
    },
    Rule {
        names: &["deepseek-coder"],
        stages: &[
            LINE_END,
            Stage { regex: r"\s?\p{L}+", run: Run::Whole },
            Stage { regex: r"\s?\p{P}+", run: Run::Whole },
            CJK_AND_HANGUL,
            ONE_DIGIT,
        ],
        whole_words_first: false,
        adds_bos: false,
    },
    Rule {
        names: &["deepseek-v3", "hunyuan-dense"],
        stages: &[
            Stage { regex: r"\p{N}{1,3}", run: Run::Whole },
            Stage { regex: r"[一-龥぀-ゟ゠-ヿ]+", run: Run::Whole },
            Stage {
                regex: r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+"##,
                run: Run::GivesBackInLine,
            },
        ],
        whole_words_first: false,
        adds_bos: false,
    },
    Rule { names: &["tekken"], stages: &[TEKKEN], whole_words_first: true, adds_bos: true },
    Rule {
        names: &["gpt-4o", "llama4"],
        stages: &[GPT4O],
        whole_words_first: false,
        adds_bos: false,
    },
];

/// The names that a message about an unknown one lists.
pub(super) const KNOWN_PRETOKENIZERS: &[&str] = &[
    "default",
    "gpt-2",
    "smollm",
    "starcoder",
    "llama-bpe",
    "qwen2",
    "deepseek-llm",
    "deepseek-coder",
    "deepseek-v3",
    "tekken",
    "gpt-4o",
];

/// A rule of cutting, ready to run.
pub(super) struct PreTokenizer {
    rule: &'static Rule,
    regexes: Vec<SysRegex>,
}

impl PreTokenizer {
    pub(super) fn named(name: &str) -> Result<PreTokenizer, TokenizerError> {
        let rule = RULES.iter().find(|rule| rule.names.contains(&name)).ok_or_else(|| {
            TokenizerError::UnknownPreTokenizer { name: super::error::shorten(name) }
        })?;
        let compile = |stage: &Stage| {
            SysRegex::new(stage.regex).map_err(|e| TokenizerError::Bpe { reason: e.to_string() })
        };
        let regexes = rule.stages.iter().map(compile).collect::<Result<_, _>>()?;
        Ok(PreTokenizer { rule, regexes })
    }

    pub(super) fn whole_words_first(&self) -> bool {
        self.rule.whole_words_first
    }

    pub(super) fn adds_bos(&self) -> bool {
        self.rule.adds_bos
    }

    /// The words of `text`, in order and without gaps.
    pub(super) fn words<'t>(&self, text: &'t str) -> Vec<&'t str> {
        let mut pieces = vec![text];
        for (stage, regex) in self.rule.stages.iter().zip(&self.regexes) {
            let mut cut = Vec::with_capacity(pieces.len());
            for piece in pieces {
                stage.cut(regex, piece, &mut cut);
            }
            pieces = cut;
        }
        pieces
    }
}

impl Stage {
    /// Appends the matches in `piece` and what lies between them.
    fn cut<'t>(&self, regex: &SysRegex, mut piece: &'t str, out: &mut Vec<&'t str>) {
        // Restarting after each match is right because no expression looks behind itself.
        while let Some((start, end)) = regex.find_iter(piece).next() {
            let end = end - self.given_back(piece, start, end);
            if end == 0 {
                break;
            }
            if start > 0 {
                out.push(&piece[..start]);
            }
            out.push(&piece[start..end]);
            piece = &piece[end..];
        }
        if !piece.is_empty() {
            out.push(piece);
        }
    }

    /// How many bytes at the end of the match belong to what follows.
    fn given_back(&self, piece: &str, start: usize, end: usize) -> usize {
        // Only the alternative `\s+` ends in white space; the one for line ends does too, and is
        // told apart by its last character.
        let Some(last) = piece[start..end].chars().next_back() else { return 0 };
        let is_run = match self.run {
            Run::Whole => false,
            Run::GivesBack => last.is_whitespace(),
            Run::GivesBackInLine => last.is_whitespace() && !matches!(last, '\r' | '\n'),
        };
        let has_more = start + last.len_utf8() < end;
        if is_run && has_more && end < piece.len() { last.len_utf8() } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words<'t>(name: &str, text: &'t str) -> Vec<&'t str> {
        PreTokenizer::named(name).unwrap().words(text)
    }

    #[test]
    fn every_rule_compiles_and_every_listed_name_exists() {
        for name in RULES.iter().flat_map(|rule| rule.names).chain(KNOWN_PRETOKENIZERS) {
            let text = "It's  1234 ÜBER\t\n\n x鯨!";
            assert_eq!(words(name, text).concat(), text, "{name}");
        }
    }

    /// Words as HuggingFace tokenizers cuts them with the published expressions and another engine.
    #[test]
    fn words_are_those_of_the_reference() {
        let gold = include_str!("../../tests/gold/pretokenizer-splits.json");
        let gold: serde_json::Value = serde_json::from_str(gold).unwrap();
        let strings = |value: &serde_json::Value| -> Vec<String> {
            value.as_array().unwrap().iter().map(|s| s.as_str().unwrap().to_owned()).collect()
        };
        let texts = strings(&gold["texts"]);
        for (name, cases) in gold["words"].as_object().unwrap() {
            for (text, expected) in texts.iter().zip(cases.as_array().unwrap()) {
                let expected = strings(expected);
                let found: Vec<_> =
                    words(name, text).into_iter().filter(|w| !w.is_empty()).collect();
                assert_eq!(found, expected, "{name}: {text:?}");
            }
            assert_eq!(cases.as_array().unwrap().len(), texts.len());
        }
        assert_eq!(gold["words"].as_object().unwrap().len(), 9);
    }

    #[test]
    fn a_run_of_spaces_leaves_its_last_to_the_word() {
        assert_eq!(words("gpt-2", "a   b"), ["a", "  ", " b"]);
        assert_eq!(words("gpt-2", "a  \tb  "), ["a", "  ", "\t", "b", "  "]);
        assert_eq!(words("gpt-2", "a\n\nb"), ["a", "\n", "\n", "b"]);
        assert_eq!(words("llama-bpe", "a\n\n  b"), ["a", "\n\n", " ", " b"]);
        assert_eq!(words("llama-bpe", "a \n \tb"), ["a", " \n", " ", "\tb"]);
        assert_eq!(words("qwen2", "12 345"), ["1", "2", " ", "3", "4", "5"]);
        assert_eq!(words("llama-bpe", "DON'T 12345"), ["DON", "'T", " ", "123", "45"]);
    }

    #[test]
    fn long_runs_take_linear_time() {
        for name in ["gpt-2", "llama-bpe", "deepseek-v3", "deepseek-llm", "tekken"] {
            for unit in [" ", "\n", "a", "1", "!", "鯨", " \n"] {
                let text = unit.repeat(200_000) + "x";
                assert_eq!(words(name, &text).concat().len(), text.len());
            }
        }
    }

    #[test]
    fn an_unknown_name_is_refused_with_the_known_ones() {
        let error = PreTokenizer::named("klingon").map(|_| ()).unwrap_err();
        assert!(error.to_string().contains("'klingon'; supported are default, gpt-2"), "{error}");
    }
}
