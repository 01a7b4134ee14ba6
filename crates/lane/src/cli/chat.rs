//! `lane chat`.

use std::io::{self, BufRead, IsTerminal, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use anyhow::Context as _;
use lane::{Answer, Cancel, Lane, Session, SessionEvent, StopReason};

use super::generation::GenerationArgs;
use super::{LoadArgs, print};

const HELP: &str = "\
/reset   start a new conversation (a --system text stays)
/stats   speed, context and memory
/help    this
/exit    leave; so do Ctrl-D, and Ctrl-C twice
Ctrl-C stops an answer. A line that starts with a space is never a command.";

#[derive(clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    load: LoadArgs,
    /// Instructions before the conversation
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    system: Option<String>,
    /// Tokens of an answer at most
    #[arg(short, long = "tokens", alias = "n-predict", default_value_t = 1024, value_name = "N")]
    n: u32,
    #[command(flatten)]
    generation: GenerationArgs,
}

pub(super) fn run(args: Args) -> anyhow::Result<()> {
    // Who asks wants the answer, and the same one tomorrow.
    let options = args.generation.options(args.n, 0.0);
    options.check()?;
    let (lane, model) = args.load.load()?;
    let cancel = options.cancel.clone();
    let session = Session::new(&lane, options, args.system.as_deref())?;
    if let Some(fallback) = session.template().fallback() {
        log::warn!(target: "lane", "{fallback}");
    }
    let interactive = io::stdin().is_terminal() && io::stdout().is_terminal();
    if interactive {
        let context = lane.kv()?.max_context_tokens();
        super::say(&format!("[{model} on {}, context of {context} tokens; /help]", lane.device()?));
    }
    let (input, switch) = Input::open(cancel)?;
    Chat { lane: &lane, session, switch, interactive, last: None, turns: 0 }.run(&input)
}

/// What the user did.
enum Event {
    /// Wrote a line; not always UTF-8.
    Line(Vec<u8>),
    /// Pressed Ctrl-C while no answer was being made.
    Interrupt,
    /// Has no more to say.
    End,
    /// Cannot be read from.
    Failed(io::Error),
}

/// Lines of stdin, and Ctrl-C between them.
struct Input(Receiver<Event>);

impl Input {
    /// Starts to read stdin and to handle Ctrl-C.
    fn open(cancel: Cancel) -> anyhow::Result<(Self, Switch)> {
        let (sender, receiver) = sync_channel(16);
        let switch = Switch { answering: Arc::new(AtomicBool::new(false)), cancel };
        let (handled, interrupts) = (switch.clone(), sender.clone());
        ctrlc::set_handler(move || {
            if handled.answering.load(Ordering::SeqCst) {
                handled.cancel.cancel();
            } else {
                // Full only while lines are waiting, and then nobody is.
                let _ = interrupts.try_send(Event::Interrupt);
            }
        })
        .context("cannot handle Ctrl-C")?;
        std::thread::spawn(move || read_lines(&sender));
        Ok((Self(receiver), switch))
    }

    fn next(&self) -> Event {
        self.0.recv().unwrap_or(Event::End)
    }
}

fn read_lines(sender: &SyncSender<Event>) {
    let mut stdin = io::stdin().lock();
    loop {
        let mut line = Vec::new();
        let event = match stdin.read_until(b'\n', &mut line) {
            Ok(0) => Event::End,
            Ok(_) => Event::Line(line),
            Err(error) => Event::Failed(error),
        };
        let over = !matches!(event, Event::Line(_));
        if sender.send(event).is_err() || over {
            return;
        }
    }
}

/// What Ctrl-C acts on.
#[derive(Clone)]
struct Switch {
    answering: Arc<AtomicBool>,
    cancel: Cancel,
}

impl Switch {
    /// Runs `work`, which Ctrl-C cancels.
    fn cancellable<T>(&self, work: impl FnOnce() -> T) -> T {
        self.cancel.reset();
        self.answering.store(true, Ordering::SeqCst);
        let done = work();
        self.answering.store(false, Ordering::SeqCst);
        done
    }
}

struct Chat<'a> {
    lane: &'a Lane,
    session: Session<'a>,
    switch: Switch,
    interactive: bool,
    last: Option<Answer>,
    turns: u32,
}

impl Chat<'_> {
    fn run(&mut self, input: &Input) -> anyhow::Result<()> {
        let mut interrupted = false;
        loop {
            if self.interactive {
                print("> ")?;
            }
            match input.next() {
                Event::Interrupt if interrupted => break,
                Event::Interrupt => {
                    interrupted = true;
                    super::say("\n[Ctrl-C again, Ctrl-D or /exit to leave]");
                    continue;
                }
                Event::End => break,
                Event::Failed(error) => return Err(error).context("cannot read stdin"),
                Event::Line(line) => {
                    interrupted = false;
                    let done = self.line(&line);
                    match done {
                        Ok(Next::GoOn) => {}
                        Ok(Next::Leave) => return Ok(()),
                        // Someone who sits there can do better next time.
                        Err(error) if self.interactive => {
                            super::say(&format!("error: {}", super::sentence(&error)))
                        }
                        Err(error) => return Err(error),
                    }
                }
            }
        }
        if self.interactive {
            print("\n")?;
        }
        Ok(())
    }

    fn line(&mut self, line: &[u8]) -> anyhow::Result<Next> {
        let line = std::str::from_utf8(line).context("a line of the input is not UTF-8")?;
        let line = line.trim_end_matches(['\n', '\r']);
        match command(line) {
            None if line.trim().is_empty() => {}
            None => self.answer(line)?,
            Some("exit" | "quit") => return Ok(Next::Leave),
            Some("reset") => {
                self.session.reset();
                (self.last, self.turns) = (None, 0);
                super::say("[a new conversation]");
            }
            Some("stats") => super::say(&self.stats()?),
            Some("help") => super::say(HELP),
            Some(other) => super::say(&format!("[/{other} is no command; /help lists them]")),
        }
        Ok(Next::GoOn)
    }

    fn answer(&mut self, turn: &str) -> anyhow::Result<()> {
        let (session, switch) = (&mut self.session, &self.switch);
        let mut printed = Ok(());
        let mut on_event = |event: SessionEvent<'_>| match event {
            SessionEvent::Text(piece) if printed.is_ok() => {
                printed = print(piece);
                if printed.is_err() {
                    switch.cancel.cancel();
                }
            }
            SessionEvent::Forgot { exchanges: 1 } => {
                super::say("[the context is full: the oldest exchange is forgotten]");
            }
            SessionEvent::Forgot { exchanges } => {
                super::say(&format!(
                    "[the context is full: the oldest {exchanges} exchanges are forgotten]"
                ));
            }
            _ => {}
        };
        let answer = switch.cancellable(|| session.answer(turn, &mut on_event));
        printed?;
        if answer.is_ok() || self.interactive {
            print("\n")?;
        }
        let answer = answer?;
        io::stdout().flush()?;
        match answer.stop {
            StopReason::Cancelled => super::say("[stopped]"),
            StopReason::Context => super::say("[the context is full: the answer is cut off]"),
            StopReason::Length if self.interactive => super::say("[cut off at -n tokens]"),
            _ => {}
        }
        self.turns += 1;
        self.last = Some(answer);
        Ok(())
    }

    fn stats(&self) -> anyhow::Result<String> {
        let telemetry = self.lane.telemetry()?;
        let context = self.lane.kv()?.max_context_tokens();
        let Some(Answer { prompt_tokens, tokens, timing, .. }) = &self.last else {
            return Ok(format!("[nothing said yet; context of {context} tokens]"));
        };
        let rate = |tokens: u32, seconds: f64| match tokens {
            0 => "-".into(),
            tokens => format!("{:.1}", f64::from(tokens) / seconds),
        };
        let bytes = |bytes: Option<u64>| bytes.map_or("-".into(), |bytes| bytes.to_string());
        let prefill_tokens = timing.prefill_tokens;
        Ok(format!(
            "[{} turns; context {} of {context} tokens; last answer {tokens} tokens, {} tok/s; its \
             prompt {prompt_tokens} tokens, {} from the cache, {} tok/s; H2D {} and D2H {} \
             bytes/token; slab {:.1} of {:.1} MiB on {}]",
            self.turns,
            prompt_tokens + tokens,
            rate(timing.decode_tokens, timing.decode.as_secs_f64()),
            prompt_tokens.saturating_sub(prefill_tokens as usize),
            rate(prefill_tokens, timing.first_token.as_secs_f64()),
            bytes(telemetry.graph.and_then(|graph| graph.h2d_bytes_per_token)),
            bytes(telemetry.d2h_bytes_per_token),
            telemetry.high_water_bytes as f64 / 1048576.0,
            telemetry.capacity_bytes as f64 / 1048576.0,
            self.lane.device()?,
        ))
    }
}

/// Whether the conversation goes on.
enum Next {
    GoOn,
    Leave,
}

/// The command that a line is: a slash and one word of letters. A path is none.
fn command(line: &str) -> Option<&str> {
    let word = line.strip_prefix('/')?.trim_end();
    let is_word = !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_lowercase());
    is_word.then_some(word)
}
