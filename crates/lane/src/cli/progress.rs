//! The bar that shows how far something long is.

use std::io::IsTerminal;

use indicatif::{ProgressBar, ProgressStyle};

/// A bar on stderr, where stderr is a terminal.
pub(super) struct Bar(Option<ProgressBar>);

impl Bar {
    pub(super) fn new(what: &'static str) -> Self {
        Self(std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::no_length();
            let template = "{msg} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec}";
            if let Ok(style) = ProgressStyle::with_template(template) {
                bar.set_style(style);
            }
            bar.set_message(what);
            bar
        }))
    }

    pub(super) fn show(&self, done_bytes: u64, total_bytes: u64) {
        if let Some(bar) = &self.0 {
            bar.set_length(total_bytes);
            bar.set_position(done_bytes);
        }
    }

    pub(super) fn finish(&self) {
        if let Some(bar) = &self.0 {
            bar.finish_and_clear();
        }
    }
}
