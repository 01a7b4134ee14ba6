//! What was compiled from what: `manifest.json` beside the shipped PTX.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use crate::ptx::{Entry, Ptx};

pub(crate) const FILE: &str = "manifest.json";

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Manifest {
    /// The command that made it.
    pub(crate) generated_by: String,
    /// What the compiler says of itself.
    pub(crate) compiler: String,
    /// The pinned packages it came from.
    pub(crate) packages: Vec<String>,
    /// Ordered by file.
    pub(crate) modules: Vec<Module>,
}

/// One PTX file: one source for one target.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Module {
    pub(crate) file: String,
    /// Name of the source without `.cu`.
    pub(crate) name: String,
    /// The virtual architecture: `compute_80`.
    pub(crate) target: String,
    pub(crate) source: String,
    /// The project's own headers that the source includes, directly or not.
    pub(crate) headers: Vec<String>,
    /// Of the source and these headers, names and contents.
    pub(crate) source_xxh3: String,
    pub(crate) flags: Vec<String>,
    /// `.version` of the PTX.
    pub(crate) ptx_isa: String,
    /// `.target` of the PTX.
    pub(crate) ptx_target: String,
    pub(crate) ptx_xxh3: String,
    pub(crate) entries: Vec<Entry>,
}

impl Manifest {
    pub(crate) fn read(folder: &Path) -> Result<Self> {
        let path = folder.join(FILE);
        let text = fs::read(&path).with_context(|| format!("reading {}", path.display()))?;
        serde_json::from_slice(&text).with_context(|| format!("reading {}", path.display()))
    }

    pub(crate) fn to_json(&self) -> Result<Vec<u8>> {
        let mut json = serde_json::to_vec_pretty(self)?;
        json.push(b'\n');
        Ok(json)
    }

    /// Compares sources and PTX with what is written here, without a compiler.
    pub(crate) fn verify(&self, sources: &Path, ptx_folder: &Path) -> Result<()> {
        for module in &self.modules {
            let file = &module.file;
            let source = Source::read(sources, &module.source)?;
            ensure!(
                source.headers() == module.headers,
                "{file}: {} includes others",
                source.name()
            );
            ensure!(
                source.hash() == module.source_xxh3,
                "{file}: {} or a header of it has changed since",
                module.source
            );
            let text = fs::read_to_string(ptx_folder.join(file))
                .with_context(|| format!("reading {file}"))?;
            ensure!(hash(text.as_bytes()) == module.ptx_xxh3, "{file} is not the PTX described");
            let ptx = Ptx::parse(&text).with_context(|| format!("reading {file}"))?;
            ensure!(ptx.entries == module.entries, "{file} has other entry points");
            ensure!(ptx.isa == module.ptx_isa, "{file} is PTX {}", ptx.isa);
            ensure!(ptx.target == module.ptx_target, "{file} is for {}", ptx.target);
            let expected = module.target.replace("compute_", "sm_");
            ensure!(ptx.target == expected, "{file} is for {}, not {expected}", ptx.target);
        }
        let described: BTreeSet<_> = self.modules.iter().map(|m| m.source.clone()).collect();
        if let Some(source) = source_files(sources)?.iter().find(|name| !described.contains(*name))
        {
            bail!("{source} was never compiled");
        }
        Ok(())
    }
}

pub(crate) fn hash(bytes: &[u8]) -> String {
    format!("{:016x}", xxh3_64(bytes))
}

/// The `.cu` files of a folder, in order; none when there is no such folder.
pub(crate) fn source_files(folder: &Path) -> Result<Vec<String>> {
    if !folder.exists() {
        return Ok(Vec::new());
    }
    let mut names = Vec::new();
    for entry in fs::read_dir(folder).with_context(|| format!("reading {}", folder.display()))? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if name.ends_with(".cu") {
            names.push(name);
        }
    }
    names.sort();
    Ok(names)
}

/// A `.cu` file and the project's own headers that it includes.
pub(crate) struct Source {
    /// Name and text; the source first, then the headers by name.
    files: Vec<(String, String)>,
}

impl Source {
    pub(crate) fn read(folder: &Path, name: &str) -> Result<Self> {
        let read = |name: &str| {
            let path = folder.join(name);
            let text = fs::read_to_string(&path);
            text.with_context(|| format!("reading {}", path.display()))
        };
        let text = read(name)?;
        let mut wanted: Vec<String> = included(&text).map(str::to_owned).collect();
        let mut headers: Vec<(String, String)> = Vec::new();
        while let Some(header) = wanted.pop() {
            if headers.iter().any(|known| known.0 == header) || !folder.join(&header).is_file() {
                continue; // One that is not here is the toolkit's, or the compiler will say so.
            }
            let text = read(&header)?;
            wanted.extend(included(&text).map(str::to_owned));
            headers.push((header, text));
        }
        headers.sort();
        headers.insert(0, (name.to_owned(), text));
        Ok(Self { files: headers })
    }

    pub(crate) fn name(&self) -> &str {
        &self.files[0].0
    }

    pub(crate) fn text(&self) -> &str {
        &self.files[0].1
    }

    pub(crate) fn header_files(&self) -> &[(String, String)] {
        &self.files[1..]
    }

    pub(crate) fn headers(&self) -> Vec<String> {
        self.header_files().iter().map(|header| header.0.clone()).collect()
    }

    pub(crate) fn hash(&self) -> String {
        let mut hasher = Xxh3::new();
        for text in self.files.iter().flat_map(|(name, text)| [name, text]) {
            hasher.update(&(text.len() as u64).to_le_bytes());
            hasher.update(text.as_bytes());
        }
        format!("{:016x}", hasher.digest())
    }
}

/// The names in `#include "name"`.
fn included(text: &str) -> impl Iterator<Item = &str> {
    text.lines().filter_map(|line| {
        let include = line.trim_start().strip_prefix('#')?.trim_start().strip_prefix("include")?;
        include.trim_start().strip_prefix('"')?.split('"').next()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_covers_headers_of_headers_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
        write("a.cu", "#include \"one.cuh\"\n# include <cuda_fp16.h>\nint a;");
        write("one.cuh", "  #include \"two.cuh\"\n#include \"one.cuh\"\n#include \"absent.cuh\"");
        write("two.cuh", "int two;");
        write("three.cuh", "int three;");
        let hash = || Source::read(folder.path(), "a.cu").unwrap().hash();
        let before = hash();
        assert_eq!(Source::read(folder.path(), "a.cu").unwrap().headers(), ["one.cuh", "two.cuh"]);
        write("three.cuh", "int four;");
        assert_eq!(hash(), before);
        write("two.cuh", "int too;");
        let changed = hash();
        assert_ne!(changed, before);
        write("a.cu", "#include \"one.cuh\"\n# include <cuda_fp16.h>\nint b;");
        assert_ne!(hash(), changed);
    }
}
