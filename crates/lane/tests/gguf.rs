//! Sound GGUF files: everything in them is found, however it is stored.

mod draft;

use std::fs;
use std::io::Write;

use draft::{Draft, F16, F32, Val};
use lane::gguf::{Gguf, GgufError, GgufWriter, Value, ValueType};
use proptest::collection::vec;
use proptest::prelude::*;
use q4k_soa::WeightType;

static WHALE: &[u8] = include_bytes!("../models/whale-5.8m-q4_k_m.gguf");
const WHALE_PATH: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/models/whale-5.8m-q4_k_m.gguf");

#[test]
fn a_real_file_from_disk_and_from_the_program() {
    let disk = Gguf::open(WHALE_PATH).unwrap();
    let program = Gguf::from_static(WHALE).unwrap();
    assert_eq!(disk.file_bytes(), WHALE.len() as u64);
    for gguf in [&disk, &program] {
        assert_eq!(gguf.version(), 3);
        let meta = gguf.metadata();
        assert_eq!(meta.len(), 26);
        assert_eq!(meta.str("general.architecture").unwrap(), Some("llama"));
        assert_eq!(meta.u32("llama.block_count").unwrap(), Some(6));
        assert_eq!(meta.f32("llama.rope.freq_base").unwrap(), Some(10000.0));
        assert_eq!(meta.bool("tokenizer.ggml.add_bos_token").unwrap(), Some(true));
        assert_eq!(meta.u32("no.such.key").unwrap(), None);
        let tokens: Vec<_> = meta.strings("tokenizer.ggml.tokens").unwrap().unwrap().collect();
        assert_eq!((tokens.len(), tokens[0], tokens[1]), (4096, "<|endoftext|>", "!"));
        let merges = meta.strings("tokenizer.ggml.merges").unwrap().unwrap();
        assert_eq!((merges.len(), merges.last()), (3839, meta_last_merge(meta)));
        let types = meta.i32s("tokenizer.ggml.token_type").unwrap().unwrap();
        assert_eq!(types.take(2).collect::<Vec<_>>(), [3, 1]);

        assert_eq!(gguf.tensors().len(), 56);
        let v = gguf.tensor("blk.2.attn_v.weight").unwrap();
        assert_eq!((v.dims(), v.ggml_type().name()), (&[256, 128][..], "Q6_K"));
        assert_eq!(v.n_bytes(), 128 * 210);
    }
    for (a, b) in disk.tensors().iter().zip(program.tensors()) {
        let bytes = disk.tensor_to_vec(a).unwrap();
        assert_eq!(Some(&bytes[..]), program.tensor_bytes(b), "{}", a.name());
        let start = a.offset_bytes() as usize;
        assert_eq!(bytes, WHALE[start..start + bytes.len()]);
    }
    assert_eq!(disk.tensor_bytes(&disk.tensors()[0]), None);
    disk.check_unchanged().unwrap();
}

fn meta_last_merge(meta: &lane::gguf::Metadata) -> Option<&str> {
    // The same element through the general view.
    let Some(Value::Array(array)) = meta.get("tokenizer.ggml.merges") else { panic!() };
    array.byte_strings().unwrap().last().map(|s| str::from_utf8(s).unwrap())
}

#[test]
fn parts_of_tensors() {
    let gguf = Gguf::open(WHALE_PATH).unwrap();
    let tensor = gguf.tensor("blk.0.attn_k.weight").unwrap();
    let whole = gguf.tensor_to_vec(tensor).unwrap();
    let mut row = [0; 144];
    gguf.read_tensor(tensor, 5 * 144, &mut row).unwrap();
    assert_eq!(row, whole[5 * 144..6 * 144]);
    gguf.read_tensor(tensor, tensor.n_bytes(), &mut []).unwrap();
    for first_byte in [tensor.n_bytes() - 143, tensor.n_bytes(), u64::MAX] {
        let error = gguf.read_tensor(tensor, first_byte, &mut row).unwrap_err();
        assert!(matches!(error, GgufError::OutOfTensor { .. }), "{error}");
    }
}

#[test]
fn integers_of_every_width() {
    let values = [
        Val::U8(7),
        Val::U16(7),
        Val::U32(7),
        Val::I32(7),
        Val::U64(7),
        Val::I64(7),
        Val::Raw(1, vec![7]),
        Val::Raw(3, vec![7, 0]),
    ];
    for value in values {
        let gguf = Gguf::from_vec(Draft::empty().key("k", value.clone()).bytes()).unwrap();
        let meta = gguf.metadata();
        assert_eq!(meta.u32("k").unwrap(), Some(7), "{value:?}");
        assert_eq!(meta.u64("k").unwrap(), Some(7), "{value:?}");
        assert_eq!(meta.i64("k").unwrap(), Some(7), "{value:?}");
        assert_eq!(meta.f32("k").unwrap(), Some(7.0), "{value:?}");
        assert!(matches!(meta.str("k"), Err(GgufError::WrongType { .. })));
        assert!(matches!(meta.bool("k"), Err(GgufError::WrongType { .. })));
        assert!(matches!(meta.strings("k"), Err(GgufError::WrongType { .. })));
    }
    let mut draft = Draft::empty();
    draft
        .key("negative", Val::I32(-1))
        .key("large", Val::U64(u64::MAX))
        .key("f64", Val::F64(0.5))
        .key("list", Val::U64s(vec![1, 2, 3]))
        .key("large list", Val::U64s(vec![1, 1 << 40]))
        .key("floats", Val::F32s(vec![0.5, -1.0]))
        .key("latin", Val::Raw(8, [&1u64.to_le_bytes()[..], &[0xe9]].concat()));
    let gguf = Gguf::from_vec(draft.bytes()).unwrap();
    let meta = gguf.metadata();
    assert!(matches!(meta.u32("negative"), Err(GgufError::OutOfRange { value: -1, .. })));
    assert_eq!(meta.i64("negative").unwrap(), Some(-1));
    assert_eq!(meta.u64("large").unwrap(), Some(u64::MAX));
    assert!(matches!(meta.i64("large"), Err(GgufError::OutOfRange { .. })));
    assert_eq!(meta.f64("f64").unwrap(), Some(0.5));
    assert!(meta.i32s("list").unwrap().unwrap().eq([1, 2, 3]));
    assert!(meta.i32s("large list").is_err());
    assert!(meta.f32s("floats").unwrap().unwrap().eq([0.5, -1.0]));
    assert!(matches!(meta.str("latin"), Err(GgufError::NotUtf8 { .. })));
    let Some(Value::String(bytes)) = meta.get("latin") else { panic!() };
    assert_eq!(bytes, [0xe9]);
    let keys: Vec<_> = meta.iter().map(|(key, ty, _)| (key, ty)).collect();
    assert_eq!(keys[0], ("negative", ValueType::I32));
    assert_eq!(keys.len(), 7);
}

#[test]
fn versions_alignments_and_nested_arrays() {
    let mut draft = Draft::llama();
    draft.version = 2;
    draft.alignment = 64;
    draft.key("general.alignment", Val::U64(64));
    // An array of two arrays, of one u8 and of none.
    let mut nested = vec![];
    nested.extend(9u32.to_le_bytes());
    nested.extend(2u64.to_le_bytes());
    for bytes in [&[5u8][..], &[]] {
        nested.extend(0u32.to_le_bytes());
        nested.extend((bytes.len() as u64).to_le_bytes());
        nested.extend(bytes);
    }
    draft.key("nested", Val::Raw(9, nested)).key("after", Val::U32(1));
    let gguf = Gguf::from_vec(draft.bytes()).unwrap();
    assert_eq!(gguf.version(), 2);
    assert_eq!(gguf.metadata().u32("after").unwrap(), Some(1));
    assert_eq!(gguf.metadata().array("nested").unwrap().unwrap().len(), 2);
    assert!(gguf.tensors().iter().all(|tensor| tensor.offset_bytes() % 64 == 0));
}

#[test]
fn tensors_in_any_order_with_gaps() {
    let mut draft = Draft::empty();
    draft.tensor("late", &[8], F32).tensor("early", &[16], F16);
    draft.tensors[0].offset = Some(128);
    draft.tensors[1].offset = Some(0);
    let mut bytes = draft.bytes();
    bytes.resize(bytes.len() + 200, 7);
    let gguf = Gguf::from_vec(bytes).unwrap();
    let start = |name| gguf.tensor(name).unwrap().offset_bytes();
    assert_eq!(start("late"), start("early") + 128);
}

#[test]
fn large_vocabularies_load_quickly() {
    let tokens: Vec<String> = (0..262_144).map(|id| format!("▁token{id}")).collect();
    let mut draft = Draft::empty();
    draft.key("tokens", Val::Strs(tokens.clone()));
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("large.gguf");
    fs::write(&path, draft.bytes()).unwrap();
    let start = std::time::Instant::now();
    let gguf = Gguf::open(&path).unwrap();
    assert!(gguf.metadata().strings("tokens").unwrap().unwrap().eq(tokens.iter()));
    // Far more than it takes; only something quadratic takes longer.
    assert!(start.elapsed().as_secs() < 5);
}

#[test]
fn split_files_are_one_model() {
    let dir = tempfile::tempdir().unwrap();
    let path = |n: u32| dir.path().join(format!("big-{n:05}-of-00003.gguf"));
    let part = |n: u16, tensors: &[&str]| {
        let mut draft = Draft::empty();
        draft.key("split.no", Val::U16(n)).key("split.count", Val::U16(3));
        if n == 0 {
            draft.key("split.tensors.count", Val::I32(3)).key("general.name", Val::Str("big"));
        }
        for name in tensors {
            draft.tensor(name, &[4], F32);
        }
        let mut bytes = draft.bytes();
        let filled = bytes.len() - 32 * tensors.len();
        bytes[filled..].fill(n as u8 + 1);
        bytes
    };
    fs::write(path(1), part(0, &[])).unwrap();
    fs::write(path(2), part(1, &["a", "b"])).unwrap();
    let error = Gguf::open(path(1)).unwrap_err().to_string();
    assert!(error.contains("big-00003-of-00003.gguf"), "{error}");

    fs::write(path(3), part(2, &["c"])).unwrap();
    let gguf = Gguf::open(path(1)).unwrap();
    assert_eq!(gguf.sources().len(), 3);
    assert_eq!(gguf.metadata().str("general.name").unwrap(), Some("big"));
    let first_byte = |name| gguf.tensor_to_vec(gguf.tensor(name).unwrap()).unwrap()[0];
    assert_eq!(["a", "b", "c"].map(first_byte), [2, 2, 3]);
    gguf.check_unchanged().unwrap();

    let error = Gguf::open(path(2)).unwrap_err().to_string();
    assert!(error.contains("part 2 of 3") && error.contains("big-00001-of-00003.gguf"), "{error}");
    assert!(matches!(Gguf::from_vec(part(0, &[])), Err(GgufError::BadSplit { .. })));
    // The same part twice, a tensor twice, a tensor fewer than announced, another name.
    fs::write(path(3), part(1, &["c"])).unwrap();
    assert!(matches!(Gguf::open(path(1)), Err(GgufError::Part { .. })));
    fs::write(path(3), part(2, &["a"])).unwrap();
    assert!(matches!(Gguf::open(path(1)), Err(GgufError::DuplicateTensor { .. })));
    fs::write(path(3), part(2, &[])).unwrap();
    assert!(matches!(Gguf::open(path(1)), Err(GgufError::BadSplit { .. })));
    fs::rename(path(1), dir.path().join("other.gguf")).unwrap();
    let error = Gguf::open(dir.path().join("other.gguf")).unwrap_err().to_string();
    assert!(error.contains("-00001-of-00003.gguf"), "{error}");
}

#[test]
fn files_that_change_while_they_are_read() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("whale.gguf");
    fs::write(&path, WHALE).unwrap();
    let gguf = Gguf::open(&path).unwrap();
    let last = gguf.tensors().iter().max_by_key(|tensor| tensor.offset_bytes()).unwrap();
    let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(1_000_000).unwrap();
    let error = gguf.tensor_to_vec(last).unwrap_err();
    assert!(matches!(error, GgufError::Changed { .. }), "{error}");
    assert!(matches!(gguf.check_unchanged(), Err(GgufError::Changed { .. })));

    // Rewritten in place, the same length, at another time.
    fs::write(&path, WHALE).unwrap();
    let gguf = Gguf::open(&path).unwrap();
    let mut file = fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.write_all(b"GGUF").unwrap();
    let later = std::time::SystemTime::now() + std::time::Duration::from_secs(2);
    file.set_modified(later).unwrap();
    assert!(matches!(gguf.check_unchanged(), Err(GgufError::Changed { .. })));
}

#[cfg(unix)]
#[test]
fn symbolic_links_and_read_only_files() {
    use std::os::unix::fs::{PermissionsExt, symlink};
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("whale.gguf");
    fs::write(&path, WHALE).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o444)).unwrap();
    symlink(&path, dir.path().join("link.gguf")).unwrap();
    let gguf = Gguf::open(dir.path().join("link.gguf")).unwrap();
    assert_eq!(gguf.tensors().len(), 56);
}

proptest! {
    /// What the writer writes is what the reader reads.
    #[test]
    fn written_files_read_back(
        strings in vec(".{0,12}", 0..8),
        ints in vec(any::<i32>(), 0..8),
        floats in vec(-1e9f32..1e9, 0..8),
        tensors in vec((1u64..5, 1u64..5, 0usize..11), 0..6),
        alignment in prop::sample::select(vec![8u32, 32, 256]),
        version in 2u32..4,
        piece in 1usize..4000,
    ) {
        let mut writer = GgufWriter::new();
        writer.version(version).alignment(alignment);
        writer.strings("s", &strings).i32s("i", ints.iter().copied());
        writer.f32s("f", floats.iter().copied()).bool("b", true).str("t", "é").u64("u", 1 << 40);
        for (index, &(blocks, rows, ty)) in tensors.iter().enumerate() {
            let ty = WeightType::ALL[ty];
            let n_in = blocks * u64::from(ty.block_elems());
            writer.tensor(&format!("t{index}"), &[n_in, rows], ty);
        }
        let sizes: Vec<usize> = tensors.iter().map(|&(blocks, rows, ty)| {
            (blocks * rows) as usize * WeightType::ALL[ty].block_bytes() as usize
        }).collect();
        let content = |index: usize| -> Vec<u8> {
            (0..sizes[index]).map(|at| (at * 31 + index) as u8).collect()
        };
        let mut sink = writer.begin(Vec::new()).unwrap();
        for index in 0..tensors.len() {
            for piece in content(index).chunks(piece) {
                sink.write(piece).unwrap();
            }
        }
        prop_assert!(sink.write(&[0]).is_err(), "no tensor is left");
        let bytes = sink.finish().unwrap();
        prop_assert_eq!(bytes.len() as u64, writer.file_bytes());

        let gguf = Gguf::from_vec(bytes).unwrap();
        let meta = gguf.metadata();
        prop_assert_eq!(gguf.version(), version);
        prop_assert!(meta.strings("s").unwrap().unwrap().eq(strings.iter()));
        prop_assert!(meta.i32s("i").unwrap().unwrap().eq(ints));
        prop_assert!(meta.f32s("f").unwrap().unwrap().eq(floats));
        prop_assert_eq!(meta.bool("b").unwrap(), Some(true));
        prop_assert_eq!(meta.str("t").unwrap(), Some("é"));
        prop_assert_eq!(meta.u64("u").unwrap(), Some(1 << 40));
        prop_assert_eq!(gguf.tensors().len(), tensors.len());
        for (index, tensor) in gguf.tensors().iter().enumerate() {
            prop_assert_eq!(gguf.tensor_to_vec(tensor).unwrap(), content(index));
            prop_assert_eq!(tensor.offset_bytes() % u64::from(alignment), 0);
        }
    }
}

#[test]
fn an_unfinished_file_is_not_finished() {
    let mut writer = GgufWriter::new();
    writer.tensor("a", &[4], WeightType::F32);
    let mut sink = writer.begin(Vec::new()).unwrap();
    sink.write(&[0; 12]).unwrap();
    assert!(sink.write(&[0; 5]).is_err(), "one byte too many");
    assert!(sink.finish().is_err());
}
