//! The kernels' PTX, embedded: which modules a device gets.
//!
//! Needs no CUDA to compile, and nobody who builds this crate needs a compiler for CUDA. An engine
//! with its own driver bindings can load the modules itself:
//!
//! ```
//! use decode_graph::ptx;
//!
//! let modules = ptx::select(90, 13_000)?; // an H100 with the driver of CUDA 13.0
//! assert!(modules.iter().all(|module| module.target == "compute_90"));
//!
//! let modules = ptx::select(86, 12_040)?; // an A2000 with the driver of CUDA 12.4
//! let gemv = modules.iter().find(|module| module.entries.contains(&"gemv_q8_store")).unwrap();
//! assert_eq!(gemv.target, "compute_80");
//!
//! let too_old = ptx::select(75, 13_000).unwrap_err();
//! assert_eq!(too_old.to_string(), "the kernels need compute capability 8.0, the device has 7.5");
//! # Ok::<(), ptx::Reason>(())
//! ```

use xxhash_rust::xxh3::Xxh3;

/// PTX of one source for one target.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Module {
    /// The source's name: `cu/<name>.cu` of `kernels-ptx`.
    pub name: &'static str,
    /// What it was compiled for, `compute_80` or `compute_90`.
    pub target: &'static str,
    /// Version of the PTX language, which a driver must know.
    pub version: &'static str,
    /// XXH3-64 of the text.
    pub hash: u64,
    /// The PTX.
    pub text: &'static str,
    /// Names of its kernels.
    pub entries: &'static [&'static str],
}

impl Module {
    /// Whether its kernels wait for the one before them by themselves, so that they may be launched
    /// with programmatic dependent launch.
    pub fn has_programmatic_launch(&self) -> bool {
        self.text.contains("griddepcontrol.wait")
    }
}

impl std::fmt::Debug for Module {
    /// Without the text.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{} ({:016x}, PTX {})", self.name, self.target, self.hash, self.version)
    }
}

/// Why no modules can be had for a device.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Reason {
    /// The device is older than everything that was compiled for.
    #[error(
        "the kernels need compute capability {}.{}, the device has {}.{}",
        .needed / 10, .needed % 10, .found / 10, .found % 10
    )]
    ComputeCapability {
        /// Lowest that will do, major × 10 + minor.
        needed: u32,
        /// Of the device.
        found: u32,
    },
    /// The driver cannot read the PTX.
    #[error(
        "the kernels need a driver of CUDA {}.{} or later, this one is of CUDA {}.{}",
        .needed / 1000, .needed % 1000 / 10, .found / 1000, .found % 1000 / 10
    )]
    Driver {
        /// Lowest that will do, as drivers count: 12040 is CUDA 12.4.
        needed: u32,
        /// The driver's.
        found: u32,
    },
}

/// Every module for every target.
pub fn modules() -> &'static [Module] {
    MODULES
}

/// One module of each name: the newest that device and driver take. A module made for newer
/// devices alone, as the end of its name says (`_sm90`), is left out on older ones.
///
/// `compute_capability` is major × 10 + minor, `driver_version` what `cuDriverGetVersion` says:
/// 12040 for CUDA 12.4.
///
/// # Errors
///
/// The device or the driver is too old for some kernel.
pub fn select(compute_capability: u32, driver_version: u32) -> Result<Vec<Module>, Reason> {
    choose(MODULES, compute_capability, driver_version)
}

/// Hash of the code of a selection; part of the key of every graph that runs it.
pub fn code_hash(modules: &[Module]) -> u64 {
    let mut hasher = Xxh3::new();
    modules.iter().for_each(|module| hasher.update(&module.hash.to_le_bytes()));
    hasher.digest()
}

/// The newest target of a selection, for reports.
pub fn target(modules: &[Module]) -> &'static str {
    modules.iter().map(|module| module.target).max_by_key(|t| Target::parse(t)).unwrap_or("none")
}

macro_rules! modules {
    ($( ($name:literal, $target:literal, $version:literal, $hash:literal, $text:expr,
         [$($entry:literal),* $(,)?]); )*) => {
        &[ $( Module {
            name: $name,
            target: $target,
            version: $version,
            hash: $hash,
            text: $text,
            entries: &[$($entry),*],
        }, )* ]
    };
}

static MODULES: &[Module] = include!("../ptx/modules.rs");

/// `compute_90`, or `compute_90a`, which runs on 9.0 alone.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Target {
    compute_capability: u32,
    exact: bool,
}

impl Target {
    fn parse(text: &str) -> Self {
        let number = text.trim_start_matches("compute_");
        let digits = number.trim_end_matches('a');
        // A target that cannot be read is one that no device has.
        let compute_capability = digits.parse().unwrap_or(u32::MAX);
        Self { compute_capability, exact: digits != number }
    }

    fn runs_on(self, compute_capability: u32) -> bool {
        if self.exact {
            compute_capability == self.compute_capability
        } else {
            compute_capability >= self.compute_capability
        }
    }
}

/// The CUDA version whose driver is the first to read a version of PTX.
fn driver_for(ptx_version: &str) -> u32 {
    match ptx_version {
        "8.0" => 12_000,
        "8.1" => 12_010,
        "8.2" => 12_020,
        "8.3" => 12_030,
        "8.4" => 12_040,
        "8.5" => 12_050,
        "8.6" => 12_070,
        "8.7" => 12_080,
        "8.8" => 12_090,
        "9.0" => 13_000,
        _ => u32::MAX,
    }
}

fn choose(
    modules: &[Module],
    compute_capability: u32,
    driver_version: u32,
) -> Result<Vec<Module>, Reason> {
    let mut names: Vec<&str> = modules.iter().map(|module| module.name).collect();
    names.dedup();
    let best = |name: &&str| {
        let named = || modules.iter().filter(|module| module.name == *name);
        let runs = || named().filter(|m| Target::parse(m.target).runs_on(compute_capability));
        let readable = |module: &&&Module| driver_for(module.version) <= driver_version;
        if let Some(module) =
            runs().filter(|m| readable(&m)).max_by_key(|m| Target::parse(m.target))
        {
            return Ok(*module);
        }
        let oldest = named().map(|m| Target::parse(m.target).compute_capability).min();
        Err(match runs().map(|module| driver_for(module.version)).min() {
            Some(needed) => Reason::Driver { needed, found: driver_version },
            None => Reason::ComputeCapability {
                needed: oldest.unwrap_or(u32::MAX),
                found: compute_capability,
            },
        })
    };
    let made_for_newer = |name: &str| name.ends_with("_sm90") || name.ends_with("_sm90a");
    let chosen = names.iter().filter_map(|name| match best(name) {
        Err(Reason::ComputeCapability { .. }) if made_for_newer(name) => None,
        chosen => Some(chosen),
    });
    chosen.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn module(name: &'static str, target: &'static str, version: &'static str) -> Module {
        let hash = xxhash_rust::xxh3::xxh3_64(target.as_bytes());
        Module { name, target, version, hash, text: "", entries: &[] }
    }

    #[test]
    fn each_module_is_the_newest_that_device_and_driver_take() {
        let all = [
            module("gemv", "compute_80", "8.4"),
            module("gemv", "compute_90", "9.0"),
            module("norm", "compute_80", "8.0"),
            module("persistent_sm90", "compute_90", "8.4"),
            module("prefill", "compute_80", "8.4"),
            module("prefill", "compute_90a", "8.4"),
        ];
        let targets = |capability, driver| {
            let chosen = choose(&all, capability, driver)?;
            Ok::<_, Reason>(chosen.iter().map(|module| module.target).collect::<Vec<_>>())
        };
        let [old, new, own] = ["compute_80", "compute_90", "compute_90a"];
        assert_eq!(targets(90, 13_000).unwrap(), [new, old, new, own]);
        assert_eq!(targets(90, 12_040).unwrap(), [old, old, new, own]);
        assert_eq!(targets(100, 13_000).unwrap(), [new, old, new, old]);
        assert_eq!(targets(86, 13_000).unwrap(), ["compute_80"; 3]);
        assert_eq!(targets(86, 12_020), Err(Reason::Driver { needed: 12_040, found: 12_020 }));
        let reason = Reason::ComputeCapability { needed: 80, found: 75 };
        assert_eq!(targets(75, 13_000), Err(reason));
    }

    #[test]
    fn the_shipped_modules_serve_ampere_and_hopper_from_cuda_12_4_on() {
        let [ampere, hopper] = [86, 90].map(|capability| select(capability, 12_040).unwrap());
        assert!(ampere.iter().all(|module| module.target == "compute_80"));
        assert_eq!((target(&ampere), target(&hopper)), ("compute_80", "compute_90"));
        assert_ne!(code_hash(&ampere), code_hash(&hopper));
        let reason = select(90, 12_020).unwrap_err();
        assert_eq!(
            reason.to_string(),
            "the kernels need a driver of CUDA 12.4 or later, this one is of CUDA 12.2"
        );
    }
}
