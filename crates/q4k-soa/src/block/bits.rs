//! The moves of nibbles and bits between GGUF's order and the planes', several bytes at a time in
//! plain integers, so that they are fast on every target.

const LOW_NIBBLES: u128 = 0x0f0f_0f0f_0f0f_0f0f_0f0f_0f0f_0f0f_0f0f;

/// 32 bytes whose low nibbles are one group and whose high nibbles are the next become those two
/// groups of 16 bytes, each with weight i low and weight 16 + i high in byte i.
#[inline(always)]
pub(crate) fn split_nibbles(bytes: &[u8; 32]) -> [[u8; 16]; 2] {
    let [first, second] = halves(bytes);
    let even = (first & LOW_NIBBLES) | (second & LOW_NIBBLES) << 4;
    let odd = (first >> 4 & LOW_NIBBLES) | (second & !LOW_NIBBLES);
    [even.to_le_bytes(), odd.to_le_bytes()]
}

/// The inverse of [`split_nibbles`].
#[inline(always)]
pub(crate) fn join_nibbles(even: &[u8; 16], odd: &[u8; 16]) -> [u8; 32] {
    let (even, odd) = (u128::from_le_bytes(*even), u128::from_le_bytes(*odd));
    let first = (even & LOW_NIBBLES) | (odd & LOW_NIBBLES) << 4;
    let second = (even >> 4 & LOW_NIBBLES) | (odd & !LOW_NIBBLES);
    let mut bytes = [0; 32];
    bytes[..16].copy_from_slice(&first.to_le_bytes());
    bytes[16..].copy_from_slice(&second.to_le_bytes());
    bytes
}

fn halves(bytes: &[u8; 32]) -> [u128; 2] {
    let halves = bytes.as_chunks::<16>().0;
    [u128::from_le_bytes(halves[0]), u128::from_le_bytes(halves[1])]
}

/// The matrix of 4 × 4 pairs of bits at each of eight byte positions, transposed: pair `row` of
/// word `column` goes to pair `column` of word `row`. Its own inverse.
#[inline(always)]
pub(crate) fn transpose_pairs(words: [u64; 4]) -> [u64; 4] {
    const LOWEST: u64 = 0x0303_0303_0303_0303;
    core::array::from_fn(|row| {
        let pick = |column: usize| (words[column] >> (2 * row) & LOWEST) << (2 * column);
        pick(0) | pick(1) | pick(2) | pick(3)
    })
}

/// The 8 × 8 bits of a word, transposed: bit `column` of byte `row` goes to bit `row` of byte
/// `column`. Its own inverse.
#[inline(always)]
pub(crate) fn transpose_bits(word: u64) -> u64 {
    let swap = |word: u64, shift: u32, mask: u64| {
        let moved = (word ^ word >> shift) & mask;
        word ^ moved ^ moved << shift
    };
    let word = swap(word, 7, 0x00aa_00aa_00aa_00aa);
    let word = swap(word, 14, 0x0000_cccc_0000_cccc);
    swap(word, 28, 0x0000_0000_f0f0_f0f0)
}

/// 16 bytes of nibbles as 32 small integers: low nibbles, then high ones.
#[inline(always)]
pub(crate) fn nibbles(bytes: &[u8; 16]) -> [i8; 32] {
    bytemuck::cast(nibble_words(bytes))
}

/// As [`nibbles`], with bit i of `high` as the fifth bit of weight i.
#[inline(always)]
pub(crate) fn nibbles_and_bit(bytes: &[u8; 16], high: &[u8; 4]) -> [i8; 32] {
    const BIT_OF_BYTE: u64 = 0x8040_2010_0804_0201;
    const LOW_SEVEN: u64 = 0x7f7f_7f7f_7f7f_7f7f;
    const FIFTH: u64 = 0x1010_1010_1010_1010;
    let mut words = nibble_words(bytes);
    for (word, bits) in words.iter_mut().zip(high) {
        // Byte i keeps bit i alone; adding 127 carries it, wherever it is, into bit 7 of the byte.
        let spread = u64::from_le_bytes([*bits; 8]) & BIT_OF_BYTE;
        let carried = ((spread & LOW_SEVEN) + LOW_SEVEN) | spread;
        *word |= (carried >> 3 & FIFTH).to_le();
    }
    bytemuck::cast(words)
}

/// As [`nibbles`], with two more bits: those of weights i, 8 + i, 16 + i, 24 + i in byte i of
/// `high`.
#[inline(always)]
pub(crate) fn nibbles_and_pair(bytes: &[u8; 16], high: &[u8; 8]) -> [i8; 32] {
    const PAIR: u64 = 0x3030_3030_3030_3030;
    let mut words = nibble_words(bytes);
    let high = u64::from_le_bytes(*high);
    for (word, pair) in words.iter_mut().zip([high << 4, high << 2, high, high >> 2]) {
        *word |= (pair & PAIR).to_le();
    }
    bytemuck::cast(words)
}

/// The integers of [`nibbles`], eight to a word as they lie in memory.
#[inline(always)]
fn nibble_words(bytes: &[u8; 16]) -> [u64; 4] {
    let [a, b]: [u64; 2] = bytemuck::cast(*bytes);
    let low = LOW_NIBBLES as u64;
    [a & low, b & low, a >> 4 & low, b >> 4 & low]
}

/// Nibbles of 32 small integers, the inverse of [`nibbles`].
pub(crate) fn from_nibbles(quants: &[u8; 32]) -> [u8; 16] {
    core::array::from_fn(|i| (quants[i] & 15) | quants[16 + i] << 4)
}

/// The fifth bits of 32 small integers as a word.
pub(crate) fn fifth_bits(quants: &[u8; 32]) -> [u8; 4] {
    let bits = quants.iter().enumerate().map(|(i, &quant)| u32::from(quant >> 4 & 1) << i);
    bits.fold(0, |word, bit| word | bit).to_le_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_nibble_goes_where_the_documentation_says() {
        let mut bytes = [0; 32];
        bytes[16 + 3] = 0x72; // weight 19 of the even group is 2, of the odd one 7
        let [even, odd] = split_nibbles(&bytes);
        assert_eq!((even[3], odd[3]), (0x20, 0x70));
        assert_eq!(nibbles(&even)[19], 2);
        assert_eq!(nibbles(&odd)[19], 7);
    }

    #[test]
    fn a_bit_goes_across_the_diagonal() {
        for (row, column) in (0..8).flat_map(|row| (0..8).map(move |column| (row, column))) {
            let word = 1u64 << (8 * row + column);
            assert_eq!(transpose_bits(word), 1 << (8 * column + row));
        }
    }

    proptest! {
        #[test]
        fn transpositions_are_their_own_inverse(words: [u64; 4]) {
            prop_assert_eq!(transpose_pairs(transpose_pairs(words)), words);
            prop_assert_eq!(transpose_bits(transpose_bits(words[0])), words[0]);
        }

        #[test]
        fn nibbles_round_trip(bytes: [u8; 32], group: [u8; 16]) {
            let [even, odd] = split_nibbles(&bytes);
            prop_assert_eq!(join_nibbles(&even, &odd), bytes);
            prop_assert_eq!(from_nibbles(&nibbles(&group).map(|quant| quant as u8)), group);
        }

        #[test]
        fn pairs_of_bits_go_to_their_weights(group: [u8; 16], high: [u8; 8]) {
            let quants = nibbles_and_pair(&group, &high);
            for (i, (quant, low)) in quants.into_iter().zip(nibbles(&group)).enumerate() {
                prop_assert_eq!(quant, low + 16 * (high[i % 8] >> (2 * (i / 8)) & 3) as i8);
            }
        }

        #[test]
        fn fifth_bits_go_to_their_weights(group: [u8; 16], high: [u8; 4]) {
            let quants = nibbles_and_bit(&group, &high);
            for (i, (quant, low)) in quants.into_iter().zip(nibbles(&group)).enumerate() {
                prop_assert_eq!(quant, low + 16 * (high[i / 8] >> (i % 8) & 1) as i8);
            }
        }

        #[test]
        fn fifth_bits_round_trip(group: [u8; 16], high: [u8; 4]) {
            let quants = nibbles_and_bit(&group, &high).map(|quant| quant as u8);
            prop_assert_eq!(from_nibbles(&quants), group);
            prop_assert_eq!(fifth_bits(&quants), high);
        }
    }
}
