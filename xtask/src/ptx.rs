//! What a PTX file says of itself: version, target, entry points with their parameters.

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

/// One `.entry`, in the file's order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Entry {
    pub(crate) name: String,
    /// The type of each parameter in order: `u64`, or `b8[24] align 8` for a struct by value.
    pub(crate) parameters: Vec<String>,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Ptx {
    /// `.version`: what a driver must at least understand.
    pub(crate) isa: String,
    /// `.target`: `sm_80`.
    pub(crate) target: String,
    pub(crate) entries: Vec<Entry>,
}

impl Ptx {
    pub(crate) fn parse(text: &str) -> Result<Self> {
        let code = without_comments(text);
        let directive = |name: &str| {
            let line = code.lines().find_map(|line| line.trim().strip_prefix(name));
            let value = line.map(|value| value.trim().to_owned()).filter(|v| !v.is_empty());
            value.with_context(|| format!("the PTX has no {name}"))
        };
        let mut entries = Vec::new();
        let mut rest = code.as_str();
        while let Some(at) = rest.find(".entry") {
            rest = &rest[at + ".entry".len()..];
            // A kernel without parameters may come without brackets.
            let end = rest.find(['(', '{']).context("an .entry without a body")?;
            let name = rest[..end].split_whitespace().next().unwrap_or("").to_owned();
            if name.is_empty() {
                bail!("an .entry without a name");
            }
            let mut parameters = Vec::new();
            if rest[end..].starts_with('(') {
                let close = rest.find(')').with_context(|| format!("{name}: no )"))?;
                for parameter in rest[end + 1..close].split(',').map(str::trim) {
                    if !parameter.is_empty() {
                        parameters.push(
                            parameter_type(parameter)
                                .with_context(|| format!("{name}: parameter {parameter:?}"))?,
                        );
                    }
                }
                rest = &rest[close..];
            }
            entries.push(Entry { name, parameters });
        }
        Ok(Self { isa: directive(".version")?, target: directive(".target")?, entries })
    }
}

/// `.param .u64 f_param_0` and `.param .align 8 .b8 f_param_1[24]`; attributes of a pointer
/// (`.ptr .global .align 16`) say nothing of the type.
fn parameter_type(parameter: &str) -> Result<String> {
    let mut words = parameter.split_whitespace();
    if words.next() != Some(".param") {
        bail!("does not begin with .param");
    }
    let (mut kind, mut align, mut name) = (None, None, None);
    while let Some(word) = words.next() {
        match word {
            ".align" if kind.is_none() => align = words.next(),
            ".align" => _ = words.next(),
            _ if word.starts_with('.') => _ = kind.get_or_insert(&word[1..]),
            _ => name = Some(word),
        }
    }
    let (kind, name) = (kind.context("has no type")?, name.context("has no name")?);
    Ok(match (name.find('['), align) {
        (Some(at), Some(align)) => format!("{kind}{} align {align}", &name[at..]),
        (Some(at), None) => format!("{kind}{}", &name[at..]),
        (None, _) => kind.to_owned(),
    })
}

/// The compiler's text without its comments (build ids and the like) and trailing blanks, ending in
/// one line break. Comments carry nothing that a driver reads.
pub(crate) fn normalised(text: &str) -> String {
    let mut lines = String::new();
    for line in without_comments(text).lines().map(str::trim_end) {
        // One empty line in a row is enough, and none at the top.
        if !line.is_empty() || !(lines.is_empty() || lines.ends_with("\n\n")) {
            lines += line;
            lines.push('\n');
        }
    }
    lines.truncate(lines.trim_end().len());
    lines.push('\n');
    lines
}

/// PTX has C's comments. Line breaks stay, and so does whatever stands in a string.
fn without_comments(text: &str) -> String {
    let mut code = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find(['/', '"']) {
        code.push_str(&rest[..at]);
        rest = &rest[at..];
        if rest.starts_with("//") {
            rest = rest.find('\n').map_or("", |end| &rest[end..]);
        } else if let Some(comment) = rest.strip_prefix("/*") {
            rest = comment.find("*/").map_or("", |end| &comment[end + 2..]);
        } else {
            let string = rest.strip_prefix('"').and_then(|string| string.find('"'));
            let keep = string.map_or(1, |end| end + 2);
            code.push_str(&rest[..keep]);
            rest = &rest[keep..];
        }
    }
    code + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "
        // Compiler Build ID: CL-1
        .version 8.4
        .target sm_90a
        .address_size 64
        .extern .shared .align 16 .b8 pool[];
        /* .entry not_this( */
        .visible .entry add(
            .param .u64 add_param_0,
            .param .align 8 .b8 add_param_1[24],
            .param .u64 .ptr .global .align 16 add_param_2,
            .param .f32 add_param_3   // last
        )
        .maxntid 256, 1, 1
        {
            ret;
        }
        .visible .entry nothing()
        { ret; }
        .entry bare { ret; }
    ";

    #[test]
    fn entries_keep_the_order_and_types_of_their_parameters() {
        let ptx = Ptx::parse(TEXT).unwrap();
        assert_eq!((ptx.isa.as_str(), ptx.target.as_str()), ("8.4", "sm_90a"));
        let entries: Vec<_> =
            ptx.entries.iter().map(|e| (e.name.as_str(), e.parameters.join(", "))).collect();
        let add = "u64, b8[24] align 8, u64, f32".to_owned();
        assert_eq!(entries, [("add", add), ("nothing", String::new()), ("bare", String::new())]);
    }

    #[test]
    fn broken_text_is_an_error_that_says_where() {
        let said = |text: &str| format!("{:#}", Ptx::parse(text).unwrap_err());
        assert_eq!(said(".target sm_80"), "the PTX has no .version");
        assert!(said(".version 8.4\n.target sm_80\n.entry f(.param .u64 x").contains("f: no )"));
        assert!(said(".version 8.4\n.target sm_80\n.entry f(u64 x) {}").contains("\"u64 x\""));
    }

    #[test]
    fn normalised_text_has_no_comments_and_one_end_of_line() {
        let text = "//\n// Build ID: 1\n\n\n.version 8.4 // why\n\n\n\n.file \"a//b\"  \n\n\n";
        assert_eq!(normalised(text), ".version 8.4\n\n.file \"a//b\"\n");
        assert_eq!(normalised(&normalised(text)), normalised(text));
    }
}
