//! `lane completions` and `lane man`: what packages install beside the program.

use std::path::PathBuf;

use anyhow::Context as _;
use clap::CommandFactory;
use clap_complete::Shell;

use super::{Cli, print};

#[derive(clap::Args)]
pub(super) struct CompletionsArgs {
    /// The shell
    shell: Shell,
}

#[derive(clap::Args)]
pub(super) struct ManArgs {
    /// Folder for lane.1, lane-generate.1 and so on
    #[arg(value_name = "FOLDER")]
    folder: Option<PathBuf>,
}

pub(super) fn completions(args: &CompletionsArgs) -> anyhow::Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "lane", &mut script);
    print(&String::from_utf8(script)?)
}

pub(super) fn man(args: &ManArgs) -> anyhow::Result<()> {
    let Some(folder) = &args.folder else {
        let mut page = Vec::new();
        clap_mangen::Man::new(Cli::command()).render(&mut page)?;
        return print(&String::from_utf8(page)?);
    };
    clap_mangen::generate_to(Cli::command(), folder)
        .with_context(|| format!("cannot write manual pages into {}", folder.display()))
}
