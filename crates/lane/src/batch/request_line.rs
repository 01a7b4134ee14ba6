//! One line of a request file: JSON in, a request out, or one sentence about what is wrong.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::chat::{Conversation, Role};
use crate::sampling::Sampling;

/// A request as its line says it.
#[derive(Clone, Debug, PartialEq)]
pub struct RequestLine {
    /// The caller's name for it.
    pub id: Option<RequestId>,
    /// What to go on from.
    pub prompt: Prompt,
    /// Tokens to generate at most.
    pub n_tokens: u32,
    /// How each is chosen.
    pub sampling: Sampling,
    /// Texts that end the answer.
    pub stop: Vec<String>,
    /// Requests of different salts share no block of the cache; 0 is the salt of those that name
    /// none.
    pub salt: u64,
}

/// A caller's name for a request: given back as it was.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum RequestId {
    /// A whole number.
    Number(i64),
    /// A text.
    Text(String),
}

/// What to go on from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Prompt {
    /// A text, as it is.
    Text(String),
    /// A conversation, for the model's chat template.
    Messages(Conversation),
}

/// A line that is no request.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{reason}")]
pub struct BadLine {
    /// Its id, where the line has one that can be read.
    pub id: Option<RequestId>,
    /// What is wrong with it.
    pub reason: String,
}

/// The fields of a line. Whatever a line does not say is as `lane generate` has it.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Fields {
    id: Option<Value>,
    prompt: Option<String>,
    messages: Option<Vec<Turn>>,
    n: Option<u32>,
    temp: Option<f32>,
    top_k: Option<u32>,
    top_p: Option<f32>,
    min_p: Option<f32>,
    seed: Option<u64>,
    stop: Option<Value>,
    salt: Option<Value>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Turn {
    role: String,
    content: String,
}

/// Tokens that a line asks for when it does not say.
pub const DEFAULT_N_TOKENS: u32 = 128;

impl RequestLine {
    /// Reads one line. Never panics, whatever the line holds.
    ///
    /// ```
    /// use lane::batch::{Prompt, RequestLine};
    ///
    /// let line = RequestLine::parse(r#"{"id": "a", "prompt": "Call me", "n": 8, "temp": 0}"#)?;
    /// assert_eq!(line.prompt, Prompt::Text("Call me".into()));
    /// assert_eq!((line.n_tokens, line.sampling.temperature), (8, 0.0));
    ///
    /// let bad = RequestLine::parse(r#"{"id": 7, "promt": "Call me"}"#).unwrap_err();
    /// assert!(bad.reason.starts_with("unknown field `promt`"));
    /// assert_eq!(bad.id, Some(lane::batch::RequestId::Number(7)));
    /// # Ok::<(), lane::batch::BadLine>(())
    /// ```
    pub fn parse(line: &str) -> Result<Self, BadLine> {
        let fields = || {
            // An array of the fields' values would do, too, if it were let.
            if !line.trim_start().starts_with('{') {
                return Err("a request is a JSON object".to_owned());
            }
            // Which line of the requests it is, is said beside it; here it is always the first.
            let position =
                |error: serde_json::Error| error.to_string().replace(" at line 1 ", " at ");
            serde_json::from_str::<Fields>(line).map_err(position)
        };
        let bad = |reason: String| BadLine { id: readable_id(line), reason: sentence(&reason) };
        fields().and_then(Self::of).map_err(bad)
    }

    fn of(fields: Fields) -> Result<Self, String> {
        let prompt = match (fields.prompt, fields.messages) {
            (Some(text), None) if text.is_empty() => return Err("`prompt` is empty".into()),
            (Some(text), None) => Prompt::Text(text),
            (None, Some(turns)) => Prompt::Messages(conversation(turns)?),
            (None, None) => return Err("neither `prompt` nor `messages` is given".into()),
            (Some(_), Some(_)) => return Err("`prompt` and `messages` exclude each other".into()),
        };
        let usual = Sampling::default();
        let sampling = Sampling {
            temperature: fields.temp.unwrap_or(usual.temperature),
            top_k: fields.top_k.unwrap_or(usual.top_k),
            top_p: fields.top_p.unwrap_or(usual.top_p),
            min_p: fields.min_p.unwrap_or(usual.min_p),
            seed: fields.seed.unwrap_or(usual.seed),
        };
        sampling.check().map_err(|error| error.to_string())?;
        Ok(Self {
            id: fields
                .id
                .map(|id| name(&id).ok_or("`id` must be a text or a whole number"))
                .transpose()?,
            prompt,
            n_tokens: fields.n.unwrap_or(DEFAULT_N_TOKENS),
            sampling,
            stop: fields.stop.map_or(Ok(Vec::new()), stop_texts)?,
            salt: fields.salt.map_or(Ok(0), salt)?,
        })
    }
}

/// A reason may quote the line, which may be long and hold anything: here it is one line of text.
fn sentence(reason: &str) -> String {
    const MAX_CHARS: usize = 300;
    let printable = |c: char| if c.is_control() { '\u{fffd}' } else { c };
    let mut sentence: String = reason.chars().take(MAX_CHARS).map(printable).collect();
    if reason.chars().nth(MAX_CHARS).is_some() {
        sentence.push('…');
    }
    sentence
}

/// The id of a line that is otherwise wrong.
fn readable_id(line: &str) -> Option<RequestId> {
    #[derive(Deserialize)]
    struct OnlyId {
        id: Value,
    }
    serde_json::from_str::<OnlyId>(line).ok().and_then(|only| name(&only.id))
}

fn name(id: &Value) -> Option<RequestId> {
    match id {
        Value::String(text) => Some(RequestId::Text(text.clone())),
        Value::Number(number) => number.as_i64().map(RequestId::Number),
        _ => None,
    }
}

fn conversation(turns: Vec<Turn>) -> Result<Conversation, String> {
    if turns.is_empty() {
        return Err("`messages` is empty".into());
    }
    let roles = [Role::System, Role::User, Role::Assistant, Role::Tool];
    let mut conversation = Conversation::default();
    for turn in turns {
        let role = roles.into_iter().find(|role| role.as_str() == turn.role);
        let known = || roles.map(Role::as_str).join(", ");
        let role = role.ok_or_else(|| format!("role {:?} is none of {}", turn.role, known()))?;
        conversation.push(role, turn.content);
    }
    Ok(conversation)
}

/// One text or a list of them.
fn stop_texts(stop: Value) -> Result<Vec<String>, String> {
    let texts = match stop {
        Value::String(text) => vec![Value::String(text)],
        Value::Array(texts) => texts,
        _ => return Err("`stop` must be a text or a list of texts".into()),
    };
    let text = |text| match text {
        Value::String(text) if text.is_empty() => Err("a text of `stop` is empty".to_owned()),
        Value::String(text) => Ok(text),
        _ => Err("`stop` must be a text or a list of texts".to_owned()),
    };
    texts.into_iter().map(text).collect()
}

/// A number as it is, a text by its hash. The empty text and 0 are the salt of requests without.
fn salt(salt: Value) -> Result<u64, String> {
    match salt {
        Value::String(text) if text.is_empty() => Ok(0),
        Value::String(text) => Ok(xxhash_rust::xxh3::xxh3_64(text.as_bytes()).max(1)),
        Value::Number(number) if number.is_u64() => Ok(number.as_u64().unwrap_or_default()),
        _ => Err("`salt` must be a text or a whole number from 0 up".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn reason(line: &str) -> String {
        RequestLine::parse(line).unwrap_err().reason
    }

    #[test]
    fn everything_can_be_said() {
        let line = r#"{"id": 3, "messages": [{"role": "system", "content": "s"},
            {"role": "user", "content": "u"}], "n": 5, "temp": 0.5, "top_k": 2, "top_p": 0.25,
            "min_p": 0.125, "seed": 18446744073709551615, "stop": ["a", "b"], "salt": "tenant"}"#;
        let line = RequestLine::parse(line).unwrap();
        assert_eq!(line.id, Some(RequestId::Number(3)));
        let Prompt::Messages(conversation) = line.prompt else { panic!("no messages") };
        assert_eq!(conversation.messages[1].role, Role::User);
        let (temperature, top_k, top_p, min_p, seed) = (0.5, 2, 0.25, 0.125, u64::MAX);
        assert_eq!(line.sampling, Sampling { temperature, top_k, top_p, min_p, seed });
        assert_eq!((line.n_tokens, line.stop), (5, vec!["a".to_owned(), "b".into()]));
        assert_ne!(line.salt, 0);
    }

    #[test]
    fn what_is_not_said_is_as_usual() {
        let line = RequestLine::parse(r#"{"prompt": "x"}"#).unwrap();
        assert_eq!((line.id, line.n_tokens, line.salt), (None, DEFAULT_N_TOKENS, 0));
        assert_eq!((line.sampling, line.stop), (Sampling::default(), Vec::new()));
    }

    #[test]
    fn what_is_wrong_is_said_in_one_sentence() {
        assert_eq!(reason("{}"), "neither `prompt` nor `messages` is given");
        assert_eq!(
            reason(r#"{"prompt": "", "messages": []}"#),
            "`prompt` and `messages` exclude each other"
        );
        assert_eq!(reason(r#"{"prompt": ""}"#), "`prompt` is empty");
        assert_eq!(reason(r#"{"messages": []}"#), "`messages` is empty");
        assert_eq!(
            reason(r#"{"messages": [{"role": "god", "content": ""}]}"#),
            "role \"god\" is none of system, user, assistant, tool"
        );
        let with = |field: &str| reason(&format!(r#"{{"prompt": "x", {field}}}"#));
        assert_eq!(with(r#""id": [1]"#), "`id` must be a text or a whole number");
        assert_eq!(with(r#""temp": -1"#), "temperature -1: must be a finite number from 0 up");
        assert_eq!(with(r#""top_p": 2"#), "top-p 2: must be from 0 to 1");
        assert_eq!(with(r#""stop": """#), "a text of `stop` is empty");
        assert_eq!(with(r#""stop": [1]"#), "`stop` must be a text or a list of texts");
        assert_eq!(with(r#""salt": -1"#), "`salt` must be a text or a whole number from 0 up");
        assert!(with(r#""n": -1"#).starts_with("invalid value: integer `-1`"));
        assert!(with(r#""prompt": "y""#).starts_with("duplicate field `prompt`"));
        assert_eq!(reason(r#"[null, "x"]"#), "a request is a JSON object");
        assert_eq!(reason("{"), "EOF while parsing an object at column 1");
        // Keys are quoted, and may hold anything.
        assert!(reason(r#"{"a\nb": 1}"#).starts_with("unknown field `a\u{fffd}b`"));
        let long = reason(&format!(r#"{{"{}": 1}}"#, "x".repeat(1000)));
        assert!(long.ends_with('…') && long.len() < 400, "{long}");
        let deep = "[".repeat(100_000);
        assert!(with(&format!(r#""id": {deep}"#)).starts_with("recursion limit exceeded"));
    }

    #[test]
    fn equal_salts_are_equal_and_others_differ() {
        let salt = |salt: &str| {
            RequestLine::parse(&format!(r#"{{"prompt": "x", "salt": {salt}}}"#)).unwrap().salt
        };
        assert_eq!(salt(r#""a""#), salt(r#""a""#));
        assert_ne!(salt(r#""a""#), salt(r#""b""#));
        assert_eq!((salt("7"), salt("0"), salt(r#""""#)), (7, 0, 0));
    }

    proptest! {
        #[test]
        fn no_line_makes_it_panic(line in "\\PC*") {
            let _ = RequestLine::parse(&line);
        }

        #[test]
        fn nor_does_a_line_that_looks_like_a_request(
            field in "id|prompt|messages|n|temp|top_k|top_p|min_p|seed|stop|salt|other",
            value in r#"-?[0-9]{0,25}(\.[0-9]{1,4})?(e[0-9]{1,3})?|"[a-z]{0,3}"|\[("a",?){0,2}\]|null|\{\}"#,
        ) {
            let _ = RequestLine::parse(&format!(r#"{{"prompt": "x", "{field}": {value}}}"#));
        }
    }
}
