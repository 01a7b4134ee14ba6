//! Which layers see only the last tokens.

use super::architecture::{Spec, Windows};
use super::config::Keys;
use super::error::ModelError;

/// A sliding window of attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlidingWindow {
    /// Tokens that a layer with the window sees, the current one among them.
    pub window_tokens: u32,
    /// Every so many-th layer sees all tokens, starting with layer `full_every - 1`; 0: none does.
    pub full_every: u32,
}

impl SlidingWindow {
    /// Whether a layer sees only the window.
    pub fn slides(&self, layer: u32) -> bool {
        !(layer + 1).is_multiple_of(self.full_every)
    }

    pub(super) fn read(keys: &Keys<'_>, spec: &Spec) -> Result<Option<Self>, ModelError> {
        let full_every = match spec.windows {
            Windows::None => return Ok(None),
            Windows::All => 0,
            Windows::Pattern { full_every, .. } => {
                keys.u32("attention.sliding_window_pattern")?.unwrap_or(full_every)
            }
        };
        let window_tokens = keys.u32("attention.sliding_window")?.filter(|&tokens| tokens > 0);
        Ok(window_tokens.map(|window_tokens| Self { window_tokens, full_every }))
    }
}

#[cfg(test)]
mod tests {
    use super::SlidingWindow;

    #[test]
    fn the_last_layer_of_each_group_sees_everything() {
        let slides = |full_every| -> Vec<bool> {
            let window = SlidingWindow { window_tokens: 512, full_every };
            (0..7).map(|layer| window.slides(layer)).collect()
        };
        assert_eq!(slides(6), [true, true, true, true, true, false, true]);
        assert_eq!(slides(2), [true, false, true, false, true, false, true]);
        assert_eq!(slides(1), [false; 7]);
        assert_eq!(slides(0), [true; 7]);
    }
}
