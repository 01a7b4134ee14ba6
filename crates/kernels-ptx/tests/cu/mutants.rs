//! Proof that the net catches fish: kernels changed on purpose, in ways in which people go wrong.
//! Every mutant has to fail its cases, but for those that say why they compute the same.

mod batch;
mod fused;
mod list;

use std::collections::HashMap;
use std::fs;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use kernels_ptx::Kernel;

use crate::cases::{self, Case};
use crate::compile::{self, Compiler};
use crate::launch::Library;
use crate::twin;

/// One change of one place in one file.
struct Mutant {
    /// File of `cu/`.
    file: &'static str,
    /// Kernels whose cases should notice: those of this source.
    source: &'static str,
    /// Occurs once in the file.
    from: &'static str,
    to: &'static str,
    /// What went wrong.
    what: &'static str,
    /// Why nothing can notice.
    equivalent: Option<&'static str>,
}

fn all() -> impl Iterator<Item = &'static Mutant> {
    [list::MUTANTS, fused::MUTANTS, batch::MUTANTS].into_iter().flatten()
}

/// `MUTANTS_OF=gemm,head` tries those of kernels with one of these in their name alone. A word that is
/// in none is refused: what it was meant for would not be tried.
fn selected(names: &str) -> Result<Vec<&'static Mutant>, String> {
    let is_of = |mutant: &Mutant, name: &str| !name.is_empty() && mutant.source.contains(name);
    let names: Vec<&str> = names.split(',').collect();
    if let Some(unknown) = names.iter().find(|name| !all().any(|mutant| is_of(mutant, name))) {
        return Err(format!("MUTANTS_OF: no mutants of {unknown:?}"));
    }
    Ok(all().filter(|mutant| names.iter().any(|name| is_of(mutant, name))).collect())
}

#[test]
fn a_selection_of_nothing_is_refused() {
    assert!(selected("gemm,head").unwrap().iter().any(|mutant| mutant.source == "gemm_tiled"));
    for nothing in ["", "gem,", "gemmm", "head,nothing"] {
        let error = selected(nothing).map(|mutants| mutants.len()).unwrap_err();
        assert!(error.starts_with("MUTANTS_OF: no mutants of "), "{nothing:?}: {error}");
    }
}

/// Without a compiler, too: a mutant whose place is gone is none.
#[test]
fn every_mutant_changes_one_place_of_a_kernels_source() {
    let sources = compile::kernels_by_source();
    for mutant in all() {
        let Mutant { file, source, from, to, what, .. } = mutant;
        let text = fs::read_to_string(compile::cu().join(file)).expect(file);
        assert_eq!(text.matches(from).count(), 1, "{file}, {what}: {from:?}");
        assert_ne!(from, to, "{file}, {what}");
        assert!(sources.iter().any(|(name, _)| name == source), "{source}, {what}");
    }
}

#[test]
fn no_mutant_survives_unexplained() {
    let Some(compiler) = compile::compiler("mutants") else { return };
    let mutants = match std::env::var("MUTANTS_OF") {
        Ok(names) => selected(&names).unwrap_or_else(|error| panic!("{error}")),
        Err(_) => all().collect(),
    };
    let cases: HashMap<&str, Vec<Case>> = compile::kernels_by_source()
        .into_iter()
        .map(|(source, names)| {
            let kernels = names.iter().filter_map(|name| Kernel::by_name(name));
            (source, kernels.flat_map(|kernel| cases::of(kernel, cases::seed())).collect())
        })
        .collect();

    let next = AtomicUsize::new(0);
    let fates = Mutex::new(Vec::new());
    let workers = std::thread::available_parallelism().map_or(1, usize::from).min(8);
    std::thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some(mutant) = mutants.get(index) else { return };
                    let fate = fate(compiler, mutant, &cases[mutant.source], index);
                    let line = format!("{}, {}: {}", mutant.source, mutant.what, fate.text(mutant));
                    let good = fate.is_good(mutant);
                    fates.lock().expect("no panic before").push((good, line));
                }
            });
        }
    });
    let mut fates = fates.into_inner().expect("no panic before");
    fates.sort();
    let (good, bad): (Vec<_>, Vec<_>) = fates.into_iter().partition(|(good, _)| *good);
    good.iter().for_each(|(_, line)| println!("{line}"));
    let bad: Vec<String> = bad.into_iter().map(|(_, line)| line).collect();
    assert!(bad.is_empty(), "{} of {}:\n{}", bad.len(), mutants.len(), bad.join("\n"));
}

enum Fate {
    Caught(String),
    Survived,
    /// It is no mutant.
    Invalid(String),
}

impl Fate {
    fn is_good(&self, mutant: &Mutant) -> bool {
        match self {
            Fate::Caught(_) => mutant.equivalent.is_none(),
            Fate::Survived => mutant.equivalent.is_some(),
            Fate::Invalid(_) => false,
        }
    }

    fn text(&self, mutant: &Mutant) -> String {
        match (self, mutant.equivalent) {
            (Fate::Caught(error), None) => format!("caught by {error}"),
            (Fate::Caught(error), Some(_)) => format!("should be equivalent, caught by {error}"),
            (Fate::Survived, Some(why)) => format!("equivalent: {why}"),
            (Fate::Survived, None) => "survived".to_owned(),
            (Fate::Invalid(error), _) => error.clone(),
        }
    }
}

fn fate(compiler: &Compiler, mutant: &Mutant, cases: &[Case], index: usize) -> Fate {
    let folder = match compile::scratch(&format!("mutant-{index}")) {
        Ok(folder) => folder,
        Err(error) => return Fate::Invalid(error),
    };
    let fate = match library(compiler, mutant, &folder) {
        Ok(library) => {
            let runs = (1..4).flat_map(|order| cases.iter().map(move |case| (case, order)));
            runs.filter_map(|(case, order)| {
                twin::run(case, &library, order, false).err().map(|e| (case, e))
            })
            .next()
            .map_or(Fate::Survived, |(case, e)| Fate::Caught(format!("[{}] {e}", case.label)))
        }
        Err(error) => Fate::Invalid(error),
    };
    let _ = fs::remove_dir_all(&folder);
    fate
}

fn library(compiler: &Compiler, mutant: &Mutant, folder: &Path) -> Result<Library, String> {
    let read = |file: &Path| fs::read_to_string(file).map_err(|error| error.to_string());
    for file in fs::read_dir(compile::cu()).map_err(|error| error.to_string())? {
        let path = file.map_err(|error| error.to_string())?.path();
        let name = path.file_name().expect("a file of a folder");
        let mut text = read(&path)?;
        if name == mutant.file {
            let places = text.matches(mutant.from).count();
            if places != 1 {
                return Err(format!("{:?} occurs {places} times in {}", mutant.from, mutant.file));
            }
            text = text.replace(mutant.from, mutant.to);
        }
        fs::write(folder.join(name), text).map_err(|error| error.to_string())?;
    }
    let (_, kernels) = compile::kernels_by_source()
        .into_iter()
        .find(|(source, _)| *source == mutant.source)
        .ok_or_else(|| format!("no source {}", mutant.source))?;
    let source = folder.join(mutant.source).with_extension("cu");
    Library::open(&compiler.library_of(&source, &kernels, folder, folder)?)
}
