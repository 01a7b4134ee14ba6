//! Any bytes as a sequence's state: read or refused, and what was read is written the same.
#![no_main]

use lane::saved_state::SavedState;
use libfuzzer_sys::fuzz_target;
use xxhash_rust::xxh3::xxh3_64;

fuzz_target!(|bytes: &[u8]| {
    read(bytes);
    // With the checksum it should have, so that the rest is reached too.
    let mut whole = bytes.to_vec();
    whole.extend(xxh3_64(bytes).to_le_bytes());
    read(&whole);
});

fn read(bytes: &[u8]) {
    let Ok(state) = SavedState::from_bytes(bytes) else { return };
    // Slots without a token are written as zeros, whatever they were.
    let written = state.to_bytes();
    assert_eq!(written.len(), bytes.len());
    let again = SavedState::from_bytes(&written).expect("what was written can be read");
    assert_eq!((again.shape, &again.tokens), (state.shape, &state.tokens));
    assert!(again.to_bytes() == written);
}
