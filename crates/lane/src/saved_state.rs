//! A sequence's state in a file: its tokens and what the KV cache holds of them, so that a long
//! prompt is computed once.
//!
//! Little-endian, in this order, nothing between and nothing behind:
//!
//! | bytes | what |
//! |--:|---|
//! | 8 | `lane-kv` and a zero |
//! | 4 | version of the format, 1 |
//! | 4 | element type: 0 f32, 1 f16, 2 bf16, 3 fp8, 4 q8 |
//! | 8 | fingerprint of the model's weights |
//! | 4 × 4 | layers, KV heads, elements of a head, token slots of a block |
//! | 4 | n: tokens |
//! | 4 | b: blocks of a layer |
//! | 4 n | the tokens |
//! | 4 b | the table: which logical block each block is, ascending |
//! | | the blocks, `[layer][block]`, each as [`kv_paged::KvLayout`] lays it out |
//! | 8 | XXH3-64 of all bytes before |
//!
//! A file is not trusted: every size is checked against the file's length before anything is taken
//! from it, and the hash before anything is believed.

use std::fs::File;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use kv_paged::{KvCoord, KvLayout, KvPart, KvType, PagedKvConfig};
use xxhash_rust::xxh3::xxh3_64;

use crate::decode::Decode;
use crate::lane::{Lane, LaneError};

const MAGIC: &[u8; 8] = b"lane-kv\0";
const VERSION: u32 = 1;
/// Bytes before the tokens.
const HEADER_BYTES: usize = 48;
const HASH_BYTES: usize = 8;

/// What a state was made with, and what it can be used with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateShape {
    /// Of the model's weights.
    pub fingerprint: u64,
    /// Of the cache, but for how many tokens it holds.
    pub kv: PagedKvConfig,
}

/// The state of a sequence that has not left its context.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SavedState {
    /// What it was made with.
    pub shape: StateShape,
    /// Tokens that are in the cache.
    pub tokens: Vec<u32>,
    /// Their keys and values, `[layer][logical block]`.
    pub blocks: Vec<u8>,
}

/// Why a state cannot be saved or used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StateError {
    /// The file cannot be read or written.
    #[error("cannot {what} {}: {source}", path.display())]
    Io {
        /// What was tried.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The file does not begin as a saved state does.
    #[error("not a saved state")]
    NotAState,
    /// The file is of another version of the format.
    #[error("saved in version {found} of the format, this program knows version {VERSION}")]
    Version {
        /// The file's.
        found: u32,
    },
    /// The file is shorter or longer than it says.
    #[error("{found_bytes} bytes, a state as it describes has {expected_bytes}")]
    Length {
        /// What its header says.
        expected_bytes: u128,
        /// What there is.
        found_bytes: u64,
    },
    /// The file is not as it was written.
    #[error("damaged: its checksum is {stored:016x}, its content has {computed:016x}")]
    Checksum {
        /// What the file says.
        stored: u64,
        /// What its bytes give.
        computed: u64,
    },
    /// The file says something that cannot be.
    #[error("{what} cannot be {value}")]
    Value {
        /// Which number.
        what: &'static str,
        /// Its value.
        value: u64,
    },
    /// It was made with other weights, or with weights in another layout.
    #[error("made with another model: its fingerprint is {saved:016x}, this one's {here:016x}")]
    OtherModel {
        /// The state's.
        saved: u64,
        /// The lane's.
        here: u64,
    },
    /// It was made with a cache of another kind.
    #[error("made with {what} {saved}, this cache has {here}")]
    OtherCache {
        /// What differs.
        what: &'static str,
        /// The state's.
        saved: String,
        /// The lane's.
        here: String,
    },
    /// It is longer than the context.
    #[error("the state has {tokens} tokens, the context {max_context_tokens}: use -c {tokens}")]
    TooLong {
        /// Tokens of the state.
        tokens: usize,
        /// Tokens of the context.
        max_context_tokens: u32,
    },
    /// There is no sequence.
    #[error("nothing has been computed yet: there is no state to save")]
    Nothing,
    /// The cache has forgotten the sequence's beginning.
    #[error(
        "{tokens} tokens have gone through a context of {max_context_tokens}: the first are gone"
    )]
    Wrapped {
        /// Tokens of the sequence.
        tokens: usize,
        /// Tokens of the context.
        max_context_tokens: u32,
    },
}

impl SavedState {
    /// The file's bytes. Slots of the last block that hold no token are zeros in it: they may hold
    /// something of an earlier sequence.
    pub fn to_bytes(&self) -> Vec<u8> {
        let kv = &self.shape.kv;
        let n_blocks = self.tokens.len().div_ceil(kv.block_size_tokens() as usize) as u32;
        let mut out = Vec::with_capacity(
            HEADER_BYTES
                + 4 * (self.tokens.len() + n_blocks as usize)
                + self.blocks.len()
                + HASH_BYTES,
        );
        out.extend(MAGIC);
        out.extend(VERSION.to_le_bytes());
        out.extend(type_code(kv.kv_type()).to_le_bytes());
        out.extend(self.shape.fingerprint.to_le_bytes());
        let numbers = [
            kv.n_layer(),
            kv.n_kv_head(),
            kv.head_dim(),
            kv.block_size_tokens(),
            self.tokens.len() as u32,
            n_blocks,
        ];
        let words = numbers.into_iter().chain(self.tokens.iter().copied()).chain(0..n_blocks);
        words.for_each(|word| out.extend(word.to_le_bytes()));
        let start = out.len();
        out.extend(&self.blocks);
        blank_unused(kv, self.tokens.len() as u32, n_blocks, &mut out[start..]);
        let hash = xxh3_64(&out);
        out.extend(hash.to_le_bytes());
        out
    }

    /// Reads what [`to_bytes`](Self::to_bytes) wrote.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, StateError> {
        let Some((header, rest)) = bytes.split_at_checked(HEADER_BYTES) else {
            // Even too short for what makes it one.
            return Err(StateError::NotAState);
        };
        if &header[..8] != MAGIC {
            return Err(StateError::NotAState);
        }
        let word = |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|i| header[at + i]));
        if word(8) != VERSION {
            return Err(StateError::Version { found: word(8) });
        }
        let (low, high) = (u64::from(word(16)), u64::from(word(20)));
        let [n_layer, n_kv_head, head_dim, block_size, n_tokens, n_blocks] =
            [24, 28, 32, 36, 40, 44].map(word);
        let kv_type = TYPES.get(word(12) as usize).copied();
        let wrong = |what, value: u32| StateError::Value { what, value: value.into() };
        let kv_type = kv_type.ok_or_else(|| wrong("the element type", word(12)))?;
        if n_tokens == 0 {
            return Err(wrong("the number of tokens", 0));
        }
        let kv = PagedKvConfig::new(n_layer, n_kv_head, head_dim, n_tokens)
            .and_then(|kv| kv.with_block_size(block_size))
            .and_then(|kv| kv.with_kv_type(kv_type))
            .map_err(|_| wrong("the shape of the cache", n_layer))?;
        if n_blocks != kv.blocks_per_layer() {
            return Err(wrong("the number of blocks", n_blocks));
        }
        let words = u128::from(n_tokens) + u128::from(n_blocks);
        let expected_bytes =
            (HEADER_BYTES + HASH_BYTES) as u128 + 4 * words + u128::from(kv.total_bytes());
        let found_bytes = bytes.len() as u64;
        if expected_bytes != u128::from(found_bytes) {
            return Err(StateError::Length { expected_bytes, found_bytes });
        }
        let (content, stored) = bytes.split_at(bytes.len() - HASH_BYTES);
        let stored = u64::from_le_bytes([0, 1, 2, 3, 4, 5, 6, 7].map(|i| stored[i]));
        let computed = xxh3_64(content);
        if stored != computed {
            return Err(StateError::Checksum { stored, computed });
        }
        let (tokens, rest) = rest.split_at(4 * n_tokens as usize);
        let (table, rest) = rest.split_at(4 * n_blocks as usize);
        let words = |bytes: &[u8]| -> Vec<u32> {
            bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
        };
        if let Some((_, &found)) = (0..n_blocks).zip(&words(table)).find(|(i, found)| i != *found) {
            return Err(wrong("an entry of the table", found));
        }
        Ok(Self {
            shape: StateShape { fingerprint: high << 32 | low, kv },
            tokens: words(tokens),
            blocks: rest[..rest.len() - HASH_BYTES].to_vec(),
        })
    }

    /// Writes the file, under another name until it is whole.
    pub fn write(&self, path: &Path) -> Result<(), StateError> {
        let mut name = path.as_os_str().to_owned();
        name.push(".part");
        let part = PathBuf::from(name);
        let write = || {
            // Renaming would put a file in the place of a device.
            if std::fs::metadata(path).is_ok_and(|there| !there.is_file()) {
                return Err(std::io::Error::other("not a regular file"));
            }
            let mut file = File::create(&part)?;
            file.write_all(&self.to_bytes())?;
            file.sync_all()?;
            std::fs::rename(&part, path)
        };
        write().map_err(|source| {
            let _ = std::fs::remove_file(&part);
            StateError::Io { what: "write", path: path.to_owned(), source }
        })
    }

    /// Reads a file that must be a whole state.
    pub fn read(path: &Path) -> Result<Self, StateError> {
        let read = || {
            let mut file = File::open(path)?;
            let mut start = [0; 8];
            // Whatever else it is, it is not read as a whole to find that out.
            let n = file.read(&mut start)?;
            if &start[..n] != MAGIC {
                return Ok(None);
            }
            let mut bytes = start.to_vec();
            file.read_to_end(&mut bytes)?;
            Ok(Some(bytes))
        };
        let bytes = read().map_err(|source| StateError::Io {
            what: "read",
            path: path.to_owned(),
            source,
        })?;
        Self::from_bytes(&bytes.ok_or(StateError::NotAState)?)
    }

    /// Refuses a state that was made with something else than `here`.
    pub fn check(&self, here: &StateShape) -> Result<(), StateError> {
        let (saved_kv, kv) = (&self.shape.kv, &here.kv);
        let differ = |what, saved: &dyn ToString, here: &dyn ToString| {
            let (saved, here) = (saved.to_string(), here.to_string());
            if saved == here { Ok(()) } else { Err(StateError::OtherCache { what, saved, here }) }
        };
        if self.shape.fingerprint != here.fingerprint {
            let (saved, here) = (self.shape.fingerprint, here.fingerprint);
            return Err(StateError::OtherModel { saved, here });
        }
        differ("elements of type", &saved_kv.kv_type(), &kv.kv_type())?;
        differ("layers:", &saved_kv.n_layer(), &kv.n_layer())?;
        differ("KV heads:", &saved_kv.n_kv_head(), &kv.n_kv_head())?;
        differ("elements of a head:", &saved_kv.head_dim(), &kv.head_dim())?;
        differ("tokens of a block:", &saved_kv.block_size_tokens(), &kv.block_size_tokens())?;
        if self.tokens.len() > kv.max_context_tokens() as usize {
            let (tokens, max_context_tokens) = (self.tokens.len(), kv.max_context_tokens());
            return Err(StateError::TooLong { tokens, max_context_tokens });
        }
        Ok(())
    }
}

impl Lane {
    /// The state of the sequence that the cache holds: of the last prompt and what was generated
    /// behind it.
    pub fn save_state(&self) -> Result<SavedState, LaneError> {
        let mut state = self.lock()?;
        let (tokens, shape) = (state.history.clone(), shape_of(&*state.decoder));
        let max_context_tokens = shape.kv.max_context_tokens();
        if tokens.is_empty() {
            return Err(StateError::Nothing.into());
        }
        if tokens.len() > max_context_tokens as usize {
            let tokens = tokens.len();
            return Err(StateError::Wrapped { tokens, max_context_tokens }.into());
        }
        let blocks = state.decoder.read_cache(tokens.len() as u32)?;
        Ok(SavedState { shape, tokens, blocks })
    }

    /// Makes the cache hold a saved sequence. A prompt that begins as it does is computed from where
    /// it ends; any other prompt as if nothing had been loaded.
    pub fn load_state(&self, saved: &SavedState) -> Result<(), LaneError> {
        let mut state = self.lock()?;
        saved.check(&shape_of(&*state.decoder))?;
        state.check_prompt(&saved.tokens, false)?;
        state.forget();
        let written = state.decoder.write_cache(saved.tokens.len() as u32, &saved.blocks);
        state.or_forget(written)?;
        state.history.extend_from_slice(&saved.tokens);
        Ok(())
    }
}

fn shape_of(decoder: &dyn Decode) -> StateShape {
    StateShape { fingerprint: decoder.fingerprint(), kv: decoder.kv() }
}

/// Element types by their code.
const TYPES: [KvType; 5] = [KvType::F32, KvType::F16, KvType::Bf16, KvType::Fp8E4m3, KvType::Q8];

fn type_code(kv_type: KvType) -> u32 {
    TYPES.iter().position(|&known| known == kv_type).unwrap_or(TYPES.len()) as u32
}

/// Zeroes the slots of each layer's last block that hold no token.
fn blank_unused(kv: &PagedKvConfig, n_tokens: u32, n_blocks: u32, blocks: &mut [u8]) {
    let used = n_tokens % kv.block_size_tokens();
    let Ok(layout) = KvLayout::with_blocks(kv, n_blocks) else { return };
    if used == 0 {
        return;
    }
    let elem_bytes = kv.kv_type().elem_bytes();
    let row_bytes = u64::from(kv.head_dim()) * elem_bytes;
    let rows = (0..kv.n_layer())
        .flat_map(|layer| [KvPart::Key, KvPart::Value].map(|part| (layer, part)))
        .flat_map(|(layer, part)| (0..kv.n_kv_head()).map(move |head| (layer, part, head)))
        .flat_map(|at| (used..kv.block_size_tokens()).map(move |token| (at, token)));
    for ((layer, part, head), token) in rows {
        let at = KvCoord { layer, block: n_blocks - 1, part, head, token, dim: 0 };
        let row = layout.elem_index(at).map(|index| (index * elem_bytes, row_bytes));
        let scale = layout.scale_offset_bytes(at).map(|at| at.unwrap_or(0));
        let scale = scale.map(|at| (at, kv.kv_type().scale_bytes()));
        for (start, len) in [row, scale].into_iter().flatten() {
            if let Some(bytes) = blocks.get_mut(start as usize..(start + len) as usize) {
                bytes.fill(0);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn kv(tokens: u32, kv_type: KvType) -> PagedKvConfig {
        PagedKvConfig::new(2, 1, 8, tokens)
            .and_then(|kv| kv.with_block_size(4))
            .and_then(|kv| kv.with_kv_type(kv_type))
            .unwrap()
    }

    fn state(n_tokens: u32, kv_type: KvType) -> SavedState {
        let kv = kv(n_tokens, kv_type);
        let mut state = SavedState {
            shape: StateShape { fingerprint: 0x0123_4567_89ab_cdef, kv },
            tokens: (0..n_tokens).map(|i| i * 3).collect(),
            blocks: (0..kv.total_bytes()).map(|i| i as u8 | 1).collect(),
        };
        blank_unused(&kv, n_tokens, kv.blocks_per_layer(), &mut state.blocks);
        state
    }

    #[test]
    fn what_is_written_is_read() {
        for kv_type in KvType::ALL {
            for n_tokens in [1, 4, 7, 8] {
                let state = state(n_tokens, kv_type);
                assert_eq!(SavedState::from_bytes(&state.to_bytes()).unwrap(), state);
            }
        }
    }

    #[test]
    fn slots_without_a_token_are_blank() {
        let mut dirty = state(5, KvType::F32);
        dirty.blocks.fill(0xff);
        let clean = SavedState::from_bytes(&dirty.to_bytes()).unwrap();
        let zeros = clean.blocks.iter().filter(|&&byte| byte == 0).count();
        // 3 of 8 slots, in 2 layers, of a key and a value of 8 floats.
        assert_eq!(zeros, 3 * 2 * 2 * 8 * 4);
        dirty.blocks.fill(0xff);
        let full = SavedState { tokens: vec![1; 8], ..dirty };
        assert!(
            SavedState::from_bytes(&full.to_bytes()).unwrap().blocks.iter().all(|&b| b == 0xff)
        );
    }

    #[test]
    fn every_truncation_and_every_flipped_bit_is_noticed() {
        let bytes = state(5, KvType::F16).to_bytes();
        for len in 0..bytes.len() {
            assert!(SavedState::from_bytes(&bytes[..len]).is_err(), "{len} bytes");
        }
        let mut longer = bytes.clone();
        longer.push(0);
        assert!(matches!(SavedState::from_bytes(&longer), Err(StateError::Length { .. })));
        for bit in 0..bytes.len() * 8 {
            let mut flipped = bytes.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(SavedState::from_bytes(&flipped).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn what_is_foreign_is_refused_in_one_sentence() {
        let saved = state(5, KvType::F16);
        let here = StateShape { kv: kv(64, KvType::F16), ..saved.shape };
        saved.check(&here).unwrap();
        let refusal = |here: StateShape| saved.check(&here).unwrap_err().to_string();
        assert_eq!(
            refusal(StateShape { fingerprint: 1, ..here }),
            "made with another model: its fingerprint is 0123456789abcdef, this one's \
             0000000000000001"
        );
        assert_eq!(
            refusal(StateShape { kv: kv(64, KvType::F32), ..here }),
            "made with elements of type f16, this cache has f32"
        );
        assert_eq!(
            refusal(StateShape { kv: kv(4, KvType::F16), ..here }),
            "the state has 5 tokens, the context 4: use -c 5"
        );
        let version = SavedState::from_bytes(&[&MAGIC[..], &[9; 60]].concat()).unwrap_err();
        assert_eq!(
            version.to_string(),
            "saved in version 151587081 of the format, this program knows version 1"
        );
    }

    proptest! {
        #[test]
        fn no_file_makes_it_panic(
            start in proptest::collection::vec(any::<u8>(), 0..80),
            words in proptest::collection::vec(prop_oneof![0..20_u32, any::<u32>()], 9),
        ) {
            let _ = SavedState::from_bytes(&start);
            let mut bytes = [&MAGIC[..], &VERSION.to_le_bytes()].concat();
            words.iter().for_each(|word| bytes.extend(word.to_le_bytes()));
            bytes.extend(&start);
            let _ = SavedState::from_bytes(&bytes);
        }
    }
}
