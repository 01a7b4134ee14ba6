//! Telling the template's own text from the messages' text in what it renders.
//!
//! The conversation is rendered a second time with a mark in place of each message: a string that
//! nobody can guess. What lies between the marks is the template's own; aligned with the real
//! rendering, it leaves the messages.

use std::hash::{BuildHasher, Hasher, RandomState};

use super::Conversation;
use crate::tokenizer::{Segment, Special};

/// Stands before and after each mark; a private-use character, so that nothing trims it away.
const EDGE: char = '\u{F8FF}';

pub(super) struct Marks {
    /// What every mark starts with.
    prefix: String,
}

impl Marks {
    /// Marks that occur in no message.
    pub(super) fn new(conversation: &Conversation) -> Marks {
        loop {
            // Each `RandomState` has its own random keys; nothing else is needed of it.
            let random = || RandomState::new().build_hasher().finish();
            let prefix = format!("{EDGE}{:016x}{:016x}.", random(), random());
            if conversation.messages.iter().all(|m| !m.content.contains(&prefix)) {
                return Marks { prefix };
            }
        }
    }

    /// The conversation with message `i` replaced by mark `i`.
    pub(super) fn mark(&self, conversation: &Conversation) -> Conversation {
        let mut marked = conversation.clone();
        for (i, message) in marked.messages.iter_mut().enumerate() {
            message.content = format!("{}{i}{EDGE}", self.prefix);
        }
        marked
    }

    /// `rendered` cut into the template's text and the messages', or `None` where the template does
    /// more to messages than trimming them.
    pub(super) fn split<'t>(
        &self,
        rendered: &'t str,
        marked: &str,
        conversation: &Conversation,
    ) -> Option<Vec<Segment<'t>>> {
        let mut parts = marked.split(self.prefix.as_str());
        let mut segments = Vec::new();
        let mut rest = rendered;
        let mut take = |rest: &mut &'t str, bytes: usize, special: Special| {
            let (text, after) = rest.split_at(bytes);
            segments.push(Segment { text, special });
            *rest = after;
        };

        let own = parts.next()?;
        rest.starts_with(own).then(|| take(&mut rest, own.len(), Special::Parse))?;
        let mut parts = parts.peekable();
        while let Some(part) = parts.next() {
            let (index, own) = part.split_once(EDGE)?;
            let content = conversation.messages.get(index.parse::<usize>().ok()?)?.content.as_str();
            let is_last = parts.peek().is_none();
            let fits = |said: &&str| match rest.strip_prefix(*said) {
                Some(after) if is_last => after == own,
                Some(after) => after.starts_with(own),
                None => false,
            };
            let said = [content, content.trim(), content.trim_start(), content.trim_end()]
                .into_iter()
                .find(fits)?;
            take(&mut rest, said.len(), Special::AsText);
            take(&mut rest, own.len(), Special::Parse);
        }
        rest.is_empty().then_some(segments)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chat::Role;

    fn split(
        rendered: &str,
        messages: &[&str],
        marked: impl Fn(&[&str]) -> String,
    ) -> Option<Vec<(String, Special)>> {
        let mut conversation = Conversation::default();
        messages.iter().for_each(|m| conversation.push(Role::User, *m));
        let marks = Marks::new(&conversation);
        let marked_conversation = marks.mark(&conversation);
        let contents: Vec<&str> =
            marked_conversation.messages.iter().map(|m| m.content.as_str()).collect();
        let segments = marks.split(rendered, &marked(&contents), &conversation)?;
        Some(segments.into_iter().map(|s| (s.text.to_owned(), s.special)).collect())
    }

    #[test]
    fn messages_are_found_between_the_templates_own_text() {
        use Special::{AsText, Parse};
        let parts = split("<a>x<b> y <c>", &["x", " y "], |m| format!("<a>{}<b>{}<c>", m[0], m[1]));
        let expected =
            [("<a>", Parse), ("x", AsText), ("<b>", Parse), (" y ", AsText), ("<c>", Parse)];
        let expected = expected.map(|(text, special)| (text.to_owned(), special)).to_vec();
        assert_eq!(parts, Some(expected));
        // Trimmed, repeated, in another order, empty.
        assert!(split("<y><x>", &[" x", "y "], |m| format!("<{}><{}>", m[1], m[0])).is_some());
        assert!(split("xx", &["x"], |m| m[0].repeat(2)).is_some());
        assert!(split("<>", &["  "], |m| format!("<{}>", m[0])).is_some());
        assert!(split("same", &["gone"], |_| "same".into()).is_some());
        // Rewritten.
        assert_eq!(split("<X>", &["x"], |m| format!("<{}>", m[0])), None);
        assert_eq!(split("<x>!", &["x"], |m| format!("<{}>", m[0])), None);
    }
}
