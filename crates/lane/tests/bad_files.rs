//! Files that are not what they say: refused in one sentence, without a panic, and without
//! allocating by what they say.

mod draft;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::fmt::Write;
use std::fs;

use draft::{Draft, F32, Q4_K, Val};
use lane::gguf::{Gguf, GgufError};
use lane::model::Model;
use proptest::prelude::*;

static WHALE: &[u8] = include_bytes!("../models/whale-5.8m-q4_k_m.gguf");

/// The system's allocator, keeping count per thread.
struct Counting;

thread_local! {
    static LIVE_BYTES: Cell<usize> = const { Cell::new(0) };
    static PEAK_BYTES: Cell<usize> = const { Cell::new(0) };
    static LARGEST_BYTES: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: every call is passed on to the system's allocator unchanged; the counters are plain
// thread-local cells, which neither allocate nor unwind.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let live = LIVE_BYTES.get().wrapping_add(layout.size());
        LIVE_BYTES.set(live);
        PEAK_BYTES.set(PEAK_BYTES.get().max(live));
        LARGEST_BYTES.set(LARGEST_BYTES.get().max(layout.size()));
        // SAFETY: as the caller promised us.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        LIVE_BYTES.set(LIVE_BYTES.get().saturating_sub(layout.size()));
        // SAFETY: as the caller promised us.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The most bytes that `f` had allocated at a time, beyond what was before. Checks that it made no
/// allocation larger than the file and a constant.
fn peak_bytes<T>(file_bytes: usize, f: impl FnOnce() -> T) -> (T, usize) {
    let before = LIVE_BYTES.get();
    PEAK_BYTES.set(before);
    LARGEST_BYTES.set(0);
    let value = f();
    let largest = LARGEST_BYTES.get();
    assert!(largest < file_bytes + CONSTANT_BYTES, "{largest} bytes for a file of {file_bytes}");
    (value, PEAK_BYTES.get() - before)
}

/// What may be allocated beyond the file's own length, whatever the file says: indices of as many
/// keys and tensors as are accepted at all.
const CONSTANT_BYTES: usize = 1 << 18;

/// Text that is made and not kept.
struct Nowhere;

impl std::fmt::Write for Nowhere {
    fn write_str(&mut self, _: &str) -> std::fmt::Result {
        Ok(())
    }
}

/// Opens the bytes as a model, touching everything a user would, and checks what that allocated.
fn open(bytes: &[u8]) -> Result<(), String> {
    let copy = bytes.to_vec();
    let (result, peak) = peak_bytes(bytes.len(), || {
        let gguf = Gguf::from_vec(copy).map_err(|error| error.to_string())?;
        for (key, _, value) in gguf.metadata().iter() {
            write!(Nowhere, "{key} {value:?}").map_err(|error| error.to_string())?;
            let _ = gguf.metadata().strings(key).map(|strings| strings.map(Iterator::count));
            let _ = gguf.metadata().i32s(key).map(|ints| ints.map(Iterator::count));
        }
        for tensor in gguf.tensors() {
            let mut first = [0];
            gguf.read_tensor(tensor, 0, &mut first).map_err(|error| error.to_string())?;
        }
        Model::from_gguf(&gguf).map(|_| ()).map_err(|error| error.to_string())
    });
    // A header that is read in pieces is there twice for a moment.
    assert!(peak < 2 * bytes.len() + CONSTANT_BYTES, "{peak} bytes for a file of {}", bytes.len());
    if let Err(message) = &result {
        assert!(message.len() < 1000 && !message.contains('\n'), "{message:?}");
    }
    result
}

fn refused(draft: &Draft) -> GgufError {
    let bytes = draft.bytes();
    open(&bytes).unwrap_err();
    Gguf::from_vec(bytes).unwrap_err()
}

#[test]
fn not_a_gguf() {
    let error = |bytes: &[u8]| Gguf::from_vec(bytes.to_vec()).unwrap_err().to_string();
    assert!(error(b"").contains("empty"));
    assert!(error(b"GG").contains("too early"));
    assert!(error(b"GGUF").contains("too early"));
    assert!(error(b"\x89PNG\r\n\x1a\n").contains(r"\x89PNG"));
    assert!(error(b"version https://git-lfs.github.com/spec/v1").contains("git lfs pull"));
    assert!(error(b"<!DOCTYPE html>").contains("web page"));
    assert!(error(b"PK\x03\x04....").contains("ZIP"));
    assert!(error(b"x").contains("begins with x"));
}

#[test]
fn unreadable_paths() {
    let dir = tempfile::tempdir().unwrap();
    assert!(matches!(Gguf::open(dir.path()), Err(GgufError::NotAFile { .. })));
    let missing = dir.path().join("missing.gguf");
    let error = Gguf::open(&missing).unwrap_err();
    assert!(matches!(error, GgufError::Io { .. }));
    assert!(error.to_string().contains("missing.gguf"));
    fs::write(dir.path().join("empty.gguf"), b"").unwrap();
    assert!(matches!(Gguf::open(dir.path().join("empty.gguf")), Err(GgufError::Empty)));
    #[cfg(target_os = "linux")]
    assert!(matches!(Gguf::open("/dev/zero"), Err(GgufError::NotAFile { .. })));
}

#[test]
fn versions() {
    let error = |version: u32| {
        let mut draft = Draft::llama();
        draft.version = version;
        refused(&draft)
    };
    assert!(matches!(error(1), GgufError::UnsupportedVersion { version: 1 }));
    assert!(matches!(error(4), GgufError::UnsupportedVersion { version: 4 }));
    assert!(matches!(error(0), GgufError::UnsupportedVersion { version: 0 }));
    assert!(matches!(error(3u32.swap_bytes()), GgufError::BigEndian { version: 3 }));
    assert!(error(2u32.swap_bytes()).to_string().contains("big-endian"));
}

#[test]
fn a_real_file_truncated_anywhere() {
    let gguf = Gguf::from_static(WHALE).unwrap();
    let data_start = gguf.tensors().iter().map(|t| t.offset_bytes()).min().unwrap() as usize;
    // Arrays look the same at every place: all bytes of what comes before and after them, and
    // a sample within.
    let (dense_end, dense_start) = (1_200, 132_000);
    let sample = (dense_end..dense_start).step_by(97);
    for end in (0..dense_end).chain(sample).chain(dense_start..data_start) {
        let error = Gguf::from_static(&WHALE[..end]).unwrap_err();
        let expected = matches!(
            error,
            GgufError::Truncated { .. }
                | GgufError::Empty
                | GgufError::ImpossibleCount { .. }
                | GgufError::OutOfFile { .. }
        );
        assert!(expected, "{end}: {error}");
    }
    for end in (data_start..WHALE.len()).step_by(10_007).chain([WHALE.len() - 1]) {
        let error = Gguf::from_static(&WHALE[..end]).unwrap_err();
        assert!(matches!(error, GgufError::OutOfFile { .. }), "{end}: {error}");
        assert!(error.to_string().contains("incomplete"), "{end}: {error}");
    }
}

#[test]
fn truncated_at_every_byte_of_a_small_file() {
    let bytes = Draft::llama().bytes();
    open(&bytes).unwrap();
    let last = Gguf::from_vec(bytes.clone()).unwrap();
    let end_of_data =
        last.tensors().iter().map(|t| t.offset_bytes() + t.n_bytes()).max().unwrap() as usize;
    let data_start = last.tensors().iter().map(|t| t.offset_bytes()).min().unwrap() as usize;
    for end in (0..data_start + 64).chain([end_of_data - 1]) {
        open(&bytes[..end]).unwrap_err();
    }
}

#[test]
fn every_bit_of_a_small_header_flipped() {
    let mut draft = Draft::llama();
    draft.key("floats", Val::F32s(vec![1.0, 2.0])).key("flag", Val::Bool(true));
    let mut bytes = draft.bytes();
    let header = bytes.len() - data_bytes(&bytes);
    let mut accepted = 0;
    for bit in 0..header * 8 {
        bytes[bit / 8] ^= 1 << (bit % 8);
        accepted += usize::from(open(&bytes).is_ok());
        bytes[bit / 8] ^= 1 << (bit % 8);
    }
    // Letters of tokens, the epsilon, and the like; most of the header is not like that.
    assert!(accepted < header * 8 / 2, "{accepted} of {}", header * 8);
}

fn data_bytes(bytes: &[u8]) -> usize {
    let gguf = Gguf::from_vec(bytes.to_vec()).unwrap();
    bytes.len() - gguf.tensors().iter().map(|t| t.offset_bytes()).min().unwrap() as usize
}

#[test]
fn counts_that_cannot_fit() {
    for count in [1000, 1 << 32, 1 << 60, u64::MAX] {
        let mut draft = Draft::llama();
        draft.n_keys = Some(count);
        refused(&draft);
        let mut draft = Draft::empty();
        draft.n_keys = Some(count);
        assert!(matches!(refused(&draft), GgufError::ImpossibleCount { .. }));
        let mut draft = Draft::empty();
        draft.n_tensors = Some(count);
        assert!(matches!(refused(&draft), GgufError::ImpossibleCount { .. }));
    }
}

#[test]
fn lengths_that_cannot_fit() {
    for len in [100_000, 1 << 33, 1 << 61, u64::MAX] {
        // The length of a string.
        let mut draft = Draft::empty();
        draft.key("k", Val::Raw(8, len.to_le_bytes().to_vec()));
        assert!(matches!(refused(&draft), GgufError::Truncated { .. }));
        // The length of an array of every type.
        for element in 0..13u32 {
            let mut array = element.to_le_bytes().to_vec();
            array.extend(len.to_le_bytes());
            let mut draft = Draft::empty();
            draft.key("k", Val::Raw(9, array));
            assert!(matches!(refused(&draft), GgufError::ImpossibleCount { .. }));
        }
        // The length of a key.
        let mut bytes = Draft::empty().key("k", Val::U8(0)).bytes();
        bytes[24..32].copy_from_slice(&len.to_le_bytes());
        open(&bytes).unwrap_err();
    }
}

#[test]
fn keys() {
    let mut draft = Draft::empty();
    draft.key("", Val::U8(0));
    assert!(matches!(refused(&draft), GgufError::BadKey { offset_bytes: 24, .. }));
    let mut draft = Draft::empty();
    draft.key(&"k".repeat(1 << 16), Val::U8(0));
    assert!(matches!(refused(&draft), GgufError::BadKey { .. }));
    let mut bytes = Draft::empty().key("k", Val::U8(0)).bytes();
    bytes[32] = 0xff;
    assert!(matches!(Gguf::from_vec(bytes), Err(GgufError::BadKey { .. })));
    let mut draft = Draft::empty();
    draft.keys = vec![("k".into(), Val::U8(0)), ("k".into(), Val::U8(0))];
    assert!(matches!(refused(&draft), GgufError::DuplicateKey { .. }));
}

#[test]
fn unknown_value_types() {
    let mut draft = Draft::empty();
    draft.key("odd.key", Val::Raw(13, vec![0; 8]));
    let error = refused(&draft);
    assert!(matches!(error, GgufError::UnknownValueType { type_id: 13, .. }));
    assert!(error.to_string().contains("odd.key"));
    let mut array = 77u32.to_le_bytes().to_vec();
    array.extend(0u64.to_le_bytes());
    draft.key("odd.key", Val::Raw(9, array));
    assert!(matches!(refused(&draft), GgufError::UnknownValueType { type_id: 77, .. }));
}

#[test]
fn arrays_nested_without_end() {
    let mut nested = vec![];
    for _ in 0..10_000 {
        nested.extend(9u32.to_le_bytes());
        nested.extend(1u64.to_le_bytes());
    }
    let mut draft = Draft::empty();
    draft.key("k", Val::Raw(9, nested));
    assert!(matches!(refused(&draft), GgufError::NestedTooDeep { .. }));
}

#[test]
fn alignments() {
    for alignment in [0, 1, 4, 24, 33, u32::MAX] {
        let mut draft = Draft::llama();
        draft.key("general.alignment", Val::U32(alignment));
        let expected = u64::from(alignment);
        assert!(matches!(
            refused(&draft),
            GgufError::BadAlignment { alignment_bytes } if alignment_bytes == expected
        ));
    }
    for alignment in [1u64 << 31, 1 << 63] {
        let mut draft = Draft::llama();
        draft.key("general.alignment", Val::U64(alignment));
        refused(&draft);
    }
    let mut draft = Draft::llama();
    draft.key("general.alignment", Val::Str("32"));
    assert!(matches!(refused(&draft), GgufError::WrongType { .. }));
    // Aligned to 32, where the file says 1024.
    let mut draft = Draft::llama();
    draft.key("general.alignment", Val::U32(1024));
    assert!(matches!(refused(&draft), GgufError::Misaligned { .. }));
}

#[test]
fn tensor_names() {
    let mut draft = Draft::empty();
    draft.tensor("", &[4], F32);
    assert!(matches!(refused(&draft), GgufError::BadTensorName { index: 0, .. }));
    let mut draft = Draft::empty();
    draft.tensor(&"n".repeat(2000), &[4], F32);
    assert!(matches!(refused(&draft), GgufError::BadTensorName { .. }));
    let mut draft = Draft::empty();
    draft.tensor("a", &[4], F32).tensor("b", &[4], F32);
    draft.tensors[1].name = "a".into();
    assert!(matches!(refused(&draft), GgufError::DuplicateTensor { .. }));
}

#[test]
fn tensor_dimensions() {
    let error = |dims: &[u64], type_id| {
        let mut draft = Draft::empty();
        draft.tensor("odd", dims, type_id);
        let error = refused(&draft);
        assert!(error.to_string().contains("odd"), "{error}");
        error
    };
    assert!(matches!(error(&[1; 5], F32), GgufError::TooManyDimensions { n_dims: 5, .. }));
    assert!(matches!(error(&[4, 0], F32), GgufError::BadDimensions { .. }));
    assert!(matches!(error(&[1 << 40, 1 << 40], F32), GgufError::BadDimensions { .. }));
    assert!(matches!(error(&[u64::MAX - 3], F32), GgufError::BadDimensions { .. }));
    assert!(matches!(error(&[1 << 62], F32), GgufError::BadDimensions { .. }));
    assert!(matches!(error(&[1 << 50], F32), GgufError::OutOfFile { .. }));
    assert!(matches!(error(&[300, 2], Q4_K), GgufError::PartialBlock { n_in: 300, .. }));
}

#[test]
fn unknown_tensor_types() {
    for type_id in [4, 5, 31, 36, 77, u32::MAX] {
        let mut draft = Draft::llama();
        draft.tensor("blk.1.ffn_up.weight", &[256, 512], type_id);
        let error = refused(&draft).to_string();
        assert!(error.contains("blk.1.ffn_up.weight"), "{error}");
        assert!(error.contains(&type_id.to_string()), "{error}");
    }
}

#[test]
fn tensor_offsets() {
    let with_offset = |offset| {
        let mut draft = Draft::llama();
        draft.tensors[3].offset = Some(offset);
        refused(&draft)
    };
    assert!(matches!(with_offset(0), GgufError::Overlap { .. }));
    assert!(matches!(with_offset(1184), GgufError::Overlap { .. }));
    assert!(matches!(with_offset(7), GgufError::Misaligned { .. }));
    assert!(matches!(with_offset(1 << 40), GgufError::OutOfFile { .. }));
    assert!(matches!(with_offset(u64::MAX - 31), GgufError::OutOfFile { .. }));
    let error = with_offset(1 << 40).to_string();
    assert!(error.contains("the offset is wrong") && !error.contains("incomplete"), "{error}");
    let error = with_offset(0).to_string();
    assert!(error.contains("token_embd.weight") && error.contains("overlap"), "{error}");
}

/// A file of nothing but keys, or tensors, as small as they can be: the index is larger than its
/// file, and bounded.
#[test]
fn as_many_entries_as_fit() {
    let mut keys = Draft::empty();
    for i in 0..60_000 {
        keys.keys.push((format!("{i:x}"), Val::U8(0)));
    }
    let mut tensors = Draft::empty();
    for i in 0..60_000 {
        let name = format!("{i:x}");
        tensors.tensors.push(draft::Tensor { name, dims: vec![], type_id: F32, offset: None });
    }
    for (what, draft) in [("keys", keys), ("tensors", tensors)] {
        let bytes = draft.bytes();
        let most = bytes.len() + MANY_ENTRIES_BYTES;
        let (result, peak) = peak_bytes(most, || Gguf::from_vec(bytes.clone()).map(|_| ()));
        result.unwrap();
        assert!(peak < bytes.len() + most, "{what}: {peak} bytes");
    }
}

/// What an index of the most entries that are accepted may take.
const MANY_ENTRIES_BYTES: usize = 32 << 20;

/// A hundred thousand strings, empty and not.
#[test]
fn long_arrays() {
    for len in [0, 1, 60] {
        let mut draft = Draft::empty();
        draft.key("k", Val::Strs(vec!["x".repeat(len); 100_000]));
        let bytes = draft.bytes();
        // The copy that it is given, and the header out of it.
        let (gguf, peak) = peak_bytes(bytes.len(), || Gguf::from_vec(bytes.clone()).unwrap());
        assert!(peak < 3 * bytes.len() + CONSTANT_BYTES, "{peak} bytes for {}", bytes.len());
        let (n, peak) = peak_bytes(0, || gguf.metadata().strings("k").unwrap().unwrap().count());
        assert!(n == 100_000 && peak < 1 << 10, "{n} strings, {peak} bytes");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(10_000))]

    /// The small file, where the fixed numbers are: counts, lengths, types, offsets.
    #[test]
    fn ten_thousand_damaged_small_headers(
        damage in prop::collection::vec((0usize..2800, any::<u64>(), 1usize..9), 1..4),
        cut in 0usize..4000,
    ) {
        let mut bytes = Draft::llama().bytes();
        for (at, value, len) in damage {
            bytes[at..at + len].copy_from_slice(&value.to_le_bytes()[..len]);
        }
        bytes.truncate(bytes.len() - cut.saturating_sub(2000));
        let _ = open(&bytes);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Whatever happens to the header of a real file, it is read or refused.
    #[test]
    fn a_damaged_real_header(
        damage in prop::collection::vec((0usize..136_024, any::<u8>()), 1..4),
    ) {
        let mut bytes = WHALE.to_vec();
        for (at, value) in damage {
            bytes[at] ^= value;
        }
        let _ = open(&bytes);
    }

    /// Bytes that only begin like a GGUF.
    #[test]
    fn noise(mut bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let start = b"GGUF\x03\0\0\0\x01\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0";
        bytes.splice(0..0, *start);
        prop_assert!(open(&bytes).is_err());
    }
}
