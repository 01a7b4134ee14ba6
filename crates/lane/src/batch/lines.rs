//! Lines of a file or a pipe, none of them trusted to end.

use std::io::{self, BufRead};

/// Most bytes of a line.
pub const MAX_LINE_BYTES: usize = 16 << 20;

/// A line, or why it is none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Line {
    /// Its text, without the line end.
    Text(String),
    /// It is not UTF-8.
    NotUtf8,
    /// It is longer than [`MAX_LINE_BYTES`]; it was passed over.
    TooLong,
}

/// Reads the next line; `None` at the end. Of a line that is too long no more is kept than fits.
pub fn read_line(source: &mut impl BufRead, max_bytes: usize) -> io::Result<Option<Line>> {
    let (mut line, mut is_long, mut is_any) = (Vec::new(), false, false);
    loop {
        let available = match source.fill_buf() {
            Ok(available) => available,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        if available.is_empty() {
            break;
        }
        is_any = true;
        let end = available.iter().position(|&byte| byte == b'\n');
        let piece = &available[..end.unwrap_or(available.len())];
        is_long |= line.len() + piece.len() > max_bytes;
        if !is_long {
            line.extend_from_slice(piece);
        }
        let used = piece.len() + usize::from(end.is_some());
        source.consume(used);
        if end.is_some() {
            break;
        }
    }
    if !is_any {
        return Ok(None);
    }
    if line.last() == Some(&b'\r') {
        line.pop();
    }
    Ok(Some(match String::from_utf8(line) {
        _ if is_long => Line::TooLong,
        Ok(text) => Line::Text(text),
        Err(_) => Line::NotUtf8,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(bytes: &[u8]) -> Vec<Line> {
        // Pieces of any length come to the same.
        let read = |piece| {
            let mut source = io::BufReader::with_capacity(piece, bytes);
            std::iter::from_fn(|| read_line(&mut source, 4).unwrap()).collect::<Vec<_>>()
        };
        let whole = read(64);
        (1..8).for_each(|piece| assert_eq!(read(piece), whole));
        whole
    }

    fn text(text: &str) -> Line {
        Line::Text(text.into())
    }

    #[test]
    fn lines_end_where_they_end() {
        assert_eq!(lines(b"a\n\nbc\r\nd"), [text("a"), text(""), text("bc"), text("d")]);
        assert_eq!(lines(b""), []);
        assert_eq!(lines(b"\n"), [text("")]);
    }

    #[test]
    fn what_is_no_line_stops_no_other() {
        assert_eq!(lines(b"12345678\nab\n"), [Line::TooLong, text("ab")]);
        assert_eq!(lines(b"\xff\nab"), [Line::NotUtf8, text("ab")]);
    }
}
