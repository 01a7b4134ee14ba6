//! Files that a chore writes and the repository keeps.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail};

/// What a folder should hold: file name to content.
pub(crate) type Files = BTreeMap<String, Vec<u8>>;

/// Writes `files` into `folder`, or with `check` compares; `owned` tells which other files there are
/// leftovers of this chore. `command` is what a person types to repair a difference.
pub(crate) fn settle(
    folder: &Path,
    files: &Files,
    owned: impl Fn(&str) -> bool,
    check: bool,
    command: &str,
) -> Result<()> {
    let mut leftovers = Vec::new();
    if folder.is_dir() {
        for entry in fs::read_dir(folder)? {
            let name = entry?.file_name().to_string_lossy().into_owned();
            if owned(&name) && !files.contains_key(&name) {
                leftovers.push(name);
            }
        }
    }
    leftovers.sort();
    let stale = files.iter().filter(|(name, content)| {
        fs::read(folder.join(name)).ok().as_deref() != Some(content.as_slice())
    });
    let stale: Vec<&String> = stale.map(|(name, _)| name).collect();

    if check {
        if stale.is_empty() && leftovers.is_empty() {
            println!("{}: up to date", folder.display());
            return Ok(());
        }
        let mut said = String::new();
        for name in &stale {
            let how = if folder.join(name).exists() { "differs" } else { "is missing" };
            said += &format!("\n  {name} {how}");
        }
        for name in &leftovers {
            said += &format!("\n  {name} has no source any more");
        }
        bail!("{} is not up to date:{said}\nrun: {command}", folder.display());
    }

    if !files.is_empty() {
        fs::create_dir_all(folder).with_context(|| format!("making {}", folder.display()))?;
    }
    for name in stale {
        let path = folder.join(name);
        fs::write(&path, &files[name]).with_context(|| format!("writing {}", path.display()))?;
        println!("wrote {}", path.display());
    }
    for name in leftovers {
        fs::remove_file(folder.join(&name))?;
        println!("removed {}", folder.join(name).display());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn check_sees_what_differs_is_missing_and_is_left_over_and_writing_repairs_it() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let file = |name: &str, content: &str| (name.to_owned(), content.as_bytes().to_vec());
        let files = Files::from([file("a.x", "one"), file("b.x", "two")]);
        let settle =
            |check| settle(folder.path(), &files, |name| name.ends_with(".x"), check, "repair it");
        fs::write(at("a.x"), "old").unwrap();
        fs::write(at("c.x"), "left").unwrap();
        fs::write(at("other"), "not ours").unwrap();

        let said = settle(true).unwrap_err().to_string();
        for part in ["a.x differs", "b.x is missing", "c.x has no source", "run: repair it"] {
            assert!(said.contains(part), "{said}");
        }
        assert!(!said.contains("other"), "{said}");
        assert_eq!(fs::read(at("a.x")).unwrap(), b"old");

        settle(false).unwrap();
        settle(true).unwrap();
        assert_eq!(fs::read(at("b.x")).unwrap(), b"two");
        assert!(!at("c.x").exists() && at("other").exists());
    }
}
