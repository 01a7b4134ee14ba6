//! The sticky activation slot (S5): one fixed place that is overwritten in place, and not even
//! that when nothing changed.

use decode_graph::Backend;
use gpu_slab::View;

use super::{Residency, ResidencyError};

/// Floats that the slot holds at least.
const MIN_ELEMS: u64 = 8192;

pub(super) struct Slot {
    view: View,
    content: Option<(u64, usize)>,
}

impl Slot {
    pub(super) fn view(&self) -> View {
        self.view
    }
}

/// What writing the slot did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StickyWrite {
    /// Where the values are.
    pub view: View,
    /// False when the same values were there already.
    pub copied: bool,
}

impl<B: Backend> Residency<B> {
    /// Puts activations into the sticky slot. Values that do not fit get a new, larger slot; the
    /// old one stays where graphs may still point at it.
    pub fn write_sticky(&mut self, values: &[f32]) -> Result<StickyWrite, ResidencyError> {
        let bytes: &[u8] = bytemuck::cast_slice(values);
        let content = (xxhash_rust::xxh3::xxh3_64(bytes), values.len());
        let fits = |slot: &Slot| slot.view.len_bytes() >= bytes.len() as u64;
        if !self.sticky.as_ref().is_some_and(fits) {
            let elems = (values.len() as u64).max(MIN_ELEMS);
            let view = self.slab.allocate_zeroed("sticky activations", elems * 4)?;
            self.sticky = Some(Slot { view, content: None });
        }
        let Some(slot) = &mut self.sticky else {
            return Err(ResidencyError::Missing("sticky slot"));
        };
        let used = slot.view.slice(0..bytes.len() as u64)?;
        let copied = slot.content != Some(content);
        if copied {
            self.slab.write_view(slot.view, 0, bytes)?;
            slot.content = Some(content);
        }
        Ok(StickyWrite { view: used, copied })
    }
}
