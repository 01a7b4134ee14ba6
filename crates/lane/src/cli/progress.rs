//! The bar that shows how far something long is. There is at most one at a time; whatever else
//! goes to the terminal meanwhile is written above it.

use std::io::{self, IsTerminal, Write};
use std::sync::{Mutex, PoisonError};

use indicatif::{ProgressBar, ProgressStyle};

static SHOWN: Mutex<Option<ProgressBar>> = Mutex::new(None);

/// A bar on stderr, where stderr is a terminal; gone when dropped.
pub(super) struct Bar(Option<ProgressBar>);

impl Bar {
    /// Of a thing whose size is counted in bytes.
    pub(super) fn bytes(what: &'static str) -> Self {
        Self::new(what, "{msg} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec}")
    }

    /// Of a thing whose size is counted in tokens.
    pub(super) fn tokens(what: &'static str) -> Self {
        Self::new(what, "{msg} {wide_bar} {pos}/{len} tokens, {per_sec}, {eta} left")
    }

    /// Of a file of requests.
    pub(super) fn requests(what: &'static str) -> Self {
        Self::new(what, "{msg} {wide_bar} {pos}/{len} requests")
    }

    fn new(what: &'static str, template: &str) -> Self {
        let bar = io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::no_length();
            if let Ok(style) = ProgressStyle::with_template(template) {
                bar.set_style(style);
            }
            bar.set_message(what);
            bar
        });
        shown().clone_from(&bar);
        Self(bar)
    }

    pub(super) fn show(&self, done: u64, total: u64) {
        if let Some(bar) = &self.0 {
            bar.set_length(total);
            bar.set_position(done);
        }
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        *shown() = None;
        if let Some(bar) = &self.0 {
            bar.finish_and_clear();
        }
    }
}

fn shown() -> std::sync::MutexGuard<'static, Option<ProgressBar>> {
    SHOWN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs `write` with no bar in its way.
pub(crate) fn suspended<T>(write: impl FnOnce() -> T) -> T {
    let bar = shown().clone();
    match bar {
        Some(bar) => bar.suspend(write),
        None => write(),
    }
}

/// Stderr above the bar.
pub(crate) struct Stderr;

impl Write for Stderr {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        suspended(|| io::stderr().write(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}
