//! Rotary position embedding: which frequencies turn which pairs.

use std::f64::consts::PI;

pub use kernels_ptx::RopePairing;

use super::architecture::{Spec, Windows};
use super::config::Keys;
use super::error::ModelError;

/// How a model stretches its context beyond what it was first trained on.
///
/// The way of Llama 3.1 and of Phi 3 is tensors of factors instead:
/// [`Model::rope_factors`](super::Model::rope_factors).
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum RopeScaling {
    /// Not at all.
    None,
    /// Every frequency divided by `factor`.
    Linear {
        /// How much longer the context is.
        factor: f64,
    },
    /// YaRN: slow frequencies divided, fast ones kept, those between blended.
    Yarn {
        /// How much longer the context is.
        factor: f64,
        /// Tokens of the context that is stretched.
        original_context_tokens: u32,
        /// Frequencies with more turns than this in the original context are kept.
        beta_fast: f64,
        /// Frequencies with fewer turns than this are divided by `factor`.
        beta_slow: f64,
    },
}

/// The rotary position embedding of a model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rope {
    /// Floats of each head that are turned; even, and at most the head's.
    pub dims: u32,
    /// The base of the frequencies.
    pub base: f64,
    /// Which floats are turned together.
    pub pairing: RopePairing,
    /// How the context is stretched.
    pub scaling: RopeScaling,
    /// What the file multiplies the turned floats by; mostly 1.
    pub magnitude: f64,
}

impl Rope {
    pub(super) fn read(
        keys: &Keys<'_>,
        spec: &Spec,
        head_dim: u32,
        context_length: u32,
    ) -> Result<Self, ModelError> {
        let dims = keys.u32("rope.dimension_count")?.unwrap_or(head_dim);
        if dims == 0 || !dims.is_multiple_of(2) || dims > head_dim {
            let expected = format!("it should be even and at most the {head_dim} of a head");
            return Err(keys.bad("rope.dimension_count", dims, expected));
        }
        let base = keys.f64("rope.freq_base")?.unwrap_or(spec.default_rope_base);
        if !base.is_finite() || base <= 1.0 {
            let expected = "it should be more than 1".to_owned();
            return Err(keys.bad("rope.freq_base", base, expected));
        }
        let scaling = RopeScaling::read(keys, spec, context_length)?;
        let magnitude = positive(keys, "rope.scaling.attn_factor", 1.0)?;
        Ok(Self { dims, base, pairing: spec.pairing, scaling, magnitude })
    }

    /// What layers with a window turn by, where that is something else.
    pub(super) fn local(&self, keys: &Keys<'_>, spec: &Spec) -> Result<Option<Self>, ModelError> {
        const KEY: &str = "rope.freq_base_swa";
        let Windows::Pattern { local_rope_base, .. } = spec.windows else { return Ok(None) };
        let base = keys.f64(KEY)?.unwrap_or(local_rope_base);
        if !base.is_finite() || base <= 1.0 {
            return Err(keys.bad(KEY, base, "it should be more than 1".to_owned()));
        }
        Ok(Some(Self { base, scaling: RopeScaling::None, ..*self }))
    }

    /// Radians per token of each pair, `dims / 2` of them, with all scaling in them.
    ///
    /// `factors` are the values of [`Model::rope_factors`](super::Model::rope_factors), which
    /// divide the frequencies; pairs beyond their end are not divided.
    pub fn inverse_frequencies(&self, factors: Option<&[f32]>) -> Vec<f64> {
        let dims = f64::from(self.dims);
        (0..self.dims / 2)
            .map(|pair| {
                let factor = factors.and_then(|f| f.get(pair as usize)).map_or(1.0, |&f| f.into());
                let frequency = self.base.powf(-2.0 * f64::from(pair) / dims) / factor;
                match self.scaling {
                    RopeScaling::None => frequency,
                    RopeScaling::Linear { factor } => frequency / factor,
                    RopeScaling::Yarn { factor, .. } => {
                        let kept = self.yarn_kept(pair);
                        frequency * kept + frequency / factor * (1.0 - kept)
                    }
                }
            })
            .collect()
    }

    /// What the turned floats are multiplied by: the file's magnitude, and with YaRN what follows
    /// from its factor.
    pub fn attention_factor(&self) -> f32 {
        let yarn = match self.scaling {
            RopeScaling::Yarn { factor, .. } => 1.0 + 0.1 * factor.ln(),
            _ => 1.0,
        };
        (yarn * self.magnitude) as f32
    }

    /// How much of a pair's frequency YaRN keeps, from 0 to 1.
    fn yarn_kept(&self, pair: u32) -> f64 {
        let RopeScaling::Yarn { original_context_tokens, beta_fast, beta_slow, .. } = self.scaling
        else {
            return 1.0;
        };
        // The pair, as a real number, that makes `turns` turns within the original context.
        let pair_with = |turns: f64| {
            f64::from(self.dims) * (f64::from(original_context_tokens) / (turns * 2.0 * PI)).ln()
                / (2.0 * self.base.ln())
        };
        let low = pair_with(beta_fast).floor().max(0.0);
        let high = pair_with(beta_slow).ceil().min(f64::from(self.dims - 1));
        let ramp = (f64::from(pair) - low) / (high - low).max(0.001);
        1.0 - ramp.clamp(0.0, 1.0)
    }
}

impl RopeScaling {
    fn read(keys: &Keys<'_>, spec: &Spec, context_length: u32) -> Result<Self, ModelError> {
        // Files from before the key had a type were all linear, under another name.
        let kind = keys.str("rope.scaling.type")?.unwrap_or("linear");
        let factor = match keys.f64("rope.scaling.factor")? {
            None => keys.f64("rope.scale_linear")?,
            factor => factor,
        };
        // 0 stands for "not set" in files in the wild.
        let factor = factor.filter(|&factor| factor != 0.0).unwrap_or(1.0);
        if !factor.is_finite() || factor < 1.0 {
            let expected = "it should be at least 1".to_owned();
            return Err(keys.bad("rope.scaling.factor", factor, expected));
        }
        match kind {
            "none" => Ok(Self::None),
            // All there is to it is in the tensors of factors.
            "longrope" if spec.long_rope && factor == 1.0 => Ok(Self::None),
            "linear" if factor == 1.0 => Ok(Self::None),
            "linear" => Ok(Self::Linear { factor }),
            "yarn" => Ok(Self::Yarn {
                factor,
                original_context_tokens: original_context_tokens(keys, context_length)?,
                beta_fast: positive(keys, "rope.scaling.yarn_beta_fast", 32.0)?,
                beta_slow: positive(keys, "rope.scaling.yarn_beta_slow", 1.0)?,
            }),
            other => {
                let feature = format!("rope scaling of the kind {other:?}");
                Err(ModelError::UnsupportedFeature { feature })
            }
        }
    }
}

/// Tokens of the context that the model was first trained on.
pub(super) fn original_context_tokens(
    keys: &Keys<'_>,
    context_length: u32,
) -> Result<u32, ModelError> {
    let tokens = keys.u32("rope.scaling.original_context_length")?;
    Ok(tokens.filter(|&tokens| tokens > 0).unwrap_or(context_length))
}

fn positive(keys: &Keys<'_>, suffix: &str, default: f64) -> Result<f64, ModelError> {
    let value = keys.f64(suffix)?.unwrap_or(default);
    if !value.is_finite() || value <= 0.0 {
        return Err(keys.bad(suffix, value, "it should be positive".to_owned()));
    }
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rope(scaling: RopeScaling) -> Rope {
        Rope { dims: 128, base: 10000.0, pairing: RopePairing::Halves, scaling, magnitude: 1.0 }
    }

    #[test]
    fn unscaled_frequencies_fall_from_one_to_the_base() {
        let frequencies = rope(RopeScaling::None).inverse_frequencies(None);
        assert_eq!(frequencies.len(), 64);
        assert_eq!(frequencies[0], 1.0);
        assert!((frequencies[32] - 0.01).abs() < 1e-15);
        assert!(frequencies.is_sorted_by(|a, b| a > b));
    }

    #[test]
    fn factors_divide_and_missing_ones_do_not() {
        let plain = rope(RopeScaling::None).inverse_frequencies(None);
        let scaled = rope(RopeScaling::None).inverse_frequencies(Some(&[2.0, 4.0]));
        assert_eq!(scaled[0], plain[0] / 2.0);
        assert_eq!(scaled[1], plain[1] / 4.0);
        assert_eq!(scaled[2..], plain[2..]);
        let linear = rope(RopeScaling::Linear { factor: 8.0 }).inverse_frequencies(None);
        assert!(linear.iter().zip(&plain).all(|(l, p)| *l == p / 8.0));
    }

    #[test]
    fn yarn_keeps_fast_pairs_and_divides_slow_ones() {
        let yarn = rope(RopeScaling::Yarn {
            factor: 4.0,
            original_context_tokens: 4096,
            beta_fast: 32.0,
            beta_slow: 1.0,
        });
        let plain = rope(RopeScaling::None).inverse_frequencies(None);
        let scaled = yarn.inverse_frequencies(None);
        // 128 ln(4096 / (32 * 2 pi)) / (2 ln 10000) = 20.9, and 45.03 for one turn.
        assert_eq!(scaled[..=20], plain[..=20]);
        assert!(scaled[21] < plain[21] && scaled[45] > plain[45] / 4.0);
        assert!(scaled[46..].iter().zip(&plain[46..]).all(|(s, p)| *s == p / 4.0));
        assert!((yarn.attention_factor() - 1.138_629_4).abs() < 1e-6);
        assert_eq!(rope(RopeScaling::None).attention_factor(), 1.0);
        let larger = Rope { magnitude: 1.25, ..rope(RopeScaling::None) };
        assert_eq!(larger.attention_factor(), 1.25);
    }
}
