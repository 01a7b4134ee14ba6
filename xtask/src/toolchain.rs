//! The pinned compilers, unpacked from PyPI at first use: no toolkit is needed, nor a GPU.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

/// The pin: package versions with the hash of each file. Shown in the manifest, too.
const PIN: &str = include_str!("../cuda-12.4.txt");
/// Named after the toolkit that all of the pin belong to.
const FOLDER: &str = "cuda-12.4";

pub(crate) struct Toolchain {
    folder: PathBuf,
}

impl Toolchain {
    /// Unpacks the packages under `target` if that is not done yet.
    pub(crate) fn unpacked(target: &Path) -> Result<Self> {
        if !cfg!(all(target_arch = "x86_64", target_os = "linux")) {
            bail!("the pinned CUDA compilers run on x86-64 Linux only");
        }
        let hash = xxhash_rust::xxh3::xxh3_64(PIN.as_bytes());
        let folder = target.join(FOLDER).join(format!("{hash:016x}"));
        if !folder.is_dir() {
            // Made beside its place and renamed, so that an interrupted or second run sees all of
            // it or nothing.
            let growing = target.join(FOLDER).join(format!("unpacking-{}", std::process::id()));
            fs::create_dir_all(&growing)
                .with_context(|| format!("making {}", growing.display()))?;
            let done = unpack(&growing).and_then(|()| match fs::rename(&growing, &folder) {
                Err(_) if folder.is_dir() => Ok(()),
                renamed => renamed.context("moving the unpacked compilers to their place"),
            });
            if growing.exists() {
                let _ = fs::remove_dir_all(&growing);
            }
            done?;
        }
        Ok(Self { folder })
    }

    pub(crate) fn nvrtc(&self) -> PathBuf {
        self.folder.join("nvidia/cuda_nvrtc/lib/libnvrtc.so.12")
    }

    pub(crate) fn include(&self) -> PathBuf {
        self.folder.join("nvidia/cuda_runtime/include")
    }

    pub(crate) fn ptxas(&self) -> PathBuf {
        self.folder.join("nvidia/cuda_nvcc/bin/ptxas")
    }
}

/// The pinned packages as `name==version`.
pub(crate) fn pinned() -> impl Iterator<Item = &'static str> {
    let lines = PIN.lines().filter(|line| !line.starts_with('#'));
    lines.filter_map(|line| line.split_whitespace().next())
}

fn unpack(folder: &Path) -> Result<()> {
    let names: Vec<_> = pinned().collect();
    eprintln!("fetching {} (47 MB, once)", names.join(", "));
    let pin = folder.join("pin.txt");
    fs::write(&pin, PIN)?;
    let mut pip = Command::new("python3");
    pip.args(["-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]);
    pip.args(["--only-binary=:all:", "--require-hashes", "--requirement"]).arg(&pin);
    pip.arg("--dest").arg(folder);
    run(&mut pip).with_context(|| {
        format!(
            "the CUDA compilers could not be fetched: python3 with pip and a connection to PyPI \
             are needed once; or run `python3 -m pip download --no-deps {}` elsewhere, and put the \
             folder of the three files into PIP_FIND_LINKS with PIP_NO_INDEX=1",
            names.join(" ")
        )
    })?;
    let mut wheels = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "whl") {
            wheels.push(path);
        }
    }
    for wheel in &wheels {
        let mut unzip = Command::new("python3");
        run(unzip.args(["-m", "zipfile", "-e"]).arg(wheel).arg(folder))
            .with_context(|| format!("unpacking {}", wheel.display()))?;
        fs::remove_file(wheel)?;
    }
    let toolchain = Toolchain { folder: folder.to_owned() };
    for file in [toolchain.nvrtc(), toolchain.ptxas(), toolchain.include().join("cuda_fp16.h")] {
        if !file.is_file() {
            bail!("{} is not in the packages {}", file.display(), names.join(", "));
        }
    }
    // zipfile does not restore who may execute a file.
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        fs::set_permissions(toolchain.ptxas(), fs::Permissions::from_mode(0o755))?;
    }
    Ok(())
}

fn run(command: &mut Command) -> Result<()> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command.output().with_context(|| format!("starting {program}"))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        bail!("{program} failed: {}", said.trim());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_pin_names_exact_versions_with_hashes() {
        assert_eq!(super::pinned().count(), 3);
        for package in super::pinned() {
            assert!(package.contains("==12.4."), "{package}");
        }
        assert_eq!(super::PIN.matches("--hash=sha256:").count(), 3);
    }
}
