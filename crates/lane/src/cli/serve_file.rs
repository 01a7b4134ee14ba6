//! `lane serve-file`.

use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError, sync_channel};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use clap::ValueEnum;
use lane::Cancel;
use lane::batch::{
    BatchOptions, BatchStep, Line, MAX_LINE_BYTES, Preempt, Record, Refusal, Service, read_line,
};

use super::progress::Bar;
use super::{INTERRUPTED, LoadArgs, MAX_BATCH, end_on_interrupt};

/// Requests that are taken from the input before their turn comes.
const MAX_LIVE_REQUESTS: usize = 1024;

#[derive(clap::Args)]
pub(super) struct Args {
    /// Requests, a JSON object a line; `-` reads them from stdin as they come
    #[arg(value_name = "REQUESTS.jsonl")]
    requests: PathBuf,
    /// Write the results here [default: stdout]
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    #[command(flatten)]
    load: LoadArgs,
    #[command(flatten)]
    batch: BatchArgs,
}

/// How many requests run together.
#[derive(Clone, clap::Args)]
pub(super) struct BatchArgs {
    /// Requests that run at the same time at most
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..=MAX_BATCH))]
    max_batch: u32,
    /// Tokens of all requests that the cache holds [default: --max-batch contexts, or what the
    /// memory allows]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    ctx_total: Option<u32>,
    /// What happens to the youngest request when the cache is full: its tokens are computed again
    /// later, or wait in host memory
    #[arg(long, value_enum, default_value = "recompute")]
    preempt: PreemptArg,
    /// Tokens that can wait in host memory with `--preempt swap` [default: as many as the cache
    /// holds]
    #[arg(long, value_name = "N")]
    swap_tokens: Option<u32>,
    /// Share of the cache, in percent, that no new request gets while others run
    #[arg(long, value_name = "PERCENT", default_value_t = 1, value_parser = clap::value_parser!(u32).range(0..=99))]
    watermark: u32,
    /// Compute every prompt from its first token, even if another request began alike
    #[arg(long)]
    no_prefix_cache: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum PreemptArg {
    Recompute,
    Swap,
}

impl BatchArgs {
    pub(super) fn options(&self) -> BatchOptions {
        BatchOptions {
            max_batch: self.max_batch,
            ctx_total_tokens: self.ctx_total,
            preempt: match self.preempt {
                PreemptArg::Recompute => Preempt::Recompute,
                PreemptArg::Swap => Preempt::Swap,
            },
            swap_tokens: self.swap_tokens,
            watermark_percent: self.watermark,
            prefix_cache: !self.no_prefix_cache,
            ..BatchOptions::default()
        }
    }
}

pub(super) fn run(args: Args) -> anyhow::Result<ExitCode> {
    let input = open(&args.requests)?;
    let out = args.out.as_deref().map(|path| open_out(path, &args.requests)).transpose()?;
    let lane = args.load.load_batch(&args.batch.options())?;
    let mut out: Box<dyn Write> = match out {
        None => Box::new(io::stdout()),
        Some(file) => {
            // A device has no length to set.
            if file.metadata()?.is_file() {
                file.set_len(0)?;
            }
            Box::new(file)
        }
    };
    let cancel = Cancel::default();
    end_on_interrupt(cancel.clone())?;

    let started = Instant::now();
    let lines = Lines::read(input, args.requests);
    let device = lane.engine.device().device();
    let mut service = Service::new(lane.engine, &lane.tokenizer);
    let counts = serve(&mut service, &lines, &cancel, &mut *out)?;
    super::say(&counts.line(&service, &device, started.elapsed()));
    match counts.refused {
        _ if cancel.is_cancelled() => Ok(ExitCode::from(INTERRUPTED)),
        0 => Ok(ExitCode::SUCCESS),
        1 => anyhow::bail!("one line was refused; its record says why"),
        n => anyhow::bail!("{n} lines were refused; their records say why"),
    }
}

fn open(path: &Path) -> anyhow::Result<Box<dyn BufRead + Send>> {
    if path == Path::new("-") {
        return Ok(Box::new(BufReader::new(io::stdin())));
    }
    let file = File::open(path).with_context(|| format!("cannot read {}", path.display()))?;
    Ok(Box::new(BufReader::new(file)))
}

/// Opens the file of answers and leaves in it what it holds: loading may fail yet.
fn open_out(path: &Path, requests: &Path) -> anyhow::Result<File> {
    let out = OpenOptions::new().write(true).create(true).truncate(false).open(path);
    let out = out.with_context(|| format!("cannot write {}", path.display()))?;
    let same = requests.canonicalize().is_ok_and(|it| path.canonicalize().is_ok_and(|o| o == it));
    anyhow::ensure!(!same, "{} holds the requests; answers need another file", path.display());
    Ok(out)
}

/// Lines of a file that another thread reads, with their numbers.
struct Lines(Receiver<io::Result<(u64, Line)>>, PathBuf);

/// What there is to read now.
enum Next {
    Line(u64, Line),
    Nothing,
    End,
}

impl Lines {
    fn read(source: Box<dyn BufRead + Send>, path: PathBuf) -> Self {
        let (sender, receiver) = sync_channel(64);
        std::thread::spawn(move || send_lines(source, &sender));
        Self(receiver, path)
    }

    /// The next line; waits a moment for it if there is nothing else to do.
    fn next(&self, idle: bool) -> anyhow::Result<Next> {
        let received = if idle {
            self.0.recv_timeout(Duration::from_millis(50)).map_err(|error| match error {
                RecvTimeoutError::Timeout => TryRecvError::Empty,
                RecvTimeoutError::Disconnected => TryRecvError::Disconnected,
            })
        } else {
            self.0.try_recv()
        };
        match received {
            Ok(line) => line
                .map(|(number, line)| Next::Line(number, line))
                .with_context(|| format!("cannot read {}", self.1.display())),
            Err(TryRecvError::Empty) => Ok(Next::Nothing),
            Err(TryRecvError::Disconnected) => Ok(Next::End),
        }
    }
}

fn send_lines(mut source: Box<dyn BufRead + Send>, sender: &SyncSender<io::Result<(u64, Line)>>) {
    for number in 1.. {
        let line = match read_line(&mut source, MAX_LINE_BYTES) {
            Ok(None) => return,
            Ok(Some(line)) => Ok((number, line)),
            Err(error) => Err(error),
        };
        let failed = line.is_err();
        if sender.send(line).is_err() || failed {
            return;
        }
    }
}

const CANNOT_WRITE: &str = "cannot write the answers";

/// What was done.
#[derive(Default)]
struct Counts {
    answers: u64,
    tokens: u64,
    refused: u64,
}

fn serve<S: BatchStep>(
    service: &mut Service<'_, S>,
    lines: &Lines,
    cancel: &Cancel,
    out: &mut dyn Write,
) -> anyhow::Result<Counts> {
    let bar = Bar::requests("answering");
    let (mut counts, mut records) = (Counts::default(), Vec::new());
    let (mut asked, mut ended) = (0, false);
    loop {
        while !ended && service.live_requests() < MAX_LIVE_REQUESTS {
            match lines.next(service.live_requests() == 0)? {
                Next::Line(number, line) => {
                    asked += u64::from(submit(service, number, &line, &mut records));
                }
                Next::Nothing => break,
                Next::End => ended = true,
            }
        }
        if cancel.is_cancelled() {
            service.cancel_all(&mut records);
        } else {
            service.step(&mut records)?;
        }
        for record in records.drain(..) {
            counts.add(&record);
            writeln!(out, "{}", serde_json::to_string(&record)?).context(CANNOT_WRITE)?;
        }
        out.flush().context(CANNOT_WRITE)?;
        bar.show(counts.answers + counts.refused, asked);
        if cancel.is_cancelled() || (ended && service.live_requests() == 0) {
            return Ok(counts);
        }
    }
}

/// Takes a line; false if there is nothing on it.
fn submit<S: BatchStep>(
    service: &mut Service<'_, S>,
    number: u64,
    line: &Line,
    records: &mut Vec<Record>,
) -> bool {
    let refusal = |error: String| Record::Refusal(Refusal { id: None, line: number, error });
    match line {
        Line::Text(text) if text.trim().is_empty() => return false,
        Line::Text(text) => service.submit(number, text, records),
        Line::NotUtf8 => records.push(refusal("the line is not UTF-8".into())),
        Line::TooLong => {
            let max = MAX_LINE_BYTES >> 20;
            records.push(refusal(format!("the line is longer than {max} MiB")));
        }
    }
    true
}

impl Counts {
    fn add(&mut self, record: &Record) {
        match record {
            Record::Answer(answer) => {
                self.answers += 1;
                self.tokens += answer.tokens.len() as u64;
            }
            Record::Refusal(_) => self.refused += 1,
        }
    }

    fn line<S: BatchStep>(
        &self,
        service: &Service<'_, S>,
        device: &str,
        elapsed: Duration,
    ) -> String {
        let report = service.engine().report();
        let (counts, prefix) = (report.counts, report.planner.prefix);
        let per_step = counts.decode_rows as f64 / counts.decode_steps.max(1) as f64;
        format!(
            "[{} answers, {} tokens, {:.1} tok/s on {device}; prompts of {} tokens, {} of them \
             cached; {} chunks, {} steps of {per_step:.1} rows; {} preemptions]",
            self.answers,
            self.tokens,
            self.tokens as f64 / elapsed.as_secs_f64(),
            prefix.asked_tokens,
            prefix.hit_tokens,
            counts.chunk_steps,
            counts.decode_steps,
            counts.recomputed + counts.swapped,
        )
    }
}
