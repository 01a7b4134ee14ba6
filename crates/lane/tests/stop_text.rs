//! Stop texts and whole characters in text that comes in pieces.

use lane::stop_text::{StopTexts, StoppedText};
use lane::tokenizer::{Special, Tokenizer};
use lane::{GenerateOptions, LaneOptions, ModelFile, Sampling, StopReason};
use proptest::prelude::*;

/// The text before the stop text that is complete first, by the definition; and whether one is.
fn expected(text: &str, stops: &[String]) -> (String, bool) {
    let ends = text.char_indices().map(|(at, c)| at + c.len_utf8());
    for end in ends {
        let complete = stops.iter().filter(|stop| text[..end].ends_with(stop.as_str()));
        if let Some(len) = complete.map(String::len).max() {
            return (text[..end - len].to_owned(), true);
        }
    }
    (text.to_owned(), false)
}

fn whale() -> Tokenizer {
    ModelFile::open(None).unwrap().tokenizer().unwrap()
}

/// Texts in which stop texts are frequent and overlap.
fn texts() -> impl Strategy<Value = String> {
    prop::collection::vec(prop::sample::select(vec!['a', 'b', 'é', '鯨', '🐋']), 0..30)
        .prop_map(String::from_iter)
}

fn stop_texts() -> impl Strategy<Value = Vec<String>> {
    let stop = prop::collection::vec(prop::sample::select(vec!['a', 'b', 'é', '鯨', '🐋']), 1..5);
    prop::collection::vec(stop.prop_map(String::from_iter), 0..4)
}

proptest! {
    #[test]
    fn pieces_make_no_difference(
        text in texts(),
        stops in stop_texts(),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..8),
    ) {
        let chars: Vec<char> = text.chars().collect();
        let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(chars.len() + 1)).collect();
        cuts.extend([0, chars.len()]);
        cuts.sort_unstable();
        let (before, found) = expected(&text, &stops);
        let (mut stopping, mut out, mut seen) = (StopTexts::new(&stops), String::new(), String::new());
        for piece in cuts.windows(2).map(|cut| String::from_iter(&chars[cut[0]..cut[1]])) {
            out += &stopping.push(&piece);
            seen += &piece;
            prop_assert!(before.starts_with(&out), "{out:?} came out of {before:?}");
            // Held back is the beginning of a stop text, and the longest there is.
            if !stopping.found() {
                let held = &seen[out.len()..];
                prop_assert!(held.is_empty() || stops.iter().any(|stop| stop.starts_with(held)));
                let certain = out.char_indices().map(|(at, _)| &seen[at..]);
                for rest in certain {
                    prop_assert!(!stops.iter().any(|stop| stop.starts_with(rest)), "{rest:?}");
                }
            }
        }
        prop_assert_eq!(stopping.found(), found);
        out += &stopping.finish();
        prop_assert_eq!(out, before);
    }

    #[test]
    fn tokens_come_as_whole_characters_up_to_a_stop_text(text in texts(), stops in stop_texts()) {
        let tokenizer = whale();
        let ids = tokenizer.encode(&text, Special::AsText).unwrap();
        let mut stopped = StoppedText::new(&tokenizer, &stops);
        let mut out = String::new();
        for &id in &ids {
            let piece = stopped.push(id);
            prop_assert!(!piece.contains(char::REPLACEMENT_CHARACTER), "{piece:?}");
            out += &piece;
        }
        out += &stopped.finish();
        let (before, found) = expected(&text, &stops);
        prop_assert_eq!(out, before);
        prop_assert_eq!(stopped.found(), found);
    }
}

#[test]
fn a_character_cut_off_at_the_end_is_replaced() {
    let tokenizer = whale();
    let mut ids = tokenizer.encode("a🐋", Special::AsText).unwrap();
    ids.pop();
    let mut stopped = StoppedText::new(&tokenizer, &["z".into()]);
    let text: String = ids.iter().map(|&id| stopped.push(id)).collect();
    assert_eq!(text + &stopped.finish(), "a\u{FFFD}");
}

#[test]
fn a_generation_ends_at_its_stop_text_and_does_not_tell_it() {
    let lane = ModelFile::open(None).unwrap().load(&LaneOptions::default(), &mut |_| {}).unwrap();
    let prompt = lane.tokenizer().encode_prompt("Call me Ishmael.", Special::AsText).unwrap();
    let options =
        GenerateOptions { n_tokens: 24, sampling: Sampling::GREEDY, ..Default::default() };
    let text_of = |options| {
        let mut generation = lane.generate(&prompt, options).unwrap();
        let mut text: String = generation.by_ref().map(|token| token.unwrap().text).collect();
        text += &generation.finish_text();
        (text, generation.stop_reason())
    };
    let (whole, stop) = text_of(options.clone());
    assert_eq!(stop, Some(StopReason::Length));
    // Across tokens: the end of a word and the beginning of the next.
    let middle = whole.char_indices().nth(whole.chars().count() / 2).unwrap().0;
    let space = middle + whole[middle..].find(' ').unwrap();
    let stop_text = whole[space - 2..space + 3].to_owned();
    let before = whole[..whole.find(&stop_text).unwrap()].to_owned();
    let stop = vec!["never there".into(), stop_text];
    let stopped = text_of(GenerateOptions { stop, ..options.clone() });
    assert_eq!(stopped, (before, Some(StopReason::Stop)));
    // What only begins a stop text at the end comes at last.
    let stop = vec![whole[middle..].to_owned() + "and more"];
    assert_eq!(text_of(GenerateOptions { stop, ..options }), (whole, Some(StopReason::Length)));
}
