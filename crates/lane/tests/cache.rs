//! The packed form kept beside a model: used when it is whole and of this model, otherwise made
//! anew or done without.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, SystemTime};

use lane::{BackendChoice, CachePlace, FusionChoice, LaneOptions, ModelFile, PlanOptions};

const OTHER_MODEL: &[u8] = include_bytes!("models/whale-5.8m-q4_k.gguf");

/// A folder with a model in it.
struct Place {
    folder: tempfile::TempDir,
}

impl Place {
    fn new() -> Self {
        let place = Self { folder: tempfile::tempdir().unwrap() };
        fs::write(place.model(), lane::open::EMBEDDED_MODEL).unwrap();
        place
    }

    fn model(&self) -> PathBuf {
        self.folder.path().join("whale.gguf")
    }

    fn cache(&self) -> PathBuf {
        self.folder.path().join("whale.gguf.planes.lane-cache")
    }

    /// Logits of the model, loaded with a cache.
    fn logits(&self) -> Vec<f32> {
        logits(&self.model(), CachePlace::Beside, FusionChoice::Ops)
    }

    /// Names of all files but the model.
    fn files(&self) -> Vec<String> {
        let entries = fs::read_dir(self.folder.path()).unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<_> = names.filter(|name| name != "whale.gguf").collect();
        names.sort();
        names
    }

    /// Changes a byte of the model far from where the cache looks, and its time.
    fn change_model(&self, modified: SystemTime) {
        let mut bytes = fs::read(self.model()).unwrap();
        let gguf = lane::gguf::Gguf::open(self.model()).unwrap();
        let tensor = gguf.tensor("blk.0.ffn_up.weight").unwrap();
        let at = tensor.offset_bytes() + tensor.n_bytes() / 4;
        bytes[at as usize] ^= 0x55;
        fs::write(self.model(), bytes).unwrap();
        File::options().write(true).open(self.model()).unwrap().set_modified(modified).unwrap();
    }
}

fn logits(model: &Path, cache: CachePlace, fusion: FusionChoice) -> Vec<f32> {
    let plan = PlanOptions { fusion, ..Default::default() };
    let options =
        LaneOptions { backend: BackendChoice::Host, plan, cache, ..LaneOptions::default() };
    let lane = ModelFile::open(Some(model)).unwrap().load(&options, &mut |_| {}).unwrap();
    lane.evaluate(&[5, 300, 17]).unwrap().logits
}

fn modified(path: &Path) -> SystemTime {
    fs::metadata(path).unwrap().modified().unwrap()
}

/// Numbers that look random.
fn places(n: usize, below: usize) -> impl Iterator<Item = usize> {
    let mut state = 88172645463325252u64;
    (0..n).map(move |_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % below as u64) as usize
    })
}

#[test]
fn the_second_start_reads_the_cache_and_gives_the_same() {
    let place = Place::new();
    let first = place.logits();
    assert_eq!(place.files(), ["whale.gguf.planes.lane-cache"]);
    let made = modified(&place.cache());

    assert_eq!(place.logits(), first);
    assert_eq!(modified(&place.cache()), made, "not written again");
}

#[cfg(unix)]
#[test]
fn a_model_that_changed_and_was_given_its_old_time_is_packed_anew() {
    let place = Place::new();
    let first = place.logits();
    place.change_model(modified(&place.model()));
    let changed = place.logits();
    assert_ne!(changed, first);
    assert_eq!(changed, logits(&place.model(), CachePlace::Off, FusionChoice::Ops));
}

#[test]
fn a_model_that_changed_is_packed_anew() {
    let place = Place::new();
    let first = place.logits();
    place.change_model(modified(&place.model()) + Duration::from_secs(1));
    let changed = place.logits();
    assert_ne!(changed, first);
    assert_eq!(place.logits(), changed, "from the new cache");
    assert_eq!(place.files(), ["whale.gguf.planes.lane-cache"]);
}

#[test]
fn a_model_that_changes_while_it_is_read_is_refused_and_not_kept() {
    let place = Place::new();
    let options = LaneOptions {
        backend: BackendChoice::Host,
        cache: CachePlace::Beside,
        ..LaneOptions::default()
    };
    let file = ModelFile::open(Some(&place.model())).unwrap();
    let later = modified(&place.model()) + Duration::from_secs(1);
    let touch = |_: lane::loading::LoadProgress<'_>| {
        let model = File::options().write(true).open(place.model()).unwrap();
        model.set_modified(later).unwrap();
    };
    let refusal = file.load(&options, &mut { touch }).err().unwrap().to_string();
    assert!(refusal.contains("changed while it was being read"), "{refusal}");
    assert!(place.files().is_empty(), "{:?}", place.files());
}

#[test]
fn each_layout_has_a_cache_of_its_own() {
    let place = Place::new();
    let persistent = || logits(&place.model(), CachePlace::Beside, FusionChoice::Persistent);
    let (ops, stream) = (place.logits(), persistent());
    let files = ["whale.gguf.planes.lane-cache", "whale.gguf.stream.lane-cache"];
    assert_eq!(place.files(), files);
    assert_eq!((place.logits(), persistent()), (ops, stream));
}

#[test]
fn a_cache_of_another_model_is_replaced() {
    let place = Place::new();
    let own = place.logits();
    let other = place.folder.path().join("other.gguf");
    fs::write(&other, OTHER_MODEL).unwrap();
    logits(&other, CachePlace::Beside, FusionChoice::Ops);
    let foreign = fs::read(place.folder.path().join("other.gguf.planes.lane-cache")).unwrap();
    fs::write(place.cache(), &foreign).unwrap();
    assert_eq!(place.logits(), own);
    assert_ne!(fs::read(place.cache()).unwrap(), foreign);
}

#[test]
fn a_cache_cut_short_anywhere_is_replaced() {
    let place = Place::new();
    let expected = place.logits();
    let whole = fs::read(place.cache()).unwrap();
    for len in [0, 1, 39, 40, 4095, 4096, whole.len() - 1].into_iter().chain(places(4, whole.len()))
    {
        fs::write(place.cache(), &whole[..len]).unwrap();
        assert_eq!(place.logits(), expected, "{len}");
        assert!(fs::read(place.cache()).unwrap() == whole, "{len}: made anew");
    }
}

#[test]
fn a_cache_damaged_anywhere_changes_nothing_and_is_made_anew() {
    let place = Place::new();
    let expected = place.logits();
    let whole = fs::read(place.cache()).unwrap();
    let header = 0..48;
    for at in header.step_by(8).chain(places(10, whole.len())) {
        let mut damaged = whole.clone();
        damaged[at] ^= 1 << (at % 8);
        fs::write(place.cache(), &damaged).unwrap();
        assert_eq!(place.logits(), expected, "{at}");
        // Removed, or replaced at once where the damage was seen in time; or between the parts.
        assert_eq!(place.logits(), expected, "{at}");
        let now = fs::read(place.cache()).unwrap();
        assert!(now == whole || (now == damaged && is_padding(&whole, at)), "{at}");
    }
}

/// Whether a byte is between the tables and the chunks.
fn is_padding(whole: &[u8], at: usize) -> bool {
    let word = |index: usize| u64::from_le_bytes(*whole[8 * index..].first_chunk().unwrap());
    let tables_end = 8 * (5 + word(3) + word(4) + 1) as usize;
    (tables_end..tables_end.next_multiple_of(4096)).contains(&at)
}

#[test]
fn a_place_that_cannot_be_written_is_no_failure() {
    let place = Place::new();
    let nowhere = CachePlace::Folder(place.folder.path().join("missing"));
    let found = logits(&place.model(), nowhere, FusionChoice::Ops);
    assert_eq!(found, logits(&place.model(), CachePlace::Off, FusionChoice::Ops));
    // A folder where the file should be.
    fs::create_dir(place.cache()).unwrap();
    assert_eq!(place.logits(), found);
    assert_eq!(place.files(), ["whale.gguf.planes.lane-cache"], "nothing else stays");
}

#[test]
fn a_folder_can_be_named_and_models_in_memory_have_none() {
    let place = Place::new();
    let folder = tempfile::tempdir().unwrap();
    let there = || CachePlace::Folder(folder.path().into());
    let first = logits(&place.model(), there(), FusionChoice::Ops);
    assert!(folder.path().join("whale.gguf.planes.lane-cache").exists());
    assert!(place.files().is_empty());
    assert_eq!(logits(&place.model(), there(), FusionChoice::Ops), first);

    let options =
        LaneOptions { backend: BackendChoice::Host, cache: there(), ..Default::default() };
    ModelFile::open(None).unwrap().load(&options, &mut |_| {}).unwrap();
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
}

#[test]
fn what_a_killed_process_left_behind_is_removed() {
    let place = Place::new();
    let part = |process: u32| format!("whale.gguf.planes.lane-cache.{process}.part");
    let mut sleeper = Command::new("sleep").arg("600").spawn().unwrap();
    // No process has so high a number, and this one writes nothing: it had its number from one that
    // was killed. The third is alive and may be writing.
    for process in [u32::MAX, std::process::id(), sleeper.id()] {
        fs::write(place.folder.path().join(part(process)), b"half").unwrap();
    }
    let found = place.logits();
    let files = place.files();
    sleeper.kill().unwrap();
    sleeper.wait().unwrap();
    assert_eq!(found, logits(&place.model(), CachePlace::Off, FusionChoice::Ops));
    assert_eq!(files, ["whale.gguf.planes.lane-cache".into(), part(sleeper.id())]);

    // Whoever writes next tidies up.
    fs::remove_file(place.cache()).unwrap();
    assert_eq!(place.logits(), found);
    assert_eq!(place.files(), ["whale.gguf.planes.lane-cache"]);
}

#[test]
fn what_this_process_is_writing_is_left_alone() {
    let place = Place::new();
    let options = LaneOptions {
        backend: BackendChoice::Host,
        cache: CachePlace::Beside,
        ..LaneOptions::default()
    };
    let file = ModelFile::open(Some(&place.model())).unwrap();
    // The same file, spelled differently.
    let other = place.folder.path().join(".").join("whale.gguf");
    let mut during = None;
    let mut load_again = |_: lane::loading::LoadProgress<'_>| {
        during.get_or_insert_with(|| {
            let found = logits(&other, CachePlace::Beside, FusionChoice::Ops);
            (found, place.files())
        });
    };
    file.load(&options, &mut load_again).unwrap();
    let (found, files) = during.unwrap();
    assert_eq!(files.len(), 1);
    assert!(files[0].ends_with(".part"), "{files:?}");
    assert_eq!(place.files(), ["whale.gguf.planes.lane-cache"]);
    assert_eq!(place.logits(), found);
}

#[test]
fn nothing_is_kept_of_a_model_whose_scales_are_no_numbers() {
    let place = Place::new();
    let mut bytes = fs::read(place.model()).unwrap();
    let gguf = lane::gguf::Gguf::open(place.model()).unwrap();
    let at = gguf.tensor("blk.0.ffn_up.weight").unwrap().offset_bytes() as usize;
    bytes[at..at + 2].copy_from_slice(&half::f16::NAN.to_le_bytes());
    fs::write(place.model(), bytes).unwrap();
    let start = || {
        let mut run = Command::new(env!("CARGO_BIN_EXE_lane"));
        run.args(["generate", "--backend", "host", "--cache", "-n", "1", "x", "-m"]);
        let output = run.arg(place.model()).output().unwrap();
        String::from_utf8(output.stderr).unwrap()
    };
    for stderr in [start(), start()] {
        assert!(stderr.contains("blk.0.ffn_up.weight: 1 of"), "{stderr}");
        assert!(place.files().is_empty(), "{:?}", place.files());
    }
}

/// `kill -9` at any time from when the file is there, several times over.
#[test]
fn a_process_killed_while_it_writes_leaves_nothing_that_the_next_start_trusts() {
    let place = Place::new();
    let expected = logits(&place.model(), CachePlace::Off, FusionChoice::Ops);
    let writes = || place.files().iter().any(|name| name.ends_with(".part"));
    let mut parts = 0;
    for delay in places(24, 40) {
        let _ = fs::remove_file(place.cache());
        let mut run = Command::new(env!("CARGO_BIN_EXE_lane"));
        run.args(["generate", "--backend", "host", "--fusion", "ops", "--cache", "-n", "1"]);
        run.arg("-m").arg(place.model()).arg("whale");
        let mut child = run.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        while !writes() && child.try_wait().unwrap().is_none() {
            std::thread::sleep(Duration::from_micros(100));
        }
        std::thread::sleep(Duration::from_micros(100 * delay as u64));
        child.kill().unwrap();
        child.wait().unwrap();
        parts += usize::from(writes());
        assert_eq!(place.logits(), expected, "killed after {delay} times 100 µs");
        let files = place.files();
        assert_eq!(files, ["whale.gguf.planes.lane-cache"], "killed after {delay} times 100 µs");
    }
    println!("{parts} of 24 were killed while they wrote");
    assert!(parts > 0);
}
