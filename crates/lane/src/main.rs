//! The `lane` command.

use std::process::ExitCode;

use clap::Parser;

mod cli;

fn main() -> ExitCode {
    let cli = cli::Cli::parse();
    env_logger::Builder::new()
        .filter_level(cli.log_level())
        .parse_default_env()
        .format(|out, record| {
            use std::io::Write;
            writeln!(out, "{}: {}", record.level().as_str().to_lowercase(), record.args())
        })
        .init();
    match cli.run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            cli::say(&cli::visible(&format!("error: {error:#}")));
            ExitCode::FAILURE
        }
    }
}
