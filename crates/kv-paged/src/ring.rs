//! A sequence longer than the context keeps its last positions: the token slots are a ring.

use core::ops::RangeInclusive;

/// The ring of `max_context` token slots: position `p` lies in slot `p % max_context`, so each
/// new position overwrites the one `max_context` before it.
///
/// ```
/// let ring = kv_paged::PagedKvConfig::new(1, 1, 64, 512)?.ring();
/// assert_eq!(ring.slot(700), 188);
/// assert_eq!(ring.live_positions(700), 189..=700);
/// # Ok::<(), kv_paged::KvError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KvRing {
    max_context_tokens: u32,
}

impl KvRing {
    /// `max_context_tokens` comes from a validated configuration and is not zero.
    pub(crate) const fn of(max_context_tokens: u32) -> Self {
        Self { max_context_tokens }
    }

    /// Slots of the ring.
    pub const fn max_context_tokens(&self) -> u32 {
        self.max_context_tokens
    }

    /// The slot that a position is written to.
    pub const fn slot(&self, position: u32) -> u32 {
        position % self.max_context_tokens
    }

    /// How many positions are kept once `position` has been written.
    pub const fn live_tokens(&self, position: u32) -> u32 {
        if position < self.max_context_tokens { position + 1 } else { self.max_context_tokens }
    }

    /// The positions that are kept once `position` has been written, the oldest first.
    pub const fn live_positions(&self, position: u32) -> RangeInclusive<u32> {
        position - (self.live_tokens(position) - 1)..=position
    }

    /// The position that `slot` holds once `position` has been written; `None` for a slot that
    /// nothing was written to, or that does not exist.
    pub const fn position_of_slot(&self, slot: u32, position: u32) -> Option<u32> {
        if slot >= self.max_context_tokens {
            return None;
        }
        let newest = self.slot(position);
        let age = if slot <= newest {
            newest - slot
        } else {
            // Written on the lap before, if there was one.
            newest + (self.max_context_tokens - slot)
        };
        position.checked_sub(age)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::{vec, vec::Vec};

    #[test]
    fn the_ring_equals_writing_positions_one_by_one() {
        for max_context in 1..9 {
            let ring = KvRing::of(max_context);
            let mut slots = vec![None; max_context as usize];
            for position in 0..40 {
                slots[ring.slot(position) as usize] = Some(position);
                for (slot, held) in slots.iter().enumerate() {
                    assert_eq!(ring.position_of_slot(slot as u32, position), *held);
                }
                let mut live: Vec<u32> = slots.iter().flatten().copied().collect();
                live.sort_unstable();
                assert_eq!(live, ring.live_positions(position).collect::<Vec<_>>());
                assert_eq!(live.len() as u32, ring.live_tokens(position));
            }
            assert_eq!(ring.position_of_slot(max_context, 39), None);
        }
    }

    #[test]
    fn the_last_position_of_all_does_not_overflow() {
        let ring = KvRing::of(u32::MAX);
        assert_eq!(ring.live_tokens(u32::MAX), u32::MAX);
        assert_eq!(ring.live_positions(u32::MAX), 1..=u32::MAX);
        assert_eq!(ring.position_of_slot(1, u32::MAX), Some(1));
        assert_eq!(KvRing::of(1).live_positions(u32::MAX), u32::MAX..=u32::MAX);
    }
}
