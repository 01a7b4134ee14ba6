//! What a model may need and the decode step does not express.

use super::{Activation, Model};

impl Model {
    /// Something that the model uses and the decode step cannot compute; `None` when it can
    /// compute everything.
    pub fn unsupported_by_step(&self) -> Option<&'static str> {
        let config = &self.config;
        if self.layers.iter().any(|l| l.post_attn_norm.is_some() || l.post_ffn_norm.is_some()) {
            Some("norms after attention and after the feed-forward part")
        } else if config.activation != Activation::SwiGlu {
            Some("another activation than SwiGLU")
        } else if config.local_rope.is_some() {
            Some("two rope bases")
        } else if config.window.is_some() {
            Some("a sliding window of attention")
        } else if self.has_joined_matrices() {
            Some("tensors that hold several matrices")
        } else if self.long_rope.is_some() {
            Some("rope factors that depend on the context")
        } else {
            None
        }
    }

    /// Whether a tensor is read as more than one matrix.
    fn has_joined_matrices(&self) -> bool {
        self.layers.iter().flat_map(|layer| layer.matrices()).any(|matrix| matrix.first_row > 0)
    }
}
