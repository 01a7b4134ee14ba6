//! The embedded PTX and the signature table say the same, without a compiler or a GPU.

use std::collections::BTreeMap;

use decode_graph::ptx::{self, Module};
use kernels_ptx::{Kernel, ParamKind, ScalarType};

/// Name and parameter types of each `.entry` of a text.
fn entries(text: &str) -> BTreeMap<&str, Vec<&str>> {
    text.split(".entry ")
        .skip(1)
        .map(|rest| {
            let (name, rest) = rest.split_once('(').expect("an entry has parameters");
            let (list, _) = rest.split_once(')').expect("which end");
            let types = list.split(',').map(|param| {
                let mut words = param.split_whitespace();
                assert_eq!(words.next(), Some(".param"), "{name}: {param}");
                words.next().expect("a parameter has a type")
            });
            (name.trim(), types.collect())
        })
        .collect()
}

fn targets() -> BTreeMap<&'static str, Vec<&'static Module>> {
    let mut targets = BTreeMap::<_, Vec<_>>::new();
    for module in ptx::modules() {
        targets.entry(module.target).or_default().push(module);
    }
    targets
}

#[test]
fn every_kernel_is_an_entry_with_its_parameters_once_for_each_target() {
    assert_eq!(targets().into_keys().collect::<Vec<_>>(), ["compute_80", "compute_90"]);
    for (target, modules) in targets() {
        let mut found = BTreeMap::new();
        for module in modules {
            let parsed = entries(module.text);
            let mut named: Vec<&str> = module.entries.to_vec();
            named.sort_unstable();
            assert_eq!(parsed.keys().copied().collect::<Vec<_>>(), named, "{module:?}");
            for (name, types) in parsed {
                assert!(
                    found.insert(name, (module.name, types)).is_none(),
                    "{name} is there twice"
                );
            }
        }
        let capability = target.trim_start_matches("compute_").parse::<u32>().unwrap();
        for &kernel in Kernel::ALL {
            if kernel.compute_capability() > capability {
                continue;
            }
            let name = kernel.name();
            let (source, types) =
                found.remove(name).unwrap_or_else(|| panic!("no {name} for {target}"));
            assert_eq!(source, kernel.source(), "{name}");
            let fits = |(ty, param): (&&str, &kernels_ptx::Param)| match param.kind {
                ParamKind::Buffer { .. } => *ty == ".u64",
                ParamKind::Scalar(ScalarType::U32) => [".u32", ".b32"].contains(ty),
                ParamKind::Scalar(ScalarType::F32) => [".f32", ".b32"].contains(ty),
            };
            let params = kernel.params();
            assert_eq!(types.len(), params.len(), "{name} for {target}: {types:?}");
            let all = types.iter().zip(params).all(fits);
            assert!(all, "{name} for {target}: {types:?}, the table has {params:#?}");
        }
        assert!(found.is_empty(), "not in the table: {found:?}");
    }
}

#[test]
fn every_module_is_what_it_says() {
    for module in ptx::modules() {
        let line = |directive: &str| {
            let mut words = module.text.lines().filter_map(|line| line.strip_prefix(directive));
            words.next().unwrap_or_else(|| panic!("{module:?}: no {directive}")).trim().to_owned()
        };
        assert_eq!(line(".version"), module.version, "{module:?}");
        assert_eq!(line(".target"), module.target.replace("compute", "sm"), "{module:?}");
        let hash = xxhash_rust::xxh3::xxh3_64(module.text.as_bytes());
        assert_eq!(hash, module.hash, "{module:?}");
        let waits = module.text.contains("griddepcontrol.wait");
        assert_eq!(waits, module.has_programmatic_launch(), "{module:?}");
    }
}
