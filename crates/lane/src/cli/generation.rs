//! Options of everything that generates text.

use clap::ValueEnum;
use lane::{DriveMode, GenerateOptions, Penalties, Sampling};

/// How tokens are chosen and where the text ends.
#[derive(clap::Args)]
#[command(next_help_heading = "Choosing tokens")]
pub(super) struct GenerationArgs {
    /// Temperature; 0 takes the likeliest token [default: 0.8, in a chat 0]
    #[arg(long, alias = "temperature", allow_negative_numbers = true)]
    temp: Option<f32>,
    /// Keep this many likeliest tokens (0: 1024)
    #[arg(long, default_value_t = 40)]
    top_k: u32,
    /// Keep the likeliest tokens that together are this probable
    #[arg(long, default_value_t = 0.95, allow_negative_numbers = true)]
    top_p: f32,
    /// Keep tokens at least this probable relative to the likeliest
    #[arg(long, default_value_t = 0.05, allow_negative_numbers = true)]
    min_p: f32,
    /// Equal seeds draw equal texts
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Divide the logits of recent tokens by this (1: off). Like the other penalties it reads
    /// all logits back and lets the host choose: 4 bytes per token of the vocabulary, each time
    #[arg(long, default_value_t = 1.0, value_name = "X", allow_negative_numbers = true)]
    repeat_penalty: f32,
    /// Lower the logits of recent tokens by this (0: off)
    #[arg(long, default_value_t = 0.0, value_name = "X", allow_negative_numbers = true)]
    presence_penalty: f32,
    /// Lower the logits of recent tokens by this, as often as they occurred (0: off)
    #[arg(long, default_value_t = 0.0, value_name = "X", allow_negative_numbers = true)]
    frequency_penalty: f32,
    /// How many recent tokens the penalties look at, the prompt's among them
    #[arg(long, default_value_t = 64, value_name = "N")]
    repeat_last_n: u32,
    /// End the text before this one, which is not printed (repeatable)
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    stop: Vec<String>,
    /// Whether the device feeds itself (0 bytes per token) or the host does (12 bytes)
    #[arg(long, value_enum, default_value = "self")]
    drive: DriveArg,
    /// Go on beyond the context, forgetting the oldest tokens
    #[arg(long)]
    ring: bool,
}

impl GenerationArgs {
    /// With `usual` temperature unless another was asked for.
    pub(super) fn options(&self, n_tokens: u32, usual: f32) -> GenerateOptions {
        GenerateOptions {
            n_tokens,
            sampling: Sampling {
                temperature: self.temp.unwrap_or(usual),
                top_k: self.top_k,
                top_p: self.top_p,
                min_p: self.min_p,
                seed: self.seed,
            },
            penalties: Penalties {
                repeat: self.repeat_penalty,
                presence: self.presence_penalty,
                frequency: self.frequency_penalty,
                last_tokens: self.repeat_last_n,
            },
            drive: self.drive.into(),
            ring: self.ring,
            stop: self.stop.clone(),
            ..Default::default()
        }
    }
}

#[derive(Clone, Copy, ValueEnum)]
pub(super) enum DriveArg {
    #[value(name = "self")]
    SelfAdvance,
    Host,
}

impl From<DriveArg> for DriveMode {
    fn from(drive: DriveArg) -> Self {
        match drive {
            DriveArg::SelfAdvance => DriveMode::SelfAdvance,
            DriveArg::Host => DriveMode::Host,
        }
    }
}
