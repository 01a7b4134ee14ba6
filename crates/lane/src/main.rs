//! The `lane` command.

#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::Parser;

mod cli;

fn main() -> ExitCode {
    let done = match cli::Cli::try_parse() {
        Ok(cli) => run(cli),
        Err(answer) => cli::print_answer(&answer),
    };
    match done {
        Ok(code) => code,
        Err(error) if cli::reader_has_gone(&error) => ExitCode::SUCCESS,
        Err(error) => {
            cli::say(&cli::visible(&format!("error: {}", cli::sentence(&error))));
            ExitCode::FAILURE
        }
    }
}

fn run(cli: cli::Cli) -> anyhow::Result<ExitCode> {
    env_logger::Builder::new()
        .filter_level(cli.log_level())
        .parse_default_env()
        .target(env_logger::Target::Pipe(Box::new(cli::progress::Stderr)))
        .format(|out, record| {
            use std::io::Write;
            writeln!(out, "{}: {}", record.level().as_str().to_lowercase(), record.args())
        })
        .init();
    cli.run()
}
