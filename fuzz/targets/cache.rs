//! Any bytes as the file that keeps a packed model: refused, or each chunk is what was written.
//!
//! The model is made up. What is read of the file is bounded by what the model says, not the file.
#![no_main]

use lane::loading::read_cache;
use libfuzzer_sys::fuzz_target;
use q4k_soa::checksum;

const KEY: u64 = 0x77_6861_6c65;
const N_MATRICES: usize = 3;
const CHUNK_BYTES: [usize; 5] = [64, 1, 0, 700, 32];
/// Words before the tables, and of the tables.
const HEAD_WORDS: usize = 5;
const TABLE_WORDS: usize = N_MATRICES + CHUNK_BYTES.len();
/// Where the chunks begin.
const DATA: usize = 4096;

fuzz_target!(|bytes: &[u8]| {
    let _ = read(bytes);
    // As long as it should be, so that the header is looked at.
    let mut file = bytes.to_vec();
    file.resize(DATA + CHUNK_BYTES.iter().sum::<usize>(), 0);
    let _ = read(&file);
    // With a header that is whole, so that the tables are.
    for (place, word) in [u64::from_le_bytes(*b"LANECACH"), 1, KEY].into_iter().enumerate() {
        put(&mut file, place, word);
    }
    put(&mut file, 3, N_MATRICES as u64);
    put(&mut file, 4, CHUNK_BYTES.len() as u64);
    sign(&mut file);
    let _ = read(&file);
    // With everything as it should be; the file's last byte says of which chunks.
    let which = file[file.len() - 1];
    for place in 0..N_MATRICES {
        file[8 * (HEAD_WORDS + place)] |= 1;
    }
    let sums: Vec<u64> = chunks(&file).into_iter().map(checksum).collect();
    for (index, sum) in sums.into_iter().enumerate().filter(|(index, _)| which >> index & 1 == 1) {
        put(&mut file, HEAD_WORDS + N_MATRICES + index, sum);
    }
    sign(&mut file);
    let found = read(&file).expect("a whole header");
    for (index, chunk) in found.iter().enumerate() {
        assert!(which >> index & 1 == 0 || chunk.is_some(), "chunk {index} is whole");
    }
});

/// Reads a file, and compares what was read with what is in it.
fn read(file: &[u8]) -> Result<Vec<Option<Vec<u8>>>, String> {
    let found = read_cache(file, KEY, N_MATRICES, &CHUNK_BYTES);
    match &found {
        Err(reason) => assert!(!reason.is_empty() && !reason.contains('\n'), "{reason:?}"),
        Ok(found) => {
            for (index, (found, chunk)) in found.iter().zip(chunks(file)).enumerate() {
                let place = HEAD_WORDS + N_MATRICES + index;
                let written = checksum(chunk).to_le_bytes() == file[8 * place..8 * place + 8];
                assert_eq!(found.as_deref(), written.then_some(chunk));
            }
        }
    }
    found
}

fn put(file: &mut [u8], place: usize, word: u64) {
    file[8 * place..8 * place + 8].copy_from_slice(&word.to_le_bytes());
}

/// Gives the header the checksum that it should have.
fn sign(file: &mut [u8]) {
    let sum = checksum(&file[..8 * (HEAD_WORDS + TABLE_WORDS)]);
    put(file, HEAD_WORDS + TABLE_WORDS, sum);
}

/// What a file of the right length has in the places of the chunks.
fn chunks(file: &[u8]) -> Vec<&[u8]> {
    let mut rest = &file[DATA..];
    let mut chunks = Vec::new();
    for len in CHUNK_BYTES {
        let (chunk, after) = rest.split_at(len);
        chunks.push(chunk);
        rest = after;
    }
    chunks
}
