//! Texts that end an answer, found in text that comes in pieces.

use crate::tokenizer::{TextStream, Tokenizer};

/// Looks for stop texts in a text that comes in pieces.
///
/// The text ends where the stop text begins that is complete first (of several at once, the
/// longest), however the text is cut into pieces. What may still become a stop text is held back,
/// and nothing else is.
///
/// ```
/// use lane::stop_text::StopTexts;
///
/// let mut stops = StopTexts::new(&["\nUser:".to_owned()]);
/// assert_eq!(stops.push("Paris.\nUs"), "Paris.");
/// assert_eq!(stops.push("ually"), "\nUsually");
/// assert_eq!(stops.push("!\nUser: And"), "!");
/// assert!(stops.found());
/// ```
#[derive(Clone, Debug)]
pub struct StopTexts {
    stops: Vec<String>,
    held: String,
    found: bool,
}

impl StopTexts {
    /// Looks for these; empty ones are ignored.
    pub fn new(stops: &[String]) -> Self {
        let stops = stops.iter().filter(|stop| !stop.is_empty()).cloned().collect();
        Self { stops, held: String::new(), found: false }
    }

    /// Whether a stop text was found. No text comes after that.
    pub fn found(&self) -> bool {
        self.found
    }

    /// Adds a piece; returns the text that has become certain.
    pub fn push(&mut self, piece: &str) -> String {
        if self.found {
            return String::new();
        }
        if self.stops.is_empty() {
            return piece.to_owned();
        }
        let seen = self.held.len();
        self.held.push_str(piece);
        let end_of_first = self.held[seen..].char_indices().find_map(|(at, c)| {
            let end = seen + at + c.len_utf8();
            let complete = self.stops.iter().filter(|stop| self.held[..end].ends_with(*stop));
            complete.map(|stop| end - stop.len()).min()
        });
        if let Some(start) = end_of_first {
            self.found = true;
            self.held.truncate(start);
            return std::mem::take(&mut self.held);
        }
        let begins_stop = |start: usize| {
            let rest = &self.held[start..];
            self.stops.iter().any(|stop| stop.starts_with(rest))
        };
        let longest = self.stops.iter().map(String::len).max().unwrap_or(0);
        let certain = (self.held.len().saturating_sub(longest)..self.held.len())
            .find(|&start| self.held.is_char_boundary(start) && begins_stop(start))
            .unwrap_or(self.held.len());
        let held = self.held.split_off(certain);
        std::mem::replace(&mut self.held, held)
    }

    /// What is held back when no more pieces come.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

/// The text of token ids as they come: whole characters, up to the first stop text.
#[derive(Clone, Debug)]
pub struct StoppedText {
    stream: TextStream,
    stops: StopTexts,
}

impl StoppedText {
    /// Text that goes on after other tokens.
    pub fn new(tokenizer: &Tokenizer, stops: &[String]) -> Self {
        Self { stream: TextStream::new(tokenizer), stops: StopTexts::new(stops) }
    }

    /// Whether a stop text was found. No text comes after that.
    pub fn found(&self) -> bool {
        self.stops.found()
    }

    /// The text that becomes certain with `id`.
    pub fn push(&mut self, id: u32) -> String {
        self.stops.push(&self.stream.push(id))
    }

    /// What is held back when no more ids come.
    pub fn finish(&mut self) -> String {
        let last = self.stops.push(&self.stream.finish());
        last + &self.stops.finish()
    }
}
