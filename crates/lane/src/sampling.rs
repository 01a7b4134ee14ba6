//! How the next token is chosen: parameters, penalties, and the choice on the host.
//!
//! A step chooses on the device, and 4 bytes come back. Penalties and log-probabilities need all
//! logits on the host ([`GenerateOptions::reads_logits`](crate::GenerateOptions::reads_logits));
//! there [`draw`] is the same function as the device's, its CPU twin.

use std::collections::HashMap;

use decode_graph::Head;
use kernels_ptx::{Access, Arg, Kernel, ParamKind, SamplingPack, Slice, TokenParams, TwinArgs};

use crate::lane::LaneError;

/// How the next token is chosen. The order of the cuts is top-k, top-p, min-p, temperature.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Divides the logits; 0 takes the likeliest token (greedy).
    pub temperature: f32,
    /// Keeps this many likeliest tokens; 0: as many as sampling considers.
    pub top_k: u32,
    /// Keeps the likeliest tokens whose probabilities reach this sum.
    pub top_p: f32,
    /// Keeps tokens at least this likely relative to the likeliest.
    pub min_p: f32,
    /// Equal seeds draw equal tokens.
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Self {
        Self { temperature: 0.8, top_k: 40, top_p: 0.95, min_p: 0.05, seed: 1 }
    }
}

impl Sampling {
    /// The likeliest token, always.
    pub const GREEDY: Self = Self { temperature: 0.0, top_k: 1, top_p: 1.0, min_p: 0.0, seed: 0 };

    /// Refuses values that mean nothing.
    pub fn check(&self) -> Result<(), LaneError> {
        let unit = |value: f32| (0.0..=1.0).contains(&value);
        allow(self.temperature >= 0.0 && self.temperature.is_finite(), || {
            ("temperature", self.temperature, "a finite number from 0 up")
        })?;
        allow(unit(self.top_p), || ("top-p", self.top_p, "from 0 to 1"))?;
        allow(unit(self.min_p), || ("min-p", self.min_p, "from 0 to 1"))
    }

    pub(crate) fn head(&self) -> Head {
        if self.temperature > 0.0 { Head::Sampled } else { Head::Greedy }
    }

    /// The parameters as the device reads them.
    pub fn pack(&self) -> SamplingPack {
        SamplingPack {
            temperature: self.temperature,
            top_p: self.top_p,
            min_p: self.min_p,
            top_k: self.top_k,
            seed_low: self.seed as u32,
            seed_high: (self.seed >> 32) as u32,
        }
    }
}

/// What makes tokens less likely that the last tokens, the prompt's among them, contain: in
/// llama.cpp's definitions. A token found c > 0 times has its logit divided by `repeat` if it is
/// positive and multiplied by it if not, and then lowered by `c · frequency + presence`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Penalties {
    /// 1: none.
    pub repeat: f32,
    /// 0: none; below 0 rewards.
    pub presence: f32,
    /// 0: none; below 0 rewards.
    pub frequency: f32,
    /// How many of the last tokens count; 0: none.
    pub last_tokens: u32,
}

impl Penalties {
    /// None.
    pub const NONE: Self = Self { repeat: 1.0, presence: 0.0, frequency: 0.0, last_tokens: 64 };

    /// Whether they change nothing.
    pub fn is_none(&self) -> bool {
        let Self { repeat, presence, frequency, last_tokens } = *self;
        (repeat == 1.0 && presence == 0.0 && frequency == 0.0) || last_tokens == 0
    }

    /// Refuses values that mean nothing.
    pub fn check(&self) -> Result<(), LaneError> {
        allow(self.repeat > 0.0 && self.repeat.is_finite(), || {
            ("repeat penalty", self.repeat, "a finite number above 0")
        })?;
        let finite = "a finite number";
        allow(self.presence.is_finite(), || ("presence penalty", self.presence, finite))?;
        allow(self.frequency.is_finite(), || ("frequency penalty", self.frequency, finite))
    }

    /// Changes the logits behind `tokens`, of which the last count. Ids out of range are ignored.
    pub fn apply(&self, tokens: &[u32], logits: &mut [f32]) {
        if self.is_none() {
            return;
        }
        let start = tokens.len().saturating_sub(self.last_tokens as usize);
        let mut counts = HashMap::<u32, u32>::new();
        for &id in &tokens[start..] {
            *counts.entry(id).or_default() += 1;
        }
        for (id, count) in counts {
            if let Some(logit) = logits.get_mut(id as usize) {
                *logit = if *logit > 0.0 { *logit / self.repeat } else { *logit * self.repeat };
                *logit -= count as f32 * self.frequency + self.presence;
            }
        }
    }
}

impl Default for Penalties {
    fn default() -> Self {
        Self::NONE
    }
}

fn allow(
    allowed: bool,
    otherwise: impl FnOnce() -> (&'static str, f32, &'static str),
) -> Result<(), LaneError> {
    if allowed {
        return Ok(());
    }
    let (what, value, allowed) = otherwise();
    Err(LaneError::Option { what, value: value.to_string(), allowed })
}

/// The token that the device would draw from `logits` behind the token at `position`.
pub fn draw(logits: &[f32], sampling: &Sampling, position: u32) -> Result<u32, LaneError> {
    let n_vocab = logits.len() as u32;
    if n_vocab == 0 {
        return Err(LaneError::TokenOutOfRange { id: 0, n_vocab });
    }
    let pack = sampling.pack();
    let mut tokens = TokenParams { absolute_position: position, ..Default::default() };
    let (mut token, mut step_count) = (0u32, 0u32);
    // What the kernel does besides, counting steps and preparing the next, is of no use here.
    let mut given = [
        ("logits", Some(Given::Read(bytemuck::cast_slice(logits)))),
        ("outputs", Some(Given::Read(bytemuck::bytes_of(&0u32)))),
        ("sampling", Some(Given::Read(bytemuck::bytes_of(&pack)))),
        ("tokens", Some(Given::Write(bytemuck::bytes_of_mut(&mut tokens)))),
        ("step_count", Some(Given::Write(bytemuck::bytes_of_mut(&mut step_count)))),
        ("token", Some(Given::Write(bytemuck::bytes_of_mut(&mut token)))),
        ("n_vocab", Some(Given::Value(n_vocab))),
        ("n_tokens", Some(Given::Value(1))),
        ("n_outputs", Some(Given::Value(1))),
        ("max_context_tokens", Some(Given::Value(u32::MAX))),
    ];
    let mut args = TwinArgs::new();
    for param in Kernel::Sample.params() {
        let value = given.iter_mut().find(|(name, _)| *name == param.name);
        let value = value.and_then(|(_, value)| value.take());
        args.push(value.map_or(Arg::Null, |value| value.of_kind(param.kind)));
    }
    Kernel::Sample.run_twin(args)?;
    Ok(token)
}

/// An argument before it is known how its parameter is used.
enum Given<'a> {
    Read(&'a [u8]),
    Write(&'a mut [u8]),
    Value(u32),
}

impl<'a> Given<'a> {
    fn of_kind(self, kind: ParamKind) -> Arg<Slice<'a>> {
        match (self, kind) {
            (Given::Value(value), _) => Arg::U32(value),
            (Given::Read(bytes), _) => Arg::Buffer(Slice::Shared(bytes)),
            (Given::Write(bytes), ParamKind::Buffer { access: Access::Read, .. }) => {
                Arg::Buffer(Slice::Shared(bytes))
            }
            (Given::Write(bytes), _) => Arg::Buffer(Slice::Exclusive(bytes)),
        }
    }
}

/// A token and how likely the model found it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Logprob {
    /// The token.
    pub id: u32,
    /// Natural logarithm of its probability at temperature 1, before penalties and cuts.
    pub logprob: f32,
}

/// How likely the model found the chosen token, and the likeliest ones.
#[derive(Clone, Debug, PartialEq)]
pub struct Logprobs {
    /// The token that was chosen.
    pub chosen: Logprob,
    /// The likeliest, most likely first; of equals the lower id first.
    pub top: Vec<Logprob>,
}

impl Logprobs {
    /// Of `chosen`, an index of `logits`, and of the `n_top` likeliest. NaN counts as −∞.
    pub fn new(logits: &[f32], chosen: u32, n_top: u32) -> Self {
        let value = |id: u32| match logits.get(id as usize) {
            Some(logit) if !logit.is_nan() => *logit,
            _ => f32::NEG_INFINITY,
        };
        let all = || 0..logits.len() as u32;
        let max = all().map(value).fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = all().map(|id| f64::from(value(id) - max).exp()).sum();
        let logprob = |id| Logprob { id, logprob: (f64::from(value(id) - max) - sum.ln()) as f32 };
        let falling = |a: &u32, b: &u32| value(*b).total_cmp(&value(*a)).then(a.cmp(b));
        let mut ids: Vec<u32> = all().collect();
        let n_top = (n_top as usize).min(ids.len());
        if (1..ids.len()).contains(&n_top) {
            ids.select_nth_unstable_by(n_top - 1, falling);
        }
        ids.truncate(n_top);
        ids.sort_unstable_by(falling);
        Self { chosen: logprob(chosen), top: ids.into_iter().map(logprob).collect() }
    }
}
