//! The content key.

mod common;

use std::collections::HashSet;

use common::{Random, finite_matrix};
use proptest::prelude::*;
use q4k_soa::{Fingerprint, FingerprintHasher, PackedLayout, Shape, WeightType, fingerprint};
use xxhash_rust::xxh3::xxh3_64;

#[test]
fn it_is_xxh3_of_header_and_source() {
    let (layout, source, _) = finite_matrix(WeightType::Q4K, 3, 512);
    let mut bytes = Vec::new();
    for number in [12u64, 512, 3, 1, 1] {
        bytes.extend_from_slice(&number.to_le_bytes());
    }
    bytes.extend_from_slice(&source);
    assert_eq!(fingerprint(&layout, &source).unwrap().as_u64(), xxh3_64(&bytes));
}

/// Fixes the key for files that keep it.
#[test]
fn it_never_changes() {
    let layout = PackedLayout::planes(WeightType::Q6K, Shape { n_out: 2, n_in: 256 }).unwrap();
    let source: Vec<u8> = (0..420u32).map(|i| (i * 7) as u8).collect();
    let key = fingerprint(&layout, &source).unwrap();
    assert_eq!(key.to_string(), "263b2c7adb6690d8");
    assert_eq!("263b2c7adb6690d8".parse(), Ok(key));
}

#[test]
fn type_shape_and_content_all_count() {
    let mut keys = HashSet::new();
    let source = Random::new(3).bytes(144 * 34 * 4);
    let mut add = |ty, n_out, n_in, source: &[u8]| {
        let layout = PackedLayout::planes(ty, Shape { n_out, n_in }).unwrap();
        assert!(keys.insert(fingerprint(&layout, source).unwrap()));
    };
    add(WeightType::Q4K, 34 * 4, 256, &source);
    add(WeightType::Q4K, 34, 1024, &source);
    add(WeightType::Q8_0, 144, 128, &source);
    for bit in [0, 8 * 1000 + 3, 8 * source.len() - 1] {
        let mut changed = source.clone();
        changed[bit / 8] ^= 1 << (bit % 8);
        add(WeightType::Q4K, 34, 1024, &changed);
    }
}

#[test]
fn a_source_of_another_length_has_no_fingerprint() {
    let (layout, source, _) = finite_matrix(WeightType::Q4K, 3, 512);
    assert!(fingerprint(&layout, &source[1..]).is_err());
}

#[test]
fn zero_and_what_is_no_number_do_not_parse() {
    for text in ["0", "", "+1", "-1", "x", "10000000000000000"] {
        assert!(text.parse::<Fingerprint>().is_err(), "{text:?}");
    }
    assert_eq!("00000000000000ff".parse::<Fingerprint>().unwrap().as_u64(), 255);
}

proptest! {
    #[test]
    fn pieces_of_any_length_give_the_key_of_the_whole(cuts in prop::collection::vec(0usize..1800, 0..6)) {
        let (layout, source, _) = finite_matrix(WeightType::Q8_0, 26, 64);
        let mut cuts = cuts;
        cuts.extend([0, source.len()]);
        cuts.iter_mut().for_each(|cut| *cut = (*cut).min(source.len()));
        cuts.sort_unstable();
        let mut hasher = FingerprintHasher::new(&layout);
        cuts.windows(2).for_each(|cut| hasher.update(&source[cut[0]..cut[1]]));
        prop_assert_eq!(hasher.finish(), fingerprint(&layout, &source).unwrap());
    }
}
