//! What each shipped kernel costs on each processor, as the pinned assembler counts it, compared
//! with what is on record.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::parallel;
use crate::toolchain::Toolchain;

/// The processors that each target's PTX is assembled for.
const PROCESSORS: &[(&str, &[&str])] = &[
    ("compute_80", &["sm_80", "sm_86", "sm_89", "sm_90"]),
    ("compute_90", &["sm_90"]),
    ("compute_90a", &["sm_90a"]),
];

/// One kernel on one processor. Bytes are per block for shared memory, per thread for the rest.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Usage {
    kernel: String,
    registers: u32,
    shared_bytes: u32,
    stack_bytes: u32,
    spill_store_bytes: u32,
    spill_load_bytes: u32,
}

/// The record: what a kernel may use at most, beside the PTX.
const RECORD: &str = "budgets.txt";
const COMMAND: &str = "cargo xtask ptx-report --record";

/// Module, processor and kernel.
type Name = (String, String, String);
/// Registers per thread and bytes of shared memory per block, by kernel.
type Budgets = BTreeMap<Name, (u32, u32)>;

/// Prints the table. Spills are a failure, and so is more than the record allows; with `record` the
/// record is written instead.
pub(crate) fn run(root: &Path, record: bool) -> Result<()> {
    let folder = crate::build_ptx::shipped(root);
    let used = report(&folder, &Toolchain::unpacked(&crate::target(root))?)?;
    let path = folder.join(RECORD);
    if record {
        fs::write(&path, text(&used)).with_context(|| format!("writing {}", path.display()))?;
        println!("wrote {}", path.display());
        return Ok(());
    }
    let recorded = fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()));
    compare(&used, &budgets(&recorded?)?)
}

fn report(folder: &Path, toolchain: &Toolchain) -> Result<Budgets> {
    let mut used = Budgets::new();
    let files = ptx_files(folder)?;
    if files.is_empty() {
        println!("no .ptx files in {}: nothing to assemble", folder.display());
        return Ok(used);
    }
    let width = files.iter().map(String::len).max().unwrap_or(0);
    println!(
        "{:width$}  {:6}  {:32}  {:>4}  {:>6}  {:>5}  {:>6}",
        "module", "target", "kernel", "regs", "shared", "stack", "spills"
    );
    let mut pairs = Vec::new();
    for file in &files {
        let target = file.trim_end_matches(".ptx").rsplit('.').next().unwrap_or("");
        let processors = PROCESSORS.iter().find(|known| known.0 == target);
        let (_, processors) = processors.with_context(|| format!("{file}: unknown target"))?;
        pairs.extend(processors.iter().map(|processor| (file, *processor)));
    }
    let assembled = parallel::map(&pairs, parallel::jobs(), |(file, processor)| {
        assemble(&toolchain.ptxas(), &folder.join(file), processor)
    });
    let mut spilling = Vec::new();
    for ((file, processor), usages) in pairs.into_iter().zip(assembled) {
        let mut usages = usages?;
        usages.sort_by(|a, b| a.kernel.cmp(&b.kernel));
        for usage in usages {
            let spills = usage.spill_store_bytes + usage.spill_load_bytes;
            println!(
                "{file:width$}  {processor:6}  {:32}  {:>4}  {:>6}  {:>5}  {spills:>6}",
                usage.kernel, usage.registers, usage.shared_bytes, usage.stack_bytes
            );
            if spills > 0 {
                spilling.push(format!("{} on {processor} ({spills} bytes)", usage.kernel));
            }
            let name = (file.clone(), processor.to_owned(), usage.kernel);
            used.insert(name, (usage.registers, usage.shared_bytes));
        }
    }
    if !spilling.is_empty() {
        bail!("registers spill to memory in {}", spilling.join(", "));
    }
    Ok(used)
}

/// The record as a file, a kernel a line.
fn text(used: &Budgets) -> String {
    let mut text = format!(
        "# Written by {COMMAND}: module, processor, kernel, registers per thread,\n\
         # bytes of shared memory per block. More than this fails ptx-report.\n"
    );
    for ((module, processor, kernel), (registers, shared_bytes)) in used {
        let _ = writeln!(text, "{module} {processor} {kernel} {registers} {shared_bytes}");
    }
    text
}

fn budgets(text: &str) -> Result<Budgets> {
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    lines
        .map(|line| {
            let words: Vec<&str> = line.split(' ').collect();
            let [module, processor, kernel, registers, shared_bytes] = words[..] else {
                bail!("{RECORD}: five words expected in {line:?}");
            };
            let name = [module, processor, kernel].map(str::to_owned);
            Ok((name.into(), (registers.parse()?, shared_bytes.parse()?)))
        })
        .collect()
}

/// Fails where a kernel is not on record, needs more than it did, or is gone.
fn compare(used: &Budgets, recorded: &Budgets) -> Result<()> {
    let mut faults = String::new();
    for (name @ (module, processor, kernel), now) in used {
        let place = format!("\n  {kernel} of {module} on {processor}");
        match recorded.get(name) {
            None => faults += &format!("{place} is not on record"),
            Some(then) if now.0 > then.0 || now.1 > then.1 => {
                faults += &format!(
                    "{place}: {} registers and {} bytes, {} and {} on record",
                    now.0, now.1, then.0, then.1
                );
            }
            Some(then) if now != then => println!("less than on record:{place}"),
            Some(_) => {}
        }
    }
    for (module, processor, kernel) in recorded.keys().filter(|name| !used.contains_key(*name)) {
        faults += &format!("\n  {kernel} of {module} on {processor} is on record and gone");
    }
    if !faults.is_empty() {
        bail!("the kernels are not as recorded:{faults}\nif that is meant: {COMMAND}");
    }
    println!("{} kernels within what is on record", used.len());
    Ok(())
}

fn ptx_files(folder: &Path) -> Result<Vec<String>> {
    if !folder.exists() {
        return Ok(Vec::new());
    }
    let mut files = Vec::new();
    for entry in fs::read_dir(folder)? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if name.ends_with(".ptx") {
            files.push(name);
        }
    }
    files.sort();
    Ok(files)
}

fn assemble(ptxas: &Path, ptx: &Path, processor: &str) -> Result<Vec<Usage>> {
    let mut command = Command::new(ptxas);
    command.arg("--verbose").arg(format!("--gpu-name={processor}"));
    command.args(["--output-file", "/dev/null"]).arg(ptx);
    let output = command.output().with_context(|| format!("starting {}", ptxas.display()))?;
    let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        bail!("{} for {processor}:\n{}", ptx.display(), said.trim());
    }
    let usages = parse(&said)?;
    if usages.is_empty() {
        bail!("{} for {processor}: ptxas reports no kernel:\n{}", ptx.display(), said.trim());
    }
    Ok(usages)
}

/// Reads what `ptxas --verbose` prints: a line that names the kernel, two with numbers.
fn parse(said: &str) -> Result<Vec<Usage>> {
    let mut usages: Vec<Usage> = Vec::new();
    for line in said.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            let kernel = rest.split('\'').next().unwrap_or("").to_owned();
            usages.push(Usage { kernel, ..Usage::default() });
            continue;
        }
        let Some(usage) = usages.last_mut() else { continue };
        if line.contains("bytes stack frame") {
            // A kernel has a line of its own and one for each function that was not inlined.
            usage.stack_bytes += number_before(line, "bytes stack frame").context("stack frame")?;
            usage.spill_store_bytes +=
                number_before(line, "bytes spill stores").context("spills")?;
            usage.spill_load_bytes += number_before(line, "bytes spill loads").context("spills")?;
        } else if line.contains("Used ") {
            usage.registers = number_before(line, "registers")
                .with_context(|| format!("no registers in {line:?}"))?;
            usage.shared_bytes = number_before(line, "bytes smem").unwrap_or(0);
        }
    }
    Ok(usages)
}

fn number_before(line: &str, unit: &str) -> Option<u32> {
    line[..line.find(unit)?].split_whitespace().next_back()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_assemblers_lines_become_numbers() {
        let said = "\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'one' for 'sm_80'
ptxas info    : Function properties for one
    24 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 40 registers, 1024 bytes smem, 384 bytes cmem[0]
ptxas info    : Compiling entry function 'two' for 'sm_80'
ptxas info    : Function properties for two
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, 368 bytes cmem[0]
";
        let one = Usage {
            kernel: "one".into(),
            registers: 40,
            shared_bytes: 1024,
            stack_bytes: 24,
            spill_store_bytes: 12,
            spill_load_bytes: 8,
        };
        let two = Usage { kernel: "two".into(), registers: 8, ..Usage::default() };
        assert_eq!(parse(said).unwrap(), [one, two]);
    }

    #[test]
    fn more_than_on_record_fails_and_less_does_not() {
        let name = |kernel: &str| ("a.ptx".to_owned(), "sm_80".to_owned(), kernel.to_owned());
        let recorded = Budgets::from([(name("one"), (40, 1024)), (name("two"), (8, 0))]);
        assert_eq!(budgets(&text(&recorded)).unwrap(), recorded);
        let with = |kernel: &str, usage: (u32, u32)| {
            let mut used = recorded.clone();
            used.insert(name(kernel), usage);
            compare(&used, &recorded)
        };
        with("one", (40, 1024)).unwrap();
        with("one", (39, 512)).unwrap();
        let said = with("one", (41, 1024)).unwrap_err().to_string();
        assert!(said.contains("one of a.ptx on sm_80: 41 registers"), "{said}");
        assert!(with("one", (40, 1025)).is_err());
        assert!(with("three", (1, 1)).unwrap_err().to_string().contains("not on record"));
        let gone = compare(&Budgets::from([(name("one"), (1, 1))]), &recorded).unwrap_err();
        assert!(gone.to_string().contains("two of a.ptx on sm_80 is on record and gone"));
    }

    const SPILLING: &str = "
        .version 8.4
        .target sm_80
        .address_size 64
        .visible .entry spills(.param .u64 p)
        .maxntid 1024
        .minnctapersm 2
        {
            .reg .u64 %rd<2>;
            .reg .u32 %r<80>;
            ld.param.u64 %rd1, [p];
            LOADS
            bar.sync 0;
            STORES
            ret;
        }
    ";

    #[test]
    fn a_kernel_that_spills_fails_the_report_and_one_that_does_not_passes() {
        let toolchain = match Toolchain::unpacked(&crate::target(&crate::root())) {
            Ok(toolchain) => toolchain,
            Err(error) => {
                eprintln!("a_kernel_that_spills_fails_the_report: skipped, {error:#}");
                return;
            }
        };
        // So many values alive at the barrier, where a thread may hold 32.
        let kernel = |values: u32| {
            let lines = |line: &dyn Fn(u32) -> String| (0..values).map(line).collect::<String>();
            SPILLING
                .replace(
                    "LOADS",
                    &lines(&|i| format!("ld.volatile.u32 %r{i}, [%rd1+{}];\n", 4 * i)),
                )
                .replace(
                    "STORES",
                    &lines(&|i| format!("st.volatile.u32 [%rd1+{}], %r{i};\n", 4 * i)),
                )
        };
        let folder = tempfile::tempdir().unwrap();
        report(folder.path(), &toolchain).unwrap();
        fs::write(folder.path().join("a.compute_80.ptx"), kernel(8)).unwrap();
        report(folder.path(), &toolchain).unwrap();
        fs::write(folder.path().join("b.compute_80.ptx"), kernel(79)).unwrap();
        let said = report(folder.path(), &toolchain).unwrap_err().to_string();
        for processor in ["sm_80", "sm_86", "sm_89", "sm_90"] {
            assert!(said.contains(&format!("spills on {processor} (")), "{said}");
        }
    }
}
