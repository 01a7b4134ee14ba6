//! The `lane` command: one file per subcommand. Results go to stdout, everything else to stderr.

use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context as _;
use clap::{Parser, Subcommand, ValueEnum};
use decode_graph::Numerics;
use kv_paged::KvType;

use lane::batch::{BatchLane, BatchOptions};
use lane::memory_plan::suitable_numerics;
use lane::model::Model;
use lane::{
    BackendChoice, CachePlace, Cancel, ContextSize, FusionChoice, LaneOptions, PlanOptions,
};

mod bench;
mod chat;
mod diff;
mod fingerprint;
mod generate;
mod generation;
mod inspect;
mod logits;
mod manual;
mod perplexity;
pub(crate) mod progress;
mod serve_file;
mod size;
mod synth;

use size::ByteSize;

const AFTER_HELP: &str = "\
Results go to stdout, everything else to stderr. docs/JSON.md describes what --json prints.

Exit codes:
    0  done
    1  refused or failed, with one sentence on stderr
    2  the command line is wrong
  130  interrupted by Ctrl-C

NO_COLOR, if set, keeps colours out of this help and of messages.";

/// Most sequences that run at the same time: what steps are padded to, and graphs captured for.
const MAX_BATCH: i64 = 32;

/// The exit code of what Ctrl-C ended, as shells count.
const INTERRUPTED: u8 = 130;

/// Runs quantised language models: everything resident, one captured graph per token.
#[derive(Parser)]
#[command(name = "lane", version, max_term_width = 100, after_help = AFTER_HELP)]
pub(crate) struct Cli {
    #[command(subcommand)]
    command: Command,
    /// Say more on stderr (repeat for still more)
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    verbose: u8,
}

#[derive(Subcommand)]
enum Command {
    /// Generate text from a prompt
    Generate(generate::Args),
    /// Talk with a model: a conversation in its chat template
    Chat(chat::Args),
    /// Print the logits behind a prompt as JSON
    Logits(logits::Args),
    /// Answer a file of requests, many at the same time
    ServeFile(serve_file::Args),
    /// Show what a model file holds and what memory it needs; loads nothing
    Inspect(inspect::Args),
    /// Write a model file with random weights at a real model's shape
    Synth(synth::Args),
    /// Print or check the fingerprints of a file's weight matrices
    Fingerprint(fingerprint::Args),
    /// Measure tokens per second and bytes per second
    Bench(bench::Args),
    /// Measure how well a model predicts a text, and what a quantisation costs
    ///
    /// Perplexity by llama.cpp's rules: the text is cut into chunks of --ctx tokens (512 unless
    /// given), each starts with an empty cache, and only predictions with half of a chunk before
    /// them count.
    Perplexity(perplexity::Args),
    /// Find the first kernel whose results differ between two backends
    Diff(diff::Args),
    /// Print a script that completes this command's words in a shell
    Completions(manual::CompletionsArgs),
    /// Print the manual page, or write those of all subcommands into a folder
    Man(manual::ManArgs),
}

impl Cli {
    /// Level of the log: warnings, unless more is asked for.
    pub(crate) fn log_level(&self) -> log::LevelFilter {
        match self.verbose {
            0 => log::LevelFilter::Warn,
            1 => log::LevelFilter::Info,
            _ => log::LevelFilter::Debug,
        }
    }

    /// Runs the subcommand.
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        match self.command {
            Command::Generate(args) => return generate::run(args),
            Command::ServeFile(args) => return serve_file::run(args),
            Command::Chat(args) => chat::run(args),
            Command::Logits(args) => logits::run(args),
            Command::Inspect(args) => inspect::run(args),
            Command::Synth(args) => synth::run(args),
            Command::Fingerprint(args) => fingerprint::run(args),
            Command::Bench(args) => bench::run(args),
            Command::Perplexity(args) => perplexity::run(&args),
            Command::Diff(args) => diff::run(args),
            Command::Completions(args) => manual::completions(&args),
            Command::Man(args) => manual::man(&args),
        }?;
        Ok(ExitCode::SUCCESS)
    }
}

/// Prints what a command line is answered with that names no work: help, the version, or what is
/// wrong with it.
pub(crate) fn print_answer(answer: &clap::Error) -> anyhow::Result<ExitCode> {
    let printed = answer.print().and_then(|()| io::stdout().flush());
    if !answer.use_stderr() {
        printed.context(CANNOT_PRINT)?;
    }
    Ok(ExitCode::from(answer.exit_code() as u8))
}

/// Lets Ctrl-C cancel the work, which is still summed up; the second one ends the program.
fn end_on_interrupt(cancel: Cancel) -> anyhow::Result<()> {
    ctrlc::set_handler(move || {
        if cancel.is_cancelled() {
            std::process::exit(INTERRUPTED.into());
        }
        cancel.cancel();
    })
    .context("cannot handle Ctrl-C")
}

/// Writes to stdout at once.
fn print(text: &str) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).context(CANNOT_PRINT)
}

const CANNOT_PRINT: &str = "cannot write to stdout";

/// Writes a line to stderr; when that fails, nobody is left to be told.
pub(crate) fn say(line: &str) {
    let _ = writeln!(progress::Stderr, "{line}");
}

/// Whether nobody reads what is written any more, which is no error of ours.
pub(crate) fn reader_has_gone(error: &anyhow::Error) -> bool {
    let mut causes = error.chain().filter_map(|cause| cause.downcast_ref::<io::Error>());
    causes.any(|cause| cause.kind() == io::ErrorKind::BrokenPipe)
}

/// An error with its causes, but for those that the text before them has told already.
pub(crate) fn sentence(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if text.is_empty() {
            text = cause;
        } else if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

/// Text with its control characters spelled out: what comes from files or the command line may
/// hold some, and a terminal would obey them.
pub(crate) fn visible(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if c.is_control() { out.extend(c.escape_default()) } else { out.push(c) }
    }
    out
}

/// Most bytes of a text file or of stdin that is read as a whole.
const MAX_TEXT_BYTES: u64 = 16 << 20;

/// Reads a text to its end, which must come soon.
fn read_text(source: impl io::Read, what: &str) -> anyhow::Result<String> {
    let mut text = String::new();
    let read = io::Read::read_to_string(&mut io::Read::take(source, MAX_TEXT_BYTES + 1), &mut text);
    read.with_context(|| format!("cannot read {what}"))?;
    let max = MAX_TEXT_BYTES >> 20;
    anyhow::ensure!(text.len() as u64 <= MAX_TEXT_BYTES, "{what} is longer than {max} MiB");
    Ok(text)
}

fn print_json(value: &impl serde::Serialize) -> anyhow::Result<()> {
    print(&(serde_json::to_string_pretty(value)? + "\n"))
}

/// Which model, and how it is loaded.
#[derive(Clone, clap::Args)]
#[command(next_help_heading = "Model and memory")]
struct LoadArgs {
    /// GGUF file [default: the small model inside this program]
    #[arg(short, long, value_name = "FILE")]
    model: Option<PathBuf>,
    /// Where to compute
    #[arg(long, value_enum, default_value = "auto")]
    backend: BackendArg,
    /// Activations in 8-bit integers, or in f32 [auto: f32 where the hidden state has at most 1024
    /// elements; q8 leaves those of q, k and v in f32 there]
    #[arg(long, value_enum, default_value = "auto")]
    numerics: NumericsArg,
    /// A kernel an operation, or one kernel for the whole step (sm_90 and later) [auto: the faster]
    #[arg(long, value_enum, default_value = "auto")]
    fusion: FusionArg,
    /// Element type of the KV cache [default: f16, with exact numerics f32]
    #[arg(long, value_enum)]
    kv_type: Option<KvTypeArg>,
    /// Tokens of context: a number, `auto` (at most 8192, less where memory is short) or `max`
    #[arg(short, long, value_name = "N|auto|max", default_value = "auto", value_parser = context)]
    ctx: ContextSize,
    /// Tokens of a prompt that one step computes at most (1: one by one)
    #[arg(long, value_name = "N", default_value_t = lane::memory_plan::DEFAULT_CHUNK_TOKENS, value_parser = clap::value_parser!(u32).range(1..=4096))]
    chunk: u32,
    /// Whether the command has prompts so long that a second layout of the weights pays.
    #[arg(skip)]
    two_layouts: bool,
    /// Number of the GPU
    #[arg(long, value_name = "N", default_value_t = 0)]
    device: u32,
    /// Memory that may be used, e.g. 6GiB [default: what is free]
    #[arg(long, value_name = "SIZE")]
    vram: Option<ByteSize>,
    /// Memory of the GPU that must stay free [default: 512MiB]
    #[arg(long, value_name = "SIZE")]
    vram_reserve: Option<ByteSize>,
    /// Refuse a model with weights that would be computed with as another type
    #[arg(long)]
    no_transcode: bool,
    /// Keep the packed weights beside the model, or in a folder: the next start only reads them
    #[arg(long, value_name = "FOLDER", num_args = 0..=1, require_equals = true)]
    cache: Option<Option<PathBuf>>,
    /// Threads of the host backend, at most one a core [default: all cores]
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    threads: Option<u16>,
}

#[derive(Clone, Copy, ValueEnum)]
enum BackendArg {
    Auto,
    Host,
    Cuda,
}

#[derive(Clone, Copy, ValueEnum)]
enum NumericsArg {
    Auto,
    Q8,
    Exact,
}

#[derive(Clone, Copy, ValueEnum)]
enum FusionArg {
    Auto,
    Ops,
    Persistent,
}

impl From<FusionArg> for FusionChoice {
    fn from(fusion: FusionArg) -> Self {
        match fusion {
            FusionArg::Auto => FusionChoice::Auto,
            FusionArg::Ops => FusionChoice::Ops,
            FusionArg::Persistent => FusionChoice::Persistent,
        }
    }
}

#[derive(Clone, Copy, ValueEnum)]
enum KvTypeArg {
    F16,
    F32,
    /// i8, with a scale for each row
    Q8,
}

impl NumericsArg {
    fn of(self, model: &Model, fusion: FusionArg) -> Numerics {
        match self {
            NumericsArg::Auto => suitable_numerics(model, fusion.into()),
            NumericsArg::Q8 => Numerics::Q8,
            NumericsArg::Exact => Numerics::Exact,
        }
    }
}

impl From<KvTypeArg> for KvType {
    fn from(kv_type: KvTypeArg) -> Self {
        match kv_type {
            KvTypeArg::F16 => KvType::F16,
            KvTypeArg::F32 => KvType::F32,
            KvTypeArg::Q8 => KvType::Q8,
        }
    }
}

fn context(text: &str) -> Result<ContextSize, String> {
    match text {
        "auto" => Ok(ContextSize::Auto),
        "max" => Ok(ContextSize::Max),
        _ => match text.parse() {
            Ok(tokens) if tokens > 0 => Ok(ContextSize::Tokens(tokens)),
            _ => Err("expected a number of tokens from 1 up, `auto` or `max`".into()),
        },
    }
}

impl LoadArgs {
    fn options(&self, model: &Model) -> LaneOptions {
        let numerics = self.numerics.of(model, self.fusion);
        LaneOptions {
            backend: match self.backend {
                BackendArg::Auto => BackendChoice::Auto,
                BackendArg::Host => BackendChoice::Host,
                BackendArg::Cuda => BackendChoice::Cuda,
            },
            device: self.device,
            vram_reserve_bytes: self.vram_reserve.map(|size| size.0),
            plan: PlanOptions {
                context: self.ctx,
                numerics,
                fusion: self.fusion.into(),
                kv_type: self.kv_type.map(KvType::from),
                usable_bytes: self.vram.map(|size| size.0),
                chunk_tokens: self.chunk,
                two_layouts: self.two_layouts,
                batch: None,
            },
            no_transcoding: self.no_transcode,
            cache: match &self.cache {
                None => CachePlace::Off,
                Some(None) => CachePlace::Beside,
                Some(Some(folder)) => CachePlace::Folder(folder.clone()),
            },
        }
    }

    /// Opens and loads the model, with a progress bar where someone watches.
    fn load(&self) -> anyhow::Result<(lane::Lane, String)> {
        self.load_opened(&open_model(self.model.as_deref())?)
    }

    /// The same where the model is open.
    fn load_opened(&self, file: &lane::ModelFile) -> anyhow::Result<(lane::Lane, String)> {
        self.start_threads();
        let bar = progress::Bar::bytes("loading");
        let lane = file
            .load(&self.options(&file.model), &mut |at| bar.show(at.done_bytes, at.total_bytes))
            .map_err(|error| named(self.model.as_deref(), error))?;
        Ok((lane, model_name(self.model.as_deref())))
    }

    /// The same for many sequences.
    fn load_batch(&self, batch: &BatchOptions) -> anyhow::Result<BatchLane> {
        self.start_threads();
        let file = open_model(self.model.as_deref())?;
        let bar = progress::Bar::bytes("loading");
        let lane = file
            .load_batch(&self.options(&file.model), batch, &mut |at| {
                bar.show(at.done_bytes, at.total_bytes)
            })
            .map_err(|error| named(self.model.as_deref(), error))?;
        Ok(lane)
    }

    fn start_threads(&self) {
        if let Some(threads) = self.threads {
            let cores = std::thread::available_parallelism().map_or(usize::MAX, usize::from);
            let threads = usize::from(threads).min(cores);
            // A second model runs on the threads of the first.
            let _ = rayon::ThreadPoolBuilder::new().num_threads(threads).build_global();
        }
    }
}

fn open_model(path: Option<&std::path::Path>) -> anyhow::Result<lane::ModelFile> {
    lane::ModelFile::open(path).map_err(|error| named(path, error))
}

fn named(path: Option<&std::path::Path>, error: lane::LaneError) -> anyhow::Error {
    match path {
        // Errors of the file system name the file themselves.
        Some(path) if !error.to_string().contains(&path.display().to_string()) => {
            anyhow::anyhow!("{}: {error}", path.display())
        }
        _ => error.into(),
    }
}

fn model_name(path: Option<&std::path::Path>) -> String {
    path.map_or_else(|| lane::open::EMBEDDED_MODEL_NAME.into(), |path| path.display().to_string())
}
