//! The 256 characters that byte-level BPE writes bytes with.
//!
//! Printable Latin-1 characters stand for themselves; the 68 other bytes, in order, are written as
//! U+0100 onwards, so that a token's text never holds a space or a control character.

/// First character that stands for a byte which cannot stand for itself.
const FIRST_SHIFTED: u32 = 0x100;

const fn stands_for_itself(byte: u8) -> bool {
    matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF)
}

/// `CHARS[byte]` is the character for `byte`.
const CHARS: [char; 256] = {
    let mut chars = ['\0'; 256];
    let mut shifted = 0;
    let mut byte = 0usize;
    while byte < 256 {
        let code = if stands_for_itself(byte as u8) {
            byte as u32
        } else {
            shifted += 1;
            FIRST_SHIFTED + shifted - 1
        };
        chars[byte] = match char::from_u32(code) {
            Some(c) => c,
            None => panic!("the alphabet lies below the surrogates"),
        };
        byte += 1;
    }
    chars
};

/// `SHIFTED[i]` is the byte that U+0100 + i stands for.
const SHIFTED: [u8; 68] = {
    let mut bytes = [0; 68];
    let mut byte = 0usize;
    let mut at = 0;
    while byte < 256 {
        if !stands_for_itself(byte as u8) {
            bytes[at] = byte as u8;
            at += 1;
        }
        byte += 1;
    }
    bytes
};

/// The character that stands for `byte`.
pub(super) fn char_of(byte: u8) -> char {
    CHARS[usize::from(byte)]
}

/// The byte that `c` stands for.
pub(super) fn byte_of(c: char) -> Option<u8> {
    match u8::try_from(c) {
        Ok(byte) => stands_for_itself(byte).then_some(byte),
        Err(_) => SHIFTED.get(u32::from(c).checked_sub(FIRST_SHIFTED)? as usize).copied(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_has_its_own_character_and_comes_back() {
        for byte in 0..=255 {
            assert_eq!(byte_of(char_of(byte)), Some(byte));
        }
        assert_eq!(char_of(b' '), 'Ġ');
        assert_eq!(char_of(b'\n'), 'Ċ');
        assert_eq!(char_of(b'a'), 'a');
        assert_eq!(byte_of(' '), None);
        assert_eq!(byte_of('\u{144}'), None);
        assert_eq!(byte_of('鯨'), None);
    }
}
