//! The pieces of Python that chat templates rely on beyond Jinja.

use std::fmt;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, ValueKind, from_args};
use minijinja::{Environment, Error, ErrorKind, State, Value};
use serde::Serialize;
use serde_json::ser::{Formatter, Serializer};

use super::clock;

/// One unit of fuel pays for this many bytes.
const BYTES_PER_FUEL: u64 = 64;

/// An environment as the makers of chat templates expect it.
pub(super) fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    // Chat templates are written for both of these being on.
    if let Ok(syntax) = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build() {
        environment.set_syntax(syntax);
    }
    environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    environment.set_unknown_method_callback(call_method);
    environment.add_filter("tojson", to_json);
    environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, "raised").with_source(Raised(message)))
    });
    environment.add_function("strftime_now", |format: String| clock::now_in_utc(&format));
    environment
}

/// What a template says when it refuses a conversation.
#[derive(Debug)]
struct Raised(String);

impl fmt::Display for Raised {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
impl std::error::Error for Raised {}

/// The message that the template raised, if that is why it failed.
pub(super) fn raised(error: &Error) -> Option<String> {
    let mut source = std::error::Error::source(error);
    while let Some(error) = source {
        if let Some(Raised(message)) = error.downcast_ref() {
            return Some(message.clone());
        }
        source = error.source();
    }
    None
}

fn call_method(
    state: &mut State<'_, '_>,
    value: &Value,
    method: &str,
    args: &[Value],
) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::String => string_method(state, value.as_str().unwrap_or(""), method, args),
        ValueKind::Map => map_method(state, value, method, args),
        _ => Err(Error::from(ErrorKind::UnknownMethod)),
    }
}

fn string_method(
    state: &State<'_, '_>,
    text: &str,
    method: &str,
    args: &[Value],
) -> Result<Value, Error> {
    // Every method reads the whole text at most a few times.
    pay(state, text.len())?;
    let value = match method {
        "strip" => strip(text, args, str::trim, |t, c| t.trim_matches(c))?,
        "lstrip" => strip(text, args, str::trim_start, |t, c| t.trim_start_matches(c))?,
        "rstrip" => strip(text, args, str::trim_end, |t, c| t.trim_end_matches(c))?,
        "startswith" => any_of(args, |prefix| text.starts_with(prefix))?,
        "endswith" => any_of(args, |suffix| text.ends_with(suffix))?,
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(args)?;
            text.strip_prefix(prefix).unwrap_or(text).into()
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(args)?;
            text.strip_suffix(suffix).unwrap_or(text).into()
        }
        "upper" => no_args(args, || text.to_uppercase().into())?,
        "lower" => no_args(args, || text.to_lowercase().into())?,
        "capitalize" => no_args(args, || capitalized(text).into())?,
        "title" => no_args(args, || titled(text).into())?,
        "isdigit" => no_args(args, || is_all(text, char::is_numeric))?,
        "isspace" => no_args(args, || is_all(text, char::is_whitespace))?,
        "splitlines" => no_args(args, || text.lines().map(Value::from).collect())?,
        "split" => split(state, text, args, false)?,
        "rsplit" => split(state, text, args, true)?,
        "replace" => {
            let (from, to, count): (&str, &str, Option<i64>) = from_args(args)?;
            let limit = count.and_then(|n| usize::try_from(n).ok()).unwrap_or(usize::MAX);
            let replaced = text.matches(from).take(limit).count();
            pay(state, replaced.saturating_mul(to.len()))?;
            text.replacen(from, to, replaced).into()
        }
        "count" => {
            let (part,): (&str,) = from_args(args)?;
            text.matches(part).count().into()
        }
        "find" => {
            let (part,): (&str,) = from_args(args)?;
            position(text, text.find(part))
        }
        "rfind" => {
            let (part,): (&str,) = from_args(args)?;
            position(text, text.rfind(part))
        }
        "join" => join(state, text, args)?,
        _ => return Err(Error::from(ErrorKind::UnknownMethod)),
    };
    Ok(value)
}

fn map_method(
    state: &mut State<'_, '_>,
    map: &Value,
    method: &str,
    args: &[Value],
) -> Result<Value, Error> {
    match method {
        "items" => {
            from_args::<()>(args)?;
            state.apply_filter("items", std::slice::from_ref(map))
        }
        "keys" => {
            from_args::<()>(args)?;
            Ok(map.try_iter()?.collect())
        }
        "values" => {
            from_args::<()>(args)?;
            map.try_iter()?.map(|key| map.get_item(&key)).collect()
        }
        "get" => {
            let (key, default): (Value, Option<Value>) = from_args(args)?;
            let found = map.get_item(&key)?;
            let missing = || default.unwrap_or_else(|| Value::from(()));
            Ok(if found.is_undefined() { missing() } else { found })
        }
        _ => Err(Error::from(ErrorKind::UnknownMethod)),
    }
}

/// Charges for text of this size before it is made.
fn pay(state: &State<'_, '_>, bytes: usize) -> Result<(), Error> {
    state.consume_fuel(bytes as u64 / BYTES_PER_FUEL)
}

fn no_args(args: &[Value], value: impl FnOnce() -> Value) -> Result<Value, Error> {
    from_args::<()>(args)?;
    Ok(value())
}

/// White space, or the characters in the argument, off the ends.
fn strip<'t>(
    text: &'t str,
    args: &[Value],
    of_space: fn(&'t str) -> &'t str,
    of_chars: fn(&'t str, &[char]) -> &'t str,
) -> Result<Value, Error> {
    let (chars,): (Option<&str>,) = from_args(args)?;
    Ok(match chars {
        None => of_space(text),
        Some(chars) => of_chars(text, &chars.chars().collect::<Vec<_>>()),
    }
    .into())
}

/// Whether the test holds for the argument, or for one of the list in it.
fn any_of(args: &[Value], test: impl Fn(&str) -> bool) -> Result<Value, Error> {
    let (wanted,): (&Value,) = from_args(args)?;
    if let Some(wanted) = wanted.as_str() {
        return Ok(test(wanted).into());
    }
    for wanted in wanted.try_iter()? {
        if wanted.as_str().is_some_and(&test) {
            return Ok(true.into());
        }
    }
    Ok(false.into())
}

fn is_all(text: &str, test: fn(char) -> bool) -> Value {
    (!text.is_empty() && text.chars().all(test)).into()
}

fn capitalized(text: &str) -> String {
    let mut chars = text.chars();
    match chars.next() {
        Some(first) => first.to_uppercase().chain(chars.as_str().to_lowercase().chars()).collect(),
        None => String::new(),
    }
}

fn titled(text: &str) -> String {
    text.split_inclusive(|c: char| !c.is_alphabetic()).map(capitalized).collect()
}

/// A position in characters, as Python counts, or -1.
fn position(text: &str, bytes: Option<usize>) -> Value {
    bytes.map_or(Value::from(-1), |bytes| text[..bytes].chars().count().into())
}

fn split(
    state: &State<'_, '_>,
    text: &str,
    args: &[Value],
    from_right: bool,
) -> Result<Value, Error> {
    let (separator, limit): (Option<&str>, Option<i64>) = from_args(args)?;
    let limit = limit.and_then(|n| usize::try_from(n).ok()).unwrap_or(usize::MAX - 1);
    let mut parts: Vec<Value> = match (separator, from_right) {
        (Some(""), _) => {
            return Err(Error::new(ErrorKind::InvalidOperation, "split: empty separator"));
        }
        (Some(separator), false) => text.splitn(limit + 1, separator).map(Value::from).collect(),
        (Some(separator), true) => text.rsplitn(limit + 1, separator).map(Value::from).collect(),
        // No template is known to limit a split at white space.
        (None, _) => text.split_whitespace().map(Value::from).collect(),
    };
    if from_right && separator.is_some() {
        parts.reverse();
    }
    pay(state, parts.len().saturating_mul(size_of::<Value>()))?;
    Ok(parts.into())
}

fn join(state: &State<'_, '_>, separator: &str, args: &[Value]) -> Result<Value, Error> {
    let (parts,): (&Value,) = from_args(args)?;
    let mut joined = String::new();
    for (i, part) in parts.try_iter()?.enumerate() {
        let part = part.as_str().map(str::to_owned).unwrap_or_else(|| part.to_string());
        pay(state, separator.len() + part.len())?;
        state.consume_fuel(1)?;
        if i > 0 {
            joined.push_str(separator);
        }
        joined.push_str(&part);
    }
    Ok(joined.into())
}

/// JSON spaced as Python's `json.dumps` does it.
fn to_json(value: &Value, options: Kwargs) -> Result<String, Error> {
    let indent: Option<usize> = options.get("indent")?;
    // What else there is (sort_keys, separators) changes looks only.
    let mut json = Vec::new();
    let done = match indent {
        Some(width) => {
            let indent = " ".repeat(width.min(16));
            let pretty = serde_json::ser::PrettyFormatter::with_indent(indent.as_bytes());
            value.serialize(&mut Serializer::with_formatter(&mut json, pretty))
        }
        None => value.serialize(&mut Serializer::with_formatter(&mut json, PythonSpacing)),
    };
    done.map_err(|e| Error::new(ErrorKind::BadSerialization, e.to_string()))?;
    String::from_utf8(json).map_err(|e| Error::new(ErrorKind::BadSerialization, e.to_string()))
}

struct PythonSpacing;

impl Formatter for PythonSpacing {
    fn begin_array_value<W: ?Sized + std::io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + std::io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + std::io::Write>(
        &mut self,
        writer: &mut W,
    ) -> std::io::Result<()> {
        writer.write_all(b": ")
    }
}
